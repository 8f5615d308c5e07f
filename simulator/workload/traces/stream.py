"""A trace a piece at a time: what `read_trace` and `select` give, without the whole in memory.

Each piece is some megabytes of lines, or a batch of Parquet's rows, that the format's own reader
takes for the file. Requests may be out of order within two pieces that follow one another.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np

from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.select import SAME_PROMPTS, Selection
from simulator.workload.traces.csv_columns import header, json_keys
from simulator.workload.traces.documents import (
    BLOCK,
    alone,
    first_line,
    is_json_lines,
    parquet_names,
    pieces,
)
from simulator.workload.traces.format import Numbers, Table
from simulator.workload.traces.ledger import Ledger
from simulator.workload.traces.packed import take_encoding
from simulator.workload.traces.read import format_of, read_table, warn_of_trace, workload_of
from simulator.workload.unused import warn_of_images, warn_of_models
from simulator.workload.workload import COLUMNS, Workload

LINES = ("azure", "burstgpt", "lengths", "mooncake", "timed_trace", "llmservingsim")
"""Formats with a request a line, whatever the lines around it say."""
UNTOLD: dict[str, Any] = {"cancel_after": nan, "client": "", "segments": None}


class SessionsError(HeadwayError):
    """A trace has sessions: a turn's line says little without those before it."""


Read = Callable[[], Iterator[Workload]]


def comes_in_pieces(path: Path, form: str | None, given: Mapping[str, Any], option: str) -> bool:
    """Say whether a trace can be read a piece at a time, and is large enough for it to matter.

    A file of `requests` can where it is no single JSON text.
    """
    if not path.is_file() or path.stat().st_size <= BLOCK:
        return False
    given = take_encoding(path, given)
    name = form or format_of(path, given, option)
    return name in LINES or (name == "requests" and (bool(parquet_names(path)) or _has_lines(path)))


def _has_lines(path: Path) -> bool:
    line = first_line(path)[1]
    return is_json_lines(path) if line[0] in "{[" else not json_keys(path, header(line))


def read_pieces(
    path: Path, form: str | None, given: Mapping[str, Any], option: str
) -> Iterator[Workload]:
    """Yield the requests of a trace in order of arrival, from 0 s on, some at a time.

    HeadwayError names the line of a request that comes too late to be sorted, and what needs the
    whole file: sessions (`SessionsError`), and units of time that differ from piece to piece.
    """
    given = take_encoding(path, given)
    name = form or format_of(path, given, option)
    held: tuple[Numbers, Workload] | None = None
    units, last, early, failed, origin = 0.0, -inf, 0, 0, None
    ledger, images, models = Ledger(), 0, Counter[str]()
    for piece in pieces(path, header=name not in LINES[3:]):
        with alone(path, piece):
            table, _ = read_table(path, name, given, option)
        failed += table.failed
        ledger.add(table.ledger)
        images += 0 if table.images is None else int(table.images.sum())
        models.update(table.model or ())
        if not len(table.time):
            continue
        units = units or table.per_second
        _check_piece(path, table, units)
        time = table.time
        work = workload_of(table, np.zeros(len(time)), f"{path.name} ({name})")
        if time.min() < last:
            late = f"{path}:{table.line[time < last][0]}: arrival: comes before requests that are"
            raise HeadwayError(f"{late} megabytes before it; sort the trace")
        if held is not None:
            time, work = np.concatenate((held[0], time)), join([held[1], work])
        early += int((time < np.maximum.accumulate(time)).sum())
        order = np.argsort(time, kind="stable")
        time, work = time[order], work.rows(order)
        upto = 0 if held is None else int(np.searchsorted(time, held[0][-1], "right"))
        held = time[upto:], work.rows(np.arange(upto, len(time)))
        if upto:
            origin, last = time[0] if origin is None else origin, time[upto - 1]
            yield _timed(work.rows(np.arange(upto)), time[:upto], origin, units)
    if held is None:
        raise HeadwayError(f"{path}: no requests in it")
    if len(held[0]):
        origin = held[0][0] if origin is None else origin
        yield _timed(held[1], held[0], origin, units)
    if early:
        text = f"{path}: requests earlier than one before them: {early}; sorted by arrival"
        warnings.warn(text, HeadwayWarning, 2)
    warn_of_trace(path, failed, ledger)
    warn_of_images(path.name, images)
    warn_of_models(path.name, models)


def _check_piece(path: Path, table: Table, units: float) -> None:
    """Refuse a piece that cannot be read without the others."""
    if table.per_second != units:
        raise HeadwayError(f"{path}: times seem to change their unit; say it: arrival=NAME:ms")
    if table.has_sessions:
        raise SessionsError(f"{path}: the turns of sessions may be anywhere in it")


def _timed(work: Workload, time: Numbers, origin: Any, units: float) -> Workload:
    return replace(work, arrival=(time - origin) / units)


def join(parts: Sequence[Workload]) -> Workload:
    """Put workloads one after the other; what one of them does not say is filled in."""
    if len(parts) == 1:
        return parts[0]
    whole = replace(parts[0])
    for name in COLUMNS:
        columns = [getattr(part, name) for part in parts]
        if all(column is None for column in columns):
            continue
        for k, part in enumerate(parts):
            if columns[k] is None:
                columns[k] = [UNTOLD.get(name, 0)] * len(part)
        lists = name in ("client", "segments", "model")
        setattr(whole, name, [*chain(*columns)] if lists else np.concatenate(columns))
    return whole


def select_pieces(read: Read, **part: Any) -> Iterator[Workload]:
    """Take a part of what `read` gives, as `select` does, some requests at a time."""
    chosen = Selection(**part)
    low, high = chosen.window
    longest_in, longest_out = chosen.max_input_len or inf, chosen.max_output_len or inf
    left, base, period, long = chosen.limit or inf, None, 0.0, 0
    again = 0
    for turn in range(chosen.repeat):
        first, last, count = None, 0.0, 0
        for work in read():
            if left <= 0 or work.arrival[0] >= high:
                break
            within = np.flatnonzero((work.arrival >= low) & (work.arrival < high))
            rows = within[max(chosen.skip - count, 0) :]
            count += len(within)
            if not len(rows):
                continue
            times = work.arrival[rows]
            again = turn if work.segments else again
            first, last = float(times[0]) if first is None else first, float(times[-1])
            rows = rows[: int(min(left, len(rows)))]
            left -= len(rows)
            found = work.rows(rows)
            fine = (found.prompt_tokens <= longest_in) & (found.output_tokens <= longest_out)
            long += int((~fine).sum())
            found = found.rows(np.flatnonzero(fine))
            if len(found):
                moved = found.arrival + turn * period
                base = moved[0] if base is None else base
                yield replace(found, arrival=(moved - base) / chosen.rate_scale)
        if first is not None:
            period = (last - first) * (1 + 1 / max(count - chosen.skip - 1, 1))
    if again:
        warnings.warn(f"{SAME_PROMPTS}: {again} times", HeadwayWarning, stacklevel=2)
    if long:
        text = f"max_input_len, max_output_len: longer requests, which are left out: {long}"
        warnings.warn(text, HeadwayWarning, stacklevel=2)


def rechunk(parts: Iterator[Workload], size: int) -> Iterator[Workload]:
    """Yield the same requests `size` at a time; the last are fewer."""
    held: list[Workload] = []
    for part in parts:
        held.append(part)
        if sum(map(len, held)) >= size:
            whole = join(held)
            ends = [*range(0, len(whole) + 1, size), len(whole)]
            *full, rest = [whole.rows(np.arange(*two)) for two in pairwise(ends)]
            yield from full
            held = [rest]
    if any(map(len, held)):
        yield join(held)
