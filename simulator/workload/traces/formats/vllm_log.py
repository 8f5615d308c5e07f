"""The requests that vLLM's API server logs (`--enable-log-requests`), by release."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulator.util.errors import HeadwayError
from simulator.workload.traces.documents import lines
from simulator.workload.traces.fields import PATTERNS, parse_date
from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.formats import NO_REQUESTS
from simulator.workload.traces.json_lines import HashBlocks
from simulator.workload.traces.records import Records

BLOCK = 16  # tokens of a prompt that have a name together
YEAR = 366 * 86_400_000_000  # us, of 2000: the log's clock has no year
NOT_LOGGED = """not logged, as from 0.11 on without VLLM_LOGGING_LEVEL=DEBUG: take that log, \
spans (--otlp-traces-endpoint) or a proxy's log"""


@dataclass(slots=True)
class _Logged:
    line: int
    values: dict[str, Any]  # by vLLM's names; the time in us
    prompt: list[str] = field(default_factory=list)  # tokens
    output: list[str] = field(default_factory=list)


def read_vllm_log(path: Path, form: Format) -> Table:
    """Read requests: an arrival by the log's clock, a prompt by its tokens, which tell prefixes.

    An answer is as long as `--enable-log-outputs` says, else as its `max_tokens` allows: a bound,
    which the ledger tells. HeadwayError where the tokens of prompts are not logged.
    """
    problems = Problems(path)
    records, every = Records(problems, form), _logged(path, problems)
    for one in every:
        told = {f"{kind}_token_ids": len(getattr(one, kind)) or None for kind in IDS}
        if "limit" in one.values:  # of all answers together
            told["max_tokens"] = int(one.values["limit"]) * int(one.values.get("n", 1))
        records.add(one.line, one.values | told)
    table = records.table()
    blocks, kept = HashBlocks(BLOCK), [every[k] for k in table.rows.tolist()]
    table.segments = []
    for k, ids in enumerate(one.prompt for one in kept):
        names = [" ".join(ids[at : at + BLOCK]) for at in range(0, len(ids) - BLOCK + 1, BLOCK)]
        segments = blocks.with_tail(names, len(ids), k)
        table.segments.append(segments or ((("tail", k), len(ids)),))
    if unknown := sum(not one.output for one in kept):
        told_of = "max_tokens: answers that are not logged, and are taken as long as it allows"
        table.ledger.note(told_of, unknown)
    longest = int(table.prompt.max(initial=0))
    if (cut := int((table.prompt == longest).sum())) > max(len(kept) // 4, 2):
        what = f"{cut} prompts of {longest} tokens, and none is longer"
        table.ledger.note(f"prompt_token_ids: {what}: does --max-log-len cut them?")
    return table


IDS = ("prompt", "output")


def _logged(path: Path, problems: Problems) -> list[_Logged]:
    """Return what is logged of each request."""
    every: list[_Logged] = []
    named: dict[str, _Logged] = {}
    passed = last = 0
    for number, line in lines(path):
        event = PATTERNS["vLLM's event"].search(line)
        stamp = PATTERNS["vLLM's stamp"].search(line)
        if event is None or stamp is None:
            continue
        kind, name, ended = event.groups()
        text = line[event.end() :].rpartition("SamplingParams(")[2]  # a prompt may say anything
        if kind == "Received" and PATTERNS["vLLM's pooling"].search(line):
            problems.notes["PoolingParams: requests left out, no calls to generate text"] += 1
        elif kind == "Received":
            date = PATTERNS["date"].search(line[: event.start()])  # of what wraps the log
            when = parse_date(date[0].replace(",", ".") if date else f"2000-{stamp[1]}") + passed
            years = int(when < last - YEAR // 2)
            passed, last = passed + years * YEAR, when + years * YEAR
            knobs = dict(reversed(PATTERNS["vLLM's knob"].findall(text)))
            limit = {"limit": knobs.pop("max_tokens")} if "max_tokens" in knobs else {}
            named[name] = _Logged(number, {"time": last, **knobs, **limit})
            every.append(named[name])
        for one in [named[n] for n in name.split(",") if n in named]:
            if kind == "Aborted" or ended:
                one.values["aborted"] = "aborted"
            for which, ids in PATTERNS["vLLM's ids"].findall(text):
                setattr(one, which, ids.replace(",", " ").split())
    if not every:
        raise HeadwayError(f"{path}:1: format: {next(iter(NO_REQUESTS.values()))}")
    for name, one in named.items():
        if not one.prompt and "aborted" not in one.values:
            raise HeadwayError(f"{path}:{one.line}: prompt_token_ids: {name}: {NOT_LOGGED}")
    return every
