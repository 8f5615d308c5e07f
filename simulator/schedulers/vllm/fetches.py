"""Prefixes of waiting requests that tiers behind the host bring to it."""

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.kv_cache.tiers import HostTier


class Fetches:
    """Asks the tiers for who is new; a request is not admitted while its prefix is on its way."""

    def __init__(self, blocks: BlockCounter, tier: HostTier) -> None:
        self._blocks, self._tier = blocks, tier
        self.new: list[Request] = []  # of whom no tier has been asked yet
        self.coming: dict[Request, tuple[tuple[int, int], float]] = {}
        """What comes from each tier behind the host, blocks, and until when, s."""

    def ask(self, now: float) -> None:
        """Ask the tiers for the prefixes of those who are new."""
        self._tier.now = now
        for request in self.new:
            counts, ready = self._blocks.fetch(request)
            if ready > now:
                self.coming[request] = (counts[0], sum(counts[1:])), ready
        self.new.clear()

    def awaits(self, request: Request) -> bool:
        """Say whether a part of a prompt's prefix is still on its way."""
        return request in self.coming and self.coming[request][1] > self._tier.now

    def next_end(self) -> float | None:
        """Return when the next prefix has come, s; None: none is on its way."""
        return min((when for _, when in self.coming.values()), default=None)

    def pop(self, request: Request, loads: int) -> tuple[int, int]:
        """Return how many of the blocks to be loaded came from each tier behind the host."""
        first, second = self.coming.pop(request, ((0, 0), 0.0))[0]
        first = min(first, loads)
        return first, min(second, loads - first)

    def forget(self, request: Request) -> None:
        """Expect nothing more of a request, which was admitted or cancelled."""
        self.coming.pop(request, None)
        if request in self.new:
            self.new.remove(request)
