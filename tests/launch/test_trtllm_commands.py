"""Options of `trtllm-serve` and of its YAML: those of `TorchLlmArgs` in TensorRT-LLM's source."""

import pytest

from simulator.launch.keys import read_launch
from simulator.util.errors import HeadwayError

DEPLOYED = """
enable_attention_dp: false
enable_autotuner: true
allreduce_strategy: AUTO
attention_dp_config: {enable_balance: true, batching_wait_iters: 0}
batch_wait_timeout_ms: 0
guided_decoding_backend: xgrammar
kv_cache_config: {free_gpu_memory_fraction: 0.8, dtype: fp8, event_buffer_max_size: 1024}
moe_config: {backend: CUTLASS}
num_postprocess_workers: 4
scheduler_config: {context_chunking_policy: FIRST_COME_FIRST_SERVED}
torch_compile_config: {enable_fullgraph: true}
"""


def read(tmp_path, text, words=""):
    (tmp_path / "t.yaml").write_text(text)
    return read_launch(f"trtllm-serve m --config {tmp_path}/t.yaml {words}")


def test_a_yaml_as_deployment_guides_have_it_is_read(tmp_path):
    """Defaults and switches without effect are named once, kernels are told."""
    launch = read(tmp_path, DEPLOYED, "--tp 4 --disable_kv_cache_reuse")
    assert launch.engine == {
        "name": "tensorrt-llm",
        "tensor_parallel_size": 4,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.8,
        "kv_cache_dtype": "fp8",
    }
    assert [line.split()[0] for line in launch.told] == ["--moe-config", "--torch-compile-config"]


def test_steps_without_overlap_are_told(tmp_path):
    """They take longer: the option has an effect on time."""
    told = "--disable-overlap-scheduler is not simulated: steps take as long as with overlap"
    assert read(tmp_path, "disable_overlap_scheduler: true").told == [told]
    assert not read(tmp_path, "disable_overlap_scheduler: false").told


@pytest.mark.parametrize(
    ("text", "option", "why"),
    [
        ("enable_attention_dp: true", "enable_attention_dp", "engine.data_parallel_size"),
        ("speculative_config: {decoding_type: MTP}", "speculative_config", "vLLM's and SGLang's"),
        ("batch_wait_timeout_ms: 20", "batch_wait_timeout_ms", "a fuller batch"),
        ("lora_config: {max_loras: 4}", "lora_config", "vLLM's alone"),
        ("kv_cache_config: {use_uvm: true}", "kv_cache_config.use_uvm", "host memory"),
        (
            "kv_cache_config: {max_attention_window: [9]}",
            "kv_cache_config.max_attention_window",
            "of config",
        ),
        (
            "scheduler_config: {context_chunking_policy: EQUAL_PROGRESS}",
            "scheduler_config.context_chunking_policy",
            "first come, first served",
        ),
        ("cache_transceiver_config: {backend: UCX}", "cache_transceiver_config", "groups of a"),
    ],
)
def test_what_decides_otherwise_is_refused_by_name(tmp_path, text, option, why):
    with pytest.raises(HeadwayError, match="is not simulated") as caught:
        read(tmp_path, text)
    (line,) = str(caught.value).splitlines()
    assert f"--{option.replace('_', '-')}" in line
    assert why in line


def test_servers_of_prefill_and_decode_are_refused_by_their_option():
    with pytest.raises(HeadwayError, match=r"-c d\.yaml: is not simulated: trtllm-serve disagg"):
        read_launch("trtllm-serve disaggregated -c d.yaml")
