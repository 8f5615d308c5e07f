"""What vLLM's /metrics would have said every few seconds of a run, as OpenMetrics.

Names, labels and buckets are those of vllm/v1/metrics/loggers.py. Each sample has its time, so the
file can be put into Prometheus: `promtool tsdb create-blocks-from openmetrics`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from simulator.core.log import REASONS, Log
from simulator.results.record import Record
from simulator.results.request_table import Flags, Floats, Ints, RequestTable
from simulator.results.time_series import Leaps, queue_levels
from simulator.results.token_times import token_times
from simulator.util.errors import HeadwayError
from simulator.util.files import read_table, write_atomic


class Family(NamedTuple):
    """A metric of vLLM's, as a row of vllm_metrics.csv says it."""

    name: str
    kind: str
    about: str
    of: str  # run: a simulation has it, too; server: each server; else servers that are so
    label: str  # a further label, and
    values: str  # its values
    buckets: str  # of a histogram; tokens: as many as `histogram_kinds` finds


FAMILIES = [Family(**row) for row in read_table(__file__, "vllm_metrics.csv")]
SCALARS = [one for one in FAMILIES if one.kind != "histogram"]
FINISHED = {"stop": "stop", "length": "length", "abort": "unfinished"}
"""What vLLM calls a request's end, and how it is logged here."""

Histogram = tuple[str, Sequence[float]]
"""Its description and buckets."""
INTERVAL = 15.0
"""Seconds between two samples: how often Prometheus scrapes in its examples."""
MOST_SAMPLES = 100_000
DASHBOARD = Path(__file__).with_name("grafana.json")
"""A dashboard for Grafana over these names: import it there."""


def histogram_kinds(longest: int, of: Sequence[str] = ("run",)) -> dict[str, Histogram]:
    """Return description and buckets of the histograms, of requests of up to `longest` tokens."""
    steps = (m * 10**k for k in range(len(str(longest))) for m in (1, 2, 5))
    tokens = [float(value) for value in steps if value <= longest]
    return {
        one.name: (
            one.about,
            tokens if one.buckets == "tokens" else [*map(float, one.buckets.split())],
        )
        for one in FAMILIES
        if one.kind == "histogram" and one.of in of
    }


def write_prometheus(
    record: Record, path: Path, interval: float = INTERVAL, start: float = 0.0
) -> None:
    """Write the metrics of a run, see `metrics_text`; HeadwayError where it cannot be written."""
    write_atomic(path, metrics_text(record, interval, start).encode())


def metrics_text(record: Record, interval: float = INTERVAL, start: float = 0.0) -> str:
    """Return the metrics of a run in OpenMetrics' text format, `engine` per replica.

    Args:
        record: of the run.
        interval: s between two samples; the last one is at the end of the run or after it.
        start: when the run begins, s since 1970.

    Raises:
        HeadwayError: if these are too many samples.
    """
    table = record.request_table()
    engines = [_Engine(table, log, number) for number, log in enumerate(record.logs)]
    end = max((engine.end for engine in engines), default=0.0)
    if end / interval > MOST_SAMPLES:
        raise HeadwayError(
            f"--prometheus-interval {interval:g}: makes {end / interval:,.0f} samples of each "
            f"metric, of at most {MOST_SAMPLES:,}"
        )
    samples = np.arange(ceil(end / interval) + 1, dtype=np.float64) * interval
    stamps = [f"{start + time:.3f}" for time in samples.tolist()]
    model = record.model.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = [f'model_name="{model}",engine="{number}"' for number in range(len(engines))]
    scalars = [engine.scalars(samples, record.interrupted) for engine in engines]
    lines: list[str] = []
    for name, kind, about in (one[:3] for one in SCALARS if one.of == "run"):
        family = name.removesuffix("_total")
        lines += [f"# HELP vllm:{family} {about}", f"# TYPE vllm:{family} {kind}"]
        for label, found in zip(labels, scalars, strict=True):
            for more, values in found[name].items():
                full = f"vllm:{name}{{{label}{more}}}"
                lines += [f"{full} {n!r} {t}" for n, t in zip(values.tolist(), stamps, strict=True)]
    kinds = histogram_kinds(record.spec.max_model_len)
    for (name, (about, buckets)), seen in zip(kinds.items(), _histograms(engines), strict=True):
        lines += [f"# HELP vllm:{name} {about}", f"# TYPE vllm:{name} histogram"]
        for label, one in zip(labels, seen, strict=True):
            lines += _histogram(
                f"vllm:{name}", label, buckets, one.sampled(buckets, samples), stamps
            )
    return "\n".join((*lines, "# EOF", ""))


@dataclass(frozen=True, slots=True)
class _Seen:
    """Values, how often each was seen, and when, s."""

    values: Floats
    weights: Floats
    times: Floats

    def sampled(self, buckets: Sequence[float], samples: Floats) -> tuple[Floats, Floats]:
        """Return, at each sample, how many were seen up to each bound, and their sum."""
        size = len(buckets) + 1
        when = np.searchsorted(samples, self.times, side="left")
        place = np.searchsorted(buckets, self.values, side="left")
        counts = np.bincount(when * size + place, self.weights, len(samples) * size)
        upto = counts.reshape(-1, size).cumsum(axis=0).cumsum(axis=1)
        return upto, _upto(samples, self.times, self.values * self.weights)


def _upto(samples: Floats, times: Floats, amounts: Floats) -> Floats:
    """Add up, at each sample, what came until then."""
    when = np.searchsorted(samples, times, side="left")
    found: Floats = np.bincount(when, amounts, len(samples)).cumsum()
    return found


class _Engine:
    """One replica's requests and steps."""

    def __init__(self, table: RequestTable, log: Log, number: int) -> None:
        self.table, self.log = table, log
        self.here: Flags = table.replica == number
        self.done: Flags = self.here & table.completed
        self.begun: Flags = self.here & ~np.isnan(table.first_token)
        self.rows = log.steps
        known = [self.rows["end"], table.finish[self.here & ~np.isnan(table.finish)]]
        self.end = max((float(times.max(initial=0.0)) for times in known), default=0.0)

    def scalars(self, samples: Floats, interrupted: bool) -> dict[str, dict[str, Floats]]:
        """Return the values of SCALARS at each sample, by name and by further labels."""
        table, here, prompts = self.table, self.here, self.table.workload.prompt_tokens

        def upto(which: Flags, times: Floats, amounts: Ints) -> Floats:
            return _upto(samples, times[which], amounts[which].astype(float))

        admitted = here & ~np.isnan(table.first_scheduled)
        steps, gaps = self.rows, self.inter_token_latencies()
        ones = np.ones(len(prompts), np.int64)
        tokens = upto(self.begun, table.first_token, ones)
        tokens += _upto(samples, gaps.times, gaps.weights)
        values = (
            *self._gauges(samples, interrupted),
            upto(admitted, table.first_scheduled, prompts),
            upto(admitted, table.first_scheduled, table.cached),
            _upto(samples, steps["start"], steps["preempted"].astype(float)),
            upto(self.begun, table.first_token, prompts),
            tokens,
        )
        ended = {
            f',finished_reason="{word}"': upto(here & (table.reason == code), table.left, ones)
            for word, code in ((word, REASONS.index(name)) for word, name in FINISHED.items())
        }
        found = [*({"": value} for value in values), ended]
        names = (one.name for one in SCALARS if one.of == "run")
        return dict(zip(names, found, strict=True))

    def _gauges(self, samples: Floats, interrupted: bool) -> tuple[Floats, Floats, Floats]:
        """Return who runs and who waits at each sample, and the part of the KV cache in use."""
        steps = self.rows
        none = np.zeros(len(samples))
        if not len(steps):
            return none, none, none
        row = np.searchsorted(steps["start"], samples, side="right") - 1
        works = (row >= 0) & (samples < steps["end"][row])
        if interrupted:
            works |= row == len(steps) - 1
        running = np.where(works, steps["running"][row], 0.0)
        blocks = steps["blocks_used"][row] + self._blocks_of_leaps(row, samples)
        used = np.where(works, blocks / self.log.num_blocks, 0.0)
        times, waiting = queue_levels(self.log)
        known = np.searchsorted(times, samples, side="right") - 1
        joined = np.sort(self.log.column("joined"))
        since = np.where(known < 0, -np.inf, times[known])
        came = np.searchsorted(joined, samples, side="right")
        came -= np.searchsorted(joined, since, side="right")
        queue = np.where(known < 0, 0, waiting[known]) + came
        last = samples > steps["end"].max()
        return running, np.where(last & (not interrupted), 0.0, queue.astype(float)), used

    def _blocks_of_leaps(self, row: Ints, samples: Floats) -> Ints:
        """Return the KV blocks that the later steps of leapt rows have added by each sample."""
        added = np.zeros(len(row), np.int64)
        hit = np.unique(row[(row >= 0) & (self.rows["steps"][row] > 1)])
        if len(hit):
            later = Leaps(self.log).later_steps(hit)
            of = np.repeat(hit, later.counts)
            for k in np.flatnonzero(np.isin(row, hit)).tolist():
                mine = (of == row[k]) & (later.begins <= samples[k])
                added[k] = later.blocks[mine].sum()
        return added

    def inter_token_latencies(self) -> _Seen:
        """Return the times between tokens, a preemption included."""
        times = token_times(self.log, self.here)
        own = times.request_gaps
        slices = [(own, np.ones(len(own)), times.request_gap_ends), *times.gap_slices()]
        values, weights, ends = (np.concatenate(column) for column in zip(*slices, strict=True))
        return _Seen(values, weights.astype(float), ends)

    def step_tokens(self) -> _Seen:
        """Return the tokens of each step."""
        rows = self.rows
        tokens = (rows["prefill_tokens"] + rows["decodes"]).astype(float)
        leaps = Leaps(self.log)
        later = leaps.later_steps(leaps.leapt)
        values = np.concatenate((tokens, np.repeat(tokens[leaps.leapt], later.counts)))
        times = np.concatenate((rows["start"], later.begins))
        return _Seen(values, np.ones(len(values)), times)


def _histograms(engines: Sequence[_Engine]) -> Iterator[list[_Seen]]:
    """Yield the values of each of `histogram_kinds`, those of each replica."""
    table = engines[0].table
    first, last = table.first_token, table.finish
    start, decode = table.first_scheduled, table.finish - table.first_token

    def seen(which: Flags, values: Floats, times: Floats) -> _Seen:
        return _Seen(values[which], np.ones(int(which.sum())), times[which])

    yield [seen(engine.begun, table.ttft, first) for engine in engines]
    yield [engine.inter_token_latencies() for engine in engines]
    yield [engine.step_tokens() for engine in engines]
    for values in (
        table.workload.prompt_tokens.astype(float),
        table.generated.astype(float),
        decode / np.maximum(table.generated - 1, 1),
        table.e2el,
        table.queue_time,
        last - start,
        first - start,
        decode,
    ):
        yield [seen(engine.done, values, last) for engine in engines]


def _histogram(
    name: str,
    label: str,
    buckets: Sequence[float],
    sampled: tuple[Floats, Floats],
    stamps: Sequence[str],
) -> Iterator[str]:
    """Yield, for each sample, the counts up to and including each bound, the sum and the count."""
    bounds = [f'{name}_bucket{{{label},le="{bound}"}}' for bound in (*buckets, "+Inf")]
    for counts, total, stamp in zip(*(part.tolist() for part in sampled), stamps, strict=True):
        for bound, count in zip(bounds, counts, strict=True):
            yield f"{bound} {count!r} {stamp}"
        yield f"{name}_sum{{{label}}} {total!r} {stamp}"
        yield f"{name}_count{{{label}}} {counts[-1]!r} {stamp}"
