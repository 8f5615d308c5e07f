"""Where each request's time went: worked by hand, and laws over any run."""

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from simulator.core.log import Log
from simulator.costs.linear import LinearCost
from simulator.costs.piecewise import PiecewiseCost
from simulator.results.breakdown import PARTS, as_computed, break_down
from simulator.results.request_table import RequestTable, gather_requests
from simulator.schedulers.static import Static
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload
from tests.engine.test_laws import engines, workloads
from tests.support.engines import fcfs, made, play, workload


def parts_of(
    load: Workload, scheduler: Scheduler, cost: LinearCost, leap: bool = True
) -> tuple[RequestTable, dict[str, np.ndarray], Log]:
    log, client = play(load, scheduler, cost, leap)
    table = gather_requests(load, np.array(client.sent), [log])
    return table, break_down(table, [log], [cost]), log


def told(parts: dict[str, np.ndarray], request: int) -> dict[str, float]:
    """Return a request's parts that are not 0."""
    return {name: float(parts[name][request]) for name in PARTS if parts[name][request]}


@pytest.mark.parametrize("leap", [True, False])
def test_a_prompt_slows_a_decode(leap: bool) -> None:
    """A step takes 1 s and 1/8 s per token.

    Request 0 computes 4 tokens until 1.5. Then it decodes beside 8 tokens of request 1: 2.125 s
    in place of 1.125 s. Then both decode (1.25 s), then request 0 alone (1.125 s).
    """
    cost = LinearCost(base=1.0, per_token=1 / 8)
    table, parts, _ = parts_of(workload((0, 4, 4), (1, 8, 2)), fcfs(), cost, leap)
    slowed = {"prefill_time": 1.5, "decode_alone_time": 3.5, "decode_slowed_time": 1.0}
    assert told(parts, 0) == slowed
    assert told(parts, 1) == {"prefill_time": 2.125, "decode_alone_time": 1.25}
    assert table.queue_time.tolist() == [0.0, 0.5]
    assert table.e2el.tolist() == [6.0, 3.875]


def test_preempted_and_computed_again() -> None:
    """Blocks of 4, 5 of them, 1 s a step: at 8 tokens each of two requests wants a third block.

    Request 1 leaves at 2 s, boards again when request 0 ends at 4 s, computes its 9 tokens again
    until 5 s, of which 8 had been computed, and decodes once more.
    """
    cost = LinearCost(base=1.0)
    table, parts, log = parts_of(workload((0, 7, 4), (0, 7, 4)), fcfs(6, 4), cost)
    assert told(parts, 0) == {"prefill_time": 1.0, "decode_alone_time": 3.0}
    assert told(parts, 1) == {
        "prefill_time": 1.0,
        "decode_alone_time": 2.0,
        "preempted_time": 2.0,
        "recompute_time": 1.0,
    }
    assert log.pauses.tolist() == [(2.0, 4.0, 1, 8)]
    assert table.e2el.tolist() == [4.0, 6.0]


def test_swapped() -> None:
    """The same with a host: 2 blocks leave in the step from 2 s, 1/4 s each, beside a decode.

    They come back in the step from 4.5 s, 1/2 s each, in which request 1 decodes at once.
    """
    cost = LinearCost(base=1.0, swap_out_per_block=0.25, swap_in_per_block=0.5)
    load = workload((0, 7, 4), (0, 7, 4))
    _, parts, log = parts_of(load, fcfs(6, 4, swap_blocks=10), cost)
    assert told(parts, 0) == {"prefill_time": 1.0, "decode_alone_time": 3.0, "swap_time": 0.5}
    assert told(parts, 1) == {
        "prefill_time": 1.0,
        "decode_alone_time": 3.0,
        "preempted_time": 2.5,
        "swap_time": 1.0,
    }
    assert log.swaps.tolist() == [(2.0, 1, 2, 0, 0, 0.5), (4.5, 0, 0, 1, 2, 1.0)]
    assert log.pauses.tolist() == [(2.0, 4.5, 1, 0)]


def test_copies_beside_the_compute_take_only_what_they_stick_out() -> None:
    """As above, overlapped: 1/2 s out is hidden, 2 x 3/4 s back sticks out of its step by 1/2 s."""
    cost = LinearCost(base=1.0, swap_out_per_block=0.25, swap_in_per_block=0.75, swap_overlap=True)
    load = workload((0, 7, 4), (0, 7, 4))
    table, parts, _ = parts_of(load, fcfs(6, 4, swap_blocks=10), cost)
    assert told(parts, 0) == {"prefill_time": 1.0, "decode_alone_time": 3.0}
    assert told(parts, 1) == {
        "prefill_time": 1.0,
        "decode_alone_time": 3.0,
        "preempted_time": 2.0,
        "swap_time": 0.5,
    }
    assert table.e2el.tolist() == [4.0, 6.5]


def test_preempted_before_the_first_token() -> None:
    """4 tokens a step of 1 s, 3 blocks of 4: request 1 boards at 1 s and computes 3 of 8 tokens.

    Request 0 has taken two blocks, so at 2 s there is none for the rest. The same again from 3 to
    4 s. From 6 s on request 1 is alone: 4 tokens, then 4, and its first token at 8 s.
    """
    options = {"max_num_batched_tokens": 4, "max_num_seqs": 2, "scheduler_reserve_full_isl": False}
    load = workload((0, 4, 6), (0, 8, 1))
    table, parts, log = parts_of(load, fcfs(4, 4, **options), LinearCost(base=1.0))
    assert log.pauses.tolist() == [(2.0, 3.0, 1, 3), (4.0, 6.0, 1, 3)]
    assert (table.queue_time[1], table.e2el[1]) == (1.0, 8.0)
    assert told(parts, 1) == {"prefill_time": 1.0, "preempted_time": 3.0, "recompute_time": 3.0}


def test_static_members_wait_for_the_prompts_of_others() -> None:
    """Prompts of 4 in steps of 4 tokens: the first member holds its token for a step of 1 s."""
    cost = LinearCost(base=1.0)
    blocks = fcfs(100, 4).blocks
    scheduler = made(Static, blocks, timeout=0.0, max_num_seqs=2, max_num_batched_tokens=4)
    _, parts, _ = parts_of(workload((0, 4, 2), (0, 4, 2)), scheduler, cost)
    assert told(parts, 0) == {
        "prefill_time": 1.0,
        "decode_slowed_time": 1.0,
        "decode_alone_time": 1.0,
    }
    assert told(parts, 1) == {"prefill_time": 2.0, "decode_alone_time": 1.0}


costs = st.builds(
    LinearCost,
    base=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    per_token=st.sampled_from([0.0, 0.01, 0.003]),
    per_context=st.sampled_from([0.0, 0.001, 0.0007]),
    swap_out_per_block=st.sampled_from([0.0, 0.02]),
    swap_in=st.sampled_from([0.0, 0.3]),
    swap_in_per_block=st.sampled_from([0.0, 0.05]),
    swap_overlap=st.booleans(),
)


@given(workloads(), engines(pipelines=False), costs)
@settings(max_examples=200, deadline=None)
def test_parts_add_up_in_leaps_as_step_by_step(load, engine, cost) -> None:
    """With the queue the parts give e2el; nothing was cut off at 0; both runs give the same."""
    table, parts, log = parts_of(load, engine(), cost)
    event(f"pauses: {bool(len(log.pauses))}, swaps: {bool(len(log.swaps))}")
    done = table.completed
    whole = table.queue_time + sum(parts.values())
    assert np.allclose(whole[done], table.e2el[done], rtol=0, atol=1e-9)
    stepped = parts_of(load, engine(), cost, leap=False)[1]
    for name in PARTS:
        assert np.isnan(parts[name][~done]).all()
        assert (parts[name][done] >= 0).all()
        assert parts[name].tobytes() == stepped[name].tobytes(), name


@given(workloads(), engines(pipelines=False), costs)
@settings(max_examples=60, deadline=None)
def test_slowed_is_the_sum_over_the_steps(load, engine, cost) -> None:
    """Walked step by step for each request that was never preempted."""
    table, parts, log = parts_of(load, engine(), cost, leap=False)
    event(f"swaps: {bool(len(log.swaps))}, overlap: {cost.swap_overlap}")
    copies = dict.fromkeys(log.swaps["start"], 0.0)
    for row in log.steps[np.isin(log.steps["start"], [*copies])]:
        tokens = int(row["decodes"]) + int(row["prefill_tokens"]) + int(row["wasted"])
        compute = cost.base + cost.per_token * tokens + cost.per_context * int(row["context"])
        copies[row["start"]] = row["end"] - row["start"] - compute
    table = as_computed(table, [log])
    for number in np.flatnonzero(table.completed & (table.preemptions == 0)):
        slowed = swapped = 0.0
        for row in log.steps:
            if table.first_scheduled[number] <= row["start"] < table.finish[number]:
                swapped += copies.get(row["start"], 0.0)
            inside = table.first_token[number] <= row["start"] < table.finish[number]
            if inside and row["prefill_context"]:
                count, read = int(row["decodes"]), int(row["context"])
                alone = cost.base + cost.per_token * count + cost.per_context * read
                time = row["end"] - row["start"] - copies.get(row["start"], 0.0)
                slowed += max(time - (alone if count else 0.0), 0.0)
        assert parts["decode_slowed_time"][number] == pytest.approx(slowed, abs=1e-9)
        assert parts["swap_time"][number] == pytest.approx(swapped, abs=1e-9)


def test_decode_seconds_are_those_of_a_leap() -> None:
    """Both cost models: many steps at once, each as by itself."""
    from simulator.core.request import Step

    table = [[1, 0.5], [4, 1.0], [8, 1.5]]
    piecewise = PiecewiseCost(
        dense=table, overhead=0.1, head=0.2, head_per_sequence=0.06, decode=0.05,
        decode_per_context=0.001, decode_per_sequence=0.01,
    )  # fmt: skip
    linear = LinearCost(base=0.1, per_token=0.2, per_context=0.003, per_sequence=0.05)
    counts, contexts = np.array([1, 3, 20, 9]), np.array([4, 300, 21, 9000])
    for cost in (piecewise, linear):
        seconds = cost.decode_seconds(counts, contexts).tolist()
        for count, context, found in zip(counts, contexts, seconds, strict=True):
            assert found == cost.execute(Step([], int(count), int(context))).seconds
