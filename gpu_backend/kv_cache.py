"""The KV cache, one tensor of blocks, and the way of blocks to host memory and back."""

import torch
from torch import Tensor

from simulator.models.spec import ModelSpec

BLOCKS_PER_COPY = 64  # blocks that one copy between device and host takes


class KVCache:
    """Keys and values of all layers: `kv` is [2, layers, num_blocks, block_size, n_kv, D].

    Block 0 is the null block: nobody owns it, and padding may point there.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        heads, width = spec.num_key_value_heads, spec.head_dim
        shape = (2, spec.num_hidden_layers, num_blocks, block_size, heads, width)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)
        self._flat = self.kv.flatten(2, 3)  # token slots instead of blocks
        self.keys = list(self._flat[0])  # per layer [num_blocks * block_size, n_kv, D]
        self.values = list(self._flat[1])
        self.reuses_buffers = self.kv.is_cuda  # keeps host memory for later copies
        self._free_buffers: list[Tensor] = []  # flat, STAGED blocks each
        self._size = self.kv[:, :, 0].numel() * BLOCKS_PER_COPY

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers together."""
        return self.kv[:, :, 0].numel() * self.kv.element_size()

    def gather(self, layer: int, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Copy the first `length` tokens of a page list together: k and v, [length, n_kv, D]."""
        keys, values = self.kv[0, layer], self.kv[1, layer]  # each of them is contiguous: else
        key = keys.index_select(0, pages).flatten(0, 1)  # index_select would copy the whole layer
        return key[:length], values.index_select(0, pages).flatten(0, 1)[:length]

    def fill_random(self, generator: torch.Generator) -> None:
        """Fill every page with noise, so that steps over any context can be timed at once."""
        self.kv.normal_(generator=generator)

    def reserve(self, blocks: int) -> None:
        """Pin host memory for so many blocks beforehand: to pin it takes longer than to copy."""
        buffers = -(-blocks // BLOCKS_PER_COPY) if self.kv.is_cuda else 0
        self._free_buffers += [self._buffer() for _ in range(buffers - len(self._free_buffers))]

    def _buffer(self) -> Tensor:
        """Allocate host memory for one copy, pinned behind CUDA."""
        return torch.empty(self._size, dtype=self.kv.dtype, pin_memory=self.kv.is_cuda)

    def copy_out(self, blocks: list[int]) -> list[Tensor]:
        """Copy blocks to the host, in pieces [2, layers, <= STAGED, ...]."""
        pieces = []
        for at in range(0, len(blocks), BLOCKS_PER_COPY):
            index = torch.tensor(blocks[at : at + BLOCKS_PER_COPY], device=self.kv.device)
            staged = self.kv.index_select(2, index)
            if self.reuses_buffers:
                buffer = self._free_buffers.pop() if self._free_buffers else self._buffer()
                piece = buffer[: staged.numel()].view(staged.shape)
            else:
                piece = torch.empty(staged.shape, dtype=staged.dtype)
            pieces.append(piece.copy_(staged, non_blocking=self.kv.is_cuda))
        return pieces

    def copy_in(self, pieces: list[Tensor], blocks: list[int], first: int) -> None:
        """Copy what `copy_out` saved back into `blocks`, from its block number `first` on.

        The pieces' memory is used again by later copies, which the device carries out in turn.
        """
        at, end = first, first + len(blocks)
        while at < end:
            piece, skip = divmod(at, BLOCKS_PER_COPY)
            count = min(BLOCKS_PER_COPY - skip, end - at)
            index = torch.tensor(blocks[at - first : at - first + count], device=self.kv.device)
            staged = pieces[piece].to(self.kv.device, non_blocking=self.kv.is_cuda)
            self.kv.index_copy_(2, index, staged[:, :, skip : skip + count])
            at += count
        self.release(pieces)

    def release(self, pieces: list[Tensor]) -> None:
        """Let the memory of saved pieces be used again."""
        if self.reuses_buffers:
            flat = (piece.view(-1) for piece in pieces)
            self._free_buffers += [piece.as_strided((self._size,), (1,)) for piece in flat]
