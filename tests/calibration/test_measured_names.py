"""Names in measured runs: GPUs, models and types as people write them."""

import pytest

from calibration.measured import engine as aliases
from calibration.measured.predict import assemble_run, predict
from simulator.core.request import Chunk, Request, Step
from simulator.util.errors import HeadwayWarning
from tests.support.measured_runs import run_of


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("H100-80GB-HBM3 (SXM)", "H100-80GB"),
        ("RTX PRO 6000 Blackwell SE 96GB", "RTX-PRO-6000"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("b200_sxm", "B200"),
        ("B200 (inferred: 178 GiB usable)", "B200"),
        ("A100-SXM4-80GB", "A100-80GB"),
        ("L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("A100-PCIE-40GB", "A100-40GB-PCIe"),
        ("GB200", "GB200"),
        ("8x H200", "H200"),
        ("NVIDIA L40", "L40"),
    ],
)
def test_gpu_names(given, known):
    assert aliases.gpu_name(given) == known


@pytest.mark.parametrize("name", ["NVIDIA Titan V", "AMD Instinct MI100", "B100", "A2", "P4"])
def test_a_gpu_that_is_not_in_the_table_is_none(name):
    with pytest.raises(ValueError, match="there are A100-40GB"):
        aliases.gpu_name(name)


def test_what_stands_in_for_another_is_told():
    """Clouds and AIConfigurator call the A100 with 80 GB by its chip alone."""
    for name, known in (("A800", "A100-80GB"), ("a100_sxm", "A100-80GB")):
        with pytest.warns(HeadwayWarning, match=f"'{name}' is taken as {known}"):
            assert aliases.gpu_name(name) == known


@pytest.mark.parametrize(
    ("dtype", "model", "known"),
    [
        ("bf16", "Qwen/Qwen3-8B", None),
        ("", "RedHatAI/Qwen3-32B-FP8-dynamic", "fp8"),
        ("auto", "Qwen/QwQ-32B-AWQ", "int4"),
        ("compressed-tensors", "x/Llama-3.1-8B-quantized.w8a8", "int8"),
        ("FP8 (e4m3)", "x", "fp8"),
        ("mxfp4", "openai/gpt-oss-20b", "mxfp4"),
    ],
)
def test_dtypes(dtype, model, known):
    assert aliases.quantization(dtype, model) == known


def test_a_quantized_model_in_16_bits_is_told():
    with pytest.warns(HeadwayWarning, match="taken as that of activations"):
        assert aliases.quantization("bfloat16", "RedHatAI/Qwen3-32B-FP8-dynamic") == "fp8"
    for dtype in ("fp32", "bitsandbytes"):
        with pytest.raises(ValueError, match=r"weight_dtype: .* is none of bf16"):
            aliases.quantization(dtype, "Qwen/Qwen3-8B")
    with pytest.raises(ValueError, match="kv_dtype: 'int8' is none of"):
        aliases.kv_dtype("int8")


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct-FP8", "llama-3.1-70b"),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", "llama-3.3-70b"),
        ("codellama/CodeLlama-34b-Instruct-hf", "codellama-34b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("RedHatAI/Qwen3-32B-FP8-dynamic", "qwen3-32b"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo"),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b"),
        ("01-ai/Yi-34B", "yi-34b"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b-v0.3"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama-3.1-8b"),
        ("Llama-3_1-8B", "llama-3.1-8b"),
        ("llama2-70b", "llama-2-70b"),
        ("lmsys/vicuna-13b-v1.5", "llama-2-13b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "qwen2.5-32b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama-3.3-70b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/QwQ-32B-AWQ", "qwen2.5-32b"),
        ("NousResearch/Nous-Hermes-2-Mixtral-8x7B-DPO", "mixtral-8x7b"),
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", "llama-3.1-405b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("QWEN3_32B", "qwen3-32b"),
        ("codellama/CodeLlama-7b-hf", "codellama-7b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("nvidia/DeepSeek-R1-0528-FP4", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "qwen3-8b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama-3.1-8b"),
        ("deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct", "deepseek-v2-lite"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "qwen3-coder-480b-a35b"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507", "qwen3-235b-a22b"),
        ("google/gemma-2-2b-it", "gemma-2-2b"),
        ("google/gemma-2-27b-it", "gemma-2-27b"),
        ("google/gemma-3-12b-it", "gemma-3-12b"),
        ("google/gemma-3-1b-pt", "gemma-3-1b"),
        ("THUDM/GLM-4-9B-0414", "glm-4-9b"),
        ("zai-org/GLM-4.5-Air-FP8", "glm-4.5-air"),
        ("zai-org/GLM-4.6", "glm-4.5"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini-4k"),
        ("microsoft/Phi-3.5-mini-instruct", "phi-3-mini-128k"),
        ("microsoft/Phi-4-mini-instruct", "phi-4-mini"),
        ("microsoft/Phi-4-reasoning-plus", "phi-4"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "llama-3.1-8b"),
        ("NousResearch/Hermes-4-14B", "qwen3-14b"),
        ("allenai/Llama-3.1-Tulu-3-70B", "llama-3.1-70b"),
        ("HuggingFaceH4/zephyr-7b-beta", "mistral-7b-v0.1"),
    ],
)
def test_model_names(given, known):
    assert aliases.model_name(given) == known


@pytest.mark.parametrize(
    "name",
    [
        "microsoft/Phi-4-multimodal-instruct",
        "microsoft/Phi-4-mini-flash-reasoning",
        "microsoft/Phi-3-vision-128k-instruct",
        "deepseek-ai/DeepSeek-V4",
        "deepseek-ai/DeepSeek-R1-Distill-Other-9B",
        "THUDM/glm-4-9b-chat-1m",
        "zai-org/GLM-4.5V",
        "google/gemma-3n-E4B-it",
        "google/gemma-3-270m",
        "Qwen/Qwen3-VL-7B",
        "acme/Secret-9B",
    ],
)
def test_another_model_of_a_similar_name_is_none(name):
    with pytest.raises(ValueError, match="no shipped model has the shape of"):
        aliases.model_name(name)


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        ({"notes": "greedy; VLLM_MXFP4_USE_MARLIN=1"}, "marlin"),
        ({"command": "vllm serve openai/gpt-oss-120b --moe-backend triton"}, "triton"),
        ({"notes": "VLLM_MXFP4_USE_MARLIN=0"}, ""),
        ({"notes": "AWQ by Marlin"}, ""),
    ],
)
def test_kernels_of_experts(words, kernel):
    assert aliases.expert_kernel(run_of(**words)) == kernel


def test_a_run_with_marlins_kernel_is_priced_with_it():
    """A prompt of 4,096 tokens takes gpt-oss twice as long as with Triton's."""
    step = Step([Chunk(Request(0, 0.0, 4096, 1), 0, 4096)])
    words = {"gpu": "H200", "model": "openai/gpt-oss-120b", "engine_version": "0.22"}
    usual, marlin = (
        assemble_run(run_of(**words, **more))[1].cost.execute(step).seconds
        for more in ({}, {"notes": "VLLM_MXFP4_USE_MARLIN=1"})
    )
    assert 1.4 < marlin / usual < 2.2


@pytest.mark.medium
def test_experts_of_a_measured_run_are_as_unsure_as_their_tables(tmp_path):
    """A first token by the kernel that takes longest is in the interval until one is named."""
    load = {"rate_rps": "1", "n_requests": "8", "mean_input_tokens": "4000"}
    load["mean_output_tokens"] = "9"
    words = {"gpu": "H200", "model": "openai/gpt-oss-120b", "engine_version": "0.22", **load}
    usual, marlin = (
        next(one for one in outcome.sensitivity if one.metric == "mean_ttft_ms")
        for more in ({}, {"notes": "VLLM_MXFP4_USE_MARLIN=1"})
        for outcome in [predict(run_of(**words, **more), tmp_path, sensitivity=True)]
    )
    assert usual.interval[0] < usual.value < marlin.value < usual.interval[1]
    assert next(iter(usual.shares)) == "experts"
