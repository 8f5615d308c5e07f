"""Formats that are tables of names: which column or key is what, in which unit, and what is idle.

Azure's, BurstGPT's and plain lengths are CSV. The others are what load generators write of the
requests that they sent; where these are not objects in a list, a function finds them.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.traces.documents import (
    flat_objects,
    is_json_lines,
    parse,
    parse_object,
    read_text,
)
from simulator.workload.traces.format import Head, Problems, Published
from simulator.workload.traces.formats.named import first_request, json_requests
from simulator.workload.traces.formats.table import Found, table_format
from simulator.workload.traces.json_lines import rows

T = TypeVar("T")


def _has(names: str) -> Callable[[Head], bool]:
    """Return what tells a file by one of the names in its header."""
    return lambda head: not set(names.split(",")).isdisjoint(head.columns)


AZURE_DATA = (
    "the Azure LLM inference trace {} of the Microsoft Azure Public Dataset ({}), licence "
    "CC-BY-4.0: get {} from the repository Azure/AzurePublicDataset on GitHub"
)
SPLITWISE = "Patel et al., Splitwise, ISCA'24"
DYNAMO_LLM = "Stojkovic et al., DynamoLLM, HPCA'25"
AZURE = table_format(
    "azure",
    "CSV: TIMESTAMP,ContextTokens,GeneratedTokens",
    _has("ContextTokens,GeneratedTokens"),
    "arrival=TIMESTAMP, prompt=ContextTokens, output=GeneratedTokens",
    published=(
        Published(
            ("_1week", "azure_llm_2024"),
            AZURE_DATA.format("2024", DYNAMO_LLM, "the link in AzureLLMInferenceDataset2024.md"),
        ),
        Published(
            ("azurellminferencetrace_code", "azure_llm_2023_code"),
            AZURE_DATA.format("2023 (code)", SPLITWISE, "data/AzureLLMInferenceTrace_code.csv"),
        ),
        Published(
            ("azurellminferencetrace_", "azure_llm_2023"),
            AZURE_DATA.format(
                "2023 (conversation)", SPLITWISE, "data/AzureLLMInferenceTrace_conv.csv"
            ),
        ),
    ),
)
"""The Azure LLM inference traces of 2023 and 2024."""
BURSTGPT = table_format(
    "burstgpt",
    "CSV: Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    _has("Request tokens,Response tokens"),
    "arrival=Timestamp:s, prompt=Request tokens, output=Response tokens, group=Model|, "
    "conversation=Session ID|, e2el=Elapsed time|:s",
    idle="Total tokens, Log Type",
    published=(
        Published(
            ("burstgpt",),
            "BurstGPT (Wang et al., KDD'25), licence CC-BY-4.0: get it from the releases of the "
            "repository HPMLL/BurstGPT on GitHub",
        ),
    ),
)
"""Requests to ChatGPT and GPT-4 at a university; the lines of failed ones are kept."""
LENGTHS = table_format(
    "lengths",
    "CSV: [arrived_at,]num_prefill_tokens,num_decode_tokens",
    _has("num_prefill_tokens,num_decode_tokens"),
    "arrival=arrived_at|:s, prompt=num_prefill_tokens, output=num_decode_tokens",
    idle="num_total_tokens, pd_ratio",
)
"""Plain lengths, with arrivals (Splitwise) or without (Vidur, Sarathi-Serve)."""


def _aiperf(path: Path, problems: Problems) -> Iterator[Found]:
    """Yield the requests of the measured phase, not those of the warm-up."""
    key, warmup = "metadata.benchmark_phase", 0
    for line, values in json_requests(path, problems):
        if values.get(key) == "warmup":
            warmup += 1
        else:
            yield line, values
    if warmup:
        told = f"{path}: {key}: requests of the warm-up left out: {warmup}"
        warnings.warn(told, HeadwayWarning, stacklevel=2)


AIPERF = table_format(
    "aiperf",
    'JSONL: {"metadata": {"request_start_ns": ..}, "metrics": {..}}',
    lambda head: {"metadata", "metrics"} <= head.keys,
    "arrival=metadata.request_start_ns:ns, end=metadata.request_end_ns:ns, "
    "prompt=metrics.input_sequence_length.value|metrics.usage_prompt_tokens.value, "
    "output=metrics.output_sequence_length.value|metrics.usage_completion_tokens.value, "
    "ttft=metrics.time_to_first_token.value:ms, e2el=metrics.request_latency.value:ms, "
    "conversation=metadata.conversation_id, turn=metadata.turn_index, "
    "images=metrics.num_images.value, cached=metrics.usage_prompt_cache_read_tokens.value, "
    "reasoning=metrics.reasoning_token_count.value, error=error|metadata.was_cancelled",
    idle="metrics.*, error.*, metadata.session_num, metadata.*_ns, metadata.benchmark_phase, "
    "metadata.context_overflow_skip",
    requests=_aiperf,
)
"""AIPerf's `profile_export.jsonl`: moments in ns since 1970, lengths of time in ms."""


def _guidellm(path: Path, problems: Problems, result: int | None = None) -> Iterator[Found]:
    """Yield the requests of a benchmark, or of all in the file, one after the other."""
    text = read_text(path)
    benchmarks = parse_object(path, text).get("benchmarks")
    if not isinstance(benchmarks, list):
        raise HeadwayError(f"{path}:1: benchmarks: missing, or not a list")
    chosen = list(range(len(benchmarks)))
    if result is not None:
        chosen = _choose(path, chosen, result)
    elif len(benchmarks) > 1:
        told = f"{path}: benchmarks: {len(benchmarks)} loads follow one another in it"
        warnings.warn(f"{told}; --result 1 reads the first alone", HeadwayWarning, stacklevel=2)
    negative = 0
    for k in chosen:
        for kind in ("successful", "errored", "incomplete"):
            failed = {} if kind == "successful" else {"failed": kind}
            for line, values in flat_objects(text, ("benchmarks", k, "requests", kind), problems):
                first = values.get("time_to_first_token_ms")
                if isinstance(first, float) and first < 0:  # guidellm's, where no token was timed
                    negative += 1
                    values["time_to_first_token_ms"] = None
                yield line, values | failed
    if negative:
        told = f"{path}: time_to_first_token_ms: below 0, and not taken: requests: {negative}"
        warnings.warn(told, HeadwayWarning, stacklevel=2)


GUIDELLM = table_format(
    "guidellm",
    'JSON: {"benchmarks": [{"requests": {"successful": [..]}}]}',
    lambda head: isinstance(head.first.get("benchmarks"), list),
    "arrival=request_start_time|start_time:s, end=request_end_time|end_time:s, "
    "prompt=prompt_tokens, output=output_tokens, ttft=time_to_first_token_ms:ms, "
    "e2el=request_latency:s, conversation=info.conversation_id, turn=info.turn_index, "
    "images=input_metrics.image_count, error=failed",
    idle="info.timings.*, info.history_len, info.preceding_nodes, *_delay, *tokens_per_*, "
    "time_*_ms, *.text_words, *.text_characters, *.image_*, type_, request_args",
    requests=_guidellm,
    options=("result",),
)
"""guidellm's `benchmarks.json`: moments are seconds since 1970; what guidellm cancelled at the end
of a benchmark is told as incomplete."""
INFERENCE_PERF = table_format(
    "inference_perf",
    "JSON: [{start_time, end_time, info: {input_tokens, output_token_times}}]",
    lambda head: {"start_time", "info"} <= head.keys,
    "arrival=start_time:s, first=output_token_times[0]:s, end=output_token_times[-1]|end_time:s, "
    "prompt=input_tokens, output=output_tokens, error=error",
    idle="error.*",
    requests=json_requests,
)
"""inference-perf's `per_request_lifecycle_metrics.json`, in seconds of a clock of its own; the last
token's time, not the connection's end, ends a request."""
TRTLLM_BENCH = table_format(
    "trtllm_bench",
    "JSON of trtllm-bench --request_json: [{num_input_tokens, start_timestamp, tokens}]",
    lambda head: {"num_input_tokens", "start_timestamp"} <= first_request(head).keys(),
    "arrival=start_timestamp:ns, first=first_token_timestamp:ns, end=end_timestamp:ns, "
    "prompt=num_input_tokens, output=num_output_tokens, error=error_tokens",
    idle="tokens, decode_iteration, num_generated_tokens, generation_time, "
    "intertoken_latency, end_to_end_latency, time_to_first_token",
    requests=json_requests,
)
"""What trtllm-bench notes of its requests, in ns of a clock of its own."""
AGENTPERFBENCH = table_format(
    "agentperfbench",
    "JSON of AgentPerfBench: {config, summary, per_request: [..]}",
    lambda head: {"summary", "per_request"} <= head.keys,
    "arrival=semaphore_acquired_at_ms|dispatch_started_at_ms:ms, ttft=ttft_ms:ms, tpot=tpot_ms:ms, "
    "e2el=e2el_ms:ms, prompt=input_tokens, output=output_tokens, max_tokens=max_tokens_requested, "
    "prefix=session_id, turn=turn_index, success=success, error=error",
    idle="itl_ms, request_index, message_count, prompt_chars, *_at_ms, client_*, cache_*, "
    "*context_tokens, *prefill_tokens, metadata*, workload_*, source_*",
    requests=json_requests,
)
"""What AgentPerfBench writes of each request; its clients' semaphore, not their plan, says when it
was sent; a session's turns begin with those before them."""

BENCH_LISTS = {"start_times", "input_lens", "output_lens", "ttfts", "errors", "itls"}


def _vllm_bench(path: Path, problems: Problems, result: int | None = None) -> Iterator[Found]:
    """Yield the requests; the gaps between a request's tokens give the time of its last one."""
    whole = _one_result(path, problems, result)
    for key in ("input_lens", "output_lens"):
        if not isinstance(whole.get(key), list):
            raise HeadwayError(
                f"{path}:1: {key}: missing: lists of requests come with --save-detailed "
                "(SGLang: --output-details)"
            )
    if not isinstance(whole.get("start_times"), list):
        whole["start_times"] = _sent_at_once(path, whole)
    count = len(whole["input_lens"])
    lists = {name: values for name, values in whole.items() if isinstance(values, list)}
    for name in lists.keys() & BENCH_LISTS:
        if len(whole[name]) != count:
            raise HeadwayError(f"{path}:1: {name}: {len(whole[name])} values for {count} requests")
    for k in range(count):
        row = {name: values[k] for name, values in lists.items() if len(values) == count}
        gaps, first = row.get("itls"), row.get("ttfts")
        if isinstance(first, int | float) and first and isinstance(gaps, list):
            try:
                row["latency"] = first + sum(gaps)
            except TypeError:
                problems.add(1, f"request {k}: itls", "not a list of numbers")
        yield 1, row, f"request {k}: "


def _choose(path: Path, found: list[T], result: int) -> list[T]:
    """Return the chosen one of several results, counted from 1 on."""
    if not 1 <= result <= len(found):
        raise HeadwayError(f"{path}: result: {result}: there are {len(found)}")
    return found[result - 1 : result]


def _one_result(path: Path, problems: Problems, result: int | None) -> dict[str, Any]:
    """Return a result of a file; HeadwayError names the loads where there are several."""
    if is_json_lines(path):
        found = [row.values for row in rows(path, problems)]
        problems.stop()
    else:
        whole = parse(path, read_text(path))
        found = whole if isinstance(whole, list) else [whole]
    found = found if result is None else _choose(path, found, result)
    if len(found) == 1 and isinstance(found[0], dict):
        return found[0]
    loads = [_load(one) if isinstance(one, dict) else "none" for one in found]
    named = ", ".join(f"{k}: {load}" for k, load in enumerate(loads[:6], 1))
    raise HeadwayError(
        f"{path}:1: line: several results; say --result 1, in a scenario trace: {{result: 1}} "
        f"(which of {len(found)}? {named})"
    )


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


VLLM_BENCH = table_format(
    "vllm_bench",
    "JSON of vllm bench serve --save-detailed",
    lambda head: (
        {"input_lens", "output_lens"} <= head.keys
        or {"total_input_tokens", "total_output_tokens", "request_throughput"} <= head.keys
    ),
    "arrival=start_times:s, prompt=input_lens, output=output_lens, ttft=ttfts, e2el=latency, "
    "error=errors",
    requests=_vllm_bench,
    options=("result",),
)
"""The result of `vllm bench serve --save-result --save-detailed`: a list for each column.
`start_times` (vLLM 0.10 and later) are seconds of a clock of its own."""
