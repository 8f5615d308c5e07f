"""Ranks in lock-step with two batches in flight each, as `AsyncReplica` has them.

Each rank decides its next batch when the joint step before it begins; where it has nothing to
compute then, it has a dummy batch in that step.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import simpy

from simulator.cluster.load_balancer import Balancer
from simulator.cluster.lock_step import Group, Stepper
from simulator.cluster.members import AsyncMember
from simulator.costs.data_parallel import JointStep
from simulator.engine.async_replica import Flight
from simulator.engine.replica import NAP


@dataclass(slots=True)
class Convoy:
    """A joint step on its way, or a stretch of equal ones, all but the first not yet scheduled."""

    start: float
    ends: list[float]  # also those of the ranks' flights
    settled: bool


class AsyncRank(AsyncMember, Stepper):
    """One whose batches are decided while those before them run; it does not fail."""

    group: "AsyncLockStep"

    def _arrived(self, may_board: bool) -> None:
        self.group.arrived(may_board or not self.flies(self.group.last))

    def flies(self, convoy: Convoy | None) -> bool:
        """Say whether it has work in a joint step."""
        return bool(convoy and self._flights and self._flights[-1].ends is convoy.ends)

    def depart(self, now: float, convoy: Convoy) -> None:
        """Put the planned batch, if there is one, behind those in flight."""
        if self.planned is not None:
            place = now, convoy.start, convoy.ends
            self._flights.append(Flight(self.planned, *place, self._row, convoy.settled))

    def settle(self, *, repeated: bool) -> None:
        """Take all steps of a leap as scheduled; `repeated`: the scheduler does not know it yet."""
        if self._flights and repeated:
            self._settle(self._flights[-1])
        elif self._flights:
            self._flights[-1].settled = True

    def _cut(self, flight: Flight) -> None:
        self.group.cut()

    def blocks_used(self, now: float) -> int:
        blocks, taken = self.scheduler.blocks, 0
        if self._flights and not self._flights[-1].settled:
            flight = self._flights[-1]
            ahead = 0 if self.group.waits(flight.start, now) else 1
            taken = self.scheduler.decodes.blocks(bisect_left(flight.ends, now) + ahead)
        return blocks.usable - blocks.free + taken


class AsyncLockStep(Group[AsyncRank]):
    """Ranks with two batches in flight each."""

    def __init__(
        self,
        env: simpy.Environment,
        members: Sequence[AsyncRank],
        balancer: Balancer,
        joint: JointStep,
    ) -> None:
        super().__init__(env, members, balancer, joint)
        self._convoys: deque[Convoy] = deque()  # two at most, the older one first
        self._starved = False  # the last step was empty
        for rank in members:
            rank.group = self

    @property
    def last(self) -> Convoy | None:
        """The joint step decided last, while it is on its way."""
        return self._convoys[-1] if self._convoys else None

    def waits(self, start: float, now: float) -> bool:
        """Say whether the younger of two joint steps has not begun."""
        return len(self._convoys) == 2 and start >= now

    def arrived(self, may_board: bool) -> None:
        """Wake up for a new request, if it may change what comes next."""
        if not self._convoys:
            if not self._set:
                self._sleep(self.env.now)
        elif may_board and not self._convoys[-1].settled:
            self.cut()

    def cut(self) -> None:
        """Shorten a leap to the steps that are scheduled by now."""
        now, convoy = self.env.now, self._convoys[-1]
        keep = 1 if self.waits(convoy.start, now) else bisect_left(convoy.ends, now) + 2
        if keep >= len(convoy.ends):
            return
        flying = [rank for rank in self._ranks if rank.flies(convoy)]
        del convoy.ends[keep:]
        if keep == 1:
            convoy.settled = True
            for rank in flying:
                rank.settle(repeated=False)
            self._sleep(self._convoys[0].ends[-1])
        else:
            self._sleep(convoy.ends[-2])

    def land(self, now: float) -> None:
        """Take in the outcome of the batches that are over."""
        for rank in self._ranks:
            rank.land(now)
        while self._convoys and self._convoys[0].ends[-1] <= now:
            self._convoys.popleft()

    def begin(self, now: float) -> None:
        """Schedule as many joint steps as may be in flight, or rest."""
        if self._convoys and not self._convoys[-1].settled:
            self._convoys[-1].settled = True
            for rank in self._ranks:
                rank.settle(repeated=True)
        schedulers = [rank.scheduler for rank in self._ranks]
        if self._starved and any(one.running or one.waiting for one in schedulers):
            self._starved = False
            self._sleep(now + NAP)
            return
        self._starved = False
        while len(self._convoys) < 2:
            tokens = [rank.plan(now) for rank in self._ranks]
            if not any(tokens):
                self._wait(now)
                return
            convoy = self._launch(tokens, now)
            if not convoy.settled:
                self._sleep(convoy.ends[-2])
                return
        self._sleep(self._convoys[0].ends[-1])

    def _launch(self, tokens: Sequence[int], now: float) -> Convoy:
        """Put a joint step behind the one in flight."""
        start = self._convoys[-1].ends[-1] if self._convoys else now
        ends = self._times(tokens, start)
        convoy = Convoy(start, ends, len(ends) == 1)
        self._convoys.append(convoy)
        for rank in self._ranks:
            rank.depart(now, convoy)
        return convoy

    def _wait(self, now: float) -> None:
        """Do what vLLM does when there is nothing to schedule."""
        if self._convoys:
            self._starved = True
            self._sleep(self._convoys[0].ends[-1])
        else:
            self._rest(now)
