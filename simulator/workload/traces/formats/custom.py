"""vLLM's custom dataset: `prompt` and `output_tokens`, without times."""

from math import ceil
from pathlib import Path

import numpy as np

from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.formats.llmservingsim import KEYS as LLMSERVINGSIM_KEYS
from simulator.workload.traces.json_lines import Labels, Row, rows

PROMPT_KEYS = ("prompt_len", "input_len")
OUTPUT_KEYS = ("output_tokens", "output_len", "expected_output_len")
KEYS = {"prompt", *PROMPT_KEYS, *OUTPUT_KEYS}


def read(path: Path, chars_per_token: float | None = None) -> Table:
    """Read vLLM's custom JSONL; everything arrives at 0.

    There is no tokenizer here: the length of a prompt is read from `prompt_len` or `input_len`,
    or, only where `chars_per_token` is given, estimated from its text.
    """
    problems = Problems(path)
    prompts: list[int] = []
    outputs: list[int] = []
    labels = Labels()
    for row in rows(path, problems):
        prompts.append(_prompt_tokens(row, chars_per_token))
        key = next((key for key in OUTPUT_KEYS if key in row.values), OUTPUT_KEYS[0])
        outputs.append(row.tokens(key))
        labels.add(row)
    labelled = labels.columns(problems)
    problems.stop()
    return Table(
        np.zeros(len(prompts)),
        1.0,
        np.array(prompts),
        np.array(outputs),
        **labelled,
    )


def _prompt_tokens(row: Row, chars_per_token: float | None) -> int:
    """Give or estimate the length of a prompt; 0 where it is wrong."""
    for key in PROMPT_KEYS:
        if key in row.values:
            return row.tokens(key)
    text = row.values.get("prompt")
    if not isinstance(text, str) or not text:
        row.add_problem("prompt", "neither a text nor, as prompt_len, its length in tokens")
    elif chars_per_token is None:
        row.add_problem(
            "prompt",
            "counting its tokens needs a tokenizer: add their number as prompt_len, or let "
            "chars_per_token estimate it",
        )
    else:
        return ceil(len(text) / chars_per_token)
    return 0


FORMAT = Format(
    "custom",
    'JSONL: {"prompt": .., "prompt_len": .., "output_tokens": ..}',
    detect=lambda head: bool(KEYS & head.keys) and not LLMSERVINGSIM_KEYS & head.keys,
    read=read,
    options=("chars_per_token",),
)
