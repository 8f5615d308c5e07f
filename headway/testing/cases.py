"""Small engines and workloads on which a policy is tried out: drawn, and made smaller."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from simulator.workload.workload import Workload

MAX_MODEL_LEN = 64  # of the cases, tokens
LONGEST_ANSWER = 28  # tokens


@dataclass(frozen=True, slots=True)
class Case:
    """An engine and what is asked of it: rows of arrival, prompt, output, client, priority."""

    requests: tuple[tuple[float, int, int, str, int], ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool
    async_scheduling: bool

    def __str__(self) -> str:
        rows = "".join(f"\n  {row}" for row in self.requests)
        return (
            f"max_num_seqs {self.max_num_seqs}, max_num_batched_tokens "
            f"{self.max_num_batched_tokens}, {self.num_gpu_blocks} blocks of {self.block_size}, "
            f"max_model_len {MAX_MODEL_LEN}, prefix caching "
            f"{'on' if self.enable_prefix_caching else 'off'}, async_scheduling "
            f"{'on' if self.async_scheduling else 'off'}; requests (arrival in s, prompt tokens, "
            f"output tokens, client, priority):{rows}"
        )

    @property
    def engine(self) -> dict[str, Any]:
        """The keys of a scenario's engine."""
        others = {"requests", "num_gpu_blocks"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in others}

    def make_workload(self) -> Workload:
        """Make the requests; prompts of a client begin alike."""
        columns = list(zip(*self.requests, strict=True))
        return Workload(
            np.array(columns[0], float),
            np.array(columns[1], np.int64),
            np.array(columns[2], np.int64),
            client=list(columns[3]),
            priority=np.array(columns[4], np.int64),
            segments=[
                ((client, tokens // 2), (number, tokens - tokens // 2)) if tokens > 1 else None
                for number, (_, tokens, _, client, _) in enumerate(self.requests)
            ],
        )

    def twin(self) -> "Case":
        """Return the same case with answers of other lengths."""
        return replace(
            self,
            requests=tuple(
                (*row[:2], LONGEST_ANSWER + 1 - row[2], *row[3:]) for row in self.requests
            ),
        )

    def smaller(self) -> Iterator["Case"]:
        """Yield cases a little simpler than this one."""
        rows = self.requests
        if len(rows) > 1:
            for place in range(len(rows)):
                yield replace(self, requests=rows[:place] + rows[place + 1 :])
        if self.async_scheduling:
            yield replace(self, async_scheduling=False)
        if self.enable_prefix_caching:
            yield replace(self, enable_prefix_caching=False)
        simple = (0.0, 1, 1, "a", 0)
        for place, row in enumerate(rows):
            for column, value in enumerate(row):
                for less in _smaller_values(value, simple[column]):
                    changed = (*row[:column], less, *row[column + 1 :])
                    if place == 0 or changed[0] >= rows[place - 1][0]:  # arrivals ascend
                        yield replace(self, requests=(*rows[:place], changed, *rows[place + 1 :]))


def _smaller_values(value: Any, simple: Any) -> Iterator[Any]:
    if value != simple:
        yield simple
        if isinstance(value, int) and value > 3:
            yield value // 2


def draw_case(rng: np.random.Generator, size: int, async_scheduling: bool) -> Case:
    """Draw a case with `size` requests."""
    pick = rng.choice
    max_num_seqs = int(rng.integers(1, 5))
    block_size = int(pick([1, 2, 4, 16]))
    at_once = rng.random() < 0.4
    arrivals = np.zeros(size) if at_once else np.sort(pick([0, 0, 0.25, 1, 2.5, 4, 9], size))
    prompts, outputs = rng.integers(1, 36, size), rng.integers(1, 25, size)
    if rng.random() < 0.5:
        outputs += 4  # nobody ends at once
    clients, priorities = pick(["a", "b", "c"], size), rng.integers(0, 3, size)
    return Case(
        tuple(
            (float(t), int(p), int(o), str(c), int(u))
            for t, p, o, c, u in zip(arrivals, prompts, outputs, clients, priorities, strict=True)
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=int(rng.integers(max(max_num_seqs, 3), 48)),
        block_size=block_size,
        num_gpu_blocks=1 + int(MAX_MODEL_LEN * pick([1, 1.25, 2, 5])) // block_size,
        enable_prefix_caching=bool(rng.random() < 0.5),
        async_scheduling=async_scheduling,
    )
