"""What a release is made of, and that it runs where there is no checkout."""

import re
import subprocess
import sysconfig
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

from headway.cli.main import VERBS
from simulator import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def run(*words: object, cwd: Path) -> str:
    """What a command prints; it must succeed."""
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(folder: Path, source: object) -> Path:
    """A fresh environment's `bin`, with what is installed from a file, and all it needs."""
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", source, cwd=folder)
    return python.parent


@pytest.mark.slow
def test_the_sdist_makes_a_wheel_that_runs(tmp_path: Path) -> None:
    """From a checkout to `headway run demo` in a folder of its own, as one who installs it."""
    sdist = pytest.importorskip("hatchling.builders.sdist")
    builder = sdist.SdistBuilder(str(ROOT))
    (archive,) = builder.build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"README.md", "Makefile", "mkdocs.yml", "tests/conftest.py", "docs/README.md"} <= names
    programs = installed(tmp_path, archive)
    assert run(programs / "headway", "--version", cwd=tmp_path).strip() == __version__
    assert "no problem found" in run(programs / "headway", "doctor", cwd=tmp_path)
    printed = run(programs / "headway", "run", "demo", cwd=tmp_path)
    assert "written to out/demo: summary.json" in printed
    home = run(programs / "python", "-c", "import headway; print(headway.__file__)", cwd=tmp_path)
    assert Path(home).is_relative_to(tmp_path)
    assert (Path(home).parent / "py.typed").is_file()


def test_the_image_has_what_its_steps_need(tmp_path: Path) -> None:
    """Each COPY names something that .dockerignore lets in, and all packages of the wheel come."""
    steps = re.findall(r"(?m)^(\w+) (.*)$", (ROOT / "Dockerfile").read_text("utf-8"))
    copied = [words.split()[:-1] for step, words in steps if step == "COPY"]
    sources = {name for names in copied for name in names}
    let_in = re.findall(r"(?m)^!(.+)$", (ROOT / ".dockerignore").read_text("utf-8"))
    assert sources == set(let_in)
    assert all((ROOT / name).exists() for name in sources)
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    (packages,) = re.findall(r"(?m)^packages = (\[.*\])$", project)
    assert sources == {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "scenarios",
        *yaml.safe_load(packages),
    }
    assert ("ENTRYPOINT", '["headway"]') in steps


@pytest.mark.slow
def test_the_steps_of_the_image_make_a_command(tmp_path: Path) -> None:
    """What docker would do: copy, install, take the sources away, run in another folder.

    The packages that the project needs are those of this environment: the sdist's test loads them.
    """
    steps = re.findall(r"(?m)^(\w+) (.*)$", (ROOT / "Dockerfile").read_text("utf-8"))
    source, work = tmp_path / "src", tmp_path / "work"
    source.mkdir()
    work.mkdir()
    for step, words in steps:
        if step == "COPY":
            run("cp", "-r", *words.split()[:-1], source, cwd=ROOT)
    (install,) = (words for step, words in steps if step == "RUN")
    venv.create(tmp_path / "env", with_pip=True)
    programs = tmp_path / "env" / "bin"
    (site,) = (tmp_path / "env" / "lib").glob("*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib"))
    script = install.replace("/src/", f"{source}/").replace("pip ", f"{programs}/pip -q ")
    run("sh", "-c", script, cwd=source)
    assert not any(source.iterdir())
    assert "no problem found" in run(programs / "headway", "doctor", cwd=work)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_there_is(path: Path) -> None:
    """Their commands are this repository's: targets of the Makefile, verbs, files."""
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text("utf-8")))
    matrix = [target for job in jobs.values() for target in _targets(job)]
    assert set(matrix) <= targets
    commands = [line for step in steps for line in step.get("run", "").splitlines()]
    for line in commands:
        for verb in re.findall(r"(?:^|bin/|&& )headway ([a-z]+)", line):
            assert verb in VERBS
        if line.startswith(".ci/"):
            assert (ROOT / line).exists()
    assert commands


def test_nothing_is_published_untested() -> None:
    """What publishes needs the build, which needs the tests; what CI runs is what is claimed."""
    release, ci = (
        yaml.safe_load((ROOT / ".github/workflows" / name).read_text("utf-8"))["jobs"]
        for name in ("release.yml", "ci.yml")
    )
    assert {release[job]["needs"] for job in ("publish", "docs")} == {"build"}
    assert release["build"]["needs"] == "test"
    assert {"run": ".ci/run"} in release["test"]["steps"]
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert {"3.11"} <= set(claimed) <= set(ci["test"]["strategy"]["matrix"]["python"])
    bot = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text("utf-8"))["updates"]
    places = {one["package-ecosystem"]: one for one in bot}
    assert places["docker"]["directory"] == "/"
    assert "/.github" in places["pip"]["directories"]


def _targets(job: dict[str, object]) -> list[str]:
    strategy = job.get("strategy")
    return strategy["matrix"].get("target", []) if isinstance(strategy, dict) else []


def test_the_version_has_its_changes() -> None:
    """The newest section of the changelog is of this version, and the citation names it."""
    newest = re.search(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"))
    assert newest is not None
    assert newest[1] == __version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == __version__


def test_what_ci_installs_is_pinned() -> None:
    """Every package that the project requires has one version in the lock file."""
    pinned = {}
    for line in (ROOT / ".github" / "constraints.txt").read_text("utf-8").splitlines():
        name, _, version = line.partition(";")[0].strip().partition("==")
        pinned[name.partition("[")[0].lower()] = version
    assert all(pinned.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {re.split(r"[>=\[]", name)[0] for name in project["dependencies"]} <= pinned.keys()
