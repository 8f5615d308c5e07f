"""All checks of what an engine on CUDA computes, those of the models' own shapes first.

`python -m gpu_backend.campaign.checks` prints a line of JSON per check; on a machine without CUDA
it wants TRITON_INTERPRET=1.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator

import torch

from gpu_backend.campaign.engine_checks import (
    NORMED,
    SMALL,
    check_graphs,
    check_logits,
    check_schedule,
    check_texts,
    reference_engine,
    triton_engine,
)
from gpu_backend.campaign.kernel_checks import (
    AttentionShape,
    Row,
    check_attention,
    check_fused,
    check_rope,
    make_row,
)
from gpu_backend.cuda import ops
from simulator.models.spec import ModelSpec

Check = tuple[int, Callable[[], Iterable[Row]]]
"""How many rows it gives, and how to make them."""


def list_checks(device: str) -> list[Check]:
    """List all checks: small on CPU; on CUDA those in the models' shapes come first."""
    small, bf16 = torch.float32, torch.bfloat16
    checks: list[Check] = []
    if torch.device(device).type == "cuda":
        shape = ModelSpec("8b_shape", 2, 4096, 32, 8, 128, 14336, 128256, rms_norm_eps=1e-5,
            max_position_embeddings=8192)  # fmt: skip
        checks += [
            (5, lambda: check_attention(device, bf16, AttentionShape(32, 8, 128))),
            (2, lambda: check_fused(device, bf16)),
            (1, lambda: [check_rope(device, bf16)]),
            (1, lambda: [check_logits(device, shape)]),
            (11, lambda: check_graphs(device, shape)),
            (
                2,
                lambda: check_schedule(
                    triton_engine(NORMED, device, small), reference_engine(NORMED, device, small)
                ),
            ),
            (5, lambda: check_attention(device, bf16, AttentionShape(32, 8, 64))),
            (5, lambda: check_attention(device, bf16, AttentionShape(16, 8, 128))),
        ]
    return [
        *checks,
        (1, lambda: [check_texts(device, SMALL)]),
        (1, lambda: [check_texts(device, NORMED)]),
        (5, lambda: check_attention(device, small, AttentionShape(4, 2, 64))),
        (2, lambda: check_fused(device, small)),
        (1, lambda: [check_rope(device, small)]),
    ]


def run_checks(device: str) -> Iterator[Row]:
    """Run all checks, after a row that says how many rows they are.

    A check that raises becomes a row that says so, and the next one begins.
    """
    torch.manual_seed(0)
    checks = list_checks(device)
    yield {"planned": sum(count for count, _ in checks)}
    for number, (_, check) in enumerate(checks):
        try:
            yield from check()
        except Exception as error:  # whatever it is, the other checks go on
            yield make_row(f"group {number}: {error!r:.200}", math.nan, 0.0)


def main() -> int:
    """Print every check as a line of JSON; the exit code is 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    if device == "cpu":
        ops.MIN_PROGRAMS = 8  # the interpreter runs them one after the other
    wrong = 0
    for row in run_checks(device):
        wrong += not row.get("ok", True)
        print(json.dumps(row), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
