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

from simulator.blocks import BlockCounter
from simulator.decodes import DecodeSet
from simulator.request import Request

Ints = npt.NDArray[np.int64]
QUERIES, READS, BLOCKS, TOKENS, ACCEPTED = range(5)
"""Rows of the sums: tokens verified; KV entries read, those included; blocks taken; tokens that
come out; drafts accepted, those beyond the request's end included."""


class SlotCounter(BlockCounter):
    """Blocks as a number, where a table outlives the tokens in it: slots of rejected drafts stay.

    A running request holds `lookahead` slots more than it computes, `max_model_len` at most.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, lookahead: int, max_model_len: int
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.lookahead = lookahead
        self.max_model_len = max_model_len
        self.tables: dict[Request, int] = {}  # blocks of each running request

    def table(self, tokens: int) -> int:
        """Count the blocks of a table for so many tokens and the slots ahead."""
        return -(-min(tokens + self.lookahead, self.max_model_len) // self.block_size)

    def growth(self, request: Request, tokens: int) -> int:
        """Count the blocks that it takes to let a running request's table hold `tokens` tokens."""
        return max(self.table(tokens) - self.tables[request], 0)

    def admit(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        """Give a new request blocks for `tokens` tokens; as in vLLM, none ahead yet."""
        super().admit(request, hits, tokens)
        self.tables[request] = -(-tokens // self.block_size)

    def extend(self, request: Request, tokens: int) -> None:
        more = self.growth(request, tokens)
        self.tables[request] += more
        self.free -= more
        request.computed = tokens

    def owned(self, request: Request, tokens: int) -> int:
        return self.tables[request]

    def release(self, request: Request) -> None:
        self.free += self.tables.pop(request) - -(-request.computed // self.block_size)
        super().release(request)


@dataclass(slots=True)
class Path:
    """A member's way to its end: a column of sums and the tokens said, for each tick."""

    sums: Ints
    generated: list[int]  # before each tick, and at last
    tables: list[int]  # blocks held before each tick, and at last


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
        self._sums: Ints = np.zeros((5, 256), np.int64)
        self._first = 0  # the tick of the first column

    def now(self) -> list[int]:
        """Give the sums of the next tick: queries, reads, blocks, tokens, accepted."""
        at = self.tick - self._first
        found: list[int] = self._sums[:, at].tolist() if self.count else [0] * 5
        return found

    def join(self, request: Request, ticks: int) -> None:
        """Take in a request that says `ticks` more tokens."""
        path = self.paths[request] = self._path(request, ticks)
        steps = len(path.generated) - 1
        self._columns(steps)[:] += path.sums
        request.joined = self.tick
        request.last_tick = self.tick + steps
        self.count += 1
        heappush(self._ends, (request.last_tick, request.seat, request))

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
        ends = np.minimum(reads + self.slots.lookahead, self.slots.max_model_len)
        held = self.slots.tables[request]
        tables = np.maximum(np.append(held, -(-ends // self.block_size)), held)
        sums = np.stack([drafts + 1, reads, np.diff(tables), after - at, taken])
        return Path(sums, [*positions, end], tables.tolist())

    def _columns(self, ticks: int) -> Ints:
        """Give the sums of so many ticks from the next one on."""
        at = self.tick - self._first
        if at + ticks >= self._sums.shape[1]:
            rest = self._sums[:, at:]
            self._sums = np.zeros((5, 2 * (rest.shape[1] + ticks)), np.int64)
            self._sums[:, : rest.shape[1]] = rest
            self._first, at = self.tick, 0
        return self._sums[:, at : at + ticks]
