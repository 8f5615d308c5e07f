"""A cost model whose terms are easy to add up by hand, and steps for it."""

from simulator.core.request import Chunk, Request, Step
from simulator.costs.piecewise import PiecewiseCost

SOMEBODY = Request(0, 0.0, 100, 10)
HAND = PiecewiseCost(
    dense=[[1, 10.0], [11, 20.0], [21, 40.0]],
    overhead=1.0,
    head=3.0,
    head_per_sequence=1.0,
    decode=100.0,
    decode_per_context=0.5,
    decode_per_sequence=2.0,
    prefill=200.0,
    prefill_per_pair=0.25,
    prefill_per_token=4.0,
    mixed_per_context=1.5,
    mixed_per_sequence=5.0,
    serial_per_token=16.0,
)


def mixed(*chunks: tuple[int, int], decodes: int = 0, context: int = 0) -> Step:
    """Make a step of (start, tokens) chunks and some decodes."""
    return Step([Chunk(SOMEBODY, *chunk) for chunk in chunks], decodes, context)
