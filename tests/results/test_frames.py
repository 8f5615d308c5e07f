"""Leaps unrolled into single steps."""

from hypothesis import given
from hypothesis import strategies as st

from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload
from tests.support.engines import made, play
from tests.support.logs import CLOCK, LoggedRun, loads, logged_runs
from tests.support.single_steps import expand_steps


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
    leapt, _ = play(load, made(kind, BlockCounter(1000, 4), **options), CLOCK)
    stepwise, _ = play(load, made(kind, BlockCounter(1000, 4), **options), CLOCK, leap=False)
    one, other = expand_steps(leapt), expand_steps(stepwise)
    times, gauges = ("start", "duration"), ("running", "waiting", "kv_blocks_used")
    for name in (*times, *gauges, "decode_tokens", "context"):
        assert one[name].tolist() == other[name].tolist(), name
