"""JSONL with ids of blocks: Mooncake's, which vLLM, guidellm and AIPerf replay, LLMServingSim's.

One object per line: `timestamp`, `input_length`, `output_length`, and `hash_ids`, one id per
512 tokens of the prompt, the last one cut at `input_length`. AIPerf adds `session_id` and `delay`:
a later line of a session is sent `delay` after the answer to the line before, and says what it
adds to the conversation so far, not the whole prompt.

LLMServingSim's times are in ns, and its ids those of blocks of prompt and output together.
"""

import warnings
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from pathlib import Path

import numpy as np

from simulator.core.request import Segments
from simulator.util.errors import HeadwayWarning
from simulator.workload.traces.documents import flat
from simulator.workload.traces.fields import has_requests, wrong_century
from simulator.workload.traces.format import Format, Problems, Published, Table
from simulator.workload.traces.json_lines import HashBlocks, Labels, Row, rows

TIMED_SIZE = 16  # tokens that an id of a timed_trace stands for
PER_SECOND = {"s": 1.0, "ms": 1e3}
LLMSERVINGSIM_KEYS = {"arrival_time_ns", "input_toks"}
USED = {
    "timestamp": "arrival",
    "input_length": "prompt",
    "output_length": "output",
    "hash_ids": "prefix",
    "hash_block_size": "prefix",
    "session_id": "session",
    "delay": "delay",
    "delay_ms": "delay",
}
LLMSERVINGSIM_USED = {
    "arrival_time_ns": "arrival",
    "input_toks": "prompt",
    "output_toks": "output",
    "hash_ids": "prefix",
}


@dataclass(slots=True)
class _Turn:
    """One line: a request by itself, or a turn of a session."""

    line: int
    time: float  # NaN: none
    delay: float  # NaN: none
    prompt: int
    output: int
    segments: Segments | None
    session: str | int | None


def read_mooncake(
    path: Path,
    time_unit: str | None = None,
    hash_block_size: int | None = None,
    session_turns: str = "delta",
    *,
    usual_size: int = 512,
    usual_unit: str = "ms",
) -> Table:
    """Read Mooncake's JSONL.

    Without any `timestamp` in the file everything arrives at once. A later turn of a session
    that has a `timestamp` and no `delay` arrives at that time, whatever has been answered by then.

    Args:
        path: the file.
        time_unit: `ms` or `s`; None: `usual_unit`, but seconds where blocks of 16 tokens are asked
            for, as only traces in seconds have, and a time has a fraction.
        hash_block_size: tokens that one id stands for; None: what the lines say, else usual_size.
        session_turns: `whole` where the line of a later turn holds its whole prompt, contrary to
            AIPerf.
        usual_size: tokens of a block where nothing says it.
        usual_unit: of the times, likewise.
    """
    problems = Problems(path)
    blocks = HashBlocks(hash_block_size or usual_size, fixed=hash_block_size is not None)
    labels = Labels(USED)
    turns = [turn for row in rows(path, problems) if (turn := _turn(row, blocks, labels))]
    blocks.add_summary(problems)
    labelled = labels.columns(problems)
    problems.stop()
    after = np.array(_link(turns, whole=session_turns == "whole"), dtype=np.int64)
    time, delay = np.array([t.time for t in turns]), np.array([t.delay for t in turns])
    if time_unit is None and hash_block_size == TIMED_SIZE and (np.nan_to_num(time) % 1).any():
        usual_unit = "s"
    per_second = PER_SECOND[time_unit or usual_unit]
    if wrong := wrong_century(time, per_second):
        problems.add(turns[wrong[0]].line, "timestamp", wrong[1].partition(", say")[0])
        problems.stop()
    waits = (after >= 0) & (~np.isnan(delay) | np.isnan(time))
    lost = np.flatnonzero(np.isnan(time) & ~waits)
    if not np.isnan(time).all():
        for i in lost:
            problems.add(turns[i].line, "timestamp", "missing")
        problems.stop()
    time[lost] = 0.0
    delay = np.nan_to_num(delay)
    time = np.where(waits, nan, time + np.where(after < 0, delay, 0.0))
    segments = [t.segments for t in turns]
    return Table(
        time,
        per_second,
        np.array([t.prompt for t in turns]),
        np.array([t.output for t in turns]),
        segments if any(segments) else None,
        np.where(waits, after, -1) if waits.any() else None,
        delay / per_second if waits.any() else None,
        has_sessions=any(turn.session is not None for turn in turns),
        **labelled,
    )


def _turn(row: Row, blocks: HashBlocks, labels: Labels) -> _Turn | None:
    """Read one line; None, and a problem for each column that is wrong."""
    prompt, output = _length(row, "input_length"), _length(row, "output_length")
    time, delay = _time(row, "timestamp"), _time(row, "delay")
    if isnan(delay):
        delay = _time(row, "delay_ms")  # Dynamo's spelling
    session = row.values.get("session_id")
    if session is not None and not isinstance(session, str | int):
        row.add_problem("session_id", "neither a text nor a whole number")
        session = None
    elif session is None and not isnan(delay):
        row.add_problem("delay", "needs a session_id, to say whose answer it waits for")
    ids = row.hash_ids()
    blocks.hear(row)
    if ids and prompt:
        blocks.check(row, len(ids), prompt)
    labels.add(row)
    if row.wrong:
        return None
    segments = blocks.segments(ids, prompt) if ids else None
    return _Turn(row.line, time, delay, prompt, output, segments, session)


def _length(row: Row, key: str) -> int:
    if key not in row.values and ("text_input" in row.values or "messages" in row.values):
        row.add_problem(key, "missing; counting the tokens of a text needs a tokenizer")
        return 0
    return row.tokens(key)


def _time(row: Row, key: str) -> float:
    return nan if row.values.get(key) is None else row.number(key)


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
        warnings.warn(
            f"session_turns: {repeating} later turns begin like their session; if every line "
            "holds its whole prompt, say session_turns: whole",
            HeadwayWarning,
            stacklevel=4,
        )
    return after


def _prepend_history(turns: list[_Turn], last: int, i: int) -> None:
    """Put the conversation up to the answer to turn `last` before what turn `i` adds."""
    before, turn = turns[last], turns[i]
    before.segments = before.segments or ((("turn", last), before.prompt),)
    added = turn.segments or ((("turn", i), turn.prompt),)
    turn.segments = (*before.segments, (("out", last), before.output), *added)
    turn.prompt += before.prompt + before.output


def read_llmservingsim(path: Path, hash_block_size: int = 16) -> Table:
    """Read LLMServingSim's JSONL: blocks cover the prompt and then the output.

    The prompt's last tokens may share a block with the first of the output; where the output is
    too short to fill it, the block has no id and these tokens are shared with nobody.
    """
    problems, blocks = Problems(path), HashBlocks(hash_block_size, open_end=True)
    labels = Labels(LLMSERVINGSIM_USED)
    requests: list[tuple[int | float, int, int]] = []
    segments: list[Segments | None] = []
    for row in rows(path, problems):
        arrival = row.number("arrival_time_ns")
        prompt, output = row.tokens("input_toks"), row.tokens("output_toks")
        ids = row.hash_ids()
        if ids and not row.wrong:
            blocks.check(row, len(ids), prompt + output)
        labels.add(row)
        if row.wrong:
            continue
        named = min(prompt, len(ids) * hash_block_size)
        parts: Segments = blocks.segments(ids, named) if ids else ()
        if ids and named < prompt:
            parts = (*parts, (("tail", row.line), prompt - named))
        requests.append((arrival, prompt, output))
        segments.append(parts or None)
    blocks.add_summary(problems)
    labelled = labels.columns(problems)
    problems.stop()
    columns = zip(*requests, strict=True) if requests else ((), (), ())
    time, prompts, outputs = map(np.array, columns)
    return Table(
        time,
        1e9,
        prompts,
        outputs,
        segments if any(segments) else None,
        **labelled,
    )


MOONCAKE = Format(
    "mooncake",
    'JSONL: {"timestamp": ms, "input_length": .., "output_length": .., "hash_ids": []}',
    detect=lambda head: (
        not {"hash_block_size", "parent_chat_id"} & head.keys
        and (
            bool({"input_length", "text_input"} & head.keys)
            or ("messages" in head.keys and not has_requests(flat(head.first)))
        )
    ),
    read=read_mooncake,
    options=("time_unit", "hash_block_size", "session_turns"),
    used=USED,
    published=(
        Published(
            ("mooncake", "conversation_trace", "toolagent_trace", "synthetic_trace"),
            "a Mooncake trace (Qin et al., FAST'25), licence Apache-2.0: get it from the folder "
            "FAST25-release/traces of the repository kvcache-ai/Mooncake on GitHub",
        ),
    ),
)
TIMED_TRACE = MOONCAKE._replace(
    name="timed_trace",
    begins="JSONL: as mooncake, but in seconds and with 16 tokens per id, as vLLM reads it",
    # Headway's own lines say how large blocks are, and Qwen's name the chat before theirs.
    detect=lambda head: (
        "input_length" in head.keys and bool({"hash_block_size", "parent_chat_id"} & head.keys)
    ),
    read=partial(read_mooncake, usual_unit="s", usual_size=TIMED_SIZE),
    published=(),
)
LLMSERVINGSIM = Format(
    "llmservingsim",
    'JSONL: {"arrival_time_ns": .., "input_toks": .., "output_toks": ..}',
    detect=lambda head: bool(LLMSERVINGSIM_KEYS & head.keys),
    read=read_llmservingsim,
    options=("hash_block_size",),
    used=LLMSERVINGSIM_USED,
)
