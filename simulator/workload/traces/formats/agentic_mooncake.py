"""Dynamo's Mooncake for agents: requests that name those whose answers they wait for."""

from math import isnan
from pathlib import Path

import numpy as np

from simulator.util.from_mapping import short_repr
from simulator.workload.traces.format import Format, Head, Table
from simulator.workload.traces.formats.agents import Call, Recording
from simulator.workload.traces.json_lines import HashBlocks, Row, rows


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
