"""The scheduler of vLLM V1: whoever runs goes on, then others board.

There is no prefill or decode phase: a request wants its computed tokens to catch up with the
known ones, and a decode is the case where one is missing. The rules are those of vLLM 0.33
(`vllm/v1/core/sched/scheduler.py`), for one engine; `speculative.py` adds drafts. The scheduler
owns no clock, no GPU and no I/O.

`running.py` goes through the running list, this module admits from the queue.
"""

from collections.abc import Callable

from simulator.core.request import Chunk, Load, Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.kv_cache.host_memory import Prices, SwapSpace
from simulator.policies.policy import Policy, victim_of
from simulator.policies.waiting_queues import Fifo, SwappedFirst, queue_of
from simulator.schedulers.vllm.admission import Admission, Reservation
from simulator.schedulers.vllm.preemption_loop import Circles
from simulator.schedulers.vllm.prefill_interval import Cadence
from simulator.schedulers.vllm.running import Running

LONGEST_LEAP = 256  # steps; bounds what is computed in vain when an arrival cuts a leap short


class Scheduler(Running):
    """Decides what each step computes.

    `policy` orders the waiting queue, None is first come, first served; if it has a method
    `victim(running)`, that picks who is preempted, else the last admitted is. The last arguments
    but `swap_blocks` are those of `Admission`, the others are vLLM's, by name. `max_model_len`, in
    tokens, ends a request whatever it still wanted to say.
    `swap_blocks` is host memory, in KV blocks: as long as a preempted request fits into it, its
    blocks are copied there and, before it runs again, back; otherwise they are computed again.
    With `swap_prices` so are those for which that is cheaper.
    """

    overlaps = False
    """A step is scheduled while the one before it runs."""
    caches_prefixes = True
    """It can work with a prefix cache."""
    reserves = False
    """Blocks for whole answers are set aside on admission."""
    cancels = True
    """`cancel` can take a request away between two steps."""
    headroom = 0
    """Blocks that must be left after a step of decodes, for it to preempt nobody."""

    displacing = False
    """A waiting request may take the place of one that runs."""
    expects = False
    """Something comes from outside that lets waiting requests go on."""

    def __init__(
        self,
        blocks: BlockCounter,
        *,
        policy: Policy | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int = 8192,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        long_prefill_token_threshold_adaptive: bool = False,
        prefill_schedule_interval: int = 1,
        scheduler_reserve_full_isl: bool = True,
        watermark: float = 0.0,
        min_decode_blocks: int = 0,
        reserve_output_tokens: Reservation | None = None,
        swap_blocks: int = 0,
        swap_prices: Prices | None = None,
    ) -> None:
        super().__init__(blocks, Fifo())
        self._settle: Callable[[float], None] | None = None
        self._refresh: Callable[[float], None] | None = None
        if policy is not None:
            queue = queue_of(policy, self)
            self._settle = getattr(queue, "settle", None)
            self._refresh = getattr(queue, "refresh", None)
            self.waiting = SwappedFirst(queue) if swap_blocks else queue
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.long_prefill_token_threshold_adaptive = long_prefill_token_threshold_adaptive
        self.admission = Admission(
            blocks,
            max_model_len,
            scheduler_reserve_full_isl=scheduler_reserve_full_isl,
            watermark=watermark,
            min_decode_blocks=min_decode_blocks,
            reserve_output_tokens=reserve_output_tokens,
        )
        self.swap_space = SwapSpace(swap_blocks, blocks.block_size, swap_prices)
        self._victim = victim_of(policy)
        self._circles = Circles(type(self if policy is None else policy).__name__)
        self._cadence = (
            Cadence(prefill_schedule_interval) if prefill_schedule_interval > 1 else None
        )
        self._check()

    def _check(self) -> None:
        tokens, seqs, longest = self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len
        if seqs < 1 or tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be >= max_num_seqs ({seqs}) and that >= 1"
            )
        if not self.enable_chunked_prefill and tokens < longest:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be >= max_model_len ({longest}) without "
                "chunked prefill"
            )

    def fits(self, request: Request) -> bool:
        """Say whether the request could ever run: vLLM refuses a prompt without room to answer.

        A request that needs more blocks than there are would be preempted for ever.
        """
        if request.prompt_tokens >= self.max_model_len:
            return False
        tokens = request.prompt_tokens + self._max_tokens(request) - 1
        return -(-tokens // self.blocks.block_size) <= self.blocks.usable

    @property
    def room(self) -> str:
        """What `fits` compares a request with, in words."""
        return f"the {self.blocks.usable:,} KV blocks of {self.blocks.block_size} tokens"

    def _max_tokens(self, request: Request) -> int:
        return min(request.output_tokens, self.max_model_len - request.prompt_tokens)

    def add(self, request: Request) -> bool:
        """Take a new request; say whether the next step may differ for it."""
        request.max_tokens = self._max_tokens(request)
        self._circles.arrived()
        # Where a cap on chunks depends on how many are present, the head may fit from now on.
        changes = self.waiting.add(request) or self.long_prefill_token_threshold > 0
        return changes and (
            len(self.running) < self.max_num_seqs
            or self._cadence is not None
            or self._settle is not None
            or self.displacing
        )

    def wakes_at(self) -> float | None:
        """Return the time at which a step becomes possible though nothing happens until then."""
        return None

    def schedule(self, now: float) -> Step:
        """Decide the next forward pass. An empty step means that there is nothing to do."""
        self.now = now
        self.preempted = 0
        if self._settle is not None:
            self._settle(now)
        decodes, blocks = self.decodes, self.blocks
        count = decodes.count
        budget = self.max_num_batched_tokens
        cap = self._cap() if self.long_prefill_token_threshold else budget
        if self._cadence is not None:
            self._cadence.begin(self._executed, self._may_decode())
        if self.partial or count > budget or blocks.free < count:
            step = Step([])
            chunks = self._plan(cap)
            budget = self._walk(step, cap) if chunks is None else self._advance(step, chunks)
        else:  # the common case in a few words: everybody decodes, and there are blocks for all
            step = Step([], count, decodes.context + count)
            budget -= count
            if count:
                blocks.take_ticks(decodes, 1)
        if budget and not self.preempted and self.waiting:
            self._board(step, budget, cap, now)
        if self.tells_longest and step.decodes:
            step.longest = self._longest_decode(step)
        if self.swap_space.outgoing and (step.decodes or step.prefills):
            self.swap_space.send(step)  # an empty step is not carried out: then the next one sends
        if self._cadence is not None:
            self._executed += bool(step.decodes or step.prefills)
            self._cadence.end(self._executed, not self.preempted, bool(self.waiting))
        return step

    def _longest_decode(self, step: Step) -> int:
        """KV entries that a decode of the step reads at most, its new token included."""
        singles = max((chunk.start + 1 for chunk in step.singles or ()), default=0)
        members = self.decodes.longest() + 1 if step.decodes > len(step.singles or ()) else 0
        return max(singles, members)

    def repeat(self, ticks: int) -> None:
        """Schedule the step just scheduled so many times more; only where steps overlap."""
        raise NotImplementedError

    def _board(self, step: Step, budget: int, cap: int, now: float) -> None:
        """Admit from the head of the waiting queue; nobody overtakes a head that does not fit."""
        blocks, waiting, running = self.blocks, self.waiting, self.running
        cadence = self._cadence
        while budget and waiting and len(running) < self.max_num_seqs:
            request = waiting.head()
            if request.remote:
                budget = self._pull(step, request, budget, now)
                continue
            hits = blocks.match(request)
            tier = blocks.tier is not None and not request.swapped
            loads = blocks.loadable(request, hits) if tier else 0
            start = max((len(hits) + loads) * blocks.block_size, request.swapped)
            if cadence is not None and cadence.held and start < request.known - 1:
                break
            tokens = min(request.known - start, cap)
            if tokens > budget:
                if not self.enable_chunked_prefill:
                    break
                tokens = budget
            if self.admission.lacking(request, hits, start + tokens, len(running)):
                break
            waiting.take()
            self._seat(request, now)
            self.admission.board(request)
            if loads:
                blocks.load(request, hits, loads)
                step.loads = [*(step.loads or ()), Load(request, loads, request.preemptions == 0)]
            blocks.admit(request, hits, start + tokens)
            if request.preemptions == 0:
                request.cached = start
            else:
                self._come_back(request, start, len(hits) * blocks.block_size)
            if request.swapped:
                self.swap_space.swap_in(step, request, len(hits))
                if request.generated and tokens == 1 and not request.pending:
                    self._single(step, request, start)
                    budget -= 1
                    continue
            step.prefills.append(Chunk(request, start, tokens))
            if cadence is not None:
                cadence.carries |= start < request.known - 1
                request.mid_prefill = request.pending > 0
            budget -= tokens

    def _come_back(self, request: Request, start: int, found: int) -> None:
        """Write down that a preempted request is admitted again."""
        self._resume(request, start)
        if self.swap_space.prices:
            self.swap_space.observe(request.known, found)

    def _pull(self, step: Step, request: Request, budget: int, now: float) -> int:
        """Take in a head whose prompt was computed elsewhere; only in a fleet (`kv_roles.py`).

        Return the tokens left, 0 if it must wait.
        """
        raise NotImplementedError

    def _seat(self, request: Request, now: float) -> None:
        request.admission = self._seats
        self._seats += 1
        self.running[request] = None
        self.partial.append(request)
        if request.first_scheduled < 0:
            request.first_scheduled = now

    def forget(self, request: Request) -> None:
        """Hear that nobody wants what a request that has just ended leaves behind."""

    def _may_fit(self) -> bool:
        """Say whether somebody who waits may fit after a step in which nothing but decodes happens.

        Blocks registered meanwhile, which have names, may let the head of the queue fit, or another
        may be the head. Unnamed blocks only get fewer. Of its own the head finds no more as time
        goes by, and no block less than the decodes have taken: what it lacks does not shrink. Where
        it loses more at once, its first chunk ends earlier, for which fewer blocks may be enough.
        """
        moves = self.waiting.moves and len(self.running) < self.max_num_seqs
        shrinks = self.blocks.evicts_runs and not self.admission.whole_prompt
        return self.blocks.names_blocks or moves or shrinks

    def horizon(self, step: Step) -> int:
        """Count how often `step`, just scheduled, is sure to repeat if nobody arrives."""
        decodes = self.decodes
        if step.prefills or self.partial or self.preempted or not decodes.count:
            return 1
        if self.waiting and self._may_fit():
            return 1
        decodes, free = self.decodes, self.blocks.free - self.headroom
        ticks = min(decodes.ticks_to_end(), LONGEST_LEAP)
        if self._cadence is not None and self._cadence.held and self.waiting:
            ticks = min(ticks, self._cadence.left(self._executed))
        if ticks > 1 and decodes.count * (ticks // decodes.block_size + 1) > free:
            return 1 + decodes.affords(free, ticks - 1)
        return ticks
