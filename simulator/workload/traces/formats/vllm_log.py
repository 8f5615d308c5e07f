"""The requests that vLLM's API server logs (`--enable-log-requests`), by release."""

import re
from pathlib import Path
from typing import Any

from simulator.core.request import Segments
from simulator.util.errors import HeadwayError
from simulator.workload.traces.documents import lines
from simulator.workload.traces.fields import parse_date
from simulator.workload.traces.format import Format, Head, Problems, Table
from simulator.workload.traces.formats import NO_REQUESTS
from simulator.workload.traces.formats.logs import DATE
from simulator.workload.traces.json_lines import HashBlocks
from simulator.workload.traces.records import Records

STAMP = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) ([01]\d-[0-3]\d [0-2]\d:[0-5]\d:[0-5]\d)\b")
EVENT = re.compile(
    r"(?:(Received|Aborted) request|Request|Generated response) (\S+?)"
    r"(?: details| \(streaming complete\))?[:.](?: |$)"
)
IDS = re.compile(r"(prompt|output)[_ ]token[_ ]ids: \[([\d, ]*)\]")
KNOB = re.compile(r"\b(n|max_tokens)=(\d+)")
LORA = re.compile(r"lora_name='([^']*)'")
BLOCK = 16  # tokens of a prompt that have a name together
HALF_A_YEAR = 180 * 86_400_000_000  # us


def is_vllm(head: Head) -> bool:
    """Return whether a file begins with a line of vLLM's logger."""
    return bool(STAMP.search(head.line))


def read_vllm_log(path: Path, form: Format) -> Table:
    """Read requests: an arrival by the log's clock, a prompt by its tokens, which tell prefixes.

    An answer is as long as `--enable-log-outputs` says, else as its `max_tokens` allows: a bound,
    which the ledger tells. HeadwayError where the tokens of prompts are not logged.
    """
    records, blocks = Records(Problems(path), form), HashBlocks(BLOCK)
    found = _logged(path)
    for name, row in found.items():
        if not row.get("prompt") and "aborted" not in row:
            why = (
                "not logged, as from 0.11 on without VLLM_LOGGING_LEVEL=DEBUG: take that log, "
                "spans (--otlp-traces-endpoint) or a proxy's log"
            )
            raise HeadwayError(f"{path}:{row['line']}: prompt_token_ids: {name}: {why}")
        row |= {
            f"{kind}_token_ids": len(row.get(kind, ())) or None for kind in ("prompt", "output")
        }
        row["limit"] = row.get("max_tokens")
        if row["limit"] is not None:
            row["max_tokens"] = row["limit"] * row.get("n", 1)  # of all answers together
        records.add(row["line"], {key: row.get(key) for key in form.used})
    table, every = records.table(), [*found.values()]
    assert table.rows is not None
    assert table.ledger is not None
    kept = [(k, every[k]) for k in table.rows.tolist()]
    table.segments = [_named(blocks, row["prompt"], k) for k, row in kept]
    if unknown := sum("output" not in row for _, row in kept):
        told = "answers that are not logged, and are taken as long as it allows"
        table.ledger.note(f"max_tokens: {told}", unknown)
    longest = int(table.prompt.max(initial=0))
    if (cut := int((table.prompt == longest).sum())) > max(len(kept) // 4, 2):
        told = (
            f"{cut} prompts of {longest} tokens, and none is longer: does --max-log-len cut them?"
        )
        table.ledger.note(f"prompt_token_ids: {told}")
    return table


def _logged(path: Path) -> dict[str, dict[str, Any]]:
    """Return what is logged of each request, by its name: times in us, lists of tokens."""
    found: dict[str, dict[str, Any]] = {}
    year, last = 2000, 0
    for number, line in lines(path):
        event, stamp = EVENT.search(line), STAMP.search(line)
        if event is None or stamp is None:
            continue
        kind, name = event.groups()
        text = line[event.end() :].rpartition("SamplingParams(")[2]  # a prompt may say anything
        if kind == "Received":
            date = DATE.search(line[: event.start()])  # of what wraps the log
            when = parse_date(date[0].replace(",", ".") if date else f"{year}-{stamp[1]}")
            if when < last - HALF_A_YEAR:  # the log's clock has no year
                year += 1
                when = parse_date(f"{year}-{stamp[1]}")
            last, lora = when, LORA.search(text)
            knobs = {key: int(value) for key, value in reversed(KNOB.findall(text))}
            found[name] = {"line": number, "time": when, "lora_name": lora and lora[1], **knobs}
        elif name in found and kind:
            found[name]["aborted"] = "aborted"
        if name in found:
            ids = {which: text.replace(",", " ").split() for which, text in IDS.findall(text)}
            found[name] |= {which: tokens for which, tokens in ids.items() if tokens}
    if not found:
        raise HeadwayError(f"{path}:1: format: {next(iter(NO_REQUESTS.values()))}")
    return found


def _named(blocks: HashBlocks, ids: list[str], row: int) -> Segments | None:
    """Name the blocks of a prompt by their tokens; the rest is request `row`'s own."""
    whole = range(0, len(ids) - BLOCK + 1, BLOCK)
    named = blocks.with_tail([" ".join(ids[k : k + BLOCK]) for k in whole], len(ids), row)
    return named or ((("tail", row), len(ids)),)
