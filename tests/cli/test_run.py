"""`headway run`: what it prints and writes."""

import json
import re

import pytest
import yaml

from headway.cli.main import main
from simulator.costs.profile import PROFILES
from simulator.models.load import MODELS
from tests.support.commands import FILES, TRACE, names


def test_run_prints_the_report_and_writes_the_files(folder, capsys):
    """By default into out/NAME; nothing is said on stderr."""
    assert main(["run", "small.yaml"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert "Successful requests:                     40" in told.out
    assert told.out.endswith(
        "written to out/small: summary.json, requests.csv, steps.csv, scenario.yaml\n"
    )
    out = folder / "out" / "small"
    assert names(out) == FILES
    assert json.loads((out / "summary.json").read_text())["completed"] == 40


def test_the_written_scenario_gives_the_same_run(folder):
    """Same seed, same bytes; also stepwise, and when the resolved scenario is run."""
    assert main(["run", "small.yaml", "--out", "a", "--quiet"]) == 0
    assert main(["run", "a/scenario.yaml", "--out", "b", "--quiet"]) == 0
    assert main(["run", "small.yaml", "--out", "c", "--quiet", "--stepwise"]) == 0
    for name in FILES:
        assert (folder / "a" / name).read_bytes() == (folder / "b" / name).read_bytes()
    assert (folder / "a" / "requests.csv").read_bytes() == (
        folder / "c" / "requests.csv"
    ).read_bytes()


def test_the_written_scenario_finds_its_files_from_any_folder(folder):
    """A profile, a trace and a model's shape beside the scenario's file, by relative paths."""
    there = folder / "there"
    there.mkdir()
    (there / "mine.yaml").write_text((PROFILES / "llama-3-8b.a100.bf16.yaml").read_text())
    (there / "trace.csv").write_text(TRACE)
    (there / "mine.json").write_bytes((MODELS / "llama-3-8b" / "config.json").read_bytes())
    (there / "traced.yaml").write_text(
        "model: mine.json\ngpu: {name: A100-80GB}\ncost: {profile: mine.yaml}\n"
        "workload: {trace: {path: trace.csv}}\n"
    )
    assert main(["run", "there/traced.yaml", "--out", "a", "--quiet"]) == 0
    assert main(["run", "a/scenario.yaml", "--out", "b/c", "--quiet"]) == 0
    for name in FILES:
        assert (folder / "a" / name).read_bytes() == (folder / "b" / "c" / name).read_bytes()


def test_overrides_and_seed_reach_the_run(folder, capsys):
    """And stand in the resolved scenario; --quiet says nothing."""
    sets = ["--set", "workload.num_prompts=5", "--set", "engine.max_num_seqs=2"]
    assert main(["run", "small.yaml", *sets, "--seed", "3", "--out", "x", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    resolved = yaml.safe_load((folder / "x" / "scenario.yaml").read_text())
    assert resolved["workload"]["num_prompts"] == 5
    assert resolved["engine"]["max_num_seqs"] == 2
    assert resolved["seed"] == 3


def test_warnings_are_told_once_on_stderr(folder, capsys):
    """Without Python's file and line."""
    (folder / "t.csv").write_text(TRACE)
    (folder / "s.yaml").write_text(
        "workload: {trace: {path: t.csv, max_input_len: 12}}\n"
        "cost: {kind: linear, base: 1e-2, per_token: 1e-5, per_context: 0}\n"
    )
    assert main(["compare", "s.yaml", "--vary", "seed=1,2", "--quiet"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headway: warning: ")
    assert "max_input_len" in line


def test_a_rate_without_limit_and_an_even_one(folder):
    """JSON has no infinity: both are a word in the summary."""
    sets = ["--set", "workload.burstiness=.inf", "--out", "x", "--quiet"]
    for rate, told in ((".inf", "inf"), ("20", 20.0)):
        assert main(["run", "small.yaml", "--set", f"workload.request_rate={rate}", *sets]) == 0
        summary = json.loads((folder / "x" / "summary.json").read_text())
        assert (summary["request_rate"], summary["burstiness"]) == (told, "inf")


def test_a_run_too_long_for_its_files_is_told(folder, capsys):
    """Rather than a traceback of what overflows first."""
    before = names(folder)
    assert main(["run", "small.yaml", "--set", "workload.request_rate=1e-20"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"headway: error: the run lasts \de\+21 s; .* up to 1e\+08 s", line)
    assert names(folder) == before


@pytest.mark.parametrize("more", [[], ["--no-tables"]])
def test_a_run_that_serves_nobody_fails_and_has_no_saturation(folder, capsys, more) -> None:
    """All requests are longer than the model takes: the files are written, the exit code is 1."""
    sets = ["--set", "engine.max_model_len=64", "--set", "workload.input_len=100", "--out", "o"]
    assert main(["run", "small.yaml", *sets, *more]) == 1
    summary = json.loads((folder / "o" / "summary.json").read_text())
    assert (summary["completed"], summary["failed"] > 0) == (0, True)
    assert "load" not in summary["headway"]
    assert "saturation throughput" not in capsys.readouterr().out


def test_a_folder_of_a_run_runs_its_scenario_and_hides_no_shipped_name(folder) -> None:
    """`run demo --out demo` can be repeated; `run out/x` is the run of x again."""
    few = ["--set", "workload.num_prompts=5", "--quiet"]
    assert main(["run", "demo", *few, "--out", "demo"]) == 0
    assert main(["run", "demo", *few, "--out", "demo"]) == 0
    assert main(["run", "small.yaml", "--quiet", "--out", "out/x"]) == 0
    assert main(["run", "out/x", "--quiet", "--out", "again"]) == 0
    assert main(["run", "small.yaml", "--quiet"]) == 0
    assert main(["run", "out/small", "--quiet"]) == 0  # beside what it reads
    of = [folder / one / "requests.csv" for one in ("out/x", "again", "out/small-again")]
    assert len({one.read_text() for one in of}) == 1
