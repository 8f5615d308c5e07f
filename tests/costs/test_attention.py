"""Times of latent attention and of sliding windows, by hand."""

from math import isclose

import numpy as np

from simulator.core.request import Chunk, Request, Step
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.roofline import roofline
from simulator.models.gpus import find_gpu
from simulator.models.load import load_model

H100 = find_gpu("H100-80GB")
A100 = find_gpu("A100-80GB")
MISTRAL, LITE, OSS = map(load_model, ("mistral-7b-v0.1", "deepseek-v2-lite", "gpt-oss-20b"))


def test_a_decode_reads_latents_or_computes_whichever_is_longer() -> None:
    """16 heads do 2 * (576 + 512) FLOPs over 1,152 bytes: on an H100 the bytes take longer."""
    cost = roofline(LITE, H100)
    plain = roofline(load_model("llama-3-8b"), H100)
    assert isclose(cost.decode_per_context / plain.decode_per_context, 31_104 / 131_072)
    assert cost.mixed_per_context == cost.decode_per_context
    pair = 27 * 16 * 2 * (128 + 64 + 128)
    assert LITE.attention_flops_per_pair == pair
    assert isclose(cost.prefill_per_pair / plain.prefill_per_pair, pair / (4 * 32 * 32 * 128))


def test_reads_end_with_the_window() -> None:
    """2 sequences of 10 and 11 tokens, a window of 8: 21 at 0.1 and 16 at 0.5, then on."""
    cost = PiecewiseCost(
        dense=[[1, 1.0]],
        decode_per_context=0.1,
        mixed_per_context=0.2,
        prefill_per_pair=0.001,
        window=8,
        decode_per_window=0.5,
        mixed_per_window=1.0,
        prefill_per_window_pair=0.01,
    )
    step = Step([], 2, 21)
    assert isclose(cost.execute(step), 1 + 2.1 + 8)
    assert cost.leap(step, 3) == [cost.execute(Step([], 2, s)) for s in (21, 23, 25)]
    assert isclose(cost.execute(Step([], 2, 10)), 1 + 1.0 + 5)
    both = cost.decode_seconds(np.array([2, 2]), np.array([21, 10]))
    assert both.tolist() == [cost.execute(step), cost.execute(Step([], 2, 10))]
    chunk = Chunk(Request(0, 0.0, 20, 1), 4, 10)  # queries 5 to 14: 5, 6, 7 and seven of 8
    pairs, seen = 95, 5 + 6 + 7 + 7 * 8
    mixed = 1 + 0.2 * 21 + 16 + 0.001 * pairs + 0.01 * seen
    assert isclose(cost.execute(Step([chunk], 2, 21)), mixed)
    assert isclose(cost.execute(Step([], 2, 21, drafts=4)), 1 + 0.2 * 21 + 16)


def test_a_roofline_reads_the_window_alone() -> None:
    """Mistral v0.1 at 8,192 tokens takes what it takes at 4,096; v0.3 goes on."""
    old, new = roofline(MISTRAL, A100), roofline(load_model("mistral-7b-v0.3"), A100)
    short, long = Step([], 4, 4 * 4096), Step([], 4, 4 * 8192)
    assert old.execute(long) == old.execute(short)
    assert isclose(new.execute(long) - new.execute(short), 4 * 4096 * new.decode_per_context)
    assert isclose(old.decode_per_window, new.decode_per_context)
    half = roofline(OSS, H100)
    assert half.decode_per_context == half.decode_per_window > 0
