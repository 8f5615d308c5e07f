"""What is simulated is what vLLM decides: against recordings, and where vLLM is installed live.

`recorded.jsonl.gz` has 104 scenarios and what came of each request under vLLM 0.33.0 with the same
policy, written on a CPU by `python -m headway.vllm.parity --count 104 --seed 3 --record FILE`.
"""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headway.vllm.parity import DYNAMIC, ORDERS, PREEMPTIONS, draw_scenario, main, outcome
from simulator.scenario.load import check_scenario
from simulator.util.errors import HeadwayError
from simulator.util.yaml_lines import SourceMap

RECORDED = Path(__file__).parent / "recorded.jsonl.gz"
CASES: list[dict[str, Any]] = [
    json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).splitlines()
]
TURNS = 2 * len((*ORDERS, *DYNAMIC))

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")


@pytest.mark.many
@pytest.mark.parametrize("turn", range(TURNS))
def test_a_policy_decides_as_vllm_did_with_it(turn: int) -> None:
    """Every request, every time, to the last bit."""
    for case in CASES[turn::TURNS]:
        assert outcome(case["scenario"], by_vllm=False) == case["requests"]


def test_the_recordings_have_every_policy_and_make_it_hard() -> None:
    engines = [case["scenario"]["engine"] for case in CASES]
    names = {(e["scheduling_policy"]["policy"], e["async_scheduling"]) for e in engines}
    assert names == {(name, kind) for name in (*ORDERS, *DYNAMIC) for kind in (False, True)}
    preempted = {
        case["scenario"]["engine"]["scheduling_policy"]["policy"]
        for case in CASES
        if any(row[PREEMPTIONS] for row in case["requests"])
    }
    assert preempted == {*ORDERS, *DYNAMIC}


def test_another_order_is_told_apart() -> None:
    """The comparison would see it."""
    case = next(c for c in CASES if c["scenario"]["engine"]["scheduling_policy"]["policy"] == "sjf")
    engine = case["scenario"]["engine"] | {"scheduling_policy": "fcfs"}
    assert outcome(case["scenario"] | {"engine": engine}, by_vllm=False) != case["requests"]


@needs_vllm
def test_the_installed_vllm_decides_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", f"{TURNS}", "--seed", "4"]) == 0
    assert f"{TURNS} scenarios, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"scheduling_policy": "sjf"},
            "vLLM's scheduler has fcfs and priority; with scheduler_cls",
        ),
        (
            {"scheduling_policy": "static", "scheduler_cls": "headway.vllm.HeadwayScheduler"},
            "static is a scheduler of its own: it cannot run in vLLM",
        ),
        (
            {"scheduling_policy": "srpt", "scheduler_cls": "headway.vllm.HeadwayScheduler"},
            "srpt ranks by predicted lengths, and the scenario has no `predictor`",
        ),
        (
            {
                "scheduling_policy": {"policy": "sjf", "age": 3},
                "scheduler_cls": "headway.vllm.HeadwayScheduler",
            },
            "scheduling_policy.age: sjf takes no such argument",
        ),
    ],
)
def test_a_scenario_that_cannot_run_in_vllm_is_refused(
    engine: dict[str, object], message: str
) -> None:
    raw = draw_scenario(1, 0) | {"predictor": None}
    raw["engine"] = raw["engine"] | {"scheduler": "vllm"} | engine
    with pytest.raises(HeadwayError, match=message) as caught:
        check_scenario(raw, SourceMap("s", {}))
    assert "\n" not in str(caught.value)
