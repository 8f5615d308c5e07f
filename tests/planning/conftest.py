"""Two small scenarios: a server that takes a second a request, and one of four seats."""

from pathlib import Path

import pytest

from tests.support.scenarios import ONE_A_SECOND, TINY


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "one.yaml"
    path.write_text(ONE_A_SECOND)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(TINY)
    return path
