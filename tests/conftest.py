"""Where the tests find the published traces and tables, if they are there."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder that HEADWAY_DATA names."""
    folder = os.environ.get("HEADWAY_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("HEADWAY_DATA names no folder with the published data")
    return Path(folder)
