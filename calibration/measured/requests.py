"""Per-request files of measured runs: CSV or JSON, plain or packed, of several harnesses.

Columns are known by name; times are seconds unless the name ends in `_ms` or `_us`. JSON is one of

- `vllm bench serve --save-result --save-detailed`: one object, with a list for each column
  (`input_lens`, `output_lens`, `ttfts`, `itls`, `start_times`, `errors`).
- A list of objects, or a line for each, one for each request; what is nested in them counts as
  theirs.
- inference-perf's `per_request_lifecycle_metrics.json`: such a list, with `output_token_times`.
"""

import csv
import io
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.text_files import read_text
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.json_text import parse_json

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Rows = list[tuple[int, dict[str, str]]]
"""Requests as texts by column, each with its line."""

UNITS = {"_s": 1.0, "_sec": 1.0, "_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9, "": 1.0}
TIMES = {
    "arrival": (
        "arrival",
        "arrival_time",
        "arrived_at",
        "start",
        "start_time",
        "timestamp",
        "send_time",
        "sent",
        "request_start_time",
    ),
    "ttft": ("ttft", "time_to_first_token"),
    "tpot": ("tpot", "time_per_output_token", "mean_itl", "itl"),
    "e2el": ("e2e", "e2el", "latency", "e2e_latency", "request_latency", "end_to_end_latency"),
    "decode": ("generation_time", "decode", "decode_time"),
    "queue": ("queue", "queue_wait", "queue_time"),
    "first": ("first_token_time", "first_token_at", "first_token"),
    "end": ("end", "end_time", "finished_at", "finish_time"),
}
LENGTHS = {
    "prompt": (
        "input_tokens",
        "prompt_tokens",
        "input_num_tokens",
        "prompt_len",
        "input_len",
        "isl",
    ),
    "output": (
        "output_tokens",
        "generation_tokens",
        "output_num_tokens",
        "completion_tokens",
        "output_len",
        "osl",
    ),
}
TIMESTAMPS = ("arrival", "first", "end")
"""Those that are read off a clock; the others are lengths of time."""
CLIENT = ("client_id", "client", "session_id")
CONVERSATION = ("conversation", "conversation_id", "session")
PROMPT = ("prompt_id", "prompt_hash")
TURNS = ("input_num_turns", "turn", "turn_index")

BENCH_COLUMNS = {
    "input_lens": "input_tokens",
    "output_lens": "output_tokens",
    "ttfts": "ttft_s",
    "start_times": "arrival_s",
    "errors": "error",
}
"""Lists of a detailed result of vLLM's benchmark, and our columns."""


@dataclass(frozen=True)
class Requests:
    """What a run's requests were and how long they took; seconds and tokens, by arrival.

    NaN: not recorded, or a single token's tpot.
    """

    arrival: Floats
    prompt: Ints
    output: Ints
    ttft: Floats
    tpot: Floats
    e2el: Floats
    client: list[str] | None = None  # who sent it
    conversation: list[str] | None = None  # whose next turn it is
    turn: Ints | None = None
    prompt_id: list[str] | None = None  # requests of one id have the same prompt

    def __len__(self) -> int:
        return len(self.arrival)


def read_requests(path: Path) -> Requests:
    """Read a file; HeadwayError names it, the line and the column that is wrong."""
    rows = _drop_failed(read_records(path))
    if not rows:
        raise HeadwayError(f"{path}: has no requests")
    known = list(dict.fromkeys(key for _, row in rows for key in row))
    columns = {name: _find_time(known, words) for name, words in TIMES.items()}
    lengths = {name: _find(known, words) for name, words in LENGTHS.items()}
    lacking = [name for name, found in lengths.items() if found is None]
    lacking += [name for name in ("arrival",) if columns[name] is None]
    if lacking:
        allowed = {**{k: v[0] for k, v in LENGTHS.items()}, "arrival": "arrival_s"}
        raise HeadwayError(
            f"{path}:1: lacks a column of each request's {', '.join(lacking)} "
            f"({', '.join(allowed[name] for name in lacking)})"
        )
    times = {
        name: _times(path, rows, *found, timestamp=name in TIMESTAMPS)
        if found
        else np.full(len(rows), np.nan)
        for name, found in columns.items()
    }
    tokens = {name: _counts(path, rows, found or "") for name, found in lengths.items()}
    return _derive_latencies(path, rows, times, tokens)


def _derive_latencies(
    path: Path,
    rows: Rows,
    times: dict[str, Floats],
    tokens: dict[str, Ints],
) -> Requests:
    """Work out what a layout leaves to be worked out; sort by arrival."""
    arrival, ttft, tpot, e2el = (times[name] for name in ("arrival", "ttft", "tpot", "e2el"))
    gaps = tokens["output"] - 1
    several = gaps > 0
    ttft = np.where(np.isnan(ttft), times["first"] - arrival, ttft)
    e2el = np.where(np.isnan(e2el), times["end"] - arrival, e2el)
    e2el = np.where(np.isnan(e2el), ttft + times["decode"], e2el)
    worked_out = np.where(several, (e2el - ttft) / np.where(several, gaps, 1), np.nan)
    tpot = np.where(several & np.isnan(tpot), worked_out, np.where(several, tpot, np.nan))
    e2el = np.where(np.isnan(e2el), ttft + np.where(several, tpot * gaps, 0.0), e2el)
    if np.isnan(arrival).any():
        raise HeadwayError(f"{path}:{rows[int(np.isnan(arrival).argmax())][0]}: arrival: is empty")
    for name, values in (("first token", ttft), ("last token", e2el)):
        if (bad := np.flatnonzero(values < -1e-6)).size:
            raise HeadwayError(
                f"{path}:{rows[bad[0]][0]}: the {name} comes {-values[bad[0]]:g} s before the "
                "arrival: impossible"
            )
    late = np.flatnonzero(e2el < ttft - 1e-3)
    if late.size:
        k = late[0]
        raise HeadwayError(
            f"{path}:{rows[k][0]}: the last token comes {e2el[k]:g} s after the arrival, the first "
            f"one {ttft[k]:g} s: impossible"
        )
    order = np.argsort(arrival, kind="stable")
    turns = _find(list(rows[0][1]), TURNS)
    return Requests(
        arrival=arrival[order] - arrival.min(),
        prompt=np.maximum(tokens["prompt"][order], 1),
        output=np.maximum(tokens["output"][order], 1),
        ttft=ttft[order],
        tpot=tpot[order],
        e2el=e2el[order],
        client=_text_column(rows, CLIENT, order),
        conversation=_text_column(rows, CONVERSATION, order),
        turn=None if turns is None else _counts(path, rows, turns)[order],
        prompt_id=_text_column(rows, PROMPT, order),
    )


def read_records(path: Path) -> list[dict[str, str]]:
    """Read CSV or JSON lines, packed by gzip or not, as mappings of texts."""
    text = read_text(path)
    if text.lstrip()[:1] in {"{", "["}:
        return _read_json(path, text)
    try:
        return [
            {key.strip(): value or "" for key, value in row.items() if key}
            for row in csv.DictReader(io.StringIO(text))
        ]
    except csv.Error as error:
        raise HeadwayError(f"{path}: no CSV: {error}") from None


def _read_json(path: Path, text: str) -> list[dict[str, str]]:
    """Read the requests of a JSON text; HeadwayError names the file and the line."""
    try:
        whole = parse_json(text)
    except json.JSONDecodeError:
        return [_flat_texts(path, row) for row in _json_lines(path, text)]
    if isinstance(whole, dict) and isinstance(whole.get("input_lens"), list):
        return [_flat_texts(path, row) for row in _bench_rows(path, whole)]
    if isinstance(whole, dict):
        nested = next((v for v in whole.values() if isinstance(v, list) and v), None)
        several = nested is not None and isinstance(nested[0], dict)
        whole = nested if several else [whole]
    return [_flat_texts(path, row) for row in whole]


def _json_lines(path: Path, text: str) -> Iterator[Any]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield parse_json(line)
        except json.JSONDecodeError as error:
            raise HeadwayError(f"{path}:{number}: not JSON: {error.msg}") from None


def _bench_rows(path: Path, raw: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Turn a detailed result's columns into rows; gaps between tokens give the last one's time."""
    if "start_times" not in raw:
        raise HeadwayError(f"{path}:1: lacks start_times: when each request was sent")
    names = [name for name in BENCH_COLUMNS if isinstance(raw.get(name), list)]
    count = len(raw["input_lens"])
    gaps = raw.get("itls")
    for name in (*names, *(["itls"] if gaps else [])):
        if len(raw[name]) != count:
            raise HeadwayError(f"{path}:1: {name}: {len(raw[name])} values for {count} requests")
    for k in range(count):
        row = {BENCH_COLUMNS[name]: raw[name][k] for name in names}
        if gaps and row.get("ttft_s"):
            row["e2e_s"] = row["ttft_s"] + sum(gaps[k])
        yield row


def _flat_texts(path: Path, row: Any) -> dict[str, str]:
    """Flatten a request and make texts of its values."""
    if not isinstance(row, Mapping):
        raise HeadwayError(f"{path}:1: must be JSON objects, one for each request")
    flat = dict(_flatten(row))
    times, start = flat.get("output_token_times"), flat.get("start_time")
    if isinstance(times, Sequence) and times and isinstance(start, int | float):
        flat |= {"ttft_s": times[0] - start, "e2e_s": times[-1] - start}
    return {key: "" if value is None else str(value) for key, value in flat.items()}


def _flatten(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten(value)
        else:
            yield key, value


def _drop_failed(rows: list[dict[str, str]]) -> Rows:
    """Leave out requests that failed, and say how many; give the others with their lines."""
    kept = [(line, row) for line, row in enumerate(rows, 2) if not _failed(row)]
    if lost := len(rows) - len(kept):
        told = f"{lost} of {len(rows)} requests failed when they were measured: left out"
        warnings.warn(told, HeadwayWarning, stacklevel=3)
    return kept


def _failed(row: Mapping[str, str]) -> bool:
    told = row.get("success", row.get("ok", "")).strip().lower()
    error = (row.get("error") or row.get("error_message") or "").strip().lower()
    return told in {"false", "0", "no"} or error not in {"", "none", "null", "nan", "false", "0"}


def _find(known: Sequence[str], words: Sequence[str]) -> str | None:
    return next((word for word in words if word in known), None)


def _find_time(known: Sequence[str], words: Sequence[str]) -> tuple[str, float] | None:
    """Find a column of times and the seconds in its unit."""
    for word in words:
        for suffix, unit in UNITS.items():
            if word + suffix in known:
                return word + suffix, unit
    return None


def _times(path: Path, rows: Rows, column: str, unit: float, *, timestamp: bool) -> Floats:
    values = np.array([_number(path, line, row, column, timestamp) for line, row in rows])
    if not timestamp and (bad := np.flatnonzero(values < -1e-6)).size:
        raise HeadwayError(f"{path}:{rows[bad[0]][0]}: {column}: {values[bad[0]]:g} is negative")
    return values * unit


def _counts(path: Path, rows: Rows, column: str) -> Ints:
    values = np.array([_number(path, line, row, column) for line, row in rows])
    bad = np.flatnonzero(~(values >= 0))
    if bad.size:
        raise HeadwayError(f"{path}:{rows[bad[0]][0]}: {column}: must be a count of tokens")
    return np.round(values).astype(np.int64)


def _number(
    path: Path, line: int, row: Mapping[str, str], column: str, timestamp: bool = False
) -> float:
    text = row.get(column, "")
    if text in {"", "nan", "NaN", "None"}:
        return float("nan")
    try:
        return float(text)
    except ValueError:
        if timestamp and (read := _timestamp(text)) is not None:
            return read
        raise HeadwayError(f"{path}:{line}: {column}: {text!r} is no number") from None


def _timestamp(text: str) -> float | None:
    """Read a date and time (ISO 8601), s."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _text_column(rows: Rows, words: Sequence[str], order: Ints) -> list[str] | None:
    column = _find(list(rows[0][1]), words)
    return None if column is None else [rows[k][1].get(column, "") for k in order.tolist()]
