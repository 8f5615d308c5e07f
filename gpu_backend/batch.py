"""A step's metadata, on the host and on the device."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class HostBatch:
    """What the host knows of a step's n sequences, as int32 arrays."""

    starts: Ints  # [n] tokens in the cache before this step
    counts: Ints  # [n] new tokens
    lengths: Ints  # [n] tokens in the cache after it: starts + counts
    query_starts: Ints  # [n + 1] where each one's new tokens begin among the T
    ids: Ints  # [T] the new tokens
    positions: Ints  # [T]
    slots: Ints  # [T]
    tables: Ints  # [n, width]
    emits: Ints  # [m]


@dataclass(slots=True)
class Batch:
    """One step: n sequences with T new tokens, those with one new token first.

    The tensors are int32, views of one block on the device; each begins at a multiple of 16
    numbers. A batch in a CUDA graph has the sizes of the graph and nothing on the host.
    """

    decodes: int  # the first so many sequences have one new token each
    ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] where each token's KV goes: page * block_size + place in it; -1: nowhere
    lengths: Tensor  # [n] tokens in the cache after this step; 0: a row that only pads
    width: Tensor  # [1] pages of a row of `tables`, a multiple of 16
    tables: Tensor  # [n, width] pages, 0 (the null page) beyond each sequence's last
    emits: Tensor  # [m] places among the T of the tokens after which a new one is sampled
    on_host: HostBatch | None = None
    scratch: dict[str, Any] = field(default_factory=dict)  # what a backend makes once a step

    @property
    def tokens(self) -> int:
        """T, the new tokens in all."""
        return len(self.ids)

    @property
    def host(self) -> HostBatch:
        """The step on the host; a batch in a CUDA graph has none."""
        assert self.on_host is not None
        return self.on_host
