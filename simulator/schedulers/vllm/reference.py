"""vLLM's loop to be read: one request at a time, without sums, leaps or features.

The rules are those of vLLM 0.33 (`vllm/v1/core/sched/scheduler.py`), first come, first served,
without a prefix cache. `scheduler.py` decides the same at a cost per event in place of one per
request and step; a law in `tests/engine/test_reference.py` compares the two.
"""

from collections import deque
from collections.abc import Callable, Iterable

from simulator.core.request import Request

StepTokens = dict[Request, int]
"""What a step computes: tokens of each request, in the order of the running list."""


class Reference:
    """The scheduler of one engine.

    `num_blocks` counts vLLM's null block, which nobody gets. `block_size` and `max_model_len` are
    in tokens. Raises ValueError where `max_num_seqs` or `max_num_batched_tokens` is less than 1.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int = 8192,
    ) -> None:
        if min(max_num_seqs, max_num_batched_tokens) < 1:
            raise ValueError("max_num_seqs and max_num_batched_tokens must be 1 or more")
        self.usable = self.free = num_blocks - 1
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.held: dict[Request, int] = {}  # blocks of each running request

    def add(self, request: Request) -> bool:
        """Take a new request; return False, and forget it, where it could never run."""
        room = self.max_model_len - request.prompt_tokens
        request.output_limit = min(request.output_tokens, request.max_tokens or room, room)
        # The KV of the last token is never computed.
        longest = request.prompt_tokens + request.output_limit - 1
        if room < 1 or self.blocks_for(longest) > self.usable:
            return False
        self.waiting.append(request)
        return True

    def blocks_for(self, tokens: int) -> int:
        """Count the blocks that so many tokens take."""
        return -(-tokens // self.block_size)

    def schedule(self, now: float) -> StepTokens:
        """Decide the next step, which begins at `now` seconds.

        There is no prefill or decode phase: each request wants its computed tokens to catch up
        with its known ones, which are its prompt and what has come out. A decode lacks one.
        """
        step: StepTokens = {}
        budget = self.max_num_batched_tokens
        preempted = False
        for request in list(self.running):
            if request not in self.held or not budget:
                break  # the last of the list went first: nobody behind this one is left
            tokens = min(request.pending, budget)
            while request in self.held and self.lacks(request, tokens):
                self.preempt(self.running[-1])
                preempted = True
            if request in self.held:
                self.give(step, request, tokens)
                budget -= tokens
        while not preempted and budget and self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if self.blocks_for(request.known) > self.free:
                break  # vLLM asks for room for the whole prompt; nobody overtakes the head
            self.running.append(self.waiting.popleft())
            self.held[request] = 0
            if request.first_scheduled < 0:
                request.first_scheduled = now
            tokens = min(request.pending, budget)
            self.give(step, request, tokens)
            budget -= tokens
        return step

    def lacks(self, request: Request, tokens: int) -> bool:
        """Say whether too few blocks are free for a request to compute so many tokens more."""
        return self.blocks_for(request.computed + tokens) - self.held[request] > self.free

    def give(self, step: StepTokens, request: Request, tokens: int) -> None:
        """Let a step compute tokens of a request, and take the blocks that they need."""
        step[request] = tokens
        request.computed += tokens
        self.free += self.held[request] - self.blocks_for(request.computed)
        self.held[request] = self.blocks_for(request.computed)

    def preempt(self, request: Request) -> None:
        """Put a running request back to the head of the queue: its KV is computed once more."""
        self.release(request)
        request.computed = 0
        request.preemptions += 1
        self.waiting.appendleft(request)

    def release(self, request: Request) -> None:
        """Take a request off the running list, and its blocks back."""
        self.running.remove(request)
        self.free += self.held.pop(request)

    def commit(self, step: StepTokens, now: float) -> list[Request]:
        """Bring out the tokens of a step that ends at `now` seconds; return who has ended."""
        ended = []
        for request in step:
            if request.pending:
                continue  # in the midst of its prompt
            request.generated += 1
            if request.first_token < 0:
                request.first_token = now
            if request.generated == request.output_limit:
                request.finish = now
                self.release(request)
                ended.append(request)
        return ended


def serve(
    requests: Iterable[Request], scheduler: Reference, seconds: Callable[[StepTokens], float]
) -> list[Request]:
    """Serve requests, given in the order of arrival, one step after the other.

    `seconds` says what a step takes. Return who was served, in the order of their ends; each has
    its times in seconds. A request that could never run is left out.
    """
    now, coming, served = 0.0, deque(requests), list[Request]()
    while coming or scheduler.waiting or scheduler.running:
        if not scheduler.waiting and not scheduler.running:
            now = max(now, coming[0].arrival)
        while coming and coming[0].arrival <= now:
            scheduler.add(coming.popleft())
        if step := scheduler.schedule(now):
            now += seconds(step)
            served += scheduler.commit(step, now)
    return served
