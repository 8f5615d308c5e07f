"""Several engines behind a router, on one SimPy clock.

What happens at one instant happens in an order that no leap can change: first everything that
comes from outside, then all steps that end at that instant (by the replica's number), then the
client hears of the requests that ended with them, then the next steps begin. So stepwise and
leaping runs agree to the last bit here, too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from math import inf, nextafter

import simpy

from simulator.alarm import LATE, Alarm
from simulator.async_replica import AsyncReplica
from simulator.executor import Executor
from simulator.log import Log
from simulator.replica import Replica
from simulator.request import Request
from simulator.routers import Router, Target
from simulator.scheduler import Scheduler


class Clock:
    """Wakes replicas, all that are due at one instant together: one alarm for the whole fleet."""

    def __init__(self, env: simpy.Environment, ring: Callable[[float], None]) -> None:
        self.env = env
        self.members: list[Member] = []
        self.settled = -1.0  # the last instant whose steps have ended
        self._ring = ring
        self._heap: list[tuple[float, int]] = []
        self._alarm = Alarm(env, self._awake, LATE)
        self._armed = inf  # when it comes off; -inf: it is coming off

    def wake(self, when: float, number: int) -> None:
        """Let a replica's next step begin at `when`."""
        heappush(self._heap, (when, number))
        if when < self._armed:
            if self._armed < inf:  # the old alarm will come off to no effect
                self._alarm = Alarm(self.env, self._awake, LATE)
            self._armed = when
            self._alarm.set(when)

    def due(self, now: float) -> list["Member"]:
        """Take out those that are due, by number."""
        heap, found = self._heap, []
        while heap and heap[0][0] <= now:
            when, number = heappop(heap)
            member = self.members[number]
            if member.take(when):
                found.append(member)
        return found

    def _awake(self, alarm: simpy.Event) -> None:
        if alarm is not self._alarm:
            return
        self._armed = -inf
        now = self.env.now
        self._ring(now)
        self.settled = now
        self._armed = inf
        heap, members = self._heap, self.members
        while heap and not members[heap[0][1]].awaits(heap[0][0]):
            heappop(heap)
        if heap:
            self._armed = heap[0][0]
            self._alarm.set(self._armed)


class Member(Replica):
    """A replica that its fleet's clock wakes."""

    clock: Clock
    number: int

    def _sleep(self, when: float) -> None:
        self._set = True
        self._due = when
        self.clock.wake(when, self.number)

    def awaits(self, when: float) -> bool:
        """Say whether it is to be woken then, and has not been put off."""
        return self._set and self._due == when

    def take(self, when: float) -> bool:
        """Say so, too, and count it as woken."""
        waits = self._set and self._due == when
        if waits:
            self._set = False
        return waits


class AsyncMember(Member, AsyncReplica):
    """The same of an engine that schedules asynchronously."""


class Fleet:
    """Replicas behind a router.

    `sessions` gives each request's conversation by its id, -1: none. `on_finish(request)` is
    called when a request has ended or is rejected; it may submit others.
    """

    def __init__(
        self, env: simpy.Environment, router: Router, sessions: Sequence[int] | None = None
    ) -> None:
        self.env = env
        self.router = router
        self.on_finish: Callable[[Request], None] | None = None
        self.targets: list[Target] = []
        self._sessions = sessions
        self._clock = Clock(env, self._ring)
        self._ended: list[tuple[Target, Request]] | None = None  # while steps end
        self._chosen = 0

    @property
    def members(self) -> list[Member]:
        """The replicas, by number."""
        return self._clock.members

    @property
    def logs(self) -> list[Log]:
        """The facts, a log for each replica."""
        return [member.log for member in self.members]

    def add(
        self, group: str, scheduler: Scheduler, executor: Executor, *, leap: bool = True
    ) -> Target:
        """Add a replica, which the router does not know yet."""
        kind = AsyncMember if scheduler.overlaps else Member
        member = kind(self.env, scheduler, executor, leap=leap)
        blocks = scheduler.blocks
        target = Target(len(self.targets), group, blocks.block_size, blocks.usable)
        member.clock, member.number = self._clock, target.index
        member.on_finish = partial(self._end, target)
        self.members.append(member)
        self.targets.append(target)
        return target

    def submit(self, request: Request) -> None:
        """Send a request to the replica that the router chooses."""
        now = self.env.now
        if self._clock.settled == now:  # the next steps have begun: it comes too late for them
            Alarm(self.env, partial(self._submit, request)).set(nextafter(now, inf))
        else:
            self._submit(request)

    def _submit(self, request: Request, _: simpy.Event | None = None) -> None:
        session = -1 if self._sessions is None else self._sessions[request.id]
        target = self.router.choose(request, session)
        target.outstanding += 1
        target.tokens += request.prompt_tokens
        target.used += -(-request.prompt_tokens // target.block_size)
        target.order = self._chosen = self._chosen + 1
        self.router.changed(target)
        self.members[target.index].submit(request)

    def _ring(self, now: float) -> None:
        """End the steps that are over, tell the client, begin the next."""
        clock = self._clock
        while due := clock.due(now):
            ended = self._ended = []
            for member in due:
                member.land(now)
            self._ended = None
            if ended:
                self._deliver(ended)
            for member in due:
                member.take(now)
                member.begin(now)

    def _deliver(self, ended: list[tuple[Target, Request]]) -> None:
        """Tell the router of all that ended at this instant, then the client."""
        for target, request in ended:
            target.outstanding -= 1
            target.tokens -= request.prompt_tokens
            blocks = self.members[target.index].scheduler.blocks
            target.used = blocks.usable - blocks.free
        for target in dict.fromkeys(target for target, _ in ended):
            self.router.changed(target)
        if self.on_finish is not None:
            for _, request in ended:
                self.on_finish(request)

    def _end(self, target: Target, request: Request) -> None:
        """Take note that a request has ended at a replica, or was rejected there at once."""
        if self._ended is not None:
            self._ended.append((target, request))
            return
        target.outstanding -= 1
        target.tokens -= request.prompt_tokens
        target.used -= -(-request.prompt_tokens // target.block_size)
        self.router.changed(target)
        if self.on_finish is not None:
            self.on_finish(request)

    def abandon(self) -> None:
        """Write down the requests that are still here, when a run is stopped before its end."""
        for member in self.members:
            member.abandon()
