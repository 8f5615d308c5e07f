"""Read a trace of any known format, whole or a piece at a time; time starts at the first arrival.

Each piece is some megabytes of lines, or a batch of Parquet's rows, that the format's own reader
takes for the file. Requests may be out of order within two pieces that follow one another.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from simulator.util.errors import MappingError, TraceError, warn
from simulator.workload.select import join, session_starts, take
from simulator.workload.traces import documents
from simulator.workload.traces.csv_columns import header, json_keys
from simulator.workload.traces.documents import BLOCK
from simulator.workload.traces.fields import DATES, NAMES, unit_of
from simulator.workload.traces.format import Numbers, Table
from simulator.workload.traces.formats import FORMATS, formats_with, missing_trace
from simulator.workload.traces.ledger import Ledger
from simulator.workload.traces.packed import take_encoding
from simulator.workload.unused import warn_of_images, warn_of_models
from simulator.workload.workload import Floats, Requests, Workload

BY_CLOCK: Mapping[str, str] = NAMES["by clock"]
"""What of a run its file of requests does not carry."""
RUSH = 500.0  # requests/s: hardly the unit that was meant
WORDS = {"time_unit": ("s", "ms"), "session_turns": ("delta", "whole")}


def read_trace(
    path: Path, format: str | None = None, *, option: str = "--columns ", **given: Any
) -> Workload:
    """Read a trace, plain or packed; without `format` its beginning tells which it is.

    The first request arrives at 0; requests out of order are sorted by arrival, with a warning.
    TraceError tells every line that is wrong as `FILE:LINE: column: what is wrong`, MappingError
    which of `given` are.

    Args:
        path: the file.
        format: one of `FORMATS`.
        option: how whoever calls is given `columns`, for the mapping that a refusal proposes.
        given: options by name; None: not given. `time_unit`: `ms` or `s`, of a Mooncake trace:
            `ms` by default, `s` for `timed_trace`. `hash_block_size`: tokens that one of the
            `hash_ids` stands for: 512 for `mooncake`, 16 for `timed_trace` and `llmservingsim` by
            default. Those that `headway serve` writes say it themselves. `session_turns`: whether a
            later turn of a session says what it adds to the conversation (`delta`, the default, as
            in AIPerf) or its `whole` prompt. `chars_per_token`: estimate lengths from texts, of
            `custom` and `sharegpt`. `lanes`: plays of agents that run side by side, the next in
            each after the one before. `columns`: which column holds what, as
            `arrival=timestamp,prompt=prompt_tokens` or a mapping. `encoding`: of its text, as
            Python names it, where it is not UTF-8 and no mark says so. `result`: which benchmark of
            a file with several, from 1 on.
    """
    told = {name: value for name, value in given.items() if value is not None}
    return read_measured(path, format, told, option)[0]


def read_measured(
    path: Path, format: str | None, given: Mapping[str, Any], option: str = "--columns "
) -> tuple[Workload, Table]:
    """Read a trace, and its table as the file has it; `given`: options by name."""
    table = read_table(path, format, given, option)
    return _workload(table, path), table


def read_table(
    path: Path, format: str | None, given: Mapping[str, Any], option: str = "--columns "
) -> Table:
    """Read a file of requests as it stands; `given`: options by name."""
    if format is not None and format not in FORMATS:
        raise MappingError(
            "format", f"{format!r} is not known; known are {', '.join(FORMATS)}", "value"
        )
    given = take_encoding(path, given)
    name = format or format_of(path, given, option)
    _check_options(name, given)
    if not path.exists():
        raise missing_trace(path)
    table = FORMATS[name].read(path, **given)
    table.format = name
    return table


def format_of(path: Path, given: Mapping[str, Any], option: str) -> str:
    """Return the format of a file whose columns are told, or find it by how the file begins."""
    if "columns" in given:
        return "requests"
    from simulator.workload.traces.detect import detect_format  # imports every format

    return detect_format(path, option)


def _check_options(name: str, given: Mapping[str, Any]) -> None:
    """Raise MappingError for every option that the format does not take or whose value is wrong."""
    wrong: dict[str, str] = {}
    for option, value in given.items():
        if option not in FORMATS[name].options:
            takers = " or ".join(formats_with(option))
            wrong[option] = f"not an option of format {name}, only of {takers}"
        elif option in WORDS and value not in WORDS[option]:
            one, other = WORDS[option]
            wrong[option] = f"{value!r} is neither {one!r} nor {other!r}"
        elif isinstance(value, int | float) and not 0 < value < inf:
            wrong[option] = f"{value} is not a number above 0"
    if wrong:
        raise MappingError.of(wrong, "value")


def warn_of_losses(path: Path, failed: int, ledger: Ledger) -> None:
    """Say how many requests are left out, and what of the file is not simulated."""
    if failed:
        some = "1 request" if failed == 1 else f"{failed} requests"
        which = "failed or cancelled when recorded, or without output tokens"
        warn(f"{path}: {some} left out: {which}")
    for text in ledger.warnings():
        warn(f"{path}: {text}")


def warn_of_trace(path: Path, failed: int, ledger: Ledger) -> None:
    """Say that, and what the file of a run of Headway's does not tell, by its scenario beside."""
    warn_of_losses(path, failed, ledger)
    if not ledger.is_own:
        return
    if path.name.startswith("part-"):
        warn(f"{path}: prefixes, images, clients and models are not in tables of --tables-in")
    beside = path.parent / "scenario.yaml"
    text = beside.read_text("utf-8", "replace") if beside.is_file() else ""
    for key, why in BY_CLOCK.items():
        if had := re.search(rf"^ +({key})(?!: (?:null|\[\]|\{{\}}))", text, re.MULTILINE):
            warn(f"{path}: its run had {had[1]}: {why}")


def workload_of(table: Table, arrival: Floats, source: str) -> Workload:
    """Return the requests of a table, which arrive at these times, s."""
    same = {one.name: getattr(table, one.name) for one in fields(Requests)}
    prompt, output = table.prompt.astype(np.int64), table.output.astype(np.int64)
    return Workload(arrival, prompt, output, **same, source=source)


def _workload(table: Table, path: Path) -> Workload:
    """Turn a table into a workload: seconds, from 0 on, ascending."""
    warn_of_trace(path, table.failed, table.ledger)
    if not len(table.time):
        raise TraceError(path, "no requests in it")
    timed = ~np.isnan(table.time)
    arrival = (table.time - table.time[timed].min()) / table.per_second
    rate = (timed.sum() - 1) / max(np.ptp(arrival[timed]), 1e-9)
    dated = np.nanmax(table.time) / table.per_second > DATES[0]
    if timed.sum() > 2 and rate > RUSH and arrival[timed].any() and not dated:
        unit, name = unit_of(table.per_second), table.ledger.name_of.get("arrival", "NAME")
        told = f"arrival={name}:{'s' if table.per_second > 1 else 'min'}"
        told = "time_unit: s" if "time_unit" in FORMATS[table.format].options else told
        warn(f"{path}: {rate:,.0f} requests/s, if its times are {unit}; if not, say so: {told}")
    workload = workload_of(table, arrival, f"{path.name} ({table.format})")
    early = _early(arrival[timed])
    _warn_of_order(path, early)
    order = np.argsort(session_starts(workload), kind="stable")
    return take(workload, order) if early else workload


def _early(times: Numbers) -> int:
    """Count the times that are before one that stands before them."""
    return int((times < np.maximum.accumulate(times)).sum())


def _warn_of_order(path: Path, early: int) -> None:
    if early:
        warn(f"{path}: requests earlier than one before them: {early}; sorted by arrival")


LINES = ("azure", "burstgpt", "lengths", "mooncake", "timed_trace", "llmservingsim")
"""Formats with a request a line, whatever the lines around it say."""


class SessionsError(TraceError):
    """A trace has sessions: a turn's line says little without those before it."""


def comes_in_pieces(path: Path, form: str | None, given: Mapping[str, Any], option: str) -> bool:
    """Say whether a trace can be read a piece at a time, and is large enough for it to matter.

    A file of `requests` can where it is no single JSON text.
    """
    if not path.is_file() or path.stat().st_size <= BLOCK:
        return False
    given = take_encoding(path, given)
    name = form or format_of(path, given, option)
    _check_options(name, given)
    if name == "requests":
        return bool(documents.parquet_names(path)) or _has_lines(path)
    return name in LINES


def _has_lines(path: Path) -> bool:
    line = documents.first_line(path)[1]
    return documents.is_json_lines(path) if line[0] in "{[" else not json_keys(path, header(line))


def read_pieces(
    path: Path, form: str | None, given: Mapping[str, Any], option: str
) -> Iterator[Workload]:
    """Yield the requests of a trace in order of arrival, from 0 s on, some at a time.

    TraceError names the line of a request that comes too late to be sorted, and what needs the
    whole file: sessions (`SessionsError`), and units of time that differ from piece to piece.
    """
    given = take_encoding(path, given)
    name = form or format_of(path, given, option)
    held: tuple[Numbers, Workload] | None = None
    units, last, early, failed, origin = 0.0, -inf, 0, 0, None
    ledger, images, models = Ledger(), 0, Counter[str]()
    for piece in documents.pieces(path, header=name not in LINES[3:]):
        with documents.alone(path, piece):
            table = read_table(path, name, given, option)
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
            late = "comes before requests that are megabytes before it; sort the trace"
            raise TraceError(path, late, int(table.line[time < last][0]), "arrival")
        if held is not None:
            time, work = np.concatenate((held[0], time)), join([held[1], work])
        early += _early(time)
        order = np.argsort(time, kind="stable")
        time, work = time[order], work.rows(order)
        upto = 0 if held is None else int(np.searchsorted(time, held[0][-1], "right"))
        held = time[upto:], work.rows(np.arange(upto, len(time)))
        if upto:
            origin, last = time[0] if origin is None else origin, time[upto - 1]
            yield replace(work.rows(np.arange(upto)), arrival=(time[:upto] - origin) / units)
    if held is None:
        raise TraceError(path, "no requests in it")
    if len(held[0]):
        origin = held[0][0] if origin is None else origin
        yield replace(held[1], arrival=(held[0] - origin) / units)
    _warn_of_order(path, early)
    warn_of_trace(path, failed, ledger)
    warn_of_images(path.name, images)
    warn_of_models(path.name, models)


def _check_piece(path: Path, table: Table, units: float) -> None:
    """Refuse a piece that cannot be read without the others."""
    if table.per_second != units:
        raise TraceError(path, "times seem to change their unit; say it: arrival=NAME:ms")
    if table.has_sessions:
        raise SessionsError(path, "the turns of sessions may be anywhere in it")
