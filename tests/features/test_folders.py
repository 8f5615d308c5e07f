"""Features are parts: without the folder of one the rest of the simulator works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.features import all_features

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent.name for path in (ROOT / "simulator" / "features").glob("*/*.py"))
CORE = [
    "tests/engine/test_reference.py",
    "tests/schedulers/test_scheduler.py",
    "tests/schedulers/test_preemption.py",
    "tests/schedulers/test_static.py",
    "tests/simulation/test_run.py",
]
"""Tests of what every engine has, from its loop to the report."""


def test_every_folder_is_a_feature() -> None:
    assert [feature.__module__.split(".")[2] for feature in all_features()] == [
        *dict.fromkeys(FOLDERS)
    ]


@pytest.mark.medium
@pytest.mark.parametrize("name", [*dict.fromkeys(FOLDERS)])
def test_the_core_works_without(name: str, tmp_path: Path) -> None:
    for folder in ("simulator", "headway", "scenarios", "tests"):  # compiled as they are
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.rmtree(tmp_path / "simulator" / "features" / name)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *CORE]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
