"""`headway compare`: a table, a picture and every run."""

import csv
import json

from simulator.cli.main import main
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
