"""The scheduler for policies whose order changes with time or progress, or that displace.

It is vLLM's, plus two things before a step is decided. The queue is ranked anew, if the policy's
order depends on the time. And the head of the queue, where seats or blocks are too few for it, may
take the place of running requests that the policy names (`displaces`): of one after the other,
until it fits; if it never would, all stay. Who is displaced is preempted, by recompute or by swap,
and boards again from the next step on at the earliest. One request per step displaces others.

So that leaping and stepwise runs agree, questions are put only where both put them. The queue is
ranked after an arrival, an admission, an end, a preemption or a step with prompts (which may have
left it no tokens to board with). A policy that is `steady` is asked whom it displaces after one of
the first four, and then never again until the next; any other at every step, and as long as
somebody waits nothing is leapt over.
"""

from typing import Any

from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.policy import RunningView, failed, none_of_them
from simulator.schedulers.vllm.scheduler import Scheduler


class DynamicScheduler(Scheduler):
    """The scheduler with a policy that has `rank`, `displaces` or `promote` (see Policy)."""

    cancels = False

    def __init__(self, blocks: BlockCounter, *, policy: Any, **options: Any) -> None:
        super().__init__(blocks, policy=policy, **options)
        self._policy = policy
        self.displacing = hasattr(policy, "displaces")
        steady = getattr(policy, "steady", False) or not self.displacing
        self._steady = steady and not hasattr(policy, "promote")
        self._view = RunningView(self, self.running)
        self._joined = 0  # requests so far
        self._seen = (-1, -1, -1)  # what had happened when the policy was asked last
        self._late = False  # the step before computed prompts: it was not leapt over
        self._open = False  # and whether it may answer otherwise though nothing has happened

    def add(self, request: Request) -> bool:
        self._joined += 1
        return super().add(request)

    def schedule(self, now: float) -> Step:
        """Decide the next forward pass. An empty step means that there is nothing to do."""
        displaced: list[Request] = []
        self.now = now
        seats_free = len(self.running) < self.max_num_seqs
        if self.waiting and (seats_free or self.displacing):
            state = (self._seats, len(self.running), self._joined)
            if self._refresh is not None and (
                state != self._seen or self._late or not self._steady
            ):
                self._refresh(now)
            if self.displacing and (state != self._seen or self._open or not self._steady):
                displaced = self._displace(now)
            self._seen = state
        step = super().schedule(now)
        self._late = bool(step.prefills)
        for request in displaced:
            self.waiting.put_back(request)
        self.preempted += len(displaced)
        return step

    def _displace(self, now: float) -> list[Request]:
        """Make room for the head of the queue, if the policy has it so; return who went."""
        head, view = self.waiting.head(), self._view
        view.now = now
        self._open = True
        room = self._room(head)
        if room is None:
            return []
        seats, lacking = room
        victims = view.displaced = []
        while len(victims) < seats or lacking > 0:
            victim = self._ask(head) if len(view) else None
            if victim is None:
                self._open = bool(victims)  # those named hold more blocks in a while
                view.displaced = []
                return []
            victims.append(victim)
            lacking -= self.blocks.owned(victim, view.computed(victim))
        for victim in victims:
            self._save(victim)
            self._evict(victim)
        view.displaced = []
        return victims

    def _ask(self, head: Request) -> Request | None:
        try:
            victim: Request | None = self._policy.displaces(head, self._view)
        except Exception as error:
            raise failed(self._policy, f"displaces(request {head.id}, running)", error) from error
        if victim is not None and (victim not in self.running or victim in self._view.displaced):
            raise none_of_them(self._policy, "displaces(head, running)", victim)
        return victim

    def _room(self, head: Request) -> tuple[int, int] | None:
        """Count the seats and the blocks that the head lacks; None: it has no tokens to board with.

        What the running take in this step counts as taken, also that of those who might go.
        """
        blocks, size = self.blocks, self.blocks.block_size
        cadence = self._cadence
        if cadence is not None:
            cadence.begin(self._executed, self._may_decode())
        cap = self._cap() if self.long_prefill_token_threshold else self.max_num_batched_tokens
        budget = self.max_num_batched_tokens - self.decodes.count
        need = self.decodes.phases[self.decodes.tick % size]
        for request in self.partial:
            if not self._holds(request):
                tokens = max(0, min(request.pending, cap, budget))
                budget -= tokens
                need += -(-(request.computed + tokens) // size) - -(-request.computed // size)
        hits = blocks.match(head)
        start = max(len(hits) * size, head.swapped)
        tokens = min(head.known - start, cap)
        if budget <= 0 or (tokens > budget and not self.enable_chunked_prefill):
            return None
        if cadence is not None and cadence.held and start < head.known - 1:
            return None
        first = start + min(tokens, budget)
        lacking = self.admission.lacking(head, hits, first, len(self.running), need)
        return len(self.running) + 1 - self.max_num_seqs, lacking

    def horizon(self, step: Step) -> int:
        """Count how often `step`, just scheduled, is sure to repeat if nobody arrives."""
        if self.waiting and (self._open or not self._steady):
            return 1
        return super().horizon(step)
