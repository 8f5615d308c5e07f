"""What a fit leaves unexplained: by regime, systematic, in every shipped profile."""

from math import sqrt

import numpy as np
import pytest

from calibration.residuals import residuals
from simulator.costs.profile import PROFILES, read_profile


def test_by_hand():
    """Two regions of decodes, off by 3 % and -4 %; one of prompts, whose jitter evens out."""
    logs = np.array([0.03, 0.03, -0.04, 0.5, 0.1, -0.3])
    prompts = np.array([False, False, False, True, True, True])
    sizes = np.array([[8, 100], [15, 127], [16, 100], [512, 9], [600, 10], [1000, 15]])
    found = residuals(logs, prompts, sizes)
    assert found["decode"] == pytest.approx(sqrt((0.03**2 + 0.04**2) / 2))
    assert found["prompts"] == pytest.approx(0.1)


def test_jitter_is_no_systematic_error():
    """A thousand steps with jitter of 20 % and no bias leave next to nothing."""
    draw = np.random.default_rng(4)
    sizes = draw.integers(64, 128, (1000, 2))
    found = residuals(draw.normal(0, 0.2, 1000), np.zeros(1000, bool), sizes)
    assert found["decode"] < 0.02
    assert "prompts" not in found


def test_every_shipped_profile_has_them():
    """Standard deviations of both regimes, above 0 and below 20 %."""
    paths = sorted(PROFILES.glob("*.yaml"))
    for path in paths[:: max(1, len(paths) // 12)]:
        found = read_profile(path).cost.residuals
        assert found is not None
        assert set(found) == {"decode", "prompts"}
        assert all(0 < value < 0.2 for value in found.values()), path
