"""A run as a timeline for ui.perfetto.dev: the legacy JSON trace format, times in microseconds.

Each replica has a track of its steps and counters; each request has a track of its phases. Large
runs are thinned out to MAX_SLICES step slices and MAX_REQUESTS requests; the metadata say so.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.core.log import REASONS, REJECTED, Log
from simulator.results.breakdown import as_computed, find_preemptions
from simulator.results.record import Record
from simulator.results.request_table import Floats, RequestTable
from simulator.results.time_series import arrivals
from simulator.util.files import write_atomic
from simulator.util.version import __version__

MAX_SLICES = 50_000  # slices of steps, and points of each counter, over all replicas
MAX_REQUESTS = 2_000  # requests with a track of their own

Event = tuple[int, dict[str, Any]]
"""Nanoseconds, and the event without its time."""
Span = tuple[str, float, float]
"""Name, start and end (s) of what a request does."""


def write_timeline(record: Record, path: Path) -> str:
    """Write a run's timeline, packed if the name ends in .gz; say in words what was left out.

    Raises HeadwayError where the file cannot be written.
    """
    every = _thinning(len(record.workload), MAX_REQUESTS)
    merged = _thinning(sum(len(log.steps) for log in record.logs), MAX_SLICES)
    notes = []
    if every > 1:
        notes.append(f"every {every}th of {len(record.workload):,} requests")
    if merged > 1:
        notes.append(f"{merged} successive rows of steps.csv in one slice")
    shown = ", ".join(notes) or "all requests and steps"
    text = _text(record, every, merged, shown).encode()
    packed = gzip.compress(text, mtime=0) if path.suffix == ".gz" else text  # the same bytes always
    write_atomic(path, packed)
    return shown


def _thinning(count: int, limit: int) -> int:
    return max(-(-count // limit), 1)


def _text(record: Record, every: int, merged: int, shown: str) -> str:
    """Return the events in order of time, one per line."""
    about = {
        "program": f"headway {__version__}",
        "scenario": record.scenario.name,
        "seed": record.scenario.seed,
        "shown": shown,
    }
    names, events = _events(record, every, merged)
    lines = [_line(event) for event in names]
    for time, event in sorted(events, key=lambda pair: pair[0]):  # stable: what nests stays nested
        lines.append(_line({**event, "ts": time / 1e3}))
    body = ",\n".join(lines)
    return f'{{"traceEvents":[\n{body}\n],"displayTimeUnit":"ms","metadata":{_line(about)}}}\n'


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))


def _events(record: Record, every: int, merged: int) -> tuple[list[dict[str, Any]], list[Event]]:
    """Name the tracks, and list what happens on them; engines are processes 1, 3, ..."""
    names: list[dict[str, Any]] = []
    events: list[Event] = []
    table = record.request_table()
    moves = {} if record.transfers is None else record.transfers.moves()
    shown = np.zeros(len(record.workload), bool)
    shown[::every] = True
    for number, log in enumerate(record.logs):
        engine, requests = 2 * number + 1, 2 * number + 2
        names += [
            _name("process_name", engine, f"replica {number}"),
            _name("thread_name", engine, "steps"),
            _name("process_name", requests, f"requests of replica {number}"),
            {"ph": "M", "name": "process_sort_index", "pid": engine, "args": {"sort_index": 0}},
        ]
        most = max(MAX_SLICES // len(record.logs), 1)
        for process, found in (
            (engine, _steps(log, merged)),
            (engine, _counters(log, arrivals(log), merged, most)),
            (requests, _requests(table, log, shown & (table.replica == number), moves)),
        ):
            events += [(time, {**event, "pid": process, "tid": 1}) for time, event in found]
    return names, events


def _name(kind: str, process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": 1, "args": {"name": name}}


def _nanoseconds(times: Floats) -> list[int]:
    whole: list[int] = np.rint(times * 1e9).astype(np.int64).tolist()
    return whole


def _steps(log: Log, merged: int) -> Iterator[Event]:
    """Yield a slice for each row, or for `merged` successive ones; token counts are their sums."""
    rows = log.steps
    if not len(rows):
        return
    first = np.arange(0, len(rows), merged)
    last = np.append(first[1:], len(rows)) - 1
    starts, ends = _nanoseconds(rows["start"][first]), _nanoseconds(rows["end"][last])
    steps = rows["steps"].astype(np.int64)
    counts = {
        "steps": steps,
        "prefill_tokens": rows["prefill_tokens"] * steps,
        "decode_tokens": rows["decodes"] * steps,
        "wasted_tokens": rows["wasted"] * steps,
        "preempted": rows["preempted"],
    }
    sums = [np.add.reduceat(values, first).tolist() for values in counts.values()]
    state = [rows[name][first].tolist() for name in ("running", "waiting", "blocks_used")]
    for start, end, *values in zip(starts, ends, *sums, *state, strict=True):
        args = dict(zip((*counts, "running", "waiting", "kv_blocks_used"), values, strict=True))
        prefill, decode = args["prefill_tokens"] > 0, args["decode_tokens"] > 0
        name = "mixed" if prefill and decode else "prefill" if prefill else "decode"
        yield start, {"ph": "X", "name": name, "dur": (end - start) / 1e3, "args": args}


def _counters(log: Log, queue: Floats, merged: int, most: int) -> Iterator[Event]:
    """Yield the requests that run and wait, and the KV cache's use, where they may change.

    Every k-th time is kept, k at least `merged`, so that they are no more than `most` and the last.
    `queue` are the times at which requests joined, ascending: those sent since a row began wait
    as well. Nobody runs between the end of a row and the start of the next.
    """
    rows = log.steps
    if not len(rows):
        return
    idle = np.append(rows["end"][:-1] < rows["start"][1:], True)
    inside = queue[(queue > rows["start"][0]) & (queue <= rows["end"][-1])]
    times = np.unique(np.concatenate((rows["start"], rows["end"][idle], inside)))
    kept = np.arange(0, len(times), max(merged, _thinning(len(times), most)))
    times = times[np.unique(np.append(kept, len(times) - 1))]
    row = np.searchsorted(rows["start"], times, "right") - 1
    busy = (times < rows["end"][row]) | ~idle[row]
    since = np.searchsorted(queue, times, "right")
    since -= np.searchsorted(queue, rows["start"], "right")[row]
    running = np.where(busy, rows["running"][row], 0).tolist()
    waiting = (rows["waiting"][row] + since).tolist()
    used = np.where(busy, rows["blocks_used"][row], 0) * (100 / max(log.num_blocks, 1))
    values = zip(_nanoseconds(times), running, waiting, used.round(3).tolist(), strict=True)
    for time, runs, waits, percent in values:
        yield time, {"ph": "C", "name": "running", "args": {"requests": runs}}
        yield time, {"ph": "C", "name": "waiting", "args": {"requests": waits}}
        yield time, {"ph": "C", "name": "KV cache usage", "args": {"percent": percent}}


def _requests(
    table: RequestTable, log: Log, shown: npt.NDArray[np.bool_], moves: Mapping[int, list[Span]]
) -> Iterator[Event]:
    """Yield the nested phases of each request on a track of its own.

    `moves` has, by id, what a request did from the end of its prefill to its seat elsewhere.
    """
    pauses = find_preemptions(log, shown)
    bounds = np.searchsorted(pauses.id, np.arange(len(shown) + 1))
    end = float(log.steps["end"][-1]) if len(log.steps) else 0.0
    arrival, computed = table.arrival, as_computed(table, [log])
    swapped = bool(log.swaps["requests_out"].any())
    for number in np.flatnonzero(shown).tolist():
        label = f"request {number}"
        if table.reason[number] == REJECTED:
            time = _nanoseconds(table.sent[number : number + 1])[0]
            yield time, {"ph": "i", "s": "p", "name": f"{label} rejected"}
            continue
        mine = slice(int(bounds[number]), int(bounds[number + 1]))
        columns = (pauses.start[mine], pauses.resumed[mine], pauses.until[mine])
        stops = [
            ("swapped" if swapped and until == resumed else "preempted", start, resumed, until)
            for start, resumed, until in zip(*(c.tolist() for c in columns), strict=True)
        ]
        spans = list(phases(computed, number, stops, end, moves.get(number)))
        if log.delivers_together and table.completed[number]:
            spans.append(("waits for its batch", spans[-1][2], float(table.finish[number])))
        if (held := float(arrival[number])) < table.sent[number]:
            spans.insert(0, ("held by client", held, float(table.sent[number])))
        yield from _nested(number, label, spans, _request_args(table, number))


def phases(
    table: RequestTable,
    number: int,
    pauses: list[tuple[str, float, float, float]],
    end: float,
    moves: list[Span] | None = None,
) -> Iterator[Span]:
    """Yield what a request does from being sent to its finish, or to the `end` of the run.

    Of its `pauses`: name, start, when it was admitted again, when it was back at where it was.
    """
    columns = table.sent, table.entered, table.first_scheduled, table.first_token, table.finish
    sent, entered, scheduled, first, finish = (
        end if np.isnan(column[number]) else float(column[number]) for column in columns
    )
    yield "earlier tries", sent, entered
    yield "queued", entered, scheduled
    now = scheduled
    if moves:
        yield "prefill", now, moves[0][1]
        yield from moves
        now = moves[-1][2]
    for name, start, resumed, until in [*pauses, ("", finish, finish, finish)]:
        yield "prefill", now, min(start, first)
        yield "decode", max(now, first), start
        yield name, start, resumed
        yield "recompute", resumed, until
        now = until


def _request_args(table: RequestTable, number: int) -> dict[str, Any]:
    load, reason = table.workload, int(table.reason[number])
    about = {
        "prompt_tokens": int(load.prompt_tokens[number]),
        "output_tokens": int(table.generated[number]),
        "cached_tokens": int(table.cached[number]),
        "preemptions": int(table.preemptions[number]),
        "finish_reason": REASONS[reason],
    }
    if load.client is not None:
        about["client"] = load.client[number]
    for name, end in (("ttft", table.first_token[number]), ("e2el", table.finish[number])):
        if not np.isnan(end):
            about[f"{name}_ms"] = round(float(end - table.sent[number]) * 1e3, 6)
    return about


def _nested(number: int, label: str, spans: list[Span], about: dict[str, Any]) -> Iterator[Event]:
    """Yield begin and end of a request and of its spans inside; those without length are none."""
    times = _nanoseconds(np.array([span[1:] for span in spans]).ravel())
    base = {"cat": "request", "id": number}
    yield times[0], {"ph": "b", "name": label, **base, "args": about}
    for (name, *_), start, end in zip(spans, times[::2], times[1::2], strict=True):
        if start < end:
            yield start, {"ph": "b", "name": name, **base}
            yield end, {"ph": "e", "name": name, **base}
    yield max(times), {"ph": "e", "name": label, **base}
