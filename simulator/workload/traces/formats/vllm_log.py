"""The requests that vLLM's API server logs (`--enable-log-requests`), by release."""

import re
from pathlib import Path
from typing import Any

from simulator.util.errors import HeadwayError
from simulator.workload.traces.documents import lines
from simulator.workload.traces.fields import parse_date
from simulator.workload.traces.format import Format, Head, Problems, Table
from simulator.workload.traces.formats import NO_REQUESTS
from simulator.workload.traces.formats.logs import DATE
from simulator.workload.traces.json_lines import HashBlocks
from simulator.workload.traces.records import Records

STAMP = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) ([01]\d-[0-3]\d [0-2]\d:[0-5]\d:[0-5]\d)\b")
EVENT = re.compile(r"(?:(Received|Aborted) request|Request|Generated response) (\S+?)[:.]?(?: |$)")
IDS = re.compile(r"(prompt|output)[_ ]token[_ ]ids: \[(\d[\d, ]*)\]")
KNOB = re.compile(r"\b(n|max_tokens)=(\d+)")
POOLED = re.compile(r"params: PoolingParams\((?!.*SamplingParams\()")
LORA = re.compile(r"lora_name='([^']*)'")
BLOCK = 16  # tokens of a prompt that have a name together
YEAR = 366 * 86_400_000_000  # us, of 2000: the log's clock has no year
NOT_LOGGED = """not logged, as from 0.11 on without VLLM_LOGGING_LEVEL=DEBUG: take that log, \
spans (--otlp-traces-endpoint) or a proxy's log"""


def is_vllm(head: Head) -> bool:
    """Return whether a file begins with a line of vLLM's logger."""
    return bool(STAMP.search(head.line))


def read_vllm_log(path: Path, form: Format) -> Table:
    """Read requests: an arrival by the log's clock, a prompt by its tokens, which tell prefixes.

    An answer is as long as `--enable-log-outputs` says, else as its `max_tokens` allows: a bound,
    which the ledger tells. HeadwayError where the tokens of prompts are not logged.
    """
    problems = Problems(path)
    records, every = Records(problems, form), [*_logged(path, problems).values()]
    for row in every:
        if not row["prompt"] and "aborted" not in row:
            raise HeadwayError(f"{path}:{row['line']}: prompt_token_ids: {row['id']}: {NOT_LOGGED}")
        told = {f"{kind}_token_ids": len(row[kind]) or None for kind in ("prompt", "output")}
        if "max_tokens" in row:  # of all answers together
            told |= {"limit": row["max_tokens"], "max_tokens": row["max_tokens"] * row.get("n", 1)}
        records.add(row["line"], {key: (row | told).get(key) for key in form.used})
    table = records.table()
    blocks, kept = HashBlocks(BLOCK), [every[k] for k in table.rows.tolist()]
    table.segments = []
    for k, ids in enumerate(row["prompt"] for row in kept):
        names = [" ".join(ids[at : at + BLOCK]) for at in range(0, len(ids) - BLOCK + 1, BLOCK)]
        segments = blocks.with_tail(names, len(ids), k)
        table.segments.append(segments or ((("tail", k), len(ids)),))
    if unknown := sum(not row["output"] for row in kept):
        told_of = "max_tokens: answers that are not logged, and are taken as long as it allows"
        table.ledger.note(told_of, unknown)
    longest = int(table.prompt.max(initial=0))
    if (cut := int((table.prompt == longest).sum())) > max(len(kept) // 4, 2):
        what = f"{cut} prompts of {longest} tokens, and none is longer"
        table.ledger.note(f"prompt_token_ids: {what}: does --max-log-len cut them?")
    return table


def _logged(path: Path, problems: Problems) -> dict[str, dict[str, Any]]:
    """Return what is logged of each request, by its name: times in us, lists of tokens."""
    found: dict[str, dict[str, Any]] = {}
    passed = last = 0
    for number, line in lines(path):
        event, stamp = EVENT.search(line), STAMP.search(line)
        if event is None or stamp is None:
            continue
        kind, name = event.groups()
        if kind == "Received" and POOLED.search(line):
            problems.notes["PoolingParams: requests left out, no calls to generate text"] += 1
        elif kind == "Received":
            date = DATE.search(line[: event.start()])  # of what wraps the log
            when = parse_date(date[0].replace(",", ".") if date else f"2000-{stamp[1]}") + passed
            years = int(when < last - YEAR // 2)
            passed, last = passed + years * YEAR, when + years * YEAR
            text = line[event.end() :].rpartition("SamplingParams(")[2]  # a prompt may say anything
            lora, knobs = LORA.search(text), reversed(KNOB.findall(text))
            row = found[name] = {
                "id": name,
                "line": number,
                "time": last,
                "prompt": [],
                "output": [],
            }
            row |= {"lora_name": lora and lora[1], **{key: int(value) for key, value in knobs}}
        elif name in found and kind:
            found[name]["aborted"] = "aborted"
        if name in found:
            ids = IDS.findall(line[event.end() :].rpartition("SamplingParams(")[2])
            found[name] |= {which: text.replace(",", " ").split() for which, text in ids}
    if not found:
        raise HeadwayError(f"{path}:1: format: {next(iter(NO_REQUESTS.values()))}")
    return found
