"""Static batching, as in the textbooks: a batch boards, runs until its longest member ends, and
only then the next one boards."""

from simulator.core.log import pack_run
from simulator.core.request import Chunk, Request, Step
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.from_mapping import refuse

NEVER = 1 << 60  # ticks
LONGEST_TIMEOUT = 1_000_000  # s


class Static(Scheduler):
    """A batch of `batch_size`, or what has come `timeout` seconds after the oldest arrived.

    The prompts are padded in front to the longest of the batch and computed first, in steps of at
    most `max_num_batched_tokens`; then all members decode together. A member that ends gives its
    answer but keeps its seat: as a ghost it costs what the others cost until the last one ends
    (Hugging Face `generate`, FasterTransformer; Orca, OSDI 2022, section 3). A batch takes only
    as many as fit into the blocks with their padding. Should blocks run out all the same, the
    last to board leaves and is computed again in a later batch. There is no prefix cache.

    `batch_size` is `max_num_seqs` unless given.
    """

    caches_prefixes = False
    cancels = False

    def __init__(
        self,
        blocks: BlockCounter,
        *,
        batch_size: int | None = None,
        timeout: float = 0.1,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int = 8192,
    ) -> None:
        super().__init__(
            blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        if isinstance(blocks, BlockManager) and blocks.prefix_caching:
            raise ValueError("blocks: static batching has no prefix cache")
        if batch_size is None:
            batch_size = max_num_seqs
        refuse(
            (
                not 1 <= batch_size <= max_num_seqs,
                f"batch_size: must be from 1 to max_num_seqs ({max_num_seqs}), not {batch_size}",
            ),
            (
                not 0 <= timeout <= LONGEST_TIMEOUT,
                f"timeout: must be from 0 to {LONGEST_TIMEOUT:,} seconds, not {timeout}",
            ),
        )
        self.batch_size = batch_size
        self.timeout = timeout
        self.ready: list[Request] = []  # prompt computed, waiting for the others' prompts
        self.live = 0  # members that have not ended
        self._idle = False  # there was nothing to do when last asked
        self._stored = 0  # tokens of the live members, what they won by ticks since tick 0 left out

    def add(self, request: Request) -> bool:
        super().add(request)
        return False  # a batch under way takes nobody

    def wakes_at(self) -> float | None:
        if self.running or not self.waiting:
            return None
        return self.waiting.head().arrival + self.timeout

    def schedule(self, now: float) -> Step:
        """Decide the next forward pass: of prompts as long as there are any, else of decodes."""
        step = Step([])
        self.now = now
        if not self._idle:  # else the preemptions of a step that never was belong to this one
            self.preempted = 0
        self._idle = False
        while True:
            if not self.running:
                due = self.wakes_at()
                if due is None or (now < due and len(self.waiting) < self.batch_size):
                    self._idle = True
                    return step
                self._form(now)
            if self.partial:
                self._prefill(step)
                return step
            self._start_decoding()
            while self.decodes.blocks(1) > self.blocks.free:
                self._preempt(next(reversed(self.running)))
            if self.live:
                self._advance(step, [])
                step.ghosts = self.decodes.count - self.live
                return step
            self._dissolve()

    def _form(self, now: float) -> None:
        """Board a batch: as many as fit when padded to the longest."""
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
            self._seat(request, now)
            if request.preemptions:
                self._resume(request, 0)
            self.blocks.admit(request, (), 0)
        self.live = len(members)
        self._stored = 0

    def _prefill(self, step: Step) -> None:
        budget = self.max_num_batched_tokens
        for request in self.partial:
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

    def _start_decoding(self) -> None:
        """Let those whose prompt is computed into the decode set, all at once."""
        for request in self.ready:
            if request.finish >= 0:
                self.decodes.join(request, NEVER)
            else:
                self.decodes.join(request, request.max_tokens - request.generated)
                self._stored -= self.decodes.tick
        self.ready.clear()

    def _join(self, request: Request) -> None:
        self.partial.remove(request)
        self.ready.append(request)

    def _finish(self, request: Request, now: float) -> None:
        """Let a member end but keep its seat; the last to end takes all the others along."""
        tick = self.decodes.tick
        first = request.joined if request.joined >= 0 else tick
        request.generated += tick - first
        request.finish = now
        self.runs += pack_run(request.run_start, request.id, first, tick - first)
        self._forget(request)
        if not self.live:
            self._dissolve()

    def _forget(self, request: Request) -> None:
        """Count a live member no longer."""
        self.live -= 1
        self._stored -= request.computed - request.padding - max(request.joined, 0)

    def _dissolve(self) -> None:
        for request in self.running:
            if request.joined >= 0:
                self.decodes.leave(request)
            self.blocks.release(request)
        self.running.clear()
        self.ready.clear()

    def _preempt(self, request: Request) -> None:
        if request.finish < 0:
            self._forget(request)
            super()._preempt(request)
        else:
            self.decodes.leave(request)
            del self.running[request]
            self.blocks.release(request)

    def close(self, request: Request) -> None:
        super().close(request)
        if request in self.ready:
            self.runs += pack_run(request.run_start, request.id, self.decodes.tick, 0)

    def stored(self, step: Step) -> int:
        if not step.decodes:
            return self._stored
        return self._stored + self.live * (self.decodes.tick + 1)
