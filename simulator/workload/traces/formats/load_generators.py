"""What load generators write of the requests that they sent: AIPerf, guidellm, vLLM and others.

Each names its fields by a path, and gives its requests as flat mappings, one after the other;
checks, failures and latencies are those of `records.py`.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.traces.documents import (
    flat,
    flat_objects,
    is_json_lines,
    parse,
    parse_object,
    read_text,
)
from simulator.workload.traces.fields import Sources, source, used_as
from simulator.workload.traces.format import Format, Head, Problems, Table
from simulator.workload.traces.formats.named import first_request, json_requests
from simulator.workload.traces.json_lines import rows
from simulator.workload.traces.records import Records

Found = tuple[int, dict[str, Any]] | tuple[int, dict[str, Any], str]
"""A request's line, its flat fields, and what goes before a field's name in messages."""
Requests = Callable[[Path, Problems], Iterator[Found]]


def _read(path: Path, requests: Requests, sources: Sources, idle: tuple[str, ...] = ()) -> Table:
    """Read the requests of a file; those not completed count as failed."""
    problems = Problems(path)
    records = Records(problems, sources, idle)
    for found in requests(path, problems):
        records.add(*found)
    return records.table()


def _format(
    name: str,
    begins: str,
    detect: Callable[[Head], bool],
    requests: Requests,
    sources: Sources,
    *,
    idle: tuple[str, ...] = (),
) -> Format:
    read = partial(_read, requests=requests, sources=sources, idle=idle)
    return Format(name, begins, detect, read, used=used_as(sources), idle=idle)


def _aiperf(path: Path, problems: Problems) -> Iterator[Found]:
    """Yield the requests of the measured phase, not those of the warm-up."""
    for row in rows(path, problems):
        values = flat(row.values)
        if values.get("metadata.benchmark_phase") != "warmup":
            yield row.line, values


METRICS = "metrics.{}.value"
AIPERF = _format(
    "aiperf",
    'JSONL: {"metadata": {"request_start_ns": ..}, "metrics": {..}}',
    lambda head: {"metadata", "metrics"} <= head.keys,
    _aiperf,
    {
        "arrival": source("metadata.request_start_ns", unit="ns"),
        "end": source("metadata.request_end_ns", unit="ns"),
        "prompt": source(
            METRICS.format("input_sequence_length"), METRICS.format("usage_prompt_tokens")
        ),
        "output": source(
            METRICS.format("output_sequence_length"), METRICS.format("usage_completion_tokens")
        ),
        "ttft": source(METRICS.format("time_to_first_token"), unit="ms"),
        "e2el": source(METRICS.format("request_latency"), unit="ms"),
        "conversation": source("metadata.conversation_id"),
        "turn": source("metadata.turn_index"),
        "error": source("error", "metadata.was_cancelled"),
    },
    idle=(
        "metrics.*",
        "error.*",
        "metadata.session_num",
        "metadata.*_ns",
        "metadata.benchmark_phase",
        "metadata.context_overflow_skip",
    ),
)
"""AIPerf's `profile_export.jsonl`: moments in ns since 1970, lengths of time in ms."""


def _guidellm(path: Path, problems: Problems) -> Iterator[Found]:
    """Yield the requests of all benchmarks in the file, one benchmark after the other."""
    text = read_text(path)
    benchmarks = parse_object(path, text).get("benchmarks")
    if not isinstance(benchmarks, list):
        raise HeadwayError(f"{path}:1: benchmarks: missing, or not a list")
    if len(benchmarks) > 1:
        told = f"{path}: benchmarks: {len(benchmarks)} loads follow one another in it"
        warnings.warn(told, HeadwayWarning, stacklevel=2)
    for k in range(len(benchmarks)):
        for kind in ("successful", "errored", "incomplete"):
            failed = {} if kind == "successful" else {"failed": kind}
            for line, values in flat_objects(text, ("benchmarks", k, "requests", kind), problems):
                yield line, values | failed


GUIDELLM = _format(
    "guidellm",
    'JSON: {"benchmarks": [{"requests": {"successful": [..]}}]}',
    lambda head: isinstance(head.first.get("benchmarks"), list),
    _guidellm,
    {
        "arrival": source("request_start_time", "start_time", unit="s"),
        "end": source("request_end_time", "end_time", unit="s"),
        "prompt": source("prompt_tokens"),
        "output": source("output_tokens"),
        "ttft": source("time_to_first_token_ms", unit="ms"),
        "e2el": source("request_latency", unit="s"),
        "conversation": source("info.conversation_id"),
        "turn": source("info.turn_index"),
        "error": source("failed"),
    },
    idle=(
        "info.timings.*",
        "info.history_len",
        "info.preceding_nodes",
        "*_delay",
        "*tokens_per_*",
        "time_*_ms",
        "*.text_words",
        "*.text_characters",
        "type_",
    ),
)
"""guidellm's `benchmarks.json`: moments are seconds since 1970; what guidellm cancelled at the end
of a benchmark is told as incomplete."""


def _inference_perf(path: Path, problems: Problems) -> Iterator[Found]:
    """Yield the requests; the last token's time, not the connection's end, ends one."""
    text = read_text(path)
    parse(path, text)
    for line, values in flat_objects(text, (), problems):
        times = values.get("output_token_times")
        if isinstance(times, list) and times:
            values |= {"first": times[0], "end_time": times[-1]}
        if isinstance(values.get("error"), dict):
            values["error"] = str(values["error"])
        yield line, values


INFERENCE_PERF = _format(
    "inference_perf",
    "JSON: [{start_time, end_time, info: {input_tokens, output_token_times}}]",
    lambda head: {"start_time", "info"} <= head.keys,
    _inference_perf,
    {
        "arrival": source("start_time", unit="s"),
        "end": source("end_time", unit="s"),
        "first": source("first", unit="s"),
        "prompt": source("input_tokens"),
        "output": source("output_tokens"),
        "error": source("error"),
    },
)
"""inference-perf's `per_request_lifecycle_metrics.json`, in seconds of a clock of its own."""


def _trtllm_bench(path: Path, problems: Problems) -> Iterator[Found]:
    """Yield the requests; a first token that was not streamed has no time."""
    for line, values in json_requests(path, problems):
        if values.get("first_token_timestamp") == -1:
            values["first_token_timestamp"] = None
        yield line, values


TRTLLM_BENCH = _format(
    "trtllm_bench",
    "JSON of trtllm-bench --request_json: [{num_input_tokens, start_timestamp, tokens}]",
    lambda head: {"num_input_tokens", "start_timestamp"} <= first_request(head).keys(),
    _trtllm_bench,
    {
        "arrival": source("start_timestamp", unit="ns"),
        "first": source("first_token_timestamp", unit="ns"),
        "end": source("end_timestamp", unit="ns"),
        "prompt": source("num_input_tokens"),
        "output": source("num_output_tokens"),
        "error": source("error_tokens"),
    },
    idle=(
        "tokens",
        "decode_iteration",
        "num_generated_tokens",
        "generation_time",
        "intertoken_latency",
        "end_to_end_latency",
        "time_to_first_token",
    ),
)
"""What trtllm-bench notes of its requests, in ns of a clock of its own."""


def _agentperfbench(path: Path, problems: Problems) -> Iterator[Found]:
    """Yield the requests; their clients' semaphore, not their plan, says when they were sent."""
    text = read_text(path)
    parse(path, text)
    yield from flat_objects(text, ("per_request",), problems)


AGENTPERFBENCH = _format(
    "agentperfbench",
    "JSON of AgentPerfBench: {config, summary, per_request: [..]}",
    lambda head: {"summary", "per_request"} <= head.keys,
    _agentperfbench,
    {
        "arrival": source("semaphore_acquired_at_ms", "dispatch_started_at_ms", unit="ms"),
        "ttft": source("ttft_ms", unit="ms"),
        "tpot": source("tpot_ms", unit="ms"),
        "e2el": source("e2el_ms", unit="ms"),
        "prompt": source("input_tokens"),
        "output": source("output_tokens"),
        "max_tokens": source("max_tokens_requested"),
        "prefix": source("session_id"),
        "turn": source("turn_index"),
        "success": source("success"),
        "error": source("error"),
    },
    idle=(
        "itl_ms",
        "request_index",
        "message_count",
        "prompt_chars",
        "*_at_ms",
        "client_*",
        "cache_*",
        "*context_tokens",
        "*prefill_tokens",
        "metadata*",
        "workload_*",
        "source_*",
    ),
)
"""What AgentPerfBench writes of each request; a session's turns begin with those before them."""

BENCH_COLUMNS = {
    "arrival": source("start_times", unit="s"),
    "prompt": source("input_lens"),
    "output": source("output_lens"),
    "ttft": source("ttfts"),
    "e2el": source("latency"),
    "error": source("errors"),
}


def _vllm_bench(path: Path, problems: Problems) -> Iterator[Found]:
    """Yield the requests; the gaps between a request's tokens give the time of its last one."""
    whole = _one_result(path, problems)
    for key in ("input_lens", "output_lens"):
        if not isinstance(whole.get(key), list):
            raise HeadwayError(
                f"{path}:1: {key}: missing: lists of requests come with --save-detailed "
                "(SGLang: --output-details)"
            )
    if not isinstance(whole.get("start_times"), list):
        whole["start_times"] = _sent_at_once(path, whole)
    known = (name for found in BENCH_COLUMNS.values() for name in found.names)
    names = [name for name in (*known, "itls") if isinstance(whole.get(name), list)]
    count = len(whole["input_lens"])
    for name in names:
        if len(whole[name]) != count:
            raise HeadwayError(f"{path}:1: {name}: {len(whole[name])} values for {count} requests")
    for k in range(count):
        row = {name: whole[name][k] for name in names}
        gaps, first = row.get("itls"), row.get("ttfts")
        if isinstance(first, int | float) and first and isinstance(gaps, list):
            try:
                row["latency"] = first + sum(gaps)
            except TypeError:
                problems.add(1, f"request {k}: itls", "not a list of numbers")
        yield 1, row, f"request {k}: "


def _one_result(path: Path, problems: Problems) -> dict[str, Any]:
    """Return the only result of a file; HeadwayError names the loads of several."""
    if is_json_lines(path):
        found = [row.values for row in rows(path, problems)]
        problems.stop()
    else:
        whole = parse(path, read_text(path))
        found = whole if isinstance(whole, list) else [whole]
    if len(found) == 1 and isinstance(found[0], dict):
        return found[0]
    loads = [_load(one) if isinstance(one, dict) else "none" for one in found]
    named = ", ".join(f"{k}: {load}" for k, load in enumerate(loads[:6], 1))
    which = f"which of {len(found)}? {named}"
    raise HeadwayError(f"{path}:1: line: several results; write one result to a file ({which})")


def _load(result: Mapping[str, Any]) -> str:
    """Say what load a result is of, as a scenario has it."""
    found = {key: result.get(key) for key in ("request_rate", "max_concurrency")}
    return ", ".join(f"{k} {v}" for k, v in found.items() if v is not None) or "no request_rate"


def _sent_at_once(path: Path, result: Mapping[str, Any]) -> list[float]:
    """Return the times of requests that were sent without a wait, 0 s; HeadwayError for others.

    SGLang's bench_serving writes none, and vLLM's not before 0.10.
    """
    if str(result.get("request_rate")).lower() in {"inf", "infinity"} and not result.get(
        "max_concurrency"
    ):
        return [0.0] * len(result["input_lens"])
    raise HeadwayError(
        f"{path}:1: start_times: missing: its benchmark ({_load(result)}) did not write when it "
        "sent each request; a scenario can generate such a load, its lengths from these lists"
    )


VLLM_BENCH = _format(
    "vllm_bench",
    "JSON of vllm bench serve --save-detailed",
    lambda head: (
        {"input_lens", "output_lens"} <= head.keys
        or {"total_input_tokens", "total_output_tokens", "request_throughput"} <= head.keys
    ),
    _vllm_bench,
    BENCH_COLUMNS,
)
"""The result of `vllm bench serve --save-result --save-detailed`: a list for each column.
`start_times` (vLLM 0.10 and later) are seconds of a clock of its own."""
