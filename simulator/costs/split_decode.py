"""Decode attention that waits for the longest sequence, as FlashInfer's on B200 does.

A step's (sequence, KV head) pairs are split among `THREAD_BLOCKS` thread blocks per multiprocessor,
each of which takes `per_key` seconds a key. Where there are more pairs than multiprocessors nobody
helps the block with the longest sequence, and the step waits for it; with fewer they share evenly.
That is what a server's polls show (docs/accuracy.md, step by step): no kernel table has it.
"""

from dataclasses import dataclass

import numpy as np

from simulator.core.request import Step
from simulator.costs.cost_model import Counts, Seconds
from simulator.costs.linear import check_terms
from simulator.costs.piecewise import PiecewiseCost
from simulator.util.from_mapping import raise_if

THREAD_BLOCKS = 4


@dataclass(frozen=True)
class SplitCost(PiecewiseCost):
    """A PiecewiseCost, and the wait for the longest sequence in every step that decodes.

    Where a step does not tell its longest sequence (`Step.longest`), the mean stands for it.
    """

    per_key: float = 0.0  # s, all layers together
    kv_heads: int = 1  # on each GPU
    multiprocessors: int = 1

    reads_longest = True

    def __post_init__(self) -> None:
        PiecewiseCost.__post_init__(self)
        wrong = (self.kv_heads < 1, "kv_heads: must be at least 1")
        few = (self.multiprocessors < 1, "multiprocessors: must be at least 1")
        raise_if(*check_terms(self, ("per_key",)), wrong, few)

    def _mixed_seconds(self, step: Step) -> float:
        seconds = super()._mixed_seconds(step)
        return seconds + self._waits(step, 1)[0] if step.decodes else seconds

    def _verify_seconds(self, step: Step) -> float:
        return super()._verify_seconds(step) + self._waits(step, 1)[0]

    def leap(self, step: Step, repeats: int) -> list[float]:
        """Give the seconds of each of so many successive decode steps."""
        waits = self._waits(step, repeats)
        return [a + b for a, b in zip(super().leap(step, repeats), waits, strict=True)]

    def _waits(self, step: Step, repeats: int) -> list[float]:
        """Give the wait in each of so many successive steps."""
        count = step.decodes
        key = self._key_seconds(count)
        if step.longest and count * self.kv_heads > self.multiprocessors:
            return [key * (step.longest + k) for k in range(repeats)]
        return [key * ((step.context + k * count) / count) for k in range(repeats)]

    def _key_seconds(self, count: int) -> float:
        """Give the seconds of a key where so many sequences decode."""
        shares = THREAD_BLOCKS * self.multiprocessors // (count * self.kv_heads)
        return self.per_key / max(1, shares)

    def decode_seconds(self, counts: Counts, contexts: Counts) -> Seconds:
        """Give the seconds of pure decode steps, sequences being of one length."""
        some = np.maximum(counts, 1)
        shares = THREAD_BLOCKS * self.multiprocessors // (some * self.kv_heads)
        waits = self.per_key / np.maximum(1, shares) * (contexts / some)
        return np.asarray(super().decode_seconds(counts, contexts) + waits)
