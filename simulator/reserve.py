"""Memory reserved at admission for the longest that a request may become: then nobody who runs
ever lacks a block, and many blocks stay empty."""

from typing import Any, Literal

from simulator.batching import Batching
from simulator.blocks import BlockCounter
from simulator.fields import refuse
from simulator.request import Request

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
        refuse(
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
    """Counts the blocks that running requests may come to need.

    Blocks are taken as tokens come: those reserved but empty do not count as used.
    """

    reserved = 0  # blocks

    def fits(self, request: Request) -> bool:
        return super().fits(request) and self._need(request) <= self.blocks.usable

    @property
    def room(self) -> str:
        """What `fits` compares a request with, in words."""
        return super().room + WITH_ANSWER

    def _need(self, request: Request) -> int:
        """Count the blocks that the request may come to need; its last token needs no room."""
        tokens = request.prompt_tokens + self._asked(request) - 1
        return -(-tokens // self.blocks.block_size)

    def _seat(self, request: Request, now: float) -> None:
        super()._seat(request, now)
        self.reserved += self._need(request)

    def _finish(self, request: Request, now: float) -> None:
        super()._finish(request, now)
        self.reserved -= self._need(request)

    def _preempt(self, request: Request) -> None:
        super()._preempt(request)
        self.reserved -= self._need(request)
