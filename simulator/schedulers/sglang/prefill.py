"""Which prompts a pass of SGLang's loop computes (`PrefillAdder` in `schedule_policy.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from simulator.core.request import Chunk, Load, Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.kv_cache.hierarchical_cache import HierarchicalCache
from simulator.kv_cache.radix_cache import RadixCache
from simulator.kv_cache.unshared_radix_cache import UnsharedRadixCache
from simulator.schedulers.sglang.new_token_ratio import NewTokenRatio
from simulator.schedulers.sglang.options import SglangOptions
from simulator.schedulers.sglang.queue_order import PolicyQueue, Queue
from simulator.schedulers.sglang.running_batch import CLIP_MAX_NEW_TOKENS, RunningBatch


class Admitting(Protocol):
    """What a pass asks of the scheduler: see `SgLang`."""

    blocks: BlockCounter
    tree: RadixCache | UnsharedRadixCache | None
    host: HierarchicalCache | None
    queue: Queue | PolicyQueue
    batch: RunningBatch
    order: str
    ratio: NewTokenRatio
    options: SglangOptions
    chunked: Request | None
    tried: dict[Request, tuple[int, int]]

    def received(self, request: Request) -> int: ...
    def urgency(self, request: Request) -> int: ...
    def lock_hits(self, request: Request, hits: Sequence[int]) -> None: ...
    def send_away(self, request: Request, left: int) -> None: ...


class Verdict(Enum):
    """What came of trying to admit a request: whether the next one may be tried."""

    CONTINUE = auto()
    NO_TOKEN = auto()  # the memory is used up
    OTHER = auto()  # a budget of the pass is used up


CONTINUE, NO_TOKEN, OTHER = Verdict  # as names of the module they are found faster


@dataclass(slots=True, eq=False)
class PrefillBudget:
    """What one pass may still compute and promise, in tokens.

    Memory is promised, and allocated when the batch is complete. Each request is charged a page
    more than its tokens.
    """

    scheduler: Admitting
    rem_input: int  # of max_prefill_tokens
    rem_chunk: int | None  # of chunked_prefill_size; None: prompts are not split
    total_offset: float  # promised, what is expected of those who run included
    current_offset: int  # of that, what this pass allocates
    batch: list[tuple[Request, int]] = field(default_factory=list)  # and its tokens
    chunked: Request | None = None  # who was admitted for a part of its prompt
    preempted: list[Request] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)  # from the host
    # (Tokens left, tokens held) of those who run, the next to end first.
    ends: list[tuple[float, int]] | None = None

    @property
    def rem_total(self) -> float:
        """Tokens of memory that are not promised to anybody."""
        blocks = self.scheduler.blocks
        return blocks.free * blocks.block_size - self.total_offset

    @property
    def rem_current(self) -> int:
        """Tokens of memory that this pass may still allocate."""
        blocks = self.scheduler.blocks
        return blocks.free * blocks.block_size - self.current_offset

    def state(self) -> Verdict:
        """Say whether anything is left."""
        blocks = self.scheduler.blocks
        free = blocks.free * blocks.block_size
        if free <= self.total_offset or free <= self.current_offset:
            return NO_TOKEN
        if self.rem_input <= 0 or (self.rem_chunk is not None and self.rem_chunk <= 0):
            return OTHER
        return CONTINUE

    def _pages(self, tokens: int) -> int:
        """Round up to whole pages."""
        size = self.scheduler.blocks.block_size
        return -(-tokens // size) * size

    def _add(self, request: Request, tokens: int, answer: int) -> None:
        """Compute tokens of a request, and charge them with its answer."""
        self.batch.append((request, tokens))
        page = self.scheduler.blocks.block_size
        paged = -(-tokens // page) * page
        self.total_offset += paged + page + answer
        self.current_offset += paged + page
        self.rem_input -= paged
        if self.rem_chunk is not None:
            self.rem_chunk -= paged

    def continue_chunked(self, request: Request, most: int | None) -> int:
        """Let the split prompt go on; return its tokens, 0 where there is no memory for them.

        `most` is what it leaves to shorter prompts; None: nothing.
        """
        assert self.rem_chunk is not None
        # Without any memory, too, it must go on, to give back its own one day.
        room = self.rem_chunk if (left := int(self.rem_total)) <= 0 else min(self.rem_chunk, left)
        tokens = min(request.pending, room, room if most is None else most)
        need = self._pages(request.computed + tokens) - self._pages(request.computed)
        if need > self.rem_current + self.current_offset:
            return 0
        whole = tokens == request.pending
        self._add(request, tokens, min(request.allowed, CLIP_MAX_NEW_TOKENS) if whole else 0)
        return tokens

    def add(self, request: Request, hits: Sequence[int]) -> Verdict:
        """Admit the head of the queue if it fits; `hits` are the blocks of it that are cached.

        They are not evictable any more, once it is admitted.
        """
        scheduler = self.scheduler
        if request.ignore_eos and scheduler.tree is None:
            return self._add_ignoring_eos(request)
        blocks, allowed, generated = scheduler.blocks, request.allowed, request.generated
        page, extend = blocks.block_size, request.prompt_tokens + generated
        left = allowed - generated if allowed > generated else 0
        left = left if left < CLIP_MAX_NEW_TOKENS else CLIP_MAX_NEW_TOKENS
        need = extend + left + page
        if hits:
            extend -= len(hits) * page
            # Cached blocks of the head are evictable, and free, until it is admitted.
            idle = blocks.missing(request.known, hits) - -(-request.known // page) + len(hits)
            need = extend + left + page + idle * page
        if need >= blocks.free * page - self.total_offset:
            return NO_TOKEN
        loads = scheduler.host.host_hits if scheduler.host is not None else 0
        tokens = self._fit(extend - loads * page)
        if loads and tokens and not scheduler.host.load_back():  # type: ignore[union-attr]
            loads, tokens = 0, self._fit(extend)
        if not tokens:
            return OTHER
        extend -= loads * page
        if loads:
            hits = range(len(hits) + loads)
            self.loads.append(Load(request, loads, request.preemptions == 0, layerwise=True))
        scheduler.lock_hits(request, hits)
        if tokens < extend:
            self.chunked = request
        self._add(request, tokens, 0 if tokens < extend else min(allowed, CLIP_MAX_NEW_TOKENS))
        return self.state()

    def _fit(self, extend: int) -> int:
        """Return the tokens of so many that this pass computes of a prompt; 0: none."""
        scheduler = self.scheduler
        page = scheduler.blocks.block_size
        pages = -(-extend // page) * page
        if self.rem_chunk is None:
            return 0 if self.batch and pages >= self.rem_input else extend
        if pages <= self.rem_chunk:
            return extend
        if scheduler.chunked is not None and scheduler.order == "shortest-prefill-first":
            return 0
        return max(self.rem_chunk // page * page, 0)  # what is cached are whole pages

    def allocate(self, step: Step) -> int:
        """Allocate what the batch needs, and put it into a step; return its tokens."""
        scheduler = self.scheduler
        blocks = scheduler.blocks
        size, tokens = blocks.block_size, 0
        for _, count in self.batch:
            tokens += count
        blocks.make_room(tokens if size == 1 else -(-tokens // size) + len(self.batch))
        if scheduler.host is not None and self.loads:
            step.add_copies().loads = self.loads
            scheduler.host.take_loads()
        for request, count in self.batch:
            step.prefills.append(Chunk(request, request.computed, count))
            blocks.extend(request, request.computed + count)
        return tokens

    def _add_ignoring_eos(self, request: Request) -> Verdict:
        """Admit a request whose length is known, where nothing is cached: by simulation.

        Whenever somebody ends, those who are left must have had room up to there.
        """
        extend, size = request.known, self.scheduler.blocks.block_size
        need = self._pages(extend) + size
        if need > min(self.rem_current, self.rem_total):
            return NO_TOKEN
        if self.ends is None:
            present = [
                request,
                *self.scheduler.batch.members_in_order(),
                *(r for r, _ in self.batch),
            ]
            ends = [one for r in present if (one := self._end(r))[0] > 0]
            self.ends = sorted(ends, key=lambda end: end[0])
        elif (end := self._end(request))[0] > 0:
            # Before the last one at most, also if it ends later: as SGLang does.
            later = (i for i, other in enumerate(self.ends) if end[0] <= other[0])
            self.ends.insert(next(later, max(len(self.ends) - 1, 0)), end)
        room, freed = self.rem_current - need, 0
        for number, (left, held) in enumerate(self.ends):
            count = len(self.ends) - number
            if room + freed - left * count <= count:
                return NO_TOKEN
            freed += held
        if self.rem_chunk is None or extend <= self.rem_chunk:
            self.scheduler.lock_hits(request, ())
            self._add(request, extend, min(request.allowed, CLIP_MAX_NEW_TOKENS))
        elif self.rem_chunk <= 0 or self.scheduler.chunked is not None:
            return OTHER  # with two split prompts to go on SGLang ends with an error
        else:
            # One that this pass has split is forgotten: it decodes, half read.
            self.scheduler.lock_hits(request, ())
            self.chunked = request
            self._add(request, self.rem_chunk, 0)
        return self.state()

    def _end(self, request: Request) -> tuple[float, int]:
        """Return the tokens that a request has left, and those that it holds."""
        scheduler = self.scheduler
        out = scheduler.received(request)
        ratio = 1.0 if request.ignore_eos else scheduler.ratio.value
        return request.allowed * ratio - out, request.prompt_tokens + out

    def _expected(self, request: Request) -> float:
        """Estimate the tokens that a request which decodes will still bring out."""
        left = min(request.allowed - self.scheduler.received(request), CLIP_MAX_NEW_TOKENS)
        return left * (1.0 if request.ignore_eos else self.scheduler.ratio.value)

    def preempt_for(self, request: Request) -> bool:
        """Preempt less urgent requests whose answers free enough for this one; say whether."""
        scheduler = self.scheduler
        urgency, entered = scheduler.urgency, scheduler.queue.entered
        threshold = scheduler.options.priority_scheduling_preemption_threshold
        # The prompt is only known from an earlier attempt: as SGLang does.
        known, hits = scheduler.tried.get(request, (0, 0))
        need = known - hits + min(request.allowed, CLIP_MAX_NEW_TOKENS) - self.rem_total
        running = scheduler.batch.members_in_order()
        victims: list[Request] = []
        for victim in sorted(running, key=lambda r: (-urgency(r), -entered[r][0])):
            if urgency(victim) - urgency(request) <= threshold:
                break
            victims.append(victim)
            need -= self._expected(victim)
            if need <= 0:
                break
        if not victims or need > 0:
            return False
        left = len(running)
        for victim in running:
            if victim in victims:
                left -= 1
                self.total_offset -= self._expected(victim)
                scheduler.send_away(victim, left)
        self.preempted += victims
        return True
