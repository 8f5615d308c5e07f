"""The power that a GPU draws: between idle and its maximum, by what it computes and reads.

A step draws idle + (max - idle) (1 - exp(-(5.6 m + 1.6 b))), where m is the share of the peak
FLOP/s and b that of the peak bandwidth that the answers need while steps run. Both numbers are
least squares over 311 readings of NVML while vLLM served dense models: 146 of ML.ENERGY's
benchmark 3.0 (Chung et al., 2025; Llama 3.1 and Qwen 3 with vLLM 0.11.1 on H100 and B200, as the
index of leadgreen.ai 2026-10 has them, CC BY 4.0) and 165 of Splitwise (Patel et al., ISCA 2024;
Llama 2 70B on A100), each GPU of the same weight.
"""

from math import exp
from typing import NamedTuple

from simulator.util.errors import MappingError

PER_FLOPS, PER_BANDWIDTH = 5.6, 1.6
IDLE_SHARE = 0.17
"""Of the maximum, with a model in memory. Splitwise's A100 read 0.17 to 0.18; an H200 0.11 with
nothing in memory, and the context of CUDA adds 26 to 50 W (The Model Parking Tax, 2026)."""
LOW, HIGH = 0.8, 1.25
"""95 of 100 readings are within these factors of what a fit to the other two GPUs says: 0.81 to
1.23. Not in them: mixtures of experts, GPUs of other makers, power caps."""


class Power(NamedTuple):
    """What one GPU draws, W."""

    idle: float
    most: float

    def busy(self, flops: float, bandwidth: float) -> float:
        """Return the W while it runs steps that need these shares of its peaks."""
        used = 1.0 - exp(-(PER_FLOPS * flops + PER_BANDWIDTH * bandwidth))
        return self.idle + (self.most - self.idle) * used


def gpu_power(idle: float | None, most: float | None, data_sheet: float | None) -> Power | None:
    """Return the power of a GPU by readings of its user's, and by its data sheet where these lack.

    All in W; None where its maximum is in neither. Raises ValueError where idle is more than it.
    """
    top = most or data_sheet
    if top is None:
        return None
    low = IDLE_SHARE * top if idle is None else idle
    if low > top:
        raise MappingError("idle", f"must be at most the maximum ({top:g} W), not {low:g}")
    return Power(low, top)
