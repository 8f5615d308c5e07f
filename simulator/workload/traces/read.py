"""Read a trace of any known format; time starts at the first arrival."""

import warnings
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.select import session_starts, take
from simulator.workload.traces.csv_columns import check_commas, header
from simulator.workload.traces.documents import (
    first_line,
    first_value,
    parquet_names,
    parse,
    read_text,
)
from simulator.workload.traces.fields import LONGEST, NEEDED, check_needed, find_fields, propose
from simulator.workload.traces.format import Head, Measured, Table
from simulator.workload.traces.formats import FORMATS, named
from simulator.workload.traces.formats.logs import DATE
from simulator.workload.traces.formats.named import COLUMNS, first_request
from simulator.workload.workload import Workload

READERS = {**FORMATS, COLUMNS.name: COLUMNS}
OPTIONS = {
    option: tuple(form.name for form in READERS.values() if option in form.options)
    for option in (
        *("time_unit", "hash_block_size", "session_turns", "chars_per_token", "lanes", "columns"),
    )
}
"""The formats that take each option."""
WORDS = {"time_unit": ("s", "ms"), "session_turns": ("delta", "whole")}


def missing_trace(path: Path) -> HeadwayError:
    """Say that the file is missing and, of a well-known trace, whose it is and how to get it."""
    for published in (one for form in FORMATS.values() for one in form.published):
        if any(part in path.name.lower() for part in published.name_parts):
            return HeadwayError(
                f"{path}: no such file. It is {published.source}, and put it, plain or packed by "
                f"gzip, as {path.name} under traces/ in the folder that HEADWAY_DATA names"
            )
    return HeadwayError(f"{path}: no such file")


def detect_format(path: Path, option: str = "--columns ") -> str:
    """Tell the format of a trace by how it begins.

    A `timed_trace` of others cannot be told from `mooncake` and is called that. Raises HeadwayError
    if it is no known format: with the mapping of columns that may be meant, as `option` takes it.
    """
    if not path.exists():
        raise missing_trace(path)
    packed = parquet_names(path)
    number, line = (1, "") if packed else first_line(path)
    head = Head(columns=packed) if packed else _head(path, line)
    for form in (named.FORMAT,) if packed else FORMATS.values():
        if form.detect(head):
            return form.name
    if not packed and not head.first and not DATE.search(line):
        check_commas(path, number, line)
    place = f"{path}:{number}: format"
    names = head.columns or [name for name in first_request(head) if "." not in name]
    for file in (path, path.name):  # the whole path where there is room for it
        start = f"{file}:{number}: format: not known{{}}; try "
        if meant := _proposal(names, option, start):
            raise HeadwayError(meant)
    if not find_fields(names).keys().isdisjoint(NEEDED):
        check_needed(find_fields(names), f"{path}:{number}")
    known = ", ".join(FORMATS)
    begins = f"{', '.join(packed)[:60]!r} are the columns of" if packed else f"{line[:60]!r} begins"
    raise HeadwayError(f"{place}: {begins} no known format. Known are: {known}")


def _proposal(names: Iterable[str], option: str, start: str) -> str:
    """Give a line that says which `columns` to try, at most LONGEST characters; "" for none."""
    for told in ("", " (no column of arrivals: all would come at once)"):
        begins = start.format(told)
        meant = propose(names, option, LONGEST - len("headway: error: ") - len(begins))
        if meant and (told or "arrival=" in meant):
            return begins + meant
    return ""


def _head(path: Path, line: str) -> Head:
    """Read how a file begins: its header or its first object, be it one of many lines or not."""
    if line[0] not in "{[":
        return Head(columns=tuple(header(line)), line=line)
    first = first_value(path, line)
    if first is None:
        if DATE.search(line):
            return Head(line=line)  # a log's line in brackets
        parse(path, read_text(path))  # says what is wrong
    if isinstance(first, list):
        first = first[0] if first else {}
    return Head(first=first if isinstance(first, dict) else {})


def read_trace(
    path: Path,
    format: str | None = None,
    *,
    time_unit: str | None = None,
    hash_block_size: int | None = None,
    session_turns: str | None = None,
    chars_per_token: float | None = None,
    lanes: int | None = None,
    columns: str | Mapping[str, str] | None = None,
    option: str = "--columns ",
) -> Workload:
    """Read a trace, plain or packed by gzip; without `format` its beginning tells which it is.

    The first request arrives at 0; requests out of order are sorted by arrival, with a warning.
    HeadwayError tells every line that is wrong as `FILE:LINE: column: what is wrong`.

    Args:
        path: the file.
        format: one of `FORMATS`.
        time_unit: `ms` or `s`, of a Mooncake trace: `ms` by default, `s` for `timed_trace`.
        hash_block_size: tokens that one of the `hash_ids` stands for: 512 for `mooncake`,
            16 for `timed_trace` and `llmservingsim` by default. Those that `headway serve` writes
            say it themselves.
        session_turns: whether a later turn of a session says what it adds to the conversation
            (`delta`, the default, as in AIPerf) or its `whole` prompt.
        chars_per_token: estimate lengths from texts, of `custom` and `sharegpt`.
        lanes: plays of agents that run side by side, the next in each after the one before.
        columns: which column holds what, as `arrival=timestamp,prompt=prompt_tokens` or a mapping.
        option: how whoever calls is given `columns`, for the mapping that a refusal proposes.
    """
    values = (time_unit, hash_block_size, session_turns, chars_per_token, lanes, columns)
    given = {k: v for k, v in zip(OPTIONS, values, strict=True) if v is not None}
    return read_measured(path, format, given, option)[0]


def read_measured(
    path: Path, format: str | None, given: Mapping[str, Any], option: str = "--columns "
) -> tuple[Workload, Measured | None, str]:
    """Read a trace, with the latencies that it tells (in the file's order), and its format.

    `given` has options of `read_trace` by name.
    """
    table, name = read_table(path, format, given, option)
    return _workload(table, path, name), table.measured, name


def read_table(
    path: Path,
    format: str | None,
    given: Mapping[str, Any],
    option: str = "--columns ",
) -> tuple[Table, str]:
    """Read a file of requests as it stands; give its format, too. `given`: options by name."""
    if format is not None and format not in FORMATS:
        raise HeadwayError(f"format: {format!r} is not known; known are {', '.join(FORMATS)}")
    name = format or (COLUMNS.name if "columns" in given else detect_format(path, option))
    _check_options(name, given)
    if not path.exists():
        raise missing_trace(path)
    return READERS[name].read(path, **given), name


def _check_options(name: str, given: Mapping[str, Any]) -> None:
    """Raise HeadwayError for every option that the format does not take or whose value is wrong."""
    wrong = []
    for option, value in given.items():
        if name not in OPTIONS[option]:
            takers = " or ".join(OPTIONS[option])
            wrong.append(f"{option}: not an option of format {name}, only of {takers}")
        elif option in WORDS and value not in WORDS[option]:
            one, other = WORDS[option]
            wrong.append(f"{option}: {value!r} is neither {one!r} nor {other!r}")
        elif isinstance(value, int | float) and not 0 < value < inf:
            wrong.append(f"{option}: {value} is not a number above 0")
    if wrong:
        raise HeadwayError(wrong)


def warn_of_failed(table: Table, path: Path) -> None:
    """Say how many requests are left out."""
    if table.failed:
        some = "1 request" if table.failed == 1 else f"{table.failed} requests"
        which = "failed when recorded, or without output tokens"
        text = f"{path}: {some} left out: {which}"
        warnings.warn(text, HeadwayWarning, stacklevel=4)


def _workload(table: Table, path: Path, form: str) -> Workload:
    """Turn a table into a workload: seconds, from 0 on, ascending."""
    warn_of_failed(table, path)
    if not len(table.time):
        raise HeadwayError(f"{path}: no requests in it")
    timed = ~np.isnan(table.time)
    arrival = (table.time - table.time[timed].min()) / table.per_second
    workload = Workload(
        arrival=arrival,
        prompt_tokens=table.prompt.astype(np.int64),
        output_tokens=table.output.astype(np.int64),
        segments=table.segments,
        after=table.after,
        delay=table.delay,
        client=table.client,
        priority=table.priority,
        max_tokens=table.max_tokens,
        cancel_after=table.cancel_after,
        hint=table.hint,
        source=f"{path.name} ({form})",
    )
    early = int((arrival[timed] < np.maximum.accumulate(arrival[timed])).sum())
    if early:
        text = f"{path}: {early} requests come earlier than one before them; sorted by arrival"
        warnings.warn(text, HeadwayWarning, stacklevel=3)
        workload = take(workload, np.argsort(session_starts(workload), kind="stable"))
    return workload
