"""Rows of runs.csv: what a cell may be, and whose release a version is."""

from pathlib import Path

import pytest

from calibration.measured.runs import read_runs
from simulator.util.errors import HeadwayError

ROW = {"run_id": "a", "gpu": "H100-80GB", "model": "llama-3.1-8b"}


def write_row(folder: Path, **cells: str) -> Path:
    row = {**ROW, **cells}
    (folder / "runs.csv").write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    return folder


def test_a_variation_in_percent_is_refused(tmp_path) -> None:
    (run,) = read_runs(write_row(tmp_path, output_cv="0.5"))
    assert run.number("output_cv") == 0.5
    with pytest.raises(HeadwayError, match="output_cv: must be at most 10, not '50'"):
        read_runs(write_row(tmp_path, output_cv="50"))


def test_the_release_of_sglang_is_none_of_vllm(tmp_path) -> None:
    command = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct"
    folder = write_row(tmp_path, engine="sglang", engine_version="0.5.4", command=command)
    (run,) = read_runs(folder)
    assert run.word("engine_version") == "0.5.4"
    vllm = "vllm serve lmsys/sglang-8B --swap-space 4"  # an option that 0.17 was the last to have
    assert read_runs(write_row(tmp_path, engine_version="0.9.0", command=vllm))


@pytest.mark.parametrize(
    ("cell", "milliseconds"),
    [("30ms", 30), ("0.03 s", 30), ("30", 30), ("~3e4 us (P50)", 30), ("0.03 seconds", 30)],
)
def test_a_time_may_have_a_unit(tmp_path, cell: str, milliseconds: float) -> None:
    (run,) = read_runs(write_row(tmp_path, ttft_mean_ms=cell, timeout_s="2 min"))
    assert run.measured == {"mean_ttft_ms": pytest.approx(milliseconds)}
    assert run.number("timeout_s") == pytest.approx(120)
    assert run.remarks == ()


@pytest.mark.parametrize(
    ("column", "cell"),
    [("ttft_mean_ms", "30 furlongs"), ("req_per_s", "3 s"), ("output_tok_per_s", "90 ms")],
)
def test_a_cell_with_another_unit_is_left_out_with_its_place(tmp_path, column, cell) -> None:
    (run,) = read_runs(write_row(tmp_path, **{column: cell}))
    assert run.measured == {}
    assert run.remarks[0].endswith(
        f"runs.csv:2: {column}: must be a number, 0 or more, not {cell!r}"
    )


def test_a_count_of_a_unit_is_refused(tmp_path) -> None:
    with pytest.raises(HeadwayError, match=r"runs\.csv:2: concurrency: must be a number"):
        read_runs(write_row(tmp_path, concurrency="3 s"))
