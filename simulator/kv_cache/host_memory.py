"""Host memory for KV blocks that victims swap to."""

from collections.abc import Callable
from typing import NamedTuple

from simulator.core.request import Request, Step, Swap


class Prices(NamedTuple):
    """What a preempted request costs either way, in seconds; for preemption mode `auto`."""

    recompute: Callable[[int], float]  # of so many tokens
    swap_out: Callable[[int], float]  # of so many blocks
    swap_in: Callable[[int], float]


class SwapSpace:
    """Room for so many KV blocks. Whether blocks have names or not, their numbers decide.

    With `prices` a victim goes to the host only if that is expected to cost less than computing
    it again. If it resumes early, its blocks may still lie in the prefix cache: these are neither
    computed nor copied back. How likely that is, is learnt from those who came back so far: the
    share of their tokens that was found, at first 0. A victim of n tokens is swapped if
    out(n) + (1 - share) in(n) < (1 - share) recompute(n).
    """

    def __init__(self, num_blocks: int, block_size: int, prices: Prices | None = None) -> None:
        self.free = num_blocks
        self.prices = prices
        self._block_size = block_size
        self._returned = 0  # tokens of those who came back
        self._found = 0  # of these, in the prefix cache
        self.outgoing: list[Swap] = []  # of the step being decided

    def swap_out(self, request: Request, tokens: int) -> None:
        """Have the blocks with a request's first `tokens` copied to the host.

        Unless they do not fit there, or it is cheaper to compute them again.
        """
        count = -(-tokens // self._block_size)
        if 0 < count <= self.free and (self.prices is None or self._pays(tokens, count)):
            self.free -= count
            request.swapped = tokens
            names = None if request.blocks is None else request.blocks[:count]
            self.outgoing.append(Swap(request, count, 0, names))

    def _pays(self, tokens: int, count: int) -> bool:
        """Say whether two copies are expected to cost less than computing the tokens again."""
        prices = self.prices
        assert prices is not None
        lost = 1.0 - self._found / self._returned if self._returned else 1.0
        back = prices.recompute(tokens) - prices.swap_in(count)
        return prices.swap_out(count) < lost * back

    def observe(self, tokens: int, found: int) -> None:
        """Take note of what a preempted request found in the prefix cache when it came back."""
        self._returned += tokens
        self._found += found

    def send(self, step: Step) -> None:
        """Let a step carry out the copies to the host."""
        step.add_copies().outgoing, self.outgoing = self.outgoing, []

    def discard(self, request: Request) -> int:
        """Free a request's blocks on the host; return how many there were."""
        count = -(-request.swapped // self._block_size)
        request.swapped = 0
        self.free += count
        return count

    def swap_in(self, step: Step, request: Request, hits: int) -> None:
        """Have a request's blocks copied back by `step`, but its first `hits`: those were found.

        The request has its new blocks already.
        """
        count = self.discard(request)
        first = min(hits, count)
        names = None if request.blocks is None else request.blocks[first:count]
        step.add_copies().incoming.append(Swap(request, count - first, first, names))
