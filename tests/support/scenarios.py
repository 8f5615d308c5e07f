"""What the tests of scenarios share."""

from pathlib import Path

import pytest

from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:0{k}.0000000,{100 + k},{10 + k}\n" for k in range(5)
)
SMALL = """name: small
engine: {name: textbook, max_num_seqs: 8, enable_prefix_caching: false}
cost: {kind: linear, base: 1e-2, per_token: 1e-5, per_context: 0}
workload: {num_prompts: 40, request_rate: 20, input_len: 64, output_len: 8}
goodput: {ttft: 1000}
"""
TINY = """
model: tiny-test
gpu: {name: A100-80GB}
engine: {name: textbook, max_num_seqs: 4, num_gpu_blocks_override: 200, max_model_len: 256}
cost: {kind: linear, base: 0.001, per_token: 0.0001}
workload: {num_prompts: 20, request_rate: 50, input_len: 20, output_len: 10}
"""
# A step takes 0.1 s whatever is in it, and one request has room: 1 prefill and 9 decodes are 1 s.
ONE_A_SECOND = """
model: tiny-test
gpu: {name: A100-80GB}
engine: {name: textbook, max_num_seqs: 1, num_gpu_blocks_override: 200, max_model_len: 256}
cost: {kind: linear, base: 0.1}
workload: {num_prompts: 200, request_rate: 0.2, burstiness: 1, input_len: 20, output_len: 10}
seed: 3
"""


def errors(path: Path, *args, **options) -> list[str]:
    """Load a bad scenario; return its errors without the folder."""
    with pytest.raises(HeadwayError) as caught:
        load_scenario(path, *args, **options)
    return [message.replace(f"{path.parent}/", "") for message in caught.value.messages]
