"""PiecewiseCost and SplitCost are the formula at the head of `simulator/costs/piecewise.py`.

Here it stands once more, term by term, without tables; any cost and any step must agree with it.
"""

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.executor import MIXED_GRAPH_PROMPTS
from simulator.core.request import Load, Step, Swap
from simulator.costs.piecewise import MAX_TABLE_SEQUENCES, PiecewiseCost, Table
from simulator.costs.split import FULL, SPLIT_TERMS, THREAD_BLOCKS, SplitCost
from tests.support.costs import SOMEBODY, mixed
from tests.support.with_fields import with_fields


def line(table: Table, tokens: int) -> float:
    """Straight between rows, constant before the first and after the last."""
    for (t0, s0), (t1, s1) in pairwise(table):
        if t0 <= tokens <= t1:
            return s0 + (s1 - s0) * (tokens - t0) / (t1 - t0)
    return table[0][1] if tokens <= table[0][0] else table[-1][1]


def dense(cost: PiecewiseCost, tokens: int) -> float:
    """As `line`; beyond the last row as steep as its upper half is, never falling."""
    (first, _), (last, seconds) = cost.dense[0], cost.dense[-1]
    middle = max(last / 2, first)
    if tokens <= last or last == first:
        return line(cost.dense, tokens)
    slope = (seconds - line(cost.dense, middle)) / (last - middle)
    return seconds + max(slope, 0) * (tokens - last)


def without_host(cost: PiecewiseCost, step: Step) -> float:
    """Kernels, launches and the GPU's waits."""
    count, context, prompts = step.decodes, step.context, len(step.prefills)
    new = sum(chunk.tokens for chunk in step.prefills)
    sequences, rows = count + prompts, count + prompts + step.drafts
    tokens = count + step.drafts + new
    waits = cost.overhead + cost.overhead_per_sequence * sequences
    seen = min(context, cost.window * count)
    beside = cost.mixed_per_context * context + cost.mixed_per_sequence * count
    beside += cost.mixed_per_window * seen
    graph = None
    if prompts:
        keys = [chunk.start + chunk.tokens for chunk in step.prefills]
        queries = [k for c in step.prefills for k in range(c.start + 1, c.start + c.tokens + 1)]
        work = cost.prefill_per_pair * sum(queries) + cost.prefill_per_token * new
        work += cost.prefill_per_key * sum(keys) + cost.prefill_per_sequence * prompts
        work += cost.prefill_per_window_pair * sum(min(k, cost.window) for k in queries)
        if count:
            work += max(cost.mixed_least - cost.mixed_per_context * context, 0)
        longest = max(*keys, context / count if count else 0)
        attention = max(work + beside, cost.serial_per_token * longest)
        graph = next((s for t, s in cost.graph_mixed if t >= tokens), None)
        if prompts > MIXED_GRAPH_PROMPTS:
            graph = None
        products = dense(cost, tokens) + cost.prefill if graph is None else graph
        seconds = waits + products + max(cost.head, cost.head_per_sequence * rows) + attention
    else:
        graph = next((size for size in cost.cudagraph_capture_sizes if size >= tokens), None)
        padded = tokens if graph is None else graph
        products = dense(cost, padded) + max(cost.head, cost.head_per_sequence * padded)
        if cost.graph_dense and graph is not None:
            products = line(cost.graph_dense, padded)
        seconds = waits + products + cost.decode
        if step.drafts:
            seconds += max(beside, cost.serial_per_token * context / count)
        else:
            read = cost.decode_per_context * context + cost.decode_per_window * seen
            seconds += max(read, cost.decode_per_sequence * count, cost.decode_least)
            seconds += cost.state_per_sequence * count
    if cost.launch and graph is None:
        seconds = max(seconds, waits + cost.launch)
    return seconds


def wait_for_longest(cost: PiecewiseCost, step: Step) -> float:
    """What a SplitCost adds."""
    if not isinstance(cost, SplitCost) or not step.decodes:
        return 0.0
    blocks, pairs = THREAD_BLOCKS * cost.multiprocessors, step.decodes * cost.kv_heads
    mean = step.context / step.decodes
    if cost.beyond_mean:
        return cost.per_key * ((step.longest or mean) - mean) * (pairs >= FULL * blocks)
    if pairs <= blocks:
        return cost.per_key * step.context * cost.kv_heads / blocks
    return cost.per_key * (step.longest or mean)


def host_work(cost: PiecewiseCost, step: Step) -> float:
    prompts, new = len(step.prefills), sum(chunk.tokens for chunk in step.prefills)
    sequences = step.decodes + prompts
    work = cost.host + cost.host_per_sequence * sequences
    work += cost.host_per_prefill * prompts + cost.host_per_prefill_token * new
    return max(work, cost.stream_per_sequence * sequences) if cost.overlapped else work


def formula(cost: PiecewiseCost, step: Step) -> float:
    """Return the seconds of a step."""
    seconds, host = without_host(cost, step), host_work(cost, step)
    sequences = step.decodes + len(step.prefills)
    waits = cost.overhead + cost.overhead_per_sequence * sequences
    if cost.overlapped:
        seconds = max(seconds, waits + host) if host else seconds
    else:
        seconds = max(seconds + host, cost.stream_per_sequence * sequences)
    seconds += wait_for_longest(cost, step)
    if not (copies := step.copies):
        return seconds
    moved = cost.swap_out * len(copies.outgoing) + cost.swap_in * len(copies.incoming)
    moved += cost.swap_out_per_block * copies.swapped_out
    moved += cost.swap_in_per_block * copies.swapped_in
    moved += sum(cost.load + cost.load_per_block * load.count for load in copies.loads)
    return max(seconds, moved) if cost.swap_overlap else seconds + moved


NONE_OR_SOME = st.sampled_from([0.0] * 5 + [0.25, 1.0, 2.5, 7.0, 40.0])
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(sorted)
SMALL = st.integers(1, 30)
FLOORS = ("launch", "decode_least", "mixed_least", "host", "head")
TERMS = [f.name for f in fields(SplitCost) if f.init and isinstance(f.default, float)]


@st.composite
def costs(draw: st.DrawFn) -> PiecewiseCost:
    """Draw any terms; half of them are none."""

    def table() -> list[list[float]]:
        return [[size, draw(st.integers(1, 80)) / 4] for size in draw(SIZES)]

    keys = {name: draw(NONE_OR_SOME) for name in TERMS}
    keys |= {name: draw(st.just(0.0) | st.integers(1, 6).map(lambda n: 4.0**n)) for name in FLOORS}
    if draw(st.booleans()):
        keys |= {"cudagraph_capture_sizes": draw(SIZES)}
    keys |= {name: table() for name in ("graph_dense", "graph_mixed") if draw(st.booleans())}
    flags = "overlapped", "swap_overlap", "beyond_mean"
    keys |= {name: draw(st.booleans()) for name in flags}
    keys |= {"window": draw(st.just(0) | SMALL), "kv_heads": draw(st.integers(1, 4))}
    keys |= {"multiprocessors": draw(st.integers(1, 8)), "dense": table()}
    if draw(st.booleans()):
        return SplitCost(**keys)
    for name in SPLIT_TERMS:
        del keys[name]
    return PiecewiseCost(**keys)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Draw prompts, decodes, drafts and copies; few, or more than any table has."""
    chunk = st.tuples(st.integers(0, 50), SMALL)
    chunks = draw(st.just([]) | st.lists(chunk, max_size=MIXED_GRAPH_PROMPTS + 2))
    many = st.integers(1, 20) | st.integers(1, 2 * MAX_TABLE_SEQUENCES)
    decodes = draw(many if not chunks else st.just(0) | many)
    step = mixed(*chunks, decodes=decodes)
    if decodes:
        step.context = decodes * draw(SMALL) + draw(st.integers(0, 50))
        step.drafts = draw(st.just(0) | st.integers(1, 3 * decodes))
        step.longest = draw(st.sampled_from([0, step.context // decodes + 9]))
    if draw(st.booleans()):
        copies = step.add_copies()
        for swaps in (copies.outgoing, copies.incoming):
            swaps += [Swap(SOMEBODY, count) for count in draw(st.lists(SMALL, max_size=2))]
        copies.loads = [Load(SOMEBODY, n, True) for n in draw(st.lists(SMALL, max_size=2))]
    return step


@settings(max_examples=500)
@given(cost=costs(), step=steps())
def test_any_step_takes_what_the_formula_says(cost: PiecewiseCost, step: Step) -> None:
    """Whatever the tables do to be fast; and what the host makes it longer is told."""
    timing = cost.execute(step)
    assert timing.seconds == pytest.approx(formula(cost, step), rel=1e-12)
    kernels = without_host(cost, step)
    waits = cost.overhead + cost.overhead_per_sequence * (step.decodes + len(step.prefills))
    longer = max(waits + host_work(cost, step) - kernels, 0.0) if cost.overlapped else 0.0
    assert timing.host == pytest.approx(longer if host_work(cost, step) else 0.0, abs=1e-9)


@settings(max_examples=200)
@given(cost=costs(), step=steps(), repeats=st.integers(1, 20))
def test_a_leap_and_a_table_of_decodes_are_their_steps(
    cost: PiecewiseCost, step: Step, repeats: int
) -> None:
    """To the last bit, the host's waits included; a table has sequences of one length."""
    count = step.decodes or 3
    context = step.context or 7
    longest = step.longest
    each = [
        with_fields(Step([], count, context + k * count), longest=longest and longest + k)
        for k in range(repeats)
    ]
    timings = [cost.execute(one) for one in each]
    seconds = [timing.seconds for timing in timings]
    leap = cost.leap(with_fields(Step([], count, context), longest=longest), repeats)
    assert leap.seconds == seconds
    assert [*(leap.host or [0.0] * repeats)] == [timing.host for timing in timings]
    if not longest:
        counts = np.full(repeats, count)
        contexts = np.array([one.context for one in each])
        assert cost.decode_seconds(counts, contexts) == pytest.approx(np.array(seconds), rel=1e-12)


@pytest.mark.parametrize(("drafts", "launched"), [(4, False), (5, True)])
def test_the_largest_graph_has_room_for_as_many_as_its_size(drafts: int, launched: bool) -> None:
    """Of 8 tokens; with a ninth each kernel is launched, which takes a second."""
    cost = PiecewiseCost(dense=[[1, 1e-3]], cudagraph_capture_sizes=[8], launch=1.0)
    step = Step([], 4, 40)
    step.drafts = drafts
    assert (cost.execute(step).seconds >= 1.0) is launched
    assert cost.execute(step).seconds == pytest.approx(formula(cost, step))


def test_a_table_of_decodes_beyond_the_largest_graph_takes_their_launches() -> None:
    cost = PiecewiseCost(dense=[[1, 1e-3]], cudagraph_capture_sizes=[8], launch=1.0)
    counts, contexts = np.array([8, 9]), np.array([80, 90])
    steps = [Step([], 8, 80), Step([], 9, 90)]
    seconds = [cost.execute(step).seconds for step in steps]
    assert seconds[1] >= 1.0 > seconds[0]
    assert cost.decode_seconds(counts, contexts).tolist() == pytest.approx(seconds)
