"""`headway memory` of a server that would not start: what starts it."""

import json
import warnings
from pathlib import Path

import pytest

from headway.cli.main import main
from simulator import load_scenario, run
from simulator.build import kv_room, settle
from simulator.util.errors import HeadwayWarning

MODELS = Path(__file__).parents[2] / "simulator" / "models" / "configs"


def test_a_run_says_that_its_blocks_do_not_fit():
    """Fewer than fit are what the key is for; more would end the server."""
    keys = ["model=llama-3.1-8b", "gpu.name=L40S", "engine={name: vllm, max_model_len: 8192}"]
    with pytest.warns(HeadwayWarning, match="CUDA out of memory: 50,000 blocks take"):
        run(
            load_scenario(
                "demo", [*keys, "engine.num_gpu_blocks_override=50000", "workload.num_prompts=2"]
            )
        )
    with warnings.catch_warnings(action="error", category=HeadwayWarning):
        run(
            load_scenario(
                "demo", [*keys, "engine.num_gpu_blocks_override=600", "workload.num_prompts=2"]
            )
        )


@pytest.mark.parametrize(
    ("command", "change"),
    [
        ("vllm serve m --gpu-memory-utilization 0.2", "--gpu-memory-utilization 0.43"),
        ("vllm serve m -tp 3", ""),
        ("python -m sglang.launch_server --model-path big", "--tp-size 4"),
    ],
)
def test_changes_are_options_of_the_command(capsys, command: str, change: str) -> None:
    """The least share of the memory, too: 42 % does not start."""
    words = {" m ": " meta-llama/Llama-3.1-8B ", "big": "meta-llama/Llama-3.1-70B-Instruct"}
    for word, name in words.items():
        command = command.replace(word, name)
    assert main(["memory", "--gpu", "H100-80GB", "--command", command]) == (1 if change else 2)
    told = capsys.readouterr().err
    assert told.endswith(f"it starts with {change}\n") if change else "does not divide" in told


def test_stages_are_proposed_where_heads_do_not_divide(capsys, tmp_path: Path) -> None:
    """9 heads of a model of 40 GiB: two stages, not two parts of each layer."""
    raw = json.loads((MODELS / "llama-3-8b" / "config.json").read_text())
    raw |= {"num_attention_heads": 9, "num_key_value_heads": 9, "hidden_size": 9 * 512}
    raw |= {"head_dim": 512, "num_hidden_layers": 64}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert main(["memory", "--model", str(tmp_path), "--gpu", "A6000"]) == 1
    assert " or --pipeline-parallel-size 2\n" in capsys.readouterr().err


def test_what_starts_a_server_is_sought_once(capsys, monkeypatch) -> None:
    """The scenario's check sought it, too, and its words were lost."""
    sought = []
    monkeypatch.setattr(kv_room, "remedies", lambda *given: sought.append(given) or "")
    monkeypatch.setattr(settle, "remedies", kv_room.remedies)
    for model in ("llama-3-70b", "phi-3-mini-128k"):  # no room at all; none for the longest
        assert main(["memory", "--model", model, "--gpu", "L4", "--max-model-len", "100000"]) == 1
        assert len(sought) == 1
        sought.clear()


def test_fewer_sequences_are_proposed_where_their_logits_leave_no_room(capsys) -> None:
    """1,024 rows of logits of a Llama-3 take 1.7 GiB on an H100."""
    command = "vllm serve RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic --max-model-len 1024"
    command += " --max-num-batched-tokens 2048 --gpu-memory-utilization 0.89"
    assert main(["memory", "--gpu", "H100-80GB", "--command", command]) == 1
    advice = capsys.readouterr().err.rpartition("it starts with ")[2]
    assert advice.split(" or ")[0] == "--max-num-seqs 256"
    assert main(["memory", "--gpu", "H100-80GB", "--command", f"{command} --max-num-seqs 256"]) == 0
    assert main(["memory", "--gpu", "H100-80GB", "--command", f"{command} --max-num-seqs 512"]) == 1
