"""Leaps unrolled into single steps."""

from hypothesis import given
from hypothesis import strategies as st

from simulator.core.log import Log
from simulator.kv_cache.block_manager import BlockCounter
from simulator.results.frames import expand_steps
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload
from tests.support.engines import play
from tests.support.logs import (
    CLOCK,
    LoggedRun,
    add_step,
    loads,
    logged_runs,
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
