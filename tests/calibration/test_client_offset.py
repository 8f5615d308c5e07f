"""What clients add to TTFT is told from an engine that errs."""

import numpy as np
import pytest

from calibration.measured.client_offset import find_offset, fit_offset
from calibration.measured.compare import MetricComparison, Outcome
from calibration.measured.report import report
from calibration.measured.runs import Run

PREDICTED = np.array([20.0, 25, 30, 45, 60, 80, 120, 200])


def outcomes(measured, load=None, computed=None):
    found = []
    for predicted, one in zip(PREDICTED, measured, strict=True):
        outcome = Outcome(
            Run({"run_id": "a", "source": "lab", "model": "m", "gpu": "g"}, {}, {}),
            load=load,
            computed=computed or 50 * predicted,
        )
        outcome.rows = [
            MetricComparison("mean_ttft_ms", predicted, one),
            MetricComparison("p99_ttft_ms", 2 * predicted, one + predicted),
        ]
        found.append(outcome)
    return found


@pytest.mark.parametrize("factor", [0.93, 1.0, 1.07])
def test_forty_ms_of_clients_are_told_from_an_engine_that_errs(factor):
    """Each run scatters by 2 %, too; without the offset the errors were 17 to 67 %."""
    scatter = 1 + 0.02 * np.resize([1, -1, -1, 1], 8)
    measured = factor * PREDICTED * scatter + 40
    found = find_offset(outcomes(measured))
    assert abs(found.value - 40) < found.half_width < 8
    assert np.median(np.abs(found.errors["mean_ttft_ms"])) < 0.05
    assert np.median(np.abs(found.errors["p99_ttft_ms"])) < 0.06
    told = report(outcomes(measured))
    assert f"lab, m on g: clients add {found.value:+.1f} ms" in told


@pytest.mark.parametrize("factor", [0.85, 1.0, 1.15])
def test_an_engine_that_errs_in_proportion_is_no_client(factor):
    scatter = 1 + 0.04 * np.resize([1, -1, -1, 1], 8)
    assert find_offset(outcomes(factor * PREDICTED * scatter)) is None
    assert "clients add" not in report(outcomes(factor * PREDICTED * scatter))


def test_prompts_of_one_length_tell_no_client_from_what_a_prompt_costs():
    measured = PREDICTED + 197
    assert find_offset(outcomes(measured)) is not None
    assert find_offset(outcomes(measured, computed=1000.0)) is None


def test_runs_of_one_ttft_tell_an_offset_only_beyond_the_engines_error():
    """50 ms measured where 45 are predicted may be either's."""
    alike = np.column_stack([np.full(6, 45.0), 50 + np.array([0.2, -0.2, 0.1, -0.1, 0, 0])])
    value, half_width = fit_offset(alike)
    assert half_width > value > 0


def test_a_run_is_judged_by_what_the_others_tell():
    """Its own error has no part in its offset."""
    measured = PREDICTED + 40
    measured[3] += 60
    errors = find_offset(outcomes(measured)).errors["mean_ttft_ms"]
    assert errors[3] == pytest.approx((45 + 40) / 145 - 1, abs=0.01)


def test_few_runs_and_runs_near_saturation_tell_nothing():
    assert find_offset(outcomes(PREDICTED + 40)[:3]) is None
    near = {"saturation_throughput": 1.0, "share": 0.95, "e2el_elasticity": 9.0}
    assert find_offset(outcomes(PREDICTED + 40, near)) is None
