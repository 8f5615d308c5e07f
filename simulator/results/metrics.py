"""Every metric of a run, each defined once, all derived from the logs after the run.

Words and definitions are those of `vllm bench serve` (vllm/benchmarks/serve.py), so the summary
has the keys of its result file; what vLLM does not report stands in a block of its own. A run comes
in parts: of one that keeps its requests there is a single part, and percentiles are exact; of one
that does not, parts are added up, and percentiles come from sketches.

A new latency of requests goes into `latencies`, a count of requests or tokens into
`RunMetrics.throughput`, what engines do into `engine_metrics.py`, clusters `cluster_metrics.py`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from simulator.build.engine_spec import EngineSpec
from simulator.core.log import Log
from simulator.models.gpus import find_gpu
from simulator.results.engine_metrics import EngineMetrics, energy_summary, share
from simulator.results.fairness import (
    Clients,
    client_parts,
    priority_column,
    several_clients,
    summarize_clients,
    summarize_parts,
)
from simulator.results.felt import FeltByName
from simulator.results.record import ClusterRecord, PartialRecord, Record
from simulator.results.request_table import (
    ENCODER_PARTS,
    RETRY,
    TRANSFER_PARTS,
    Flags,
    Floats,
    RequestTable,
    Rows,
    gather_requests,
    model_column,
    partial_span,
    prompt_figures,
)
from simulator.results.run_info import Summary, or_inf, run_info
from simulator.results.sample import Sample
from simulator.results.service_levels import (
    Slo,
    bounds_of_all,
    by_clock,
    goodput_of,
    keep_bounds,
    request_bounds,
    service_levels,
    step_span,
    strain,
)
from simulator.results.steady_state import STAY, SteadyState, Window, measurement_window, stays_of
from simulator.results.token_times import (
    GapDistribution,
    PeakRate,
    TokensTogether,
    TokenTimes,
    token_times,
)
from simulator.scenario.scenario import Scenario
from simulator.util.quantile_sketch import ConcurrencyCounter, QuantileSketch
from simulator.workload.workload import Workload

PERCENTILES = (90.0, 95.0, 99.0, 99.9)
SCHEMA = 2  # of the summary's `headway` block; grows when a key changes its meaning

LATENCIES = (
    "ttft",
    "tpot",
    "itl",
    "e2el",
    "queue_time",
    "client_queue_time",
    "e2el_including_client_queue",
)
"""In the order of the summary; the last two stand only behind `max_concurrency`."""
CLUSTER_LATENCIES = (RETRY, *ENCODER_PARTS, *TRANSFER_PARTS)
"""Parts of the requests' time that some clusters have."""
STRAIN = "strain"
"""What stands among the latencies for `kept_until` alone."""
FELT = {"per_client": client_parts, "per_priority": priority_column}
"""What requests are told apart by, in runs with and without tables."""
DRAFTED = ("decodes", "drafts", "accepted")  # columns of log.DRAFT


Distribution = Sample | GapDistribution | QuantileSketch


def describe(name: str, values: Distribution, percentiles: Sequence[float]) -> Summary:
    """Return mean, std, median and percentiles in ms as vLLM names them: p99_ttft_ms."""
    words = [f"p{int(p) if int(p) == p else p}" for p in percentiles]
    numbers = [values.mean, values.std, *values.percentiles([50.0, *percentiles])]
    named = zip(["mean", "std", "median", *words], numbers, strict=True)
    return {f"{word}_{name}_ms": number * 1000.0 for word, number in named}


class RunMetrics:
    """All that the summary of a run is made of, added up over its parts."""

    SUMS = (
        "engines",
        "cluster",
        "_start",
        "_end",
        "_completed",
        "_failed",
        "_good",
        "_input",
        "_output",
        "_kept",
        "_kept_all",
        "_good_at",
        "_drafted",
        "_swap_time",
        "_sketches",
        "_peak_rate",
        "_felt",
    )

    def __init__(
        self,
        scenario: Scenario,
        workload: Workload,
        cores: Sequence[EngineSpec],
        *,
        cluster: ClusterRecord | None = None,
        total: int | None = None,
        within: Window | None = None,
        apart: bool = False,
    ) -> None:
        """Measure a run of `workload`, or of `total` requests like its own that come in parts.

        `cores` are what runs it. `within` (s) bounds what is measured of a run in one
        part: latencies of the requests sent in it, throughput of those that ended in it; the gauges
        stay those of the whole run. `apart`: these replicas are some of the run's, whose metrics
        are put together by `take_sums` and `stays`.
        """
        self.workload, self.total, self.within = workload, total, within
        # Of a cluster with groups: with the engine that these vary.
        self.engines = EngineMetrics(replace(cores[0], engine=scenario.engine), len(cores))
        self.cluster = None
        if cluster is not None:
            from simulator.results.cluster_metrics import ClusterMetrics

            self.cluster = ClusterMetrics(scenario, cluster, cores, self.engines)
        self._costs = [each.cost for each in cores]
        price = find_gpu(cores[0].gpu.name, scenario.gpu.dollars_per_hour).dollars_per_hour
        self._price = None if price is None else price * scenario.gpu.count
        self._goodput = scenario.goodput
        self._bounded = bool(scenario.goodput.bounds or scenario.goodput.classes)
        self._slos = service_levels(scenario)
        self._bounds = request_bounds(goodput_of(self._goodput, workload), self._slos)
        self._kept = dict.fromkeys(self._bounds, 0)  # requests that keep each bound
        self._kept_all = 0
        self._counted_apart: dict[str, float] = {}  # by the metric of a level
        self._span = step_span(self._costs)
        self._good_at = [0, 0]  # requests that keep `goodput` at both ends of the step times
        self.retries = scenario.cluster is not None and scenario.cluster.may_retry
        self._start, self._end = inf, 0.0
        self._completed = self._failed = self._good = self._input = self._output = 0
        self._peak_rate = PeakRate(float(workload.arrival[0]) if apart else None)
        self._in_flight = ConcurrencyCounter()
        self.stays: list[Rows] | None = [] if apart else None  # rows of STAY, by part
        self._later = np.empty(0, STAY)  # not counted yet: others that are to come are sent sooner
        self._max_in_flight = 0
        self._latencies: Mapping[str, Distribution] = {}
        self._sketches: dict[str, QuantileSketch] = defaultdict(QuantileSketch)
        if total is not None:
            self._latencies = self._sketches
        self._drafted = dict.fromkeys(DRAFTED, 0)
        self._swap_time = 0.0
        self._steady = SteadyState(total, within)
        self._felt = {} if total is None else {key: FeltByName() for key in FELT}

    @property
    def span(self) -> tuple[float, float]:
        """When the first request was sent and when the last thing ended, in s."""
        return (0.0, 0.0) if self._start == inf else (self._start, self._end)

    def add(self, part: PartialRecord, before: float = inf) -> None:
        """Add a part of the run; requests of later parts are sent from the time `before` on, s."""
        table = gather_requests(part.workload, part.sent, part.logs, part.tries)
        start, end = partial_span(table, part.logs)
        self._start, self._end = min(self._start, start), max(self._end, end)
        until = [self.span[1]] * len(part.logs) if part.until is None else part.until
        self.engines.add(table, part.logs, self._costs, until)
        if self.cluster is not None:
            self.cluster.add(part, table, until)
        for log in part.logs:
            if log.draft_rows:
                for name in DRAFTED:
                    self._drafted[name] += int(log.drafts[name].sum())
        self._swap_time += sum(
            float(cost.logged_swap_seconds(log.swaps).sum())
            for log, cost in zip(part.logs, self._costs, strict=True)
            if log.swap_rows
        )
        stays = stays_of(table)
        if self.stays is not None:
            self.stays.append(stays)
        elif self.total is None:
            self.add_stays(stays)
        else:
            stays = np.append(self._later, stays)
            over = stays["sent"] <= before
            self._later = stays[~over]
            self.add_stays(stays[over])
        self._add_completed(part, table)
        bounds = request_bounds(goodput_of(self._goodput, table.workload), self._slos)
        for key, sums in self._felt.items():
            sums.add(table, FELT[key](table.workload), bounds)
        self._peak_rate.forget(before)

    def add_stays(self, stays: Rows) -> None:
        """Add when requests came and left, rows of STAY; those of later parts are sent later."""
        self._steady.add(stays)
        completed = stays["completed"]
        here = self._in_flight.add(np.sort(stays["sent"][completed]), stays["left"][completed])
        self._max_in_flight = max(self._max_in_flight, int(here.max(initial=0)))

    def _add_completed(self, part: PartialRecord, table: RequestTable) -> None:
        completed = table.completed
        times = _token_times(part.logs, completed)
        self._peak_rate.add(table, times)
        in_time = np.ones(len(completed), bool)
        ended, failed, measured = completed, (table.reason >= 0) & ~completed, completed
        if self.within is not None:
            in_time = _inside(table.sent, self.within)
            ended, failed = completed & _inside(table.finish, self.within), failed & in_time
            measured = completed & in_time
            times = _token_times(part.logs, measured)
        self._completed += int(ended.sum())
        self._failed += int(failed.sum())
        self._input += int(table.workload.prompt_tokens[ended].sum())
        self._output += int(table.generated[ended].sum())
        goodput = goodput_of(self._goodput, table.workload)
        bounds = request_bounds(goodput, self._slos)
        self._good += int(keep_bounds(table, ended, goodput).sum()) if goodput else 0
        for k, factor in enumerate(self._span or ()):
            within = {name: bound / factor for name, bound in goodput.items()}
            self._good_at[k] += int(keep_bounds(table, ended, within).sum())
        for name, bound in bounds.items():
            self._kept[name] += int(keep_bounds(table, ended, {name: bound}).sum())
        self._kept_all += int(keep_bounds(table, ended, bounds).sum()) if bounds else 0
        for slo in (one for one in self._slos if one.counted_apart):
            self._counted_apart[slo.metric] = slo.value(table, in_time, goodput)
        found = table.latencies(measured)
        if self.retries:
            found[RETRY] = table.retry_time[measured]
        if goodput and self._span is not None:
            found[STRAIN] = strain(table, ended, goodput)
        for name, values in part.latencies.items():
            known = ~np.isnan(values)
            if self.within is not None:
                known &= _inside(table.sent, self.within)
            found[name] = values[known]
        if self.total is None:
            samples = {name: Sample(values) for name, values in found.items()}
            self._latencies = {"itl": GapDistribution(times), **samples}
            return
        for name, values in found.items():
            self._sketches[name].add(values)
        itl = self._sketches["itl"]
        for time in times:
            for gaps in time.gap_slices():
                itl.add(gaps.lengths, gaps.counts)
            itl.add(time.request_gaps)

    def summary(
        self, info: Mapping[str, object], percentiles: Sequence[float] = PERCENTILES
    ) -> Summary:
        """Return the keys of vLLM bench's result file and our own under `headway`.

        `info` (version, seed, scenario, ...) opens our block. Latencies are those of completed
        requests; None where there is none, in place of vLLM's 0.
        """
        low, high = self.span
        own = {"schema": SCHEMA, **info}
        own |= self.engines.gauges(high - low)
        own |= self.engines.copies(self._swap_time)
        if self.total is not None:  # a streamed run names it after the other copies
            own["swap_time"] = own.pop("swap_time")
        own |= self.engines.steps.amounts
        own |= self.engines.utilizations(high - low)
        if self.cluster is None:
            energy = self.engines.energy((high - low) * self.engines.replicas)
            tokens = self.engines.requests.generated
            own |= energy_summary(energy, high - low, tokens)
            own["dollars_per_hour"] = hourly = self._price
            own["dollars"] = cost = None if hourly is None else hourly / 3600 * (high - low)
            per_million = cost / tokens * 1e6 if cost is not None and tokens else None
            own["dollars_per_million_output_tokens"] = per_million
        own |= {
            f"{name}_itl_ms": 1000 * gap
            for name, gap in zip(("min", "max"), self._latencies["itl"].range, strict=True)
        }
        own |= self.attainment()
        own |= self._steady.summary() | self._felt_summary()
        if self.cluster is not None:
            own |= self.cluster.summary((low, high))
            host, busy = own["host_share"], own["gpu_busy_fraction"]
            if isinstance(host, float) and isinstance(busy, float):
                own["gpu_busy_without_host"] = busy * (1.0 - host)
        return (
            self.run_settings()
            | self.throughput()
            | self._described(LATENCIES, percentiles)
            | self.acceptance()
            | self._described(CLUSTER_LATENCIES, percentiles)
            | {"headway": own}
        )

    def _felt_summary(self) -> Summary:
        """Return what each client and each priority felt of a run that forgets its requests."""
        own: Summary = {}
        for key, sums in self._felt.items():
            if sums.several:
                own[key] = _in_order(key, sums.summary(bounded=bool(self._bounds)))
        if "per_client" in own:
            clients = self._felt["per_client"]
            own["clients"] = None if clients.untold else len(clients.felt)
        return own

    def run_settings(self) -> Summary:
        """Say what was run. `date` is null: the same seed gives the same bytes."""
        load = self.workload
        return {
            "date": None,
            "backend": "headway",
            "model_id": self.engines.spec.model.name,
            "num_prompts": len(load) if self.total is None else self.total,
            "request_rate": or_inf(load.request_rate),
            "request_rate_unit": "requests/s" if load.after is None else "sessions/s",
            "burstiness": or_inf(load.burstiness),
            "max_concurrency": load.max_concurrency,
        }

    def throughput(self) -> Summary:
        """Return counts and rates of requests and tokens; times are in s."""
        low, high = self.span if self.within is None else self.within
        duration = high - low
        return {
            "duration": duration,
            "completed": self._completed,
            "failed": self._failed,
            "total_input_tokens": self._input,
            "total_output_tokens": self._output,
            "request_throughput": share(self._completed, duration),
            "request_goodput": share(self._good, duration) if self._bounded else None,
            "output_throughput": share(self._output, duration),
            "total_token_throughput": share(self._input + self._output, duration),
            "max_output_tokens_per_s": float(self._peak_rate.most),
            "max_concurrent_requests": self._max_in_flight,
        }

    def acceptance(self) -> Summary:
        """Return what speculative decoding brought, under vLLM's names.

        Nothing where there were no steps with decodes. The rate is in per cent; the length counts
        the token that comes out beside the drafts. As in vLLM, drafts are counted as accepted
        though they lie beyond the end of their request.
        """
        decodes, drafts, accepted = (self._drafted[name] for name in DRAFTED)
        if not decodes:
            return {}
        return {
            "spec_decode_acceptance_rate": 100.0 * share(accepted, drafts),
            "spec_decode_acceptance_length": 1.0 + share(accepted, decodes),
            "spec_decode_num_drafts": decodes,
            "spec_decode_draft_tokens": drafts,
            "spec_decode_accepted_tokens": accepted,
        }

    def attainment(self) -> Summary:
        """Say how far the service levels are kept: shares are of all that ended, or failed."""
        ended = self._completed + self._failed
        each = {k: None if np.ndim(bound) else bound for k, bound in self._bounds.items()}
        own: Summary = {f"slo_{name}_ms": bound for name, bound in each.items()}
        own |= bounds_of_all(self._slos)
        own |= {f"slo_attainment_{name}": share(count, ended) for name, count in self._kept.items()}
        if self._bounds:
            own["slo_attainment"] = share(self._kept_all, ended)
        if self._slos:
            found = self._counted_apart | {"goodput": share(self._good, ended)}
            found["completion"] = share(self._completed, ended)
            found |= {k: v for k, v in self.throughput().items() if isinstance(v, float)}
            for slo in self._slos:
                for name, values in self._latencies.items():
                    if slo.metric.endswith(f"_{name}_ms") and not slo.part:
                        told = describe(name, values, [slo.percentile or 50.0])[slo.metric]
                        assert isinstance(told, float)
                        found[slo.metric] = told
            nobody = self._failed > 0 and not self._completed  # was served: no latency is kept
            met = [not nobody and s.met(found[s.metric]) for s in self._slos]
            own["slo"] = [
                {"bound": s.text, "value": found[s.metric], "met": kept}
                | self._at_ends(s, found[s.metric])
                for s, kept in zip(self._slos, met, strict=True)
            ]
            own["slo_met"] = all(met)
        return own

    def _at_ends(self, slo: Slo, value: float) -> Summary:
        """Say what a value is at both ends of the step times' 95 %; nothing where none is known."""
        if self._span is None:
            return {}
        ends = by_clock(slo, value, self._span)
        if slo.metric == "goodput":
            ended = self._completed + self._failed
            ends = share(self._good_at[1], ended), share(self._good_at[0], ended)
        told: Summary = {"ends": [*ends], "step_times": [*self._span]}
        if slo.metric == "goodput" and STRAIN in self._latencies and self._completed:
            point = 100.0 * slo.bound * (self._completed + self._failed) / self._completed
            if point <= 100.0 and (needed := self._latencies[STRAIN].percentiles([point])[0]):
                told["kept_until"] = 1.0 / needed
        return told

    def _described(self, names: Sequence[str], percentiles: Sequence[float]) -> Summary:
        out: Summary = {}
        for name in names:
            if name in self._latencies:
                out |= describe(name, self._latencies[name], percentiles)
        return out if self._completed else dict.fromkeys(out)


def summarize_record(record: Record, percentiles: Sequence[float] = PERCENTILES) -> Summary:
    """Return the summary of a run of a scenario that has kept its requests."""
    cluster = record.cluster
    within = measurement_window(record)
    run = (record.scenario, record.workload, record.cores)
    metrics = RunMetrics(*run, cluster=cluster, within=within)
    part = PartialRecord(record.workload, record.sent, record.logs, record.tries)
    if cluster is not None and (cluster.transfers or cluster.encodings):
        time_parts = record.time_parts()
        part.latencies = {k: time_parts[k] for k in CLUSTER_LATENCIES[1:] if k in time_parts}
        part.engine_logs = cluster.engine_logs(record)
    metrics.add(part)
    info = run_info(record.scenario, record.spec, record.specs, record.warnings) | {
        "interrupted": record.interrupted,
        "warmup_s": record.warmup,
        "cooldown_s": record.cooldown,
    }
    summary = metrics.summary(info, percentiles)
    own = summary["headway"]
    assert isinstance(own, dict)
    if several_clients(record.workload):
        own |= summarize_clients(Clients.of(record))
    own |= _parts(record, within)
    return summary


def _parts(record: Record, within: Window | None) -> Summary:
    """Return what each client and each priority felt, where there are several of them."""
    workload = record.workload
    words = {key: column(workload) for key, column in FELT.items()}
    words["per_model"] = model_column(workload)
    words = {key: column for key, column in words.items() if len(column.names) > 1}
    if not words and workload.prompt is None:
        return {}
    table, goodput = record.request_table(), goodput_of(record.scenario.goodput, workload)
    counted = ~np.isnan(table.sent) if within is None else _inside(table.sent, within)
    bounds = request_bounds(goodput, service_levels(record.scenario))
    found = {
        key: _in_order(key, summarize_parts(table, counted, column, bounds))
        for key, column in words.items()
    }
    prompt = workload.prompt
    more = {} if prompt is None else {"prompts": prompt_figures(prompt, table, counted)}
    return {**found, **more}


def _in_order(
    key: str, found: dict[str, dict[str, object]] | None
) -> dict[str, dict[str, object]] | None:
    """Return what each priority felt from the most urgent on; others as they are."""
    if found is None or key != "per_priority":
        return found
    return {name: found[name] for name in sorted(found, key=int)}


def _inside(times: Floats, within: Window) -> Flags:
    return (times >= within[0]) & (times <= within[1])


def _token_times(logs: Sequence[Log], completed: Flags) -> list[TokenTimes | TokensTogether]:
    return [token_times(log, completed) for log in logs if log.run_rows]
