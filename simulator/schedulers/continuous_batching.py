"""What the schedulers of other engines share: each says who is admitted, and when."""

from collections.abc import Sequence
from typing import Any, Literal

from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.from_mapping import raise_if

MaxNewTokens = int | Literal["exact"] | None

WITH_ANSWER = ", with the longest answer that the client lets it have (max_new_tokens)"


class ContinuousBatching(Scheduler):
    """Puts a step together of its parts, by `compose`.

    Here a step is mixed: everybody whose prompt is computed decodes, prompts under way go on,
    then others are admitted. There must be blocks for a whole prompt to admit it, and the last
    admitted is preempted, to be computed again, when the decodes lack a block.

    `max_new_tokens` says how long clients let an answer be: a number of tokens, at which answers
    are cut off; None, as many as `max_model_len` has room for; or `exact`, the very length of the
    answer, as in a benchmark that sends `max_tokens` and ignores the end of sequence. The engine
    does not know how long it will be.

    With `reserves` each running request has the blocks reserved that it may come to need: then
    nobody who runs ever lacks a block, and many blocks stay empty. They count as used, though they
    are taken as tokens come. Blocks of a common prefix, which several hold, are reserved once.
    """

    caches_prefixes = False
    has_host_tier = False
    cancels = False

    def __init__(
        self,
        blocks: BlockCounter,
        *,
        max_new_tokens: MaxNewTokens = None,
        reserves: bool = False,
        **options: Any,
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self.reserves = reserves
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

    def output_limit(self, request: Request) -> int:
        tokens = super().output_limit(request)
        return min(tokens, self.max_new_tokens) if isinstance(self.max_new_tokens, int) else tokens

    def allowed_output(self, request: Request) -> int:
        """Give the tokens that the client lets the answer have."""
        if self.max_new_tokens == "exact":
            return self.output_limit(request)
        room = self.max_model_len - request.prompt_tokens
        return min(room, self.max_new_tokens or room)

    def longest(self, request: Request) -> int:
        """Give the tokens that a request may come to store; the last one needs no room."""
        return request.prompt_tokens + self.allowed_output(request) - 1

    def need(self, request: Request) -> int:
        """Count the blocks for that."""
        return -(-self.longest(request) // self.blocks.block_size)

    @property
    def reservable(self) -> int:
        """Blocks that may be reserved in all."""
        return self.blocks.usable

    @property
    def unreserved(self) -> int:
        """Blocks that may still be reserved."""
        return self.blocks.unreserved - (self.blocks.usable - self.reservable)

    def fits(self, request: Request) -> bool:
        return super().fits(request) and (
            not self.reserves or self.need(request) <= self.reservable
        )

    @property
    def room(self) -> str:
        return super().room + (WITH_ANSWER if self.reserves else "")

    def schedule(self, now: float) -> Step:
        self.now = now
        self.preempted = 0
        step = Step([])
        self.compose(step)
        return step

    def compose(self, step: Step) -> None:
        """Fill a step."""
        self.free_blocks()
        self.decode_all(step)
        budget = self.go_on(step, self.max_num_batched_tokens - step.decodes)
        if not self.preempted:
            self.admit(step, budget, self.max_model_len)

    def free_blocks(self) -> None:
        """Preempt the last admitted until there are blocks for all who decode."""
        decodes, blocks = self.decodes, self.blocks
        while decodes.count and decodes.blocks(1) > blocks.free - self.outstanding():
            self.preempt(self.running.last())

    def outstanding(self) -> int:
        """Count the blocks that prompts under way have not taken yet."""
        taken = self.blocks.taken
        return sum(taken(request, request.known) for request in self.running.partial)

    def go_on(self, step: Step, budget: int) -> int:
        """Let prompts under way compute, in order of admission; return the tokens left."""
        for request in self.running.partial:
            tokens = self.chunk(request.pending, budget)
            if not tokens:
                break
            self.schedule_tokens(step, request, tokens)
            budget -= tokens
        return budget

    def lacks_blocks(self, request: Request, hits: Sequence[int], tokens: int) -> bool:
        if self.reserves:
            return self.need(request) > self.unreserved
        need, running = self.outstanding(), len(self.running)
        return self.admission.lacking(request, hits, tokens, running, need) > 0

    def start(self, request: Request) -> None:
        super().start(request)
        if self.reserves:
            self.blocks.reserve(request, self.longest(request))


def whole_prompts(max_num_batched_tokens: int, max_model_len: int) -> int:
    """Raise a budget so that a step can hold the longest prompt, where prompts are not split."""
    return max(max_num_batched_tokens, max_model_len)
