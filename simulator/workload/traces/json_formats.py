"""Traces with one JSON object per line: Mooncake, vLLM's timed_trace and custom, LLMServingSim.

The contents of a prompt come as ids of blocks of tokens: equal ids stand for equal tokens, so a
block becomes the segment (("h", id), tokens). See `mooncake.py` for the sessions that AIPerf
adds to Mooncake's format.
"""

import json
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path

import numpy as np

from simulator.core.request import Segments
from simulator.workload.traces.lines import Problems, Table, lines

Row = dict[str, object]
LARGEST = 9e18  # what still fits 64 bits
COMMON = (16, 512, *(2**k for k in range(13)))  # sizes of blocks, the best known first
PROMPT_KEYS = ("prompt_len", "input_len")
OUTPUT_KEYS = ("output_tokens", "output_len", "expected_output_len")


def rows(path: Path, problems: Problems) -> Iterator[tuple[int, Row]]:
    """Yield the objects of a file with the numbers of their lines."""
    for number, line in lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.add(number, "line", f"bad JSON: {error}")
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            problems.add(number, "line", "not a JSON object")


def number_of(row: Row, key: str) -> int | float:
    """Give a number that is finite and 0 or more, or raise ValueError with what is wrong."""
    value = row.get(key)
    if type(value) is not int and type(value) is not float:
        raise ValueError("missing" if key not in row else f"{_short(value)} is not a number")
    if not 0 <= value < LARGEST:
        raise ValueError(f"{_short(value)} is {'negative' if value < 0 else 'not finite'}")
    return value


def tokens_of(row: Row, key: str) -> int:
    """Give a whole number of 1 or more, or raise ValueError with what is wrong."""
    value = number_of(row, key)
    if value != int(value):
        raise ValueError(f"{value} is not a whole number")
    if value < 1:
        raise ValueError("zero")
    return int(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


class Blocks:
    """Turns ids of blocks of `size` tokens into segments; the same id is the same segment.

    `open_end`: a last block that is not full may have no id.
    """

    def __init__(self, size: int, *, open_end: bool = False) -> None:
        self.size = size
        self.open_end = open_end
        self.full: dict[int | str, tuple[tuple[str, int | str], int]] = {}
        self.least, self.most = 1, LARGEST  # the sizes that would fit every line so far
        self.misfits = 0
        self.place = 0  # of the first misfit among the messages

    def fit(self, problems: Problems, number: int, count: int, tokens: int) -> bool:
        """See whether so many ids fit so many tokens; of all that do not, the first is told."""
        size = self.size
        self.least = max(
            self.least, tokens // (count + 1) + 1 if self.open_end else -(-tokens // count)
        )
        if count > 1:
            self.most = min(self.most, (tokens - 1) // (count - 1))
        need = ceil(tokens / size)
        if (tokens // size if self.open_end else need) <= count <= need:
            return True
        if not self.misfits:
            wrong = f"{count} blocks of {size} tokens do not fit {tokens} tokens, which take {need}"
            self.place = problems.add(number, "hash_ids", wrong)
        self.misfits += 1
        return False

    def conclude(self, problems: Problems) -> None:
        """Add to what was told of the first misfit how many there are, and what would fit."""
        if not self.misfits:
            return
        others = self.misfits - 1
        more = f", and so in {others} more line{'s' * (others > 1)}" if others else ""
        powers = [size for size in COMMON if self.least <= size <= self.most]
        if powers or self.least == self.most:
            size = powers[0] if powers else self.least
            more += f"; {size} tokens fit every line: say hash_block_size: {size}"
            if size == 16 and not self.open_end:
                more += ", or format: timed_trace if its times are in seconds"
        else:
            more += ": wrong hash_block_size?"
        problems.extend(self.place, more)

    def ids(self, row: Row) -> list[int | str]:
        """Give the `hash_ids` of a row, [] for none, or raise ValueError."""
        ids = row.get("hash_ids")
        if ids is None:
            return []
        if not isinstance(ids, list) or not all(type(i) is int or type(i) is str for i in ids):
            raise ValueError("not a list of ids")
        return ids

    def segments(self, ids: Sequence[int | str], tokens: int) -> Segments:
        """Spell out `tokens` tokens; of the last block only those that are left.

        Tokens beyond the last block have no name, so there must not be any.
        """
        full, size = self.full, self.size
        count = tokens // size
        for i in ids[:count]:
            if i not in full:
                full[i] = (("h", i), size)
        spelled = tuple([full[i] for i in ids[:count]])
        rest = tokens - count * size
        return (*spelled, (("h", ids[count]), rest)) if rest else spelled


def read_llmservingsim(path: Path, block: int) -> Table:
    """Read LLMServingSim's JSONL: ns, and blocks that cover the prompt and then the output.

    The prompt's last tokens may share a block with the first of the output; where the output is
    too short to fill it, the block has no id and these tokens are shared with nobody.
    """
    problems, blocks = Problems(path), Blocks(block, open_end=True)
    columns = ("arrival_time_ns", "input_toks", "output_toks")
    values: list[list[int | float]] = [[], [], []]
    segments: list[Segments | None] = []
    for number, row in rows(path, problems):
        found = _numbers(problems, number, row, columns)
        try:
            ids = blocks.ids(row)
        except ValueError as error:
            problems.add(number, "hash_ids", str(error))
            continue
        if found is None:
            continue
        _, prompt, output = found
        total = int(prompt + output)
        if ids and not blocks.fit(problems, number, len(ids), total):
            continue
        named = min(int(prompt), len(ids) * block)
        parts: Segments = blocks.segments(ids, named) if ids else ()
        if ids and named < prompt:
            parts = (*parts, (("tail", number), int(prompt) - named))
        segments.append(parts or None)
        for column, value in zip(values, found, strict=True):
            column.append(value)
    blocks.conclude(problems)
    problems.stop()
    time, prompts, outputs = (np.array(column) for column in values)
    has_ids = any(parts is not None for parts in segments)
    return Table(time, 1e9, prompts, outputs, segments if has_ids else None)


def _numbers(
    problems: Problems, number: int, row: Row, columns: Sequence[str]
) -> list[int | float] | None:
    """Give a time and token counts, or None and a problem for each that is wrong."""
    found: list[int | float] = []
    for i, column in enumerate(columns):
        try:
            found.append(tokens_of(row, column) if i else number_of(row, column))
        except ValueError as error:
            problems.add(number, column, str(error))
    return found if len(found) == len(columns) else None


def read_custom(path: Path, chars_per_token: float | None) -> Table:
    """Read vLLM's custom JSONL, `prompt` and `output_tokens`; everything arrives at 0.

    There is no tokenizer here: the length of a prompt is read from `prompt_len` or `input_len`,
    or, only where `chars_per_token` is given, estimated from its text.
    """
    problems = Problems(path)
    prompts: list[int] = []
    outputs: list[int] = []
    for number, row in rows(path, problems):
        key = next((key for key in PROMPT_KEYS if key in row), "prompt")
        text = row.get("prompt")
        try:
            if key != "prompt":
                prompts.append(tokens_of(row, key))
            elif not isinstance(text, str) or not text:
                raise ValueError("neither a text nor, as prompt_len, its length in tokens")
            elif chars_per_token is None:
                raise ValueError(
                    "counting its tokens needs a tokenizer: add their number as prompt_len, or "
                    "let chars_per_token estimate it"
                )
            else:
                prompts.append(ceil(len(text) / chars_per_token))
        except ValueError as error:
            problems.add(number, key, str(error))
        key = next((key for key in OUTPUT_KEYS if key in row), OUTPUT_KEYS[0])
        try:
            outputs.append(tokens_of(row, key))
        except ValueError as error:
            problems.add(number, key, str(error))
    problems.stop()
    return Table(np.zeros(len(prompts)), 1.0, np.array(prompts), np.array(outputs))
