"""A real vLLM's latencies under loads that the calibration has not seen, beside those predicted.

They want a machine of their own, so CI leaves them out: docs/lab-notes.md has what was measured.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.live_engine.conftest import SECONDS
from tests.support.live_calibration import RECORDER, Calibrated, calibrate, spread
from tests.support.live_vllm import live_server

pytestmark = pytest.mark.engine

LIMITS = {"ttft": 0.10, "tpot": 0.05, "e2el": 0.05}
"""Relative errors of means, below the knee."""


def judge(name: str, calibrated: Calibrated, show: Callable[[str], None]) -> None:
    """Hold blind loads to LIMITS, or to what measurements of the same load differ by."""
    lines = [f"{name:<22}{'predicted, ms':>15}{'measured':>28}{'error':>9}{'floor':>9}"]
    wrong = []
    for load, both in calibrated.blind().items():
        for metric, limit in LIMITS.items():
            predicted = float(np.mean([one[0][metric] for one in both]))
            measured = [one[1][metric] for one in both]
            error = predicted / float(np.mean(measured)) - 1.0
            floor = spread([one[1] for one in both], metric)
            lines.append(
                f"{load:<16}{metric:>6}{predicted:>15.2f}"
                f"{', '.join(f'{value:.2f}' for value in measured):>28}{error:>+9.1%}{floor:>9.1%}"
            )
            if abs(error) > max(limit, floor):
                wrong.append((load, metric, error, floor))
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
    steps = tmp_path / "steps.jsonl"
    flags = "--served-model-name", "tiny", "--scheduler-cls", RECORDER
    env = {"HEADWAY_STEPS": str(steps)}
    with live_server(models(kind), tmp_path / "log", *flags, env=env) as server:
        judge(kind, calibrate(server, steps, models(kind), SECONDS), show)
