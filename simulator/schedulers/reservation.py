"""Memory reserved at admission for the longest that a request may become: then nobody who runs
ever lacks a block, and many blocks stay empty."""

from collections.abc import Sequence
from typing import Any, Literal

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.batching import Batching
from simulator.util.from_mapping import raise_if

Asked = int | Literal["exact"] | None


WITH_ANSWER = ", with the longest answer that the client lets it have (max_new_tokens)"


class Asking(Batching):
    """Knows how long its clients let an answer be, not how long it will be.

    `max_new_tokens` says what all clients ask for: a number of tokens, at which answers are cut
    off; None, as many as `max_model_len` has room for; or `exact`, the very length of the answer,
    as in a benchmark that sends `max_tokens` and ignores the end of sequence.
    """

    def __init__(
        self, blocks: BlockCounter, *, max_new_tokens: Asked = None, **options: Any
    ) -> None:
        self.max_new_tokens = max_new_tokens
        number = isinstance(max_new_tokens, int) and not isinstance(max_new_tokens, bool)
        good = max_new_tokens in (None, "exact") or (number and int(max_new_tokens or 0) > 0)
        raise_if(
            (
                not good,
                "max_new_tokens: must be a whole number of at least 1, null or exact, not "
                f"{max_new_tokens!r}",
            )
        )
        super().__init__(blocks, **options)

    def _max_tokens(self, request: Request) -> int:
        tokens = super()._max_tokens(request)
        return min(tokens, self.max_new_tokens) if isinstance(self.max_new_tokens, int) else tokens

    def _asked(self, request: Request) -> int:
        """Give the tokens that the client lets the answer have."""
        if self.max_new_tokens == "exact":
            return self._max_tokens(request)
        room = self.max_model_len - request.prompt_tokens
        return min(room, self.max_new_tokens or room)


class Reserving(Asking):
    """Promises each running request the blocks that it may come to need.

    They count as used, though they are taken as tokens come. Blocks of a common prefix, which
    several hold, are promised once.
    """

    reserves = True  # else it boards whoever fits as it is

    @property
    def most(self) -> int:
        """Blocks that may be promised in all."""
        return self.blocks.usable

    def fits(self, request: Request) -> bool:
        return super().fits(request) and (not self.reserves or self._need(request) <= self.most)

    @property
    def room(self) -> str:
        """What `fits` compares a request with, in words."""
        return super().room + (WITH_ANSWER if self.reserves else "")

    def _longest(self, request: Request) -> int:
        """Give the tokens that it may come to store; the last one needs no room."""
        return request.prompt_tokens + self._asked(request) - 1

    def _need(self, request: Request) -> int:
        """Count the blocks for that."""
        return -(-self._longest(request) // self.blocks.block_size)

    @property
    def unreserved(self) -> int:
        """Blocks that may still be promised."""
        return self.blocks.unreserved - (self.blocks.usable - self.most)

    def _fits_now(self, request: Request, hits: Sequence[int]) -> bool:
        if not self.reserves:
            return super()._fits_now(request, hits)
        return self._need(request) <= self.unreserved

    def _seat(self, request: Request, now: float) -> None:
        super()._seat(request, now)
        if self.reserves:
            self.blocks.reserve(request, self._longest(request))
