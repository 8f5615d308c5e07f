"""Steps of rollouts against sums by hand: a step of the engine takes 10 ms whatever is in it."""

import json
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from headway.cli.main import main
from headway.planning.rollouts import _draw, rollouts
from simulator import load_scenario, run
from simulator.scenario.draw import make_workload
from simulator.util.errors import HeadwayError
from tests.support.workloads import generate

TOKEN = 0.01  # s
SCENARIO = """
model: tiny-test
gpu: {name: A100-80GB}
engine: {name: textbook, max_num_seqs: 500, max_num_batched_tokens: 60000, max_model_len: 2000}
cost: {kind: linear, base: 0.01}
workload:
  num_prompts: 8
  n: 4
  input_len: 33
  output_len: {kind: uniform, low: 1, high: 200}
rollouts: {steps: 4}
seed: 5
"""


def write(folder: Path) -> Path:
    path = folder / "s.yaml"
    path.write_text(SCENARIO)
    return path


def by_hand(*, begun: int, partial: bool) -> list[tuple[float, int, int, int]]:
    """Return of each step its seconds, tokens, wasted and stale ones.

    All samples run at once, so one with r tokens to go ends after r engine steps; a step of
    rollouts ends with the eighth group.
    """
    found, carried = [], []
    for step in range(4):
        spec = {"num_prompts": begun - len(carried), "n": 4, "input_len": 33}
        spec["output_len"] = {"kind": "uniform", "low": 1, "high": 200}
        drawn = generate(spec, 5 + step).output_tokens.reshape(-1, 4)
        left = np.concatenate([*(left for left, _ in carried), drawn.ravel()]).reshape(-1, 4)
        said = np.concatenate([*(said for _, said in carried), 0 * drawn.ravel()]).reshape(-1, 4)
        order = np.argsort(left.max(axis=1), kind="stable")
        trained, others = order[:8], order[8:]
        ticks = left[trained[-1]].max()
        came = np.minimum(left, ticks)
        stale = int(said[trained].sum())
        wasted = 0 if partial else int(came[others].sum())
        found.append((ticks * TOKEN, int(came.sum()), wasted, stale))
        others = sorted(others) if partial else []
        carried = [((left - came)[k], (said + came)[k]) for k in others]
    return found


@pytest.mark.parametrize("oversampling", [0.0, 0.5])
@pytest.mark.parametrize("partial", [False, True])
def test_a_step_ends_with_its_slowest_group(
    tmp_path: Path, oversampling: float, partial: bool
) -> None:
    sets = [f"rollouts.oversampling={oversampling}", f"rollouts.partial={partial}"]
    steps = list(rollouts(load_scenario(write(tmp_path), sets)))
    seen = [(step.seconds, step.tokens, step.wasted, step.stale) for step in steps]
    expected = by_hand(begun=ceil(8 * (1 + oversampling)), partial=partial)
    assert [rest for _, *rest in seen] == [rest for _, *rest in expected]
    assert [seconds for seconds, *_ in seen] == pytest.approx([s for s, *_ in expected])
    assert all(step.samples == 32 for step in steps)
    assert any(step.wasted for step in steps) == (oversampling > 0 and not partial)
    assert any(step.stale for step in steps) == (oversampling > 0 and partial)


def test_a_step_of_one_prompt(tmp_path: Path) -> None:
    """It is drawn, as any other number."""
    steps = rollouts(load_scenario(write(tmp_path), ["workload.num_prompts=1"]))
    assert [step.samples for step in steps] == [4] * 4


def test_the_verb_prices_generation_and_training(tmp_path: Path, capsys) -> None:
    """The A100's price for all the time; of 32 samples three are left in the tail."""
    path = str(write(tmp_path))
    assert main(["rollouts", path, "--set", "rollouts.train_time=3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    seconds = [step["seconds"] for step in told["steps"]]
    total = told["total"]
    assert total["seconds_per_step"] == pytest.approx(sum(seconds) / 4 + 3)
    hourly = told["steps"][0]["dollars_per_hour"]
    priced = hourly / 3600 * (sum(seconds) + 12) / 128 * 1000
    assert total["dollars_per_1000_samples"] == pytest.approx(priced)
    answers = np.sort(make_workload(load_scenario(path)).output_tokens)
    assert told["steps"][0]["tail"] == pytest.approx(TOKEN * (answers[-1] - answers[28]))
    assert main(["rollouts", path]) == 0
    assert "less than a tenth of the samples is left" not in capsys.readouterr().out


def test_a_long_tail_is_told(tmp_path: Path, capsys) -> None:
    path = write(tmp_path)
    text = SCENARIO.replace(
        "{kind: uniform, low: 1, high: 200}",
        "{kind: lognormal, median: 60, sigma: 1.2, high: 1900}",
    )
    path.write_text(text)
    assert main(["rollouts", str(path)]) == 0
    assert "Knob: raise rollouts.oversampling from 0 to 0.25" in capsys.readouterr().out


def test_prompts_of_two_steps_share_their_prefixes_alone(tmp_path: Path) -> None:
    """Else what a carried sample left in the cache would be taken for that of another prompt."""
    sets = ["workload.prefix_groups={num_prefixes: 2, prefix_len: 16}"]
    generator = load_scenario(write(tmp_path), sets).workload.generator
    first, second = (
        {
            name: tokens
            for group in _draw(generator, 8, seed)
            for name, tokens in group.samples[0].prompt
        }
        for seed in (5, 6)
    )
    assert {first[name] for name in first.keys() & second.keys()} == {16}
    assert len(first.keys() & second.keys()) == 2
    assert len(first) == len(second) == 2 + 8


def test_samples_share_their_prompt_and_end_each_by_itself(tmp_path: Path) -> None:
    """Prompts of 33 tokens: but for the first of four, 32 are found. The last ends the prompt."""
    result = run(load_scenario(write(tmp_path)))
    frame = result.requests
    assert frame.prompt.tolist() == sorted([*range(8)] * 4)
    assert frame.cached_tokens.tolist() == [0, 32, 32, 32] * 8
    ends = frame.groupby("prompt").e2el.max()
    own = result.summary()["headway"]
    assert own["prompts"]["completed"] == 8
    assert own["prompts"]["mean_e2el_ms"] == pytest.approx(1000 * ends.mean())
    assert own["dollars"] == pytest.approx(own["dollars_per_hour"] * ends.max() / 3600)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("workload.sessions={turns: 2}", "workload.n: cannot be used with sessions"),
        ("workload.n=0", "workload.n: must be at least 1, not 0"),
        ("rollouts.steps=0", "rollouts.steps: must be at least 1, not 0"),
        ("workload.input_len=3000", "rollouts: a prompt of 3,000 tokens and an answer of"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        list(rollouts(load_scenario(write(tmp_path), [change])))
