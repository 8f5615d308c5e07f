"""What vLLM's /metrics would say after the run: its names, labels and buckets, as text.

Names and buckets are those of vllm/v1/metrics/loggers.py. Gauges tell the state at the end.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simulator.core.log import REASONS, Log
from simulator.results.request_table import Flags, Floats, RequestTable, gather_requests
from simulator.results.token_times import TokenTimes
from simulator.util.files import write_atomic

if TYPE_CHECKING:
    from simulator.simulation.result import Result

FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION = tuple(float(2**k) for k in (0, *range(3, 15)))
STOPPED = ("stop", "length", "abort")

Weighted = tuple[Floats, Floats]
"""Values, and how often each was seen."""


def write_prometheus(result: "Result", path: Path) -> None:
    """Write the metrics of a run; raise HeadwayError where the file cannot be written."""
    text = metrics_text(result)
    write_atomic(path, lambda file: file.write(text.encode()))


def metrics_text(result: "Result") -> str:
    """Give the metrics of a run in Prometheus' text exposition format, `engine` per replica."""
    table = gather_requests(result.workload, result.sent, result.logs, result.tries)
    pages = [_Page(table, log, number) for number, log in enumerate(result.logs)]
    labels = [f'model_name="{_escaped(result.model.name)}",engine="{p.number}"' for p in pages]
    lines: list[str] = []
    for name, kind, about, values in _singles(pages, result.interrupted):
        lines += _head(name, kind, about)
        for label, found in zip(labels, values, strict=True):
            lines += [f"{name}{{{label}{more}}} {value!r}" for more, value in found]
    for name, about, buckets, seen in _histograms(pages, result.parts.max_model_len):
        lines += _head(name, "histogram", about)
        for label, weighted in zip(labels, seen, strict=True):
            lines += _histogram(name, label, buckets, weighted)
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


class _Page:
    """One replica's requests and steps."""

    def __init__(self, table: RequestTable, log: Log, number: int) -> None:
        self.table, self.log, self.number = table, log, number
        self.here: Flags = table.replica == number
        self.done: Flags = self.here & table.completed
        self.begun: Flags = self.here & ~np.isnan(table.first_token)

    def finished(self, values: Floats) -> Weighted:
        """Give the values of the requests that came to their end."""
        return _once(values[self.done])


def _once(values: Floats) -> Weighted:
    return values, np.ones(len(values))


Found = list[tuple[str, float]]
"""Further labels and the value with them."""


def _singles(
    pages: Sequence[_Page], interrupted: bool
) -> Iterator[tuple[str, str, str, list[Found]]]:
    """Yield gauges and counters: name, type, description, values per replica."""
    state = [_state(page.log, interrupted) for page in pages]
    gauges = (
        ("num_requests_running", "Number of requests in model execution batches."),
        ("num_requests_waiting", "Number of requests waiting to be processed."),
        ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage."),
    )
    for k, (name, about) in enumerate(gauges):
        yield f"vllm:{name}", "gauge", about, [[("", values[k])] for values in state]
    for name, about in (
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
        ("num_preemptions", "Preemptions."),
        ("prompt_tokens", "Prompt tokens computed, or found in the prefix cache."),
        ("generation_tokens", "Tokens generated."),
    ):
        values: list[Found] = [[("", _count(page, name))] for page in pages]
        yield f"vllm:{name}_total", "counter", about, values
    reasons = [
        [(f',finished_reason="{word}"', _ended(page, word)) for word in STOPPED] for page in pages
    ]
    yield "vllm:request_success_total", "counter", "Requests finished.", reasons


def _state(log: Log, interrupted: bool) -> tuple[float, float, float]:
    """Give running, waiting and the share of KV blocks in use; at the end of a run all are 0."""
    if not interrupted or not len(log.steps):
        return 0.0, 0.0, 0.0
    last = log.steps[-1]
    return float(last["running"]), float(last["waiting"]), last["blocks_used"] / log.num_blocks


def _count(page: _Page, name: str) -> float:
    table = page.table
    prompts = table.workload.prompt_tokens
    values = {
        "prefix_cache_queries": prompts[page.here & ~np.isnan(table.first_scheduled)],
        "num_preemptions": table.preemptions[page.here],
        "prefix_cache_hits": table.cached[page.here],
        "prompt_tokens": prompts[page.begun],
        "generation_tokens": table.generated[page.here],
    }
    return float(values[name].sum())


def _ended(page: _Page, word: str) -> float:
    """Count the requests that ended so; one that was interrupted is vLLM's abort."""
    code = REASONS.index("unfinished" if word == "abort" else word)
    return float((page.here & (page.table.reason == code)).sum())


def _histograms(
    pages: Sequence[_Page], longest: int
) -> Iterator[tuple[str, str, Sequence[float], list[Weighted]]]:
    """Yield histograms: name, description, buckets, values per replica."""
    table = pages[0].table
    first, last = table.first_token, table.finish
    start, decode = table.first_scheduled, table.finish - table.first_token
    tokens = _one_two_five(longest)
    asked = table.workload.prompt_tokens.astype(float)
    gaps = np.maximum(table.generated - 1, 1)
    ttft = [_once(table.ttft[page.begun]) for page in pages]
    yield "vllm:time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN, ttft
    itl = [_gaps(page.log, page.here) for page in pages]
    yield "vllm:inter_token_latency_seconds", "Time between two tokens.", PER_TOKEN, itl
    work = [_work(page.log) for page in pages]
    yield "vllm:iteration_tokens_total", "Tokens of each engine step.", ITERATION, work
    for name, about, buckets, values in (
        ("request_prompt_tokens", "Prompt tokens of a request.", tokens, asked),
        ("request_generation_tokens", "Tokens generated.", tokens, table.generated.astype(float)),
        ("request_time_per_output_token_seconds", "Mean over a request.", PER_TOKEN, decode / gaps),
        ("e2e_request_latency_seconds", "Sent to last token.", LATENCY, table.e2el),
        ("request_queue_time_seconds", "Sent to first scheduled.", LATENCY, table.queue_time),
        ("request_inference_time_seconds", "Scheduled to last token.", LATENCY, last - start),
        ("request_prefill_time_seconds", "Scheduled to first token.", LATENCY, first - start),
        ("request_decode_time_seconds", "First to last token.", LATENCY, decode),
    ):
        yield f"vllm:{name}", about, buckets, [page.finished(values) for page in pages]


def _one_two_five(longest: int) -> list[float]:
    """Give 1, 2, 5, 10, ... up to `longest`."""
    steps = (m * 10**k for k in range(len(str(longest))) for m in (1, 2, 5))
    return [float(value) for value in steps if value <= longest]


def _gaps(log: Log, here: Flags) -> Weighted:
    """Give the times between tokens, a preemption included."""
    times = TokenTimes(log, here)
    slices = [(times.own_gaps, np.ones(len(times.own_gaps), np.int32)), *times.gap_slices()]
    values, weights = (np.concatenate(column) for column in zip(*slices, strict=True))
    return values, weights.astype(float)


def _work(log: Log) -> Weighted:
    """Give the tokens of each step."""
    rows = log.steps
    return (rows["prefill_tokens"] + rows["decodes"]).astype(float), rows["steps"].astype(float)


def _histogram(name: str, label: str, buckets: Sequence[float], seen: Weighted) -> Iterator[str]:
    """Yield the cumulative counts up to and including each bound, the sum and the count."""
    values, weights = seen
    places = np.searchsorted(buckets, values, side="left")
    upto = np.cumsum(np.bincount(places, weights, len(buckets) + 1))
    for bound, count in zip((*buckets, "+Inf"), upto.tolist(), strict=True):
        yield f'{name}_bucket{{{label},le="{bound}"}} {count!r}'
    yield f"{name}_sum{{{label}}} {float((values * weights).sum())!r}"
    yield f"{name}_count{{{label}}} {float(weights.sum())!r}"
