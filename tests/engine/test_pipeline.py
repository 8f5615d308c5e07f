"""Pipeline stages, their batches worked out by hand; and one stage, which must be as none."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.alarm import FastEnvironment
from simulator.core.executor import Timing
from simulator.core.log import Log
from simulator.core.request import Request, Step
from simulator.engine.client import Client
from simulator.engine.replica import make_replica
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.kv_cache.unshared_prefix_cache import UnsharedPrefixCache
from simulator.policies.orders import Priority
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.pipeline import PipelineScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.engine.test_laws import clocks, workloads
from tests.support.engines import Clock, Stages, made, play, workload


def stages(count=2, ahead=False, num_blocks=1000, block_size=4, **options):
    """An engine of so many stages, without a prefix cache; a step holds 4 tokens."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 4, **options}
    blocks = BlockCounter(num_blocks, block_size)
    return made(
        PipelineScheduler, blocks, pipeline_parallel_size=count, async_scheduling=ahead, **options
    )


def token_times(log: Log) -> dict[int, list[float]]:
    """When each request's tokens came out."""
    found = defaultdict(list)
    for run in log.runs:
        first, ticks = int(run["first_tick"]), int(run["ticks"])
        found[int(run["id"])] += [float(run["start"]), *log.tick_ends[first : first + ticks]]
    return dict(found)


def test_a_scheduler_that_does_nothing_though_somebody_waits_is_an_error():
    """Rather than a loop without an end."""

    class Lazy(PipelineScheduler):
        def schedule(self, now):
            return Step([])

    lazy = made(Lazy, BlockCounter(9, 4), pipeline_parallel_size=2, async_scheduling=False)
    with pytest.raises(RuntimeError, match="does nothing though requests wait"):
        play(workload((0.5, 4, 1)), lazy, Stages(Clock(1.0), (1.0, 1.0)))


def test_a_first_token_may_come_at_the_very_start() -> None:
    """A prompt takes no time, a decode 1 s: the second token does not count as the first."""

    class Decodes(Clock):
        def execute(self, step):
            return Timing(float(step.decodes))

    log, _ = play(workload((0, 4, 3)), stages(1), Stages(Decodes()))
    assert (log.requests[0]["first_token"], log.requests[0]["finish"]) == (0.0, 2.0)


def rows(log: Log) -> list[tuple[float, float]]:
    """Begin and end of each row."""
    return [(row["start"], row["end"]) for row in log.steps]


def test_two_equal_stages_give_a_token_a_second_of_requests_that_take_two():
    """Two prompts of 4 tokens, one to a batch; each stage takes a second.

    The first is in stage 1 from 0 to 1 and in stage 2 to 2, the second a second later. At 2 the
    first token is out and its request goes again, as stage 1 is done with the other prompt.
    """
    load = workload((0, 4, 3), (0, 4, 3))
    log, _ = play(load, stages(), Stages(Clock(1.0), (1.0, 1.0)))
    assert token_times(log) == {0: [2, 4, 6], 1: [3, 5, 7]}
    assert rows(log) == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
    assert list(log.decided) == [0, 0, 2, 3, 4, 5]


def test_the_slowest_stage_sets_the_pace_and_all_together_the_latency():
    """Stages of 1 and 2 s, half a second between them, and 0.25 s of the host.

    Prompt 0: host to 0.25, stage 1 to 1.25, sent to 1.75, stage 2 to 3.75. Prompt 1: stage 1 from
    1.25 to 2.25, there at 2.75, but stage 2 is free at 3.75 only: out at 5.75. From then on a batch
    is out every 2 s or, if later, 3.75 s after it was decided.
    """
    load = workload((0, 4, 2), (0, 4, 2))
    log, _ = play(load, stages(), Stages(Clock(1.0), (1.0, 2.0), host=0.25, send=0.5))
    assert token_times(log) == {0: [3.75, 7.75], 1: [5.75, 9.75]}
    assert list(log.decided) == [0, 0, 3.75, 5.75]


def test_four_stages_hold_four_batches():
    """Five prompts of 5 tokens, 5 to a step: four are sent at once, the last finds a batch at 4.

    There the first request decodes, which leaves it 4 tokens; its last one goes with the second's.
    """
    load = workload(*[(0, 5, 2)] * 5)
    options = {"max_num_seqs": 5, "max_num_batched_tokens": 5}
    log, _ = play(load, stages(4, **options), Stages(Clock(1.0), (1.0,) * 4))
    assert log.decided[:6].tolist() == [0, 0, 0, 0, 4, 5]
    assert log.steps["prefill_tokens"].tolist() == [5, 5, 5, 5, 4, 1, 0, 0, 0]
    times = token_times(log)
    assert [times[k] for k in range(4)] == [[4, 8], [5, 9], [6, 10], [7, 11]]
    assert times[4][0] == 9


def test_chunks_of_a_prompt_follow_one_another_from_batch_to_batch():
    """12 tokens in three batches: the last chunk leaves the second stage after 2 + 1 + 1 s."""
    log, _ = play(workload((0, 12, 1)), stages(3), Stages(Clock(1.0), (1.0, 1.0)))
    assert token_times(log) == {0: [4]}
    assert rows(log) == [(0, 2), (2, 3), (3, 4)]
    log, _ = play(workload((0, 12, 1)), stages(2), Stages(Clock(1.0), (1.0, 1.0)))
    assert token_times(log) == {0: [4]}  # the third is decided at 2, as the first stage is free


def test_alone_a_request_waits_for_its_token_and_the_engine_sleeps_a_millisecond():
    """`step_with_batch_queue` schedules nothing beside it, and so sleeps when it is out."""
    log, _ = play(workload((0, 4, 3)), stages(), Stages(Clock(1.0), (1.0, 1.0)))
    assert token_times(log)[0] == pytest.approx([2, 4.001, 6.002])


def test_asynchronously_it_is_scheduled_ahead_and_does_not_wait():
    """The call of `pipeline_parallel_size` calls later schedules it again: a millisecond later.

    It enters the first stage when its token has left the last one.
    """
    log, _ = play(workload((0, 4, 3)), stages(ahead=True), Stages(Clock(1.0), (1.0, 1.0)))
    assert token_times(log)[0] == [2, 4, 6]
    assert list(log.decided) == pytest.approx([0, 0.001, 2.001])


def test_who_is_preempted_in_flight_gets_the_late_token():
    """Two requests fill both blocks; at 2 the first wants a third, and gets the other's.

    The other's token comes out at 3 all the same. It computes its 5 tokens again, 4 in a step,
    when the first has left: from 4 on, a millisecond later, as nothing was scheduled at 3.
    """
    scheduler = stages(num_blocks=3)
    log, client = play(workload((0, 4, 2), (0, 4, 2)), scheduler, Stages(Clock(1.0), (1.0, 1.0)))
    assert token_times(log) == {0: [2, 4], 1: [3, pytest.approx(7.001)]}
    assert log.requests["preemptions"].tolist() == [0, 1]
    assert log.pauses["start"].tolist() == [2]
    assert log.pauses["resumed"].tolist() == pytest.approx([4.001])
    assert client.done == 2
    assert scheduler.blocks.free == scheduler.blocks.usable


def test_others_are_admitted_before_one_of_which_something_is_in_flight():
    """Three prompts of 12 tokens fill 9 blocks and three stages; a prompt of a token waits.

    At 3 request 0 wants a block: request 2 is preempted, in flight until 5. At 4 request 1 takes
    one more, and the last is left to request 3. At 6 request 0 ends, and a millisecond later (at 5
    nothing was scheduled) 2 computes 13 tokens, 12 and then 1: its second token is out after 4 s.
    """
    load = workload((0, 12, 2), (0, 12, 2), (0, 12, 2), (1.5, 1, 1))
    scheduler = stages(3, num_blocks=10, max_num_batched_tokens=12)
    log, _ = play(load, scheduler, Stages(Clock(1.0), (1.0, 1.0, 1.0)))
    assert token_times(log) == {0: [3, 6], 1: [4, 7], 2: [5, pytest.approx(10.001)], 3: [7]}
    assert scheduler.blocks.free == scheduler.blocks.usable


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_is_let_go_leaves_nothing_behind(ahead):
    """It goes when the oldest batch has ended, with what is in flight of it."""
    env, scheduler = FastEnvironment(), stages(ahead=ahead)
    replica = make_replica(env, scheduler, Stages(Clock(1.0), (1.0, 1.0)))
    there = []

    def submit(request):
        there.append(request)
        replica.submit(request)

    def leave():
        yield env.timeout(2.5)
        replica.cancel(there[0])

    client = Client(env, workload((0, 4, 5), (0, 4, 5)), submit)
    replica.on_finish = client.finished
    env.process(leave())
    env.run()
    assert replica.log.requests["id"].tolist() == [1]
    assert len(token_times(replica.log)[1]) == 5
    assert not scheduler.running
    assert not scheduler.batches
    assert scheduler.blocks.free == scheduler.blocks.usable


@pytest.mark.parametrize("ahead", [False, True])
def test_a_crash_empties_all_stages(ahead):
    """At 2.5 two batches are in flight; the next engine begins with free stages."""
    env = FastEnvironment()
    replica = make_replica(env, stages(ahead=ahead), Stages(Clock(1.0), (1.0, 1.0)))
    client = Client(env, workload((0, 4, 5), (0, 4, 5)), replica.submit)
    replica.on_finish = client.finished
    again = stages(ahead=ahead)

    def fail():
        yield env.timeout(2.5)
        assert len(replica.crash(again)) == 2
        replica.submit(Request(0, 2.5, 4, 1))

    env.process(fail())
    env.run()
    assert replica.log.requests["finish"].tolist() == [4.5]
    assert replica.log.emptied.tolist() == [2.5]


@st.composite
def single_stage(draw):
    """Any engine that may also be one of one stage: of a class, with its arguments."""
    seats = draw(st.integers(1, 8))
    size, count = draw(st.sampled_from([1, 2, 4, 16])), draw(st.integers(2, 300))
    memory, caching = draw(st.sampled_from(["counted", "named", "own"])), draw(st.booleans())
    ordered = draw(st.booleans())
    options = {
        "max_num_seqs": seats,
        "max_num_batched_tokens": draw(st.integers(max(seats, 3), 48)),
        "max_model_len": 64,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3, 7])),
        "prefill_schedule_interval": draw(st.sampled_from([1, 1, 2, 5])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.2])),
    }

    def make(scheduler_class, **more):
        if memory == "named":
            blocks = BlockManager(count, size, caching)
        else:
            blocks = (UnsharedPrefixCache if memory == "own" else BlockCounter)(count, size)
        policy = Priority() if ordered else None
        return made(scheduler_class, blocks, policy=policy, **options, **more)

    return make


@given(workloads(), single_stage(), clocks, st.booleans())
@settings(max_examples=300, deadline=None)
def test_one_stage_is_the_engine_without_stages(load, make, clock, ahead):
    """To the last bit: steps, tokens, preemptions, and when each step was decided.

    Where steps are decided ahead, answers end at their `max_tokens`: what the step after a stop
    token computes is left out of engines with stages (docs/limits.md).
    """
    if ahead:
        load = replace(load, max_tokens=None)
    plain, _ = play(load, make(AsyncScheduler if ahead else Scheduler), clock, leap=False)
    one = make(PipelineScheduler, pipeline_parallel_size=1, async_scheduling=ahead)
    piped, _ = play(load, one, Stages(clock))
    assert plain.request_rows == piped.request_rows
    assert plain.step_rows == piped.step_rows
    assert plain.pause_rows == piped.pause_rows
    assert token_times(plain) == token_times(piped)
    if ahead:
        assert plain.decided == piped.decided
