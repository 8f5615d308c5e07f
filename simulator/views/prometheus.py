"""What vLLM's /metrics would say after the run: its names, labels and buckets, as text.

Names and buckets are those of vllm/v1/metrics/loggers.py. Gauges tell the state at the end.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simulator.core.log import REASONS, Log
from simulator.results.request_table import Flags, Floats, RequestTable
from simulator.results.token_times import token_times
from simulator.util.files import write_atomic

if TYPE_CHECKING:
    from simulator.results.record import Record

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
E2E_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_TOKENS_BUCKETS = tuple(float(2**k) for k in (0, *range(3, 15)))
SCALARS = (
    ("num_requests_running", "gauge", "Number of requests in model execution batches."),
    ("num_requests_waiting", "gauge", "Number of requests waiting to be processed."),
    ("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage."),
    ("prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache."),
    ("num_preemptions_total", "counter", "Preemptions."),
    ("prompt_tokens_total", "counter", "Prompt tokens computed, or found in the prefix cache."),
    ("generation_tokens_total", "counter", "Tokens generated."),
    ("request_success_total", "counter", "Requests finished."),
)
"""Name, type and description of what is one number, or a few."""
FINISHED = {"stop": "stop", "length": "length", "abort": "unfinished"}
"""What vLLM calls a request's end, and how it is logged here."""

Weighted = tuple[Floats, Floats]
"""Values, and how often each was seen."""


def write_prometheus(record: "Record", path: Path) -> None:
    """Write the metrics of a run; raise HeadwayError where the file cannot be written."""
    text = metrics_text(record)
    write_atomic(path, text.encode())


def metrics_text(record: "Record") -> str:
    """Give the metrics of a run in Prometheus' text exposition format, `engine` per replica."""
    table = record.request_table()
    engines = [_Engine(table, log, number) for number, log in enumerate(record.logs)]
    model = record.model.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = [f'model_name="{model}",engine="{number}"' for number in range(len(engines))]
    scalars = [engine.scalars(record.interrupted) for engine in engines]
    lines: list[str] = []
    for name, kind, about in SCALARS:
        lines += [f"# HELP vllm:{name} {about}", f"# TYPE vllm:{name} {kind}"]
        for label, found in zip(labels, scalars, strict=True):
            lines += [f"vllm:{name}{{{label}{more}}} {n!r}" for more, n in found[name].items()]
    for name, about, buckets, seen in _histograms(engines, record.parts.max_model_len):
        lines += [f"# HELP vllm:{name} {about}", f"# TYPE vllm:{name} histogram"]
        for label, weighted in zip(labels, seen, strict=True):
            lines += _histogram(f"vllm:{name}", label, buckets, weighted)
    return "\n".join(lines) + "\n"


class _Engine:
    """One replica's requests and steps."""

    def __init__(self, table: RequestTable, log: Log, number: int) -> None:
        self.table, self.log = table, log
        self.here: Flags = table.replica == number
        self.done: Flags = self.here & table.completed
        self.begun: Flags = self.here & ~np.isnan(table.first_token)

    def scalars(self, interrupted: bool) -> dict[str, dict[str, float]]:
        """Give the values of SCALARS by name, and by further labels."""
        table, here, prompts = self.table, self.here, self.table.workload.prompt_tokens
        state = 0.0, 0.0, 0.0  # at the end of a run
        if interrupted and len(self.log.steps):
            last = self.log.steps[-1]
            used = float(last["blocks_used"]) / self.log.num_blocks
            state = float(last["running"]), float(last["waiting"]), used
        sums = (
            prompts[here & ~np.isnan(table.first_scheduled)],
            table.cached[here],
            table.preemptions[here],
            prompts[self.begun],
            table.generated[here],
        )
        values = (*state, *(float(each.sum()) for each in sums))
        ended = {
            f',finished_reason="{word}"': float((here & (table.reason == code)).sum())
            for word, code in ((word, REASONS.index(name)) for word, name in FINISHED.items())
        }
        found = [*({"": value} for value in values), ended]
        return {name: value for (name, *_), value in zip(SCALARS, found, strict=True)}

    def inter_token_latencies(self) -> Weighted:
        """Give the times between tokens, a preemption included."""
        times = token_times(self.log, self.here)
        singles = times.request_gaps
        slices = [(singles, np.ones(len(singles), np.int32)), *times.gap_slices()]
        values, weights = (np.concatenate(column) for column in zip(*slices, strict=True))
        return values, weights.astype(float)

    def step_tokens(self) -> Weighted:
        """Give the tokens of each step."""
        rows = self.log.steps
        tokens = rows["prefill_tokens"] + rows["decodes"]
        return tokens.astype(float), rows["steps"].astype(float)


def _unweighted(values: Floats) -> Weighted:
    return values, np.ones(len(values))


def _histograms(
    engines: Sequence[_Engine], longest: int
) -> Iterator[tuple[str, str, Sequence[float], list[Weighted]]]:
    """Yield histograms: name, description, buckets, values per replica."""
    table = engines[0].table
    first, last = table.first_token, table.finish
    start, decode = table.first_scheduled, table.finish - table.first_token
    tokens = request_length_buckets(longest)
    asked = table.workload.prompt_tokens.astype(float)
    tpot = decode / np.maximum(table.generated - 1, 1)
    ttft = [_unweighted(table.ttft[engine.begun]) for engine in engines]
    yield "time_to_first_token_seconds", "Time to first token.", TTFT_BUCKETS, ttft
    itl = [engine.inter_token_latencies() for engine in engines]
    yield "inter_token_latency_seconds", "Time between two tokens.", ITL_BUCKETS, itl
    steps = [engine.step_tokens() for engine in engines]
    yield "iteration_tokens_total", "Tokens of each engine step.", ITERATION_TOKENS_BUCKETS, steps
    for name, about, buckets, values in (
        ("request_prompt_tokens", "Prompt tokens of a request.", tokens, asked),
        ("request_generation_tokens", "Tokens generated.", tokens, table.generated.astype(float)),
        ("request_time_per_output_token_seconds", "Mean over a request.", ITL_BUCKETS, tpot),
        ("e2e_request_latency_seconds", "Sent to last token.", E2E_BUCKETS, table.e2el),
        ("request_queue_time_seconds", "Sent to first scheduled.", E2E_BUCKETS, table.queue_time),
        ("request_inference_time_seconds", "Scheduled to last token.", E2E_BUCKETS, last - start),
        ("request_prefill_time_seconds", "Scheduled to first token.", E2E_BUCKETS, first - start),
        ("request_decode_time_seconds", "First to last token.", E2E_BUCKETS, decode),
    ):
        yield name, about, buckets, [_unweighted(values[engine.done]) for engine in engines]


def request_length_buckets(longest: int) -> list[float]:
    """Give 1, 2, 5, 10, ... up to `longest`."""
    steps = (m * 10**k for k in range(len(str(longest))) for m in (1, 2, 5))
    return [float(value) for value in steps if value <= longest]


def _histogram(name: str, label: str, buckets: Sequence[float], seen: Weighted) -> Iterator[str]:
    """Yield the cumulative counts up to and including each bound, the sum and the count."""
    values, weights = seen
    places = np.searchsorted(buckets, values, side="left")
    upto = np.cumsum(np.bincount(places, weights, len(buckets) + 1))
    for bound, count in zip((*buckets, "+Inf"), upto.tolist(), strict=True):
        yield f'{name}_bucket{{{label},le="{bound}"}} {count!r}'
    yield f"{name}_sum{{{label}}} {float((values * weights).sum())!r}"
    yield f"{name}_count{{{label}}} {float(weights.sum())!r}"
