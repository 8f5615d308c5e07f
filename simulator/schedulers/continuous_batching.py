"""What the schedulers of other engines share, and two that it makes by itself.

Each engine says who is admitted, and when. Orca and Sarathi-Serve, two schedulers of papers, mix
prompts and decodes in one step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.interface import Traits
from simulator.schedulers.limits import BUDGET, DEFAULT_LIMITS, SIZES, Limits
from simulator.util.errors import MappingError

MaxNewTokens = int | Literal["exact"] | None


def check_max_new_tokens(tokens: MaxNewTokens) -> MaxNewTokens:
    """Let through how long clients let an answer be that have no `max_tokens` of their own.

    A number of tokens, at which answers are cut off; None, as many as `max_model_len` has room for;
    or `exact`, the very length of the answer, as in a benchmark that sends `max_tokens` and ignores
    the end of sequence. The engine does not know how long it will be.
    """
    number = isinstance(tokens, int) and not isinstance(tokens, bool)
    if tokens not in (None, "exact") and not (number and int(tokens) > 0):
        what = f"must be a whole number of at least 1, null or exact, not {tokens!r}"
        raise MappingError("max_new_tokens", what)
    return tokens


WITH_ANSWER = ", with the longest answer that the client lets it have (max_new_tokens)"


class ContinuousBatching(SchedulerBase):
    """Puts a step together of its parts, by `fill`.

    Here a step is mixed: everybody whose prompt is computed decodes, prompts under way go on,
    then others are admitted. There must be blocks for a whole prompt to admit it, and the last
    admitted is preempted, to be computed again, when the decodes lack a block.

    Where it `reserves`, each running request has the blocks reserved that it may come to need: then
    nobody who runs ever lacks a block, and many blocks stay empty. They count as used, though they
    are taken as tokens come. Blocks of a common prefix, which several hold, are reserved once.
    """

    traits: ClassVar[Traits] = Traits(caches_prefixes=False, has_host_tier=False, obeys=BUDGET)
    reserves: ClassVar[bool] = False
    """Blocks for whole answers are set aside on admission."""
    whole_prompts: ClassVar[bool] = False
    """Prompts are not split: the budget is raised until a step can hold the longest."""
    max_new_tokens: MaxNewTokens = None

    def __init__(self, blocks: BlockCounter, limits: Limits = DEFAULT_LIMITS) -> None:
        if self.whole_prompts:
            tokens = max(limits.max_num_batched_tokens, limits.max_model_len)
            limits = replace(limits, max_num_batched_tokens=tokens, enable_chunked_prefill=False)
        super().__init__(blocks, limits)
        self.watermark_blocks = int(limits.watermark * (blocks.usable + 1))

    def output_limit(self, request: Request) -> int:
        tokens, most = super().output_limit(request), self.max_new_tokens
        cut = request.max_tokens is None and isinstance(most, int)
        return min(tokens, int(most)) if cut else tokens  # type: ignore[arg-type]

    def allowed_output(self, request: Request) -> int:
        """Return the tokens that the client lets the answer have."""
        most = request.max_tokens or self.max_new_tokens
        if most == "exact":
            return self.output_limit(request)
        room = self.max_model_len - request.prompt_tokens
        return min(room, most or room)

    def reserved_tokens(self, request: Request) -> int:
        """Return the tokens that a request may come to store; the last one needs no room."""
        return request.prompt_tokens + self.allowed_output(request) - 1

    def reserved_blocks(self, request: Request) -> int:
        """Count the blocks for these tokens."""
        return -(-self.reserved_tokens(request) // self.blocks.block_size)

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
            not self.reserves or self.reserved_blocks(request) <= self.reservable
        )

    @property
    def room(self) -> str:
        return super().room + (WITH_ANSWER if self.reserves else "")

    def schedule(self, now: float) -> Step:
        self.now = now
        self.preempted = 0
        step = Step([])
        self.fill(step)
        return step

    def fill(self, step: Step) -> None:
        """Fill a step."""
        self.make_room()
        self.decode_all(step)
        budget = self.continue_prefills(step, self.max_num_batched_tokens - step.decodes)
        if not self.preempted:
            self.admit(step, budget, self.max_model_len)

    def make_room(self) -> None:
        """Preempt the last admitted until there are blocks for all who decode."""
        decodes, blocks = self.decodes, self.blocks
        while decodes.count and decodes.blocks(1) > blocks.free - self.blocks_of_prefills():
            self.preempt(self.running.last())

    def blocks_of_prefills(self) -> int:
        """Count the blocks that prompts under way have not taken yet."""
        taken = self.blocks.taken
        return sum(taken(request, request.known) for request in self.running.partial)

    def continue_prefills(self, step: Step, budget: int) -> int:
        """Let prompts under way compute, in order of admission; return the tokens left."""
        for request in self.running.partial:
            tokens = self.chunk(request.pending, budget)
            if not tokens:
                break
            self.schedule_tokens(step, request, tokens)
            budget -= tokens
        return budget

    def admit(self, step: Step, budget: int, cap: int) -> None:
        """Admit from the head of the waiting queue; nobody overtakes a head that does not fit.

        `budget` tokens are left in the step; `cap` is for one request.
        """
        blocks, waiting = self.blocks, self.waiting
        while budget and waiting and len(self.running) < self.max_num_seqs:
            request = waiting.head()
            hits = blocks.match(request)
            start = len(hits) * blocks.block_size
            tokens = self.chunk(min(request.known - start, cap), budget)
            if not tokens or self.lacks_blocks(request, hits, start + tokens):
                break
            self.admit_head(step, hits, start, tokens)
            budget -= tokens

    def lacks_blocks(self, request: Request, hits: Sequence[int], tokens: int) -> bool:
        """Say whether memory is too short to admit a request that begins with `tokens` tokens.

        `hits` is what `blocks.match` has just found of it.
        """
        if self.reserves:
            return self.reserved_blocks(request) > self.unreserved
        spare = self.blocks_of_prefills() + (self.watermark_blocks if self.running else 0)
        missing = self.blocks.missing_whole(request.known, tokens, hits)
        return missing + spare > self.blocks.free

    def start(self, request: Request) -> None:
        super().start(request)
        if self.reserves:
            self.blocks.reserve(request, self.reserved_tokens(request))


class Orca(ContinuousBatching):
    """Orca: whole prompts and decodes in one step, without a token budget; memory reserved for
    the longest answer.

    Iteration-level scheduling (Yu et al., Orca, OSDI 2022, algorithm 1).

    Requests join and leave between steps. A step computes whole prompts and decodes together, for
    at most `max_num_seqs` requests (`max_bs`), first come, first served. Memory for all tokens
    that a request may have (`max_tokens`) is reserved on admission, so nobody is preempted.
    There is no token budget. Headway leaves out the pipelining over several workers.
    """

    traits = replace(ContinuousBatching.traits, obeys=SIZES, sets_aside=True)
    reserves: ClassVar[bool] = True
    whole_prompts: ClassVar[bool] = True

    def __init__(
        self,
        blocks: BlockCounter,
        limits: Limits = DEFAULT_LIMITS,
        *,
        max_new_tokens: MaxNewTokens = None,
    ) -> None:
        self.max_new_tokens = check_max_new_tokens(max_new_tokens)
        never_reached = limits.max_num_seqs * limits.max_model_len
        super().__init__(blocks, replace(limits, max_num_batched_tokens=never_reached))


class Sarathi(ContinuousBatching):
    """Sarathi-Serve: decodes first, then chunks of prompts, within the budget.

    Stall-free batching with chunked prefill (Agrawal et al., Sarathi-Serve, OSDI 2024).

    Of the budget `max_num_batched_tokens` (`chunk_size`) the decodes get theirs first, then the
    prompts under way, then new ones (`sarathi/core/scheduler/sarathi_scheduler.py`). So a decode
    never waits for a prompt, which vLLM V1 lets happen where the budget does not reach round. All
    blocks of a prompt are set aside on admission, above a `watermark` of free ones. Where decodes
    lack a block the last admitted is preempted, and computed again.

    Headway leaves out dynamic chunk sizes and pipeline parallelism.
    """

    traits = replace(ContinuousBatching.traits, obeys=BUDGET | {"watermark"})
