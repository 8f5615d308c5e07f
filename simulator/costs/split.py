"""A piecewise cost that waits for a step's longest sequence besides.

Decode attention has `THREAD_BLOCKS` thread blocks for each multiprocessor, each of which takes
`per_key` seconds a key. Where a step has enough (sequence, KV head) pairs for them, none is split:
nobody helps the block with the longest sequence, and the step waits for it.

FlashInfer's own on B200 (num_blocks_per_sm in its scheduler.cuh) splits up to one pair a block, and
the blocks share all keys evenly. That is what a server's polls show (InferenceX, 64
clients): no kernel table has it. FlashAttention-2 on RTX GPUs (num_splits_heuristic in its
flash_api.cpp) splits pairs that are fewer than `FULL` of the blocks. It was timed: tables of
sequences of one length have the mean's keys, so that the wait is for keys `beyond_mean`, with
fewer pairs for none.
"""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Self

import numpy as np

from simulator.core.executor import Leap
from simulator.core.request import Step
from simulator.costs.cost_model import Counts, Seconds
from simulator.costs.linear import Fitted, Term, check_terms
from simulator.costs.piecewise import PiecewiseCost
from simulator.util.from_mapping import raise_if

THREAD_BLOCKS = 2  # per multiprocessor
FULL = 0.8  # pairs per thread block, from which on FlashAttention-2 splits none
SPLIT_TERMS = "per_key", "kv_heads", "multiprocessors", "beyond_mean"


@dataclass(frozen=True)
class SplitCost(PiecewiseCost):
    """A PiecewiseCost, and the wait for the longest sequence in every step that decodes.

    Where a step does not tell its longest sequence (`Step.longest`), the mean stands for it.
    """

    per_key: Term = 0.0  # s, all layers together
    kv_heads: Annotated[int, "KV heads on each GPU"] = 1
    multiprocessors: Annotated[int, "multiprocessors of the GPU"] = 1
    beyond_mean: bool = False  # of keys that the longest sequence has more than the mean

    reads_longest = True
    whole_terms = (*PiecewiseCost.whole_terms, "kv_heads", "multiprocessors")

    @classmethod
    def of(cls, cost: Fitted, **terms: Any) -> Self:
        """Put the wait on top of a piecewise cost."""
        values = {field.name: getattr(cost, field.name) for field in fields(cost) if field.init}
        return cls(**values | terms)

    def __post_init__(self) -> None:
        PiecewiseCost.__post_init__(self)
        wrong = (self.kv_heads < 1, "kv_heads", "must be at least 1")
        few = (self.multiprocessors < 1, "multiprocessors", "must be at least 1")
        raise_if(*check_terms(self, ("per_key",)), wrong, few)

    def _adjust_mixed(self, step: Step, seconds: float, new: int) -> tuple[float, float]:
        seconds, host = super()._adjust_mixed(step, seconds, new)
        return (seconds + self._waits(step, 1)[0] if step.decodes else seconds), host

    def _verify_seconds(self, step: Step) -> tuple[float, float]:
        seconds, host = super()._verify_seconds(step)
        return seconds + self._waits(step, 1)[0], host

    def leap(self, step: Step, repeats: int) -> Leap:
        leap, waits = super().leap(step, repeats), self._waits(step, repeats)
        return Leap([a + b for a, b in zip(leap.seconds, waits, strict=True)], leap.host)

    def _waits(self, step: Step, repeats: int) -> list[float]:
        """Return the wait in each of so many successive steps."""
        count, blocks = step.decodes, THREAD_BLOCKS * self.multiprocessors
        if self.beyond_mean:
            if not step.longest or count * self.kv_heads < FULL * blocks:
                return [0.0] * repeats
            more = step.longest * count - step.context  # keys; all sequences grow by one a step
            return [self.per_key * (more / count)] * repeats
        if count * self.kv_heads <= blocks:
            each = self.per_key * self.kv_heads / blocks
            return [each * (step.context + k * count) for k in range(repeats)]
        if step.longest:
            return [self.per_key * (step.longest + k) for k in range(repeats)]
        return [self.per_key * ((step.context + k * count) / count) for k in range(repeats)]

    def decode_seconds(self, counts: Counts, contexts: Counts) -> Seconds:
        """Return the seconds of pure decode steps, sequences being of one length."""
        some = np.maximum(counts, 1)
        blocks = THREAD_BLOCKS * self.multiprocessors
        split = some * self.kv_heads <= blocks
        waits = (
            (0.0 if self.beyond_mean else self.per_key)
            * contexts
            * np.where(split, self.kv_heads / blocks, 1 / some)
        )
        return np.asarray(super().decode_seconds(counts, contexts) + waits)
