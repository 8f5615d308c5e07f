"""Datasets of `vllm bench serve` that hold texts: its custom one, and ShareGPT; without times."""

from math import ceil
from pathlib import Path

import numpy as np

from simulator.util.errors import HeadwayError
from simulator.workload.traces.documents import items, parse, read_text
from simulator.workload.traces.fields import name_sources, used_as
from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.formats.mooncake import LLMSERVINGSIM_KEYS
from simulator.workload.traces.json_lines import rows
from simulator.workload.traces.records import Records

ESTIMATE = "estimate it by --chars-per-token 4, in a scenario trace: {chars_per_token: 4}"
SOURCES = name_sources(
    "prompt=prompt_len|input_len, output=output_tokens|output_len|expected_output_len"
)
USED = {"prompt": "prompt", **used_as(SOURCES)}


def read(path: Path, chars_per_token: float | None = None) -> Table:
    """Read vLLM's custom JSONL; everything arrives at 0.

    There is no tokenizer here: the length of a prompt is read from `prompt_len` or `input_len`,
    or, only where `chars_per_token` is given, estimated from its text.
    """
    problems = Problems(path)
    records = Records(problems, SOURCES, used=USED)
    for row in rows(path, problems):
        values, text = row.values, row.values.get("prompt")
        if SOURCES["prompt"].names[0] not in values and SOURCES["prompt"].names[1] not in values:
            if not isinstance(text, str) or not text:
                row.add_problem("prompt", "neither a text nor, as prompt_len, its length in tokens")
            elif chars_per_token is None:
                why = "counting its tokens needs a tokenizer: add their number as prompt_len"
                row.add_problem("prompt", f"{why}, or {ESTIMATE}")
            values["prompt_len"] = ceil(len(str(text)) / (chars_per_token or 1.0))
        records.add(row.line, values)
    return records.table()


SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048


def read_sharegpt(path: Path, chars_per_token: float | None = None) -> Table:
    """Read ShareGPT's JSON as `vllm bench serve` does; everything arrives at 0.

    A conversation's first two messages are prompt and answer. As there, conversations of one
    message are left out, and those with fewer than 4 tokens in either, with more than 1,024 in
    the prompt, or 2,048 together. Lengths are estimated: there is no tokenizer here.
    """
    if chars_per_token is None:
        raise HeadwayError(
            f"{path}:1: conversations: counting tokens needs a tokenizer: {ESTIMATE}"
        )
    problems = Problems(path)
    text = read_text(path)
    parse(path, text)
    found: list[tuple[int, int]] = []
    for line, entry in items(text):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            problems.add(line, "conversations", "missing, or not a list")
            continue
        words = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        texts = [word for word in words if isinstance(word, str)]
        if len(texts) < len(words):
            problems.add(line, "conversations", "a message without a value, a text")
        elif len(texts) == 2:
            prompt, output = (ceil(len(one) / chars_per_token) for one in texts)
            fits = prompt <= LONGEST_PROMPT and prompt + output <= LONGEST
            if fits and min(prompt, output) >= SHORTEST:
                found.append((prompt, output))
    problems.stop()
    lengths = np.array(found, np.int64).reshape(-1, 2)
    return Table(np.zeros(len(lengths)), 1.0, lengths[:, 0], lengths[:, 1])


SHAREGPT = Format(
    "sharegpt",
    'JSON: [{"conversations": [{"value": ..}, ..]}]',
    detect=lambda head: "conversations" in head.keys,
    read=read_sharegpt,
    options=("chars_per_token",),
    used={"conversations": "prompt"},
)
FORMAT = Format(
    "custom",
    'JSONL: {"prompt": .., "prompt_len": .., "output_tokens": ..}',
    detect=lambda head: bool(USED.keys() & head.keys) and not LLMSERVINGSIM_KEYS & head.keys,
    read=read,
    options=("chars_per_token",),
    used=USED,
)
