"""MFU and bandwidth utilization against sums worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from simulator.core.log import Log
from tests.support.logs import (
    TINY,
    ObservedRequest,
    add_request,
    add_step,
    make_workload,
    summarize,
)

LAYER = 8 * (2 * 8 + 2 * 4) + 3 * 8 * 16  # weights: query, output, key, value; gated MLP


def test_mfu_counts_what_the_answer_needs() -> None:
    """Prompt 5, of which 2 cached, and 3 tokens: tokens 3 to 7 of 8 pass, each sees 3 to 7."""
    log = Log(10, 4)
    add_step(log, 0.0, 2.0, prefill_tokens=3, wasted=50)
    add_request(log, 0, ObservedRequest(0.0, 0.0, [1.0, 1.5, 2.0], prompt=5, cached=2))
    load = make_workload([ObservedRequest(0.0, tokens=[0.0] * 3)])
    summary = summarize(load, np.zeros(1), [log])
    through, out, pairs = 5, 3, 3 + 4 + 5 + 6 + 7
    flops = 2 * through * 2 * LAYER + 2 * out * 800 + pairs * 4 * 2 * 4 * 2
    assert summary["headway"]["mfu"] == pytest.approx(flops / (312e12 * 2.0))
    assert summary["model_id"] == "tiny"


def test_bandwidth_counts_weights_and_context() -> None:
    """Each step reads all weights but the embedding; each decode its context, growing by leaps."""
    log = Log(10, 4)
    add_step(log, 0.0, 1.0, prefill_tokens=4)
    add_step(log, 1.0, 4.0, steps=3, decodes=2, wasted=1, context=10)
    log.tick_ends.extend([2.0, 3.0, 4.0])
    log.leap_blocks.extend([0, 0])
    add_request(log, 0, ObservedRequest(0.0, 0.0, [1.0, 2.0, 3.0, 4.0]))
    load = make_workload([ObservedRequest(0.0, tokens=[0.0] * 4)])
    summary = summarize(load, np.zeros(1), [log], tensor_parallel_size=2, kv_cache_dtype="fp8")
    weights = 2 * (2 * LAYER + 800) * 4
    kv = (2 * 2 * 2 * 2) * (10 + 13 + 16)
    expected = (weights + kv) / (2 * 2.039e12 * 4.0)
    assert summary["headway"]["bandwidth_utilization"] == pytest.approx(expected)


def test_bandwidth_of_experts() -> None:
    """A step reads the experts that its tokens meet: 2 of 4 for one token, 3 for two."""
    log = Log(10, 4)
    add_step(log, 0.0, 1.0, decodes=1)
    add_step(log, 1.0, 2.0, decodes=1, wasted=1)
    add_request(log, 0, ObservedRequest(0.0, 0.0, [1.0, 2.0]))
    load = make_workload([ObservedRequest(0.0, tokens=[0.0] * 2)])
    model = replace(TINY, num_experts=4, num_experts_per_tok=2)
    summary = summarize(load, np.zeros(1), [log], model=model)
    attention, expert, router = 8 * 24, 3 * 8 * 16, 8 * 4
    met = [2 * (attention + router + expert * n) + 800 for n in (2, 3)]
    expected = 2 * sum(met) / (2.039e12 * 2.0)
    assert summary["headway"]["bandwidth_utilization"] == pytest.approx(expected)
