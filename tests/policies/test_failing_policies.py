"""Policies of the user's that fail: one line that names them, not a traceback."""

from math import nan

import pytest

from headway.cli.main import main
from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.policy import victim_of
from simulator.policies.waiting_queues import KeyQueue
from simulator.scenario.load import load_scenario
from simulator.schedulers.running_requests import (
    FUTILE_STEPS,
    EndlessPreemptionError,
    PreemptionLoop,
)
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError
from tests.support.engines import play, workload
from tests.support.scenarios import errors

SCENARIO = """name: mine
engine: {scheduling_policy: "%s:Mine", max_num_seqs: 1, enable_prefix_caching: false}
cost: {kind: linear, base: 1e-2}
workload: {num_prompts: 5, request_rate: 20, input_len: 64, output_len: 8}
"""


class Keyed:
    """Gives each request the key that a list has for it."""

    def __init__(self, *keys: object) -> None:
        self.keys = keys

    def key(self, request: Request) -> object:
        return self.keys[request.id]


class Choosy(Keyed):
    """Preempts whatever it was told to."""

    def __init__(self, chosen: object) -> None:
        super().__init__(0, 1, 2, 3)
        self.chosen = chosen

    def victim(self, running: object) -> object:
        if isinstance(self.chosen, Exception):
            raise self.chosen
        return self.chosen


def ranked(*keys: object) -> list[int]:
    """Take requests with these keys in and out; return their ids in that order."""
    queue = KeyQueue(Keyed(*keys))
    for id in range(len(keys)):
        queue.add(Request(id, 0.0, 1, 1))
    return [queue.take().id for _ in keys]


def printed_errors(capsys) -> list[str]:
    """The lines on standard error, without the warning that so many requests are too many."""
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if not line.startswith("headway: warning: answers of ")]


def test_keys_of_any_kind_that_has_an_order_will_do() -> None:
    """Equals go in order of joining."""
    assert ranked(3, 1.5, 2, 1.5) == [1, 3, 2, 0]
    assert ranked((1, "b"), (1, "a"), (0, "c")) == [2, 1, 0]
    assert ranked("b", "a") == [1, 0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ((nan,), "nan of request 0 cannot be ranked: NaN is neither less nor more than anything"),
        (
            ((1, nan),),
            "(1, nan) of request 0 cannot be ranked: NaN is neither less nor more than anything",
        ),
        (
            (None,),
            "None of request 0 cannot be ranked: '<' not supported between instances of "
            "'NoneType' and 'NoneType'",
        ),
        (
            (1, "a"),
            "'a' of request 1 cannot be ranked: '<' not supported between instances of 'str' and "
            "'int'",
        ),
        (
            ((0, 0), (1, 1), (1, "a")),  # told only once the head is gone
            "a key cannot be ranked: '<' not supported between instances of 'str' and 'int'",
        ),
    ],
)
def test_keys_without_an_order_are_refused(keys: tuple[object, ...], message: str) -> None:
    """By the name of the policy's class."""
    with pytest.raises(HeadwayError) as caught:
        ranked(*keys)
    assert caught.value.messages == [f"engine.scheduling_policy: Keyed.key: {message}"]


def test_removal_may_show_that_keys_have_no_order_too() -> None:
    """Two that never met in the heap do so then."""
    queue = KeyQueue(Keyed((0, 0), (1, 1), (1, "a")))
    requests = [Request(id, 0.0, 1, 1) for id in range(3)]
    for request in requests:
        queue.add(request)
    with pytest.raises(HeadwayError, match=r"Keyed.key: a key cannot be ranked"):
        queue.remove(requests[0])


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (None, "gave None, which is none of the running requests"),
        ([], "raised TypeError: unhashable type: 'list'"),
        (KeyError("x"), "raised KeyError: 'x' (test_failing_policies.py:"),
    ],
)
def test_a_victim_must_be_running(chosen: object, message: str) -> None:
    """Blocks for two: the third token of one of two requests lacks one."""
    scheduler = Scheduler(BlockCounter(7, 1), policy=Choosy(chosen))
    with pytest.raises(HeadwayError) as caught:
        play(workload((0.0, 2, 4), (0.0, 2, 4)), scheduler)
    (told,) = caught.value.messages
    assert told.startswith(f"engine.scheduling_policy: Choosy.victim(running) {message}")


class Queueing:
    """Brings along what it was told to as its waiting queue."""

    def __init__(self, queue: object) -> None:
        self.given = queue

    def queue(self, batch: object) -> object:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        (None, "gave None, which is no waiting queue: it has no moves, __len__, add, put_back, he"),
        ([], "gave [], which is no waiting queue: it has no moves, add, put_back, head, take"),
        (KeyError("q"), "raised KeyError: 'q' (test_failing_policies.py:"),
    ],
)
def test_a_queue_of_ones_own_must_be_one(queue: object, message: str) -> None:
    with pytest.raises(HeadwayError) as caught:
        Scheduler(BlockCounter(7, 1), policy=Queueing(queue))
    (told,) = caught.value.messages
    assert told.startswith(f"engine.scheduling_policy: Queueing.queue(batch) {message}")


def test_a_policy_without_a_victim_has_none() -> None:
    """The last admitted goes then."""
    assert victim_of(None) is None
    assert victim_of(Keyed()) is None


def test_a_policy_that_cannot_be_loaded_is_one_line(tmp_path) -> None:
    """Found before the run begins."""
    (tmp_path / "unloaded_policy.py").write_text("class Mine(Unknown): ...\n")
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO % "unloaded_policy")
    what = "NameError: name 'Unknown' is not defined (unloaded_policy.py:1)"
    told = f"cannot load unloaded_policy:Mine: {what}"
    assert errors(path) == [f"s.yaml:2: engine.scheduling_policy: {told}"]


SCHEDULER = """from simulator.schedulers.vllm.scheduler import Scheduler

class Mine(Scheduler):
    def schedule(self, now):
        %s
        return super().schedule(now)
"""
UNMADE_POLICY = "class Mine:\n    key = len\n    def __init__(self):\n        self.a = {}[3]\n"
UNMADE_SCHEDULER = SCHEDULER.replace("schedule(self, now)", "__init__(self, blocks, **options)")


@pytest.mark.parametrize(
    ("module", "text"),
    [("unmade_policy", UNMADE_POLICY), ("unmade_scheduler", UNMADE_SCHEDULER % "{}[3]")],
)
@pytest.mark.parametrize("more", [[], ["--set", "cluster.replicas=2"], ["--no-tables"]])
def test_what_cannot_be_made_is_one_line_and_exit_code_2(
    tmp_path, capsys, monkeypatch, module: str, text: str, more: list[str]
) -> None:
    """Loading a scenario makes nothing of the user's; a run does, before anything is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{module}.py").write_text(text)
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO % module)
    load_scenario(path)
    assert main(["run", str(path), "--quiet", *more]) == 2
    (message,) = printed_errors(capsys)
    line = 1 + text[: text.index("{}[3]")].count("\n")
    told = f"{path}:2: engine.scheduling_policy: Mine raised KeyError: 3 ({module}.py:{line})"
    assert message == f"headway: error: {told}"
    assert not (tmp_path / "out").exists()


def test_a_policy_that_fails_in_a_run_is_one_line_and_exit_code_2(
    tmp_path, capsys, monkeypatch
) -> None:
    """With the line of the policy's file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing_policy.py").write_text(
        "class Mine:\n    def key(self, request):\n        return 1 / (request.id - 3)\n"
    )
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO % "failing_policy")
    assert main(["run", str(path), "--quiet"]) == 2
    assert printed_errors(capsys) == [
        "headway: error: engine.scheduling_policy: Mine.key(request 3) raised ZeroDivisionError: "
        "division by zero (failing_policy.py:3)"
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "None.computed",
            "Mine: schedule raised AttributeError: 'NoneType' object has no attribute 'computed' "
            "(%s.py:5)",
        ),
        ("{}[7]", "Mine: schedule raised KeyError: 7 (%s.py:5)"),
        (
            "from simulator.core.request import Step; return Step([])",
            "Mine raised RuntimeError: the scheduler does nothing though requests wait, at %s s",
        ),
    ],
)
@pytest.mark.parametrize("router", [None, "round_robin", "least_outstanding"])
def test_a_scheduler_that_fails_is_one_line_and_exit_code_2(
    tmp_path, capsys, monkeypatch, line: str, told: str, router: str | None
) -> None:
    """With the last line of its own file, also where the engine raises."""
    monkeypatch.chdir(tmp_path)
    module = f"failing_scheduler_{len(line)}"
    (tmp_path / f"{module}.py").write_text(SCHEDULER % line)
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO % module)
    more = ["--set", f"cluster={{replicas: 2, router: {router}}}"] if router else []
    assert main(["run", str(path), "--quiet", *more]) == 2
    (message,) = printed_errors(capsys)
    before, after = told.split("%s")
    assert message.startswith(f"headway: error: engine.scheduling_policy: {before}")
    assert message.endswith(after)
    assert not (tmp_path / "out").exists()


def test_steps_in_vain_count_from_the_last_arrival() -> None:
    """Whoever comes may be what the next preemptions are for."""
    loop, decodes = PreemptionLoop("mine"), DecodeSet(4)
    for step in range(2 * FUTILE_STEPS):
        if step % FUTILE_STEPS == 0:
            loop.arrived()
        loop.preempted(float(step), decodes)
    with pytest.raises(EndlessPreemptionError, match="mine goes round in circles"):
        loop.preempted(2.0 * FUTILE_STEPS, decodes)
