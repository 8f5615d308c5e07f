"""Names that a spreadsheet would run are text in each CSV, and the same when it is read again."""

import csv
import json
from pathlib import Path

import pandas as pd
import pytest

from calibration.measured.runs import read_runs
from headway.cli.main import main
from headway.planning.runs import encode_csv
from headway.runs.read import read_rows, read_table, unescape_frame
from simulator.workload.traces import read_trace
from tests.support.scenarios import TINY

NAMES = ["=cmd|' /C calc'!A0", "+1+2", "-2+3", "@SUM(A1)", "'=quoted", "plain", "\uff1d1"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace with a request of each name."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 10 * k, "input_length": 16, "output_length": 3, "hash_ids": [k]}
        | {"client": name}
        for k, name in enumerate(NAMES)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def cells(path: Path) -> list[str]:
    """Return all texts of a CSV."""
    with path.open(newline="", encoding="utf-8") as file:
        return [cell for row in csv.reader(file) for cell in row]


def is_formula(cell: str) -> bool:
    """Say whether a spreadsheet would take a cell for one; a number is none."""
    try:
        float(cell)
    except ValueError:
        return cell.startswith(("=", "+", "-", "@", "\t", "\r", "\uff1d"))
    return False


def test_the_files_of_a_run(tmp_path: Path, trace: Path) -> None:
    """By the reader of its tables, of its rows, and of any trace."""
    (tmp_path / "s.yaml").write_text(TINY)
    words = ["--set", f"workload={{trace: {{path: {trace}}}}}", "--quiet"]
    assert main(["run", str(tmp_path / "s.yaml"), *words, "--out", str(tmp_path / "o")]) == 0
    tables = [*(tmp_path / "o").glob("*.csv")]
    assert {"requests.csv", "clients.csv"} <= {path.name for path in tables}
    for path in tables:
        assert not any(map(is_formula, cells(path))), path
    assert read_table(tmp_path / "o", "requests").client.tolist() == NAMES
    assert {row["client"] for _, row in read_rows(tmp_path / "o", "requests")} == {*NAMES}
    assert read_trace(tmp_path / "o" / "requests.csv").client == NAMES
    assert main(["explain", str(tmp_path / "o"), "0"]) == 0


def test_tables_of_several_runs(tmp_path: Path) -> None:
    """A number that is written already is no text."""
    text = encode_csv([{"a": "-1.5e-6", "b": -2, "c": "-1+2", "d": None, "e": "'=x"}])
    assert text == b"a,b,c,d,e\n-1.5e-6,-2,'-1+2,,''=x\n"
    (tmp_path / "t.csv").write_bytes(encode_csv([{"run": name, "k": True} for name in NAMES]))
    assert not any(map(is_formula, cells(tmp_path / "t.csv")))
    assert unescape_frame(pd.read_csv(tmp_path / "t.csv"))["run"].tolist() == NAMES


def test_a_measured_run(tmp_path: Path) -> None:
    row = {"run_id": "=1+1", "gpu": "H100-80GB", "model": "llama-3-8b", "engine_version": "0.30"}
    row |= {"per_request_file": "requests.csv", "clock": "client", "n_requests": "3"}
    (tmp_path / "runs.csv").write_bytes(encode_csv([row]))
    assert "'=1+1" in cells(tmp_path / "runs.csv")
    assert [one.run_id for one in read_runs(tmp_path)] == ["=1+1"]
