"""Traces of agents: sessions whose requests wait for answers, tools and subagents.

Each request is a `Call` with the time at which it was sent and answered. What it waited for is the
answer that came last before it, among those of its own session and of the sessions it started;
what lies between, tools and thinking, becomes the delay after that answer. A play is a session
with all that it started. With `lanes` so many plays run side by side, the next in a lane after
the end of the one before, as in AIPerf's and AISimulate's agentic replays.
Here are Dynamo's traces and its Mooncake, whose requests name those that they wait for, Weka's, and
GitHub Copilot's in the Azure Public Dataset (2026): one session a line, with turns of calls of a
model and batches of tools. A call is sent after the answer before it and the recorded delay, in
which the tools ran. Its prompt begins with as much of the one before it as was cached; the first
prompts of all sessions begin alike for so long.
"""

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from simulator.core.request import Segments
from simulator.util.errors import TraceError, warn
from simulator.util.from_mapping import short_repr
from simulator.workload.prefixes import first_tokens
from simulator.workload.traces.documents import Row, flat, json_objects, objects_of, rows
from simulator.workload.traces.format import Format, Head, Problems, Table
from simulator.workload.traces.hash_blocks import HashBlocks
from simulator.workload.traces.records import Records
from simulator.workload.workload import Floats, Ints

NO_ANSWER = {"failed": "no answer"}


@dataclass(slots=True)
class Call:
    """A request of an agent; what follows `name` comes from the table of all, times in s."""

    line: int
    session: Hashable
    blocks: HashBlocks | None = None
    ids: Sequence[int | str] = ()  # of the blocks that its prompt begins with
    key: str = "hash_ids"  # that they are under
    scope: str = ""  # of these ids
    waits: list[int] = field(default_factory=list)  # calls whose answers it says it waits for
    delay: float = 0.0  # after the last of them
    cached: int = 0  # tokens of its prompt
    name: str = ""
    row: int = 0
    start: float = nan  # NaN: not told
    end: float = nan  # of its answer, likewise
    prompt: int = 0
    output: int = 0
    segments: Segments | None = None


class Recording:
    """The calls of a file, and which session started which."""

    def __init__(self, path: Path, form: Format) -> None:
        self.problems = Problems(path)
        self.records = Records(self.problems, form)
        self.calls: list[Call] = []
        self.parents: dict[Hashable, Hashable] = {}
        self.background: set[Hashable] = set()  # sessions that nobody waits for

    def add(self, call: Call, values: Mapping[str, object], label: str = "") -> None:
        """Take in a call, of which `values` tell times and lengths; `label` goes before names."""
        self.records.add(call.line, values, label)
        self.calls.append(call)

    def settle(self) -> None:
        """Read what all calls tell; those without an answer are left out."""
        table = self.table = self.records.table()
        self.calls = [self.calls[row] for row in table.rows.tolist()]
        first = np.nanmin(table.time) if not np.isnan(table.time).all() else 0
        times = (table.time - first) / table.per_second
        took = np.full(len(times), nan) if table.measured is None else table.measured.e2el
        for row, call in enumerate(self.calls):
            call.row, call.start, call.end = row, float(times[row]), float(times[row] + took[row])
            call.prompt, call.output = int(table.prompt[row]), int(table.output[row])
            if call.blocks is not None:
                self._spell_out(call, call.blocks)
        self.problems.stop()

    def _spell_out(self, call: Call, blocks: HashBlocks) -> None:
        """Say what a call's prompt is by its blocks; what lies beyond them is nobody else's."""
        if len(call.ids) > -(-call.prompt // blocks.size):
            what = f"{len(call.ids)} blocks of {blocks.size} tokens are too many for {call.prompt}"
            self.problems.add(call.line, call.key, what)
        else:
            call.segments = blocks.with_tail(call.ids, call.prompt, call.row, call.scope)

    def play(self, session: Hashable) -> Hashable:
        """Return the session with which it all began."""
        seen = {session}
        while (parent := self.parents.get(session, session)) not in seen:
            seen.add(parent)
            session = parent
        return session

    def infer_waits(self) -> None:
        """Settle; let each call wait for the answer that it must have had, in order of start."""
        self.settle()
        self.calls.sort(key=lambda call: call.start)
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

    def linked(self, lanes: int | None) -> Table:
        """Return the table: who waits for nobody comes at its time, or in its lane."""
        calls, path = self.calls, self.problems.path
        if several := sum(len(call.waits) > 1 for call in calls):
            warn(f"{path}: {several} requests wait for several answers; the last named counts")
        after = np.array([call.waits[-1] if call.waits else -1 for call in calls], np.int64)
        delay = np.array([call.delay if call.waits else 0.0 for call in calls])
        time = np.array([nan if call.waits else call.start for call in calls])
        order = np.arange(len(calls))
        if lanes is not None:
            order = self._put_into_lanes(lanes, time, after, delay)
        order = _predecessors_first(order, after, path, calls)
        place = np.empty(len(calls), np.int64)
        place[order] = np.arange(len(calls))
        after = after[order]
        after[after >= 0] = place[after[after >= 0]]
        ordered = [calls[i] for i in order.tolist()]
        table = self.table.take(np.array([call.row for call in ordered], np.int64))
        table.time, table.per_second = time[order], 1.0
        segments = [call.segments for call in ordered]
        table.segments = segments if any(segments) else None
        if (after >= 0).any():
            table.after, table.delay = after, delay[order]
        return table

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
                raise TraceError(path, "requests wait in a circle", calls[at].line, "wait_for")
            chain[at] = None
            at = int(after[at])
        found += reversed(chain)
        done.update(chain)
    return np.array(found, np.int64)


def read_dynamo(path: Path, form: Format, lanes: int | None = None) -> Table:
    """Read Dynamo's request trace: `request_end` records, bare or in their sink's envelope.

    Requests with an `agent_context` wait within their sessions; others come at their times. The
    times of tools lie between an answer and the next request, so their records add nothing.
    """
    found, blocks = Recording(path, form), HashBlocks(1)
    for row in rows(path, found.problems):
        event = row.values.get("event")
        record = event if isinstance(event, dict) else row.values
        request = record.get("request")
        if record.get("event_type") != "request_end":
            continue
        if not isinstance(request, dict):
            row.add_problem("request", "missing, or not an object")
            continue
        replay = request.get("replay")
        replay = replay if isinstance(replay, dict) else {}
        call = Call(row.line, ("request", row.line))
        if replay.get("input_sequence_hashes"):
            call.blocks, call.key = blocks, "input_sequence_hashes"
            call.ids = row.ids(replay[call.key], call.key)
            blocks.hear(row, replay.get("trace_block_size", 0), "replay.trace_block_size")
        context = record.get("agent_context")
        if isinstance(context, dict):
            call.session = _session(context)
            parent = _session(context, "parent_")
            if parent and parent != call.session:
                found.parents[call.session] = parent
        found.add(call, flat(record) | ({} if request.get("output_tokens") else NO_ANSWER))
    found.infer_waits()
    return found.linked(lanes)


def _session(context: Mapping[str, Any], prefix: str = "") -> str:
    """Return the name of a session, by the newest of its keys last; earlier ones are finer."""
    names = (f"{prefix}{name}_id" for name in ("program", "trajectory", "session"))
    return next((str(context[name]) for name in names if context.get(name)), "")


def read_weka(path: Path, form: Format, lanes: int | None = None) -> Table:
    """Read plays of Weka's kv-cache-tester, one JSON object each: one in the file, or one a line.

    The times of a subagent's requests count from its own start, or from that of the play, as the
    published ones do: where one is before its subagent's, from its own. A play starts at 0.
    """
    found = Recording(path, form)
    plays = [*json_objects(path, found.problems, lambda _: None)]
    relative = any(
        isinstance(inner.get("t"), int | float) and inner["t"] < entry["t"]
        for _, play in plays
        for entry in objects_of(play, "requests")
        if isinstance(entry.get("t"), int | float)
        for inner in objects_of(entry, "requests")
    )
    sizes: dict[str, HashBlocks] = {}
    for number, (line, play) in enumerate(plays):
        row = Row(line, play, found.problems)
        size = play.get("block_size", 0)
        blocks = sizes.setdefault(repr(size), HashBlocks(1))
        blocks.hear(row, size, "block_size")
        _add_play(found, row, number, blocks, relative=relative)
    found.infer_waits()
    return found.linked(lanes)


def _add_play(
    found: Recording, row: Row, number: int, blocks: HashBlocks, *, relative: bool
) -> None:
    """Add the requests of a play, and those of its subagents.

    `relative`: the times of a subagent count from its own start.
    """
    local = row.values.get("hash_id_scope", "local") != "global"
    scope = f"{number}/" if local else f"{blocks.size}/"

    def add(play: Mapping[str, Any], session: Hashable, begun: float) -> None:
        found.records.meet(list(play))
        if not isinstance(play.get("requests"), list):
            row.add_problem("requests", "missing, or not a list")
            return
        for k, one in enumerate(play["requests"]):
            name = f"requests[{k}]."
            if not isinstance(one, dict):
                row.add_problem(name[:-1], "not an object")
                continue
            start = one.get("t")
            if one.get("type") != "subagent":
                ids = row.ids(one.get("hash_ids"), f"{name}hash_ids")
                call = Call(row.line, session, blocks, ids, key=f"{name}hash_ids", scope=scope)
                timed = {"t": begun + start} if isinstance(start, int | float) else {}
                found.add(call, one | timed | ({} if one.get("out") else NO_ANSWER), name)
            elif not isinstance(start, int | float):
                row.add_problem(f"{name}t", "missing, or not a number")
            else:
                child = (session, k)
                found.parents[child] = session
                if one.get("status") == "async_launched":
                    found.background.add(child)
                add(one, child, begun + start if relative else 0.0)

    add(row.values, ("play", number), 0.0)


def is_dynamo(head: Head) -> bool:
    """Return whether the first record, bare or in its envelope, is one of Dynamo's."""
    event = head.first.get("event")
    record = event if isinstance(event, dict) else head.first
    schema = str(record.get("schema", ""))
    return schema.startswith("dynamo.") and "event_type" in record


def read_agentic_mooncake(
    path: Path, form: Format, hash_block_size: int | None = None, lanes: int | None = None
) -> Table:
    """Read Dynamo's agentic Mooncake JSONL: requests that name those whose answers they wait for.

    In its first version `wait_for`, `delay` and `tool_wait_ms`, in its second, behind a header,
    `dependencies` and `not_before_ms`; times in ms.
    """
    found = Recording(path, form)
    blocks = HashBlocks(hash_block_size or form.block_size, fixed=hash_block_size is not None)
    wanted: dict[str, list[str]] = {}
    for row in rows(path, found.problems):
        values = row.values
        if "schema" in values:
            blocks.hear(row, values.get("block_size"), "block_size")
            found.records.meet(list(values))
            continue
        name = values.get("request_id")
        if not isinstance(name, str) or name in wanted:
            wrong = "given twice" if name in wanted else "missing, or not a text"
            row.add_problem("request_id", wrong)
            continue
        session = str(values.get("play_id") or values.get("session_id") or name)
        call = Call(row.line, session, blocks, row.ids(values.get("hash_ids")), name=name)
        wanted[name], call.delay = _dependencies(row)
        found.add(call, values)
    found.settle()
    places = {call.name: k for k, call in enumerate(found.calls)}
    for call in found.calls:
        for name in wanted[call.name]:
            if name in places:
                call.waits.append(places[name])
            else:
                found.problems.add(call.line, "wait_for", f"no request {short_repr(name)}")
        if isnan(call.start) and not wanted[call.name]:
            found.problems.add(call.line, "timestamp", "missing, and no wait_for")
    found.problems.stop()
    if lanes is not None:
        latest = 0.0
        for call in found.calls:  # without a time that of the line before: plays need an order
            call.start = latest = latest if isnan(call.start) else call.start
    return found.linked(lanes)


def _dependencies(row: Row) -> tuple[list[str], float]:
    """Return which requests one waits for, and how long it waits then, s."""
    typed, wanted = row.values.get("dependencies"), row.values.get("wait_for") or []
    if not typed:
        if not isinstance(wanted, list) or not all(isinstance(one, str) for one in wanted):
            row.add_problem("wait_for", "not a list of names")
            return [], 0.0
        keys = [key for key in ("delay", "delay_ms", "tool_wait_ms") if row.values.get(key)]
        return wanted, sum(map(row.number, keys)) / 1e3
    if not isinstance(typed, list) or not all(isinstance(one, dict) for one in typed):
        row.add_problem("dependencies", "not a list of objects")
        return [], 0.0
    delay = Row(row.line, typed[-1], row.problems).number("delay_ms")
    return [str(one.get("request_id")) for one in typed], np.nan_to_num(delay) / 1e3


def is_agentic(head: Head) -> bool:
    """Return whether requests name others, or the first line names one of the versions."""
    named, length = "request_id" in head.first, {"input_length", "input_tokens"} & head.keys
    if named and length and {"hash_ids", "wait_for", "play_id"} & head.keys:
        return True
    return str(head.first.get("schema", "")).startswith("dynamo.agentic_mooncake")


def read_copilot(path: Path, form: Format, lanes: int | None = None) -> Table:
    """Read sessions; calls without an answer are left out, cancelled ones are told."""
    found, cancelled = Recording(path, form), 0
    for row in rows(path, found.problems):
        session = str(row.values.get("session_id"))
        found.records.meet(list(row.values))
        for turn in objects_of(row.values, "turns"):
            found.records.meet(list(turn))
            for one in objects_of(turn, "llm_calls"):
                values, call = flat(one), Call(row.line, session)
                if values.get("tokens.completion"):
                    cancelled += "cancel" in str(values.get("result")).lower()
                    cached = Row(row.line, values, found.problems).number("tokens.cached")
                    call.cached = int(np.nan_to_num(cached))
                else:
                    values |= NO_ANSWER
                found.add(call, values)
    found.infer_waits()
    _share(found.calls)
    table = found.linked(lanes)
    if cancelled:
        told = "result: requests that were cancelled, and are played to their end"
        table.ledger.note(told, cancelled)
    return table


def _share(calls: list[Call]) -> None:
    """Let each prompt of a session begin with what was cached of the one before it."""
    before: dict[Hashable, Segments] = {}
    for call in calls:
        left = min(call.cached, call.prompt)
        parts = first_tokens(before.get(call.session) or ((("cached",), left),), left)
        if own := call.prompt - sum(count for _, count in parts):
            parts = (*parts, (("own", call.row), own))
        call.segments = before[call.session] = parts
