"""Drafts of vLLM's commands that start no server, as `SpeculativeConfig` of 0.32 says."""

import json

import pytest

from simulator.launch.keys import read_launch
from simulator.util.errors import HeadwayError

SERVE = "vllm serve meta-llama/Llama-3.1-8B-Instruct"
SMALL = "meta-llama/Llama-3.2-1B"


def launch(options="", version=None, **drafts):
    given = {"num_speculative_tokens": 3} | drafts
    text = json.dumps({key: value for key, value in given.items() if value is not None})
    return read_launch(f"{SERVE}{options} --speculative-config '{text}'", version)


@pytest.mark.parametrize(
    ("drafts", "what"),
    [
        ({}, "model: is missing: methods ngram and mtp alone"),
        ({"method": "eagle3"}, "model: is missing"),
        ({"method": "draft_model"}, "model: is missing"),
        ({"method": "mtp", "num_speculative_tokens": None}, "num_speculative_tokens: is missing"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            "prompt_lookup_min=4 must be <= prompt_lookup_max=2",
        ),
        (
            {"method": "ngram", "prompt_lookup_min": "2", "prompt_lookup_max": 3},
            "prompt_lookup_min='2' must be <= prompt_lookup_max=3, both whole numbers",
        ),
        (
            {"model": SMALL, "draft_tensor_parallel_size": 2},
            "parallel_size: 2 is not 1 or 4",
        ),
        (
            {"model": "Qwen/Qwen3-0.6B"},
            "151,936 tokens of its vocabulary are not the 128,256 of",
        ),
        ({"model": "z-lab/LLaMA3.1-8B-Instruct-DFlash"}, "method dflash is not simulated"),
        ({"model": "ibm-ai-platform/llama3-8b-accelerator"}, "method mlp_speculator is not sim"),
        ({"method": "ngram", "acceptance_method": "rejection_sampler"}, "is no key of it"),
        (
            {"method": "ngram", "disable_by_batch_size": 8},
            "is no key of it in 0.32.0",
        ),
    ],
)
def test_drafts_that_start_no_server_are_refused(drafts, what):
    with pytest.raises(HeadwayError) as raised:
        launch(" -tp 4", "0.32.0", **drafts)
    (line,) = raised.value.messages
    assert what in line
