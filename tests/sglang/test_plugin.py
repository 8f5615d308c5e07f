"""What the plug-in does with SGLang's queue, and what it refuses; without SGLang."""

import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

import headway.sglang
from headway.sglang import policy as policy_module
from headway.sglang.__main__ import main
from headway.sglang.plugin import Ordering, WaitingRequest, check_arguments
from headway.sglang.policy import ORDERS, check_sglang, make_order
from headway.vllm.policy import PLUGIN_POLICIES
from simulator.policies.fair import Fair
from simulator.policies.orders import HRRN, SJF
from simulator.util.errors import HeadwayError

CONTINUE, NO_TOKEN = SimpleNamespace(name="CONTINUE"), SimpleNamespace(name="NO_TOKEN")


class Req:
    """What the plug-in reads of SGLang's request."""

    def __init__(self, name: str, prompt: int = 10, entered: float = 0.0, **custom: object) -> None:
        self.rid = name
        self.origin_input_ids = [0] * prompt
        self.output_ids: list[int] = []
        self.retraction_count = 0
        self.priority = None
        self.extra_key = self.cache_salt = None
        self.time_stats = SimpleNamespace(wait_queue_entry_time=entered)
        self.sampling_params = SimpleNamespace(max_new_tokens=50, custom_params=custom or None)


class Engine:
    """SGLang's pass over its queue, as far as the plug-in has to do with it."""

    def __init__(self, policy: Any) -> None:
        self.ordering = Ordering(policy)
        self.ordering.clock = lambda: 100.0  # type: ignore[method-assign]
        self.queue: list[Any] = []
        self.touched: list[str] = []  # the queue as SGLang itself goes through it

    def pass_over(self, seats: int, skip: tuple[str, ...] = ()) -> list[str]:
        """Admit so many, in the order of the queue, but for those skipped; return whom."""
        self.ordering.calc_priority(self._calc_priority, None, self.queue, None)
        admitted: list[Any] = []
        for request in self.queue:
            if request.rid in skip:
                continue
            if len(admitted) == seats:
                result = NO_TOKEN
            else:
                admitted.append(request)
                result = CONTINUE
            adder = SimpleNamespace(can_run_list=admitted)
            self.ordering.tried(result, adder, request, False, None)
            if result is NO_TOKEN:
                break
        self.queue = [request for request in self.queue if request not in admitted]
        return [request.rid for request in admitted]

    def _calc_priority(self, _: Any, queue: list[Any], *__: Any) -> None:
        self.touched = [request.rid for request in queue]

    def run(self, *requests: Any, chunked: Any = None) -> None:
        mode = SimpleNamespace(is_extend=lambda: chunked is not None)
        batch = SimpleNamespace(reqs=requests, forward_mode=mode, chunked_req=chunked)
        self.ordering.run_batch(None, batch)


def test_the_policy_says_who_is_tried_next() -> None:
    engine = Engine(SJF())
    engine.queue = [Req("a", 30), Req("b", 20), Req("c", 40), Req("d", 10)]
    assert engine.pass_over(2) == ["d", "b"]
    assert engine.pass_over(5) == ["a", "c"]


def test_sglang_itself_sees_the_order_of_queueing_up() -> None:
    """Who stood in front and was not admitted is back in its place."""
    engine = Engine(SJF())
    engine.queue = [Req("a", 30), Req("b", 20), Req("c", 40), Req("d", 25)]
    assert engine.pass_over(1) == ["b"]
    engine.queue.append(Req("e", 35))
    assert engine.pass_over(0) == []
    assert engine.touched == ["a", "c", "d", "e"]
    assert [request.rid for request in engine.queue] == ["d", "a", "c", "e"]


def test_who_is_aborted_while_waiting_is_forgotten() -> None:
    engine = Engine(SJF())
    engine.queue = [Req("a", 30), Req("b", 20), Req("c", 40)]
    engine.pass_over(0)
    engine.queue = [request for request in engine.queue if request.rid != "b"]
    engine.queue.append(Req("d", 50))
    assert engine.pass_over(9) == ["a", "c", "d"]


def test_whom_sglang_passes_over_keeps_its_turn() -> None:
    """No LoRA slot, say: others go, in the order of the policy as soon as one is admitted."""
    engine = Engine(SJF())
    engine.queue = [Req("a", 30), Req("b", 20), Req("c", 40), Req("d", 35)]
    assert engine.pass_over(2, skip=("b",)) == ["a", "c"]
    assert engine.pass_over(2) == ["b", "d"]


def test_a_retracted_request_is_put_back() -> None:
    engine = Engine(Fair())
    first, second = Req("a", 10, client="x"), Req("b", 10, client="x")
    engine.queue = [first, second]
    assert engine.pass_over(1) == ["a"]
    first.output_ids, first.retraction_count = [1, 2], 1
    engine.queue.append(first)
    assert engine.pass_over(1) == ["a"]  # before its client's others, and for nothing
    accounts = engine.ordering._books.account("x")  # type: ignore[union-attr]
    assert accounts.prompt == 10


def test_books_count_a_token_for_all_but_a_split_prompt() -> None:
    engine = Engine(Fair())
    one, other = Req("a", client="x"), Req("b", client="y")
    engine.queue = [one, other]
    engine.pass_over(2)
    engine.run(one, other, chunked=other)
    engine.run(one, other)
    account = engine.ordering._books.account  # type: ignore[union-attr]
    assert (account("x").output, account("y").output) == (2, 1)


def test_an_order_that_changes_with_time_is_ranked_at_each_pass() -> None:
    engine = Engine(HRRN())
    engine.queue = [Req("a", 10, entered=60.0), Req("b", 100, entered=0.0)]
    assert engine.pass_over(0) == []
    assert engine.queue[0].rid == "a"  # 40 / 10 against 100 / 100
    engine.ordering.clock = lambda: 60.1  # type: ignore[method-assign]
    assert engine.pass_over(1) == ["b"]


def test_client_and_hint_have_fall_backs() -> None:
    said = WaitingRequest(Req("a", client="shop", hint=7), 0, True)
    assert (said.client, said.hint, said.max_tokens) == ("shop", 7, 50)
    silent = Req("b")
    silent.cache_salt = "salt"
    view = WaitingRequest(silent, 1, True)
    assert (view.client, view.hint, view.priority) == ("salt", 50, 0)
    for nonsense in ({"hint": "x"}, {"hint": {}}, [1], "x", 3):
        request = Req("c")
        request.sampling_params.custom_params = nonsense
        odd = WaitingRequest(request, 2, False)
        assert (odd.client, odd.hint) == ("", None)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ('{"policy": "srpt"}', "srpt lets waiting requests displace running ones: under SGLang"),
        ('{"policy": "priority"}', "priority picks victims: under SGLang"),
        ('{"policy": "static"}', "static is no policy that orders .* cannot run in SGLang"),
        ('{"policy": "sjf", "age": 3}', "HEADWAY_POLICY: sjf: age: sjf takes no such argument"),
        ("sjf", "HEADWAY_POLICY: 'sjf' is no JSON"),
    ],
)
def test_a_policy_that_cannot_run_there_is_refused_in_one_line(
    spec: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWAY_POLICY", spec)
    with pytest.raises(HeadwayError, match=message) as caught:
        make_order()
    assert "\n" not in str(caught.value)
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        headway.sglang.register()
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_the_variable_the_plugin_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_POLICY", raising=False)
    monkeypatch.setitem(sys.modules, "headway.sglang.plugin", None)  # importing it would fail
    headway.sglang.register()


@pytest.mark.parametrize(
    ("found", "plugins", "message"),
    [
        (None, True, "SGLang is not installed in this Python"),
        ("0.4.1", False, r"SGLang 0.4.1 has no plug-ins \(sglang.srt.plugins\)"),
        ("0.5.30", True, "fits SGLang 0.5.23, and 0.5.30 is installed: what it hooks is private"),
        ("0.5.23", True, None),
        ("0.5.23.post1", True, None),
    ],
)
def test_another_sglang_is_refused(
    found: str | None, plugins: bool, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(_: str) -> str:
        if found is None:
            raise PackageNotFoundError
        return found

    monkeypatch.setattr(policy_module, "version", version)
    has = {"sglang", "sglang.srt.plugins"} if plugins else {"sglang"}
    monkeypatch.setattr(policy_module, "find_spec", lambda name: name if name in has else None)
    if message is None:
        assert check_sglang() == found
        return
    with pytest.raises(HeadwayError, match=message):
        check_sglang()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule_policy": "lpm"}, "needs schedule_policy fcfs, not lpm"),
        ({"enable_priority_scheduling": True}, "needs enable_priority_scheduling False"),
        ({"tp_size": 2}, "needs tp_size 1, not 2: each rank has a scheduler and a clock"),
        ({"disaggregation_mode": "prefill"}, "needs disaggregation_mode null"),
    ],
)
def test_a_server_that_the_policy_cannot_order_is_refused(
    given: dict[str, object], message: str
) -> None:
    good = {"schedule_policy": "fcfs", "tp_size": 1, "pp_size": 1, "disaggregation_mode": "null"}
    check_arguments(SimpleNamespace(**good))
    with pytest.raises(HeadwayError, match=f"HEADWAY_POLICY: {message}"):
        check_arguments(SimpleNamespace(**good | given))


def test_the_policies_that_are_named_are_those_that_only_order() -> None:
    """Of all that run in vLLM, those that SGLang's plug-in does not refuse."""
    assert {*ORDERS} == {"sjf", "boost", "hrrn", "fair", "wfq", "drr"}
    assert {*PLUGIN_POLICIES} - {*ORDERS} == {
        *("priority", "preemptive", "deadline", "srpt", "mlfq", "virtual-finish-time")
    }
