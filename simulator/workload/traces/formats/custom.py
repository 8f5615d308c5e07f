"""Datasets of `vllm bench serve` that hold texts: its custom one, and ShareGPT; without times."""

from collections.abc import Iterator
from math import ceil
from pathlib import Path

from simulator.util.errors import HeadwayError
from simulator.workload.traces.format import Problems
from simulator.workload.traces.formats.tables import Found
from simulator.workload.traces.json_lines import json_objects, rows

ESTIMATE = "estimate it by --chars-per-token 4, in a scenario trace: {chars_per_token: 4}"
LENGTHS = ("prompt_len", "input_len")


def custom(path: Path, problems: Problems, chars_per_token: float | None = None) -> Iterator[Found]:
    """Yield the requests of vLLM's custom JSONL.

    There is no tokenizer here: the length of a prompt is read from `prompt_len` or `input_len`,
    or, only where `chars_per_token` is given, estimated from its text.
    """
    for row in rows(path, problems):
        values, text = row.values, row.values.get("prompt")
        if values.keys().isdisjoint(LENGTHS):
            if not isinstance(text, str) or not text:
                row.add_problem("prompt", "neither a text nor, as prompt_len, its length in tokens")
            elif chars_per_token is None:
                why = "counting its tokens needs a tokenizer: add their number as prompt_len"
                row.add_problem("prompt", f"{why}, or {ESTIMATE}")
            values["prompt_len"] = ceil(len(str(text)) / (chars_per_token or 1.0))
        yield row.line, values


SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048


def sharegpt(
    path: Path, problems: Problems, chars_per_token: float | None = None
) -> Iterator[Found]:
    """Yield the lengths of ShareGPT's conversations, pruned as `vllm bench serve` does.

    A conversation's first two messages are prompt and answer. As there, conversations of one
    message are left out, and those with fewer than 4 tokens in either, with more than 1,024 in
    the prompt, or 2,048 together. Lengths are estimated: there is no tokenizer here.
    """
    if chars_per_token is None:
        raise HeadwayError(
            f"{path}:1: conversations: counting tokens needs a tokenizer: {ESTIMATE}"
        )
    for line, entry in json_objects(path, problems, lambda _: None):
        turns = entry.get("conversations")
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
                problems.notes["conversations: later messages left out"] += len(turns) - 2
                yield line, {"conversations[0]": prompt, "conversations[1]": output}
                continue
        problems.notes["conversations left out, as vllm bench serve does"] += 1
