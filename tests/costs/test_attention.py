"""Times of latent attention and of sliding windows, by hand."""

from math import isclose

from simulator.core.request import Step
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


def test_a_roofline_reads_the_window_alone() -> None:
    """Mistral v0.1 at 8,192 tokens takes what it takes at 4,096; v0.3 goes on."""
    old, new = roofline(MISTRAL, A100), roofline(load_model("mistral-7b-v0.3"), A100)
    short, long = Step([], 4, 4 * 4096), Step([], 4, 4 * 8192)
    assert old.execute(long).seconds == old.execute(short).seconds
    assert isclose(
        new.execute(long).seconds - new.execute(short).seconds, 4 * 4096 * new.decode_per_context
    )
    assert isclose(old.decode_per_window, new.decode_per_context)
    half = roofline(OSS, H100)
    assert half.decode_per_context == half.decode_per_window > 0
