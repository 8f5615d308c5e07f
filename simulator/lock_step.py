"""Data-parallel ranks that step together, as those of a model with experts do in vLLM.

The experts of a layer are spread over the GPUs of all ranks, so every forward pass of one needs
all others: a step of the server takes as long as its slowest rank, and ranks without work run a
dummy batch meanwhile (`DPEngineCoreProc.run_busy_loop`, vLLM 0.33). A dummy batch of one token is
never the slowest. vLLM goes on with dummy batches for up to 32 steps after the last request, to
agree that there is none; here the server rests at once.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

import simpy

from simulator.balancer import Balancer
from simulator.members import Clock, Member
from simulator.ranks import Ranks
from simulator.replica import NAP
from simulator.request import Request
from simulator.scheduler import LONGEST_LEAP, Scheduler

Shared = Callable[[Sequence[int]], float]
"""Seconds of what all ranks compute together, by the tokens of each."""


def nothing(tokens: Sequence[int]) -> float:
    """Let ranks share no work: a step takes as long as that of the slowest."""
    return 0.0


class Rank(Member):
    """A rank whose steps begin and end with those of others."""

    group: "LockStep"

    def _arrived(self, may_board: bool) -> None:
        self.group.arrived(may_board or self._step is None)

    def plan(self, now: float) -> int:
        """Schedule the next step; return its tokens, 0 where there is nothing to do."""
        scheduler = self.scheduler
        step = scheduler.schedule(now)
        if not step.decodes and not step.prefills:
            self._unlogged += scheduler.preempted
            return 0
        self._step, self._start = step, now
        self._row = scheduler.account(step)
        if self._unlogged:
            self._row = self._with_unlogged(self._row)
        return step.tokens

    def repeats(self) -> int:
        """Count how often the step, just planned, is sure to repeat if nobody arrives."""
        if self._step is None:
            return 1 if self.scheduler.waiting or self.scheduler.running else LONGEST_LEAP
        return 1 if self.leaper is None else self.scheduler.horizon(self._step)

    def seconds(self, repeats: int) -> list[float]:
        """Give the seconds of the planned step and its repeats, as if it were alone."""
        assert self._step is not None
        if repeats == 1:
            return [self.executor.execute(self._step)]
        assert self.leaper is not None
        return self.leaper.leap(self._step, repeats)

    def depart(self, ends: list[float]) -> None:
        """Set out on the step; the list is one for all ranks."""
        self._ends = ends


class LockStep(Ranks):
    """Engine cores that step together; to the clock of the fleet they are one.

    `shared` gives the seconds of what they compute together, besides what each does for itself.
    """

    clock: Clock
    number: int

    def __init__(
        self,
        env: simpy.Environment,
        members: Sequence[Rank],
        balancer: Balancer,
        shared: Shared = nothing,
    ) -> None:
        super().__init__(env, members, balancer)
        self._ranks = members
        self._shared = shared
        self._ends: list[float] = []  # of the step in flight and its repeats
        self._due = -1.0  # when it is to be woken
        self._set = False  # and whether it is
        self._napping = False
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
        busy = [rank for rank, count in zip(self._ranks, tokens, strict=True) if count]
        repeats = min(rank.repeats() for rank in self._ranks)
        together = self._shared(tokens)
        slowest = map(max, zip(*(rank.seconds(repeats) for rank in busy), strict=True))
        ends = list(accumulate((own + together for own in slowest), initial=now))
        del ends[0]
        self._ends = ends
        for rank in busy:
            rank.depart(ends)
        self._sleep(ends[-1])

    def _rest(self, now: float) -> None:
        """Wait for an arrival, or until what waits may start."""
        schedulers = [rank.scheduler for rank in self._ranks]
        due = [when for one in schedulers if (when := one.wakes_at()) is not None]
        if due:
            self._sleep(max(min(due), now))
        elif any(one.preempted for one in schedulers):
            self._napping = True
            self._sleep(now + NAP)
        elif any(one.waiting for one in schedulers):
            raise RuntimeError(f"the schedulers do nothing though requests wait, at {now} s")
        else:
            self._due = -1.0

    def crash(self, *schedulers: Scheduler) -> list[Request]:
        """Lose the step in flight and all requests, which are returned; go on with others."""
        lost = super().crash(*schedulers)
        self._ends, self._set, self._due, self._napping = [], False, -1.0, False
        return lost
