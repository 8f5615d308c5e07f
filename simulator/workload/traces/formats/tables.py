"""Formats that are tables of names: which column or key is what, in which unit, and what is idle.

Azure's, BurstGPT's and plain lengths are CSV. The others are what load generators write of the
requests that they sent; where these are not objects in a list, a function finds them. Datasets of
texts of `vllm bench serve`, its custom one and ShareGPT, have no times.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from simulator.util.errors import TraceError, warn
from simulator.workload.traces import documents
from simulator.workload.traces.csv_columns import read_csv
from simulator.workload.traces.documents import flat
from simulator.workload.traces.format import Format, Problems, Table, reader
from simulator.workload.traces.formats.named import json_requests
from simulator.workload.traces.ledger import AT_THEIR_TIMES
from simulator.workload.traces.records import Records

T = TypeVar("T")
Found = tuple[int, dict[str, Any]] | tuple[int, dict[str, Any], str]
"""A request's line, its flat fields, and what goes before a field's name in messages."""


def read_table(path: Path, form: Format, **options: Any) -> Table:
    """Read a CSV, or the requests that a format's function finds in JSON."""
    if not form.requests:
        return read_csv(path, form)
    problems = Problems(path)
    records = Records(problems, form)
    ends = [name for source in form.columns.values() for name in source.names if name[-1:] == "]"]
    for line, row, *label in reader(form.requests)(path, problems, **options):
        for name in ends:  # KEY[0] or KEY[-1]
            key, _, place = name[:-1].partition("[")
            if isinstance(values := row.get(key), list) and values:
                row[name] = values[int(place)]
        records.add(line, row, *label)
    return records.table()


def aiperf(path: Path, problems: Problems) -> Iterator[Found]:
    """Yield the requests of the measured phase, not those of the warm-up."""
    key = "metadata.benchmark_phase"
    for line, values in json_requests(path, problems):
        if values.get(key) == "warmup":
            problems.notes[f"{key}: requests of the warm-up left out"] += 1
        else:
            yield line, values


def sglang(path: Path, problems: Problems) -> Iterator[Found]:
    """Yield the requests that ended, not the lines that say when each came."""
    text = "event: requests left out, whose end is not logged"
    for line, values in json_requests(path, problems):
        ended = values.get("event") == "request.finished"
        problems.notes[text] += -1 if ended else values.get("event") == "request.received"
        if ended:
            yield line, values


def guidellm(path: Path, problems: Problems, result: int | None = None) -> Iterator[Found]:
    """Yield the requests of a benchmark, or of all in the file, one after the other."""
    text = documents.read_text(path)
    whole = [value for _, value in documents.json_values(path, text)]
    benchmarks = whole[0].get("benchmarks") if [*map(type, whole)] == [dict] else None
    if not isinstance(benchmarks, list) or {*map(type, benchmarks)} - {dict}:
        raise TraceError(path, "missing, or not a list of one file's objects", 1, "benchmarks")
    chosen = list(range(len(benchmarks)))
    if result is not None:
        chosen = _choose(path, chosen, result)
    elif len(benchmarks) > 1:
        told = f"{path}: benchmarks: {len(benchmarks)} loads follow one another in it"
        warn(f"{told}; --result 1 reads the first alone")
    for k in chosen:
        load = flat({key: benchmarks[k].get(key) for key in ("args", "config")})
        most = load.get("streams") or load.get("max_concurrency")
        for kind in ("successful", "errored", "incomplete"):
            failed = {} if kind == "successful" else {"failed": kind}
            for line, one in documents.items(text, ("benchmarks", k, "requests", kind), problems):
                values = flat(one)
                first = values.get("time_to_first_token_ms")
                if isinstance(first, float) and first < 0:  # guidellm's, where no token was timed
                    problems.notes["time_to_first_token_ms: below 0, and not taken: requests"] += 1
                    values["time_to_first_token_ms"] = None
                if most:
                    problems.notes[f"requests recorded under {most} streams, {AT_THEIR_TIMES}"] += 1
                yield line, values | failed


BENCH_LISTS = {"start_times", "input_lens", "output_lens", "ttfts", "errors", "itls"}


def vllm_bench(path: Path, problems: Problems, result: int | None = None) -> Iterator[Found]:
    """Yield the requests; the gaps between a request's tokens give the time of its last one."""
    whole = _one_result(path, problems, result)
    for key in ("input_lens", "output_lens"):
        if not isinstance(whole.get(key), list):
            what = "missing: lists of requests come with --save-detailed "
            raise TraceError(path, f"{what}(SGLang: --output-details)", 1, key)
    if not isinstance(whole.get("start_times"), list):
        whole["start_times"] = _sent_at_once(path, whole)
    count = len(whole["input_lens"])
    if most := whole.get("max_concurrency"):
        problems.notes[f"max_concurrency: requests recorded under {most}, {AT_THEIR_TIMES}"] = count
    lists = {name: values for name, values in whole.items() if isinstance(values, list)}
    for name in lists.keys() & BENCH_LISTS:
        if len(whole[name]) != count:
            raise TraceError(path, f"{len(whole[name])} values for {count} requests", 1, name)
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
        raise TraceError(path, f"{result}: there are {len(found)}", None, "result")
    return found[result - 1 : result]


def _one_result(path: Path, problems: Problems, result: int | None) -> dict[str, Any]:
    """Return a result of a file; TraceError names the loads where there are several."""
    found = [one for _, one in documents.json_objects(path, problems, lambda _: None)]
    problems.stop()
    found = found if result is None else _choose(path, found, result)
    if len(found) == 1:
        return found[0]
    if not found:
        raise TraceError(path, "no result in it, as vllm bench serve writes an object", 1, "line")
    named = ", ".join(f"{k}: {_load(one)}" for k, one in enumerate(found[:6], 1))
    what = "several results; say --result 1, in a scenario trace: {result: 1} "
    raise TraceError(path, f"{what}(which of {len(found)}? {named})", 1, "line")


def _load(result: Mapping[str, Any]) -> str:
    """Say what load a result is of, as a scenario has it."""
    found = {key: result.get(key) for key in ("request_rate", "max_concurrency")}
    return ", ".join(f"{k} {v}" for k, v in found.items() if v is not None) or "no request_rate"


def _sent_at_once(path: Path, result: Mapping[str, Any]) -> list[float]:
    """Return the times of requests that were sent without a wait, 0 s; TraceError for others.

    SGLang's bench_serving writes none, and vLLM's not before 0.10.
    """
    unlimited = str(result.get("request_rate")).lower() in {"inf", "infinity"}
    if unlimited and not result.get("max_concurrency"):
        return [0.0] * len(result["input_lens"])
    what = f"missing: its benchmark ({_load(result)}) did not write when it sent each request, as "
    what += "vLLM 0.10 and later do by --save-detailed; a scenario can generate such a load, its "
    raise TraceError(path, f"{what}lengths from these lists", 1, "start_times")


ESTIMATE = "estimate it by --chars-per-token 4, in a scenario trace: {chars_per_token: 4}"
LENGTHS = ("prompt_len", "input_len")


def custom(path: Path, problems: Problems, chars_per_token: float | None = None) -> Iterator[Found]:
    """Yield the requests of vLLM's custom JSONL.

    There is no tokenizer here: the length of a prompt is read from `prompt_len` or `input_len`,
    or, only where `chars_per_token` is given, estimated from its text.
    """
    for row in documents.rows(path, problems):
        values, text = row.values, row.values.get("prompt")
        if values.keys().isdisjoint(LENGTHS):
            if not isinstance(text, str) or not text:
                row.add_problem("prompt", "neither a text nor, as prompt_len, its length in tokens")
            elif chars_per_token is None:
                why = "counting its tokens needs a tokenizer: add their number as prompt_len"
                row.add_problem("prompt", f"{why}, or {ESTIMATE}")
            values["prompt_len"] = ceil(len(str(text)) / (chars_per_token or 1.0))
        yield row.line, values


SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048


def sharegpt(
    path: Path, problems: Problems, chars_per_token: float | None = None
) -> Iterator[Found]:
    """Yield the lengths of ShareGPT's conversations, pruned as `vllm bench serve` does.

    A conversation's first two messages are prompt and answer. As there, conversations of one
    message are left out, and those with fewer than 4 tokens in either, with more than 1,024 in
    the prompt, or 2,048 together. Lengths are estimated: there is no tokenizer here.
    """
    if chars_per_token is None:
        what = f"counting tokens needs a tokenizer: {ESTIMATE}"
        raise TraceError(path, what, 1, "conversations")
    for line, entry in documents.json_objects(path, problems, lambda _: None):
        turns = entry.pop("conversations", None)
        if not isinstance(turns, list):
            problems.add(line, "conversations", "missing, or not a list")
            continue
        words = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        texts = [word for word in words if isinstance(word, str)]
        if len(texts) < len(words):
            problems.add(line, "conversations", "a message without a value, a text")
        elif len(texts) == 2:
            prompt, output = (ceil(len(one) / chars_per_token) for one in texts)
            fits = prompt <= LONGEST_PROMPT and prompt + output <= LONGEST
            if fits and min(prompt, output) >= SHORTEST:
                problems.notes["conversations: later messages left out"] += len(turns) - 2
                yield line, entry | {"conversations[0]": prompt, "conversations[1]": output}
                continue
        problems.notes["conversations left out, as vllm bench serve does"] += 1
