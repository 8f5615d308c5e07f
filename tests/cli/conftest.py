"""Every test of the command line has a folder of its own to work in."""

from pathlib import Path

import pytest

from tests.support.scenarios import SMALL


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in, with the scenario small.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path
