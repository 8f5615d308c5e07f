"""Several engines behind a router, on one SimPy clock.

What happens at one instant happens in an order that no leap can change: first everything that
comes from outside, then all steps that end at that instant (by the replica's number), then the
client hears of the requests that ended with them, then the next steps begin. So stepwise and
leaping runs agree to the last bit here, too.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from math import inf, nextafter
from typing import Protocol

import simpy

from simulator.cluster.data_parallel import Balancer, DataParallelServer, LockStepLoop, Rank
from simulator.cluster.routers import Router, Target
from simulator.core.alarm import Alarm
from simulator.core.executor import Executor
from simulator.core.log import Log
from simulator.core.request import Request
from simulator.costs.cost_model import JointStep
from simulator.engine.core import EngineCore
from simulator.engine.loop import EngineLoop, LoopTimer
from simulator.engine.replica import Replica, make_replica
from simulator.schedulers.interface import SchedulerInterface

COUNTERS = (
    "refused_tries",
    "timed_out_tries",
    "retries",
    "failures",
    "tries_lost_in_failures",
    "scalings",
)
"""What a fleet, its clients and its autoscaler count."""


class FleetTimer:
    """Wakes one loop of a fleet."""

    def __init__(self, clock: "FleetClock", number: int, loop: EngineLoop) -> None:
        self.loop = loop
        self.when = -1.0  # -1: it is not set
        self._clock = clock
        self.number = number

    def set(self, when: float) -> None:
        """Wake the loop at `when`, and at no other time."""
        self.when = when
        self._clock.wake(when, self)

    def cancel(self) -> None:
        """Do not wake the loop."""
        self.when = -1.0


class FleetClock:
    """Lets loops go on when they are due: one timer for the whole fleet.

    `deliver()` is called when all steps that end at an instant have ended, before others begin.
    """

    def __init__(self, env: simpy.Environment, deliver: Callable[[], None]) -> None:
        self.env = env
        self.timers: list[FleetTimer] = []
        self.ending = False  # steps end now; `deliver` has not been called
        self.settled = -1.0  # the last instant whose steps have ended
        self.on_settled: Callable[[float], None] | None = None  # all steps of an instant have begun
        self._deliver = deliver
        self._heap: list[tuple[float, int, FleetTimer]] = []  # when timers were set to, by number
        self._timer = LoopTimer(self)

    def timer(self, loop: EngineLoop) -> FleetTimer:
        """Make the timer of another loop."""
        timer = FleetTimer(self, len(self.timers), loop)
        self.timers.append(timer)
        return timer

    def wake(self, when: float, timer: FleetTimer) -> None:
        """Come off at `when` for a timer."""
        heappush(self._heap, (when, timer.number, timer))
        if not 0.0 <= self._timer.when <= when:
            self._timer.set(when)

    def turn(self, now: float) -> float:
        """Let loops go on that are due; say when the next timer is, -1: none is set."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            when, _, timer = heappop(heap)
            if timer.when != when:  # it has been put off
                continue
            timer.when = -1.0
            self.ending = True
            if heap and heap[0][0] <= now:
                self._go_on([timer, *self._due(now)], now)
                continue
            timer.when = when = timer.loop.turn(now, self._deliver)
            if when >= 0.0:
                heappush(heap, (when, timer.number, timer))
        if self.on_settled is not None:
            self.on_settled(now)
        self.settled = now
        while heap:
            when, _, timer = heap[0]
            if timer.when == when:
                return when
            heappop(heap)
        return -1.0

    def _due(self, now: float) -> Iterator[FleetTimer]:
        """Take out the timers that are due, by number."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            when, _, timer = heappop(heap)
            if timer.when == when:
                timer.when = -1.0
                yield timer

    def _go_on(self, due: Sequence[FleetTimer], now: float) -> None:
        """Let several loops go on at an instant: no step begins before all have ended."""
        for timer in due:
            timer.loop.end_steps(now)
        self._deliver()
        for timer in due:
            timer.when = when = timer.loop.begin_steps(now)
            if when >= 0.0:
                heappush(self._heap, (when, timer.number, timer))


class Sessions(Protocol):
    """Each request's conversation by its id, -1: none."""

    def __getitem__(self, id: int, /) -> int:
        """Return that of a request."""


class Fleet:
    """Replicas behind a router.

    `sessions` gives each request's conversation by its id, -1: none. `on_finish(request)` is
    called when a request has ended or is rejected; it may submit others. `on_idle(target)` is
    called when the last request of a replica has left it, or when it is closed without any.
    """

    def __init__(
        self,
        env: simpy.Environment,
        router: Router,
        sessions: Sessions | None = None,
    ) -> None:
        self.env = env
        self.router = router
        self.on_finish: Callable[[Request], None] | None = None
        self.on_idle: Callable[[Target], None] | None = None
        self.targets: list[Target] = []
        self.cores: list[EngineCore] = []  # by number
        self.engines: list[Replica | DataParallelServer] = []  # behind each target
        self.owners: list[Target] = []  # of each core
        self.open: dict[int, Target] = {}
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.sent_again: dict[int, float] = {}  # s, when a request was last sent once more
        self._sessions = sessions
        self._clock = FleetClock(env, self._deliver)
        self._ended: list[tuple[Target, Request]] = []  # since steps have begun to end
        self._at: dict[int, tuple[Request, Target | None]] = {}  # by id; None: it is held
        self._held: deque[Request] = deque()  # while no replica is open
        self._chosen = 0
        self._stamp = -1.0  # the last arrival at an engine, s

    @property
    def logs(self) -> list[Log]:
        """The facts, a log for each engine core."""
        return [core.log for core in self.cores]

    def add(
        self, group: str, scheduler: SchedulerInterface, executor: Executor, *, leap: bool = True
    ) -> Target:
        """Add a replica, which is not open yet."""
        replica = make_replica(self.env, scheduler, executor, leap=leap, timer=self._clock.timer)
        return self._target(group, replica, [replica])

    def add_server(
        self,
        name: str,
        schedulers: Sequence[SchedulerInterface],
        executor: Executor,
        balancer: Balancer,
        *,
        leap: bool = True,
        joint: JointStep | None = None,
    ) -> Target:
        """Add a replica of several data-parallel ranks, which is not open yet.

        With `joint` they go in lock-step.
        """
        env, timer = self.env, self._clock.timer
        loops: list[EngineLoop]
        if joint is None:
            loops = [make_replica(env, one, executor, leap=leap, timer=timer) for one in schedulers]
        else:
            cores = [Rank(env, one, executor, leap=leap) for one in schedulers]
            loops = [LockStepLoop(env, cores, joint, timer)]
        server = DataParallelServer(env, loops, balancer)
        return self._target(name, server, server.cores)

    def _target(
        self, group: str, engine: Replica | DataParallelServer, cores: Sequence[EngineCore]
    ) -> Target:
        caches = [core.scheduler.blocks for core in cores]
        usable = sum(blocks.usable for blocks in caches)
        target = Target(len(self.targets), group, caches[0].block_size, usable)
        engine.on_finish = partial(self._end, target)
        self.cores += cores
        self.targets.append(target)
        self.engines.append(engine)
        self.owners += [target] * len(cores)
        return target

    def open_target(self, target: Target) -> None:
        """Open a replica to the router; it gets what waited for one, too."""
        self.open[target.index] = target
        self.router.open(target)
        held, self._held = self._held, deque()
        for request in held:
            if self._at.get(request.id) == (request, None):
                self._submit(request)

    def close_target(self, target: Target) -> None:
        """Stop routing to a replica; it finishes what it has."""
        del self.open[target.index]
        self.router.close(target)
        self._notify_if_idle(target)

    def submit(self, request: Request) -> None:
        """Send a request to the replica that the router chooses."""
        now = self.env.now
        if self._clock.settled == now:  # the next steps have begun: it comes too late for them
            self._at[request.id] = request, None
            Alarm(self.env, partial(self._late, request)).set(nextafter(now, inf))
        else:
            self._submit(request)

    def submit_again(self, request: Request) -> None:
        """Send a request whose first try came to nothing; whatever that had computed is lost."""
        self.sent_again[request.id] = self.env.now
        self.submit(request.retry(self.env.now))

    def _late(self, request: Request, _: simpy.Event) -> None:
        if self._at.get(request.id) == (request, None):
            self._submit(request)

    def _submit(self, request: Request) -> None:
        if not self.open:
            self._hold(request)
            return
        self._stamp_arrival(request)
        target = self.router.choose(request, self._session(request))
        self._assign(request, target)
        self.engines[target.index].submit(request)

    def _hold(self, request: Request) -> None:
        """Keep a request until a replica opens."""
        self._at[request.id] = request, None
        self._held.append(request)

    def _stamp_arrival(self, request: Request) -> None:
        """See that no two requests come to the engines at the same time."""
        if request.arrival <= self._stamp:
            request.arrival = nextafter(self._stamp, inf)
        self._stamp = request.arrival

    def _session(self, request: Request) -> int:
        return -1 if self._sessions is None else self._sessions[request.id]

    def _assign(self, request: Request, target: Target) -> None:
        """Write down that a request goes to a replica."""
        self._at[request.id] = request, target
        target.outstanding += 1
        target.tokens += request.prompt_tokens
        target.models[request.model] = target.models.get(request.model, 0) + 1
        target.used += -(-request.prompt_tokens // target.block_size)
        target.order = self._chosen = self._chosen + 1
        self.router.changed(target)

    def cancel(self, id: int) -> Request:
        """Drop a request that has not ended, wherever it is; it leaves at the end of a step."""
        request, target = self._at.pop(id)
        if target is not None:
            self._forget(target, request)
            target.used = max(target.used - -(-request.prompt_tokens // target.block_size), 0)
            self.router.changed(target)
            self.engines[target.index].cancel(request)
            self._notify_if_idle(target)
        return request

    def hang_up(self, request: Request) -> None:
        """Let a request go whose client has hung up."""
        now = self.env.now
        if self._clock.settled == now:  # the next steps have begun, as in `submit`
            Alarm(self.env, partial(self._hang_up, request.id)).set(nextafter(now, inf))
        else:
            self.cancel(request.id)

    def _hang_up(self, id: int, _: simpy.Event) -> None:
        if id in self._at:
            self.cancel(id)

    def has_first_token(self, id: int) -> bool:
        """Say whether the first token of a request that has not ended is out."""
        request, target = self._at[id]
        if target is not None:
            self.engines[target.index].catch_up()
        return request.first_token >= 0

    def crash(self, target: Target, *schedulers: SchedulerInterface) -> int:
        """Let a replica fail; its requests go to others at once. Return how many.

        It comes back with the given schedulers, one for each rank.
        """
        if target.index in self.open:
            del self.open[target.index]
            self.router.close(target)
        lost = self.engines[target.index].crash(*schedulers)
        target.outstanding = target.tokens = target.used = 0
        target.models.clear()
        for request in lost:
            self.submit_again(request)
        return len(lost)

    def _deliver(self) -> None:
        """Tell the router of all that ended at this instant, then the client."""
        self._clock.ending = False
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        changed = {}
        for target, request in ended:
            self._leave(target, request)
            changed[target.index] = target
        for target in changed.values():
            target.used = self.engines[target.index].stats().blocks_used
            self.router.changed(target)
        for target, request in ended:
            self._notify(target, request)
        for target in changed.values():
            self._notify_if_idle(target)

    def _leave(self, target: Target, request: Request) -> None:
        """Strike out a request that has ended at a replica."""
        self._forget(target, request)
        del self._at[request.id]

    def _forget(self, target: Target, request: Request) -> None:
        target.outstanding -= 1
        target.tokens -= request.prompt_tokens
        left = target.models.pop(request.model) - 1
        if left:
            target.models[request.model] = left

    def _notify_if_idle(self, target: Target) -> None:
        if not target.outstanding and self.on_idle is not None:
            self.on_idle(target)

    def _end(self, target: Target, request: Request) -> None:
        """Take note that a request has ended at a replica, or was rejected there at once."""
        if self._clock.ending:
            self._ended.append((target, request))
            return
        self._leave(target, request)
        target.used -= -(-request.prompt_tokens // target.block_size)
        self.router.changed(target)
        self._notify(target, request)

    def _notify(self, target: Target, request: Request) -> None:
        """Tell whoever sent a request that it has ended at a replica."""
        if self.on_finish is not None:
            self.on_finish(request)

    @property
    def has_no_replica(self) -> bool:
        """Whether no replica is open to a new request."""
        return not self.open

    def abandon(self) -> None:
        """Write down the requests that replicas have, when a run is stopped before its end."""
        for timer in self._clock.timers:
            timer.loop.abandon()
