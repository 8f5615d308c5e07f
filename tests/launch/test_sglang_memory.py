"""Shares of the memory that SGLang 0.5.23 gives to weights and cache where nobody asks for one.

`ServerArgs` of its wheel was resolved for GPUs that nvidia-smi lists with so many MiB; no GPU ran.
"""

import pytest

from simulator.launch.keys import LaunchCommand
from simulator.scenario.load import load_scenario

RECORDED = [
    # dense models: 8 MiB a size of the CUDA graphs of prompts, of which -1 has none
    ("qwen3-14b", "H100-80GB", "", 0.83),
    ("codellama-13b", "A100-80GB", "", 0.83),
    ("qwen3-4b", "L4", "--tp 4", 0.658),
    ("llama-3.2-3b", "L40S", "", 0.843),
    ("codellama-13b", "B200", "--tp 2", 0.853),
    ("qwen3-8b", "A10G", "", 0.684),
    ("qwen3-8b", "RTX-5090", "--tp 2", 0.773),
    ("mistral-7b-v0.3", "L4", "--disable-cuda-graph", 0.705),
    ("qwen3-14b", "H100-80GB", "--max-running-requests 64 --chunked-prefill-size -1", 0.689),
    ("llama-2-7b", "L4", "--chunked-prefill-size 8192", 0.417),  # whose graphs end at 4,096 tokens
    # latent attention: 1.5 GiB for them
    ("deepseek-v3", "H100-80GB", "", 0.816),
    ("deepseek-v3", "L40S", "--disable-cuda-graph", 0.853),
    ("kimi-k2-thinking", "B200", "--tp 2", 0.848),
    # encoders, whose hidden size Qwen2-VL's config.json gives as the language model's
    ("qwen2-vl-7b", "H200", "", 0.689),
    ("qwen2-vl-2b", "B200", "--chunked-prefill-size 2048", 0.785),
    ("qwen2.5-vl-7b", "H100-80GB", "", 0.749),
    ("qwen2.5-vl-7b", "H20", "", 0.774),
    ("llava-1.5-7b", "A100-80GB", "--tp 4", 0.784),
    ("gemma-4-e2b", "H200", "", 0.905),
    ("qwen3.5-35b-a3b", "H100-80GB", "--tp 8 --max-running-requests 64", 0.761),
    # and of which SGLang reads text alone unless --enable-multimodal asks for images
    ("gemma-3-12b", "L4", "--tp 4", 0.658),
    ("llama-4-scout", "L40S", "--tp 2", 0.84),
]


@pytest.mark.parametrize(("model", "gpu", "options", "share"), RECORDED)
def test_the_share_is_that_of_server_args(model, gpu, options, share):
    command = LaunchCommand(f"sglang serve --model-path {model} {options}")
    engine = load_scenario({"gpu": gpu}, [command], fits=False).engine
    assert engine.gpu_memory_utilization == pytest.approx(share, abs=0.0005)
