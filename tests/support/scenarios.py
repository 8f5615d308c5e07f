"""What the tests of scenarios share."""

from pathlib import Path

import pytest

from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:0{k}.0000000,{100 + k},{10 + k}\n" for k in range(5)
)
SMALL = """name: small
engine: {max_num_seqs: 8, enable_prefix_caching: false}
cost: {kind: linear, base: 1e-2, per_token: 1e-5, per_context: 0}
workload: {num_prompts: 40, request_rate: 20, input_len: 64, output_len: 8}
goodput: {ttft: 1000}
"""


def errors(path: Path, *args, **options) -> list[str]:
    """Load a bad scenario; return its errors without the folder."""
    with pytest.raises(HeadwayError) as caught:
        load_scenario(path, *args, **options)
    return [message.replace(f"{path.parent}/", "") for message in caught.value.messages]
