"""A block of int32 numbers that is filled on the host and lands on the device in one copy."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]
ALIGN = 16  # int32: sections begin at 64 bytes, as the kernels' wide loads want them


def aligned(size: int) -> int:
    """The size of a section, rounded up to where the next one may begin."""
    return -(-size // ALIGN) * ALIGN


class StagingBuffer:
    """The block on the host, pinned behind CUDA, and on the device; on a CPU they are the same.

    It grows where a step needs more; with `fixed` it does not, so that sections of equal sizes
    always land at the same addresses.
    """

    def __init__(self, size: int, device: torch.device, *, fixed: bool = False) -> None:
        self.device = device
        self.fixed = fixed
        self._copied: torch.cuda.Event | None = None
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        on_cuda = self.device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=on_cuda)
        self._there = self._host.to(self.device)
        self.array: Ints = self._host.numpy()
        self._end = 0
        if on_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def stage(self, parts: Sequence[Ints]) -> tuple[list[Ints], list[Tensor]]:
        """Send arrays, all in one copy; give them as flat views, on the host and there.

        They are good until the next call. Raises ValueError where a fixed block is too small.
        """
        sizes: list[int] = []  # of each section and of what is unused behind it
        for part in parts:
            sizes += (part.size, -part.size % ALIGN)
        end = sum(sizes)
        if end > len(self.array):
            if self.fixed:
                room = len(self.array)
                raise ValueError(f"a step needs {end} numbers and the block has {room}")
            self._allocate(2 * end)
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one has left the block
        array, host, start = self.array, [], 0
        for part, size, unused in zip(parts, sizes[::2], sizes[1::2], strict=True):
            view = array[start : start + size]
            view[:] = part.reshape(-1)
            host.append(view)
            start += size + unused
        self._end = end
        self.send()
        return host, [*self._there[:end].split_with_sizes(sizes)[::2]]

    def lines(self, count: int, size: int) -> Ints:
        """View sections 1 to `count`, which are of one size, as [count, size], on the host."""
        step = aligned(size)
        return self.array[ALIGN : ALIGN + count * step].reshape(count, step)[:, :size]

    def send(self) -> None:
        """Copy the block once more, after what `stage` gave was changed in place."""
        if self._copied is not None:
            self._there[: self._end].copy_(self._host[: self._end], non_blocking=True)
            self._copied.record()
