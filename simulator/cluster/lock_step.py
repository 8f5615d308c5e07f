"""Data-parallel ranks that step together, as those of a model with experts do in vLLM.

The experts of a layer are spread over the GPUs of all ranks, so every forward pass of one needs
all others: a step of the server takes as long as its slowest rank, and ranks without work run a
dummy batch meanwhile (`DPEngineCoreProc.run_busy_loop`, vLLM 0.33). A dummy batch of one token is
never the slowest. vLLM goes on with dummy batches for up to 32 steps after the last request, to
agree that there is none; here the server rests at once.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Generic, TypeVar

import simpy

from simulator.cluster.data_parallel import Ranks
from simulator.cluster.load_balancer import Balancer
from simulator.cluster.members import Clock, Member
from simulator.core.request import Request, Step
from simulator.costs.data_parallel import JointStep
from simulator.engine.replica import NAP
from simulator.schedulers.vllm.scheduler import LONGEST_LEAP, Scheduler


class Stepper(Member):
    """A rank whose steps begin and end with those of others."""

    planned: Step | None = None  # the step decided last; None: there was nothing to do

    def plan(self, now: float) -> int:
        """Schedule the next step; return its tokens, 0 where there is nothing to do."""
        scheduler = self.scheduler
        step = scheduler.schedule(now)
        self.planned = step if step.decodes or step.prefills else None
        if self.planned is None:
            self._unlogged += scheduler.preempted
            return 0
        self._row = scheduler.account(step)
        if self._unlogged:
            self._row = self._with_unlogged(self._row)
        return step.tokens

    def repeats(self) -> int:
        """Count how often the step, just planned, is sure to repeat if nobody arrives."""
        if self.planned is None:
            return 1 if self.scheduler.waiting or self.scheduler.running else LONGEST_LEAP
        return 1 if self.leaper is None else self.scheduler.horizon(self.planned)


class Rank(Stepper):
    """One that schedules between two steps."""

    group: "LockStep"

    def _arrived(self, may_board: bool) -> None:
        self.group.arrived(may_board or self._step is None)

    def depart(self, now: float, ends: list[float]) -> None:
        """Set out on the planned step, if there is one; the list is one for all ranks."""
        self._step, self._start, self._ends = self.planned, now, ends


R = TypeVar("R", bound=Stepper)


class Group(Ranks, Generic[R]):
    """Engine cores that step together; to the clock of the fleet they are one.

    `joint` makes a step of all out of what each does for itself.
    """

    clock: Clock
    number: int

    def __init__(
        self, env: simpy.Environment, members: Sequence[R], balancer: Balancer, joint: JointStep
    ) -> None:
        super().__init__(env, members, balancer)
        self._ranks = members
        self._joint = joint
        self._due = -1.0  # when it is to be woken
        self._set = False  # and whether it is
        self._napping = False

    def _sleep(self, when: float) -> None:
        self._set, self._due = True, when
        self.clock.wake(when, self.number)

    def awaits(self, when: float) -> bool:
        """Say whether it is to be woken then, and has not been put off."""
        return self._set and self._due == when

    def take(self, when: float) -> bool:
        """Say so, too, and count it as woken."""
        waits = self.awaits(when)
        if waits:
            self._set = False
        return waits

    def _times(self, tokens: Sequence[int], start: float) -> list[float]:
        """Say when the steps just planned end, and their repeats that are sure."""
        repeats = min(rank.repeats() for rank in self._ranks)
        steps = [rank.planned for rank in self._ranks if rank.planned is not None]
        seconds = self._joint.seconds(self._ranks[0].executor, steps, tokens, repeats)
        ends = list(accumulate(seconds, initial=start))
        del ends[0]
        return ends

    def _rest(self, now: float) -> None:
        """Wait for an arrival, or until what waits may start."""
        schedulers = [rank.scheduler for rank in self._ranks]
        due = [when for one in schedulers if (when := one.next_wakeup()) is not None]
        if due:
            self._sleep(max(min(due), now))
        elif any(one.preempted for one in schedulers):
            self._napping = True
            self._sleep(now + NAP)
        elif any(one.waiting for one in schedulers):
            raise RuntimeError(f"the schedulers do nothing though requests wait, at {now} s")
        else:
            self._due = -1.0


class LockStep(Group[Rank]):
    """Ranks that schedule between two steps."""

    def __init__(
        self, env: simpy.Environment, members: Sequence[Rank], balancer: Balancer, joint: JointStep
    ) -> None:
        super().__init__(env, members, balancer, joint)
        self._ends: list[float] = []  # of the step in flight and its repeats
        for rank in members:
            rank.group = self

    def arrived(self, may_board: bool) -> None:
        """Wake up for a new request, if it may change what comes next."""
        now, ends = self.env.now, self._ends
        if not ends:
            if self._due != now and not self._napping:
                self._sleep(now)
        elif may_board and len(ends) > 1:
            flying = bisect_left(ends, now)
            if flying < len(ends) - 1:
                del ends[flying + 1 :]
                self._sleep(ends[-1])

    def land(self, now: float) -> None:
        """End the step in flight, if there is one."""
        for rank in self._ranks:
            rank.land(now)
        self._ends = []

    def begin(self, now: float) -> None:
        """Let all ranks schedule their next steps and set out on them, or rest."""
        self._napping = False
        tokens = [rank.plan(now) for rank in self._ranks]
        if not any(tokens):
            self._rest(now)
            return
        self._ends = ends = self._times(tokens, now)
        for rank in self._ranks:
            rank.depart(now, ends)
        self._sleep(ends[-1])

    def crash(self, *schedulers: Scheduler) -> list[Request]:
        """Lose the step in flight and all requests, which are returned; go on with others."""
        lost = super().crash(*schedulers)
        self._ends, self._set, self._due, self._napping = [], False, -1.0, False
        return lost
