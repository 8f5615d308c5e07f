"""Modules under the names that they had before they had folders."""

import importlib
import subprocess
import sys

import pytest

import calibration
import simulator
from simulator.util.former_names import FormerNames

NAMES = [
    (old, new)
    for finder in sys.meta_path
    if isinstance(finder, FormerNames)
    for old, new in finder.homes.items()
]


def test_both_packages_have_some() -> None:
    assert {old.partition(".")[0] for old, _ in NAMES} == {
        simulator.__name__,
        calibration.__name__,
    }


@pytest.mark.parametrize(("old", "new"), NAMES)
def test_a_former_name_gives_the_same_objects(old: str, new: str) -> None:
    """And a warning with the new name, the first time."""
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"^{old} is now {new}$"):
        former = importlib.import_module(old)
    assert former is importlib.import_module(new)
    assert importlib.import_module(old) is former


def test_python_runs_a_former_name() -> None:
    """`python -m`, as pages and Makefiles have it."""
    text = [
        subprocess.run(
            [sys.executable, "-m", name], capture_output=True, text=True, check=True
        ).stdout
        for name in ("simulator.scenario_page", "simulator.scenario.reference_page")
    ]
    assert text[0] == text[1] != ""


def test_a_former_name_of_a_command_takes_its_options() -> None:
    command = [sys.executable, "-m", "calibration.kernel_tables.cross_check", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.startswith("usage: external_validation.py")


def test_an_unknown_name_is_an_ordinary_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'simulator\.nothing'$"):
        importlib.import_module("simulator.nothing")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = simulator.nothing
