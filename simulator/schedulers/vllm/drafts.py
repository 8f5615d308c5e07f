"""The decode set and the blocks of speculative decoding: several tokens a step, known in advance.

What a request accepts is a stream of its own, so its way from here to its end is known as soon as
it decodes: how much it verifies, reads, takes and says at each of the next ticks. The set keeps
these as sums over its members, tick by tick: adding a member is adding a few short arrays, and a
step then costs the same whoever decodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappush

import numpy as np
import numpy.typing as npt

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request
from simulator.kv_cache.slot_counter import SlotCounter

Ints = npt.NDArray[np.int64]
ROWS = 7
"""Of the sums: tokens verified; KV entries read, those included; blocks taken less those that
left a window; blocks taken; tokens that come out; drafts accepted, those beyond their request's end
included; tokens stored after the step, in all groups of layers."""


@dataclass(slots=True)
class Path:
    """A member's way to its end: a column of sums and the tokens said, for each tick."""

    sums: Ints
    generated: list[int]  # before each tick, and at last
    tables: list[tuple[int, int]]  # before each tick, and at last


class DraftedSet(DecodeSet):
    """Requests that verify `drafts` draft tokens each, and what that takes tick by tick.

    `accepted(request)` gives how many are accepted at each position of its answer.
    """

    def __init__(
        self, blocks: SlotCounter, drafts: int, accepted: Callable[[Request], Sequence[int]]
    ) -> None:
        super().__init__(blocks.block_size)
        self.slots = blocks
        self.drafts = drafts
        self.accepted = accepted
        self.paths: dict[Request, Path] = {}
        self._sums: Ints = np.zeros((ROWS, 256), np.int64)
        self._first = 0  # the tick of the first column

    def now(self) -> list[int]:
        """Give the sums of the next tick, row by row."""
        at = self.tick - self._first
        found: list[int] = self._sums[:, at].tolist() if self.count else [0] * (ROWS)
        return found

    def join(self, request: Request, ticks: int) -> None:
        """Take in a request that says `ticks` more tokens."""
        path = self.paths[request] = self._path(request, ticks)
        steps = len(path.generated) - 1
        self._columns(steps)[:] += path.sums
        self.joins += 1
        request.joined = self.tick
        request.last_tick = self.tick + steps
        self.count += 1
        heappush(self._ends, (request.last_tick, request.admission, request))

    def leave(self, request: Request) -> int:
        """Let a member go, bring its own counters up to date, return its ticks in the set."""
        path = self.paths.pop(request)
        ticks = self.tick - request.joined
        left = len(path.generated) - 1 - ticks
        self._columns(left)[:] -= path.sums[:, ticks:]
        request.generated = path.generated[ticks]
        request.computed = request.prompt_tokens + request.generated - 1
        self.slots.tables[request] = path.tables[ticks]
        request.joined = -1
        self.count -= 1
        return ticks

    def _path(self, request: Request, left: int) -> Path:
        """Follow a request to its end."""
        said, end = request.generated, request.generated + left
        accepted = self.accepted(request)
        positions = []
        while said < end:
            positions.append(said)
            said += 1 + accepted[said]
        at = np.array(positions, np.int64)
        after = np.minimum(np.append(at[1:], end), end)[: len(at)]
        room = self.slots.max_model_len - request.prompt_tokens - 1 - at  # as vLLM: no draft beyond
        drafts = np.minimum(self.drafts, room)
        taken = np.minimum(np.array(accepted, np.int64)[at], drafts)
        reads = request.prompt_tokens + at + drafts
        before = request.prompt_tokens + at - 1
        tables, gone = self._tables(self.slots.tables[request], reads, before)
        groups = self.slots.groups
        held = groups.full * tables + groups.windowed * (tables - gone)
        kept = before + after - at
        stored = groups.full * kept + groups.windowed * np.minimum(kept, groups.window)
        grown = (groups.full + groups.windowed) * np.diff(tables)
        sums = np.stack([drafts + 1, reads, np.diff(held), grown, after - at, taken, stored])
        return Path(sums, [*positions, end], list(zip(tables.tolist(), gone.tolist(), strict=True)))

    def _tables(self, held: tuple[int, int], reads: Ints, before: Ints) -> tuple[Ints, Ints]:
        """Give a table's entries and those out of the window, now and after each tick."""
        slots, size = self.slots, self.block_size
        ends = np.minimum(reads + slots.lookahead, slots.max_model_len)
        tables = np.maximum(np.append(held[0], -(-ends // size)), held[0])
        gone = np.maximum(before + 1 - slots.groups.window, 0) // size
        gone = np.append(held[1], gone if slots.groups.windowed else np.zeros_like(gone))
        return tables, gone

    def _columns(self, ticks: int) -> Ints:
        """Give the sums of so many ticks from the next one on."""
        at = self.tick - self._first
        if at + ticks >= self._sums.shape[1]:
            rest = self._sums[:, at:]
            self._sums = np.zeros((ROWS, 2 * (rest.shape[1] + ticks)), np.int64)
            self._sums[:, : rest.shape[1]] = rest
            self._first, at = self.tick, 0
        return self._sums[:, at : at + ticks]
