"""Which replicas a fleet has at any time: starts, failures, repairs, and scaling by need."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, inf
from random import Random
from typing import Literal, get_args

import simpy

from simulator.cluster.config import AutoscalingConfig, FailuresConfig
from simulator.cluster.fleet import Fleet
from simulator.cluster.routers import Target
from simulator.core.alarm import Alarm
from simulator.core.request import Request
from simulator.schedulers.interface import SchedulerInterface
from simulator.util.errors import HeadwayError

State = Literal["off", "starting", "up", "draining", "down"]
STATES = get_args(State)
StateChange = tuple[float, int, State]
"""When (s) a replica, by its index, came to a state."""
FUTILE_FAILURES = 10_000  # in a row that lose requests, while not one ends; 100 a replica, if more
TOLERANCE = 0.1  # of the quotient of metric and target, as Kubernetes' HorizontalPodAutoscaler

NOT_SERVING = {
    "off": "is off: not ordered, or scaled away",
    "starting": "is still starting",
    "down": "is down already",
}
"""States in which an outage finds nothing to break."""


class Lifecycle:
    """The state of each replica, and the times in which it is paid for.

    A replica is paid from its order to its end, also while it starts, drains or is being repaired.
    `make` has a function per replica that makes the schedulers it comes back with, one for each
    rank; `done` says that there is nothing left to do.
    """

    def __init__(
        self,
        fleet: Fleet,
        make: Sequence[Callable[[], Sequence[SchedulerInterface]]],
        done: Callable[[], bool],
    ) -> None:
        self.fleet = fleet
        self.env = fleet.env
        self.done = done
        self.states: list[State] = ["off"] * len(make)
        self.paid: list[list[float]] = [[] for _ in make]  # start, end, start, ...
        self.changes: list[StateChange] = []
        self._make = make
        self._orders = [0] * len(make)
        fleet.on_idle = self._idle
        self.ended: Callable[[], int] = lambda: 0  # requests that have ended so far
        self._ended_before = 0  # by the last failure that lost requests
        self._futile = 0  # failures since that lost requests
        self.missed: list[str] = []  # outages that met no replica
        self.on_off: Callable[[], None] = lambda: None  # a replica has gone

    def order(self, target: Target, delay: float = 0.0) -> None:
        """Order a replica; it starts `delay` seconds later, without what its cache once had."""
        index = target.index
        if self.paid[index]:
            self.fleet.crash(target, *self._make[index]())
        self.paid[index].append(self.env.now)
        self._orders[index] += 1
        if delay:
            self._change(target, "starting")
            ready = partial(self._ready, target, self._orders[index])
            Alarm(self.env, ready).set(self.env.now + delay)
        else:
            self._open(target)

    def _change(self, target: Target, state: State) -> None:
        self.states[target.index] = state
        self.changes.append((self.env.now, target.index, state))

    def _ready(self, target: Target, order: int, _: simpy.Event) -> None:
        if self.states[target.index] == "starting" and self._orders[target.index] == order:
            self._open(target)

    def _open(self, target: Target) -> None:
        self._change(target, "up")
        self.fleet.open_target(target)

    def drain(self, target: Target) -> None:
        """Let a replica end what it has and then go; one that still starts goes at once."""
        if self.states[target.index] == "starting":
            self._off(target)
        else:
            self._change(target, "draining")
            self.fleet.close_target(target)

    def undrain(self, target: Target) -> None:
        """Take back a replica that drains."""
        self._open(target)

    def fail(self, target: Target) -> bool:
        """Let a replica fail, if it runs; say whether it did."""
        state = self.states[target.index]
        if state not in ("up", "draining"):
            return False
        self.fleet.counters["failures"] += 1
        self._change(target, "down")
        lost = self.fleet.crash(target, *self._make[target.index]())
        self.fleet.counters["tries_lost_in_failures"] += lost
        if lost:
            self._check_progress()
        if state == "draining":
            self._off(target)
        return True

    def _check_progress(self) -> None:
        """Raise HeadwayError if replicas have failed too often while not one request has ended."""
        ended = self.ended()
        if ended != self._ended_before:
            self._ended_before, self._futile = ended, 0
        self._futile += 1
        if self._futile >= max(FUTILE_FAILURES, 100 * len(self.states)):
            raise HeadwayError(
                f"cluster.failures.mtbf: {self._futile:,} failures in a row lost requests and not "
                f"one request has ended meanwhile, up to {self.env.now:,.0f} s: replicas fail "
                f"before any answer ends; {ended:,} requests have ended"
            )

    def repair(self, target: Target) -> None:
        """Let a replica that failed come back."""
        if self.states[target.index] == "down":
            self._open(target)

    def _idle(self, target: Target) -> None:
        if self.states[target.index] == "draining":
            self._off(target)

    def _off(self, target: Target) -> None:
        self._change(target, "off")
        self.paid[target.index].append(self.env.now)
        self.on_off()


class Failures:
    """Failures by chance, each replica with a stream of its own, and by a list."""

    def __init__(self, life: Lifecycle, block: FailuresConfig, seed: int) -> None:
        self.life, self.block = life, block
        self.env = life.env
        for target in life.fleet.targets:
            if block.mtbf is not None:
                self._wait(target, Random(f"failures {seed} {target.index}"))
        for number, outage in enumerate(block.outages):
            target = life.fleet.targets[outage.replica]
            begin = partial(self._begin, target, outage.duration, number)
            Alarm(self.env, begin).set(outage.start)

    def _wait(self, target: Target, random: Random) -> None:
        assert self.block.mtbf is not None
        when = self.env.now + random.expovariate(1.0 / self.block.mtbf)
        Alarm(self.env, partial(self._fail, target, random)).set(when)

    def _fail(self, target: Target, random: Random, _: simpy.Event) -> None:
        if self.life.done():
            return
        if not self.life.fail(target):
            self._wait(target, random)
            return
        when = self.env.now + random.expovariate(1.0 / self.block.mttr)
        Alarm(self.env, partial(self._repair, target, random)).set(when)

    def _repair(self, target: Target, random: Random, _: simpy.Event) -> None:
        self.life.repair(target)
        self._wait(target, random)

    def _begin(self, target: Target, duration: float | None, number: int, _: simpy.Event) -> None:
        if self.life.done():
            return
        state = self.life.states[target.index]
        if not self.life.fail(target):
            self.life.missed.append(
                f"cluster.failures.outages.{number}: has no effect: at {self.env.now:g} s replica "
                f"{target.index} {NOT_SERVING[state]}"
            )
        elif duration is not None:
            end = Alarm(self.env, lambda _: self.life.repair(target))
            end.set(self.env.now + duration)


class Autoscaler:
    """Orders and drains the replicas of one group by the quotient of a metric and its target.

    As Kubernetes' HorizontalPodAutoscaler: ceil(running x quotient), nothing within 10 %, at most
    twice as many or four more at a look, and less only after a cooldown. The quotient of an SLO is
    that of the shares that miss it. Who drains is taken back before others are ordered; the least
    busy drain first.
    """

    def __init__(
        self,
        life: Lifecycle,
        block: AutoscalingConfig,
        targets: Sequence[Target],
        *,
        sent: Callable[[int], float] = lambda id: 0.0,
        bounds: Callable[[Request], Mapping[str, float]] = lambda request: {},
        budget: "GpuBudget | None" = None,
    ) -> None:
        self.life, self.block, self.targets = life, block, targets
        self.quotient = 1.0  # of the last look
        self._budget = budget
        if budget is not None:
            budget.scalers.append(self)
        self._sent, self._bounds = sent, bounds
        self._changed = self._grown = -inf
        self._ended = self._kept = 0  # requests since the last look
        self._alarm = Alarm(life.env, self._look)
        self._alarm.set(life.env.now + block.interval)

    def observe(self, request: Request) -> None:
        """Take note of a request that has ended; one that was given up has missed the SLO."""
        self._ended += 1
        if request.state != "finished":
            return
        sent = self._sent(request.id)
        gaps = max(request.generated - 1, 1)
        times = {
            "ttft": request.first_token - sent,
            "tpot": (request.finish - request.first_token) / gaps,
            "e2el": request.finish - sent,
        }
        bounds = self._bounds(request)
        self._kept += all(times[name] * 1000.0 <= bound for name, bound in bounds.items())

    def _look(self, _: simpy.Event) -> None:
        if self.life.done():
            return
        now = self.life.env.now
        up, starting, draining = (self._in_state(state) for state in ("up", "starting", "draining"))
        have = len(up) + len(starting)
        if self._budget is not None:
            have += self._budget.pending.count(self)
        self.quotient = self._quotient(up, now)
        want = self._wanted(self.quotient, len(up), have)
        if want > have:
            self._grow(want - have, draining)
        elif want < have and now - self._changed >= self.block.cooldown:
            self._count()
            for target in self._idlest()[: have - want]:
                self.life.drain(target)
        self._alarm.set(now + self.block.interval)

    def _in_state(self, state: State) -> list[Target]:
        return [target for target in self.targets if self.life.states[target.index] == state]

    def _quotient(self, up: Sequence[Target], now: float) -> float:
        """Divide the metric by its target; 1 where there is none."""
        engines, metric = self.life.fleet.engines, self.block.metric
        ended, kept, self._ended, self._kept = self._ended, self._kept, 0, 0
        if not up:
            return 1.0
        if metric == "slo_attainment":
            return (1.0 - kept / ended) / (1.0 - self.block.target) if ended else 1.0
        stats = [engines[target.index].stats() for target in up]
        if metric == "queue_depth":
            value = sum(each.waiting for each in stats) / len(up)
        else:
            shares = (each.blocks_used / t.blocks for each, t in zip(stats, up, strict=True))
            value = sum(shares) / len(up)
        return value / self.block.target

    def _wanted(self, quotient: float, up: int, have: int) -> int:
        want = have
        if abs(quotient - 1.0) > TOLERANCE and up:
            want = min(ceil(up * quotient), max(2 * up, up + 4))
            # Those that start already will help; none is called off for what they do not do yet.
            want = max(want, have) if quotient > 1.0 else want
        return min(max(want, self.block.min_replicas), self.block.max_replicas)

    def _idlest(self) -> list[Target]:
        """List who may go: those that still start, then the least busy."""
        up = sorted(self._in_state("up"), key=lambda target: (target.outstanding, -target.index))
        return [*reversed(self._in_state("starting")), *up]

    def spared(self) -> Target | None:
        """Name a replica that the last look did not call for, unless some came of late."""
        up, mine = len(self._in_state("up")), self._idlest()
        late = self.life.env.now - self._grown < self.block.cooldown
        return None if late or self._wanted(self.quotient, up, len(mine)) >= len(mine) else mine[0]

    def order(self, delay: float) -> None:
        """Order one more replica."""
        self._changed = self._grown = self.life.env.now
        self.life.order(self._in_state("off")[0], delay)

    def _grow(self, count: int, draining: Sequence[Target]) -> None:
        self._count()
        if self._budget is not None:
            for _ in range(count):
                self._budget.order(self)
            return
        off = self._in_state("off")
        for target in draining[:count]:
            self.life.undrain(target)
        for target in off[: max(count - len(draining), 0)]:
            self.life.order(target, self.block.startup_delay)

    def _count(self) -> None:
        self.life.fleet.counters["scalings"] += 1
        self._changed = self.life.env.now


class GpuBudget:
    """The GPUs that all groups may have at once, as Dynamo's planner keeps (`max_gpu_budget`).

    A group that wants a replica beyond them waits for one that another group can spare: whose own
    metric, by its last look, calls for fewer, and which has not grown within its cooldown. Of
    several groups the one furthest below its target gives, one replica at a time, its least busy
    one. That drains, and when it has gone the other starts in its place `delay` s later: so
    replicas change their role. `gpus` has those of each replica, by its index.
    """

    def __init__(
        self, life: Lifecycle, most: int, gpus: Sequence[int], delay: float | None
    ) -> None:
        self.life, self.most, self.gpus, self.delay = life, most, gpus, delay
        self.scalers: list[Autoscaler] = []
        self.pending: list[Autoscaler] = []  # who waits for GPUs, first come first
        life.on_off = self._freed

    def _size(self, scaler: Autoscaler) -> int:
        return self.gpus[scaler.targets[0].index]

    def _held(self, *states: State) -> int:
        return sum(
            size for size, state in zip(self.gpus, self.life.states, strict=True) if state in states
        )

    def order(self, scaler: Autoscaler) -> None:
        """Order a replica if GPUs are free; else ask others to give theirs up, if they can."""
        off = self._held("off")
        free, size = self.most - (sum(self.gpus) - off), self._size(scaler)
        if not self.pending and free >= size:
            scaler.order(scaler.block.startup_delay)
            return
        if scaler in self.pending:
            return
        coming = free + self._held("draining") - sum(map(self._size, self.pending))
        leaving: list[Target] = []
        for other in sorted(self.scalers, key=lambda one: one.quotient):
            if other is not scaler and coming < size and (target := other.spared()) is not None:
                leaving.append(target)
                coming += self.gpus[target.index]
        if coming >= size:
            self.pending.append(scaler)
            for target in leaving:
                self.life.drain(target)

    def _freed(self) -> None:
        while self.pending:
            size = self._size(self.pending[0])
            if self.most - (sum(self.gpus) - self._held("off")) < size:
                return
            scaler = self.pending.pop(0)
            scaler.order(scaler.block.startup_delay if self.delay is None else self.delay)
