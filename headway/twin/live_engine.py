"""A scenario's engines in real time: requests come from outside, tokens go out as they come.

The engine and the watches on its cores are one file: both change the streams.
"""

from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import inf, nextafter
from zlib import crc32

import simpy

from headway.twin.asked import Asked, workload_of
from headway.twin.clock import RealTimeClock
from headway.twin.kv_events import Publisher
from simulator.build.assemble_fleet import make_fleet
from simulator.cluster.cluster_config import ClusterConfig
from simulator.core.alarm import Alarm
from simulator.core.log import REJECTED, UNFINISHED, Log
from simulator.core.request import Request, Step
from simulator.engine.core import EngineCore, ExecutedStep, InFlight, ScheduledStep
from simulator.engine.replica import Replica
from simulator.policies.predictor import FixedPredictions, make_predictor
from simulator.results.record import split_log
from simulator.scenario.resolve import fleet_spec, resolve_groups
from simulator.scenario.scenario import Scenario
from simulator.schedulers.interface import SchedulerInterface
from simulator.simulation.result import Result
from simulator.util.errors import HeadwayError

Act = Callable[[Request], None]
Gaps = dict[float, int]
"""How many streams got one more token, by when each got the one before, s."""
KEPT = 100_000  # requests that have ended and that the report is about, at least

ABORT = "abort"
LOST = "lost"
"""Ends of requests beside those of the log: the client has hung up; the replica was killed."""


@dataclass(slots=True, eq=False)
class Stream:
    """A request that somebody waits for."""

    request: Request
    asked: Asked
    on_tokens: Callable[[int, int], None]  # new ones, all so far
    on_end: Callable[[Request, str], None]  # with stop, length, rejected or lost
    core: EngineCore | None = None  # None: no engine has it
    lead: float = 0.0  # s that it took to read it
    ahead: float = 0.0  # s by which its tokens are sent before their time
    sent: int = 0  # tokens that have gone out
    told: int = 0  # tokens whose time has come
    over: bool = False  # it has ended, or its client has hung up
    first: float = -1.0  # simulated s, when the first one did
    last: float = -1.0  # and the last one


class LiveEngine:
    """A scenario's engine, or its cluster, on a clock that goes with the wall's.

    `on_tokens` is called with each stream that has got tokens, `on_end` with each that ends. All
    replicas start `startup_delay` s from now.
    """

    def __init__(
        self, scenario: Scenario, speed: float = 1.0, *, startup_delay: float = 0.0
    ) -> None:
        alone = scenario.model_copy(update={"cluster": ClusterConfig(replicas=1)})
        served = alone if scenario.cluster is None else scenario
        if scenario.engine.pipeline_parallel_size > 1:
            raise HeadwayError("engine.pipeline_parallel_size: stages cannot be served yet")
        self.scenario = scenario
        self.env = env = simpy.Environment()
        self.specs = resolve_groups(scenario)
        self.spec = next(iter(self.specs.values()))
        self.sent: dict[int, float] = {}  # s, by id: what a cluster's autoscaler sees of clients
        self.done = 0
        self._sessions: dict[int, int] = {}  # by id, of those that have not ended
        self._build_fleet(served, startup_delay)
        self.block_size = self.cores[0].scheduler.blocks.block_size  # tokens
        self.clock = RealTimeClock(env, speed)
        self.streams: dict[int, Stream] = {}  # by id
        self.on_tokens: Callable[[Stream, int, float], None] = _ignore
        self.on_gaps: Callable[[EngineCore, Gaps, float], None] = _ignore
        self.on_end: Callable[[Stream, str], None] = _ignore
        self.on_step: Callable[[EngineCore, Step], None] = _ignore
        self.kv_events: Mapping[EngineCore, Publisher] = {}
        self.next_id = 0  # of the request that is submitted next
        self._first = 0  # id of the first request in `asked`
        self._asked: list[Asked] = []
        self._stamp = -1.0
        self._predictor = make_predictor(scenario.predictor, workload_of([]), scenario.seed)
        self.gauges: dict[EngineCore, Mapping[str, float]] = {core: {} for core in self.cores}
        """vLLM's by name, as of the end of a step, when it makes its statistics.

        Who has come during the step waits in front of the scheduler, and does not count as yet.
        """
        self._watches = {core: _Watch(self, core) for core in self.cores}

    def _build_fleet(self, scenario: Scenario, startup_delay: float) -> None:
        from simulator.simulation.cluster import add_replicas, connect_client

        if scenario.cluster is not None and scenario.cluster.kv_transfer is not None:
            raise HeadwayError("cluster.kv_transfer: prefill and decode apart cannot be served yet")
        specs = resolve_groups(scenario)
        fleet = make_fleet(self.env, fleet_spec(scenario), specs, self._sessions)
        record, life = add_replicas(
            fleet, scenario, specs, True, leap=False, startup_delay=startup_delay
        )

        def connect(submit: Act, cancel: Act) -> "LiveEngine":
            self._submit: Act = submit
            self._cancel: Act = cancel
            return self

        connect_client(fleet, scenario, record, life, connect)  # type: ignore[type-var]
        life.done = lambda: False
        self.cluster = None if self.scenario.cluster is None else record
        self.is_open: Callable[[], bool] = lambda: bool(fleet.open)
        """Whether there is a replica that takes requests."""
        self.fleet, self.life = fleet, life
        self.cores: list[EngineCore] = fleet.cores

    def _predict(self, request: Request, asked: Asked) -> int | None:
        """Say how long an answer will be, as the scenario's predictor does; None: it has none."""
        predictor = self._predictor
        if isinstance(predictor, FixedPredictions):  # made of true lengths: of this one's
            seed = self.scenario.seed + request.id
            predictor = make_predictor(self.scenario.predictor, workload_of([asked]), seed)
            assert isinstance(predictor, FixedPredictions)
            return int(predictor.hints[0])
        return None if predictor is None else predictor.predict(request)

    def submit(
        self,
        asked: Asked,
        on_tokens: Callable[[int, int], None],
        on_end: Callable[[Request, str], None],
        due: float | None = None,
    ) -> Stream:
        """Take in a request, now.

        One that should have come at `due`, s, gets its tokens as much before their time as it is
        late; and as this process usually is, in seeing a request and once more in sending a token.
        """
        request, now, door = self._take_in(asked), asked.arrival, self.cores[0].door
        if door is not None:  # which `refuses` has asked
            door.enter(request)
        self.sent[request.id] = now
        self._sessions[request.id] = crc32(asked.client.encode()) if asked.client else -1
        stream = self.streams[request.id] = Stream(request, asked, on_tokens, on_end)
        if due is not None:
            stream.lead = max(now - due, 0.0)
            stream.ahead = stream.lead + 2 * self.clock.usual_delay()
        self._submit(request)
        self.clock.catch_up()
        return stream

    def _take_in(self, asked: Asked) -> Request:
        """Make a request of what is asked for, now."""
        self.clock.advance()
        asked.arrival = now = self.env.now
        self._stamp = arrival = now if now > self._stamp else nextafter(self._stamp, inf)
        lengths = asked.prompt_tokens, asked.output_tokens
        request = Request(self.next_id, arrival, *lengths, client=asked.client)
        request.priority, request.segments = asked.priority, asked.segments
        request.max_tokens = asked.max_tokens
        hint = self._predict(request, asked) if asked.hint is None else asked.hint
        most = inf if asked.max_tokens is None else asked.max_tokens
        asked.hint = request.hint = None if hint is None else int(min(hint, most))
        self.next_id += 1
        self._asked.append(asked)
        return request

    def refuses(self, asked: Asked, count: int) -> str:
        """Return the limit of the queue that keeps a request for `count` answers out; "": none.

        One that is kept out is written down, as the first of its answers.
        """
        self.clock.advance()
        core = self.cores[0]
        why = "" if core.door is None else core.door.refuses(self.env.now, count)
        if why:
            core.log.record_unserved(self._take_in(asked).id, -1.0, REJECTED)
            self._prune()
        return why

    def cancel(self, stream: Stream) -> None:
        """Let a request go whose client has hung up; where an engine cannot, it goes on unheard."""
        request = stream.request
        if self.streams.get(request.id) is not stream:
            return
        stream.on_tokens = stream.on_end = _ignore
        if not self.cores[0].scheduler.traits.cancels:
            return
        self.clock.advance()
        if self.streams.pop(request.id, None) is not None:
            self.tell(stream, stream.sent, self.env.now)  # those that went out ahead
            self.moved(stream, None)
            stream.asked.cancel_after = self.env.now - stream.asked.arrival
            self._cancel(request)
            if stream.core is not None:  # else none has seen it
                stream.core.log.record(request, UNFINISHED, stream.told, stream.first)
            self._forget(request)
            self.on_end(stream, ABORT)

    def finished(self, request: Request) -> None:
        """Hear that a request has ended or was rejected."""
        self._forget(request)
        stream = self.streams.pop(request.id, None)
        if stream is None:
            return
        self.moved(stream, None)
        reason = "rejected"
        if request.finish >= 0:
            self.tell(stream, request.generated, self.env.now)
            reason = "stop" if request.generated == request.output_tokens else "length"
            if self._predictor is not None:
                self._predictor.observe(request)
        self.on_end(stream, reason)
        stream.on_end(request, reason)
        self._prune()

    def moved(self, stream: Stream, core: EngineCore | None) -> None:
        """Note which core has a request from now on; None: it is over."""
        if stream.core is not None:
            self._watches[stream.core].here.pop(stream.request.id, None)
        if core is None:
            stream.over = True
        else:
            stream.core = core
            self._watches[core].here[stream.request.id] = stream

    def _forget(self, request: Request) -> None:
        self.done += 1
        self.sent.pop(request.id, None)
        self._sessions.pop(request.id, None)

    def tell(self, stream: Stream, count: int, now: float, gaps: Gaps | None = None) -> None:
        """Tell a client of its tokens, `count` in all by `now`, s.

        With `gaps` who gets one more token is counted there, by when it got the one before.
        """
        new = count - stream.told
        if new <= 0:
            return
        if gaps is not None and new == 1 and stream.told:
            gaps[stream.last] = gaps.get(stream.last, 0) + 1
        else:
            self.on_tokens(stream, new, now)
        if stream.first < 0:
            stream.first = now
        stream.told, stream.last = count, now
        self.send(stream, count, now)

    def send(self, stream: Stream, count: int, due: float) -> None:
        """Send a client its tokens up to `count`, whose time is `due`, s, unless they are out."""
        if (new := count - stream.sent) > 0:
            if not stream.sent:
                self.clock.note_delay(due - stream.lead, first=True)
            stream.sent = count
            stream.on_tokens(new, count)

    def _prune(self) -> None:
        """Forget requests and steps, where there are twice as many as are kept."""
        if self.next_id - self._first < 2 * KEPT:
            return
        new = min(self.streams, default=self.next_id)
        if new - self._first < KEPT:
            return
        before = min((one.asked.arrival for one in self.streams.values()), default=self.env.now)
        for core in self.cores:
            split_log(core.log, range(self._first, new), before, {}, last=False)
        del self._asked[: new - self._first]
        self._first = new

    def result(self) -> Result:
        """Return the run so far; requests that have not ended count as unfinished."""
        self.clock.advance()
        asked = workload_of(self._asked)
        logs = [self._copy(core) for core in self.cores]
        known = {int(number) for log in logs for number in log.requests["id"]}
        for number in {*range(len(asked))} - known:
            logs[0].record_unserved(number, -1.0, UNFINISHED)
        sent = asked.arrival.copy()
        result = Result(self.scenario, asked, sent, logs, self.specs, interrupted=True)
        result.cluster = self.cluster
        return result

    def answers(self) -> list[dict[str, object]]:
        """Return the id of each request in `result`, and that of its answer."""
        return [{"id": number, "answer": one.answer} for number, one in enumerate(self._asked)]

    def _copy(self, core: EngineCore) -> Log:
        """Return a core's log as it stands, with ids from 0 on."""
        log = deepcopy(core.log)
        if self._first == 0:
            return log
        return split_log(log, range(self._first, self.next_id), 0.0, {}, last=True)


def replica_scenarios(scenario: Scenario) -> list[Scenario]:
    """Return each replica of a cluster as a scenario of its own, for a gateway that is not ours."""
    if (cluster := scenario.cluster) is None:
        raise HeadwayError("--replica-ports: the scenario has no cluster")
    together = cluster.model_fields_set - {"router", "replicas", "groups"}
    if given := sorted(key for key in together if getattr(cluster, key) is not None):
        raise HeadwayError(
            f"--replica-ports: cluster.{given[0]} acts on several replicas together: serve them "
            "behind one port, or leave it out"
        )
    return [
        scenario.of_group(name).model_copy(update={"cluster": ClusterConfig(replicas=1)})
        for name, group in cluster.replica_groups.items()
        for _ in range(group.replicas)
    ]


class _Watch:
    """Sees what a core's steps bring, and tells the streams."""

    def __init__(self, engine: LiveEngine, core: EngineCore) -> None:
        self.engine, self.core = engine, core
        self.here: dict[int, Stream] = {}
        self.in_flight: deque[list[tuple[Stream, int]]] = deque()
        self.waiting = 0  # requests, after the last schedule
        self._core_submit, self._core_commit = core.submit, core.commit
        self._core_schedule, self._core_restart = core.schedule, core.restart
        # A core of a fleet is made by the fleet: it gets its ears afterwards.
        for name in ("submit", "commit", "schedule", "restart"):
            setattr(core, name, getattr(self, name))
        if isinstance(core, Replica):  # which schedules as it begins a step
            self._core_begin = core.begin
            core.begin = self.begin  # type: ignore[method-assign]

    def submit(self, request: Request) -> None:
        stream = self.engine.streams.get(request.id)
        if stream is not None:
            self.engine.moved(stream, self.core)
        self._core_submit(request)

    def schedule(self, now: float) -> ScheduledStep | None:
        """Asynchronous: tokens are counted as their step is decided, and come with its end."""
        scheduled = self._core_schedule(now)
        self._scheduled(scheduled is not None, None)
        return scheduled

    def begin(self, now: float, start: float) -> InFlight | None:
        begun = self._core_begin(now, start)
        self._scheduled(begun is not None, None if begun is None else begun.ends[-1])
        return begun

    def _scheduled(self, works: bool, end: float | None) -> None:
        self.waiting = len(self.core.scheduler.waiting)
        if works and self._late:
            self.in_flight.append(self._counts())
            if end is not None and not self.core.scheduler.delivers_together:
                self._send_ahead(self.in_flight[-1], end)

    def _send_ahead(self, counts: list[tuple[Stream, int]], end: float) -> None:
        """Send the tokens of a step that ends at `end`, s, before that, to a tenth of a ms."""
        groups: dict[int, list[tuple[Stream, int]]] = {}
        for stream, count in counts:
            if stream.ahead and count > stream.sent:
                groups.setdefault(round(stream.ahead * 1e4), []).append((stream, count))
        env = self.engine.env
        for ahead, group in groups.items():
            Alarm(env, partial(self._send, group, end)).set(max(end - ahead / 1e4, env.now))

    def _send(self, group: list[tuple[Stream, int]], end: float, _: object) -> None:
        for stream, count in group:
            if not stream.over:
                self.engine.send(stream, count, end)

    def commit(
        self, scheduled: ExecutedStep, decided: float, start: float, ends: list[float]
    ) -> None:
        late = self.in_flight.popleft() if self._late else None
        self._core_commit(scheduled, decided, start, ends)
        if not self.core.scheduler.delivers_together:
            self._tell(self._counts() if late is None else late, ends[-1])
        stats, usable = self.core.stats(), self.core.scheduler.blocks.usable
        self.engine.gauges[self.core] = {
            "num_requests_running": stats.running,
            "num_requests_waiting": self.waiting,
            "kv_cache_usage_perc": stats.blocks_used / usable,
        }
        self.engine.on_step(self.core, scheduled[0])
        if self.core in self.engine.kv_events:
            self.engine.kv_events[self.core].publish()
        self.engine.clock.note_delay(ends[-1])

    def restart(self, scheduler: SchedulerInterface) -> list[Request]:
        self.in_flight.clear()
        lost = self._core_restart(scheduler)
        if self.core in self.engine.kv_events:
            self.engine.kv_events[self.core].restarted(self.core.scheduler.blocks)
        return lost

    def _tell(self, counts: list[tuple[Stream, int]], now: float) -> None:
        """Tell all streams of their tokens by `now`, s."""
        gaps: Gaps = {}
        for stream, count in counts:
            if not stream.over:
                self.engine.tell(stream, count, now, gaps)
        if gaps:
            self.engine.on_gaps(self.core, gaps, now)

    @property
    def _late(self) -> bool:
        """Whether tokens are counted a step before they come."""
        traits = self.core.scheduler.traits
        return traits.overlaps and traits.counts_ahead

    def _counts(self) -> list[tuple[Stream, int]]:
        """Count the tokens of all whose streams are still here."""
        generated = self.core.scheduler.decodes.generated
        return [(stream, generated(stream.request)) for stream in self.here.values()]


def _ignore(*_: object) -> None:
    """Nobody listens any more."""
