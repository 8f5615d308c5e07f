"""JSONL with ids of blocks: Mooncake's, which vLLM, guidellm and AIPerf replay, LLMServingSim's.

One object per line: `timestamp`, `input_length`, `output_length`, and `hash_ids`, one id per
512 tokens of the prompt, the last one cut at `input_length`. AIPerf adds `session_id` and `delay`:
a later line of a session is sent `delay` after the answer to the line before, and says what it
adds to the conversation so far, not the whole prompt.

LLMServingSim's times are in ns, and its ids those of blocks of prompt and output together.
"""

from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path

import numpy as np

from simulator.core.request import Segments
from simulator.util.errors import warn
from simulator.workload.traces.documents import Row, flat, rows
from simulator.workload.traces.fields import has_requests, source
from simulator.workload.traces.format import Format, Head, Problems, Table
from simulator.workload.traces.hash_blocks import HashBlocks
from simulator.workload.traces.records import Records

TIMED_SIZE = 16  # tokens that an id of a timed_trace stands for


@dataclass(slots=True)
class _Turn:
    """One line: a request by itself, or a turn of a session."""

    line: int
    delay: float  # NaN: none
    session: str | int | None
    ids: list[int | str]
    prompt: int = 0
    output: int = 0
    segments: Segments | None = None


def read_mooncake(
    path: Path,
    form: Format,
    time_unit: str | None = None,
    hash_block_size: int | None = None,
    session_turns: str = "delta",
) -> Table:
    """Read Mooncake's JSONL, and what is like it.

    Without any `timestamp` in the file everything arrives at once. A later turn of a session
    that has a `timestamp` and no `delay` arrives at that time, whatever has been answered by then.

    Args:
        path: the file.
        form: `mooncake`, `timed_trace` or `llmservingsim`, whose last tokens of a prompt may share
            a block with the first of the output; if the output is too short to fill it, the block
            has no id.
        time_unit: `ms` or `s`; None: the format's, but seconds where blocks of 16 tokens are asked
            for, as only traces in seconds have, and a time has a fraction.
        hash_block_size: tokens that one id stands for; None: what the lines say, else the format's.
        session_turns: `whole` where the line of a later turn holds its whole prompt, contrary to
            AIPerf.
    """
    problems = Problems(path)
    blocks = HashBlocks(hash_block_size or form.block_size, open_end=form.blocks_of_output)
    blocks.fixed = hash_block_size is not None
    records = Records(problems, form)
    told: list[_Turn] = []
    fractions = False
    for row in rows(path, problems):
        turn = _turn(row, blocks, form)
        if not row.wrong:
            told.append(turn)
            records.add(row.line, row.values)
            time = row.values.get("timestamp")
            fractions |= isinstance(time, float) and time % 1 != 0
    blocks.add_summary(problems)
    if time_unit is None and hash_block_size == TIMED_SIZE and fractions:
        time_unit = "s"
    if time_unit is not None:
        records.sources["arrival"] = source("timestamp", "", unit=time_unit)
    table = records.table()
    if fractions and time_unit is None and form.columns["arrival"].per_second == 1e3:
        table.ledger.note("timestamp: has fractions, and counts ms: time_unit: s, if it counts s")
    turns = [told[row] for row in table.rows.tolist()]
    for i, turn in enumerate(turns):
        turn.prompt, turn.output = int(table.prompt[i]), int(table.output[i])
        turn.segments = blocks.with_tail(turn.ids, turn.prompt, i)
    after = np.array(_link(turns, whole=session_turns == "whole"), dtype=np.int64)
    time, delay = table.time.astype(np.float64), np.array([t.delay for t in turns])
    waits = (after >= 0) & (~np.isnan(delay) | np.isnan(time))
    lost = np.flatnonzero(np.isnan(time) & ~waits)
    if not np.isnan(time).all():
        for i in lost.tolist():
            problems.add(turns[i].line, "timestamp", "missing")
        problems.stop()
    delay = np.nan_to_num(delay)
    if lost.size or delay.any() or waits.any():
        time[lost] = 0.0
        table.time = np.where(waits, nan, time + np.where(after < 0, delay, 0.0))
    table.prompt = np.array([turn.prompt for turn in turns], np.int64)
    segments = [turn.segments for turn in turns]
    table.segments = segments if any(segments) else table.segments  # by other columns
    table.after = np.where(waits, after, -1) if waits.any() else None
    table.delay = delay / table.per_second if waits.any() else None
    table.has_sessions = any(turn.session is not None for turn in turns)
    return table


def _turn(row: Row, blocks: HashBlocks, form: Format) -> _Turn:
    """Read what is told of a line's session and blocks; what is wrong makes the row so."""
    values = row.values
    if "input_length" not in values and ("text_input" in values or "messages" in values):
        row.add_problem("input_length", "missing; counting the tokens of a text needs a tokenizer")
    delay = row.number("delay")
    delay = row.number("delay_ms") if isnan(delay) else delay  # Dynamo's spelling
    session = values.get("session_id")
    if session is not None and not isinstance(session, str | int):
        row.add_problem("session_id", "neither a text nor a whole number")
    elif session is None and not isnan(delay):
        row.add_problem("delay", "needs a session_id, to say whose answer it waits for")
    counted = ("prompt", "output") if form.blocks_of_output else ("prompt",)
    tokens = [values.get(form.columns[field].names[0]) for field in counted]
    ids = row.ids(values.get("hash_ids"))
    blocks.hear(row, values.get("hash_block_size"))
    if ids and all(type(count) is int and count > 0 for count in tokens):
        blocks.check(row, len(ids), sum(tokens))  # type: ignore[arg-type]
    return _Turn(row.line, delay, session if isinstance(session, str | int) else None, ids)


def _link(turns: list[_Turn], *, whole: bool) -> list[int]:
    """Return the turn before each request, or -1; a later turn's prompt takes in its history."""
    after = []
    latest: dict[str | int, int] = {}
    opening: dict[str | int, Segments | None] = {}
    repeating = 0
    for i, turn in enumerate(turns):
        if turn.session is None:
            after.append(-1)
            continue
        last = latest.get(turn.session, -1)
        after.append(last)
        latest[turn.session] = i
        if last < 0:
            opening[turn.session] = turn.segments
        elif not whole:
            first = opening[turn.session]
            repeating += bool(turn.segments and first and turn.segments[0] == first[0])
            _prepend_history(turns, last, i)
    if repeating:
        warn(
            f"session_turns: {repeating} later turns begin like their session; if every line "
            "has its whole prompt, say session_turns: whole",
        )
    return after


def _prepend_history(turns: list[_Turn], last: int, i: int) -> None:
    """Put the conversation up to the answer to turn `last` before what turn `i` adds."""
    before, turn = turns[last], turns[i]
    before.segments = before.segments or ((("turn", last), before.prompt),)
    added = turn.segments or ((("turn", i), turn.prompt),)
    turn.segments = (*before.segments, (("out", last), before.output), *added)
    turn.prompt += before.prompt + before.output


def is_mooncake(head: Head) -> bool:
    """Return whether there is a length, or a text in its place, in the words of these traces."""
    texts = "messages" in head.first and not has_requests(flat(head.first))
    return texts or bool({"input_length", "text_input"} & head.keys)
