"""Traces of agents: sessions whose requests wait for answers, tools and subagents.

Each request is a `Call` with the time at which it was sent and answered. What it waited for is the
answer that came last before it, among those of its own session and of the sessions it started;
what lies between, tools and thinking, becomes the delay after that answer. A play is a session
with all that it started. With `lanes` so many plays run side by side, the next in a lane after
the end of the one before, as in AIPerf's and AISimulate's agentic replays.
Dynamo's traces and Weka's are here; others that tell it in other words are beside this file.
"""

import warnings
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from simulator.core.request import Segments
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.from_mapping import short_repr
from simulator.workload.traces.documents import (
    flat,
    is_json_lines,
    items,
    parse_object,
    read_text,
)
from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.json_lines import HashBlocks, Row, rows
from simulator.workload.traces.ledger import Keys
from simulator.workload.workload import Floats, Ints

DYNAMO_USED = {
    "request_received_ms": "arrival",
    **dict.fromkeys(("total_time_ms", "event_time_unix_ms"), "end"),
    **dict.fromkeys(("input_length", "input_tokens"), "prompt"),
    "output_tokens": "output",
    **dict.fromkeys(("input_sequence_hashes", "trace_block_size"), "prefix"),
    **dict.fromkeys(("session_id", "trajectory_id", "program_id"), "session"),
    **dict.fromkeys(
        ("parent_session_id", "parent_trajectory_id", "parent_program_id"), "session's parent"
    ),
}
DYNAMO_IDLE = ("*tool*", "*cached*", "event_source", "*finish_reason*")
WEKA_USED = {
    "t": "arrival",
    "api_time": "end",
    "in": "prompt",
    "out": "output",
    **dict.fromkeys(("hash_ids", "block_size", "hash_id_scope"), "prefix"),
    **dict.fromkeys(("requests", "type", "status"), "session"),
}
WEKA_IDLE = ("think_time", "tool_tokens", "system_tokens")


@dataclass(slots=True)
class Call:
    """A request of an agent, times in s."""

    line: int
    start: float
    end: float  # of its answer; NaN: not told
    prompt: int
    output: int
    segments: Segments | None
    session: Hashable
    waits: list[int] = field(default_factory=list)  # calls whose answers it says it waits for
    delay: float = 0.0  # after the last of them


@dataclass(slots=True)
class Recording:
    """The calls of a file, and which session started which."""

    keys: Keys
    calls: list[Call] = field(default_factory=list)
    parents: dict[Hashable, Hashable] = field(default_factory=dict)
    background: set[Hashable] = field(default_factory=set)  # sessions that nobody waits for

    def play(self, session: Hashable) -> Hashable:
        """Return the session with which it all began."""
        seen = {session}
        while (parent := self.parents.get(session, session)) not in seen:
            seen.add(parent)
            session = parent
        return session

    def infer_waits(self) -> None:
        """Let each call wait for the answer that it must have had; calls are in order of start."""
        children = defaultdict(list)
        for child, parent in self.parents.items():
            if child not in self.background:
                children[parent].append(child)
        ended: dict[Hashable, list[tuple[float, int]]] = defaultdict(list)
        for i, call in enumerate(self.calls):
            own = [call.session, *children[call.session]]
            if not ended[call.session] and call.session in self.parents:
                own.append(self.parents[call.session])
            before = []
            for session in own:
                answers = ended[session]
                place = bisect_right(answers, (call.start, i))
                before += answers[place - 1 : place]
            if before:
                end, last = max(before)
                call.waits, call.delay = [last], call.start - end
            insort(ended[call.session], (call.start if isnan(call.end) else call.end, i))

    def table(self, path: Path, lanes: int | None) -> Table:
        """Make the table: who waits for nobody comes at its time, or in its lane."""
        if several := sum(len(call.waits) > 1 for call in self.calls):
            text = f"{path}: {several} requests wait for several answers; the last named counts"
            warnings.warn(text, HeadwayWarning, stacklevel=4)
        calls = self.calls
        after = np.array([call.waits[-1] if call.waits else -1 for call in calls], np.int64)
        delay = np.array([call.delay if call.waits else 0.0 for call in calls])
        time = np.array([nan if call.waits else call.start for call in calls])
        order = np.arange(len(calls))
        if lanes is not None:
            order = self._put_into_lanes(lanes, time, after, delay)
        order = _predecessors_first(order, after, path, calls)
        place = np.empty(len(calls), np.int64)
        place[order] = np.arange(len(calls))
        segments = [calls[i].segments for i in order.tolist()]
        after = after[order]
        after[after >= 0] = place[after[after >= 0]]
        return Table(
            time[order],
            1.0,
            np.array([calls[i].prompt for i in order.tolist()], np.int64),
            np.array([calls[i].output for i in order.tolist()], np.int64),
            segments if any(segments) else None,
            after if (after >= 0).any() else None,
            delay[order] if (after >= 0).any() else None,
            ledger=self.keys.ledger(),
        )

    def _put_into_lanes(self, lanes: int, time: Floats, after: Ints, delay: Floats) -> Ints:
        """Let play k begin when play k - `lanes` has ended; give the calls play by play."""
        plays: dict[Hashable, list[int]] = defaultdict(list)
        for i, call in enumerate(self.calls):
            plays[self.play(call.session)].append(i)
        ends: list[int] = []
        for k, members in enumerate(plays.values()):
            begun = min(self.calls[i].start for i in members)
            for i in members:
                if after[i] < 0:
                    offset = self.calls[i].start - begun
                    if k < lanes:
                        time[i] = offset
                    else:
                        time[i], after[i], delay[i] = nan, ends[k - lanes], offset
            known = [(self.calls[i].start, self.calls[i].end) for i in members]
            last = max(range(len(members)), key=lambda n: (np.nan_to_num(known[n][1]), known[n][0]))
            ends.append(members[last])
        return np.array([i for members in plays.values() for i in members], np.int64)


def _predecessors_first(order: Ints, after: Ints, path: Path, calls: list[Call]) -> Ints:
    """Return the calls in an order in which each comes after the one that it waits for."""
    found: list[int] = []
    done: set[int] = set()
    for i in order.tolist():
        chain: dict[int, None] = {}
        at = i
        while at >= 0 and at not in done:
            if at in chain:
                raise HeadwayError(f"{path}:{calls[at].line}: wait_for: requests wait in a circle")
            chain[at] = None
            at = int(after[at])
        found += reversed(chain)
        done.update(chain)
    return np.array(found, np.int64)


def seconds(
    row: Row, values: Mapping[str, Any], key: str, name: str = "", unit: float = 1.0
) -> float:
    """Return a time in s, NaN for none; what is wrong is told by `name`."""
    value = values.get(key)
    if value is None:
        return nan
    if type(value) not in (int, float) or not 0 <= value < 1e18:
        row.add_problem(name or key, f"{short_repr(value)} is not a number of 0 or more")
        return nan
    return float(value) / unit


def tokens(row: Row, values: Mapping[str, Any], *names: str) -> int:
    """Return a number of tokens, under the first name that there is; 0 where it is wrong."""
    name = next((name for name in names if values.get(name) is not None), names[0])
    value = values.get(name)
    if value is None:
        row.add_problem(name, "missing")
    elif type(value) is not int or value < 1:
        row.add_problem(name, f"{short_repr(value)} is not a whole number of 1 or more")
    else:
        return value
    return 0


def contents_of(  # noqa: PLR0917
    row: Row, blocks: HashBlocks, ids: object, prompt: int, name: str, number: int, scope: str = ""
) -> Segments | None:
    """Spell out call `number`'s prompt by its blocks; what lies beyond them is nobody else's."""
    if ids is None or ids == [] or not prompt:
        return None
    if not isinstance(ids, list) or not all(type(one) in (int, str) for one in ids):
        row.add_problem(name, "not a list of ids")
        return None
    size = blocks.size
    if len(ids) > -(-prompt // size):
        row.add_problem(name, f"{len(ids)} blocks of {size} tokens are too many for {prompt}")
        return None
    named = min(prompt, len(ids) * size)
    found = blocks.segments([f"{scope}{one}" for one in ids] if scope else ids, named)
    return (*found, (("tail", number), prompt - named)) if named < prompt else found


def block_size(row: Row, value: object, known: HashBlocks | None, name: str) -> HashBlocks | None:
    """Return the blocks of a size, all of one file alike."""
    if type(value) is not int or value < 1:
        row.add_problem(name, f"{short_repr(value)} is not a whole number of 1 or more")
    elif known is not None and known.size != value:
        row.add_problem(name, f"{value}, but {known.size} in the lines before")
    else:
        return known or HashBlocks(value)
    return known


def read_dynamo(path: Path, lanes: int | None = None) -> Table:
    """Read Dynamo's request trace: `request_end` records, bare or in their sink's envelope.

    Requests with an `agent_context` wait within their sessions; others come at their times. The
    times of tools lie between an answer and the next request, so their records add nothing.
    """
    problems = Problems(path)
    found = Recording(Keys(DYNAMO_USED, DYNAMO_IDLE))
    blocks: HashBlocks | None = None
    failed = 0
    for row in rows(path, problems):
        event = row.values.get("event")
        record = event if isinstance(event, dict) else row.values
        request = record.get("request")
        if record.get("event_type") != "request_end":
            continue
        found.keys.meet(flat(record))
        if not isinstance(request, dict):
            row.add_problem("request", "missing, or not an object")
            continue
        if not request.get("output_tokens"):
            failed += 1
            continue
        replay = request.get("replay")
        replay = replay if isinstance(replay, dict) else {}
        if replay.get("input_sequence_hashes"):
            size = replay.get("trace_block_size")
            blocks = block_size(row, size, blocks, "replay.trace_block_size")
        values = request | {key: replay[key] for key in ("input_length",) if key in replay}
        prompt = tokens(row, values, "input_length", "input_tokens")
        output = tokens(row, request, "output_tokens")
        start = seconds(row, request, "request_received_ms", unit=1e3)
        took = seconds(row, request, "total_time_ms", unit=1e3)
        end = start + took
        if isnan(took):
            end = seconds(row, record, "event_time_unix_ms", unit=1e3)
        if isnan(start) and not row.wrong:
            row.add_problem("request_received_ms", "missing")
        contents, key = None, "input_sequence_hashes"
        if blocks:
            contents = contents_of(row, blocks, replay.get(key), prompt, key, len(found.calls))
        context = record.get("agent_context")
        session: Hashable = ("request", row.line)
        if isinstance(context, dict):
            session = _session(context, "session_id", "trajectory_id", "program_id")
            parent = _session(
                context, "parent_session_id", "parent_trajectory_id", "parent_program_id"
            )
            if parent and parent != session:
                found.parents[session] = parent
        if not row.wrong:
            found.calls.append(Call(row.line, start, end, prompt, output, contents, session))
    problems.stop()
    found.calls.sort(key=lambda call: call.start)
    found.infer_waits()
    table = found.table(path, lanes)
    table.failed = failed
    return table


def _session(context: Mapping[str, Any], *names: str) -> str:
    """Return the name of a session, by the newest of its keys last; earlier ones are finer."""
    return next((str(context[name]) for name in reversed(names) if context.get(name)), "")


def read_weka(path: Path, lanes: int | None = None) -> Table:
    """Read plays of Weka's kv-cache-tester, one JSON object each: one in the file, or one a line.

    The times of a subagent's requests count from its own start, or from that of the play, as the
    published ones do: where one is before its subagent's, from its own. A play starts at 0.
    """
    problems = Problems(path)
    plays = list(_plays(path, problems))
    relative = any(
        isinstance(inner.get("t"), int | float) and inner["t"] < entry["t"]
        for _, play in plays
        for entry in objects_of(play)
        if isinstance(entry.get("t"), int | float)
        for inner in objects_of(entry)
    )
    found = Recording(Keys(WEKA_USED, WEKA_IDLE))
    blocks: dict[int, HashBlocks] = {}
    for number, (row, play) in enumerate(plays):
        size = play.get("block_size")
        if type(size) is not int or size < 1:
            row.add_problem("block_size", f"{short_repr(size)} is not a whole number of 1 or more")
            continue
        ids = blocks.setdefault(size, HashBlocks(size))
        local = play.get("hash_id_scope", "local") != "global"
        scope = f"{number}/" if local else f"{size}/"
        _Plays(found, row, ids, scope, relative).add(play, ("play", number), 0.0)
    problems.stop()
    found.calls.sort(key=lambda call: call.start)
    found.infer_waits()
    return found.table(path, lanes)


def _plays(path: Path, problems: Problems) -> Iterator[tuple[Row, dict[str, Any]]]:
    if is_json_lines(path):
        for row in rows(path, problems):
            yield row, row.values
        return
    text = read_text(path)
    whole = parse_object(path, text)
    places = [line for line, _ in items(text, ("requests",))]
    yield Row(places[0] if places else 1, whole, problems), whole


def objects_of(play: Mapping[str, Any], key: str = "requests") -> list[dict[str, Any]]:
    """Return the objects in the list under a key; what is none is nobody's."""
    found = play.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


@dataclass(frozen=True, slots=True)
class _Plays:
    """Adds the requests of a play, and those of its subagents."""

    found: Recording
    row: Row
    blocks: HashBlocks
    scope: str  # of the ids of its blocks
    relative: bool  # times of a subagent count from its start

    def add(self, play: Mapping[str, Any], session: Hashable, begun: float) -> None:
        """Add a play or a subagent that began at a time, s."""
        found, row = self.found, self.row
        found.keys.meet(play)
        if not isinstance(play.get("requests"), list):
            row.add_problem("requests", "missing, or not a list")
            return
        for k, one in enumerate(play["requests"]):
            name = f"requests[{k}]."
            if not isinstance(one, dict):
                row.add_problem(name[:-1], "not an object")
                continue
            found.keys.meet(one)
            start = seconds(row, one, "t", f"{name}t")
            if isnan(start):
                row.add_problem(f"{name}t", "missing")
            elif one.get("type") == "subagent":
                child = (session, k)
                found.parents[child] = session
                if one.get("status") == "async_launched":
                    found.background.add(child)
                self.add(one, child, begun + start if self.relative else 0.0)
            elif one.get("out"):  # else it was cancelled, or only asked how long its prompt is
                prompt, output = tokens(row, one, "in"), tokens(row, one, "out")
                end = begun + start + seconds(row, one, "api_time", f"{name}api_time")
                place = f"{name}hash_ids", len(found.calls), self.scope
                contents = contents_of(row, self.blocks, one.get("hash_ids"), prompt, *place)
                found.calls.append(
                    Call(row.line, begun + start, end, prompt, output, contents, session)
                )


def _is_dynamo(first: Mapping[str, Any]) -> bool:
    event = first.get("event")
    record = event if isinstance(event, dict) else first
    schema = str(record.get("schema", ""))
    return schema.startswith("dynamo.") and "event_type" in record


DYNAMO = Format(
    "dynamo",
    'JSONL: {"schema": "dynamo.request.trace.v1", "event_type": "request_end", ..}',
    lambda head: _is_dynamo(head.first),
    read_dynamo,
    ("lanes",),
    used=DYNAMO_USED,
    idle=DYNAMO_IDLE,
)
WEKA = Format(
    "weka",
    'JSON or JSONL: {"id": .., "block_size": 64, "requests": [{"t": s, "in": .., "out": ..}]}',
    lambda head: {"block_size", "requests"} <= head.keys,
    read_weka,
    ("lanes",),
    used=WEKA_USED,
    idle=WEKA_IDLE,
)
