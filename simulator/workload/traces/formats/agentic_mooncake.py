"""Dynamo's Mooncake for agents: requests that name those whose answers they wait for."""

from collections.abc import Mapping
from math import isnan, nan
from pathlib import Path
from typing import Any

from simulator.util.from_mapping import short_repr
from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.formats.agents import (
    Call,
    Recording,
    block_size,
    contents_of,
    seconds,
    tokens,
)
from simulator.workload.traces.json_lines import HashBlocks, Row, rows
from simulator.workload.traces.ledger import Keys

AGENTIC_USED = {
    **dict.fromkeys(("timestamp", "created_time", "not_before_ms"), "arrival"),
    **dict.fromkeys(("input_length", "input_tokens"), "prompt"),
    **dict.fromkeys(("output_length", "output_tokens"), "output"),
    **dict.fromkeys(("hash_ids", "block_size"), "prefix"),
    **dict.fromkeys(("request_id", "wait_for", "dependencies"), "waits for"),
    **dict.fromkeys(("delay", "delay_ms", "tool_wait_ms"), "delay"),
    **dict.fromkeys(("play_id", "session_id"), "session"),
}


def read_agentic_mooncake(
    path: Path, hash_block_size: int = 512, lanes: int | None = None
) -> Table:
    """Read Dynamo's agentic Mooncake JSONL: requests that name those whose answers they wait for.

    In its first version `wait_for`, `delay` and `tool_wait_ms`, in its second, behind a header,
    `dependencies` and `not_before_ms`; times in ms.
    """
    problems = Problems(path)
    found = Recording(Keys(AGENTIC_USED))
    blocks = HashBlocks(hash_block_size)
    waits: list[list[str]] = []
    names: dict[str, int] = {}
    for row in rows(path, problems):
        values = row.values
        found.keys.meet(values)
        if "schema" in values:
            blocks = block_size(row, values.get("block_size"), None, "block_size") or blocks
            continue
        name = values.get("request_id")
        if not isinstance(name, str) or name in names:
            wrong = "given twice" if name in names else "missing, or not a text"
            row.add_problem("request_id", wrong)
            continue
        prompt = tokens(row, values, "input_length", "input_tokens")
        output = tokens(row, values, "output_length", "output_tokens")
        key = next(
            (k for k in ("timestamp", "created_time", "not_before_ms") if k in values), "timestamp"
        )
        start = seconds(row, values, key, unit=1e3)
        wanted, delay = _dependencies(row, values)
        if isnan(start) and not wanted and not row.wrong:
            row.add_problem("timestamp", "missing, and no wait_for")
        ids, number = values.get("hash_ids"), len(found.calls)
        contents = contents_of(row, blocks, ids, prompt, "hash_ids", number)
        if not row.wrong:
            session = str(values.get("play_id") or values.get("session_id") or name)
            call = Call(row.line, start, nan, prompt, output, contents, session, delay=delay)
            names[name] = len(found.calls)
            found.calls.append(call)
            waits.append(wanted)
    for call, wanted in zip(found.calls, waits, strict=True):
        for name in wanted:
            if name in names:
                call.waits.append(names[name])
            else:
                problems.add(call.line, "wait_for", f"no request {short_repr(name)}")
    problems.stop()
    if lanes is not None:
        latest = 0.0
        for call in found.calls:  # without a time that of the line before: plays need an order
            call.start = latest = latest if isnan(call.start) else call.start
    return found.table(path, lanes)


def _dependencies(row: Row, values: Mapping[str, Any]) -> tuple[list[str], float]:
    """Return which requests one waits for, and how long it waits then, s."""
    typed = values.get("dependencies")
    wanted = values.get("wait_for") or []
    delays = [seconds(row, values, key, unit=1e3) for key in ("delay", "delay_ms", "tool_wait_ms")]
    if typed:
        if not isinstance(typed, list) or not all(isinstance(one, dict) for one in typed):
            row.add_problem("dependencies", "not a list of objects")
            return [], 0.0
        wanted = [one.get("request_id") for one in typed]
        delays = [seconds(row, typed[-1], "delay_ms", "dependencies.delay_ms", 1e3)]
    if not isinstance(wanted, list) or not all(isinstance(one, str) for one in wanted):
        row.add_problem("wait_for", "not a list of names")
        return [], 0.0
    return wanted, sum(delay for delay in delays if not isnan(delay))


AGENTIC_MOONCAKE = Format(
    "agentic_mooncake",
    'JSONL: {"request_id": .., "input_length": .., "wait_for": [..], "tool_wait_ms": ..}',
    lambda head: (
        (
            "request_id" in head.keys
            and bool({"input_length", "input_tokens"} & head.keys)
            and bool({"hash_ids", "wait_for", "play_id"} & head.keys)
        )
        or str(head.first.get("schema", "")).startswith("dynamo.agentic_mooncake")
    ),
    read_agentic_mooncake,
    ("hash_block_size", "lanes"),
    used=AGENTIC_USED,
)
