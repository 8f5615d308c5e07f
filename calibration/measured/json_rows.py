"""Requests out of JSON: lines, a list, or what benchmarks write; rows of texts, like those of CSV.

- `vllm bench serve --save-result --save-detailed`: one object, with a list for each column
  (`input_lens`, `output_lens`, `ttfts`, `itls`, `start_times`, `errors`).
- A list of objects, one for each request; what is nested in them counts as theirs.
- inference-perf's `per_request_lifecycle_metrics.json`: such a list, with `output_token_times`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.util.errors import HeadwayError

BENCH = {
    "input_lens": "input_tokens",
    "output_lens": "output_tokens",
    "ttfts": "ttft_s",
    "start_times": "arrival_s",
    "errors": "error",
}
"""Lists of a detailed result of vLLM's benchmark, and our columns."""


def read_json(path: Path, text: str) -> list[dict[str, str]]:
    """Read the requests of a JSON text; HeadwayError names the file and the line."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        return [_texts(path, row) for row in _lines(path, text)]
    if isinstance(whole, dict) and isinstance(whole.get("input_lens"), list):
        return [_texts(path, row) for row in _columns(path, whole)]
    if isinstance(whole, dict):
        nested = next((v for v in whole.values() if isinstance(v, list) and v), None)
        several = nested is not None and isinstance(nested[0], dict)
        whole = nested if several else [whole]
    return [_texts(path, row) for row in whole]


def _lines(path: Path, text: str) -> Iterator[Any]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise HeadwayError(f"{path}:{number}: not JSON: {error.msg}") from None


def _columns(path: Path, raw: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Turn a detailed result's columns into rows; gaps between tokens give the last one's time."""
    if "start_times" not in raw:
        raise HeadwayError(f"{path}:1: lacks start_times: when each request was sent")
    names = [name for name in BENCH if isinstance(raw.get(name), list)]
    count = len(raw["input_lens"])
    gaps = raw.get("itls")
    for name in (*names, *(["itls"] if gaps else [])):
        if len(raw[name]) != count:
            raise HeadwayError(f"{path}:1: {name}: {len(raw[name])} values for {count} requests")
    for k in range(count):
        row = {BENCH[name]: raw[name][k] for name in names}
        if gaps and row.get("ttft_s"):
            row["e2e_s"] = row["ttft_s"] + sum(gaps[k])
        yield row


def _texts(path: Path, row: Any) -> dict[str, str]:
    """Flatten a request and make texts of its values."""
    if not isinstance(row, Mapping):
        raise HeadwayError(f"{path}:1: must be JSON objects, one for each request")
    flat = dict(_flat(row))
    times, start = flat.get("output_token_times"), flat.get("start_time")
    if isinstance(times, Sequence) and times and isinstance(start, int | float):
        flat |= {"ttft_s": times[0] - start, "e2e_s": times[-1] - start}
    return {key: "" if value is None else str(value) for key, value in flat.items()}


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key, value
