"""The metrics of a run whose requests are not kept: sums and sketches over its parts.

The definitions are those of `metrics.py` and the functions mostly its own; what is a sum there
is added up here part by part, and percentiles come from sketches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.core.log import SHED, TIMEOUT, Log
from simulator.costs.cost_model import kv_block_bytes
from simulator.results.cluster_metrics import Figures, served_by
from simulator.results.gauges import (
    RequestSums,
    StepSums,
    copied,
    gauges,
    host_tier,
    queue_depth,
    share,
)
from simulator.results.itl import TokenTimes
from simulator.results.metrics import DRAFTED, PERCENTILES, acceptance, good, named
from simulator.results.steady_state import BATCHES, FEWEST, judged
from simulator.results.tables import RETRY, Floats, RequestTable, Tries, gather_requests, run_span
from simulator.results.utilization import needed_flops, read_bytes, shares_of_peaks
from simulator.util.quantile_sketch import ConcurrencyCounter, QuantileSketch
from simulator.workload.workload import Workload

if TYPE_CHECKING:
    from simulator.scenario.parts import Parts
    from simulator.scenario.scenario import Scenario

LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue_time")
CLIENT_SIDE = ("client_queue_time", "e2el_including_client_queue")

Values = dict[str, Any]


@dataclass(slots=True)
class Part:
    """Requests that have ended, and the logs of the replicas since the part before."""

    work: Workload
    sent: Floats
    logs: Sequence[Log]
    upto: Sequence[float]  # s, to which the queue of each replica is known
    tries: Tries | None = None


class Engines:
    """Sums over some replicas, all alike."""

    def __init__(self, scenario: "Scenario", parts: "Parts", numbers: Sequence[int]) -> None:
        self.scenario = scenario
        self.numbers = numbers
        self.served = served_by(scenario, parts)
        self.steps, self.requests = StepSums(), RequestSums()
        self.completed = self.tokens = 0
        self._flops = self._read = self._waited = 0.0
        self._most = 0

    def add(self, part: Part, table: RequestTable) -> None:
        """Add a part; the table is that of their own requests."""
        logs = [part.logs[number] for number in self.numbers]
        sums = StepSums()
        for number, log in zip(self.numbers, logs, strict=True):
            sums.add(log, self.scenario.engine.reserves)
            waited, most = queue_depth(log, part.upto[number])
            self._waited += waited
            self._most = max(self._most, most)
        self.steps.merge(sums)
        self.requests.add(table, logs)
        self._flops += needed_flops(self.served.model, table)
        self._read += read_bytes(self.served, logs, sums)
        self.completed += int(table.completed.sum())
        self.tokens += int(table.generated[table.completed].sum())

    def gauges(self, duration: float) -> Values:
        """Give gauges and utilizations."""
        count, seats = len(self.numbers), self.scenario.engine.max_num_seqs
        waited = self._waited, self._most
        found = gauges(
            *(self.steps, self.requests, waited),
            replicas=count,
            duration=duration,
            max_num_seqs=seats,
        )
        return found | shares_of_peaks(self.served, self._flops, self._read, count, duration)

    def figures(self, duration: float) -> Figures:
        """Give what a cluster's summary says of a group."""
        return Figures(self.gauges(duration), self.completed, self.tokens)


class Seconds:
    """Tokens in each second from the first request on; what is over is only a maximum."""

    def __init__(self) -> None:
        self.origin: float | None = None
        self.most = 0
        self._first = 0  # second that `_tokens` begins with
        self._tokens = np.zeros(0, np.int64)

    def add(self, table: RequestTable, times: Sequence[TokenTimes]) -> None:
        """Add the tokens of completed requests; those of later parts are sent later."""
        done = table.completed
        if not done.any():
            return
        begin = float(table.sent[done].min())
        self.origin = begin if self.origin is None else self.origin
        first = floor(begin - self.origin)
        over = min(first - self._first, len(self._tokens))
        if over > 0:
            self.most = max(self.most, int(self._tokens[:over].max()))
            self._tokens = self._tokens[over:]
        self._first = first
        start = self.origin + first
        size = max(ceil(float(table.finish[done].max()) - start) + 1, len(self._tokens))
        counts = np.zeros(size, np.int64)
        counts[: len(self._tokens)] = self._tokens
        for time in times:
            found = time.per_second(start, size)
            counts += found[:size]
        self._tokens = counts

    def result(self) -> int:
        """Give the most tokens in a second."""
        return max(self.most, int(self._tokens.max(initial=0)))


@dataclass
class Tally:
    """Everything that the summary of a streamed run needs."""

    scenario: "Scenario"
    total: int  # requests of the run
    groups: dict[str, Engines]
    whole: Engines  # all replicas, by the scenario's own engine
    start: float = inf
    end: float = 0.0
    failed: int = 0
    prompts: int = 0  # tokens of completed requests
    good: int = 0
    given_up: tuple[int, int] = (0, 0)
    latencies: dict[str, QuantileSketch] = field(default_factory=dict)
    crowd: ConcurrencyCounter = field(default_factory=ConcurrencyCounter)
    most_here: int = 0
    seconds: Seconds = field(default_factory=Seconds)
    drafted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFTED, 0))
    moved: Values = field(default_factory=dict)
    system: ConcurrencyCounter = field(default_factory=ConcurrencyCounter)
    levels: list[int] = field(default_factory=lambda: [0] * BATCHES)
    first: float = inf  # s, when the first request came, and the last
    latest: float = 0.0
    seen: int = 0

    def __post_init__(self) -> None:
        count = len(self.whole.numbers)
        self.ended, self.busy = np.zeros(count, np.int64), np.zeros(count)
        self.latencies = {name: QuantileSketch() for name in (*LATENCIES, *CLIENT_SIDE)}
        if self.scenario.cluster is not None and self.scenario.cluster.tries_again:
            self.latencies[RETRY] = QuantileSketch()

    def add(self, part: Part) -> None:
        """Take in a part of the run."""
        table = gather_requests(part.work, part.sent, part.logs, part.tries)
        done = table.completed
        if len(part.work):
            begin, end = run_span(table, part.logs)
            self.start, self.end = min(self.start, begin), max(self.end, end)
        ends = [float(log.steps["end"][-1]) for log in part.logs if log.step_rows]
        self.end = max([self.end, *ends])
        self.failed += int(((table.reason >= 0) & ~done).sum())
        self.prompts += int(part.work.prompt_tokens[done].sum())
        bounds = self.scenario.goodput.model_dump(exclude_none=True)
        self.good += good(table, done, bounds) if bounds else 0
        shed, late = (int((table.reason == reason).sum()) for reason in (SHED, TIMEOUT))
        self.given_up = self.given_up[0] + shed, self.given_up[1] + late
        self._add_logs(part, table)
        times = [TokenTimes(log, done) for log in part.logs]
        self._add_latencies(table, times)
        self.seconds.add(table, times)
        here = self.crowd.add(table.sent[done], table.finish[done])
        self.most_here = max(self.most_here, int(here.max(initial=0)))
        self._add_levels(table)

    def _add_logs(self, part: Part, table: RequestTable) -> None:
        self.whole.add(part, table)
        for group in self.groups.values():
            if group is not self.whole:
                logs = [part.logs[number] for number in group.numbers]
                group.add(part, gather_requests(part.work, part.sent, logs))
        for number, log in enumerate(part.logs):
            self.ended[number] += len(log.requests)
            self.busy[number] += float((log.steps["end"] - log.steps["start"]).sum())
            for name in DRAFTED:
                self.drafted[name] += int(log.drafts[name].sum())
        served, engine = self.whole.served, self.scenario.engine
        size = kv_block_bytes(served.model, engine) * engine.tensor_parallel_size
        moved = copied(part.logs, size, None) | host_tier(table, part.logs, size)
        for name, value in moved.items():
            if isinstance(value, int | float):
                self.moved[name] = self.moved.get(name, 0) + value

    def _add_latencies(self, table: RequestTable, times: Sequence[TokenTimes]) -> None:
        done, sketches = table.completed, self.latencies
        several = done & (table.generated > 1)
        for name in ("ttft", "e2el", "queue_time"):
            sketches[name].add(getattr(table, name)[done])
        sketches["tpot"].add(table.tpot[several])
        if RETRY in sketches:
            sketches[RETRY].add(table.retry_time[done])
        if table.workload.max_concurrency is not None:
            waited = table.client_queue_time[done]
            sketches["client_queue_time"].add(waited)
            sketches["e2el_including_client_queue"].add(table.e2el[done] + waited)
        for time in times:
            for values, weights in time.gap_slices():
                sketches["itl"].add(values, weights)
            sketches["itl"].add(time.own_gaps)

    def _add_levels(self, table: RequestTable) -> None:
        """Add up the requests in the system by the batch that each falls in."""
        times = table.arrival if isfinite(table.workload.request_rate) else table.sent
        level = self.system.add(times, table.left[~np.isnan(table.left)])
        if len(times):
            self.first, self.latest = min(self.first, float(times[0])), float(times[-1])
        size, more = divmod(self.total, BATCHES)
        bounds = np.cumsum([size + 1] * more + [size] * (BATCHES - more))
        batch = np.searchsorted(bounds, self.seen + np.arange(len(level)), "right")
        sums = np.bincount(batch, level, BATCHES)
        self.levels = [old + int(new) for old, new in zip(self.levels, sums, strict=True)]
        self.seen += len(level)

    def _steady(self) -> Values:
        found: Values = dict.fromkeys(("stationary", "trend_per_s", "trend_p_value"))
        if self.total >= FEWEST and self.latest > self.first:
            size, more = divmod(self.total, BATCHES)
            counts = np.array([size + 1] * more + [size] * (BATCHES - more))
            means = np.array(self.levels) / counts
            found = judged(means, sum(self.levels) / self.total, self.latest - self.first)
        return found | {"suggested_warmup_s": None}

    def summary(self, head: Mapping[str, Any], info: Values, swap_time: float) -> Values:
        """Give the summary of the whole run, without what a cluster adds."""
        duration, done = self.end - self.start, self.whole.completed
        tokens = self.whole.tokens
        bounded = bool(self.scenario.goodput.model_dump(exclude_none=True))
        throughput = {
            "duration": duration,
            "completed": done,
            "failed": self.failed,
            "total_input_tokens": self.prompts,
            "total_output_tokens": tokens,
            "request_throughput": share(done, duration),
            "request_goodput": share(self.good, duration) if bounded else None,
            "output_throughput": share(tokens, duration),
            "total_token_throughput": share(self.prompts + tokens, duration),
            "max_output_tokens_per_s": float(self.seconds.result()),
            "max_concurrent_requests": self.most_here,
        }
        found = self.whole.gauges(duration)
        use = {name: found.pop(name) for name in ("mfu", "bandwidth_utilization")}
        moved = self.moved | {"swap_time": swap_time}
        # Its queries are the tokens that the GPU's prefix cache did not have.
        hits, sums = moved["external_prefix_cache_hits"], self.whole.requests
        queries = sums.queries - sums.cached + hits
        moved["external_prefix_cache_hit_rate"] = share(hits, queries)
        own = info | found | moved | use | self._steady()
        return (
            {**head}
            | throughput
            | self._described(head)
            | acceptance(self.drafted)
            | {"headway": own}
        )

    def _described(self, head: Mapping[str, Any]) -> Values:
        names = [*LATENCIES]
        if RETRY in self.latencies:
            names.append(RETRY)
        if head["max_concurrency"] is not None:
            names += CLIENT_SIDE if head["request_rate"] != "inf" else CLIENT_SIDE[:1]
        out: Values = {}
        for name in names:
            sketch = self.latencies[name]
            quantiles = sketch.percentiles([50.0, *PERCENTILES])
            out |= named(name, sketch.mean, sketch.std, quantiles, PERCENTILES)
        return out
