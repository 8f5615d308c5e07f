"""What a fit leaves unexplained: by regime, systematic, in every shipped profile."""

from math import sqrt

import numpy as np
import pytest

from calibration.errors import residuals
from simulator.costs.profile import PROFILES, read_profile


def test_by_hand():
    """Two regions of decodes, off by 3 % and -4 %; one of prompts, whose jitter evens out."""
    logs = np.array([0.03, 0.03, -0.04, 0.5, 0.1, -0.3])
    found = residuals(
        np.exp(-logs),
        np.ones(6),
        tokens=np.array([8, 15, 16, 512, 600, 1000]),
        pairs=np.array([0, 0, 0, 9, 10, 15]),
        context=np.array([100, 127, 100, 999, 0, 1]),
    )
    assert found["decode"] == pytest.approx(sqrt((0.03**2 + 0.04**2) / 2))
    assert found["prompts"] == pytest.approx(0.1)


def test_jitter_is_no_systematic_error():
    """A thousand steps with jitter of 20 % and no bias leave next to nothing."""
    draw = np.random.default_rng(4)
    tokens, context = draw.integers(64, 128, (2, 1000))
    measured, nothing = np.exp(draw.normal(0, 0.2, 1000)), np.zeros(1000)
    found = residuals(np.ones(1000), measured, tokens=tokens, pairs=nothing, context=context)
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
