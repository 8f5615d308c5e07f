"""Closed loops of measured runs: how equal their answers are."""

import numpy as np
import pytest

from calibration.measured.predict import predict
from calibration.measured.runs import read_runs
from calibration.measured.workload import generate, tells_lengths
from tests.support.measured_runs import run_of

LOOP = {"concurrency": "8", "n_requests": "4000", "mean_input_tokens": "1000"}
ANSWERS = {**LOOP, "mean_output_tokens": "200"}


def answers(**words: str) -> np.ndarray:
    return np.asarray(generate(run_of(**ANSWERS, **words)).output_tokens)


def test_answers_have_the_spread_that_is_told() -> None:
    assert set(answers(output_cv="0")) == {200}
    drawn = answers(output_cv="0.5")
    assert drawn.mean() == pytest.approx(200, rel=0.03)
    assert drawn.std() / drawn.mean() == pytest.approx(0.5, rel=0.05)
    prompts = generate(run_of(**ANSWERS, input_cv="0.25")).prompt_tokens
    assert prompts.std() / prompts.mean() == pytest.approx(0.25, rel=0.05)


def test_answers_that_end_by_themselves_are_cut_at_their_cap() -> None:
    """With the same chance at each token: of a mean of 200 at most 256, over half are cut."""
    drawn = answers(output_cap="256")
    assert drawn.max() == 256
    assert drawn.min() < 20
    assert drawn.mean() == pytest.approx(200, rel=0.03)
    assert 0.5 < (drawn == 256).mean() < 0.8
    early = drawn[drawn < 256]  # as many end early as late
    assert (early < 128).sum() == pytest.approx((early >= 128).sum(), rel=0.35)
    assert set(answers(output_cap="200")) == {200}


def test_a_run_tells_its_spread_or_does_not() -> None:
    assert not tells_lengths(run_of(**ANSWERS))
    told = ({"output_cv": "0"}, {"output_cap": "256"}, {"notes": "isl/osl 1000/200"})
    assert all(tells_lengths(run_of(**ANSWERS, **more)) for more in told)


ROW = "run_id,gpu,model,engine_version,concurrency,n_requests,mean_input_tokens,"
ROW += "mean_output_tokens,ttft_mean_ms,output_cv,output_cap\n"
RUN = "a,H100,meta-llama/Llama-3.1-8B-Instruct,0.22,8,80,1000,100,60"


@pytest.mark.medium
def test_equal_answers_keep_clients_in_step_and_the_interval_knows(tmp_path) -> None:
    """Prompts of equal answers meet: 1.9 times the TTFT of answers within 2 % of another."""
    (tmp_path / "runs.csv").write_text(
        f"{ROW}{RUN},,\n{RUN.replace('a,', 'b,', 1)},0,\n{RUN.replace('a,', 'c,', 1)},,128\n"
    )
    found = [predict(run, tmp_path, sensitivity=True) for run in read_runs(tmp_path)]
    untold, equal, cut = (
        next(one for one in outcome.sensitivity if one.metric == "mean_ttft_ms")
        for outcome in found
    )
    assert equal.value > 1.3 * cut.value
    low, high = untold.interval
    assert low < cut.value < 0.9 * equal.value < high
    wide, narrow = ((one.interval[1] - one.interval[0]) / one.value for one in (untold, equal))
    assert wide > 1.5 * narrow


def test_a_spread_and_a_cap_are_two_ways_of_one_thing(tmp_path) -> None:
    (tmp_path / "runs.csv").write_text(f"{ROW}{RUN},0.3,256\n")
    (run,) = read_runs(tmp_path)
    assert predict(run, tmp_path).reason.startswith("output_cap: cannot be used with output_cv")
