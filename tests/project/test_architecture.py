"""The house: what docs/architecture.md says is so, and the packages stay small enough to see."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.file_index import ABOVE, floors, layers, summary
from tests.support.package_picture import picture

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
PACKAGES = sorted(
    path.parent for name in ("simulator", *ABOVE) for path in (ROOT / name).rglob("__init__.py")
)
FLOORS = [path for path in PACKAGES if path.parent == ROOT / "simulator"]
ROOMS = {Path(name).name for row in layers()[1] for name in row}
FOLDERS = ("simulator", *ABOVE, "tests")


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def listed(folder: Path) -> list[Path]:
    """Return what `ls` shows of a folder."""
    return [path for path in folder.iterdir() if path.name[0] != "." and path.name != "__pycache__"]


def test_the_picture_is_that_of_the_contracts() -> None:
    """Drawn again by `python -m tests.support.package_picture > docs/images/packages.svg`."""
    assert "(images/packages.svg)" in section("The packages")
    assert (ROOT / "docs" / "images" / "packages.svg").read_text("utf-8") == picture()
    assert {path.name for path in FLOORS} == {*floors()}
    assert all(f">{name}</tspan>" in picture() for name in (*floors(), *ROOMS))


def test_every_path_that_is_named_exists() -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.]*)`", PAGE)
    assert len(named) > 50
    assert [path for path in named if not (ROOT / path).exists()] == []
    files = [path for path in named if path.endswith(".py")]
    assert len({*files}) > 40


def test_the_life_of_a_request_names_each_file_once() -> None:
    """But for those that it comes back to by saying so: the place of another."""
    life = section("The life of a request").partition("With a `cluster:`")[0]
    files = re.findall(r"`(simulator/[\w/]+\.py)`", life)
    assert len(files) > 25
    assert sorted({*files}) == sorted(files)


def test_the_page_says_where_to_make_at_least_ten_changes() -> None:
    wishes = re.findall(r"(?m)^- an? \*\*(\w[\w ]*)\*\*", section("Where do I change ...?"))
    assert {
        "policy", "engine", "cost term", "trace format", "metric", "knob", "plot", "router",
        "finding", "verb",
    } <= {*wishes}  # fmt: skip


def test_every_file_says_what_it_is() -> None:
    """`python -m tests.support.file_index` prints them."""
    for package in PACKAGES:
        for path in package.glob("*.py"):
            assert summary(path).endswith((".", "?")), path


def test_contributors_are_led_here() -> None:
    assert "(docs/architecture.md)" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_the_simulator_is_a_table_of_contents() -> None:
    assert len(listed(ROOT / "simulator")) <= 22
    assert {path.name for path in listed(ROOT / "simulator") if path.is_file()} == {
        "__init__.py", "py.typed",
    }  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_is_small_and_says_what_it_is(package: Path) -> None:
    """It has 25 files at most, and its docstring names a file to start with."""
    assert len([path for path in listed(package) if path.is_file()]) <= 25
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8")))
    assert text is not None
    named = re.findall(r"`([\w/]+\.py)`", text)
    there = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert [name for name in named if not any(path.match(name) for path in there)] == []
    if package in FLOORS:
        assert "may import" in text
        assert "Start with" in text
        assert named


def test_tests_mirror_the_packages() -> None:
    folders = {path.name for path in listed(ROOT / "tests") if path.is_dir()}
    others = {*ROOMS, "live_engine", "project", "support"}
    assert folders - others == {path.name for path in FLOORS}


def test_files_of_tests_are_short() -> None:
    """One that grows past 400 lines is split by behaviour."""
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines())
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    assert {path: lines for path, lines in lengths.items() if lines > 400} == {}
