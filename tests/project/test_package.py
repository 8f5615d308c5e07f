"""What the wheel holds, and that it runs where it was never built."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from simulator.scenario.load import find_scenario, load_scenario, shipped_scenarios
from simulator.util.errors import HeadwayError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The wheel, built as `pip wheel` does, without an installer's help."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_it_holds_profiles_models_and_scenarios(unpacked: Path) -> None:
    """As many as the checkout, and nothing that only tests need."""
    for kind in ("simulator/costs/profiles", "simulator/models/configs"):
        here = {path.name for path in (ROOT / kind).rglob("*.*") if path.suffix != ".pyc"}
        assert {path.name for path in (unpacked / kind).rglob("*.*")} == here
    found = {p.relative_to(unpacked) for p in (unpacked / "simulator/scenarios").rglob("*.yaml")}
    assert len(found) == len(shipped_scenarios()) >= 4
    assert not (unpacked / "tests").exists()
    assert not (unpacked / "calibration/measurements").exists()


@pytest.mark.medium
def test_it_runs_from_another_folder(unpacked: Path, tmp_path: Path) -> None:
    """A shipped scenario by name, with the package's own files."""
    program = (
        "import simulator; print(simulator.__file__)\n"
        "from headway.cli.main import main\n"
        "raise SystemExit(main(['run', 'demo', '--set', 'workload.num_prompts=20']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(unpacked))
    assert (tmp_path / "out" / "demo" / "summary.json").exists()


def test_a_shipped_scenario_by_name(tmp_path, monkeypatch) -> None:
    """A file of that name goes first; a wrong name has the nearest, else all that there are."""
    monkeypatch.chdir(tmp_path)
    assert load_scenario("demo").name == "demo"
    (tmp_path / "demo").write_text("name: mine\nmodel: llama-3-8b\n", "utf-8")
    assert load_scenario("demo").name == "mine"
    assert find_scenario(Path("examples/load")).name == "load.yaml"
    with pytest.raises(HeadwayError, match=r"^dmo: no such file, and not .*; did you mean demo"):
        load_scenario("dmo")
    with pytest.raises(HeadwayError, match=r"^zz: no such file, and not .*: .*demo, .*prefixes"):
        load_scenario("zz")
    with pytest.raises(HeadwayError, match=r"^dmo\.yaml: no such file$"):
        load_scenario("dmo.yaml")
