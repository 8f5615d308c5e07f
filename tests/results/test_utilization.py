"""MFU, bandwidth and seats: utilization against sums worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from simulator.core.log import Log
from simulator.kv_cache.block_manager import BlockCounter
from simulator.results.engine_metrics import Values, ended_requests
from simulator.schedulers.static import Static
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.support.engines import fcfs, made, play, workload
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


def serve(scheduler: Scheduler, *lengths: int, leap: bool = True) -> tuple[Values, Log]:
    """Serve answers of so many tokens, a second a step; give what the summary says, and the log."""
    load = workload(*((0.0, 1, length) for length in lengths))
    log, client = play(load, scheduler, leap=leap)
    return summarize(load, np.array(client.sent), [log])["headway"], log


def static(count: int, tokens: int, **options: int) -> Static:
    """Static batches of `count`, with room for answers of so many tokens."""
    return made(Static, BlockCounter(10 + count * tokens, 1), **{"max_num_seqs": count, **options})


@pytest.mark.parametrize("leap", [True, False])
def test_seats_of_1000_200_and_400_tokens(leap: bool) -> None:
    """One step of prompts, 999 of decodes: 999 + 199 + 399 of 2,997 seats decode, 1,400 do not.

    In the tail, from 400 s on, one of three does.
    """
    found, log = serve(static(3, 1001), 1000, 200, 400, leap=leap)
    assert found["decode_seat_utilization"] == pytest.approx(1597 / 2997)
    assert found["batch_occupancy"] == pytest.approx(1600 / 3000)
    assert found["wasted_seat_steps"] == 1400
    assert found["wasted_seat_share"] == pytest.approx(1400 / 2997)
    rows = log.steps
    tail = rows[rows["start"] >= 400]
    live = tail["running"] - ended_requests(log, tail)
    assert (live * tail["steps"]).sum() / (3 * tail["steps"].sum()) == pytest.approx(1 / 3)


def test_a_seat_that_nobody_takes_is_not_used_and_not_wasted() -> None:
    """Two requests of 3 tokens, four seats: half of them, in either kind of batch."""
    for engine in (static(4, 9), fcfs(max_num_seqs=4)):
        found, _ = serve(engine, 3, 3)
        assert found["decode_seat_utilization"] == found["batch_occupancy"] == 0.5
        assert found["wasted_seat_steps"] == 0


def test_the_seats_of_a_smaller_batch_are_its_own() -> None:
    """Two of 64 at a time: both are used."""
    found, _ = serve(static(64, 9, batch_size=2), 3, 3)
    assert found["decode_seat_utilization"] == 1.0


def test_exponential_answers_leave_1_less_1_by_h8_of_eight_seats_idle() -> None:
    """The longest of 8 has H8 = 2.718 times the mean: 63.2 % of the seat-steps are of the ended."""
    lengths = 1 + np.ceil(np.random.default_rng(0).exponential(300.0, 8 * 500)).astype(int)
    found, _ = serve(static(8, int(lengths.max()) + 1), *lengths.tolist())
    decodes = (lengths - 1).reshape(-1, 8)  # the step of the prompts brings out the first token
    exact = 1 - decodes.sum() / (8 * decodes.max(axis=1).sum())
    assert found["wasted_seat_share"] == pytest.approx(exact)
    assert found["decode_seat_utilization"] == pytest.approx(1 - exact)
    harmonic = sum(1 / k for k in range(1, 9))
    assert exact == pytest.approx(1 - 1 / harmonic, abs=0.01)


def test_drafts_that_are_rejected_waste_no_seat() -> None:
    """They are wasted tokens of requests that go on."""
    log = Log(10, 4, num_seats=4)
    add_step(log, 0.0, 1.0, decodes=3, wasted=5, running=2)
    found = summarize(make_workload([]), np.zeros(0), [log])["headway"]
    assert found["wasted_seat_steps"] == 0
    assert found["decode_seat_utilization"] == 0.5
