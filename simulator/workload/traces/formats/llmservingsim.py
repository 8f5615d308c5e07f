"""LLMServingSim's JSONL: times in ns, and ids of blocks of prompt and output together."""

from pathlib import Path

import numpy as np

from simulator.core.request import Segments
from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.json_lines import HashBlocks, Labels, rows

KEYS = {"arrival_time_ns", "input_toks"}


def read(path: Path, hash_block_size: int = 16) -> Table:
    """Read LLMServingSim's JSONL: blocks cover the prompt and then the output.

    The prompt's last tokens may share a block with the first of the output; where the output is
    too short to fill it, the block has no id and these tokens are shared with nobody.
    """
    problems, blocks = Problems(path), HashBlocks(hash_block_size, open_end=True)
    labels = Labels()
    requests: list[tuple[int | float, int, int]] = []
    segments: list[Segments | None] = []
    for row in rows(path, problems):
        arrival = row.number("arrival_time_ns")
        prompt, output = row.tokens("input_toks"), row.tokens("output_toks")
        ids = row.hash_ids()
        if ids and not row.wrong:
            blocks.check(row, len(ids), prompt + output)
        labels.add(row)
        if row.wrong:
            continue
        named = min(prompt, len(ids) * hash_block_size)
        parts: Segments = blocks.segments(ids, named) if ids else ()
        if ids and named < prompt:
            parts = (*parts, (("tail", row.line), prompt - named))
        requests.append((arrival, prompt, output))
        segments.append(parts or None)
    blocks.add_summary(problems)
    labelled = labels.columns(problems)
    problems.stop()
    columns = zip(*requests, strict=True) if requests else ((), (), ())
    time, prompts, outputs = map(np.array, columns)
    return Table(
        time,
        1e9,
        prompts,
        outputs,
        segments if any(segments) else None,
        **labelled,
    )


FORMAT = Format(
    "llmservingsim",
    'JSONL: {"arrival_time_ns": .., "input_toks": .., "output_toks": ..}',
    detect=lambda head: bool(KEYS & head.keys),
    read=read,
    options=("hash_block_size",),
)
