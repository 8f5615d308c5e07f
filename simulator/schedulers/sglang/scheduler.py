"""SGLang: prompts first, and a guess at what decodes will still need, which is put right by
retracting some. Its knobs are in `options.py`; which prompts a pass computes is in `prefill.py`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.kv_cache.hierarchical_cache import HierarchicalCache
from simulator.kv_cache.radix_cache import RadixCache
from simulator.kv_cache.unshared_radix_cache import UnsharedRadixCache
from simulator.policies.policy import EngineView
from simulator.schedulers.continuous_batching import ContinuousBatching
from simulator.schedulers.interface import LONGEST_LEAP, Traits
from simulator.schedulers.limits import BUDGET, DEFAULT_LIMITS, Limits
from simulator.schedulers.sglang.new_token_ratio import NewTokenRatio
from simulator.schedulers.sglang.options import SglangOptions
from simulator.schedulers.sglang.prefill import CONTINUE, NO_TOKEN, OTHER, PrefillBudget
from simulator.schedulers.sglang.queue_order import (
    BY_ENTRY,
    PolicyQueue,
    Queue,
    QueueOrder,
    make_queue,
)
from simulator.schedulers.sglang.running_batch import CountedBatch, RunningBatch
from simulator.util.from_mapping import check_least, raise_if

DEFAULT_OPTIONS = SglangOptions()
MOST_IDLE_PASSES = 1000


class SgLang(ContinuousBatching):
    """SGLang 0.5.23: steps of prompts first, in `order`: fcfs, lof, random, lpm, dfs-weight,
    hrrn, shortest-prefill-first. `max_num_batched_tokens` is its chunked_prefill_size,
    `block_size` its page_size, `async_scheduling` its overlap.

    The scheduler of SGLang 0.5.23 (`scheduler.py`, `schedule_policy.py`, `schedule_batch.py`).

    One pass of its loop:

    - A request in the middle of its prompt goes on, and others are admitted in `order`, whose
      prompts and expected answers fit beside what those who decode are expected to bring out:
      `ratio` of what they may. A step holds at most `max_num_batched_tokens`
      (`chunked_prefill_size`) tokens of prompts, of which the last is split.
    - If there is such a prefill it alone runs; decodes wait, unless `enable_mixed_chunk`.
    - Else all decode. Where they lack a page, those with the fewest tokens out are retracted.
      They queue up again behind all others, and the ratio becomes what it takes in the mean.
      Otherwise it falls with every such step.
    - Once nobody else fits (`full`), none is tried until somebody ends.

    Requests have `allowed` tokens at most: SGLang lets none outgrow the memory. With a `policy` of
    Headway's that orders the queue, in the place of `order`.

    Differs from SGLang where that ends with an error: a split prompt for whose next chunk there is
    no memory waits here.
    """

    traits: ClassVar[Traits] = Traits(
        pauses=False,
        prefix_tree=True,
        obeys=BUDGET | {"enable_chunked_prefill"},
        sets_aside=True,
    )
    options_type: ClassVar[type[SglangOptions]] = SglangOptions

    def __init__(
        self,
        blocks: BlockCounter,
        limits: Limits = DEFAULT_LIMITS,
        options: SglangOptions = DEFAULT_OPTIONS,
        *,
        policy: Any = None,
    ) -> None:
        options.check_beside(blocks, policy)
        self.options, self.order = options, options.order
        self.max_new_tokens = options.max_new_tokens
        super().__init__(blocks, limits)
        self._pool = blocks.usable * blocks.block_size  # tokens
        self._longest = min(self.max_model_len, self._pool) - 2
        self.tree = blocks if isinstance(blocks, RadixCache | UnsharedRadixCache) else None
        if isinstance(blocks, RadixCache):
            blocks.eviction_policy = options.radix_eviction_policy
        self.decodes = self.batch = RunningBatch(blocks.block_size, blocks.names_blocks)
        """Those who decode: `decodes` itself, which is slower to read."""
        self._begin()
        priorities = options.enable_priority_scheduling
        by_entry = priorities or self.order in BY_ENTRY
        self.waiting = self.queue = self._make_queue(policy, by_entry=by_entry)
        self._sign = 1 if options.schedule_low_priority_values_first else -1
        urgency = self.urgency if priorities else None
        self.queue_order = QueueOrder(self.order, blocks, urgency, options.seed)
        self._preempts = priorities and not options.disable_priority_preemption
        self._min_free_slots = min(options.min_free_slots_delay or 0, self.max_num_seqs)
        self.mixes = options.enable_mixed_chunk and self.enable_chunked_prefill
        self.ratio = NewTokenRatio(options)

    def _begin(self) -> None:
        """Set what changes from pass to pass to how a scheduler begins."""
        self.computed_tokens = 0  # of prompts, so far
        self.tried: dict[Request, tuple[int, int]] = {}  # tokens known and cached, at the last try
        self._passes_left = 0  # of the interval, before a prefill may be tried
        self.full = False  # nobody else fits, and nobody has ended since
        self._resets_full = False  # from the next pass on
        self.chunked: Request | None = None  # who is in the middle of its prompt
        self._stashes = False  # whose last chunk is not in the tree yet
        self._front = 0  # the number of the first of the running batch
        self._stale_tokens = 0  # of the prefill that the running batch began as
        self.aborted: list[Request] = []  # since the last commit
        self.host = self.blocks if isinstance(self.blocks, HierarchicalCache) else None

    def _make_queue(self, policy: Any, *, by_entry: bool) -> Queue | PolicyQueue:
        """Make the queue; for one of Headway's policies also a batch that tells its books."""
        if policy is None:
            return Queue((lambda: self.computed_tokens) if by_entry else None)
        size, named = self.blocks.block_size, self.blocks.names_blocks
        queue = make_queue(policy, EngineView(DecodeSet(size, named)))
        if queue.books is not None:
            self.decodes = self.batch = CountedBatch(size, named, queue.books)
        return queue

    def _check(self) -> None:
        """Take any budget that holds a page: decodes do not count."""
        least = self.blocks.block_size if self.enable_chunked_prefill else 1
        raise_if(
            check_least("max_num_seqs", self.max_num_seqs, 1),
            check_least("max_num_batched_tokens", self.max_num_batched_tokens, least),
        )

    # Requests come.

    def limit(self, request: Request) -> int:
        """Return the tokens that the client lets an answer have, and the memory."""
        size, prompt = self.blocks.block_size, request.prompt_tokens
        room, fits = self._longest - prompt, self._pool - -(-prompt // size) * size - size - 1
        room = room if room < fits else fits
        most = request.max_tokens or self.max_new_tokens or room
        if most == "exact":
            most = super().output_limit(request)
        most = most if most < room else room
        return most if most > 0 else 0

    def output_limit(self, request: Request) -> int:
        """Return the tokens of an answer; note those that it may have, which are the same sum."""
        request.allowed = most = self.limit(request)
        tokens = super().output_limit(request)
        return most if tokens > most or request.ignore_eos else tokens

    def fits(self, request: Request) -> bool:
        """Say whether the request could ever run; SGLang wants some tokens of slack.

        One that ignores the end of sequence, where nothing is cached, and may have all the memory
        would wait there for ever.
        """
        prompt, most = request.prompt_tokens, self.limit(request)
        if (self.options.ignore_eos or request.ignore_eos) and self.tree is None:
            size = self.blocks.block_size
            paged = -(-prompt // size) * size
            if paged + size + most >= self._pool - 1:
                return False
        return prompt < self._longest - 4 and most > 0

    def add(self, request: Request) -> bool:
        if self.options.ignore_eos:
            request.ignore_eos = True
        request.output_limit = self.output_limit(request)
        self.running.loop.arrived()
        self.queue.add(request)
        return not self.full or self._preempts

    def urgency(self, request: Request) -> int:
        """Say how urgent a request is, the most urgent least."""
        return request.priority * self._sign

    # A pass.

    def schedule(self, now: float) -> Step:
        """Go through passes until something runs, or nothing changes."""
        self.now = now
        self.preempted = 0
        step, left, gone = Step([]), self._passes_left, len(self.aborted)
        if not self._pass(step):
            self._pass_again(step, left, gone)
        return step

    def _pass_again(self, step: Step, left: int, gone: int) -> None:
        """Go on after a pass that has run nothing.

        `left` were `_passes_left` before it, and `gone` of those aborted.
        """
        before = 0, left, gone
        for _ in range(MOST_IDLE_PASSES):
            now = self.preempted, self._passes_left, len(self.aborted)
            if now == before or not self._passes_again():
                return
            before = now
            if self._pass(step):
                return

    def _is_idle(self) -> bool:
        """Say whether no batch is in flight: then a pass that runs nothing takes no time."""
        return True

    def _passes_again(self) -> bool:
        """Say whether a pass that has run nothing is followed by another at once."""
        return self._is_idle()

    def _pass(self, step: Step) -> bool:
        """Choose what runs; False: nothing does."""
        if self.host is not None:
            self.host.begin_pass(self.now, in_flight=not self._is_idle())
        if self._resets_full:
            self._resets_full = self.full = False
        if self.chunked is not None and self._stashes:
            self._stashes = False
            self.blocks.cache(self.chunked)
        if self._passes_left:
            self._passes_left -= 1
        elif self.waiting or self.chunked is not None:
            if self._prefill(step):
                self._passes_left = self.options.prefill_decode_interval
                return True
        elif self._preempts:
            self.full = False
        if self.batch.count:
            return self._decode(step)
        busy = self.waiting or self.running or (self.host is not None and self.host.copying)
        if not busy and self._is_idle():
            self.ratio.reset()
        return False

    def next_wakeup(self) -> float | None:
        """Look again, where nothing runs, when a copy to the host is there."""
        return None if self.host is None else self.host.next_store

    def received(self, request: Request) -> int:
        """Count the tokens of a request that the scheduler knows of."""
        return self.batch.generated(request)

    def remaining(self) -> float:
        """Estimate the tokens that those who decode will still bring out."""
        return self.batch.remaining(self.ratio.value)

    # Prompts.

    def _prefill(self, step: Step) -> bool:
        """Let the split prompt go on, and admit others in order; say whether anything runs."""
        running, chunked = self.batch.count, self.chunked
        if self._preempts or not running:
            self.full = False
        if chunked is None:
            if self.full:
                return False
            if running and self.max_num_seqs - running < self._min_free_slots > 1:
                return False
            if running >= self.max_num_seqs and not self._preempts:
                self.full = True
                return False
        if self.waiting:
            self.queue_order.sort(self.queue, self.computed_tokens, self.now)
        mixed = running if self.mixes else 0
        size = self.max_num_batched_tokens - mixed if self.enable_chunked_prefill else None
        budget = PrefillBudget(
            self, self.options.max_prefill_tokens - mixed, size, mixed + self.remaining(), mixed
        )
        if chunked is not None:
            assert size is not None
            tokens = size > 0 and budget.continue_chunked(
                chunked, self.queue_order.left_by(self.queue, chunked, size)
            )
            if not tokens:
                return False  # SGLang ends here, with an error
            if tokens == chunked.pending:
                self.chunked = None
        if self.waiting:
            self._admit_all(budget)
            for request in budget.preempted:
                self.waiting.put_back(request)
        if budget.batch:
            self._start_batch(step, budget)
        return bool(budget.batch)

    def _admit_all(self, budget: PrefillBudget) -> None:
        """Try the queue in order; nobody overtakes one who does not fit."""
        blocks, waiting, batch = self.blocks, self.queue, budget.batch
        most, preempts = self.options.prefill_max_requests, self._preempts
        if (batch or self.mixes) and budget.state() is OTHER:
            return
        while waiting:
            request, admitted = waiting.head(), len(batch)
            if admitted >= self.max_num_seqs - self.batch.count:
                self.full = True
            if self.full and not (preempts and budget.preempt_for(request)):
                break
            hits = blocks.match(request)
            if preempts:
                self.tried[request] = request.known, len(hits) * blocks.block_size
            if most and admitted >= most:
                break
            verdict = budget.add(request, hits)
            if len(batch) > admitted:
                waiting.take()
            if verdict is not CONTINUE:
                if verdict is NO_TOKEN:
                    self.full = bool(budget.batch) or self.batch.count > 0
                break

    def lock_hits(self, request: Request, hits: Sequence[int]) -> None:
        """Let a request keep what is cached of it, or loaded, and join the running list."""
        self.running.admit(request, self.now)
        start = len(hits) * self.blocks.block_size
        self.blocks.admit(request, hits, start)
        if request.preemptions == 0:
            request.cached = start
        else:
            self.running.resume(request, self.now, start)

    def _start_batch(self, step: Step, budget: PrefillBudget) -> None:
        """Let the batch run, and those who decode join if steps are mixed."""
        if budget.chunked is not None:
            self.chunked = budget.chunked
        self._stashes = self.chunked is not None
        tokens, batch, running = budget.allocate(step), budget.batch, self.running
        if self.mixes and self.batch.count:
            self._join_prefill(step)
        # In the running batch a mixed step's prompts come before those who decode, others behind.
        if step.decodes:
            self._front -= len(batch)
            for place, (request, _) in enumerate(batch):
                request.admission = self._front + place
        else:
            for request, _ in batch:
                request.admission = running.admissions
                running.admissions += 1
        self.computed_tokens += tokens + step.decodes
        if step.decodes or not self.batch.count:  # the batch becomes the running batch
            self._stale_tokens = tokens + step.decodes
            self._resets_full = True
        elif self.chunked is not None:
            self._resets_full = True

    def _join_prefill(self, step: Step) -> None:
        """Let those who decode do so in a step of prompts, if it leaves memory."""
        if self.batch.count and self._has_room():
            self._decode_all(step)
            for request in self.tried:
                if request.joined >= 0:
                    known = request.prompt_tokens + self.received(request)
                    self.tried[request] = known, self.tried[request][1]

    # Decodes.

    def _has_room(self) -> bool:
        """Say whether there is memory for the next token of all; if not, all is evicted."""
        batch = self.batch
        need = batch.phases[batch.tick % batch.block_size]
        if need <= self.blocks.free:
            return True  # whoever takes it evicts
        self.blocks.make_room(need)
        return False

    def _decode_all(self, step: Step) -> None:
        batch = self.batch
        if batch.block_size > 1:
            self.blocks.make_room(batch.count)
        self.blocks.take_ticks(batch, 1)
        step.decodes += batch.count
        step.context += batch.context + batch.count

    def _decode(self, step: Step) -> bool:
        """Let all decode who have room; False: nobody does."""
        if self._has_room():
            self.ratio.fall(1)
        else:
            self._retract()
            if not self.batch.count:
                return False
        self._decode_all(step)
        self.computed_tokens += self._stale_tokens  # SGLang counts that prefill again and again
        return True

    def _retract(self) -> None:
        """Send away those with the least to lose, until the next step fits."""

        by_priority = self.options.retraction_policy == "priority"

        def least_first(request: Request) -> tuple[int, ...]:
            urgency = -self.urgency(request) if by_priority else 0
            return urgency, self.received(request), -request.prompt_tokens

        kept = sorted(self.batch.members_in_order(), key=least_first, reverse=True)
        retracted = []
        fits = False
        while len(kept) > 1 and not fits:
            victim = kept.pop()
            self.send_away(victim, len(kept))
            retracted.append(victim)
            fits = self._has_room()
        if not fits and not self._has_room():
            self._abort(kept.pop())
        self.ratio.retracted(kept, sum(map(self.received, kept)))
        self.batch.reorder(kept, self.running.admissions)  # SGLang keeps the order of the choice
        self.running.admissions += len(kept)
        for victim in retracted:
            self.waiting.put_back(victim)
        self.full = False

    def send_away(self, request: Request, left: int) -> None:
        """Take its memory from a request, and evict cached blocks for the `left` others."""
        self.running.evict(request, self.now)
        self.preempted += 1
        if request in self.tried:
            self.tried[request] = self.tried[request][0], 0
        size = self.blocks.block_size
        self.blocks.make_room(-(-left * self.options.retract_decode_steps // size))

    def _abort(self, request: Request) -> None:
        """End a request that has no room though it is alone: only split prompts hold memory."""
        self.running.remove(request)
        self.blocks.release(request)
        self._forget(request)
        request.finish = self.now
        self.aborted.append(request)

    # A step is over.

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        now, ticks = ends[-1], len(ends)
        over: list[Request] = []
        decodes = self.batch
        if ticks > 1:
            self.take_ticks(ticks - 1, 1)
        ended = decodes.advance(ticks) if step.decodes else []
        for chunk in step.prefills:
            request = chunk.request
            if request is self.chunked:
                continue
            self._emit(request, now, over)
            if over and over[-1] is request:
                self.finish(request, now)
            else:
                self.blocks.cache(request)
        ended.sort(key=lambda request: request.admission)
        for request in ended:
            self.finish(request, now)
        over += ended + self.aborted
        self.aborted.clear()
        if self.host is not None:
            self.host.end_step(now, loads=step.copies is not None, in_flight=False)
        return over

    def take_ticks(self, ticks: int, skip: int) -> None:
        """Let `ticks` more steps of decodes be taken, beginning `skip` ticks from now."""
        decodes, blocks = self.batch, self.blocks
        if blocks.block_size > 1:
            blocks.make_room(decodes.blocks(ticks - 1, skip) + decodes.count)
        blocks.take_ticks(decodes, ticks, skip)
        self.ratio.fall(ticks)
        if self._passes_left:
            self._passes_left = max(self._passes_left - ticks, 0)

    def finish(self, request: Request, now: float) -> None:
        self.running.remove(request)
        request.finish = now
        self.blocks.release(request)
        self._forget(request)
        self.full = False

    def cancel(self, request: Request) -> None:
        if request is self.chunked:
            self.chunked, self._stashes = None, False
        if request in self.running:
            self.full = False
        super().cancel(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.queue.entered.pop(request, None)
        self.tried.pop(request, None)

    def horizon(self, step: Step) -> int:
        """Count how often `step`, just scheduled, is sure to repeat if nobody arrives."""
        decodes = self.batch
        if step.prefills or self.preempted or not decodes.count or self.chunked is not None:
            return 1
        if self.host is not None and self.host.copying:
            return 1
        if self._preempts if self.full else self.waiting:
            return 1  # the next pass looks at the queue
        if self.order == "hrrn" and self._stale_tokens:
            return 1  # time goes by for whoever comes
        ahead = self._ahead
        more = min(decodes.ticks_to_end(), LONGEST_LEAP) - ahead
        return 1 + decodes.affords(self.blocks.free, more, ahead) if more > 0 else 1
