"""`validate --measured`: a run's launch command fills its empty cells."""

import pytest

from calibration.measured.engine import check_supported, engine_block
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


def test_drafts_of_a_command_are_replayed(tmp_path):
    """Its tree and pool are; a cell of another number is a chain of that."""
    tree = "sglang serve --model-path meta-llama/Llama-3.1-8B-Instruct --max-total-tokens 9000 "
    tree += "--speculative-algorithm EAGLE3 --speculative-draft-model-path a/b"
    (tmp_path / "runs.csv").write_text(
        "run_id,gpu,model,engine,acceptance,num_speculative_tokens,command\n"
        f"a,H100,,,0.7,,{tree}\nb,H100,,,0.7,2,{tree}\nc,H100,,,,,{tree}\n"
    )
    first, second, third = read_runs(tmp_path)
    block = engine_block(first, "H100-80GB")
    assert (block["max_num_seqs"], block["num_gpu_blocks_override"]) == (48, 9000)
    drafts = block["speculative_config"]
    assert (drafts["method"], drafts["speculative_num_draft_tokens"]) == ("eagle3", 8)
    assert (drafts["acceptance"], drafts["draft"]) == (0.7, {})
    assert engine_block(second, "H100-80GB")["speculative_config"] == {
        "method": "eagle3",
        "num_speculative_tokens": 2,
        "acceptance": 0.7,
        "draft": {},
    }
    with pytest.raises(ValueError, match="speculative decoding needs both"):
        check_supported(third)


def test_a_command_beside_the_file_is_that_of_all_its_runs(tmp_path, capsys):
    (tmp_path / "runs.csv").write_text("run_id,gpu,model\na,H100,m\n")
    assert main(["validate", "--measured", str(tmp_path), "--command", "vllm serve m -dcp 2"]) != 0
    told = capsys.readouterr()
    assert "command: -dcp 2: is not simulated" in told.out + told.err
    assert main(["validate", str(tmp_path), "--command", "vllm serve m"]) == 2
    assert "--command: needs --measured" in capsys.readouterr().err
