"""`validate --measured`: a run's launch command fills its empty cells."""

from calibration.measured.runs import read_runs
from headway.cli.main import main


def test_a_command_fills_empty_cells(tmp_path):
    """What has no column, or what is not simulated, is a fault of the row alone."""
    (tmp_path / "runs.csv").write_text(
        "run_id,gpu,model,tp,max_num_seqs,engine_version,command\n"
        "a,H100,,,64,0.19.1,vllm serve Qwen/Qwen3-8B -tp 2 --max-num-seqs 8 --max-model-len 4k\n"
        "b,H100,m,1,,,vllm serve m --no-enable-prefix-caching\n"
        "c,H100,m,1,,,vllm serve m -dcp 2\n"
        "d,H100,m,1,,,vllm serve m --watermark 0.1\n"
    )
    first, second, third, fourth = read_runs(tmp_path)
    assert first.word("model") == "Qwen/Qwen3-8B"
    assert [first.count(n) for n in ("tp", "max_num_seqs", "max_model_len")] == [2, 64, 4000]
    assert first.word("engine_version") == "0.19.1"
    assert (second.flag("prefix_caching"), second.faults) == (False, ())
    assert "runs.csv:4: command: -dcp 2: is not simulated" in third.faults[0]
    assert "runs.csv:5: command: --watermark 0.1: has no column" in fourth.faults[0]


def test_a_command_beside_the_file_is_that_of_all_its_runs(tmp_path, capsys):
    (tmp_path / "runs.csv").write_text("run_id,gpu,model\na,H100,m\n")
    assert main(["validate", "--measured", str(tmp_path), "--command", "vllm serve m -dcp 2"]) != 0
    told = capsys.readouterr()
    assert "command: -dcp 2: is not simulated" in told.out + told.err
    assert main(["validate", str(tmp_path), "--command", "vllm serve m"]) == 2
    assert "--command: needs --measured" in capsys.readouterr().err
