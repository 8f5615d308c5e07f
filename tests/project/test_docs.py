"""The documentation: links lead somewhere, and the Python of the API's page runs."""

import importlib.util
import re
import shlex
import shutil
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from headway.cli.main import app, main
from tests.support.file_index import ABOVE

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), *ROOT.glob("notebooks/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Make the anchors of a page's headings as GitHub does."""
    headings = HEADING.findall(FENCE.sub("", page.read_text("utf-8")))
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links name files that exist, and headings that are there."""
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_merges_are_done(page: Path) -> None:
    """No page has the marks that git leaves where two changes meet."""
    assert not re.search(r"^(<{7}|>{7}) ", page.read_text("utf-8"), re.M)


def test_every_page_is_in_the_index() -> None:
    """docs/README.md leads to all pages of docs/."""
    index = ROOT / "docs" / "README.md"
    linked = {link.partition("#")[0] for link in LINK.findall(index.read_text("utf-8"))}
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= linked
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    assert pages <= set(re.findall(r"[\w-]+\.md", navigation))


MODULE = rf"`((?:simulator|{'|'.join(ABOVE)}|tests)/[\w/]+\.py)`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_are_where_pages_say(page: Path) -> None:
    """A file that is named is there, and so is what `NAME` in `FILE` says of it."""
    text = page.read_text("utf-8")
    assert not [file for file in re.findall(MODULE, text) if not (ROOT / file).exists()]
    for name, file in re.findall(rf"`(\w+)` in\s+{MODULE}", text):
        source = (ROOT / file).read_text("utf-8")
        assert re.search(rf"^(?:def |class )?{name}\b", source, re.M), f"{name} in {file}"


def test_the_changelog_says_all_once() -> None:
    """Merged line by line, it may get an entry twice, or lines that belong to none."""
    lines = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
    entries = [line for line in lines if line and not line.startswith(("#", "  "))]
    assert all(re.match(r"- \[(NEW|FIX|CHANGE|BREAKING)\] \S", entry) for entry in entries)
    assert len({*lines} - {""}) == len([line for line in lines if line])


def blocks(page: Path, kind: str) -> list[str]:
    """Return a page's code blocks of one language."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


@pytest.mark.medium
def test_the_api_page_runs(tmp_path, monkeypatch) -> None:
    """All blocks in one namespace, in a folder with the scenarios."""
    shutil.copytree(ROOT / "scenarios", tmp_path / "scenarios")
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "page"}
    for number, text in enumerate(blocks(ROOT / "docs" / "api.md", "python")):
        exec(compile(text, f"docs/api.md, block {number}", "exec"), names)
    assert len(names["ends"]) == 12
    assert len(names["log"].requests) == 48
    assert len(names["frame"]) == 4
    assert names["answer"]["holds"][0]


def test_the_scenario_of_the_readme_runs(tmp_path, monkeypatch, capsys) -> None:
    """The ten lines, with the overrides below them."""
    (text,) = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "my.yaml").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "my.yaml", "--set", "engine.max_num_seqs=64"]) == 0
    assert "Successful requests:                     1000" in capsys.readouterr().out


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch) -> None:
    shutil.copytree(ROOT / "scenarios", tmp_path / "scenarios")
    monkeypatch.chdir(tmp_path)
    (text,) = blocks(ROOT / "README.md", "python")
    exec(compile(text, "README.md", "exec"), {"__name__": "page"})


def test_git_ignores_the_environment_of_the_readme() -> None:
    """Its folder lies in the checkout, where `git status` would list it."""
    (folder,) = re.findall(r"-m venv (\S+)", (ROOT / "README.md").read_text("utf-8"))
    assert f"/{folder}/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


def test_the_readme_says_how_many_models_and_gpus_there_are(capsys) -> None:
    """And names the commands that list them."""
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    said = r"brings (\d+) models, .* `headway (.*)`, and (\d+) GPUs, .* `headway (.*)` lists"
    found = re.search(said, text)
    assert found is not None
    models, lists, gpus, refused = found.groups()
    assert main(lists.split()) == 0
    assert capsys.readouterr().out.splitlines()[-1].count(",") + 1 == int(models)
    assert main(refused.split()) == 2
    assert capsys.readouterr().err.rpartition(" as ")[2].count(",") + 1 == int(gpus)


def commands(page: Path) -> list[list[str]]:
    """Return the words after `headway` of every command in a page's blocks, comments left out."""
    text = "\n".join(
        re.findall(r"^```(?:console|sh|bash)\n(.*?)^```$", page.read_text(), re.M | re.S)
    )
    lines = re.sub(r"\\\n", " ", text).splitlines()
    found = [re.match(r"^(?:\$ )?headway ([^|>]+)", line) for line in lines]
    return [shlex.split(match[1], comments=True) for match in found if match]


@pytest.mark.many
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_can_be_given(page: Path) -> None:
    """No page tells of a command or an option that is not there."""
    for words in commands(page):
        app.parse_args(words, exit_on_error=False, print_error=False)


def test_commands_are_found() -> None:
    assert ["run", "demo"] in commands(ROOT / "README.md")
    with pytest.raises(CycloptsError):
        app.parse_args(["run", "demo", "--no-such"], exit_on_error=False, print_error=False)


def test_the_site_names_notebooks_and_leaves_compiled_code_out() -> None:
    """The navigation has the notebooks' titles; linked code can be read in the dark."""
    config = pytest.importorskip("mkdocs.config").load_config(str(ROOT / "mkdocs.yml"))
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    hooks.on_config(config)
    assert {"Which GPU?": "notebooks/05_which_gpu.ipynb"} in config.nav[-1]["Notebooks"]
    assert config.exclude_docs.match_file("__pycache__/hooks.cpython-311.pyc")
    style = (ROOT / "docs" / "stylesheets" / "headway.css").read_text("utf-8")
    (colour,) = re.findall(r'"slate"\] \.md-typeset a code \{ color: #(\w{6}); \}', style)
    assert (_luminance(colour) + 0.05) / (_luminance("272a35") + 0.05) > 4.5  # WCAG AA


def _luminance(colour: str) -> float:
    """By WCAG, of six hexadecimal digits."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (
        one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
