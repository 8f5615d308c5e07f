"""Read a trace of any known format; time starts at the first arrival."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.select import session_starts, take
from simulator.workload.traces.fields import NAMES, UNITS
from simulator.workload.traces.format import Table
from simulator.workload.traces.formats import FORMATS, formats_with, missing_trace
from simulator.workload.traces.ledger import Ledger
from simulator.workload.traces.packed import take_encoding
from simulator.workload.workload import Floats, Requests, Workload

OPTIONS = (
    *("time_unit", "hash_block_size", "session_turns", "chars_per_token", "lanes", "columns"),
    *("encoding", "result"),
)
BY_CLOCK: Mapping[str, str] = NAMES["by clock"]
"""What of a run its file of requests does not carry."""
RUSH = 1e5  # requests/s: hardly the unit that was meant
WORDS = {"time_unit": ("s", "ms"), "session_turns": ("delta", "whole")}


def read_trace(
    path: Path, format: str | None = None, *, option: str = "--columns ", **given: Any
) -> Workload:
    """Read a trace, plain or packed; without `format` its beginning tells which it is.

    The first request arrives at 0; requests out of order are sorted by arrival, with a warning.
    HeadwayError tells every line that is wrong as `FILE:LINE: column: what is wrong`.

    Args:
        path: the file.
        format: one of `FORMATS`.
        option: how whoever calls is given `columns`, for the mapping that a refusal proposes.
        given: `OPTIONS` by name; None: not given. `time_unit`: `ms` or `s`, of a Mooncake trace:
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
) -> tuple[Workload, Table, str]:
    """Read a trace, its table as the file has it, and its format; `given`: options by name."""
    table, name = read_table(path, format, given, option)
    return _workload(table, path, name), table, name


def read_table(
    path: Path,
    format: str | None,
    given: Mapping[str, Any],
    option: str = "--columns ",
) -> tuple[Table, str]:
    """Read a file of requests as it stands; give its format, too. `given`: options by name."""
    if format is not None and format not in FORMATS:
        raise HeadwayError(f"format: {format!r} is not known; known are {', '.join(FORMATS)}")
    given = take_encoding(path, given)
    name = format or format_of(path, given, option)
    _check_options(name, given)
    if not path.exists():
        raise missing_trace(path)
    return FORMATS[name].read(path, **given), name


def format_of(path: Path, given: Mapping[str, Any], option: str) -> str:
    """Return the format of a file whose columns are told, or find it by how the file begins."""
    if "columns" in given:
        return "requests"
    from simulator.workload.traces.detect import detect_format  # imports every format

    return detect_format(path, option)


def _check_options(name: str, given: Mapping[str, Any]) -> None:
    """Raise HeadwayError for every option that the format does not take or whose value is wrong."""
    wrong = []
    for option, value in given.items():
        if option not in FORMATS[name].options:
            takers = " or ".join(formats_with(option))
            wrong.append(f"{option}: not an option of format {name}, only of {takers}")
        elif option in WORDS and value not in WORDS[option]:
            one, other = WORDS[option]
            wrong.append(f"{option}: {value!r} is neither {one!r} nor {other!r}")
        elif isinstance(value, int | float) and not 0 < value < inf:
            wrong.append(f"{option}: {value} is not a number above 0")
    if wrong:
        raise HeadwayError(wrong)


def warn_of_losses(path: Path, failed: int, ledger: Ledger) -> None:
    """Say how many requests are left out, and what of the file is not simulated."""
    if failed:
        some = "1 request" if failed == 1 else f"{failed} requests"
        which = "failed when recorded, or without output tokens"
        text = f"{path}: {some} left out: {which}"
        warnings.warn(text, HeadwayWarning, stacklevel=4)
    for text in ledger.warnings():
        warnings.warn(f"{path}: {text}", HeadwayWarning, stacklevel=4)


def warn_of_trace(path: Path, failed: int, ledger: Ledger) -> None:
    """Say that, and what the file of a run of Headway's does not tell, by its scenario beside."""
    warn_of_losses(path, failed, ledger)
    if "decode_slowed_time" not in ledger.idle:
        return
    if path.name.startswith("part-"):
        text = f"{path}: what prompts share, clients and models are not in tables of --tables-in"
        warnings.warn(text, HeadwayWarning, stacklevel=4)
    beside = path.parent / "scenario.yaml"
    text = beside.read_text("utf-8", "replace") if beside.is_file() else ""
    for key, why in BY_CLOCK.items():
        if had := re.search(rf"^ +({key})(?!: (?:null|\[\]|\{{\}}))", text, re.MULTILINE):
            warnings.warn(f"{path}: its run had {had[1]}: {why}", HeadwayWarning, stacklevel=4)


def workload_of(table: Table, arrival: Floats, source: str) -> Workload:
    """Return the requests of a table, which arrive at these times, s."""
    same = {one.name: getattr(table, one.name) for one in fields(Requests)}
    prompt, output = table.prompt.astype(np.int64), table.output.astype(np.int64)
    return Workload(arrival, prompt, output, **same, source=source)


def _workload(table: Table, path: Path, form: str) -> Workload:
    """Turn a table into a workload: seconds, from 0 on, ascending."""
    warn_of_trace(path, table.failed, table.ledger)
    if not len(table.time):
        raise HeadwayError(f"{path}: no requests in it")
    timed = ~np.isnan(table.time)
    arrival = (table.time - table.time[timed].min()) / table.per_second
    rate = (timed.sum() - 1) / max(np.ptp(arrival[timed]), 1e-9)
    if timed.sum() > 2 and rate > RUSH and arrival[timed].any():
        unit = next((name for name, size in UNITS.items() if size == table.per_second), "its unit")
        text = f"{path}: {rate:,.0f} requests/s, if its times count {unit}: is that their unit?"
        warnings.warn(text, HeadwayWarning, stacklevel=3)
    workload = workload_of(table, arrival, f"{path.name} ({form})")
    early = int((arrival[timed] < np.maximum.accumulate(arrival[timed])).sum())
    if early:
        text = f"{path}: requests earlier than one before them: {early}; sorted by arrival"
        warnings.warn(text, HeadwayWarning, stacklevel=3)
        workload = take(workload, np.argsort(session_starts(workload), kind="stable"))
    return workload
