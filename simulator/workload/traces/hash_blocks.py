"""Ids of blocks of tokens, which tell the contents of prompts: equal ids stand for equal tokens.

A block becomes the segment (("h", id), tokens).
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import ceil

from simulator.core.request import Segments
from simulator.util.from_mapping import short_repr
from simulator.workload.traces.documents import Row
from simulator.workload.traces.format import Problems

LARGEST = 9e18  # what still fits 64 bits
COMMON_SIZES = (16, 512, *(2**k for k in range(13)))  # sizes of blocks, the best known first


@dataclass(slots=True)
class HashBlocks:
    """Turns ids of blocks of `size` tokens into segments; the same id is the same segment.

    `open_end`: a last block that is not full may have no id. `fixed`: lines that say another size
    are wrong; else the first may say it.
    """

    size: int
    _: KW_ONLY
    open_end: bool = False
    fixed: bool = False
    full: dict[int | str, tuple[tuple[str, int | str], int]] = field(default_factory=dict)
    least: int = 1  # the sizes that would fit every line so far
    most: float = LARGEST
    misfits: int = 0
    place: int = 0  # of the first misfit among the messages

    def hear(self, row: Row, size: object, key: str = "hash_block_size") -> None:
        """Take the size of the blocks from the first line, where lines say it under a key."""
        if size is None or (type(size) is int and size == self.size):
            self.fixed = True
        elif type(size) is not int or not 0 < size < LARGEST:
            row.add_problem(key, f"{short_repr(size)} is not a number of tokens")
        elif self.fixed:
            row.add_problem(key, f"{size}, where {self.size} was said before")
        else:
            self.size, self.fixed = size, True

    def check(self, row: Row, count: int, tokens: int) -> None:
        """Refuse a row whose ids do not fit its tokens; only the first such row is told."""
        size = self.size
        least = tokens // (count + 1) + 1 if self.open_end else -(-tokens // count)
        self.least = max(self.least, least)
        if count > 1:
            self.most = min(self.most, (tokens - 1) // (count - 1))
        need = ceil(tokens / size)
        if (tokens // size if self.open_end else need) <= count <= need:
            return
        row.wrong = True
        if not self.misfits:
            wrong = f"{count} blocks of {size} tokens do not fit {tokens} tokens, which take {need}"
            self.place = row.add_problem("hash_ids", wrong)
        self.misfits += 1

    def add_summary(self, problems: Problems) -> None:
        """Add to what was told of the first misfit how many there are, and what would fit."""
        if not self.misfits:
            return
        others = self.misfits - 1
        more = f", and so in {others} more line{'s' * (others > 1)}" if others else ""
        powers = [size for size in COMMON_SIZES if self.least <= size <= self.most]
        if powers or self.least == self.most:
            size = powers[0] if powers else self.least
            more += f"; {size} tokens fit every line: say hash_block_size: {size}"
            if size == 16 and not self.open_end:
                more += ", and time_unit: s if times are in seconds (format: timed_trace is both)"
        else:
            more += ": wrong hash_block_size?"
        problems.extend(self.place, more)

    def with_tail(
        self, ids: Sequence[int | str], tokens: int, number: int, scope: str = ""
    ) -> Segments | None:
        """Spell out a prompt that goes on behind its blocks, with what is request `number`'s own.

        `scope` goes before the ids; None: there are none. Of the last block only what is left.
        """
        if not ids:
            return None
        full, size = self.full, self.size
        named = min(tokens, len(ids) * size)
        count, rest = divmod(named, size)
        keys = [f"{scope}{one}" for one in ids] if scope else ids
        for key in keys[:count]:
            if key not in full:
                full[key] = (("h", key), size)
        found = tuple([full[key] for key in keys[:count]])
        found += ((("h", keys[count]), rest),) if rest else ()
        return (*found, (("tail", number), tokens - named)) if named < tokens else found
