"""Per-request files of measured runs: CSV, plain or packed, in the layouts of several harnesses.

Columns are known by name; times are seconds unless the name ends in `_ms` or `_us`.
"""

import csv
import gzip
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from simulator.errors import HeadwayError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

UNITS = {"_s": 1.0, "_sec": 1.0, "_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9, "": 1.0}
TIMES = {
    "arrival": ("arrival", "arrival_time", "start", "start_time", "timestamp", "send_time"),
    "ttft": ("ttft", "time_to_first_token"),
    "tpot": ("tpot", "time_per_output_token"),
    "e2el": ("e2e", "e2el", "latency", "e2e_latency", "request_latency"),
    "decode": ("generation_time", "decode", "decode_time"),
    "queue": ("queue", "queue_wait", "queue_time"),
}
LENGTHS = {
    "prompt": ("input_tokens", "prompt_tokens", "input_num_tokens", "prompt_len", "input_len"),
    "output": (
        "output_tokens",
        "generation_tokens",
        "output_num_tokens",
        "completion_tokens",
        "output_len",
    ),
}
CLIENT = ("client_id", "client", "session_id")
CONVERSATION = ("conversation", "conversation_id", "session")
TURNS = ("input_num_turns", "turn", "turn_index")


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

    def __len__(self) -> int:
        return len(self.arrival)


def read_requests(path: Path) -> Requests:
    """Read a file; HeadwayError names it, the line and the column that is wrong."""
    rows = read_rows_of(path)
    if not rows:
        raise HeadwayError(f"{path}: has no requests")
    known = list(rows[0])
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
        name: _times(path, rows, *found) if found else np.full(len(rows), np.nan)
        for name, found in columns.items()
    }
    tokens = {name: _counts(path, rows, found or "") for name, found in lengths.items()}
    return _assemble(path, rows, times, tokens)


def _assemble(
    path: Path,
    rows: Sequence[Mapping[str, str]],
    times: dict[str, Floats],
    tokens: dict[str, Ints],
) -> Requests:
    """Work out what a layout leaves to be worked out; sort by arrival."""
    arrival, ttft, tpot, e2el = (times[name] for name in ("arrival", "ttft", "tpot", "e2el"))
    gaps = tokens["output"] - 1
    several = gaps > 0
    e2el = np.where(np.isnan(e2el), ttft + times["decode"], e2el)
    worked_out = np.where(several, (e2el - ttft) / np.where(several, gaps, 1), np.nan)
    tpot = np.where(several & np.isnan(tpot), worked_out, np.where(several, tpot, np.nan))
    e2el = np.where(np.isnan(e2el), ttft + np.where(several, tpot * gaps, 0.0), e2el)
    if np.isnan(arrival).any():
        raise HeadwayError(f"{path}:{2 + int(np.isnan(arrival).argmax())}: arrival: is empty")
    late = np.flatnonzero(e2el < ttft - 1e-3)
    if late.size:
        raise HeadwayError(
            f"{path}:{2 + late[0]}: the last token comes {e2el[late[0]]:g} s after the arrival, "
            f"the first one {ttft[late[0]]:g} s: impossible"
        )
    order = np.argsort(arrival, kind="stable")
    turns = _find(list(rows[0]), TURNS)
    return Requests(
        arrival=arrival[order] - arrival.min(),
        prompt=np.maximum(tokens["prompt"][order], 1),
        output=np.maximum(tokens["output"][order], 1),
        ttft=ttft[order],
        tpot=tpot[order],
        e2el=e2el[order],
        client=_words(rows, CLIENT, order),
        conversation=_words(rows, CONVERSATION, order),
        turn=None if turns is None else _counts(path, rows, turns)[order],
    )


def read_rows_of(path: Path) -> list[dict[str, str]]:
    """Read CSV or JSON lines, packed by gzip or not, as mappings of texts."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except OSError as error:
        raise HeadwayError(f"{path}: cannot read: {error.strerror or error}") from None
    except (EOFError, UnicodeDecodeError) as error:
        raise HeadwayError(f"{path}: damaged: {error}") from None
    if not text.lstrip().startswith("{"):
        return [
            {key: value or "" for key, value in row.items() if key}
            for row in csv.DictReader(io.StringIO(text))
        ]
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise HeadwayError(f"{path}:{number}: not JSON: {error.msg}") from None
        rows.append({key: "" if value is None else str(value) for key, value in row.items()})
    return rows


def _find(known: Sequence[str], words: Sequence[str]) -> str | None:
    return next((word for word in words if word in known), None)


def _find_time(known: Sequence[str], words: Sequence[str]) -> tuple[str, float] | None:
    """Find a column of times and the seconds in its unit."""
    for word in words:
        for suffix, unit in UNITS.items():
            if word + suffix in known:
                return word + suffix, unit
    return None


def _times(path: Path, rows: Sequence[Mapping[str, str]], column: str, unit: float) -> Floats:
    values = np.array([_number(path, k, row, column) for k, row in enumerate(rows, 2)])
    if column.startswith(("arrival", "start", "timestamp", "send")):
        return values * unit
    if (bad := np.flatnonzero(values < -1e-6)).size:
        raise HeadwayError(f"{path}:{2 + bad[0]}: {column}: {values[bad[0]]:g} is negative")
    return values * unit


def _counts(path: Path, rows: Sequence[Mapping[str, str]], column: str) -> Ints:
    values = np.array([_number(path, k, row, column) for k, row in enumerate(rows, 2)])
    bad = np.flatnonzero(~(values >= 0))
    if bad.size:
        raise HeadwayError(f"{path}:{2 + bad[0]}: {column}: must be a count of tokens")
    return np.round(values).astype(np.int64)


def _number(path: Path, line: int, row: Mapping[str, str], column: str) -> float:
    text = row.get(column, "")
    if text in {"", "nan", "NaN", "None"}:
        return float("nan")
    try:
        return float(text)
    except ValueError:
        raise HeadwayError(f"{path}:{line}: {column}: {text!r} is no number") from None


def _words(
    rows: Sequence[Mapping[str, str]], words: Sequence[str], order: Ints
) -> list[str] | None:
    column = _find(list(rows[0]), words)
    return None if column is None else [rows[k].get(column, "") for k in order.tolist()]
