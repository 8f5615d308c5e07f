"""SGLang's waiting queue in the order of one of Headway's policies: three hooks, nothing copied.

- Around `SchedulePolicy.calc_priority`, which sorts the queue before each pass that may admit:
  under fcfs it leaves the queue as it is, and then the policy's head goes to the front.
- After `PrefillAdder.add_one_req`, which tries one request: if it was admitted the policy is told
  so, and asked who is next. SGLang goes through the queue by position, so that whoever is put into
  the next place is tried next.
- Before `Scheduler.run_batch`: who gets a token by the batch, for policies with books of tokens.

All else of the queue stays as SGLang has it, in the order of queueing up, which the simulation of
it keeps, too (`simulator.schedulers.sglang.queue_order.PolicyQueue`).
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from headway.sglang.policy import check_sglang, make_order
from headway.vllm.policy import VARIABLE
from headway.vllm.waiting_queue import read_hint
from simulator.core.decode_set import DecodeSet
from simulator.policies.policy import EngineView
from simulator.schedulers.sglang.queue_order import make_queue
from simulator.util.errors import HeadwayError

MODULE = "sglang.srt.managers"


class WaitingRequest:
    """SGLang's request under the names that `simulator.core.request.Request` has.

    `client` and `hint`, the predicted output tokens, come in `custom_params`. Without them the
    client is the request's `extra_key` or `cache_salt`, or "". Without a prediction, or with one
    that is none, a policy that needs one has what the answer may be at most.
    """

    def __init__(self, request: Any, number: int, needs_hint: bool) -> None:
        params = request.sampling_params
        said = params.custom_params
        custom = said if isinstance(said, dict) else {}  # no client may end the server
        self.id = number
        self.arrival = request.time_stats.wait_queue_entry_time
        self.prompt_tokens = len(request.origin_input_ids)
        client = custom.get("client") or request.extra_key or request.cache_salt
        self.client = str(client or "")
        self.priority = request.priority or 0
        self.max_tokens = params.max_new_tokens
        self.hint = read_hint(custom.get("hint"))
        if self.hint is None and needs_hint:
            self.hint = max(params.max_new_tokens, 1)
        self.admission = self.joined = -1
        self.computed = self.padding = self.swapped = 0
        self.entry = self.generated = self.preemptions = 0

    @property
    def known(self) -> int:
        return self.prompt_tokens + self.generated

    @property
    def pending(self) -> int:
        return self.known - self.computed


class Ordering:
    """A policy at work in one scheduler of SGLang's."""

    clock = staticmethod(time.perf_counter)
    """Seconds, on the clock of SGLang's `wait_queue_entry_time`."""

    def __init__(self, policy: Any) -> None:
        view = EngineView(DecodeSet(1))
        queue = make_queue(policy, view)
        self._order, self._books = queue.order, queue.books
        self._settle = getattr(self._order, "settle", None)
        self._refresh = getattr(self._order, "refresh", None)
        self._needs_hint = bool(getattr(policy, "needs_hint", False))
        self._view = view
        self._numbers = 0
        self._entries = 0
        self._here: dict[Any, WaitingRequest] = {}  # by request, those in the policy's queue
        self._queue: list[Any] = []  # SGLang's, of the pass at work
        self._place = 0  # in it, of the request to be tried
        self._front: Any = None  # who stands there out of turn

    def calc_priority(
        self, original: Callable[..., Any], policy: Any, queue: list[Any], *args: Any, **named: Any
    ) -> Any:
        """Bring the policy's head to the front of SGLang's queue."""
        self._take_in(queue)
        result = original(policy, queue, *args, **named)
        self._queue, self._place = queue, 0
        if queue:
            now = self._view.now = self.clock()
            if self._settle is not None:
                self._settle(now)
            if self._refresh is not None:
                self._refresh(now)
            self._bring_head(0)
        return result

    def _take_in(self, queue: list[Any]) -> None:
        """Put the queue back into the order of queueing up; hear who came, and who has gone."""
        here = self._here
        if self._front is not None and self._front in here and self._front in queue:
            queue.remove(self._front)
            at = bisect_left(queue, here[self._front].entry, key=self._entry)
            queue.insert(at, self._front)
        self._front = None
        fresh = []
        for request in reversed(queue):
            if request in here:
                break
            fresh.append(request)
        if len(here) + len(fresh) != len(queue):  # somebody was aborted
            left = set(queue)
            for request in [one for one in here if one not in left]:
                self._order.remove(here.pop(request))  # type: ignore[arg-type]
        for request in reversed(fresh):
            self._add(request)

    def _entry(self, request: Any) -> int:
        view = self._here.get(request)
        return self._entries + 1 if view is None else view.entry

    def _add(self, request: Any) -> None:
        view: Any = getattr(request, "headway_view", None)
        comes_back = view is not None
        if not comes_back:
            view = WaitingRequest(request, self._numbers, self._needs_hint)
            request.headway_view = view
            self._numbers += 1
        view.generated = len(request.output_ids)
        view.preemptions = request.retraction_count
        self._entries += 1
        view.entry = self._entries
        self._here[request] = view
        if comes_back:
            self._order.put_back(view)
        else:
            self._order.add(view)

    def _bring_head(self, place: int) -> None:
        """Put whom the policy names into a place of the queue, if it is not before that."""
        head: Any = self._order.head()
        queue, here = self._queue, self._here
        at = bisect_left(queue, head.entry, lo=place, key=self._entry)
        if at == len(queue) or here.get(queue[at]) is not head:
            return  # SGLang has passed over it
        if at > place:
            self._front = queue.pop(at)
            queue.insert(place, self._front)
        else:
            self._front = None

    def tried(self, result: Any, adder: Any, request: Any, *_: Any, **__: Any) -> None:
        """Hear whether a request was admitted; if SGLang goes on, say who is next."""
        admitted = adder.can_run_list
        if not admitted or admitted[-1] is not request or request not in self._here:
            return
        self._take(self._here.pop(request))
        if request is self._front:
            self._front = None
        place = self._place
        if place >= len(self._queue) or self._queue[place] is not request:
            place = self._queue.index(request)
        self._place = place + 1
        if result.name == "CONTINUE" and self._here:
            self._bring_head(self._place)

    def _take(self, view: WaitingRequest) -> None:
        """Take a request out of the policy's queue, over those that SGLang has passed over."""
        over = []
        while (head := self._order.head()) is not view:  # type: ignore[comparison-overlap]
            self._order.remove(head)
            over.append(head)
        self._order.take()
        for head in reversed(over):
            self._order.put_back(head)

    def run_batch(self, _: Any, batch: Any, *__: Any, **___: Any) -> None:
        """Tell the policy's books who gets a token by a batch."""
        if self._books is None:
            return
        unfinished = batch.chunked_req if batch.forward_mode.is_extend() else None
        for request in batch.reqs:
            view = getattr(request, "headway_view", None)
            if view is not None and request is not unfinished:
                self._books.emitted(view)


def check_arguments(arguments: Any) -> None:
    """Refuse settings of a server under which a policy cannot order; HeadwayError says why."""
    for name, good, why in (
        ("schedule_policy", ("fcfs",), "the policy orders in its place"),
        ("enable_priority_scheduling", (False, None), "the policy orders in its place"),
        ("tp_size", (1,), "each rank has a scheduler and a clock of its own, and all must agree"),
        ("pp_size", (1,), "each rank has a scheduler and a clock of its own, and all must agree"),
        (
            "disaggregation_mode",
            ("null",),
            "a server that only prefills or decodes queues elsewhere",
        ),
        ("dllm_algorithm", (None,), "diffusion models queue elsewhere"),
    ):
        if getattr(arguments, name, good[0]) not in good:
            given = getattr(arguments, name)
            raise HeadwayError(f"{VARIABLE}: needs {name} {good[0]}, not {given}: {why}")


def hook() -> Ordering:
    """Register the hooks with SGLang; HeadwayError where the policy cannot run there."""
    policy = make_order()
    check_sglang()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    ordering = Ordering(policy)

    def check(_: Any, arguments: Any, *__: Any, **___: Any) -> None:
        try:
            check_arguments(arguments)
        except HeadwayError as error:
            raise SystemExit(f"error: {error}") from error

    for target, function, kind in (
        ("schedule_policy.SchedulePolicy.calc_priority", ordering.calc_priority, HookType.AROUND),
        ("schedule_policy.PrefillAdder.add_one_req", ordering.tried, HookType.AFTER),
        ("scheduler.Scheduler.run_batch", ordering.run_batch, HookType.BEFORE),
    ):
        HookRegistry.register(f"{MODULE}.{target}", function, kind)
    HookRegistry.register(
        "sglang.srt.server_args.ServerArgs.check_server_args", check, HookType.AFTER
    )
    return ordering
