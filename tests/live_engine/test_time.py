"""A real vLLM's latencies under loads that the calibration has not seen, beside those predicted.

They want a machine of their own, so CI leaves them out: docs/live-engine.md has what was measured.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.live_engine.conftest import SECONDS, TURNS
from tests.support.live_calibration import Calibrated, fitted, noise_of_mean, send
from tests.support.live_vllm import recording_server

pytestmark = pytest.mark.engine

LIMITS = {"ttft": 0.10, "tpot": 0.05, "e2el": 0.05}
"""Relative errors of means, below the knee."""


def judge(name: str, calibrated: Calibrated, show: Callable[[str], None]) -> None:
    """Hold blind loads to LIMITS, or to what the means of repeated measurements are known to.

    Both means are measured, of loads that come about as often: that of the blind load, and what
    the fit knows from those beside it; hence the root of two.
    """
    lines = [f"{name:<22}{'predicted, ms':>15}{'measured':>16}{'repeats':>20}{'error':>9}"]
    wrong, found = [], calibrated.blind()
    for metric, limit in LIMITS.items():
        ratios = [[one[1][metric] / one[0][metric] for one in both] for both in found.values()]
        floor = 2**0.5 * noise_of_mean(ratios)
        for load, both in found.items():
            predicted, measured = np.array([[one[side][metric] for one in both] for side in (0, 1)])
            error = float(predicted.mean() / measured.mean()) - 1.0
            lines.append(
                f"{load:<16}{metric:>6}{predicted.mean():>15.2f}{measured.mean():>16.2f}"
                f"{f'{measured.min():.2f} to {measured.max():.2f}':>20}{error:>+9.1%}"
            )
            if abs(error) > max(limit, floor):
                wrong.append((load, metric, error, floor))
        lines.append(f"{metric}: limit {limit:.0%}, floor {floor:.1%}")
    limits = ", ".join(f"{kind} {rate:.1f}" for kind, rate in calibrated.limits.items())
    lines.append(f"held-out steps: {calibrated.outcome.by_steps}")
    lines.append(f"requests/s of {limits} at the knee")
    show("\n".join(lines))
    assert not wrong


@pytest.mark.engine_all
def test_blind_loads_are_predicted(calibrated: Calibrated, show: Callable[[str], None]) -> None:
    judge("Llama", calibrated, show)


@pytest.mark.engine_all
@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_other_architectures_are_predicted(
    kind: str, models: Callable[[str], Path], tmp_path: Path, show: Callable[[str], None]
) -> None:
    """Each by a calibration of its own; of Mixtral, two of four experts a token."""
    with recording_server(models(kind), tmp_path / "log") as server:
        judge(kind, fitted(send(server, models(kind), SECONDS, TURNS)), show)
