"""The scheduler for policies whose order changes with time or progress, or that displace.

It is vLLM's, plus two things before a step is decided. The queue is ranked anew, if the policy's
order depends on the time. And the head of the queue, where `max_num_seqs` or the blocks leave no
room for it, may take the place of running requests that the policy names (`displaces`): of one
after the other, until it fits; if it never would, all stay. Who is displaced is preempted, by
recompute or by swap, and is admitted again from the next step on at the earliest. One request per
step displaces others.

So that leaping and stepwise runs agree, questions are put only where both put them. The queue is
ranked after an arrival, an admission, an end, a preemption or a step with prompts (which may have
left it no tokens to begin with). A policy that is `steady` is asked whom it displaces after one of
the first four, and then never again until the next; any other at every step, and as long as
somebody waits nothing is leapt over.
"""

from typing import Any, Unpack

from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.policy import RunningView, failed, none_of_them
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Options, Scheduler


class DynamicScheduler(Scheduler):
    """The scheduler with a policy that has `rank`, `displaces` or `promote` (see Policy)."""

    def __init__(self, blocks: BlockCounter, **options: Unpack[Options]) -> None:
        super().__init__(blocks, **options)
        self._policy: Any = options["policy"]
        self.displacing = hasattr(self._policy, "displaces")
        steady = getattr(self._policy, "steady", False) or not self.displacing
        self._steady = steady and not hasattr(self._policy, "promote")
        self._view = RunningView(self, self.running)
        self._arrivals = 0  # requests that came, or left before their end
        self._seen: tuple[int, ...] = ()  # what had happened when the policy was asked last
        self._prefilled = False  # the step before computed prompts: it was not leapt over
        self._may_change = False  # the policy may answer otherwise though nothing has happened

    def add(self, request: Request) -> bool:
        self._arrivals += 1
        return super().add(request)

    def cancel(self, request: Request) -> None:
        self._arrivals += 1  # who leaves may let another be the head: the policy is asked anew
        super().cancel(request)

    def schedule(self, now: float) -> Step:
        """Decide the next forward pass. An empty step means that there is nothing to do."""
        displaced: list[Request] = []
        if self.waiting and (len(self.running) < self.max_num_active_seqs or self.displacing):
            state = (self.running.admissions, len(self.running), self._arrivals)
            news = state != self._seen or not self._steady
            if self.refresh_queue is not None and (news or self._prefilled):
                self.refresh_queue(now)
            if self.displacing and (news or self._may_change):
                displaced = self._displace(now)
            self._seen = state
        step = super().schedule(now)
        self._prefilled = bool(step.prefills)
        for request in displaced:
            self.waiting.put_back(request)
        self.preempted += len(displaced)
        return step

    def _displace(self, now: float) -> list[Request]:
        """Make room for the head of the queue, if the policy has it so; return who went."""
        head, view = self.waiting.head(), self._view
        view.now = now
        self._may_change = True
        room = self._shortage(head)
        if room is None:
            return []
        places, lacking = room
        victims = view.displaced = []
        while len(victims) < places or lacking > 0:
            victim = self._choose_victim(head) if len(view) else None
            if victim is None:
                self._may_change = bool(victims)  # those named hold more blocks in a while
                view.displaced = []
                return []
            victims.append(victim)
            lacking -= self.blocks.owned(victim, view.computed(victim))
        for victim in victims:
            self.swap_out(victim)
            self.running.evict(victim, now)
        view.displaced = []
        return victims

    def _choose_victim(self, head: Request) -> Request | None:
        try:
            victim: Request | None = self._policy.displaces(head, self._view)
        except Exception as error:
            raise failed(self._policy, f"displaces(request {head.id}, running)", error) from error
        if victim is not None and (victim not in self.running or victim in self._view.displaced):
            raise none_of_them(self._policy, "displaces(head, running)", victim)
        return victim

    def _shortage(self, head: Request) -> tuple[int, int] | None:
        """Count the places and the blocks that the head lacks; None: there are no tokens for it.

        What the running take in this step counts as taken, also that of those who might go.
        """
        blocks, interval = self.blocks, self.prefill_interval
        if interval is not None:
            interval.begin(self.running)
        cap = self.chunk_cap()
        queries, need = self.decodes.demand()
        budget = self.max_num_scheduled_tokens - queries
        for request in self.running.partial:
            if interval is None or not interval.holds(request):
                tokens = max(0, min(request.pending, cap, budget))
                budget -= tokens
                need += blocks.taken(request, request.computed + tokens)
        hits = blocks.match(head)
        start = max(len(hits) * blocks.block_size, head.swapped)
        tokens = self.chunk(min(head.known - start, cap), budget)
        if budget <= 0 or not tokens or (interval is not None and interval.refuses(head, start)):
            return None
        lacking = self.admission.lacking(head, hits, start + tokens, len(self.running), need)
        return len(self.running) + 1 - self.max_num_active_seqs, lacking

    def horizon(self, step: Step) -> int:
        """Count how often `step`, just scheduled, is sure to repeat if nobody arrives."""
        if self.waiting and (self._may_change or not self._steady):
            return 1
        return super().horizon(step)


class AsyncDynamicScheduler(DynamicScheduler, AsyncScheduler):
    """The same with two batches in flight.

    Who is displaced may have a token on its way: it gets that, and its last one ends it where it
    waits.
    """
