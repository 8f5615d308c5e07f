"""`headway compare`: a table, a picture and every run."""

import csv
import json

import pytest

from headway.cli.main import main
from tests.support.commands import FILES, names


def test_compare_writes_a_table_a_plot_and_each_run(folder, capsys):
    """A row for each point, in the order given, with ratios to the first."""
    vary = ["--vary", "engine.scheduling_policy=static,fcfs"]
    assert main(["compare", "small.yaml", *vary]) == 0
    told = capsys.readouterr()
    out = folder / "out" / "small-compare"
    assert names(out) == ["comparison.csv", "comparison.png", "fcfs", "static"]
    assert names(out / "fcfs") == FILES
    with (out / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["static", "fcfs"]
    assert [row["engine.scheduling_policy"] for row in rows] == ["static", "fcfs"]
    assert [row["completed"] for row in rows] == ["40", "40"]
    summary = json.loads((out / "fcfs" / "summary.json").read_text())
    assert float(rows[1]["mean_ttft_ms"]) == summary["mean_ttft_ms"]
    assert told.out.split()[:2] == ["static", "fcfs"]
    assert "written to out/small-compare: comparison.csv, comparison.png" in told.out


def test_compare_with_many_runs(folder, capsys):
    """A row for each, and another picture."""
    values = ",".join(str(k) for k in range(1, 10))
    assert main(["compare", "small.yaml", "--vary", f"seed={values}", "--out", "o"]) == 0
    told = capsys.readouterr()
    assert not told.err
    assert names(folder / "o") == [*values.split(","), "comparison.csv", "comparison.png"]
    assert [line.split()[0] for line in told.out.splitlines()[3:12]] == values.split(",")


@pytest.mark.medium
def test_compare_tells_of_clients_and_of_named_variants(folder, capsys):
    """Rows for each client; in the files, too. Rows that do not differ come with --all."""
    sets = ["--set", "workload.clients=2", "--set", "workload.request_rate=inf"]
    variants = ["--variant", "Today:", "--variant", "One seat: engine.max_num_seqs=1"]
    told = []
    for more in ([], ["--all"]):
        assert main(["compare", "small.yaml", *variants, *sets, *more]) == 0
        told.append(capsys.readouterr().out)
    assert told[0].splitlines()[0].split() == ["Today", "One", "seat"]
    rows = [line for line in told[0].splitlines() if line.startswith("client-0: Mean TTFT (ms)")]
    assert len(rows) == 1
    out = folder / "out" / "small-compare"
    assert names(out) == ["One-seat", "Today", "comparison.csv", "comparison.png"]
    with (out / "comparison.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["engine.max_num_seqs"], second["engine.max_num_seqs"]) == ("", "1")
    part = json.loads((out / "Today" / "summary.json").read_text())["headway"]["per_client"]
    assert float(first["mean_ttft_ms[client-0]"]) == part["client-0"]["mean_ttft_ms"]
    assert "left out: --all shows them" in told[0]
    assert "Successful requests" not in told[0]
    assert "Successful requests" in told[1]


@pytest.mark.medium
def test_colours_are_for_what_is_significant(folder, capsys, monkeypatch):
    """And on terminals alone; what is alike is shown with --all."""
    seats = ["--vary", "engine.max_num_seqs=1,4", "--set", "workload.request_rate=12"]
    seats += ["--set", "workload.range_ratio=0.9"]
    assert main(["compare", "small.yaml", *seats, "--replications", "4", "--all"]) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["compare", "small.yaml", *seats, "--replications", "4"]) == 0
    folded = capsys.readouterr().out
    for line in folded.splitlines():
        marked = {" +": "\x1b[32m", " -": "\x1b[31m"}.get(line.removesuffix("\x1b[0m")[-2:], "")
        assert line.startswith(marked)
        assert ("\x1b" in line) == bool(marked)
    assert "\x1b[32mMean TTFT (ms)" in folded
    told, every = (text.splitlines() for text in (folded, plain))
    assert not any(line.endswith(" =") for line in told)
    assert any(line.endswith(" =") for line in every)
    assert "at most that may be chance" in folded


@pytest.mark.medium
def test_why_jains_index_is_missing_is_told(folder, capsys):
    """It is of windows in which clients compete: here only of the run with two seats."""
    load = {"num_prompts": 60, "request_rate": 1, "output_len": 400, "clients": 2}
    (folder / "two.yaml").write_text(json.dumps({"model": "llama-3-8b", "workload": load}))
    for values, told in (("2,64", 1), ("2,3", 0)):
        assert (
            main(["compare", "two.yaml", "--vary", f"engine.max_num_seqs={values}", "--all"]) == 0
        )
        out = capsys.readouterr().out
        assert "Jain's index of" in out
        assert out.count("Jain's index n/a: in no window did two clients have") == told
