"""Length predictors: what they say, that the seed alone decides it, and that it is written down."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from headway.planning.design import expand
from simulator import load_scenario, run
from simulator.core.request import Request
from simulator.policies.predictor import make_predictor, parse_predictor
from simulator.workload.workload import Workload
from tests.support.engines import workload
from tests.support.scenarios import SMALL, errors
from tests.support.with_fields import with_fields

DEMO = Path(__file__).parents[2] / "scenarios" / "demo.yaml"
LENGTHS = [5, 10, 200, 3000, 40_000, 77]


def load_of(*lengths: int) -> Workload:
    return workload(*((0.0, 1, n) for n in lengths))


def hints(values: Mapping[str, object], load: Workload, seed: int = 0) -> list[int]:
    """Predict all, in order of id."""
    predictor = make_predictor(parse_predictor(values), load, seed)
    assert predictor is not None
    return [predictor.predict(Request(i, 0.0, 1, 1)) for i in range(len(load))]


def test_the_oracle_knows() -> None:
    """And a noisy one without noise."""
    assert hints({"kind": "oracle"}, load_of(*LENGTHS)) == LENGTHS
    assert hints({"kind": "noisy", "sigma": 0.0}, load_of(*LENGTHS)) == LENGTHS


def test_noise_is_lognormal_with_median_1() -> None:
    """10,000 answers of a million tokens: the logarithms of the errors have mean 0 and sigma."""
    load = load_of(*[10**6] * 10_000)
    errors = np.log(np.array(hints({"kind": "noisy", "sigma": 0.5}, load)) / 10**6)
    assert abs(errors.mean()) < 4 * 0.5 / 100
    assert abs(errors.std() - 0.5) < 4 * 0.5 / 141
    twice = np.log(np.array(hints({"kind": "noisy", "sigma": 1.0}, load)) / 10**6)
    assert np.allclose(twice, 2 * errors, atol=1e-4)  # the same errors, stretched


def test_errors_belong_to_the_id_and_the_seed() -> None:
    """Neither the order of asking nor later requests change them."""
    values = {"kind": "noisy", "sigma": 1.0}
    known = hints(values, load_of(*LENGTHS))
    assert hints(values, load_of(*LENGTHS[:3])) == known[:3]
    predictor = make_predictor(parse_predictor(values), load_of(*LENGTHS), 0)
    assert predictor is not None
    back = [predictor.predict(Request(i, 0.0, 1, 1)) for i in reversed(range(6))]
    assert back[::-1] == known
    assert hints(values, load_of(*LENGTHS), seed=1) != known
    assert min(hints({"kind": "noisy", "sigma": 10.0}, load_of(*[1] * 99))) == 1


def test_classes_are_told_by_their_median() -> None:
    """1 to 5 and 6 to 10, told as 3 and 8; who is confused is told the other."""
    load = load_of(*range(1, 11))
    halves = {"kind": "bucketed", "classes": 2}
    assert hints(halves, load) == [3] * 5 + [8] * 5
    assert hints(halves | {"confusion": 1.0}, load) == [8] * 5 + [3] * 5


def test_confusion_is_a_rate_and_takes_all_other_classes_alike() -> None:
    """10,000 answers in 5 classes: 3 in 10 are wrong, each other class gets a quarter of them."""
    load = load_of(*[10, 20, 30, 40, 50] * 2000)
    told = np.array(hints({"kind": "bucketed", "classes": 5, "confusion": 0.3}, load))
    wrong = told != load.output_tokens
    assert abs(wrong.mean() - 0.3) < 4 * 0.0046
    of_ten = told[(load.output_tokens == 10) & wrong]
    counts = np.bincount(of_ten // 10, minlength=6)[2:]
    assert (abs(counts - len(of_ten) / 4) < 4 * np.sqrt(len(of_ten) * 3 / 16)).all()


def test_a_class_of_none_is_told_by_its_upper_end() -> None:
    """Cut at 1 and at 9: below 1 there is none. Whoever is confused of 9 is told 1."""
    load = load_of(*[1, 1, 9, 9] * 9)
    told = hints({"kind": "bucketed", "classes": 3, "confusion": 1.0}, load)
    ones, nines = (
        {n for n, own in zip(told, load.output_tokens, strict=True) if own == length}
        for length in (1, 9)
    )
    assert (ones, nines) == ({1, 9}, {1})


def test_equal_lengths_have_one_class() -> None:
    """However many were asked for."""
    assert hints({"kind": "bucketed", "classes": 4}, load_of(7, 7, 7)) == [7, 7, 7]


def test_a_percentile_is_of_what_the_client_has_got() -> None:
    """Nearest rank; the prior before the first, nothing from other clients or rejections."""
    assert parse_predictor({"kind": "percentile", "prior": 1}).prior == 1  # the least
    spec = {"kind": "percentile", "percentile": 75.0, "prior": 9}
    predictor = make_predictor(parse_predictor(spec), load_of(1), 0)
    assert predictor is not None
    asked = Request(9, 0.0, 1, 1, client="a")
    said = [predictor.predict(asked)]
    for client, generated in (("a", 40), ("b", 99), ("a", 10), ("a", 0), ("a", 30), ("a", 20)):
        request = Request(0, 0.0, 1, 1, client=client)
        predictor.observe(with_fields(request, generated=generated))
        said.append(predictor.predict(asked))
    assert said == [9, 40, 40, 40, 40, 40, 30]


def test_requests_csv_has_the_predictions(write) -> None:
    """Where somebody predicts; a policy by prompt is not changed by it."""
    path = write(SMALL)
    plain = run(load_scenario(path))
    told = run(load_scenario(path, ["predictor={kind: noisy, sigma: 0.5}"]))
    assert "predicted_output_tokens" not in plain.requests
    column = told.requests["predicted_output_tokens"]
    assert column.between(1, 60).all()
    assert column.nunique() > 3
    assert told.requests.drop(columns="predicted_output_tokens").equals(plain.requests)
    assert told.scenario.resolved()["predictor"] == {"kind": "noisy", "sigma": 0.5}


def test_a_leap_learns_what_single_steps_learn(write) -> None:
    """A percentile depends on who has ended when."""
    overrides = [
        "predictor={kind: percentile, prior: 3}",
        "engine.scheduling_policy=srpt",
        "engine.max_num_seqs=2",
        "workload.output_len={kind: uniform, low: 1, high: 60}",
    ]
    scenario = load_scenario(write(SMALL), overrides)
    leapt, stepped = run(scenario).requests, run(scenario, stepwise=True).requests
    assert leapt.equals(stepped)
    assert leapt["predicted_output_tokens"].nunique() > 3


def test_sigma_can_be_varied(write) -> None:
    """How good must a predictor be? The better, the shorter the mean wait."""
    more = ["predictor.kind=noisy", "engine.scheduling_policy={policy: sjf, by: hint}"]
    more += ["engine.max_num_seqs=4", "workload.num_prompts=400"]
    more += ["workload.output_len={kind: lognormal, median: 20, sigma: 1.5, high: 2000}"]
    points = expand(write(SMALL), ["predictor.sigma=0,1,10"], more)
    assert [point.scenario.predictor.sigma for point in points] == [0, 1, 10]
    means = [run(point.scenario).summary()["mean_e2el_ms"] for point in points]
    assert means == sorted(means)
    assert means[2] > 1.2 * means[0]


@pytest.mark.medium
def test_what_a_better_prediction_costs() -> None:
    """The figures of docs/schedulers.md: srpt under an oracle displaces, and computes again."""
    sets = ["engine.max_num_seqs=32", "engine.scheduling_policy=srpt"]
    varied = ["predictor=oracle,percentile", "engine.preemption_mode=recompute,swap"]
    seen = [run(point.scenario).summary() for point in expand(DEMO, varied, sets)]
    means = [round(summary["mean_e2el_ms"] / 1000, 1) for summary in seen]
    assert means == [31.0, 14.1, 16.5, 14.1]
    oracle, swapped, blind, _ = (summary["headway"] for summary in seen)
    assert (oracle["preemptions"], blind["preemptions"]) == (719, 50)
    assert round(oracle["prefill_tokens"] / swapped["prefill_tokens"], 2) == 1.41
    assert swapped["prefill_tokens"] == seen[1]["total_input_tokens"]  # each of them once
    plain = ["engine.max_num_seqs=32", "predictor=oracle"]
    sjf = load_scenario(DEMO, [*plain, "engine.scheduling_policy={policy: sjf, by: hint}"])
    assert round(run(sjf).summary()["mean_e2el_ms"] / 1000, 1) == 10.2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("predictor: {kind: good}", "predictor.kind: 'good' is unknown; there are oracle, noisy, "),
        (
            "predictor: {kind: [noisy]}",
            "predictor.kind: ['noisy'] is unknown; there are oracle, no",
        ),
        ("predictor: {sigma: 1}", "predictor.kind: is missing; there are oracle, noisy, bucketed"),
        ("predictor: {kind: noisy}", "predictor.sigma: is missing"),
        ("predictor: {kind: noisy, sigma: -1}", "predictor.sigma: must be from 0 to 10, not -1"),
        ("predictor: {kind: oracle, sigma: 1}", "predictor.sigma: unknown key"),
        ("predictor: noisy", "predictor.sigma: is missing"),
        ("predictor: 3", "predictor: must be a mapping of keys, as {kind: oracle}, not 3"),
        ("predictor: {kind: bucketed, classes: 1, confusion: 0.5}", "predictor.confusion: must be"),
        (
            "engine: {scheduling_policy: srpt}",
            "engine.scheduling_policy: srpt ranks by predicted lengths, and the scenario has no",
        ),
        (
            "engine: {scheduling_policy: {policy: sjf, by: hint}}",
            "engine.scheduling_policy: sjf ranks by predicted lengths, and the scenario has no",
        ),
        (
            "engine: {scheduling_policy: orca, async_scheduling: true}",
            "engine.async_scheduling: orca schedules a step when the one before has ended; set",
        ),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, text: str, message: str) -> None:
    """With the line."""
    path = tmp_path / "s.yaml"
    path.write_text(f"name: s\n{text}\n")
    (told,) = errors(path)
    assert told.startswith(f"s.yaml:2: {message}")


def test_a_wrong_predictor_is_told_alone(tmp_path: Path) -> None:
    """Not that the policy lacks one as well."""
    path = tmp_path / "s.yaml"
    path.write_text("predictor: {kind: noisy, sigma: -1}\nengine: {scheduling_policy: srpt}\n")
    assert errors(path) == [
        "s.yaml:1: predictor.sigma: must be from 0 to 10, not -1 (standard deviation of the "
        "logarithm)"
    ]
