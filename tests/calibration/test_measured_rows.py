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
