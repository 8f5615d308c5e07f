"""A server that takes a second a request."""

from pathlib import Path

import pytest

from tests.support.scenarios import ONE_A_SECOND


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "one.yaml"
    path.write_text(ONE_A_SECOND)
    return path
