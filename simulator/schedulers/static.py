"""Static batching: a batch is admitted and runs until its longest member ends, then the next one.

As in the textbooks, and as `generate` of Hugging Face in a loop.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, get_args

from simulator.core.log import pack_seat
from simulator.core.request import Chunk, Request, Step
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.interface import Traits
from simulator.schedulers.limits import BUDGET, DEFAULT_LIMITS, SIZES, Limits
from simulator.util.errors import MappingError
from simulator.util.from_mapping import raise_if

NEVER = 1 << 60  # ticks
LONGEST_TIMEOUT = 1_000_000  # s

Deliver = Literal["batch", "each"]


class Static(SchedulerBase):
    """Static batching: a batch starts when `batch_size` requests wait (null, and at most:
    max_num_seqs), or `timeout` seconds after the oldest came, and runs until its longest member
    ends. `deliver: each` streams answers, `batch` delivers all at the batch's end.

    A batch of `batch_size`, or what has come `timeout` seconds after the oldest arrived.

    The prompts are padded in front to the longest of the batch and computed first, in steps of at
    most `max_num_batched_tokens`; then all members decode together. A member that ends keeps its
    place: as a ghost it costs what the others cost until the last one ends (Hugging Face
    `generate`, FasterTransformer; Orca, OSDI 2022, section 3). A batch takes only as many as fit
    into the blocks with their padding. Should blocks run out all the same, the last admitted
    leaves and is computed again in a later batch. There is no prefix cache.

    `deliver: each` streams: a token is given as it is computed. `deliver: batch` gives an answer
    when its place is free again, whole, so that its TTFT is its E2EL, and its TPOT and ITL are 0.

    `batch_size` is `max_num_seqs` unless given.
    """

    traits = Traits(caches_prefixes=False, obeys=BUDGET)

    def __init__(
        self,
        blocks: BlockCounter,
        limits: Limits = DEFAULT_LIMITS,
        *,
        batch_size: Annotated[int | None, "requests"] = None,
        timeout: Annotated[float, "s"] = 0.1,
        deliver: Deliver = "each",
    ) -> None:
        super().__init__(blocks, limits)
        if isinstance(blocks, BlockManager) and blocks.prefix_caching:
            raise MappingError("blocks", "static batching has no prefix cache")
        max_num_seqs = limits.max_num_seqs
        batch_size = max_num_seqs if batch_size is None else batch_size
        raise_if(
            (
                not 1 <= batch_size <= max_num_seqs,
                "batch_size",
                f"must be from 1 to max_num_seqs ({max_num_seqs}), not {batch_size}",
            ),
            (
                not 0 <= timeout <= LONGEST_TIMEOUT,
                "timeout",
                f"must be from 0 to {LONGEST_TIMEOUT:,} seconds, not {timeout}",
            ),
            (
                deliver not in get_args(Deliver),
                "deliver",
                f"must be batch or each, not {deliver!r}",
            ),
        )
        self.batch_size = batch_size
        self.timeout = timeout
        self.unfinished = 0  # members that have not ended
        self.delivers_together = deliver == "batch"
        self.seat_rows = bytearray()
        self._ended: dict[Request, tuple[float, int]] = {}  # since when (s), after which step
        self._freed: list[Request] = []  # whose seats the step that is over has freed
        self._prompt_steps = 0  # of the batch
        self._formed = 0  # the tick at which the batch was formed
        self._stored = 0  # tokens of the live members, those of ticks since then left out

    @property
    def num_seats(self) -> int:
        return self.batch_size

    def add(self, request: Request) -> bool:
        super().add(request)
        return False  # a batch under way takes nobody

    def next_wakeup(self) -> float | None:
        if self.running or not self.waiting:
            return None
        return self.waiting.head().arrival + self.timeout

    def schedule(self, now: float) -> Step:
        """Decide the next forward pass: of prompts as long as there are any, else of decodes."""
        step = Step([])
        self.now = now
        if not self.running:
            due = self.next_wakeup()
            if due is None or (now < due and len(self.waiting) < self.batch_size):
                return step
            self._form_batch()
        if self.running.partial:
            self._prefill(step)
        else:
            self.decode_all(step)
            step.ghosts = step.decodes - self.unfinished
        return step

    def _form_batch(self) -> None:
        """Admit a batch: as many as fit when padded to the longest."""
        size = self.blocks.block_size
        members: list[Request] = []
        longest = 0
        while self.waiting and len(members) < self.batch_size:
            tokens = max(longest, self.waiting.head().known)
            if (len(members) + 1) * -(-tokens // size) > self.blocks.free:
                break
            longest = tokens
            members.append(self.waiting.take())
        for request in members:
            request.padding = longest - request.known
            self.start(request)
            if request.preemptions:
                self.running.resume(request, self.now, 0)
            self.blocks.admit(request, (), 0)
        self.unfinished = len(members)
        self._formed, self._prompt_steps = self.decodes.tick, 0
        self._stored = 0

    def _prefill(self, step: Step) -> None:
        budget = self.max_num_batched_tokens
        for request in self.running.partial:
            if not budget:
                break
            start = request.computed
            tokens = min(request.pending, budget)
            padding = max(0, min(request.padding, start + tokens) - start)
            step.prefills.append(Chunk(request, start, tokens))
            step.padding += padding
            self._stored += tokens - padding
            self.blocks.extend(request, start + tokens)
            budget -= tokens

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        """Apply the outcome of `step`, repeated once per end time; return whose answers are given.

        Here members are preempted that lack a block for the next step, and the batch ends: so an
        answer that waits for the batch is given at the very time.
        """
        self.now = ends[-1]
        self.preempted = 0
        self._prompt_steps += bool(step.prefills)
        over = super().commit(step, ends)
        if not self.running.partial:
            while self.unfinished and self.decodes.blocks(1) > self.blocks.free:
                self.preempt(self.running.last())
            if not self.unfinished:
                for request in list(self.running):
                    self._free_seat(request)
        freed, self._freed = self._freed, []
        return freed if self.delivers_together else over

    def finish(self, request: Request, now: float) -> None:
        """Let a member end but keep its place until the last one has ended."""
        self._leave(request)
        self.running.stop_decoding(request)
        if not self.delivers_together:
            request.finish = now
        self._ended[request] = now, self._steps
        self.decodes.join(request, NEVER)

    def _leave(self, request: Request) -> None:
        """Count a live member no longer."""
        self.unfinished -= 1
        self._stored -= request.computed - request.padding

    @property
    def _steps(self) -> int:
        """Steps of the batch so far."""
        return self._prompt_steps + self.decodes.tick - self._formed

    def _free_seat(self, request: Request) -> None:
        """Take the place of a member that has ended."""
        end, steps = self._ended.pop(request)
        times, idle = (request.first_token, end, self.now), self._steps - steps
        assert self.seat_rows is not None
        self.seat_rows += pack_seat(*times, request.id, self._steps, idle)
        if self.delivers_together:
            request.first_token = request.finish = self.now
            self._freed.append(request)
        self.running.discard(request)
        self.blocks.release(request)

    def preempt(self, request: Request) -> None:
        if request in self._ended:
            self._free_seat(request)
        else:
            self._leave(request)
            super().preempt(request)

    def abandoned(self, request: Request) -> bool:
        """A batch computes its members to their end, whoever has hung up."""
        return request in self.running

    def close(self, request: Request) -> None:
        if request not in self._ended:
            super().close(request)
        if self.delivers_together:
            request.first_token = -1.0  # nobody has got it

    def stored(self, step: Step) -> int:
        ticks = self.decodes.tick - self._formed + bool(step.decodes)
        return self._stored + self.unfinished * ticks


class HfStatic(Static):
    """Hugging Face `generate` in a loop: static batching without a timeout, each batch of
    prompts in one pass; `batch_size` null is 8.

    `model.generate` of transformers on up to `batch_size` (8) requests at a time, in order.

    Whoever waits when a batch is over makes up the next one, without a timeout. Prompts are
    padded in front to the longest, all in one forward pass whatever its size, and every member is
    paid for until the longest answer has ended (`GenerationMixin`, transformers 4). `generate`
    returns all answers of a batch together, as `deliver: batch` does; `each` stands for a streamer.
    """

    traits = replace(Static.traits, obeys=SIZES)

    def __init__(
        self,
        blocks: BlockCounter,
        limits: Limits = DEFAULT_LIMITS,
        *,
        batch_size: Annotated[int | None, "requests"] = None,
        deliver: Deliver = "each",
    ) -> None:
        never_reached = limits.max_num_seqs * limits.max_model_len
        super().__init__(
            blocks,
            replace(limits, max_num_batched_tokens=never_reached),
            deliver=deliver,
            batch_size=min(8, limits.max_num_seqs) if batch_size is None else batch_size,
            timeout=0.0,
        )
