"""What commands write: folders are made, results replaced, scenarios never (docs/commands.md)."""

from pathlib import Path

import pytest

from headway.cli.main import main
from tests.support.commands import TRACE
from tests.traffic.test_server_metrics import OUTPUT, PROMPT, scrape

FEW = ("--set", "workload.num_prompts=4")
PLAN = (
    "--slo",
    "mean_ttft_ms<=100000",
    "--replications",
    "1",
    "--min-duration",
    "1",
    "--max-duration",
    "20",
)
RESULTS = {
    "run": ["run", "small.yaml", *FEW, "--out", "{}"],
    "compare": ["compare", "small.yaml", "--vary", "seed=1,2", *FEW, "--out", "{}"],
    "sweep": ["sweep", "small.yaml", "--vary", "seed=1,2", *FEW, "--jobs", "1", "--out", "{}"],
    "plan": ["plan", "small.yaml", *PLAN, "--jobs", "1", "--out", "{}"],
    "report": ["report", "done", "--out", "{}.html"],
    "plot": ["plot", "throughput", "done", "--out", "{}.svg"],
    "trace convert": ["trace", "convert", "t.csv", "{}.jsonl"],
}
SCENARIOS = {
    "init": ["init", "{}.yaml", "--yes"],
    "trace from-metrics": ["trace", "from-metrics", "m.txt", "--seconds", "9", "--out", "{}.yaml"],
}
ALL = RESULTS | SCENARIOS


@pytest.fixture(autouse=True)
def sources(folder):
    """What the commands read."""
    (folder / "t.csv").write_text(TRACE)
    (folder / "m.txt").write_text(scrape(9, PROMPT, OUTPUT))
    assert main(["run", "small.yaml", *FEW, "--out", "done", "--quiet"]) == 0


def written(name: str) -> str:
    """Return the file or folder that a command writes for `{}`."""
    return next(word for word in ALL[name] if "{}" in word)


def call(name: str, place: str) -> int:
    return main([word.replace("{}", place) for word in ALL[name]])


def contents(path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.many
@pytest.mark.parametrize("name", ALL)
def test_folders_are_made_and_only_results_are_replaced(folder, capsys, name):
    """Also those above; a second call writes the same, or leaves what people edit."""
    assert call(name, "new/er/there") == 0
    out = folder / written(name).replace("{}", "new/er/there")
    before = contents(out)
    assert before
    capsys.readouterr()
    code = call(name, "new/er/there")
    if name in RESULTS:
        assert code == 0
        assert contents(out).keys() == before.keys()
        return
    assert code == 2
    place = out.relative_to(folder)
    assert capsys.readouterr().err == (
        f"headway: error: {place}: is there already; give another name\n"
    )
    assert contents(out) == before


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_put_below_a_file(folder, capsys, name):
    """One line that names the place; the file stays as it is."""
    (folder / "file").write_text("mine")
    assert call(name, "file/there") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headway: error: ")
    assert written(name).replace("{}", "file/there") in line
    assert line.endswith("file is not a folder")
    assert (folder / "file").read_text() == "mine"


@pytest.mark.parametrize("option", ["--timeline", "--prometheus"])
@pytest.mark.parametrize("spelling", ["{}", "./{}", "../{folder}/{}"])
@pytest.mark.parametrize("name", ["replay.yaml", "t.csv"])
def test_what_a_run_reads_is_not_replaced(folder, capsys, option, spelling, name):
    (folder / "replay.yaml").write_text("workload: {trace: {path: t.csv}}\n")
    before = contents(folder)
    path = spelling.format(name, folder=folder.name)
    assert main(["run", "replay.yaml", option, path, "--out", "new"]) == 2
    assert f"{option} {Path(path)}: " in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize(
    "words",
    [
        ["trace", "convert", "t.csv", "small.yaml"],
        ["trace", "convert", "replay.yaml", "t.csv"],
        ["completion", "bash", "--out", "small.yaml"],
        ["run", "replay.yaml", "--out", "."],
    ],
)
def test_neither_a_scenario_nor_what_is_read_is_replaced(folder, capsys, words):
    (folder / "requests.csv").write_text(TRACE)
    text = (
        "workload: {trace: {path: requests.csv}}\n"
        if "run" in words
        else "workload: {trace: {path: t.csv}}\n"
    )
    (folder / "replay.yaml").write_text(text)
    before = contents(folder)
    assert main(words) == 2
    assert contents(folder) == before


def test_a_run_replaces_no_file_of_that_name_that_no_run_wrote(folder, capsys) -> None:
    """Where a summary.json is beside it, a run did: then it is replaced."""
    Path("requests.csv").write_text("mine\n")
    command = ["run", "small.yaml", *FEW, "--out"]
    assert main([*command, "."]) == 2
    assert "--out requests.csv: no run wrote it; give another folder" in capsys.readouterr().err
    assert Path("requests.csv").read_text() == "mine\n"
    assert [main([*command, "out"]) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run", "small.yaml", "--out", ""], "--out"),
        (["run", "small.yaml", "--deploy="], "--deploy"),
        (["run", ""], "run"),
        (["report", ""], "report"),
        (["trace", "describe", "t.csv", "--columns", ""], "--columns"),
    ],
)
def test_an_empty_value_is_no_path(words: list[str], named: str, capsys) -> None:
    assert main(words) == 2
    assert f"{named}: needs a value, but got an empty one" in capsys.readouterr().err
