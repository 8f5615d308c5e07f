"""`headway memory`: what fits on a GPU."""

import json
import re
from pathlib import Path

import pytest

from headway.cli.main import main

MODELS = Path(__file__).parents[2] / "simulator" / "models" / "configs"


def test_memory_prints_the_budget(capsys):
    """With the options of the engine that it depends on."""
    model = ["--model", "llama-3-8b", "--gpu", "A100-80GB"]
    assert main(["memory", *model, "--quantization", "fp8", "--kv-cache-dtype", "fp8"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"KV per token \(fp8\) +64.0 KiB", told)
    assert main(["memory", *model, "--max-model-len", "1000"]) == 0
    assert "max_model_len = 1,000" in capsys.readouterr().out


def test_memory_of_a_scenario_with_keys_set(tmp_path, capsys):
    """Of any engine, on a card of any size; what is not said is the scenario's."""
    path = tmp_path / "s.yaml"
    path.write_text("model: qwen3-14b\ngpu: {name: RTX-4090, count: 4}\nengine: sglang\n")
    assert main(["memory", str(path), "--set", "engine.gpu_memory_utilization=0.8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    free = found["memory_bytes"] - found["context_bytes"]
    assert found["kv_cache_bytes"] == int(0.8 * free) - found["weights_bytes"]
    assert found["log"][1].startswith(
        f"KV Cache is allocated. #tokens: {found['tokens']}, KV size:"
    )
    assert main(["memory", str(path), "--gpu-memory-gib", "15.99", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_bytes"] == int(15.99 * 2**30)


def test_a_server_that_does_not_start_says_what_its_log_would(capsys):
    """And the least change after which it does."""
    arguments = ["--model", "gpt-oss-120b", "--gpu", "H100-80GB"]
    arguments += ["--set", "engine.version=0.10.1"]
    assert main(["memory", *arguments]) == 1
    told = capsys.readouterr()
    assert re.search(r"Available KV cache memory: -\d\.\d\d GiB", told.out)
    assert "ValueError: No available memory for the cache blocks." in told.out
    assert re.search(r"gpt-oss-120b on 1 x H100-80GB does not start: No available", told.err)
    assert told.err.endswith("it starts with --tensor-parallel-size 2\n")
    assert main(["memory", *arguments, "--tp", "2"]) == 0


def test_each_change_that_is_told_starts_the_server(capsys):
    """Requests of 81,173 tokens were told to fit, as if windows grew with them: 77,552 do."""
    arguments = ["memory", "--model", "gpt-oss-120b", "--gpu", "H100-80GB", "--set"]
    arguments.append("engine.version=0.22.0")
    assert main(arguments) == 1
    changes = capsys.readouterr().err.rpartition("it starts with ")[2].split(" or ")
    assert changes[0] == "--max-model-len 73648"
    for change in changes:
        assert main([*arguments, *change.split()]) == 0
    assert main([*arguments, "--max-model-len", "77553"]) == 1


def test_a_picture_of_candidates(tmp_path: Path, capsys):
    """A bar for each GPU."""
    path = tmp_path / "s.yaml"
    path.write_text("model: llama-3-8b\n")
    assert main(["plot", "memory", str(path), "--gpu", "L4", "--gpu", "H100-80GB"]) == 0
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    assert "written to" in capsys.readouterr().out


def test_a_draft_model_is_told_to_be_missing(capsys):
    """Of EAGLE and MTP the sizes follow from the target; of a model of its own they do not."""
    drafts = "{num_speculative_tokens: 4, acceptance: 0.6, draft: {fraction: 0.1}%s}"
    words = ["memory", "--model", "llama-3-8b", "--gpu", "H100-80GB", "--set"]
    key = "engine.speculative_config="
    assert main([*words, key + drafts % ""]) == 0
    assert "not read: the draft model, with weights" in capsys.readouterr().out
    assert main([*words, key + drafts % ", method: eagle"]) == 0
    told = capsys.readouterr().out
    assert "not read" not in told
    assert re.search(r"drafts +0\.47 GiB", told)


@pytest.mark.parametrize("size", ["nan", "-3", "0", "inf"])
def test_a_card_has_a_positive_number_of_gib(size, capsys):
    """NaN was a traceback, and -3 a table."""
    arguments = ["--model", "qwen3-14b", "--gpu", "H100-80GB", "--gpu-memory-gib", size]
    assert main(["memory", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert f"--gpu-memory-gib {size}: must be positive and at most 1,024: GiB" in told.err


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ("sglang", "Not enough memory. Please try to increase --mem-fraction-static."),
        ("tensorrt-llm", "Impossible to fit in any sequence in kvCache"),
    ],
)
def test_each_engine_refuses_in_its_own_words(engine, why, capsys):
    """It was vLLM's error, below a log of -47,524 tokens."""
    arguments = ["memory", "--model", "qwen3-14b", "--gpu", "RTX-4090", "--engine", engine]
    assert main(arguments) == 1
    told = capsys.readouterr()
    assert f"Error: {why}" in told.out
    first = why.split(". ")[0].rstrip(".")
    assert f"does not start: {first}; it starts with" in told.err
    assert main([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["num_gpu_blocks"]) == (0, 0)
    assert found["kv_cache_bytes"] == 0


def test_a_run_of_a_server_that_would_not_start_ends_with_what_starts_it(tmp_path, capsys):
    """It ended with: no knob needs turning."""
    path = tmp_path / "s.yaml"
    load = "{num_prompts: 5, request_rate: 1, input_len: 100, output_len: 9}"
    text = f"model: gpt-oss-120b\ngpu: H100-80GB\nengine: vllm\nworkload: {load}\n"
    path.write_text(f"{text}cost: {{kind: roofline}}\n")
    assert main(["run", str(path), "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    end = "The server would not start: it starts with engine.max_model_len="
    assert end in told.partition("Diagnosis")[2]
    assert "no knob needs turning" not in told


@pytest.mark.parametrize("few", ["--kv-cache-memory-bytes 4G", "--num-gpu-blocks-override 2000"])
def test_a_cache_asked_for_that_is_too_small_is_told(few, tmp_path, monkeypatch, capsys):
    """By `init` and `run`, as by `memory`, which said alone that the server does not start."""
    monkeypatch.chdir(tmp_path)
    command = f"vllm serve llama-3.1-8b {few}"
    assert main(["memory", "--gpu", "H200", "--command", command]) == 1
    assert "seq len (131072), (16.00 GiB KV cache is needed" in capsys.readouterr().err
    assert main(["init", "s.yaml", "--gpu", "H200", "--yes", "--command", command]) == 0
    told = capsys.readouterr().err
    assert "vLLM would not start here on 1 x H200" in told
    assert "it starts with engine.max_model_len=3" in told
    assert "or engine.num_gpu_blocks_override=null" in told
    assert main(["run", "s.yaml", "--set", "workload.num_prompts=3", "--out", "o"]) == 0
    assert "vLLM would not start here on 1 x H200" in capsys.readouterr().err
    assert main(["run", "s.yaml", "--set", "engine.max_model_len=4096", "--out", "p"]) == 0
    assert "would not start" not in capsys.readouterr().err


@pytest.mark.parametrize(("engine", "said"), [("sglang", " (SGLang 0.5.23)\n"), ("vllm", "\n")])
def test_an_answer_for_sglang_names_the_release_that_it_follows(engine, said, capsys):
    """Whose rules it has, whatever the user runs; vLLM's is the release that is asked for."""
    assert main(["memory", "--model", "qwen3-8b", "--gpu", "H200", "--engine", engine]) == 0
    assert f"\nthe engine's log{said}" in capsys.readouterr().out


def test_sglang_and_tensorrt_llm_start_with_room_for_shorter_requests():
    """vLLM wants room for one of max_model_len tokens."""
    arguments = ["memory", "--model", "qwen3-8b", "--gpu", "RTX-4090"]
    for engine, code in (("sglang", 0), ("tensorrt-llm", 0), ("vllm", 1)):
        size = ["--max-model-len", "40960"]
        assert main([*arguments, *size, "--engine", engine]) == code, engine


@pytest.mark.parametrize("model", ["gpt-oss-120b", "qwen3-next-80b-a3b"])
def test_a_run_is_told_the_change_that_starts_the_server(model, tmp_path, capsys):
    """It was one with room for 4,096 tokens, though the server wants max_model_len."""
    path = tmp_path / "s.yaml"
    path.write_text(f"model: {model}\ngpu: H100-80GB\nengine: {{version: 0.10.1}}\n")
    assert main(["run", str(path), "--quiet"]) == 2
    change = capsys.readouterr().err.rpartition("it fits with ")[2].split()
    assert change
    sets = [word for one in change for word in ("--set", one)]
    assert main(["memory", str(path), *sets]) == 0


def figures(capsys, *words: str) -> dict:
    assert main(["memory", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_options_have_the_names_of_each_engine(capsys):
    """Flags stand alone; SGLang's share is taken by its own name."""
    words = ["--model", "llama-3-8b", "--gpu", "H100-80GB"]
    plain, lora = figures(capsys, *words), figures(capsys, *words, "--enable-lora")
    assert lora["parts"]["adapters"] > 0
    assert lora["kv_cache_bytes"] == plain["kv_cache_bytes"] - lora["parts"]["adapters"]
    assert figures(capsys, *words, "--enforce-eager")["cuda_graphs_bytes"] == 0
    assert main(["memory", *words, "--enable-lora", "true"]) == 2
    assert "true: --enable-lora takes no value" in capsys.readouterr().err
    static = [*words, "--engine", "sglang", "--mem-fraction-static", "0.5"]
    found = figures(capsys, *static)
    free = found["memory_bytes"] - found["context_bytes"]
    assert found["usable_bytes"] == int(0.5 * free)
    assert main(["memory", *words, "--mem-fraction-static", "x"]) == 2
    assert "--mem-fraction-static x: engine.gpu_memory_utilization" in capsys.readouterr().err


def test_drafts_need_no_acceptance_here(capsys):
    """A draft model is counted where it is named."""
    words = ["--model", "qwen3-32b", "--gpu", "H200", "--speculative-config"]
    drafts = "{method: draft_model, model: Qwen/Qwen3-0.6B, num_speculative_tokens: 4}"
    found = figures(capsys, *words, drafts)
    assert found["parts"]["drafts"] / 2**30 == pytest.approx(1.12, abs=0.01)
    assert found["unread"] == ""
    assert main(["memory", *words, "{method: mtp, num_speculative_tokens: x}"]) == 2
    told = capsys.readouterr().err
    assert told.count("--speculative-config {method: mtp, num_speculative_tokens: x}: ") == 1
    assert "acceptance" not in told


def test_code_of_ones_own_can_be_refused(tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text("model: llama-3-8b\nengine: {scheduling_policy: 'mine:Policy'}\n")
    assert main(["memory", str(path), "--no-own-code"]) == 2
    assert "mine:Policy" in capsys.readouterr().err


def test_blocks_that_are_given_are_the_cache(capsys):
    """They were ignored, and the utilization was 1: 230,768 tokens on this card."""
    words = ["--model", "llama-3-8b", "--gpu", "L40S", "--max-model-len", "3200"]
    blocks = [*words, "--num-gpu-blocks-override"]
    found, plain = figures(capsys, *blocks, "200"), figures(capsys, *words)
    assert (found["num_gpu_blocks"], found["tokens"]) == (200, 3200)
    assert found["kv_cache_bytes"] == 200 * 16 * found["kv_bytes_per_token"]
    assert found["usable_bytes"] == plain["usable_bytes"]
    assert f"num_gpu_blocks={plain['num_gpu_blocks']} with num_gpu" in found["log"][2]
    assert main(["memory", *blocks, "199"]) == 1
    told = capsys.readouterr()
    assert "estimated maximum model length is 3184" in told.out
    assert re.search(r"the available KV cache memory \(0.39 GiB\); it starts with", told.err)
    assert main(["memory", *blocks, "50000"]) == 1
    assert "50,000 blocks take 97.66 GiB" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--kv-cache-memory-bytes 1G", "--kv_cache_memory_bytes=1G"])
def test_bytes_that_are_given_are_named(capsys, option: str) -> None:
    """As vLLM logs them (gpu_worker.py); the log and the advice named blocks that nobody gave."""
    command = f"vllm serve meta-llama/Meta-Llama-3-8B {option}"
    words = ["memory", "--command", command, "--gpu", "H100-80GB"]
    assert main([*words[:2], f"{command} --max-model-len 4096", *words[3:]]) == 0
    out = capsys.readouterr().out
    assert "reserved 1.00 GiB memory for KV Cache as specified by kv_cache_memory_bytes" in out
    assert "Overriding" not in out
    assert "Available KV" not in out
    assert main([*words[:2], command.replace("1G", "90G"), *words[3:]]) == 1
    told = capsys.readouterr()
    assert told.err.endswith("; it starts with no --kv-cache-memory-bytes\n")
    assert "blocks-override" not in told.err + told.out


def test_bytes_of_the_cache_are_an_option_of_their_own(capsys, tmp_path) -> None:
    """It was refused as vLLM's name of num_gpu_blocks_override."""
    words = ["--gpu", "H100-80GB", "--max-model-len", "4096"]
    found = figures(capsys, "--model", "llama-3-8b", "--kv-cache-memory-bytes", "4G", *words)
    serve = ["--command", "vllm serve llama-3-8b --kv-cache-memory-bytes 4G"]
    assert found == figures(capsys, *serve, *words)
    assert found["kv_cache_bytes"] == 4 << 30
    serve = ["--command", "vllm serve llama-3-8b"]
    assert found == figures(capsys, *serve, "--kv-cache-memory-bytes", "4G", *words)
    path = tmp_path / "s.yaml"
    path.write_text("model: llama-3-8b\ngpu: H100-80GB\n")
    assert main(["memory", str(path), "--kv-cache-memory-bytes", "4G"]) == 2
    assert "vLLM's name of num_gpu_blocks_override" in capsys.readouterr().err


def test_a_command_names_the_model_alone(capsys):
    """`--model` was dropped or taken without a word; a rank was text."""
    serve = ["--command", "vllm serve llama-3-8b --enable-lora --max-lora-rank 64"]
    found = figures(capsys, "--gpu", "L40S", *serve)
    words = ["--enable-lora", "--max-lora-rank", "64"]
    assert (
        found["parts"] == figures(capsys, "--gpu", "L40S", "--model", "llama-3-8b", *words)["parts"]
    )
    assert main(["memory", "--model", "qwen3-14b", "--gpu", "L40S", *serve]) == 2
    assert "--model qwen3-14b: --command names a model, too" in capsys.readouterr().err


def test_an_option_is_read_as_it_is_meant(capsys):
    """`--version` was Headway's, 4090 a number, 32k no length, two ranks were on one GPU."""
    words = ["--model", "llama-3-8b", "--gpu", "L40S"]
    for option in ("--version", "--engine-version"):
        assert figures(capsys, *words, option, "0.10")["cuda_graphs_bytes"] == 0
    assert figures(capsys, *words)["cuda_graphs_bytes"] > 0
    assert figures(capsys, *words, "--max-model-len", "8k")["max_model_len"] == 8000
    found = figures(capsys, *words, "--dp", "2")
    assert (found["gpus"], found["data_parallel_size"]) == (2, 2)
    assert main(["memory", *words, "--dp", "2"]) == 0
    assert capsys.readouterr().out.startswith("llama-3-8b on 2 x L40S: each of 2 data-parallel")
    assert main(["memory", "--model", "llama-3-8b", "--gpu", "4090"]) == 2
    assert "no GPU '4090' in the table; did you mean RTX-4090?" in capsys.readouterr().err
    assert main(["memory", *words, "--gpu-memory-gib", "46068"]) == 2
    assert "46068: must be positive and at most 1,024: GiB, not MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ("--model gemma-2-9b --gpu L4", "--max-model-len 3728 or"),
        (
            "--model llama-3.1-70b --gpu H100",
            "--tensor-parallel-size 2 --max-model-len 20544 or",
        ),
    ],
)
def test_shorter_requests_come_before_more_gpus(capsys, options: str, change: str) -> None:
    """And on fewer GPUs than all of the model's positions take; the server then starts."""
    assert main(["memory", *options.split()]) == 1
    assert f"it starts with {change}" in capsys.readouterr().err
    assert main(["memory", *options.split(), *change.split()[:-1]]) == 0


def test_the_picture_leaves_out_gpus_without_kernels_for_the_format(tmp_path: Path, capsys):
    """Unless the user asks for one: a T4 runs no mxfp4."""
    path = tmp_path / "s.yaml"
    path.write_text("model: gpt-oss-20b\ngpu: {name: H100-80GB}\n")
    assert main(["plot", "memory", str(path)]) == 0
    assert main(["plot", "memory", str(path), "--gpu", "T4", "--gpu", "L4"]) == 2
    assert "mxfp4 from compute capability 8.0" in capsys.readouterr().err


def test_no_format_of_a_checkpoint_is_replaced(capsys, tmp_path: Path):
    """vLLM refuses --quantization beside another format, and a size that splits a block."""
    raw = json.loads((MODELS / "qwen3-30b-a3b" / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert main(["memory", "--model", str(tmp_path), "--gpu", "A10"]) == 1
    told = capsys.readouterr().err
    assert told.endswith("it starts with --tensor-parallel-size 2\n")
    assert "quantization" not in told


def test_an_eagle_head_is_read_by_its_config(capsys, tmp_path: Path) -> None:
    """A narrower head than the published ones takes less; vLLM knows its method by its name."""
    raw = json.loads((MODELS / "llama-3-8b" / "config.json").read_text())
    raw |= {"num_hidden_layers": 1, "draft_vocab_size": 32000}
    folder = tmp_path / "EAGLE3-x"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    words = ["--model", "llama-3-8b", "--gpu", "H100-80GB", "--speculative-config"]
    named, read = (
        figures(capsys, *words, f"{{model: {model}, num_speculative_tokens: 3}}")
        for model in ("yuhuili/EAGLE3-LLaMA3-Instruct-8B", str(folder))
    )
    assert read["parts"]["drafts"] == named["parts"]["drafts"]
    assert read["unread"] == ""
    assert "counts as the published ones" in named["unread"]
    (folder / "config.json").write_text(json.dumps(raw | {"draft_vocab_size": 16000}))
    less = figures(capsys, *words, f"{{model: {folder}, num_speculative_tokens: 3}}")
    assert named["parts"]["drafts"] - less["parts"]["drafts"] == 16000 * 4096 * 2
