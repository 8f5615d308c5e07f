"""The requests that vLLM's API server logs (`--enable-log-requests`), by release."""

from pathlib import Path
from typing import Any

from simulator.workload.traces.documents import Item, lines
from simulator.workload.traces.fields import NAMES, PATTERNS, parse_date
from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.formats import NO_REQUESTS
from simulator.workload.traces.hash_blocks import HashBlocks
from simulator.workload.traces.records import Records

YEAR = 366 * 86_400_000_000  # us, of 2000: the log's clock has no year


def read_vllm_log(path: Path, form: Format) -> Table:
    """Read requests: an arrival by the log's clock, a prompt by its tokens, which tell prefixes.

    An answer is as long as `--enable-log-outputs` says, else as its `max_tokens` allows: a bound,
    which the ledger tells. TraceError where the tokens of prompts are not logged.
    """
    problems, blocks, size = Problems(path), HashBlocks(form.block_size), form.block_size
    records, every = Records(problems, form), _logged(path, problems)
    for number, row in every:
        if "prompt_token_ids" not in row and "aborted" not in row:
            problems.add(number, "prompt_token_ids", f"{row['id']}: {NAMES['not logged']}")
            problems.stop()
        if "max_tokens" in row:  # of all answers together
            row["n*max_tokens"] = int(row["max_tokens"]) * int(row.get("n", 1))
        records.add(number, row)
    table = records.table()
    kept, table.segments = [every[k][1] for k in table.rows.tolist()], []
    for k, ids in enumerate(row["prompt_token_ids"] for row in kept):
        names = [" ".join(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size)]
        segments = blocks.with_tail(names, len(ids), k)
        table.segments.append(segments or ((("tail", k), len(ids)),))
    if unknown := sum("output_token_ids" not in row for row in kept):
        told_of = "max_tokens: answers that are not logged, and are taken as long as it allows"
        table.ledger.note(told_of, unknown)
    answers = ((row.get("output_token_ids", ()), row.get("n*max_tokens")) for row in kept)
    ended = [len(ids) for ids, most in answers if len(ids) != most]
    for what, lengths in (("prompt", table.prompt.tolist()), ("output", ended)):
        longest = max(lengths, default=0)
        if longest and (cut := lengths.count(longest)) > 2:
            text = f"{cut} {what}s of {longest} tokens, and none is longer"
            table.ledger.note(f"{what}_token_ids: {text}: does --max-log-len cut them?")
    return table


def _logged(path: Path, problems: Problems) -> list[Item]:
    """Return what is logged of each request, with its line: the time in us, lists of tokens.

    From 0.11 on the tokens of a prompt come before its request; a streamed answer comes in pieces.
    """
    every: list[Item] = []
    named: dict[str, dict[str, Any]] = {}
    seen, twice = set[int](), set[str]()
    last = 0
    for number, line in lines(path):
        event, stamp = (PATTERNS[f"vLLM's {what}"].search(line) for what in ("event", "stamp"))
        if event is None or stamp is None:
            continue
        kind, name, ended = event.groups()
        known = hash(line[stamp.start() :])
        if known in seen and (kind == "Received" or name in twice):  # else a stream's same tokens
            twice.add(name)
            problems.notes["requests whose lines come again, left out"] += kind == "Received"
            continue
        seen.add(known)
        before = {"Received": "time", "Request": "prompt_token_ids"}.get(kind)
        if before and not ended and before in named.setdefault(name, {"id": name}):
            named[name] = {"id": name}  # an id that comes again
        text = line[event.end() :].rpartition("SamplingParams(")[2]  # a prompt may say anything
        if kind == "Received" and PATTERNS["vLLM's pooling"].search(line):
            problems.notes["PoolingParams: requests left out, no calls to generate text"] += 1
        elif kind == "Received":
            date = PATTERNS["date"].search(line[: event.start()])  # of what wraps the log
            when = parse_date(date[0].replace(",", ".") if date else f"2000-{stamp[1]}")
            last = when + YEAR * max(round((last - when) / YEAR), 0)  # after a New Year or more
            knobs = dict(reversed(PATTERNS["vLLM's knob"].findall(text)))
            named[name] |= {"time": last, **knobs}
            every.append((number, named[name]))
        for row in [named[one] for one in name.split(",") if one in named]:
            if kind == "Aborted" or ended:
                row["aborted"] = "aborted"
            if (how := PATTERNS["vLLM's end"].match(text)) and how[1]:
                row["finish_reason"] = how[1]
            for which, ids in dict(PATTERNS["vLLM's ids"].findall(text)).items():
                row.setdefault(f"{which}_token_ids", []).extend(ids.replace(",", " ").split())
    if not every:
        problems.add(1, "format", next(iter(NO_REQUESTS.values())))
    return every
