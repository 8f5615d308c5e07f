"""vLLM's scheduler with a policy of Headway's: who waits first, who is preempted, who makes way.

The class is vLLM's own `AsyncScheduler`, and none of its methods is copied: a policy works through
five joints of it.

- `waiting`, vLLM's queue, is replaced by the policy's behind vLLM's interface (PolicyQueue).
- A victim: under its policy `priority` vLLM preempts whoever has the largest priority number. When
  blocks run out, the one that the policy picks gets 1 and all others 0, until it has gone.
- Whoever makes way for the head of the queue (`displaces`) is preempted by vLLM's own method before
  the step is decided, and waits until it is decided before it comes back.
- The head that vLLM takes out of the queue is admitted if it has blocks by then, and charged to its
  client by a fair policy; else it is passed over.
- `_update_after_schedule` counts the tokens that a step will bring out.

When an order that changes with time is ranked anew, and when a policy is asked whom it displaces,
is as in `simulator/schedulers/vllm/dynamic.py`, so that what was simulated is what runs.
"""

import time
from collections import Counter
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from typing import Any

from headway.vllm.interface import blocks_to_allocate, has, on_preemption, resumed
from headway.vllm.policy import CLASSES, make_policy
from headway.vllm.recorded import RELEASE, RecordedScheduler, RequestStatus, SchedulingPolicy
from headway.vllm.waiting_queue import PolicyQueue, RequestView
from simulator.core.decode_set import DecodeSet
from simulator.policies.fair import ServiceCounter
from simulator.policies.policy import EngineView, RunningView, failed, none_of_them, victim_of
from simulator.policies.waiting_queues import queue_of
from simulator.schedulers.vllm.rules import rules_of, write_release
from simulator.util.errors import HeadwayError


class _Running(RunningView):
    """The running requests as `displaces` sees them: here each of them is up to date."""

    generated = attrgetter("generated")  # type: ignore[assignment]
    computed = attrgetter("computed")  # type: ignore[assignment]


class HeadwayScheduler(RecordedScheduler):
    """The policy that HEADWAY_POLICY names. It follows vLLM's `async_scheduling`, on or off."""

    policy_name: str | None = None
    steps_file = None
    clock = staticmethod(time.time)
    """Seconds, on the clock of the requests' `arrival_time`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        chosen = self.chosen = make_policy(self.policy_name)
        self._views: dict[str, RequestView] = {}
        self._clients: dict[str, str] = {}  # theirs, for a quick count
        self._numbers = 0
        self._needs_hint = bool(getattr(chosen, "needs_hint", False))
        decodes = DecodeSet(self.block_size)
        self._batch = EngineView(decodes)
        order = queue_of(chosen, self._batch)
        self._counts = self._batch.decodes is not decodes  # the policy keeps books of tokens
        self._settle = getattr(order, "settle", None)
        self._refresh = getattr(order, "refresh", None)
        self.waiting = PolicyQueue(order, self._view, self._admits)
        self._victim = victim_of(chosen)
        self.policy = (
            SchedulingPolicy.FCFS
        )  # it tells whom vLLM preempts, now that the queue is ours
        if self._victim is not None:
            self.policy = SchedulingPolicy.PRIORITY
        self._displaces = hasattr(chosen, "displaces")
        steady = getattr(chosen, "steady", False) or not self._displaces
        self._steady = steady and not hasattr(chosen, "promote")
        self._seen = (-1, -1, -1)  # what had happened when the policy was asked last
        self._prefilled = False
        # Who is in the middle of its prompt: a look at all who run would take longer.
        self._chunks: list[Any] = []
        self._asks = self._displaces or self._refresh is not None
        active: int | None = getattr(self, "max_num_active_reqs", None)
        self._most_active = self.max_num_running_reqs if active is None else active
        self._may_change = False  # whom it displaces may be another though nothing has happened
        self._given: list[tuple[Any, int]] = []  # tokens that the step being decided has given
        self._marked: list[RequestView] = []  # views that have been told of them
        if self._victim is not None:
            if not rules_of(RELEASE).withdraws_tokens:
                raise HeadwayError(
                    f"headway.vllm: {type(chosen).__name__} picks victims, and vLLM "
                    f"{write_release(RELEASE)} computes on a victim's freed blocks: take 0.11.1"
                )
            self._listen_for_blocks()
        if not has(RELEASE, "_preempt_request"):
            on_preemption(self, RELEASE, self._goes)

    def _view(self, request: Any) -> RequestView:
        view = self._views.get(request.request_id)
        if view is None:
            view = self._views[request.request_id] = RequestView(
                request, self._numbers, self.max_model_len, self._needs_hint
            )
            self._clients[request.request_id] = view.client
            self._numbers += 1
        return view

    def _running(self) -> dict[Any, None]:
        """Return the running requests in order of admission."""
        views = self._views
        return dict.fromkeys([views[request.request_id] for request in self.running])

    # A step is decided.

    def schedule(self, *args: Any, **options: Any) -> Any:
        """Let vLLM decide, once the queue is in order and room is made for its head."""
        now = self._batch.now = self.clock()
        self._given.clear()
        if self._settle is not None:
            self._settle(now)
        displaced: list[Any] = []
        self.waiting.forget_head()
        if self._asks and self.waiting:
            displaced = self._ask(now)
        output = super().schedule(*args, **options)
        for view in self._marked:
            view.computed_now = 0
        self._marked.clear()
        for request in displaced:
            self.waiting.prepend_request(request)
        return output

    def _ask(self, now: float) -> list[Any]:
        """Rank the queue anew and make room for its head, if that is due; return who went."""
        displaced: list[Any] = []
        if len(self.running) < self._most_active or self._displaces:
            state = (self.waiting.admissions, len(self.running), self.waiting.arrivals)
            news = state != self._seen or not self._steady
            if self._refresh is not None and (news or self._prefilled):
                self._refresh(now)
                self.waiting.forget_head()
            if self._displaces and (news or self._may_change):
                displaced = self._make_way(now)
            self._seen = state
        return displaced

    def _make_way(self, now: float) -> list[Any]:
        """Preempt whom the policy displaces for the queue's head, until that fits, or nobody."""
        head = self.waiting.peek_request()
        self._may_change = True
        room = self._shortage(head)
        if room is None:
            return []
        places, lacking = room
        if places <= 0 >= lacking:
            return []
        view = _Running(self._batch, self._running())
        view.now = now
        victims: list[Any] = view.displaced
        while len(victims) < places or lacking > 0:
            victim = self._next_victim(self._view(head), view) if len(view) else None
            if victim is None or not self._may_go(victim.vllm):
                self._may_change = bool(victims)
                return []
            victims.append(victim)
            lacking -= self._owned(victim.vllm)
        displaced: list[Any] = []
        self.waiting.set_aside = displaced
        for victim in victims:
            self.running.remove(victim.vllm)
            drop = has(RELEASE, "num_stale_output_tokens")
            options = {"drop_stale_output": self.requires_kv_delivery} if drop else {}
            self._preempt_request(victim.vllm, time.monotonic(), **options)
        self.waiting.set_aside = None
        return displaced

    def _may_go(self, request: Any) -> bool:
        if not has(RELEASE, "_request_blocks_can_be_freed"):
            return True
        return bool(self._request_blocks_can_be_freed(request))

    def _next_victim(self, head: RequestView, running: RunningView) -> Any:
        try:
            victim = self.chosen.displaces(head, running)
        except Exception as error:
            raise failed(self.chosen, f"displaces(request {head.id}, running)", error) from error
        if victim is not None and victim not in [*running]:
            raise none_of_them(self.chosen, "displaces(head, running)", victim)
        return victim

    def _shortage(self, head: Any) -> tuple[int, int] | None:
        """Count the places and blocks that the head lacks; None: this step has nothing for it.

        What the running take in this step counts as taken, also that of those who might go. Where
        no block lacks, the second number is 0 or less and says no more.
        """
        if head.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return None
        has_stale = has(RELEASE, "num_stale_output_tokens") and head.num_stale_output_tokens
        if has_stale and not head.drop_stale_output:
            return None
        held, cap = self._holds_prefill(), self._chunk_cap()
        hits, start = self.kv_cache_manager.get_computed_blocks(head)[:2]
        if held and start < head.num_tokens - 1:
            return None
        running, size = self.running, self.block_size
        places = len(running) + 1 - self._most_active
        tokens, most = min(head.num_tokens - start, cap), self.max_num_scheduled_tokens
        chunks = [one for one in self._chunks if one.status is RequestStatus.RUNNING]
        others = len(running) - len(chunks)
        # Where there is a token and a block for each of the others, nobody need look at them.
        taken, need = (0, 0) if held else self._chunks_take(chunks, cap, most - others)
        if 0 < tokens <= most - others - taken:
            lacking = self._blocks_lacking(head, hits.blocks, start, tokens, others + need)
            if lacking <= 0:
                return places, lacking
        decodes = [
            one.num_computed_tokens
            for one in running
            if not one.is_prefill_chunk and not self._ends_with_step_in_flight(one)
        ]
        budget = most - len(decodes)
        if not held:
            chunks = [one for one in running if one.is_prefill_chunk]
            taken, need = self._chunks_take(chunks, cap, budget)
        budget -= taken
        if tokens > budget:
            tokens = budget if self.scheduler_config.enable_chunked_prefill else 0
        if budget <= 0 or not tokens:
            return None
        need += sum([not computed % size for computed in decodes])
        return places, self._blocks_lacking(head, hits.blocks, start, tokens, need)

    def _reserves_whole(self) -> bool:
        return bool(getattr(self, "scheduler_reserve_full_isl", False))

    def _chunks_take(self, chunks: list[Any], cap: int, budget: int) -> tuple[int, int]:
        """Count the tokens and blocks that this step gives those in the middle of their prompts."""
        size, taken, blocks = self.block_size, 0, 0
        for request in chunks:
            computed = request.num_computed_tokens
            tokens = max(0, min(request.num_tokens - computed, cap, budget - taken))
            taken += tokens
            blocks += -(-(computed + tokens) // size) - -(-computed // size)
        return taken, blocks

    def _blocks_lacking(self, head: Any, hits: Any, start: int, tokens: int, need: int) -> int:
        """Count the blocks that the head lacks where each group of layers `need`s some besides."""
        whole = min(head.num_tokens, self.max_model_len)
        lacking = need * len(hits) + self._blocks_for(
            head, hits, start, whole if self._reserves_whole() else start + tokens
        )
        if self.running:
            lacking += getattr(self.kv_cache_manager, "watermark_blocks", 0)
        free: int = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return lacking - free

    def _blocks_for(self, request: Any, hits: Any, start: int, tokens: int) -> int:
        """Count the free blocks that a request takes which begins with so many tokens."""
        arguments = {
            "request_id": request.request_id,
            "num_tokens": tokens,
            "new_computed_blocks": hits,
            "num_encoder_tokens": 0,
            "total_computed_tokens": start,
            "num_local_computed_tokens": start,
            "num_tokens_main_model": tokens,
            "apply_admission_cap": True,
            "prefill_end": max(request.num_prompt_tokens, request.num_tokens - 1),
        }
        count: int = self.kv_cache_manager.coordinator.get_num_blocks_to_allocate(
            **blocks_to_allocate(RELEASE, arguments)
        )
        return count

    def _ends_with_step_in_flight(self, request: Any) -> bool:
        """Say whether the last token that a request may have is on its way."""
        on_their_way: int = request.num_output_placeholders
        known: int = request.num_output_tokens + on_their_way
        room: int = self.max_model_len - request.num_prompt_tokens
        return on_their_way > 0 and known >= min(request.max_tokens, room)

    def _owned(self, request: Any) -> int:
        """Count the blocks that nobody else holds of a running request."""
        groups = self.kv_cache_manager.get_blocks(request.request_id).blocks
        return sum(block.ref_cnt == 1 for blocks in groups for block in blocks)

    def _chunk_cap(self) -> int:
        """Return the tokens that one request may compute in this step."""
        threshold: int = self.scheduler_config.long_prefill_token_threshold
        present = sum(self.get_request_counts())
        if not threshold or (present < 2 and has(RELEASE, "one_queue")):
            budget: int = self.max_num_scheduled_tokens
            return budget
        if getattr(self, "adaptive_long_prefill_threshold", False):
            share: int = self.scheduler_config.max_num_batched_tokens // present
            return max(threshold, share)
        return threshold

    def _holds_prefill(self) -> bool:
        """Say whether this step keeps `prefill_schedule_interval` by leaving prompts alone."""
        if not has(RELEASE, "prefill_interval"):
            return False
        since = self.num_executed_steps + 1 - self.last_prefill_step
        return (
            self.local_prefill_interval > 1
            and not self.prefill_capacity_bound
            and since < self.local_prefill_interval
            and not all(request.is_prefill_chunk for request in self.running)
        )

    # What vLLM does is heard of.

    def _admits(self, request: Any) -> bool:
        """Say whether vLLM takes the head out of the queue because it has blocks for it."""
        return any(self.kv_cache_manager.get_blocks(request.request_id).blocks)

    def _listen_for_blocks(self) -> None:
        """Take note of who gets tokens; where blocks run out, let the policy pick a victim."""
        allocate, given = self.kv_cache_manager.allocate_slots, self._given
        running = RequestStatus.RUNNING

        def allocate_slots(request: Any, tokens: int, *more: Any, **options: Any) -> Any:
            blocks = allocate(request, tokens, *more, **options)
            if blocks is not None:
                given.append((request, tokens))
            elif request.status is running:
                self._mark_victim()
            return blocks

        self.kv_cache_manager.allocate_slots = allocate_slots

    def _mark_victim(self) -> None:
        assert self._victim is not None
        for request, tokens in self._given:
            view = self._view(request)
            view.computed_now = tokens
            self._marked.append(view)
        self._given.clear()
        victim: Any = self._victim(self._running())
        for request in self.running:
            request.priority = int(request is victim.vllm)

    def _goes(self, request: Any) -> None:
        """Hear whom vLLM is about to preempt; its priority and that of others is their own."""
        view = self._view(request)
        if self._victim is not None:
            for one in (*self.running, request):
                one.priority = self._view(one).priority
            view.computed_now = 0
        view.late_tokens = request.num_output_placeholders

    if has(RELEASE, "_preempt_request"):

        def _preempt_request(self, request: Any, *args: Any, **options: Any) -> None:
            self._goes(request)
            super()._preempt_request(request, *args, **options)

    else:

        def _preempt_request(self, request: Any, *args: Any, **options: Any) -> None:
            """Preempt as 0.11 does within its `schedule`."""
            self._goes(request)
            self.kv_cache_manager.free(request)
            self.encoder_cache_manager.free(request)
            request.status = RequestStatus.PREEMPTED
            request.num_computed_tokens = 0
            if hasattr(request, "num_preemptions"):
                request.num_preemptions += 1
            self.waiting.prepend_request(request)

    def _update_after_schedule(self, output: Any) -> None:
        """Count the tokens that the step brings out, as vLLM's scheduler of that kind does."""
        super()._update_after_schedule(output)
        if not has(RELEASE, "is_prefill_chunk"):
            for name in output.num_scheduled_tokens:
                request = self.requests[name]
                request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
        if self._counts or self._asks:
            self._look_at_prompts(output)
        if self._counts:
            self._count_tokens(output.num_scheduled_tokens)

    def _look_at_prompts(self, output: Any) -> None:
        """Take note of whose prompts the step just decided computes, and who is not through."""
        scheduled, requests, views = output.num_scheduled_tokens, self.requests, self._views
        names = [one.request_id for one in self._chunks]
        names += [one.req_id for one in output.scheduled_new_reqs]
        names += resumed(output.scheduled_cached_reqs)
        begun = [requests[name] for name in dict.fromkeys(names) if name in requests]
        running = RequestStatus.RUNNING
        self._chunks = [one for one in begun if one.is_prefill_chunk and one.status is running]
        if self._refresh is not None:
            new = int(self._asynchronous)  # the step's own token is counted
            self._prefilled = max(scheduled.values(), default=0) > 1 or any(
                one.is_prefill_chunk or views[one.request_id].generated <= new
                for one in begun
                if one.request_id in scheduled
            )

    def _count_tokens(self, scheduled: Mapping[str, int]) -> None:
        """Tell the policy's books who gets a token by the step just decided."""
        decodes, views = self._batch.decodes, self._views
        chunks = [one.request_id for one in self._chunks]
        if isinstance(decodes, ServiceCounter):  # as by `emitted`, in a few calls
            counts = Counter(map(self._clients.__getitem__, scheduled))
            counts.subtract([self._clients[name] for name in chunks if name in scheduled])
            for client, tokens in counts.items():
                decodes.account(client).output += tokens
        else:
            for name in scheduled.keys() - chunks:
                decodes.emitted(views[name])  # type: ignore[arg-type]

    def _free_request(self, request: Any, *args: Any, **options: Any) -> Any:
        self._views.pop(request.request_id, None)
        client = self._clients.pop(request.request_id, None)
        decodes = self._batch.decodes
        stopped = request.status is RequestStatus.FINISHED_STOPPED
        if stopped and client is not None and isinstance(decodes, ServiceCounter):
            # A step that was decided before the stop token was known counts for nobody.
            decodes.account(client).output -= request.num_output_placeholders
        return super()._free_request(request, *args, **options)


@cache
def scheduler_class(name: str) -> type[HeadwayScheduler]:
    """Return the class of a name in CLASSES."""
    policy = CLASSES[name]
    if policy is None:
        return HeadwayScheduler
    text = f"vLLM's scheduler with Headway's policy {policy}; arguments are in HEADWAY_POLICY."
    return type(name, (HeadwayScheduler,), {"policy_name": policy, "__doc__": text})
