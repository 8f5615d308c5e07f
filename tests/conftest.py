"""Where the tests find the published traces and tables, and how they draw examples."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Where a change is judged, the same examples every time; elsewhere new ones, which find bugs.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder that HEADWAY_DATA names."""
    folder = os.environ.get("HEADWAY_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("HEADWAY_DATA names no folder with the published data")
    return Path(folder)
