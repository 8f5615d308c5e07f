"""Keys that a launch command lays over the model's config.json, and the dtype of its states."""

import json

import pytest

from headway.report.vllm_serve import serve_command
from simulator.build.kv_room import engine_sizes, memory_budget
from simulator.build.settle import resolve_model
from simulator.launch.keys import LaunchCommand, read_launch
from simulator.models.gpus import GIB, find_gpu
from simulator.models.load import load_model
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError

SERVE = "vllm serve Qwen/Qwen3-8B"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {"rope_scaling": YARN, "max_position_embeddings": 131_072}
ASKED = f"--hf-overrides '{json.dumps(LONG)}'"
DOTTED = "--hf-overrides.max_position_embeddings 131072"
ROPE = f"--rope-scaling '{json.dumps(YARN)}' --rope-theta 1e6"
LINEAR = '{"rope_scaling": {"rope_type": "linear", "factor": 2.0}}'


def of_command(command, version=None):
    base = {"gpu": "H100-80GB", "cost": {"kind": "roofline"}}
    base |= {"engine": {"version": version}} if version else {}
    return load_scenario(base, [LaunchCommand(command)], fits=False)


@pytest.mark.parametrize(
    ("options", "longest", "layers"),
    [
        ("", 40_960, 36),
        (ASKED, 131_072, 36),
        (ASKED.replace("rope_scaling", "rope_parameters"), 131_072, 36),
        (DOTTED, 131_072, 36),
        (f"--hf-overrides '{LINEAR}'", 81_920, 36),
        ("--hf-overrides '{\"num_hidden_layers\": 4}'", 40_960, 4),
    ],
)
def test_keys_are_laid_over_a_config(options, longest, layers):
    """As vLLM 0.32's own ModelConfig has it, max_model_len and layers."""
    scenario = of_command(f"{SERVE} {options}")
    model = resolve_model(scenario)
    assert engine_sizes(scenario.engine, model).positions == longest
    assert model.num_hidden_layers == layers


def test_yarn_of_old_releases_stretches_the_original_length():
    """In 0.32 YaRN does not change max_model_len, max_position_embeddings does."""
    launch = read_launch(f"{SERVE} {ROPE} {DOTTED}", "0.10.0")
    assert launch.engine["hf_overrides"] == LONG | {"rope_theta": 1e6}
    yarn = f"--hf-overrides '{json.dumps({'rope_scaling': YARN})}'"
    assert resolve_model(of_command(f"{SERVE} {yarn}")).longest((0, 29, 0)) == 131_072
    assert resolve_model(of_command(f"{SERVE} {yarn}")).longest((0, 32, 0)) == 40_960


def test_a_model_keeps_what_its_name_says_under_other_keys():
    """A name's precision and longest request are no part of the shipped config.json."""
    name = "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8"
    own = resolve_model(of_command(f"vllm serve {name}"))
    model = resolve_model(of_command(f"vllm serve {name} --hf-overrides.num_hidden_layers 24"))
    assert model.quantization == own.quantization == "fp8"
    assert model.max_position_embeddings == own.max_position_embeddings == 262_144
    short = of_command(f"vllm serve {name} --hf-overrides.max_position_embeddings 40960")
    assert resolve_model(short).max_position_embeddings == 40_960


def test_keys_in_a_block_change_it_alone():
    """As ModelConfig._apply_dict_overrides."""
    own = load_model("gemma-3-27b")
    asked = "--hf-overrides.text_config.max_position_embeddings 4096"
    model = resolve_model(of_command(f"vllm serve google/gemma-3-27b-it {asked}"))
    assert model.max_position_embeddings == 4096
    assert model.hidden_size == own.hidden_size
    assert model.vision == own.vision


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ('{"architectures": ["LlamaForCausalLM"]}', "architectures: is not simulated"),
        ('{"model_type": "llama"}', "model_type: is not simulated"),
        ('{"rope_scaling": 5}', "engine.hf_overrides: rope_scaling: must be a mapping, not 5"),
        ("5", "engine.hf_overrides: must be a mapping"),
        ('{"num_attention_heads": 7}', "engine.hf_overrides: num_key_value_heads: must divide"),
    ],
)
def test_wrong_keys_over_a_config_are_named(asked, why):
    with pytest.raises(HeadwayError, match=why):
        of_command(f"{SERVE} --hf-overrides '{asked}'")


def test_a_key_of_what_is_no_mapping_is_refused():
    command = "vllm serve meta-llama/Llama-3.1-8B-Instruct --hf-overrides [1] --rope-theta 5"
    with pytest.raises(HeadwayError, match="--rope-theta 5: is a key of what is no mapping"):
        read_launch(command, "0.10.0")


def test_replicas_of_sglang_leave_a_wrong_cluster_to_its_check():
    command = LaunchCommand("sglang serve --model-path llama-3.1-8b --dp 2")
    with pytest.raises(HeadwayError, match="cluster: must be a mapping of keys"):
        load_scenario({"gpu": "H100", "cluster": [1]}, [command])


def test_sglang_lays_keys_over_a_config():
    command = "sglang serve --model-path Qwen/Qwen3-8B --json-model-override-args"
    scenario = of_command(f"{command} '{json.dumps(LONG)}'")
    assert engine_sizes(scenario.engine, resolve_model(scenario)).positions == 131_072


def test_a_command_comes_back_with_keys_over_a_config():
    options = f"{ASKED} --mamba-ssm-cache-dtype float16"
    again = read_launch(serve_command(of_command(f"{SERVE} {options}")))
    assert again.engine["hf_overrides"] == LONG
    assert again.engine["mamba_ssm_cache_dtype"] == "float16"


@pytest.mark.parametrize(("dtype", "width"), [("auto", 4), ("float32", 4), ("float16", 2)])
def test_states_are_in_the_dtype_asked_for(dtype, width):
    """Nemotron-H's matrices of 64 heads of 64 x 128; the convolution's inputs are in 16 bits."""
    name = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    model = resolve_model(of_command(f"vllm serve {name} --mamba-ssm-cache-dtype {dtype}"))
    assert model.linear.state_bytes(2) == 3 * 6144 * 2 + 64 * 64 * 128 * width


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_a_cache_are_counted_in_blocks_of_the_states_asked_for(dtype):
    name = "nvidia/NVIDIA-Nemotron-Nano-9B-v2"
    options = f"--kv-cache-memory-bytes 20G --mamba-ssm-cache-dtype {dtype}"
    own = of_command(f"vllm serve {name} {options}")
    layout = memory_budget(own.engine, resolve_model(own), find_gpu("H100")).layout
    blocks = own.engine.num_gpu_blocks_override
    assert 0 <= 20 * GIB - blocks * layout.block_bytes < layout.block_bytes
