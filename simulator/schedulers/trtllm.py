"""TensorRT-LLM's in-flight batching."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice

from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.waiting_queues import Fifo
from simulator.schedulers.continuous_batching import (
    ContinuousBatching,
    MaxNewTokens,
    check_max_new_tokens,
)
from simulator.schedulers.interface import Traits
from simulator.schedulers.limits import BUDGET, DEFAULT_LIMITS, Limits
from simulator.util.errors import MappingError

GUARANTEED_NO_EVICT, MAX_UTILIZATION, STATIC_BATCH = POLICIES = (
    "GUARANTEED_NO_EVICT",
    "MAX_UTILIZATION",
    "STATIC_BATCH",
)


def by_arrival(request: Request) -> tuple[float, int]:
    """Sort key: the order of TensorRT-LLM's list of active requests."""
    return request.arrival, request.id


class ByArrival(Fifo):
    """First come, first served; a paused request goes back to its place."""

    def put_back(self, request: Request) -> None:
        self.insert(bisect_right(self, by_arrival(request), key=by_arrival), request)


class TrtLlm(ContinuousBatching):
    """TensorRT-LLM: GUARANTEED_NO_EVICT, MAX_UTILIZATION or STATIC_BATCH.

    TensorRT-LLM's scheduler, read in its sources and not replayed.

    They are `_torch/pyexecutor/scheduler/scheduler.py` at commit 002f3cc3 and
    `batch_manager/kvCacheManager.cpp` of 1.0. The active requests, in order of arrival, are as many
    as there are seats. `capacity_scheduler_policy` decides who of them may be in memory:

    - GUARANTEED_NO_EVICT (the default there, too): those who run, and then others as long as the
      blocks that all of them may still come to need, the last token's included, are free.
    - MAX_UTILIZATION: whoever has room for the next step, which for a new request are the blocks
      of its whole prompt. For one who has not, the last started behind it in the list (or else it
      itself) is paused, and computed again; so whoever came earlier may push out one who runs.
    - STATIC_BATCH: as the first, but as long as somebody decodes no prompt is computed.

    But for STATIC_BATCH, a request is held back, and others pass it by, if the first block that it
    would add to the prefix cache is just being added by another: it will find it there.

    Then `max_num_batched_tokens` (`max_num_tokens`) is shared out: a token for each decode, then
    prompts, first come, first served. Without chunked context a prompt waits until it fits as a
    whole, and so do all behind it; with it, a chunk that does not end its prompt is a multiple of
    the block size, and where that is 0 the next prompt is tried.

    Of a request's reservation the cached blocks that others hold are not counted twice. Left out
    are equal progress of chunks, two steps' lookahead and overlap. A request that was held back
    stands behind prompts under way; in TensorRT-LLM it goes before those that came after it, and
    can then wait for ever for blocks that they hold.
    """

    traits = Traits(
        has_host_tier=False,
        obeys=BUDGET | {"enable_chunked_prefill"},
        sets_aside=True,
    )
    reserves = refuses_long = True
    waiting: ByArrival

    def __init__(
        self,
        blocks: BlockCounter,
        limits: Limits = DEFAULT_LIMITS,
        *,
        capacity_scheduler_policy: str = GUARANTEED_NO_EVICT,
        max_new_tokens: MaxNewTokens = None,
    ) -> None:
        if capacity_scheduler_policy not in POLICIES:
            what = f"must be {', '.join(POLICIES)}, not {capacity_scheduler_policy!r}"
            raise MappingError("capacity_scheduler_policy", what)
        self.max_new_tokens = check_max_new_tokens(max_new_tokens)
        # Who is paused is computed again, with an answer that may be longer than a step.
        self.reserves = capacity_scheduler_policy != MAX_UTILIZATION  # type: ignore[misc]
        self.refuses_long = self.reserves  # type: ignore[misc]
        super().__init__(blocks, limits)
        self.waiting = ByArrival()
        self.policy = capacity_scheduler_policy
        self._found: dict[Request, int] = {}  # cached blocks, before the step begins anybody

    def fits(self, request: Request) -> bool:
        """Say whether a prompt that is not split has room in a step, too."""
        whole = self.enable_chunked_prefill or request.prompt_tokens <= self.max_num_batched_tokens
        return whole and super().fits(request)

    @property
    def room(self) -> str:
        step = f"a step of {self.max_num_batched_tokens:,} tokens, or "
        return ("" if self.enable_chunked_prefill else step) + super().room

    def add(self, request: Request) -> bool:
        changes = super().add(request)
        passes_others = self.enable_chunked_prefill or self.blocks.names_blocks
        return changes or (passes_others and len(self.running) < self.max_num_seqs)

    def reserved_tokens(self, request: Request) -> int:
        """Return the tokens that a request may come to have; the last one counts, too."""
        return request.prompt_tokens + self.allowed_output(request)

    def fill(self, step: Step) -> None:
        self._found.clear()
        if not self.reserves:
            self._fill_to_the_last_block(step)
            return
        computes_prompts = self.policy != STATIC_BATCH or not self.decodes.count
        self.decode_all(step)
        if computes_prompts:
            self._compute_prompts(step, self.unreserved)

    def _compute_prompts(self, step: Step, free: int) -> None:
        """Let prompts under way go on, and others begin for which blocks are free."""
        left = self.max_num_batched_tokens - step.decodes
        under_way = []
        for request in self.running.partial:
            if tokens := self.chunk(request.pending, left):
                under_way.append((request, tokens))
                left -= tokens
        fitting = list(self._fitting(free, left)) if left > 0 else []
        for request, tokens in under_way:
            self.schedule_tokens(step, request, tokens)
        for request in fitting:
            left -= self._begin(step, request, left)

    def _fitting(self, free: int, left: int) -> Iterator[Request]:
        """Go through those who wait and have a seat; give those that have blocks and tokens."""
        adding, size = self._being_added(), self.blocks.block_size
        for request in islice(self.waiting, self.max_num_seqs - len(self.running)):
            if self._is_held_back(request, adding):
                continue
            free -= self._need(request)
            if free < 0:
                return
            tokens = self.chunk(request.known - self._found[request] * size, left)
            if tokens:
                yield request
            elif not self.enable_chunked_prefill:
                return
            left -= tokens
            if not left:
                return

    def _need(self, request: Request) -> int:
        """Count the free blocks that it takes to let a waiting request begin."""
        blocks, known = self.blocks, request.known
        hits = blocks.match(request)
        self._found[request] = len(hits)
        missing = blocks.missing(known, hits)
        if not self.reserves:
            return missing
        return self.reserved_blocks(request) - -(-known // blocks.block_size) + missing

    def _being_added(self) -> set[int] | None:
        """Name the block that each prompt under way adds next to the prefix cache.

        None: nobody waits for another to add it.
        """
        if self.policy == STATIC_BATCH:
            return None
        size, first_new = self.blocks.block_size, self.blocks.first_new
        found = (first_new(request, request.computed // size) for request in self.running.partial)
        return {name for name in found if name is not None}

    def _is_held_back(self, request: Request, adding: set[int] | None) -> bool:
        """Say whether another adds what a request would add first; if not, it is to add it."""
        if adding is None:
            return False
        name = self.blocks.first_new(request, len(self.blocks.match(request)))
        if name in adding:
            return True
        if name is not None:
            adding.add(name)
        return False

    def _begin(self, step: Step, request: Request, budget: int) -> int:
        """Let a waiting request compute what the budget allows; return its tokens."""
        # What others add in this very step nobody finds yet.
        hits = self.blocks.match(request)[: self._found[request]]
        start = len(hits) * self.blocks.block_size
        tokens = self.chunk(request.known - start, budget)
        if tokens:
            if self.waiting.head() is not request:
                self.waiting.remove(request)
                self.waiting.appendleft(request)
            self.admit_head(step, hits, start, tokens)
        return tokens

    def chunk(self, pending: int, budget: int) -> int:
        tokens = super().chunk(pending, budget)
        unit = self.blocks.block_size
        if tokens == pending or unit > self.max_num_batched_tokens:
            return tokens
        return tokens - tokens % unit

    # MAX_UTILIZATION.

    def _free(self) -> int:
        """Count the free blocks that prompts under way do not need."""
        return self.blocks.free - self.blocks_of_prefills()

    def _fill_to_the_last_block(self, step: Step) -> None:
        need, free = self.decodes.blocks(1), self._free()
        if need > free or self._is_overtaken():
            self._share_out(step, self._pause())
        else:
            self.decode_all(step)
            self._compute_prompts(step, free - need)

    def _is_overtaken(self) -> bool:
        """Say whether somebody runs who came after one who waits."""
        if not self.waiting or not self.running:
            return False
        first = by_arrival(self.waiting.head())
        return any(by_arrival(request) > first for request in self.running)

    def horizon(self, step: Step) -> int:
        # Who waits is counted before those that came later: they may have to go for it.
        return 1 if not self.reserves and self._is_overtaken() else super().horizon(step)

    def _pause(self) -> list[Request]:
        """Go through the active requests by arrival, pausing some; give those that fit."""
        running, computed = self.running, self.decodes.computed
        seats = self.max_num_seqs - len(running)
        active = sorted([*running, *islice(self.waiting, seats)], key=by_arrival)
        adding = self._being_added()
        fitting: list[Request] = []
        used, end = 0, len(active)
        for place, request in enumerate(active):
            if place >= end:
                break
            if request in running:  # the need of a prompt under way is not free
                need = int(request.joined >= 0 and computed(request) % self.blocks.block_size == 0)
            elif self._is_held_back(request, adding):
                continue
            else:
                need = self._need(request)
            while used + need > self._free():
                last = next((i for i in reversed(range(place, end)) if active[i] in running), None)
                if last is None:
                    return fitting
                self.preempt(active[last])
                end = last
                if last == place:
                    return fitting
                if request not in running:
                    need = self._need(request)
            used += need
            fitting.append(request)
        return fitting

    def _share_out(self, step: Step, fitting: list[Request]) -> None:
        """Share the tokens out among those who fit, in their order."""
        running, left = self.running, self.max_num_batched_tokens
        decoding: list[Request] = []
        prompts: list[Request] = []
        for request in fitting:
            if request in running and self._decodes(request):
                tokens = 1
                chosen = decoding
            else:
                tokens = 0  # of prompts that are split: told below
                if not self.enable_chunked_prefill:
                    tokens = request.pending - self._found[request] * self.blocks.block_size
                chosen = prompts
            if tokens > left:
                break
            left -= tokens
            chosen.append(request)
        singles = [request for request in decoding if request.joined < 0]
        if len(decoding) - len(singles) == self.decodes.count:
            self.decode_all(step)
        else:  # some sit out
            running.dissolve()
            singles = decoding
        for request in singles:
            self.schedule_tokens(step, request, 1)
        left = self.max_num_batched_tokens - step.decodes
        for request in prompts:
            if request not in running:
                left -= self._begin(step, request, left)
            elif tokens := self.chunk(request.pending, left):
                self.schedule_tokens(step, request, tokens)
                left -= tokens

    @staticmethod
    def _decodes(request: Request) -> bool:
        """Say whether a running request wants a token and no more."""
        return request.joined >= 0 or (request.generated > 0 and request.pending == 1)
