"""Read a trace of any known format; time starts at the first arrival."""

import warnings
from pathlib import Path

import numpy as np

from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.json_text import parse_json
from simulator.workload.select import session_starts, take
from simulator.workload.traces.csv_columns import header
from simulator.workload.traces.format import FirstLine, Table
from simulator.workload.traces.formats import FORMATS
from simulator.workload.traces.lines import first_line
from simulator.workload.workload import Workload

OPTIONS = {
    option: tuple(form.name for form in FORMATS.values() if option in form.options)
    for option in ("time_unit", "hash_block_size", "session_turns", "chars_per_token")
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


def detect_format(path: Path) -> str:
    """Tell the format of a trace by its first line.

    A `timed_trace` cannot be told from `mooncake` and is called that. Raises HeadwayError, with
    the formats there are, if it is none of them.
    """
    if not path.exists():
        raise missing_trace(path)
    number, line = first_line(path)
    if line.startswith("{"):
        try:
            first = FirstLine(keys=frozenset(parse_json(line)))
        except ValueError as error:
            raise HeadwayError(f"{path}:{number}: line: bad JSON: {error}") from None
    else:
        first = FirstLine(columns=frozenset(header(line)))
    for form in FORMATS.values():
        if form.detect(first):
            return form.name
    known = "; ".join(f"{form.name} ({form.begins})" for form in FORMATS.values())
    raise HeadwayError(
        f"{path}:{number}: format: {line[:60]!r} begins no known format. Known are: {known}"
    )


def read_trace(
    path: Path,
    format: str | None = None,
    *,
    time_unit: str | None = None,
    hash_block_size: int | None = None,
    session_turns: str | None = None,
    chars_per_token: float | None = None,
) -> Workload:
    """Read a trace, plain or packed by gzip; without `format` its first line tells which it is.

    The first request arrives at 0; requests out of order are sorted by arrival, with a warning.
    HeadwayError tells every line that is wrong as `FILE:LINE: column: what is wrong`.

    Args:
        path: the file.
        format: one of `FORMATS`.
        time_unit: `ms` or `s`, of a Mooncake trace: `ms` by default, `s` for `timed_trace`.
        hash_block_size: tokens that one of the `hash_ids` stands for: 512 for `mooncake`,
            16 for `timed_trace` and `llmservingsim` by default.
        session_turns: whether a later turn of a session says what it adds to the conversation
            (`delta`, the default, as in AIPerf) or its `whole` prompt.
        chars_per_token: estimate the prompts of `custom` from their texts.
    """
    if format is not None and format not in FORMATS:
        raise HeadwayError(f"format: {format!r} is not known; known are {', '.join(FORMATS)}")
    name = format or detect_format(path)
    values = (time_unit, hash_block_size, session_turns, chars_per_token)
    given = {k: v for k, v in zip(OPTIONS, values, strict=True) if v is not None}
    _check_options(name, given)
    if not path.exists():
        raise missing_trace(path)
    return _workload(FORMATS[name].read(path, **given), path, name)


def _check_options(name: str, given: dict[str, str | int | float]) -> None:
    """Raise HeadwayError for every option that the format does not take or whose value is wrong."""
    wrong = []
    for option, value in given.items():
        if name not in OPTIONS[option]:
            takers = " or ".join(OPTIONS[option])
            wrong.append(f"{option}: not an option of format {name}, only of {takers}")
        elif option in WORDS and value not in WORDS[option]:
            one, other = WORDS[option]
            wrong.append(f"{option}: {value!r} is neither {one!r} nor {other!r}")
        elif isinstance(value, int | float) and not value > 0:
            wrong.append(f"{option}: {value} is not above 0")
    if wrong:
        raise HeadwayError(wrong)


def _workload(table: Table, path: Path, form: str) -> Workload:
    """Turn a table into a workload: seconds, from 0 on, ascending."""
    if table.failed:
        text = f"{path}: {table.failed} requests failed when they were recorded and are left out"
        warnings.warn(text, HeadwayWarning, stacklevel=3)
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
        source=f"{path.name} ({form})",
    )
    early = int((arrival[timed] < np.maximum.accumulate(arrival[timed])).sum())
    if early:
        text = f"{path}: {early} requests come earlier than one before them; sorted by arrival"
        warnings.warn(text, HeadwayWarning, stacklevel=3)
        workload = take(workload, np.argsort(session_starts(workload), kind="stable"))
    return workload
