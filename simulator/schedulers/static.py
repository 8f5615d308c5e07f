"""Static batching: a batch is admitted and runs until its longest member ends, then the next one.

As in the textbooks, and as `generate` of Hugging Face in a loop.
"""

from simulator.core.request import Chunk, Request, Step
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.from_mapping import raise_if

NEVER = 1 << 60  # ticks
LONGEST_TIMEOUT = 1_000_000  # s


class Static(Scheduler):
    """A batch of `batch_size`, or what has come `timeout` seconds after the oldest arrived.

    The prompts are padded in front to the longest of the batch and computed first, in steps of at
    most `max_num_batched_tokens`; then all members decode together. A member that ends gives its
    answer but keeps its place: as a ghost it costs what the others cost until the last one ends
    (Hugging Face `generate`, FasterTransformer; Orca, OSDI 2022, section 3). A batch takes only
    as many as fit into the blocks with their padding. Should blocks run out all the same, the
    last admitted leaves and is computed again in a later batch. There is no prefix cache.

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
        raise_if(
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
        self.unfinished = 0  # members that have not ended
        self._idle = False  # there was nothing to do when last asked
        self._formed = 0  # the tick at which the batch was formed
        self._stored = 0  # tokens of the live members, those of ticks since then left out

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
        if not self._idle:  # else the preemptions of a step that never was belong to this one
            self.preempted = 0
        self._idle = False
        while True:
            if not self.running:
                due = self.next_wakeup()
                if due is None or (now < due and len(self.waiting) < self.batch_size):
                    self._idle = True
                    return step
                self._form_batch()
            if self.running.partial:
                self._prefill(step)
                return step
            while self.decodes.blocks(1) > self.blocks.free:
                self.preempt(self.running.last())
            if self.unfinished:
                self.decode_all(step)
                step.ghosts = step.decodes - self.unfinished
                return step
            self._end_batch()

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
        self._formed = self.decodes.tick
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

    def finish(self, request: Request, now: float) -> None:
        """Let a member end but keep its place; the last to end takes all the others along."""
        self._leave(request)
        self.running.stop_decoding(request)
        request.finish = now
        self.decodes.join(request, NEVER)
        if not self.unfinished:
            self._end_batch()

    def _leave(self, request: Request) -> None:
        """Count a live member no longer."""
        self.unfinished -= 1
        self._stored -= request.computed - request.padding

    def _end_batch(self) -> None:
        for request in list(self.running):
            self.running.discard(request)
            self.blocks.release(request)

    def preempt(self, request: Request) -> None:
        if request.finish < 0:
            self._leave(request)
            super().preempt(request)
        else:
            self.running.discard(request)
            self.blocks.release(request)

    def stored(self, step: Step) -> int:
        ticks = self.decodes.tick - self._formed + bool(step.decodes)
        return self._stored + self.unfinished * ticks


class HfStatic(Static):
    """`model.generate` of transformers on up to `batch_size` (8) requests at a time, in order.

    Whoever waits when a batch is over makes up the next one, without a timeout. Prompts are
    padded in front to the longest, all in one forward pass whatever its size, and every member is
    paid for until the longest answer has ended (`GenerationMixin`, transformers 4). An answer is
    given when it ends, where `generate` returns all answers of a batch together.
    """

    def __init__(
        self,
        blocks: BlockCounter,
        *,
        batch_size: int | None = None,
        max_num_seqs: int = 256,
        max_model_len: int = 8192,
    ) -> None:
        super().__init__(
            blocks,
            batch_size=min(8, max_num_seqs) if batch_size is None else batch_size,
            timeout=0.0,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs * max_model_len,  # never reached
            max_model_len=max_model_len,
        )
