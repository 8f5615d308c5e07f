"""`headway memory` by release of vLLM, and drafts beside a scenario."""

import json
import re
from pathlib import Path

import pytest

from headway.cli.main import main
from tests.cli.test_memory import figures

MODELS = Path(__file__).parents[2] / "simulator" / "models" / "configs"


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ("--version 0.29.0", 17),
        ("--version 0.29.0 --no-enable-prefix-caching", 14),
        ("--version 0.24.0", 14),
        ("--version 0.24.0 --enable-prefix-caching", 17),
    ],
)
def test_states_are_counted_as_the_release_caches_them(
    capsys: pytest.CaptureFixture[str], options: str, needed: int
) -> None:
    """Blocks of a request of 8,192 tokens: 11, and 3 tables of states, with a prefix cache twice.

    A server of vLLM 0.29 logged 652 blocks and 38.35 such requests of this model. Its prefix cache
    is not simulated before 0.32.
    """
    shape = "--model Qwen/Qwen3.8-27B --gpu RTX-PRO-6000 --max-model-len 8192 --json"
    assert main(["memory", *shape.split(), *options.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    blocks = found["kv_cache_bytes"] // (784 * 4096 * 16)
    assert found["max_concurrency"] == round(blocks / needed, 2)


def test_windows_are_counted_where_a_run_keeps_all_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """EAGLE-3 before 0.33: the server gives back what has left a window."""
    drafts = '{"method": "eagle3", "num_speculative_tokens": 3}'
    shape = "--model gpt-oss-20b --gpu H100 --version 0.24.0 --max-model-len 65536 --json"
    most = []
    for keeps in ([], ["--set", "engine.disable_hybrid_kv_cache_manager=true"]):
        assert main(["memory", *shape.split(), "--speculative-config", drafts, *keeps]) == 0
        most.append(json.loads(capsys.readouterr().out)["max_concurrency"])
    assert most[0] > 1.5 * most[1]


def test_a_draft_is_looked_up_beside_its_scenario(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not in the current folder; its `config.json` says how it drafts."""
    for name, shape in (("small", "qwen3-0.6b"), ("layers", "deepseek-v3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((MODELS / shape / "config.json").read_bytes())
    found = {}
    for name, model, gpus in (("small", "qwen3-32b", 2), ("layers", "deepseek-v3", 8)):
        drafts = f"{{model: {name}, num_speculative_tokens: 2, acceptance: 0.6}}"
        (tmp_path / "s.yaml").write_text(
            f"model: {model}\ngpu: {{name: H200, count: {gpus}}}\ncost: {{kind: roofline}}\n"
            f"engine: {{speculative_config: {drafts}}}\n"
        )
        assert main(["memory", str(tmp_path / "s.yaml"), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        found[name] = told["parts"]["drafts"] / (1 << 30)
        assert told["unread"] == ""
    assert 0.5 < found["small"] < 0.6
    assert 1.5 < found["layers"] < 1.6  # one layer with its experts, as for method: mtp


@pytest.mark.parametrize(
    ("words", "release", "wrong"),
    [
        ("--max-model-len auto", "0.11.0", "must be a number of tokens before vLLM 0.14"),
        ("--max-model-len auto", "0.14.0", ""),
        ("-O.cudagraph_mode=NONE", "0.12.0", ""),
        ("-O.cudagraph_mode=NONE", "0.33.0", "went after 0.12: write -cc.cudagraph_mode"),
    ],
)
def test_a_command_is_read_as_its_release_does(
    capsys: pytest.CaptureFixture[str], words: str, release: str, wrong: str
) -> None:
    command = f"vllm serve Qwen/Qwen3-8B {words}"
    code = main(["memory", "--command", command, "--gpu", "H100", "--version", release])
    assert code == (2 if wrong else 0)
    assert wrong in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--model gemma-2-9b --gpu A100-80GB --dtype float16", "refuses float16 for gemma-2-9b"),
        ("--model gemma-3-27b --gpu A100-80GB --dtype float16", "refuses float16 for gemma-3-27b"),
        ("--model Qwen/Qwen3-8B-AWQ --gpu V100-32GB", "error: gpu: vLLM runs awq from compute"),
        ("--model qwen3-8b --gpu H100 --max-model-len auto --version 0.11", "before vLLM 0.14"),
    ],
)
def test_a_server_that_vllm_refuses(capsys, words: str, why: str) -> None:
    assert main(["memory", *words.split()]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        ("--model llama-3-8b --quantization bitsandbytes", 5.62),  # 5.65 logged
        ("--model TechxGenus/Meta-Llama-3-8B-Instruct-GPTQ --quantization gptq_marlin", 5.33),
        ("--model google/gemma-3-4b-it --language-model-only", 7.79),
        ("--model google/gemma-3-4b-it", 8.56),
    ],
)
def test_weights_are_loaded_as_asked(capsys, words: str, weights: float) -> None:
    """A loader of a checkpoint is no format, and 16 bits have scales of bitsandbytes' own."""
    assert main(["memory", *words.split(), "--gpu", "A100-80GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights_bytes"] / (1 << 30) == pytest.approx(
        weights, abs=0.01
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--model qwen3.5-9b --gpu H200 --version 0.9.2", "qwen3_5 came with 0.17.0"),
        ("--model gpt-oss-20b --gpu H100 --version 0.9.0", "gpt_oss came with 0.10.1"),
        ("--model gpt-oss-20b --gpu H100 --version 0.10.1", ""),
        (
            "--command draft.sh --gpu A100-80GB --gpu-memory-gib 200",
            "draft_tensor_parallel_size 1 is not simulated: drafts take memory",
        ),
    ],
)
@pytest.mark.filterwarnings("default")
def test_what_a_release_or_a_draft_lacks_is_told(capsys, tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    drafts = {"model": "llama-3.1-8b", "method": "draft_model", "num_speculative_tokens": 3}
    given = json.dumps(drafts | {"draft_tensor_parallel_size": 1})
    Path("draft.sh").write_text(
        f"vllm serve llama-3.1-70b -tp 4 --speculative-config '{given}'", encoding="utf-8"
    )
    assert main(["memory", *words.split()]) == 0
    assert told in (err := capsys.readouterr().err)
    assert told or not err


@pytest.mark.parametrize(
    ("gpu", "version", "graphs"),
    [("MI300X", "0.25.1", 0), ("MI300X", "0.26.0", 576), ("H200", "0.25.1", 576)],
)
def test_graphs_are_estimated_on_amd_since_a_release(capsys, gpu, version, graphs) -> None:
    """MiB of 32 layers: vLLM's profile left AMD's GPUs out (pull requests 48440, 48526)."""
    words = ["memory", "--model", "llama-3-8b", "--gpu", gpu, "--version", version, "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["cuda_graphs_bytes"] == graphs << 20


def test_tgi_says_blocks_in_its_own_words(capsys) -> None:
    words = ["memory", "--engine", "tgi", "--gpu", "A100-80GB", "--model"]
    assert main([*words, "llama-3-8b"]) == 0
    assert "  KV-cache blocks: 492308, size: 1\n" in capsys.readouterr().out
    assert main([*words, "llama-3-70b"]) == 1
    assert "RuntimeError: Not enough memory to handle 8192 prefill" in capsys.readouterr().out


def test_a_length_beyond_the_positions_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """As by `init` and `run`; the engine does not start unless a variable lets it."""
    variables = ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
    commands = (
        "vllm serve llama-3-8b --max-model-len 9000",
        "sglang serve --model-path llama-3-8b --context-length 9000",
    )
    for serve, variable in zip(commands, variables, strict=True):
        shape = ["memory", "--gpu", "H100-80GB", "--command"]
        assert main([*shape, serve]) == 1
        told = capsys.readouterr().err
        assert "max_model_len 9,000 is beyond the 8,192 positions" in told
        assert f"it starts with {variable}=1, or a max_model_len of 8192" in told
        assert main([*shape, f"{variable}=1 {serve}"]) == 0
        told = capsys.readouterr().err
        assert "not read" not in told
        assert "beyond the" not in told
    # vLLM V0 refused it, too (0.6.6): its JSON said that it fits.
    words = ["--engine", "vllm-v0", "--model", "llama-3-8b", "--max-model-len", "9000", "--json"]
    assert main(["memory", "--gpu", "H100-80GB", *words]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["fits"] is False
    assert f"it starts with {variables[0]}=1" in told.err


@pytest.mark.parametrize("given", [True, False])
def test_a_variable_that_a_command_sets_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: bool
) -> None:
    """By `init` and `run` neither; another value does not set it."""
    monkeypatch.chdir(tmp_path)
    variable = f"VLLM_ALLOW_LONG_MAX_MODEL_LEN={int(given)}"
    command = ["--command", f"{variable} vllm serve llama-3-8b --max-model-len 9000"]
    assert main(["init", "s.yaml", "--gpu", "H100-80GB", "--yes", *command]) == 0
    assert ("a server takes it only with VLLM_" in capsys.readouterr().err) != given
    words = ["run", "s.yaml", "--set", "workload.num_prompts=3", "--out", "o"]
    assert main([*words, *command]) == 0
    assert ("a server takes it only with VLLM_" in capsys.readouterr().err) != given


@pytest.mark.parametrize(
    ("options", "version", "why"),
    [
        ("-ep", "0.33.0", "enable_expert_parallel: it has no experts"),
        ("--long-prefill-token-threshold 8193", "0.33.0", "(8,193) cannot be greater than max_mod"),
        ("--long-prefill-token-threshold 8193", "0.31.0", ""),
        ("--long-prefill-token-threshold 8192", "0.33.0", ""),
    ],
)
def test_what_a_server_does_not_start_with_is_named(
    capsys: pytest.CaptureFixture[str], options: str, version: str, why: str
) -> None:
    command = f"docker run vllm/vllm-openai:v{version} --model llama-3-8b {options}"
    main(["memory", "--gpu", "H100-80GB", "--command", command])
    told = capsys.readouterr().err
    assert ("vLLM does not start llama-3-8b: engine." in told) == bool(why)
    assert why in told


@pytest.mark.parametrize(
    ("size", "engine", "wrong"),
    [(24, "vllm", True), (48, "vllm", False), (8, "vllm", False), (24, "textbook", False)],
)
def test_a_block_that_no_attention_backend_takes_is_named(
    capsys: pytest.CaptureFixture[str], size: int, engine: str, wrong: bool
) -> None:
    shape = f"memory --model llama-3-8b --gpu H100-80GB --block-size {size} --engine {engine}"
    assert main(shape.split()) == 0
    what = f"engine.block_size={size}: attention backends take multiples of 16\n"
    assert (f"vLLM does not start llama-3-8b: {what}" in capsys.readouterr().err) == wrong


def test_no_length_beyond_the_positions_is_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "memory --model llama-3-8b --gpu H100-80GB --max-model-len 2000000"
    assert main(shape.split()) == 1
    assert "it starts with --max-model-len 8192" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "change"),
    [
        (
            "--model Qwen/Qwen3-235B-A22B-FP8 --gpu H100 --tp 8 --version 0.31.0",
            "enable_expert_parallel=true",
        ),
        ("--model Qwen/Qwen3-32B-AWQ --gpu H100 --tp 16", "tensor_parallel_size=8"),
    ],
)
def test_blocks_that_gpus_would_share_are_told_with_a_change(
    capsys: pytest.CaptureFixture[str], options: str, change: str
) -> None:
    shape = ["memory", *options.split()]
    assert main(shape) == 2
    assert f"; it loads with engine.{change}\n" in capsys.readouterr().err
    assert main([*shape, "--set", f"engine.{change}"]) == 0


def test_bytes_of_a_cache_came_with_a_patch_release(capsys: pytest.CaptureFixture[str]) -> None:
    """By the wheels of vLLM 0.10.1 and 0.10.2."""
    command = "vllm serve llama-3-8b --kv-cache-memory-bytes 10G"
    shape = ["memory", "--gpu", "H100", "--command", command, "--set"]
    assert main([*shape, "engine.version=0.10.1"]) == 2
    assert "no such option: it came with 0.10.2" in capsys.readouterr().err
    assert main([*shape, "engine.version=0.10.2"]) == 0


@pytest.mark.parametrize(
    ("release", "options", "keeps_all"),
    [
        ("0.22.0", "--kv-transfer-config.kv_connector NixlConnector", True),
        ("0.23.0", "--kv-transfer-config.kv_connector NixlConnector", False),
        ("0.33.0", "--kv-transfer-config.kv_connector LMCacheConnectorV1", True),
        ("0.22.0", "--kv-offloading-size 8", True),
        ("0.23.0", "--kv-offloading-size 8", False),
    ],
)
def test_memory_of_the_gpu_beside_a_connector(
    capsys: pytest.CaptureFixture[str], release: str, options: str, keeps_all: bool
) -> None:
    """`VllmConfig.__post_init__`: which connectors turn the hybrid KV cache manager off."""
    image = f"docker run vllm/vllm-openai:v{release} --model openai/gpt-oss-20b"
    blocks = []
    for more in (options, "--disable-hybrid-kv-cache-manager"):
        command = ["--command", f"{image} {more}"]
        assert main(["memory", "--gpu", "H100", *command, "--json"]) == 0
        out = capsys.readouterr()
        blocks.append(json.loads(out.out)["num_gpu_blocks"])
        assert ("is not simulated: memory lacks what it takes" in out.err) == ("Conn" in more)
    assert (blocks[0] == blocks[1]) == keeps_all


def test_what_does_not_start_does_not_fit(capsys):
    """JSON said that requests beyond the model's positions fit, and had a cache below nothing."""
    words = ["memory", "--gpu", "H100-80GB", "--json", "--model", "phi-4-mini", "--max-model-len"]
    assert main([*words, "8000"]) == 0  # longer than LongRoPE's own 4,096, within its 131,072
    assert json.loads(capsys.readouterr().out)["fits"] is True
    assert main([*words, "200000"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert main(["memory", "--gpu", "L4", "--model", "llama-3-70b", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["kv_cache_bytes"] == 0


def test_drafts_take_a_part_of_each_token(capsys) -> None:
    """EAGLE's layer has a cache as one of the model's: 33 layers of 4 KiB."""
    drafts = "{method: eagle, num_speculative_tokens: 3}"
    words = ["--model", "llama-3-8b", "--gpu", "H100-80GB"]
    alone = figures(capsys, *words)["kv_bytes_per_token"]
    assert figures(capsys, *words, "--speculative-config", drafts)["kv_bytes_per_token"] == (
        alone / 32 * 33
    )


def test_prompts_beyond_a_step_are_refused_by_tensorrt_llm_alone(capsys) -> None:
    """Its server starts: the longest prompt is that of a step."""
    command = "trtllm-serve Qwen/Qwen3-8B --max_batch_size 64 --max_num_tokens 8192"
    assert main(["memory", "--command", command, "--gpu", "H100-80GB"]) == 0
    assert "[MemUsageChange]" in capsys.readouterr().out


def test_a_picture_needs_no_scenario(tmp_path: Path, capsys) -> None:
    place = tmp_path / "m.png"
    words = ["--model", "llama-3.1-70b", "--gpu", "L4", "--out", str(place)]
    assert main(["plot", "memory", *words]) == 0
    told = capsys.readouterr().out
    assert "1 x L4 does not start: No available memory" in told
    words = ["--model", "gpt-oss-120b", "--gpu", "H100-80GB", "--out", str(place)]
    assert main(["plot", "memory", *words]) == 0
    told = capsys.readouterr().out.splitlines()[0]
    assert re.search(r"\(2\.95 GiB\); it starts with engine\.max_model_len=65872 or ", told)
    assert place.stat().st_size > 10_000
    assert main(["plot", "memory"]) == 2
    assert "OUT_DIR: is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "--model gemma-4-31b --gpu H200 --max-model-len 8192",
        "--model qwen3-next-80b-a3b --gpu H200 --tp 2 --version 0.17",
        "--model qwen3-next-80b-a3b --gpu H200 --tp 2 --no-enable-prefix-caching",
        "--model gpt-oss-20b --gpu H200",
    ],
)
def test_blocks_are_those_of_the_pool(capsys, words: str) -> None:
    """As many as num_gpu_blocks_override takes: they were of a pool that the simulation has."""
    arguments = ["memory", *words.split(), "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--num-gpu-blocks-override", str(found["num_gpu_blocks"])]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["tokens"], again["max_concurrency"]) == (
        found["tokens"],
        found["max_concurrency"],
    )
