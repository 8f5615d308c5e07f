"""Published traces as workloads: read them as they are, take a part, write Mooncake JSONL.

The formats: `azure` (2023 and 2024), `burstgpt` and `lengths` (Splitwise, Vidur) are CSV;
`mooncake`, vLLM's `timed_trace` and `custom`, and `llmservingsim` are JSONL. Any may be packed
by gzip. Time starts at the first arrival.
"""

import json
import warnings
from pathlib import Path

import numpy as np

from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.traces.csv_formats import FORMS, header, read_csv
from simulator.workload.traces.describe import describe, describe_text
from simulator.workload.traces.json_formats import (
    OUTPUT_KEYS,
    PROMPT_KEYS,
    read_custom,
    read_llmservingsim,
)
from simulator.workload.traces.lines import Table, first_line, missing_trace
from simulator.workload.traces.mooncake import read_mooncake, write_mooncake
from simulator.workload.traces.select import select, starts, take
from simulator.workload.workload import Workload

__all__ = [
    "FORMATS",
    "describe",
    "describe_text",
    "detect_format",
    "missing_trace",
    "read_trace",
    "select",
    "write_mooncake",
]

FORMATS = {  # what a file's first line must have
    "azure": "CSV: TIMESTAMP,ContextTokens,GeneratedTokens",
    "burstgpt": "CSV: Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "lengths": "CSV: [arrived_at,]num_prefill_tokens,num_decode_tokens",
    "mooncake": 'JSONL: {"timestamp": ms, "input_length": .., "output_length": .., "hash_ids": []}',
    "timed_trace": "JSONL: as mooncake, but in seconds and with 16 tokens per id, as vLLM reads it",
    "custom": 'JSONL: {"prompt": .., "prompt_len": .., "output_tokens": ..}',
    "llmservingsim": 'JSONL: {"arrival_time_ns": .., "input_toks": .., "output_toks": ..}',
}
OPTIONS = {  # the options a format takes
    "time_unit": ("mooncake", "timed_trace"),
    "hash_block_size": ("mooncake", "timed_trace", "llmservingsim"),
    "session_turns": ("mooncake", "timed_trace"),
    "chars_per_token": ("custom",),
}
PER_SECOND = {"s": 1.0, "ms": 1e3}


def detect_format(path: Path) -> str:
    """Tell the format of a trace by its first line.

    A `timed_trace` cannot be told from `mooncake` and is called that. Raises HeadwayError, with
    the formats there are, if it is none of them.
    """
    number, line = first_line(path)
    if line.startswith("{"):
        try:
            keys = set(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise HeadwayError(f"{path}:{number}: line: bad JSON: {error}") from None
        if keys & {"input_length", "text_input", "messages"}:
            return "mooncake"
        if keys & {"arrival_time_ns", "input_toks"}:
            return "llmservingsim"
        if keys & {"prompt", *PROMPT_KEYS, *OUTPUT_KEYS}:
            return "custom"
    else:
        names = set(header(line))
        for name, form in FORMS.items():
            if {form.prompt.name, form.output.name} & names:
                return name
    known = "; ".join(f"{name} ({what})" for name, what in FORMATS.items())
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
    form = format or detect_format(path)
    values = (time_unit, hash_block_size, session_turns, chars_per_token)
    _check_options(form, dict(zip(OPTIONS, values, strict=True)))
    if form in FORMS:
        table = read_csv(path, FORMS[form])
    elif form == "custom":
        table = read_custom(path, chars_per_token)
    elif form == "llmservingsim":
        table = read_llmservingsim(path, hash_block_size or 16)
    else:
        unit, block = ("s", 16) if form == "timed_trace" else ("ms", 512)
        scale, whole = PER_SECOND[time_unit or unit], session_turns == "whole"
        table = read_mooncake(path, hash_block_size or block, scale, whole=whole)
    return _workload(table, path, form)


def _check_options(form: str, given: dict[str, str | int | float | None]) -> None:
    """Raise HeadwayError for every option that the format does not take or whose value is wrong."""
    wrong = []
    for name, value in given.items():
        if value is None:
            continue
        if form not in OPTIONS[name]:
            wrong.append(
                f"{name}: not an option of format {form}, only of {' or '.join(OPTIONS[name])}"
            )
        elif name == "time_unit" and value not in PER_SECOND:
            wrong.append(f"{name}: {value!r} is neither 's' nor 'ms'")
        elif name == "session_turns" and value not in ("delta", "whole"):
            wrong.append(f"{name}: {value!r} is neither 'delta' nor 'whole'")
        elif isinstance(value, int | float) and not value > 0:
            wrong.append(f"{name}: {value} is not above 0")
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
        source=f"{path.name} ({form})",
    )
    early = int((arrival[timed] < np.maximum.accumulate(arrival[timed])).sum())
    if early:
        text = f"{path}: {early} requests come earlier than one before them; sorted by arrival"
        warnings.warn(text, HeadwayWarning, stacklevel=3)
        workload = take(workload, np.argsort(starts(workload), kind="stable"))
    return workload
