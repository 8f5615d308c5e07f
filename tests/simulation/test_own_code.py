"""Cost models of the user's own: what is wrong with one is one line that names it."""

import re
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from headway.cli.main import main
from headway.testing import check_policy
from simulator.core.executor import Leap, Timing
from simulator.costs.cost_model import CostModel, UserCost, check_cost
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from tests.support.scenarios import SMALL

FILE = Path(__file__).name


@pytest.fixture(scope="module")
def scenario():
    load = {"num_prompts": 12, "request_rate": 4, "input_len": 200, "output_len": 30}
    return load_scenario({"name": "own", "engine": {"max_num_seqs": 4}, "workload": load})


class Own(CostModel):
    """Its answers are what a test says."""

    def __init__(self, timing=None, leap=None):
        self.timing, self.answer = timing or Timing(0.01), leap

    def execute(self, step):
        return self.timing if isinstance(self.timing, Timing) else self.timing(step)

    def leap(self, step, repeats):
        return Leap([0.01] * repeats) if self.answer is None else self.answer(repeats)


class OnlyExecutes(CostModel):
    def execute(self, step):
        return Timing(0.01 + 1e-5 * step.tokens + 1e-7 * step.context)


class Both(OnlyExecutes):
    def leap(self, step, repeats):
        contexts = (step.context + k * step.decodes for k in range(repeats))
        return Leap([0.01 + 1e-5 * step.decodes + 1e-7 * one for one in contexts])


class OnlyLeaps(CostModel):
    def leap(self, step, repeats):
        return Leap([0.01] * repeats)


@pytest.mark.parametrize(
    "answer", [Timing(-0.01), Timing(nan), Timing(inf), Timing("0.01"), Timing(0.1, host=nan)]
)
def test_a_step_takes_a_finite_time(scenario, answer):
    said = rf"^cost: Own.execute must give finite times of 0 s or more, not .*\({FILE}:\d+\)$"
    with pytest.raises(HeadwayError, match=said):
        run(scenario, cost=Own(answer))


@pytest.mark.parametrize("answer", [0.01, {}])
def test_execute_returns_a_timing(scenario, answer):
    with pytest.raises(HeadwayError, match=rf"^cost: Own.execute must .* not .*\({FILE}:\d+\)$"):
        run(scenario, cost=Own(lambda step: answer))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda repeats: Leap([]), "say what each of .* steps takes, not 0"),
        (lambda repeats: Leap([0.01] * (repeats - 1)), "say what each of .* steps takes, not"),
        (lambda repeats: Leap([0.01] * (repeats + 1)), "say what each of .* steps takes, not"),
        (lambda repeats: Leap(0.01), "say what each of .* steps takes, not 1"),
        (lambda repeats: Leap([nan] * repeats), "give finite times of 0 s or more, not"),
        (lambda repeats: Leap([0.01] * repeats, [nan]), "give finite times of 0 s or more, not"),
        (lambda repeats: [0.01] * repeats, "return a Leap, not"),
    ],
)
def test_a_leap_has_the_time_of_every_step(scenario, answer, said):
    with pytest.raises(HeadwayError, match=rf"^cost: Own.leap must {said}.* \({FILE}:\d+\)$"):
        run(scenario, cost=Own(leap=answer))


def test_a_leap_agrees_with_execute(scenario):
    said = rf"^cost: Own.leap must agree with execute, .* takes 0.01 s, not 0.02 \({FILE}:\d+\)$"
    with pytest.raises(HeadwayError, match=said):
        run(scenario, cost=Own(leap=lambda repeats: Leap([0.02] * repeats)))


def test_what_a_method_raises_has_its_line(scenario):
    said = rf"^cost: Own: <lambda> raised ZeroDivisionError: division by zero \({FILE}:\d+\)$"
    with pytest.raises(HeadwayError, match=said):
        run(scenario, cost=Own(lambda step: 1 / 0))
    with pytest.raises(HeadwayError, match=said):
        run(scenario, cost=Own(leap=lambda repeats: 1 / 0))


@pytest.mark.parametrize("given", [Own, "roofline", {"kind": "roofline"}, 5])
def test_what_is_no_cost_model_is_refused(scenario, given):
    with pytest.raises(HeadwayError, match=r"^cost: must be an instance of CostModel, not "):
        run(scenario, cost=given)


def test_execute_is_needed_and_leap_is_not(scenario):
    """Without `leap` each step is executed by itself, for the same times."""
    with pytest.raises(HeadwayError, match=r"^cost: OnlyLeaps has no method execute\(step\)$"):
        run(scenario, cost=OnlyLeaps())
    plain, leaping = (run(scenario, cost=one).requests for one in (OnlyExecutes(), Both()))
    assert np.array_equal(plain.e2el, leaping.e2el)
    assert plain.e2el.min() > 0.3


def test_the_cost_models_of_headway_are_not_wrapped(scenario):
    own = UserCost(Both())
    assert check_cost(own) is own
    assert check_cost(own.inner) == own


PROMOTES = """
class Promotes:
    def key(self, request):
        return request.arrival
    def promote(self, request):
        pass

class Fails:
    def __init__(self):
        {}["foo"]
    def key(self, request):
        return request.arrival
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWAY_NO_OWN_CODE", raising=False)
    (tmp_path / "s.yaml").write_text(SMALL)
    (tmp_path / "promoting.py").write_text(PROMOTES)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Promotes", "Promotes.patience must be more than 0 seconds, not None"),
        ("Fails", "Fails raised KeyError: 'foo' (promoting.py:10)"),
    ],
)
def test_a_policy_that_cannot_be_made(folder, capsys, name, said):
    """Of the scenario it is one line for every verb, also where it is all that a plan tries."""
    own = ["--set", f"engine.scheduling_policy=promoting:{name}"]
    for verb in (["run", "s.yaml"], ["plan", "s.yaml", "--slo", "p99_ttft_ms<=9000"]):
        assert main([*verb, *own, "--quiet"]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(AssertionError, match=re.escape(said)):
        check_policy(f"promoting:{name}")


@pytest.mark.parametrize(
    ("module", "text", "said"),
    [
        ("divides", "\n\ny = 1 / 0\n", "ZeroDivisionError: division by zero (divides.py:3)"),
        ("exits", "import sys\nsys.exit(4)\n", "SystemExit: 4 (exits.py:2)"),
        ("empty_one", "", "AttributeError: <module 'empty_one' from '/"),
    ],
)
def test_code_that_cannot_be_loaded_has_its_line(folder, module, text, said):
    (folder / f"{module}.py").write_text(text)
    with pytest.raises(HeadwayError, match=re.escape(f"cannot load {module}:P: {said}")):
        load_scenario("s.yaml", [f"engine.scheduling_policy={module}:P"])


class Rewrites:
    """It makes every prompt short."""

    def key(self, request):
        request.prompt_tokens = 1
        return request.arrival


def test_a_policy_changes_no_request():
    with pytest.raises(AssertionError, match=r"^Rewrites changes a request: prompt_tokens of req"):
        check_policy(Rewrites)
