"""What all schedulers share: queue, running list, decode set, outcome of a step, rows of the log.

A subclass decides what a step computes. All of it changes the same lists, so each engine's is one
class on this one.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import ClassVar

from simulator.core.decode_set import DecodeSet
from simulator.core.log import StepRow
from simulator.core.request import Chunk, Request, Step, by_admission
from simulator.kv_cache.block_manager import BlockCounter
from simulator.kv_cache.host_memory import SwapSpace
from simulator.policies.waiting_queues import Fifo, WaitingQueue
from simulator.schedulers.door import Door
from simulator.schedulers.feature import Feature
from simulator.schedulers.interface import LONGEST_LEAP, Traits
from simulator.schedulers.limits import DEFAULT_LIMITS, Limits
from simulator.schedulers.running_requests import PreemptionLoop, RunningRequests


class SchedulerBase:
    """Takes requests in, first come, first served, and lets them end; `schedule` is a subclass'.

    `limits` are the engine's knobs. `features` are what the engine has beside: each has its say in
    what is admitted and computed.
    """

    traits: ClassVar[Traits] = Traits()
    options_type: ClassVar[type | None] = None
    """A dataclass of its arguments, `options`, where they are many; None: they are keywords."""
    running_type: ClassVar[type[RunningRequests]] = RunningRequests
    """What the running list is made of."""
    refuses_long: ClassVar[bool] = False
    """A prompt that is not split, and longer than a step, is refused."""

    def __init__(
        self,
        blocks: BlockCounter,
        limits: Limits = DEFAULT_LIMITS,
        *,
        features: Sequence[Feature] = (),
    ) -> None:
        self.limits = limits
        self.door: Door | None = None  # keeps requests out beyond the limits of the queue
        self.blocks = blocks
        self.tier = blocks.tier
        self.features = features
        self.waiting: WaitingQueue = Fifo()
        self.running = self.running_type(blocks, PreemptionLoop(type(self).__name__))
        self.now = 0.0  # of the last call of `schedule`
        self.preempted = 0  # by the last call of `schedule`
        self.ended = True  # the last outcome may have ended somebody
        self._ahead = 0 if self.traits.overlaps else 1
        self.kept_tokens = 0  # in the blocks of requests that do not run
        self.delivers_together = False  # answers are given when a batch is over, not each by itself
        self.drafts = bytearray()  # rows of log.DRAFT
        self.seat_rows: bytearray | None = None  # of log.SEAT; None: who has ended keeps no seat
        self.max_num_seqs = limits.max_num_seqs
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.max_model_len = limits.max_model_len
        self.enable_chunked_prefill = limits.enable_chunked_prefill
        self.swap_space = SwapSpace(limits.swap_blocks, blocks.block_size, limits.swap_prices)
        # There are blocks for every request that max_model_len admits.
        self._longest_fits = blocks.most_held(limits.max_model_len - 1) <= blocks.usable
        self._check()

    def _check(self) -> None:
        tokens, longest = self.max_num_batched_tokens, self.max_model_len
        seqs = self.max_num_seqs
        if seqs < 1 or tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be >= max_num_seqs ({seqs}) and that >= 1"
            )
        if not (self.enable_chunked_prefill or self.refuses_long) and tokens < longest:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be >= max_model_len ({longest}) without "
                "chunked prefill"
            )

    @property
    def awaits_transfer(self) -> bool:
        """Something comes from outside that lets waiting requests go on."""
        return False

    @property
    def copies(self) -> bool:
        """Blocks are on their way, which the engine looks for though nothing runs."""
        return False

    @property
    def num_seats(self) -> int:
        """Requests that a batch has room for."""
        return self.max_num_seqs

    @property
    def decodes(self) -> DecodeSet:
        """Those who decode; a policy that counts tokens puts a set of its own here."""
        return self.running.decodes

    @decodes.setter
    def decodes(self, decodes: DecodeSet) -> None:
        self.running.decodes = decodes

    def track_longest(self) -> None:
        """Let steps say how much their longest decode reads; here none does."""

    # Requests come.

    def fits(self, request: Request) -> bool:
        """Say whether the request could ever run: vLLM refuses a prompt without room to answer.

        A request that needs more blocks than there are would be preempted for ever.
        """
        if request.prompt_tokens >= self.max_model_len:
            return False
        if self.features and not all(feature.fits(request) for feature in self.features):
            return False
        if self._longest_fits:
            return True
        tokens = request.prompt_tokens + self.output_limit(request) - 1
        return self.blocks.most_held(tokens) <= self.blocks.usable

    @property
    def room(self) -> str:
        """What `fits` compares a request with, in words."""
        for feature in self.features:
            if feature.room:
                return f"the KV cache, or {feature.room}"
        return f"the {self.blocks.usable:,} KV blocks of {self.blocks.block_size} tokens"

    def output_limit(self, request: Request) -> int:
        """Return the output tokens after which a request ends, or is ended."""
        most, tokens = request.max_tokens, request.output_tokens
        room = self.max_model_len - request.prompt_tokens
        if most and most < room:
            room = most
        return tokens if tokens < room else room

    def add(self, request: Request) -> bool:
        """Take a new request; say whether the next step may differ for it."""
        return self.enqueue(request) and len(self.running) < self.max_num_seqs

    def enqueue(self, request: Request) -> bool:
        """Let a request wait; say whether the head of the queue may be another."""
        request.output_limit = self.output_limit(request)
        for feature in self.features:
            feature.on_add(request)
        self.running.loop.arrived()
        return self.waiting.add(request)

    def next_wakeup(self) -> float | None:
        """Return the time at which a step becomes possible though nothing happens until then."""
        return None

    # A step is decided.

    def schedule(self, now: float) -> Step:
        """Decide the next forward pass. An empty step means that there is nothing to do."""
        raise NotImplementedError

    def decode_all(self, step: Step) -> int:
        """Let everybody in the decode set decode; return the tokens that this takes."""
        decodes = self.running.decodes
        count = decodes.count
        if count:
            self.blocks.take_ticks(decodes, 1)
            step.decodes += count
            step.context += decodes.context + count
        return count

    def schedule_tokens(self, step: Step, request: Request, tokens: int) -> None:
        """Let a running request outside the decode set compute `tokens` more."""
        if request.generated and request.pending == 1:
            step.add_single(request, request.computed, tokens)
        else:
            step.prefills.append(Chunk(request, request.computed, tokens))
        self.blocks.extend(request, request.computed + tokens)

    def chunk(self, pending: int, budget: int) -> int:
        """Return the tokens of a prompt that the budget lets a step compute; 0: it must wait."""
        if pending > budget:
            return budget if self.enable_chunked_prefill else 0
        return pending

    def admit_head(self, step: Step, hits: Sequence[int], start: int, tokens: int) -> None:
        """Let the head of the queue run, and compute `tokens` tokens after the first `start`."""
        request = self.waiting.take()
        self.start(request)
        self.blocks.admit(request, hits, start + tokens)
        if request.preemptions == 0:
            request.cached = start
        else:
            self.running.resume(request, self.now, start)
        if request.swapped:
            self.swap_space.swap_in(step, request, len(hits))
            if request.generated and tokens == 1 and not request.pending:
                step.add_single(request, start)
                return
        step.prefills.append(Chunk(request, start, tokens))

    def start(self, request: Request) -> None:
        """Put a request that is admitted on the running list."""
        self.running.admit(request, self.now)
        for feature in self.features:
            feature.on_admit(request)

    # Requests go.

    def swap_out(self, request: Request, given: int = 0) -> None:
        """Have a victim's blocks copied to the host, if there is room.

        Of its tokens the last `given` were to be computed by this step, and are not.
        """
        if self.swap_space.free:
            self.swap_space.swap_out(request, self.decodes.computed(request) - given)

    def preempt(self, request: Request) -> None:
        """Put a running request back into the queue, without its blocks."""
        self.running.evict(request, self.now)
        for feature in self.features:
            feature.on_leave(request)
        self.preempted += 1
        self.waiting.put_back(request)

    def cancel(self, request: Request) -> None:
        """Let a request go for good, between two steps: nobody wants its answer any more."""
        self.blocks.finished(request)
        for feature in self.features:
            feature.on_leave(request)
        if request in self.running:
            self.running.discard(request)
            self.blocks.release(request)
            return
        self.waiting.remove(request)
        self.running.forget(request)
        if request.swapped:
            self.swap_space.discard(request)

    def abandoned(self, request: Request) -> bool:
        """Hear that nobody wants a request any more; say whether it has to stay for all that."""
        return False

    def forget(self, request: Request) -> None:
        """Hear that nobody wants what a request that has just ended leaves behind."""

    # A step is over.

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        """Apply the outcome of `step`, repeated once per end time; return who finished."""
        decodes = self.running.decodes
        now = ends[-1]
        for feature in self.features:
            feature.on_commit(step, ())
        if step.decodes and decodes.count:
            ticks = len(ends)
            if ticks > 1:
                self.take_ticks(ticks - 1, 1)
            over = decodes.advance(ticks)
        else:
            over = []
        if step.singles:
            for chunk in step.singles:
                self._emit(chunk.request, now, over)
        for chunk in step.prefills:
            request = chunk.request
            if self.blocks.caches_chunks:
                self.blocks.cache(request)
            if request.computed == request.padding + request.prompt_tokens + request.generated:
                self._emit(request, now, over)
        if over:
            over.sort(key=by_admission)  # blocks are freed in the order of the running list
            for request in over:
                self.finish(request, now)
        return over

    def _emit(self, request: Request, now: float, over: list[Request]) -> None:
        """Bring out the token of a request outside the decode set."""
        request.generated += 1
        self.running.decodes.emitted(request)
        request.run_start = now
        if request.first_token < 0:
            request.first_token = now
        self.running.start_decoding(request)
        if request.generated == request.output_limit:
            over.append(request)

    def finish(self, request: Request, now: float) -> None:
        """End a request and free what it holds."""
        self.running.remove(request)
        request.finish = now
        for feature in self.features:
            feature.on_leave(request)
        self.free_blocks(request)
        if self.blocks.tier is not None:
            self.blocks.finished(request)

    def free_blocks(self, request: Request) -> None:
        """Take back the blocks of a request that has ended."""
        self.blocks.release(request)

    def close(self, request: Request) -> None:
        """Bring a running request up to date, when the run is stopped before its end."""
        if request.joined >= 0:
            self.running.stop_decoding(request)

    # A step repeats itself.

    def horizon(self, step: Step) -> int:
        """Count how often `step`, just scheduled, is sure to repeat if nobody arrives."""
        decodes = self.running.decodes
        if step.prefills or step.singles or self.running.partial or not self.blocks.leaps:
            return 1
        if self.preempted or not decodes.count or (self.waiting and self._may_fit()):
            return 1
        for feature in self.features:
            if feature.pending:
                return 1
        ahead = self._ahead  # where steps overlap, this one's tick is counted
        more = min(decodes.ticks_to_end(), LONGEST_LEAP) - ahead
        free = self.blocks.free - self.traits.headroom
        if more > 0 and decodes.count * ((more + 1) // decodes.block_size + 1) > free:
            more = decodes.affords(free, more, ahead)
        return 1 + more

    def _may_fit(self) -> bool:
        """Say whether somebody who waits may fit after a step in which nothing but decodes happens.

        Blocks registered meanwhile, which have names, may let the head of the queue fit, or another
        may be the head. Unnamed blocks only get fewer. Of its own the head finds no more as time
        goes by, and no block less than the decodes have taken: what it lacks does not shrink.
        """
        moves = self.waiting.moves and len(self.running) < self.max_num_seqs
        return self.blocks.names_blocks or moves

    def take_ticks(self, ticks: int, skip: int) -> None:
        """Let `ticks` more steps of decodes take their blocks, beginning `skip` ticks from now."""
        self.blocks.take_ticks(self.running.decodes, ticks, skip)

    def repeat(self, ticks: int) -> None:
        """Schedule the step just scheduled so many times more; only where steps overlap."""
        raise NotImplementedError

    def leap_blocks(self, ticks: int) -> list[int]:
        """Count by how many blocks each repeat of the step to be committed adds to those in use."""
        return self._count_growth(ticks, 1)

    def _count_growth(self, ticks: int, skip: int) -> list[int]:
        """Count the blocks that ticks take, `skip` ticks from now, beyond those reserved."""
        blocks, taken = self.blocks, self.running.decodes.growth(ticks, skip)
        spare = blocks.used - blocks.usable + blocks.free if blocks.reserved else 0
        if not spare:
            return taken
        beyond = [max(sum_ - spare, 0) for sum_ in accumulate(taken, initial=0)]
        return [later - before for before, later in pairwise(beyond)]

    # What is written down of a step.

    def account(self, step: Step) -> StepRow:
        """Return what the log says of `step`, just scheduled: the columns of `STEP_ROW`."""
        blocks, prefills, wasted = self.blocks, step.prefills, step.padding
        tokens, pairs, decodes = -wasted, 0, step.decodes
        for chunk in prefills:
            size = chunk.tokens
            tokens += size
            pairs += size * (size + 1 + 2 * chunk.start) // 2
        for feature in self.features:
            tokens = feature.count(step, tokens)
        if step.ghosts:
            wasted += step.ghosts
            decodes -= step.ghosts
        return (
            step.context,
            pairs,
            self.stored(step),
            tokens,
            decodes,
            wasted,
            len(self.running),
            len(self.waiting),
            blocks.used if blocks.reserved else blocks.usable - blocks.free,
            len(prefills),
            self.preempted,
        )

    def stored(self, step: Step) -> int:
        """Tokens that somebody needs in the blocks in use while `step`, just scheduled, runs."""
        running = self.running
        decodes = running.decodes
        tokens = decodes.context + self.kept_tokens
        if step.decodes:
            tokens += decodes.count
        for request in running.partial:
            tokens += request.computed
        return self.blocks.in_use(tokens)
