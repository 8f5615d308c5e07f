"""SGLang: prompts first, ordered by what the prefix cache knows, and a guess at what decodes will
still need, which is put right by retracting some."""

from collections.abc import Callable, Hashable, Sequence
from heapq import heappop, heappush
from random import Random

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.kv_cache.radix_cache import pieces_of
from simulator.policies.waiting_queues import Fifo
from simulator.schedulers.continuous_batching import ContinuousBatching, MaxNewTokens
from simulator.util.from_mapping import check_least, check_range, raise_if

INIT_RATIO, MIN_FACTOR, DECAY_STEPS = 0.7, 0.14, 600
"""`default_init_new_token_ratio` and the like in SGLang's `global_config.py`."""
CLIP_MAX_NEW_TOKENS = 4096  # tokens; CLIP_MAX_NEW_TOKENS_ESTIMATION
RETRACT_STEPS = 20  # `retract_decode_steps`
LPM_MAX_QUEUE = 128  # requests from which on lpm does not pay
IN_BATCH_PREFIX_TOKENS = 32  # tokens; IN_BATCH_PREFIX_CACHING_*_THRESHOLD
ORDERS = ("lpm", "fcfs", "random")


class RetractedLast(Fifo):
    """First come, first served; a retracted request queues up again."""

    def put_back(self, request: Request) -> None:
        self.append(request)


class SgLang(ContinuousBatching):
    """The scheduler of SGLang 0.4.6 (`scheduler.py`, `schedule_policy.py`, `schedule_batch.py`).

    - A step is either prompts or decodes. As long as prompts fit, decodes wait. One step holds at
      most `max_num_batched_tokens` (`chunked_prefill_size`) tokens of prompts, of which the last
      is split, and takes no new prompt once it has `max_prefill_tokens`.
    - `order` lpm takes those first of whose prompt the cache knows most, while at most 128 wait;
      of several that begin alike with 32 tokens and that the cache does not know, one. Without a
      prefix cache, or with more in the queue, it is fcfs, the default of SGLang since 0.4.
      `random` shuffles, with `seed`.
    - A prompt fits while its tokens and those of the answer that it may have (`max_new_tokens`, at
      most 4,096) are less than the free tokens less `ratio` of what all who decode may still
      bring out.
      The ratio begins at 0.7 x `schedule_conservativeness` and falls in 600 steps of decodes to
      0.14 of that.
    - Once one did not fit, none is tried until somebody ends.
    - When the decodes lack a block, those with the fewest tokens out are retracted, the longest
      prompt first, until the rest have room for 20 tokens each; they queue up again behind all
      others, and the ratio becomes what it takes in the mean.

    Headway leaves out the overlap of scheduling with the GPU, mixed chunks, and the other orders
    (lof, dfs-weight).
    """

    caches_prefixes = True
    decodes: "RemainingTokens"

    def __init__(
        self,
        blocks: BlockCounter,
        *,
        order: str = "lpm",
        schedule_conservativeness: float = 1.0,
        max_prefill_tokens: int = 16384,
        max_new_tokens: MaxNewTokens = None,
        seed: int = 0,
        max_num_seqs: int = 2048,
        max_num_batched_tokens: int = 8192,
        max_model_len: int = 8192,
    ) -> None:
        raise_if(
            (order not in ORDERS, f"order: must be {', '.join(ORDERS)}, not {order!r}"),
            check_range("schedule_conservativeness", schedule_conservativeness, 0, 1000),
            check_least("max_prefill_tokens", max_prefill_tokens, 1),
        )
        super().__init__(
            blocks, max_num_seqs, max_num_batched_tokens, max_model_len, max_new_tokens
        )
        self.decodes = RemainingTokens(
            blocks.block_size, blocks.names_blocks, self.allowed_output, CLIP_MAX_NEW_TOKENS
        )
        self.queue = self.waiting = RetractedLast()
        self.order = order
        self.max_prefill_tokens = max_prefill_tokens
        self._caching = blocks.prefix_caching
        self.full = False  # somebody did not fit, and nobody has ended since
        self._init_ratio = min(INIT_RATIO * schedule_conservativeness, 1.0)
        self._min_ratio = min(self._init_ratio * MIN_FACTOR, 1.0)
        self._ratio = self._init_ratio  # at the last retraction
        self._decayed = 0  # steps of decodes since
        self._random = Random(seed)

    @property
    def ratio(self) -> float:
        """The share of their remaining tokens that those who decode are expected to bring out."""
        fall = (self._init_ratio - self._min_ratio) / DECAY_STEPS * self._decayed
        return max(self._ratio - fall, self._min_ratio)

    def add(self, request: Request) -> bool:
        super().add(request)
        return not self.full

    def fill(self, step: Step) -> None:
        if self.running.partial or (self.waiting and not self.full):
            self._prefill(step)
        if step.prefills:
            return
        if not self.decodes.count:
            self._ratio, self._decayed = self._init_ratio, 0
            return
        if self.decodes.blocks(1) > self.blocks.free:
            self._retract()
        else:
            self._decayed += 1
        self.decode_all(step)

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        self._decayed += len(ends) - 1
        return super().commit(step, ends)

    def finish(self, request: Request, now: float) -> None:
        super().finish(request, now)
        self.full = False

    def _prefill(self, step: Step) -> None:
        """Let the split prompt go on, then admit others in order."""
        size, blocks = self.blocks.block_size, self.blocks
        held = self.ratio * self.decodes.remaining()  # tokens
        chunk, prompts = self.max_num_batched_tokens, self.max_prefill_tokens
        for request in self.running.partial:
            tokens = min(request.pending, chunk)
            self.schedule_tokens(step, request, tokens)
            held += 0 if request.pending else self._expected_output(request)
            chunk -= tokens
            prompts -= tokens
        if self.waiting and not self.full:
            self._sort_queue()
        while self.waiting and not self.full and chunk > 0 and prompts > 0:
            request = self.waiting.head()
            hits = blocks.match(request)
            need = blocks.missing(request.known, hits) * size + self._expected_output(request)
            room = blocks.free * size - held
            # Who is alone needs no more than its blocks.
            if len(self.running) >= self.max_num_seqs or (self.running and need >= room):
                self.full = True
                break
            tokens = request.known - len(hits) * size
            if tokens > prompts and step.prefills:
                break
            self.admit_head(step, hits, len(hits) * size, min(tokens, chunk))
            held += 0 if request.pending else self._expected_output(request)
            prompts -= tokens
            chunk -= tokens

    def _expected_output(self, request: Request) -> int:
        """Guess the tokens that a request which is admitted may still bring out."""
        return min(self.allowed_output(request), CLIP_MAX_NEW_TOKENS)

    def _sort_queue(self) -> None:
        """Put the waiting queue in order."""
        if self.order == "random":
            self._random.shuffle(self.queue)
        elif self.order == "lpm" and self._caching and len(self.queue) <= LPM_MAX_QUEUE:
            seen: set[Hashable] = set()
            found = {request: self._matched_tokens(request, seen) for request in self.queue}
            ordered = sorted(self.queue, key=lambda request: -found[request])
            self.queue.clear()
            self.queue.extend(ordered)

    def _matched_tokens(self, request: Request, seen: set[Hashable]) -> float:
        """Give the tokens that the cache knows; infinitely few for whom another computes them."""
        tokens = len(self.blocks.match(request)) * self.blocks.block_size
        if tokens <= IN_BATCH_PREFIX_TOKENS <= request.known:
            start = tuple(pieces_of(request, IN_BATCH_PREFIX_TOKENS))
            if start in seen:
                return float("-inf")
            seen.add(start)
        return tokens

    def _retract(self) -> None:
        """Send away those with the least to lose, until the others have room for a while."""
        size, blocks = self.blocks.block_size, self.blocks
        out = {request: self.decodes.generated(request) for request in self.running}
        order = sorted(out, key=lambda request: (out[request], -request.prompt_tokens))
        for victim in order[:-1]:
            self.preempt(victim)
            enough = blocks.free * size >= len(self.running) * RETRACT_STEPS
            if enough and self.decodes.blocks(1) <= blocks.free:
                break
        expected = sum(out[request] + RETRACT_STEPS for request in self.running)
        self._ratio = min(1.0, expected / sum(map(self.allowed_output, self.running)))
        self._decayed = 0
        self.full = False


class RemainingTokens(DecodeSet):
    """A decode set that adds up the tokens its members may still bring out, `most` of each at most.

    `allowed(request)` is the most that a request may have in all. What a member has left falls by
    one a tick, once it is `most` or less: so those who are near their end are a sum and a count,
    and of the others a heap tells who comes near next.
    """

    def __init__(
        self, block_size: int, by_phase: bool, allowed: Callable[[Request], int], most: int
    ) -> None:
        super().__init__(block_size, by_phase)
        self._allowed, self._most = allowed, most
        self._last: dict[Request, int] = {}  # the tick at which a member has brought out all it may
        self._far: list[tuple[int, int, Request]] = []  # (end, admission, request), a heap
        self._near: dict[Request, None] = {}
        self._sum = 0  # of the ends of those near

    def join(self, request: Request, ticks: int) -> None:
        super().join(request, ticks)
        end = self._last[request] = self.tick + self._allowed(request) - request.generated
        heappush(self._far, (end, request.admission, request))

    def leave(self, request: Request) -> int:
        end = self._last.pop(request)
        if request in self._near:
            del self._near[request]
            self._sum -= end
        return super().leave(request)

    def remaining(self) -> int:
        """Add up the tokens that the members may still bring out."""
        far, near = self._far, self._near
        while far and far[0][0] - self.tick <= self._most:
            end, _, request = heappop(far)
            if self._last.get(request) == end and request not in near:  # else it has left since
                near[request] = None
                self._sum += end
        return self._sum - len(near) * self.tick + (self.count - len(near)) * self._most
