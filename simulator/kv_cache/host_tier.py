"""A host tier of the prefix cache: blocks that the GPU evicts, kept until something newer comes."""

from collections import OrderedDict
from collections.abc import Iterable


class HostTier:
    """So many blocks of host memory, by hash; the least recently used goes first.

    A block comes here when the GPU evicts it (SGLang's HiCache with `write_back`; vLLM's offloading
    connector copies it as soon as it is full, and so holds the same blocks or more). That copy runs
    beside the steps and costs them nothing. A prompt whose cached prefix goes on here has
    the blocks loaded before its step, which waits for them; the copy here stays.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.stored = 0  # blocks copied here so far
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def run(self, keys: Iterable[int]) -> int:
        """Count how many of these hashes, from the first on, are here."""
        found = 0
        for key in keys:
            if key not in self._keys:
                break
            found += 1
        return found

    def use(self, keys: Iterable[int]) -> None:
        """Take note that blocks are loaded."""
        for key in keys:
            self._keys.move_to_end(key)

    def store(self, key: int) -> None:
        """Keep a block that the GPU evicts; nothing is copied if it is here already."""
        if key in self._keys:
            self._keys.move_to_end(key)
        elif self.num_blocks:
            if len(self._keys) == self.num_blocks:
                self._keys.popitem(last=False)
            self._keys[key] = None
            self.stored += 1
