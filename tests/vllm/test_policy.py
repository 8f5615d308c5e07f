"""Which policy runs in vLLM, and what a queue of it does behind vLLM's interface; without vLLM."""

import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

from headway.vllm.__main__ import main
from headway.vllm.policy import CLASSES, make_policy
from headway.vllm.waiting_queue import PolicyQueue, RequestView
from simulator.core.decode_set import DecodeSet
from simulator.policies.fair import Fair
from simulator.policies.orders import SJF
from simulator.policies.policy import Batch
from simulator.policies.waiting_queues import queue_of
from simulator.util.errors import HeadwayError


def vllm_request(
    name: str, prompt: int = 10, arrival: float = 0.0, salt: str | None = None, **extra: object
) -> Any:
    """What RequestView reads of vLLM's request."""
    return SimpleNamespace(
        request_id=name,
        arrival_time=arrival,
        num_prompt_tokens=prompt,
        max_tokens=50,
        priority=0,
        cache_salt=salt,
        sampling_params=SimpleNamespace(extra_args=extra or None),
        _output_token_ids=[],
        num_output_placeholders=0,
        num_computed_tokens=0,
        num_preemptions=0,
    )


def view_of(request: Any, *, needs_hint: bool = False) -> RequestView:
    return RequestView(request, 0, 200, needs_hint)


def queue(policy: Any, admitted: set[str]) -> tuple[PolicyQueue, Any]:
    """A queue of which vLLM admits those named, and passes over others."""
    batch: Batch = SimpleNamespace(now=0.0, decodes=DecodeSet(16))  # type: ignore[assignment]
    views: dict[str, RequestView] = {}

    def view(request: Any) -> RequestView:
        return views.setdefault(request.request_id, view_of(request))

    made = PolicyQueue(queue_of(policy, batch), view, lambda one: one.request_id in admitted)
    return made, batch


@pytest.mark.parametrize("name", [name for name, policy in CLASSES.items() if policy])
def test_every_class_makes_its_policy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_POLICY", raising=False)
    made = make_policy(CLASSES[name])
    assert any(hasattr(made, hook) for hook in ("key", "rank", "queue"))


def test_the_environment_has_name_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_POLICY", '{"policy": "sjf", "by": "hint", "ageing": 20}')
    made = make_policy(None)
    assert isinstance(made, SJF)
    assert (made.by, made.ageing) == ("hint", 20)
    monkeypatch.setenv("HEADWAY_POLICY", '{"by": "total"}')
    assert make_policy("sjf").by == "total"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "HEADWAY_POLICY: is not set; it names a policy"),
        ("sjf", "HEADWAY_POLICY: 'sjf' is no JSON: "),
        ("[]", r"HEADWAY_POLICY: must be a JSON object, not '\[\]'"),
        ('{"policy": "sjff"}', "HEADWAY_POLICY: no policy 'sjff'; there are priority, .*sjf"),
        ('{"policy": 3}', "HEADWAY_POLICY: no policy 3; "),
        ('{"policy": "static"}', "HEADWAY_POLICY: static is no policy that orders .* vLLM"),
        ('{"policy": "sglang"}', "HEADWAY_POLICY: sglang is no policy that orders .* vLLM"),
        ('{"policy": "nowhere:X"}', "HEADWAY_POLICY: cannot load nowhere:X: "),
        ('{"policy": "json:JSONDecoder"}', "HEADWAY_POLICY: json:JSONDecoder has no method `key"),
        ('{"policy": "sjf", "byy": 1}', "HEADWAY_POLICY: sjf: byy: sjf takes no such argument"),
        ('{"policy": "sjf", "by": "x"}', "HEADWAY_POLICY: sjf: by: must be one of prompt, "),
        ('{"policy": "sjf", "ageing": "x"}', "HEADWAY_POLICY: sjf: ageing: "),
    ],
)
def test_what_cannot_run_is_told_in_one_line(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWAY_POLICY", text)
    with pytest.raises(HeadwayError, match=message) as caught:
        make_policy(None)
    assert "\n" not in str(caught.value)
    assert main([]) == 2
    assert capsys.readouterr().err == f"error: {caught.value}\n"


def test_a_class_and_another_policy_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_POLICY", '{"policy": "fair"}')
    with pytest.raises(HeadwayError, match="'fair' cannot be used with a class that is sjf"):
        make_policy("sjf")


def test_client_and_prediction_come_in_vllm_xargs() -> None:
    view = view_of(vllm_request("a", client="shop", hint="120", salt="s"))
    assert (view.client, view.hint, view.max_tokens) == ("shop", 120, 50)
    assert view_of(vllm_request("a", salt="s")).client == "s"
    assert view_of(vllm_request("a")).client == ""


@pytest.mark.parametrize("hint", ["many", -5, 0, None, [], float("nan"), 1e300, {}])
def test_without_a_prediction_it_is_what_the_client_allows(hint: object) -> None:
    """A value that is none ends no engine."""
    assert view_of(vllm_request("a", hint=hint)).hint is None
    assert view_of(vllm_request("a", hint=hint), needs_hint=True).hint == 50


def test_a_client_that_allows_all_there_is_has_said_nothing() -> None:
    """VLLM fills max_tokens in with what the context leaves."""
    request = vllm_request("a", prompt=150)
    assert view_of(request).max_tokens is None
    assert view_of(request, needs_hint=True).hint == 50


def test_the_order_is_asked_for_its_head_once_until_something_changes() -> None:
    waiting, _ = queue(SJF(), {"a", "b"})
    asked: list[Any] = []
    head = waiting.order.head
    waiting.order.head = lambda: asked.append(1) or head()  # type: ignore[method-assign,func-returns-value]
    for name, prompt in (("a", 9), ("b", 3)):
        waiting.add_request(vllm_request(name, prompt))
    assert [waiting.peek_request().request_id for _ in range(3)] == ["b"] * 3
    assert len(asked) == 1
    waiting.add_request(vllm_request("c", 1))
    assert waiting.peek_request().request_id == "c"
    waiting.remove_requests([waiting.peek_request()])
    assert waiting.pop_request().request_id == "b"
    assert len(asked) == 3
    waiting.peek_request()
    waiting.forget_head()
    assert waiting.peek_request().request_id == "a"
    assert len(asked) == 5


def test_the_queue_is_in_the_order_of_the_policy() -> None:
    waiting, _ = queue(SJF(), {"a", "b", "c"})
    for name, prompt in (("a", 9), ("b", 3), ("c", 5)):
        waiting.add_request(vllm_request(name, prompt))
    assert [one.request_id for one in waiting] == ["a", "b", "c"]
    assert waiting.peek_request().request_id == "b"
    assert [waiting.pop_request().request_id for _ in range(3)] == ["b", "c", "a"]
    assert not waiting
    with pytest.raises(IndexError, match="empty queue"):
        waiting.peek_request()


def test_only_who_is_admitted_is_charged() -> None:
    """A head that vLLM passes over comes back, and its client has paid nothing."""
    admitted: set[str] = set()
    waiting, _ = queue(Fair(), admitted)
    books = waiting.order
    first, second = vllm_request("a", 7, client="x"), vllm_request("b", 5, client="y")
    waiting.add_request(first)
    waiting.add_request(second)
    books.settle(0.0)  # type: ignore[attr-defined]
    assert waiting.pop_request() is first
    waiting.prepend_requests([first])
    assert books.account("x").prompt == 0  # type: ignore[attr-defined]
    assert len(waiting) == 2
    admitted |= {"a", "b"}
    assert {waiting.pop_request().request_id for _ in range(2)} == {"a", "b"}
    assert books.account("x").prompt == 7  # type: ignore[attr-defined]


def test_aborted_requests_leave_the_queue() -> None:
    waiting, _ = queue(SJF(), {"b"})
    requests = [vllm_request("a", 1), vllm_request("b", 2)]
    for one in requests:
        waiting.add_request(one)
    waiting.remove_requests([requests[0], vllm_request("elsewhere")])
    assert waiting.pop_request() is requests[1]
    assert len(waiting) == 0


def test_who_is_set_aside_is_not_in_the_queue() -> None:
    waiting, _ = queue(SJF(), set())
    waiting.set_aside = []
    waiting.prepend_request(vllm_request("a"))
    assert len(waiting) == 0
    assert len(waiting.set_aside) == 1


def test_without_vllm_or_with_another_the_class_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one line, before anything of vLLM is imported."""
    import headway.vllm

    def none(_: str) -> str:
        raise PackageNotFoundError

    for found, message in (
        (none, "headway.vllm: vLLM is not installed in this Python"),
        *(
            (
                lambda _, release=release: release,
                f"headway.vllm: fits vLLM 0.11 to 0.33, and {release} is installed: ",
            )
            for release in ("0.10.2", "0.32.1", "0.34.0", "0.330.0")
        ),
    ):
        monkeypatch.setattr("headway.vllm.interface.version", found)
        for name in ("recorded", "scheduler"):
            monkeypatch.delitem(sys.modules, f"headway.vllm.{name}", raising=False)
        with pytest.raises(HeadwayError, match=message):
            _ = headway.vllm.SJF
    with pytest.raises(AttributeError, match="no attribute 'Sjf'"):
        _ = headway.vllm.Sjf
