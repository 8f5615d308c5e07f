"""Leaps unrolled into single steps, and requests in order of id."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.log import Log
from simulator.kv_cache.block_manager import BlockCounter
from simulator.results.tables import expand_steps, gather_requests
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload
from tests.support.engines import play
from tests.support.logs import (
    CLOCK,
    LoggedRun,
    ObservedRequest,
    add_request,
    add_step,
    loads,
    logged_runs,
    make_workload,
)


@given(logged_runs(max_replicas=1))
def test_expanded_steps(story: LoggedRun) -> None:
    """Unrolled leaps give start, duration and sums of every single step."""
    steps = story.steps[0]
    columns = expand_steps(story.logs[0])
    assert columns["start"].tolist() == [s["start"] for s in steps]
    assert columns["duration"].tolist() == [s["end"] - s["start"] for s in steps]
    assert columns["context"].tolist() == [s["context"] for s in steps]
    assert columns["preempted"].tolist() == [s["preempted"] for s in steps]
    assert columns["kv_blocks_used"].tolist() == [int(s["blocks_used"]) for s in steps]


@given(loads, st.integers(1, 5), st.sampled_from([Scheduler, AsyncScheduler]))
def test_leaps_expand_to_the_steps_of_a_stepwise_run(
    load: Workload, seats: int, kind: type[Scheduler]
) -> None:
    """Waiting, context and times of every single step, whether it was leapt over or not."""
    options = {"max_num_seqs": seats, "max_num_batched_tokens": 32}
    leapt, _ = play(load, kind(BlockCounter(1000, 4), **options), CLOCK)
    stepwise, _ = play(load, kind(BlockCounter(1000, 4), **options), CLOCK, leap=False)
    one, other = expand_steps(leapt), expand_steps(stepwise)
    for name in ("start", "duration", "running", "waiting", "decode_tokens", "context"):
        assert one[name].tolist() == other[name].tolist(), name


def test_reserved_blocks_do_not_grow() -> None:
    """Paged blocks grow evenly through a leap, never beyond the cache; contiguous ones stay."""
    log = Log(num_blocks=6, block_size=2)
    add_step(log, 0.0, 4.0, steps=4, decodes=2, blocks_used=4)
    log.tick_ends.extend([1.0, 2.0, 3.0, 4.0])
    assert expand_steps(log)["kv_blocks_used"].tolist() == [4, 5, 6, 6]
    columns = expand_steps(log, contiguous=True)
    assert columns["kv_blocks_used"].tolist() == [4, 4, 4, 4]
    assert columns["kv_blocks_free"].tolist() == [2, 2, 2, 2]


def test_arrival_of_session_turns() -> None:
    """A later turn is due its delay after the end of the one before, or after its rejection."""
    seen = [
        ObservedRequest(1.0, 1.0, [2.0, 3.0]),
        ObservedRequest(4.5),
        ObservedRequest(1.0, reason="rejected"),
        ObservedRequest(6.0),
    ]
    log = Log(10, 4)
    for number, request in enumerate(seen):
        if request.reason != "rejected":
            request.scheduled, request.tokens = request.sent, request.tokens or [9.0]
        add_request(log, number, request)
    load = make_workload(
        seen,
        after=np.array([-1, 0, -1, 2]),
        delay=np.array([0.0, 0.5, 0.0, 0.5]),
        max_concurrency=2,
    )
    load.arrival[[1, 3]] = np.nan
    table = gather_requests(load, np.array([r.sent for r in seen]), [log])
    assert table.arrival.tolist() == [1.0, 3.5, 1.0, 1.5]
    assert table.client_queue_time.tolist() == [0.0, 1.0, 0.0, 4.5]
