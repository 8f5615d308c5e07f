"""vLLM's requests as Headway's policies see them, and their waiting queue as vLLM sees it."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from simulator.policies.waiting_queues import WaitingQueue

LONGEST_HINT = 2**31 - 1  # tokens


class RequestView:
    """vLLM's request under the names that `simulator.core.request.Request` has.

    `client` and `hint`, the predicted output tokens, come in `vllm_xargs`. Without them the client
    is the request's `cache_salt`, or "". Without a prediction, or with one that is none, a policy
    that needs one has `max_tokens` for it, as vLLM fills that in: a request can only ask for less.
    """

    joined = -1  # it is in no decode set: its own counters hold
    swapped = 0
    padding = 0

    def __init__(self, request: Any, number: int, max_model_len: int, needs_hint: bool) -> None:
        params = request.sampling_params
        extra = (params.extra_args if params is not None else None) or {}
        room = max_model_len - request.num_prompt_tokens
        limit = extra.get("max_tokens", request.max_tokens)
        self.vllm = request
        self._output = request._output_token_ids  # one list for good: its length is quickly told
        self.id = number
        self.arrival = request.arrival_time
        self.prompt_tokens = request.num_prompt_tokens
        self.client = str(extra.get("client") or request.cache_salt or "")
        self.priority = request.priority
        self.max_tokens = limit if limit and limit < room else None  # else nobody has said it
        self.hint = read_hint(extra.get("hint"))
        if self.hint is None and needs_hint:
            self.hint = self.max_tokens or max(room, 1)
        self.admission = -1
        self.computed_now = 0  # tokens that the step being decided computes of it
        self.late_tokens = 0  # that were on their way when it was preempted

    @property
    def generated(self) -> int:
        """Output tokens, those included that are still on their way."""
        request = self.vllm
        tokens: int = len(self._output) + request.num_output_placeholders
        stale = getattr(request, "num_stale_output_tokens", 0)  # before 0.27 they stay placeholders
        return tokens + self.late_tokens if stale else tokens

    @property
    def computed(self) -> int:
        """Tokens whose KV is in the cache, or will be after this step."""
        tokens: int = self.vllm.num_computed_tokens + self.computed_now
        return tokens

    @property
    def known(self) -> int:
        tokens: int = self.prompt_tokens + self.generated
        return tokens

    @property
    def pending(self) -> int:
        tokens: int = self.known - self.computed
        return tokens

    @property
    def preemptions(self) -> int:
        count: int = getattr(self.vllm, "num_preemptions", 0)  # 0.11.0 does not count them
        return count


def read_hint(value: object) -> int | None:
    """Read a predicted length; None where it is none: no client may end the engine."""
    try:
        tokens = int(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return tokens if 1 <= tokens <= LONGEST_HINT else None


class PolicyQueue:
    """A waiting queue of Headway's with the methods of vLLM's `RequestQueue`.

    vLLM takes the head out when it admits it, and also when it passes over it (no LoRA slot, a
    grammar that is not ready). `admits` tells the two apart: only who is admitted is charged for
    it, by `take`; others are removed, and come back by `prepend_requests`.
    """

    def __init__(
        self,
        order: WaitingQueue,
        view: Callable[[Any], RequestView],
        admits: Callable[[Any], bool],
    ) -> None:
        self.order = order
        self.arrivals = 0  # requests that came, or left before they were admitted
        self.admissions = 0
        self.set_aside: list[Any] | None = None  # a list: who is preempted comes back later
        self._view = view
        self._admits = admits
        self._here: dict[str, RequestView] = {}
        self._head: Any = None  # vLLM's request, until something may have changed

    def forget_head(self) -> None:
        """Ask the order anew who is first: time has gone by, or tokens have come out."""
        self._head = None

    def add_request(self, request: Any) -> None:
        self._head = None
        view = self._here[request.request_id] = self._view(request)
        self.arrivals += 1
        self.order.add(view)  # type: ignore[arg-type]

    def prepend_request(self, request: Any) -> None:
        """Take back a preempted request; its place is the policy's affair."""
        if self.set_aside is not None:
            self.set_aside.append(request)
            return
        self._head = None
        view = self._here[request.request_id] = self._view(request)
        self.order.put_back(view)  # type: ignore[arg-type]

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Take back those that were passed over."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Any:
        if not self._here:
            raise IndexError("peek from an empty queue")
        if self._head is None:
            self._head = self.order.head().vllm  # type: ignore[attr-defined]
        return self._head

    def pop_request(self) -> Any:
        request = self.peek_request()
        self._head = None
        view = self._here.pop(request.request_id)
        if self._admits(request):
            view.admission = self.admissions
            self.admissions += 1
            self.order.take()
        else:
            self.order.remove(view)  # type: ignore[arg-type]
        return request

    def remove_request(self, request: Any) -> None:
        self._head = None
        self.arrivals += 1
        self.order.remove(self._here.pop(request.request_id))  # type: ignore[arg-type]

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            if request.request_id in self._here:
                self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._here)

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[Any]:
        """Yield those who wait, in the order in which they came: vLLM only counts and filters."""
        return iter([view.vllm for view in self._here.values()])
