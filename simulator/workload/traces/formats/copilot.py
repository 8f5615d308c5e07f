"""Traces of GitHub Copilot's coding agent, as the Azure Public Dataset has them (2026).

One session a line: its turns have calls of a model and batches of tools. A call is sent after the
answer before it and the recorded delay, in which the tools ran. Its prompt begins with as much of
the one before it as was cached; the first prompts of all sessions begin alike for so long.
"""

from collections.abc import Hashable
from pathlib import Path

import numpy as np

from simulator.core.request import Segments
from simulator.workload.prefixes import first_tokens
from simulator.workload.traces.documents import flat, objects_of
from simulator.workload.traces.format import Format, Table
from simulator.workload.traces.formats.agents import NO_ANSWER, Call, Recording
from simulator.workload.traces.json_lines import Row, rows


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
    found.settle()
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
