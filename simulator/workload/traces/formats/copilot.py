"""Traces of GitHub Copilot's coding agent, as the Azure Public Dataset has them (2026).

One session a line: its turns have calls of a model and batches of tools. A call is sent after the
answer before it and the recorded delay, in which the tools ran. Its prompt begins with as much of
the one before it as was cached; the first prompts of all sessions begin alike for so long.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simulator.core.request import Segments
from simulator.util.from_mapping import short_repr
from simulator.workload.traces.documents import flat
from simulator.workload.traces.fields import NO_DATE, parse_date
from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.formats.agents import Call, Recording, objects_of, seconds, tokens
from simulator.workload.traces.json_lines import Row, rows
from simulator.workload.traces.ledger import Keys

USED = {
    **dict.fromkeys(("session_id", "turns", "llm_calls"), "session"),
    "timestamp": "arrival",
    "duration_ms": "end",
    "tokens.prompt": "prompt",
    "tokens.completion": "output",
    "tokens.cached": "prefix",
    "result": "status",
    "tool_batches": "delay",
}
IDLE = ("turn_id", "initiator_type", "message_metadata", "tokens.cached_pct", "status_code")


def read(path: Path, lanes: int | None = None) -> Table:
    """Read sessions; calls without an answer are left out, cancelled ones are told."""
    problems = Problems(path)
    found = Recording(Keys(USED, IDLE))
    failed, cancelled, models = 0, 0, set()
    for row in rows(path, problems):
        found.keys.meet(row.values)
        session, calls = str(row.values.get("session_id")), []
        for values in _calls(row, found.keys):
            if not values.get("tokens.completion"):
                failed += 1
            elif call := _call(row, values, session):
                calls.append((call, int(values.get("tokens.cached") or 0)))
                cancelled += "cancel" in str(values.get("result")).lower()
                models.add(str(values.get("model")))
        _share(found, sorted(calls, key=lambda item: item[0].start))
    problems.stop()
    found.calls.sort(key=lambda call: call.start)
    found.infer_waits()
    table = found.table(path, lanes)
    table.failed = failed
    assert table.ledger is not None
    if cancelled:
        told = "result: requests that were cancelled, and are played to their end"
        table.ledger.note(told, cancelled)
    if len(models) > 1:
        table.ledger.note(f"model: the calls are for {len(models)} models; one serves all")
    return table


def _calls(row: Row, keys: Keys) -> Iterator[dict[str, Any]]:
    """Yield the calls of a session, flat."""
    for turn in objects_of(row.values, "turns"):
        keys.meet(turn)
        for one in objects_of(turn, "llm_calls"):
            values = flat(one)
            keys.meet(values)
            yield values


def _call(row: Row, values: Mapping[str, Any], session: str) -> Call | None:
    """Read one call; None, and problems, where it is wrong."""
    prompt, output = tokens(row, values, "tokens.prompt"), tokens(row, values, "tokens.completion")
    took = seconds(row, values, "duration_ms", unit=1e3)
    try:
        start = parse_date(str(values.get("timestamp"))) / 1e6
    except ValueError:
        row.add_problem("timestamp", f"{short_repr(values.get('timestamp'))} {NO_DATE}")
        return None
    if row.wrong:
        return None
    return Call(row.line, start, start + took, prompt, output, segments=None, session=session)


def _share(found: Recording, calls: list[tuple[Call, int]]) -> None:
    """Let each prompt of a session begin with what was cached of the one before it."""
    before: Segments = ()
    for call, cached in calls:
        left = min(cached, call.prompt)
        parts = []
        for name, count in before or ((("cached",), left),):
            if taken := min(count, left):
                parts.append((name, taken))
            left -= taken
        own = call.prompt - sum(count for _, count in parts)
        before = (*parts, (("own", len(found.calls)), own)) if own else tuple(parts)
        call.segments = before
        found.calls.append(call)


FORMAT = Format(
    "copilot",
    'JSONL: {"session_id": .., "turns": [{"llm_calls": [..], "tool_batches": [..]}]}',
    lambda head: {"session_id", "turns"} <= head.keys,
    read,
    options=("lanes",),
    used=USED,
    idle=IDLE,
)
