"""Blocks without names under a prefix cache: what its ways of evicting have in common."""

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter


class EvictingCounter(BlockCounter):
    """Free blocks as a number, of which some are cached: whoever takes them may have to evict."""

    def extend(self, request: Request, tokens: int) -> None:
        size = self.block_size
        self.take(-(-tokens // size) - -(-request.computed // size))
        request.computed = tokens

    def take_ticks(self, decodes: DecodeSet, ticks: int, skip: int = 0) -> None:
        if ticks > 1:
            self.take(decodes.blocks(ticks, skip))
        elif count := decodes.phases[(decodes.tick + skip) % self.block_size]:
            self.take(count)


class TreeCounter(EvictingCounter):
    """Free blocks of a prefix cache that is a radix tree: of nobody, or unlocked in the tree."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.caches_chunks = self.evicts_runs = self.prefix_caching = True
        self._pool = self.usable  # blocks of nobody
        self._blocks_in_tree = 0
        self._clock = 0

    @property
    def hashed(self) -> int:
        """Blocks in the tree."""
        return self._blocks_in_tree

    def take(self, count: int) -> None:
        """Take blocks of nobody; where there are too few, evict."""
        if self._pool < count:
            self.make_room(count)
        self.free -= count
        self._pool -= count
