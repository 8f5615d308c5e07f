"""Modules beside scenarios: each folder's own, as its files are now."""

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway as hw
from simulator.util import own_modules
from simulator.util.user_code import SEARCHED, load_user_code

POLICY = """from {helper} import SIGN
class P:
    def key(self, request):
        return SIGN * request.arrival
"""
SCENARIO = """name: s
engine: {scheduling_policy: {policy: "same_name:P"}, max_num_seqs: 2}
workload: {num_prompts: 20, request_rate: 50, input_len: 100, output_len: 20}
"""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    path = [*sys.path]
    yield
    sys.path[:] = path
    SEARCHED.clear()
    for name in own_modules.OWN:
        sys.modules.pop(name, None)
    own_modules.OWN.clear()


def folder(path: Path, sign: str, package: bool = False) -> Path:
    """Make a folder with a scenario, its module or package `same_name`, and one that it imports."""
    beside = path / "same_name" if package else path
    beside.mkdir(parents=True)
    module = beside / "__init__.py" if package else path / "same_name.py"
    module.write_text(POLICY.format(helper=".helper" if package else "helper"))
    (beside / "helper.py").write_text(f"SIGN = {sign}\n")
    (path / "s.yaml").write_text(SCENARIO)
    return path


def last_waits(path: Path) -> bool:
    """Say whether a run's last requests overtook the first: its policy's sign is -1."""
    requests = hw.run(path / "s.yaml").requests
    return bool(requests.ttft.iloc[-1] < requests.ttft.iloc[5])


@pytest.mark.parametrize("package", [False, True])
def test_each_folder_has_its_own_module(tmp_path: Path, package: bool) -> None:
    one = folder(tmp_path / "a", "1", package)
    other = folder(tmp_path / "b", "-1", package)
    assert [last_waits(path) for path in (one, other, one)] == [False, True, False]


def test_a_folder_comes_before_the_one_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, beside = folder(tmp_path / "a", "1"), tmp_path / "b"
    beside.mkdir()
    (beside / "same_name.py").write_text("class P:\n    here = True\n")
    monkeypatch.syspath_prepend(script)
    monkeypatch.chdir(script)
    found = load_user_code("same_name:P", beside)
    assert found.here
    assert pickle.loads(pickle.dumps(found)) is found
    assert not hasattr(load_user_code("same_name:P", script), "here")


@pytest.mark.parametrize("package", [False, True])
def test_what_is_edited_is_loaded_again(tmp_path: Path, package: bool) -> None:
    path = folder(tmp_path / "a", "1", package)
    assert not last_waits(path)
    kept = load_user_code("same_name:P", path)
    assert load_user_code("same_name:P", path) is kept
    (path / "same_name" / "helper.py" if package else path / "helper.py").write_text("SIGN = -1\n")
    assert last_waits(path)


def test_a_module_that_fails_is_loaded_again(tmp_path: Path) -> None:
    module = tmp_path / "same_name.py"
    module.write_text("P = unknown\n")
    with pytest.raises(ValueError, match="unknown"):
        load_user_code("same_name:P", tmp_path)
    module.write_text("class P:\n    good = 1\n")
    assert load_user_code("same_name:P", tmp_path).good


def test_an_installed_package_is_no_module_beside(tmp_path: Path) -> None:
    import numpy

    for name in ("numpy", "json", "simulator"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')\n")
    assert load_user_code("numpy:ndarray", tmp_path) is numpy.ndarray
    assert load_user_code("json:dumps", tmp_path).__module__ == "json"
    assert load_user_code("simulator.policies.fair:__doc__", tmp_path)


def test_an_installed_module_does_not_displace_one_that_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as `tests`, which some packages install by mistake."""
    for name in ("site-packages", "imported"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "two_places.py").write_text(f"PLACE = {name!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "imported"))
    monkeypatch.setitem(sys.modules, "two_places", importlib.import_module("two_places"))
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    assert load_user_code("two_places:PLACE", tmp_path) == "imported"


def test_a_folder_that_the_user_put_on_the_path_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_waits(folder(tmp_path / "a", "1"))
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    last_waits(folder(tmp_path / "b", "-1"))
    assert sys.path[0] == str(tmp_path / "a")
