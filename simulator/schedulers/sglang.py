"""SGLang: prompts first, ordered by what the prefix cache knows, and a guess at what decodes will
still need, which is put right by retracting some."""

from collections.abc import Hashable, Sequence
from random import Random

from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.kv_cache.radix_cache import pieces_of
from simulator.policies.waiting_queues import Fifo
from simulator.schedulers.reservation import Asked, Asking
from simulator.schedulers.unsaid import Unsaid
from simulator.util.from_mapping import refuse

INIT_RATIO, MIN_FACTOR, DECAY_STEPS = 0.7, 0.14, 600
"""`default_init_new_token_ratio` and the like in SGLang's `global_config.py`."""
CLIP = 4096  # tokens; CLIP_MAX_NEW_TOKENS_ESTIMATION
RETRACT_STEPS = 20  # `retract_decode_steps`
LONG_QUEUE = 128  # requests from which on lpm does not pay
SHARED = 32  # tokens; IN_BATCH_PREFIX_CACHING_*_THRESHOLD
ORDERS = ("lpm", "fcfs", "random")


class LastComesLast(Fifo):
    """First come, first served; a retracted request queues up again."""

    def put_back(self, request: Request) -> None:
        self.append(request)


class SgLang(Asking):
    """The scheduler of SGLang 0.4.6 (`scheduler.py`, `schedule_policy.py`, `schedule_batch.py`).

    - A step is either prompts or decodes. As long as prompts fit, decodes wait. One step holds at
      most `max_num_batched_tokens` (`chunked_prefill_size`) tokens of prompts, of which the last
      is split, and takes no new prompt once it has `max_prefill_tokens`.
    - `order` lpm takes those first of whose prompt the cache knows most, while at most 128 wait;
      of several that begin alike with 32 tokens and that the cache does not know, one. Without a
      prefix cache, or with more in the queue, it is fcfs, the default of SGLang since 0.4.
      `random` shuffles, with `seed`.
    - A prompt fits while its tokens and those of the answer that it may have (`max_new_tokens`, at
      most 4,096) are less than the free tokens less `ratio` of what all who decode may still say.
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
    decodes: Unsaid

    def __init__(
        self,
        blocks: BlockCounter,
        *,
        order: str = "lpm",
        schedule_conservativeness: float = 1.0,
        max_prefill_tokens: int = 16384,
        max_new_tokens: Asked = None,
        seed: int = 0,
        max_num_seqs: int = 2048,
        max_num_batched_tokens: int = 8192,
        max_model_len: int = 8192,
    ) -> None:
        refuse(
            (order not in ORDERS, f"order: must be {', '.join(ORDERS)}, not {order!r}"),
            (
                not 0 <= schedule_conservativeness <= 1000,
                "schedule_conservativeness: must be from 0 to 1000, not "
                f"{schedule_conservativeness}",
            ),
            (
                max_prefill_tokens < 1,
                f"max_prefill_tokens: must be at least 1, not {max_prefill_tokens}",
            ),
        )
        super().__init__(
            blocks,
            max_new_tokens=max_new_tokens,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        self.decodes = Unsaid(blocks.block_size, blocks.names_blocks, self._asked, CLIP)
        self.queue: Fifo = LastComesLast()
        self.waiting = self.queue
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
        """The share of what they may still say that those who decode are expected to."""
        fall = (self._init_ratio - self._min_ratio) / DECAY_STEPS * self._decayed
        return max(self._ratio - fall, self._min_ratio)

    def add(self, request: Request) -> bool:
        super().add(request)
        return not self.full

    def _compose(self, step: Step, now: float) -> None:
        if self.partial or (self.waiting and not self.full):
            self._prefill(step, now)
        if step.prefills:
            return
        if not self.decodes.count:
            self._ratio, self._decayed = self._init_ratio, 0
            return
        if self.decodes.blocks(1) > self.blocks.free:
            self._retract()
        else:
            self._decayed += 1
        self._decode(step)

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        self._decayed += len(ends) - 1
        return super().commit(step, ends)

    def _finish(self, request: Request, now: float) -> None:
        super()._finish(request, now)
        self.full = False

    # ------------------------------------------------------------ prompts

    def _prefill(self, step: Step, now: float) -> None:
        """Let the split prompt go on, then others board in order."""
        size, blocks = self.blocks.block_size, self.blocks
        held = self.ratio * self.decodes.unsaid()  # tokens
        chunk, prompts = self.max_num_batched_tokens, self.max_prefill_tokens
        for request in self.partial:
            tokens = min(request.pending, chunk)
            self._give(step, request, tokens)
            held += 0 if request.pending else self._answer(request)
            chunk -= tokens
            prompts -= tokens
        if self.waiting and not self.full:
            self._sort()
        while self.waiting and not self.full and chunk > 0 and prompts > 0:
            request = self.waiting.head()
            hits = blocks.match(request)
            need = blocks.missing(request.known, hits) * size + self._answer(request)
            room = blocks.free * size - held
            # Who is alone needs no more than its blocks.
            if len(self.running) >= self.max_num_seqs or (self.running and need >= room):
                self.full = True
                break
            tokens = request.known - len(hits) * size
            if tokens > prompts and step.prefills:
                break
            self._admit(step, request, hits, min(tokens, chunk), now)
            held += 0 if request.pending else self._answer(request)
            prompts -= tokens
            chunk -= tokens

    def _answer(self, request: Request) -> int:
        """Guess the tokens that a request who boards may still say."""
        return min(self._asked(request), CLIP)

    def _said(self) -> dict[Request, int]:
        """Give the tokens that have come out, by running request."""
        tick = self.decodes.tick
        return {
            request: request.generated + (tick - request.joined if request.joined >= 0 else 0)
            for request in self.running
        }

    def _sort(self) -> None:
        """Put the waiting queue in order."""
        if self.order == "random":
            self._random.shuffle(self.queue)
        elif self.order == "lpm" and self._caching and len(self.queue) <= LONG_QUEUE:
            seen: set[Hashable] = set()
            found = {request: self._match(request, seen) for request in self.queue}
            ordered = sorted(self.queue, key=lambda request: -found[request])
            self.queue.clear()
            self.queue.extend(ordered)

    def _match(self, request: Request, seen: set[Hashable]) -> float:
        """Give the tokens that the cache knows; infinitely few for whom another computes them."""
        tokens = len(self.blocks.match(request)) * self.blocks.block_size
        if tokens <= SHARED <= request.known:
            start = tuple(pieces_of(request, SHARED))
            if start in seen:
                return float("-inf")
            seen.add(start)
        return tokens

    # ------------------------------------------------------------ decodes

    def _retract(self) -> None:
        """Send away those with the least to lose, until the others have room for a while."""
        size, blocks = self.blocks.block_size, self.blocks
        said = self._said()
        order = sorted(said, key=lambda request: (said[request], -request.prompt_tokens))
        for victim in order[:-1]:
            self._preempt(victim)
            enough = blocks.free * size >= len(self.running) * RETRACT_STEPS
            if enough and self.decodes.blocks(1) <= blocks.free:
                break
        out = sum(said[request] + RETRACT_STEPS for request in self.running)
        self._ratio = min(1.0, out / sum(self._asked(request) for request in self.running))
        self._decayed = 0
        self.full = False
