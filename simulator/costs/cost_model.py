"""What a cost model is, and what to build one around another with.

A cost model is an executor that computes seconds instead of spending them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from simulator.core.executor import CanLeap
from simulator.core.request import Step

Counts = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


class CostModel(CanLeap, Protocol):
    """An executor that computes what a step takes, and knows how far it can be trusted."""

    @property
    def name(self) -> str:
        """What reports call it."""

    def decode_seconds(self, counts: Counts, contexts: Counts) -> Seconds:
        """Give the seconds of steps of so many decodes each that read so many tokens in all."""

    def swap_seconds(self, step: Step) -> float:
        """Give the seconds of a step's copies of KV blocks to the host and back."""

    @property
    def residuals(self) -> Mapping[str, float] | None:
        """Standard deviations of its relative errors by regime of steps, see `noise`."""

    def with_copies(self, seconds: float, step: Step) -> float:
        """Give the time of a step whose compute takes so many seconds, with its copies."""

    def logged_swap_seconds(self, swaps: npt.NDArray[np.void]) -> Seconds:
        """Give the seconds of logged copies of KV blocks (rows of dtype SWAP)."""

    def outside(self, steps: npt.NDArray[np.void]) -> list[str]:
        """Say, a line per quantity, which logged steps lie outside the fitted range."""


@dataclass(frozen=True)
class CostDecorator:
    """A cost model around another, `inner`, which answers whatever a subclass does not.

    Subclasses have `execute` and `leap`; what they change of decodes, `decode_seconds` must tell.
    """

    inner: CostModel

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.inner.name

    @property
    def residuals(self) -> Mapping[str, float] | None:
        """Standard deviations of its relative errors."""
        return self.inner.residuals

    def decode_seconds(self, counts: Counts, contexts: Counts) -> Seconds:
        """Give the seconds of steps of so many decodes each that read so many tokens in all."""
        return self.inner.decode_seconds(counts, contexts)

    def swap_seconds(self, step: Step) -> float:
        """Give the seconds of a step's copies of KV blocks."""
        return self.inner.swap_seconds(step)

    def with_copies(self, seconds: float, step: Step) -> float:
        """Give the time of a step whose compute takes so many seconds, with its copies."""
        return self.inner.with_copies(seconds, step)

    def logged_swap_seconds(self, swaps: npt.NDArray[np.void]) -> Seconds:
        """Give the seconds of logged copies of KV blocks (rows of dtype SWAP)."""
        return self.inner.logged_swap_seconds(swaps)

    def outside(self, steps: npt.NDArray[np.void]) -> list[str]:
        """Say, a line per quantity, which logged steps lie outside the fitted range."""
        return self.inner.outside(steps)
