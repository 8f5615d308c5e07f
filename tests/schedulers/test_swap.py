"""Preemption by swap: what goes to the host, what comes back, and what it costs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from simulator import load_scenario, run
from simulator.build.assemble_scheduler import make_scheduler
from simulator.core.executor import Timing
from simulator.core.request import Chunk, Copies, Request, Step, Swap
from simulator.costs.linear import LinearCost
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.models.gpus import find_gpu
from simulator.policies.orders import Priority
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.workload import Workload
from tests.support.engines import Clock, fcfs, listed, made, play, workload


class Spy(Clock):
    """Write down each step: prefills, decodes, blocks out and in."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.seen: list[tuple[object, ...]] = []

    def execute(self, step: Step) -> Timing:
        prefills = {c.request.id: (c.start, c.tokens) for c in step.prefills}
        out = {s.request.id: s.count for s in step.outgoing or ()}
        back = {s.request.id: (s.first, s.count) for s in step.incoming or ()}
        self.seen.append((prefills, step.decodes, step.context, out, back))
        return super().execute(step)


def spied(scheduler: Scheduler, *requests: tuple[float, int, int]) -> list[tuple[object, ...]]:
    spy = Spy(scheduler)
    play(workload(*requests), scheduler, spy, leap=False)
    return spy.seen


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """Blocks of 4, 5 of them: both prompts take 2; at 8 tokens each wants a third.

    Request 1 leaves with 2 blocks, comes back to the block that follows them and decodes at once.
    """
    seen = spied(fcfs(6, 4, swap_blocks=10), (0, 7, 4), (0, 7, 4))
    assert seen == [
        ({0: (0, 7), 1: (0, 7)}, 0, 0, {}, {}),
        ({}, 2, 16, {}, {}),
        ({}, 1, 9, {1: 2}, {}),
        ({}, 1, 10, {}, {}),
        ({}, 1, 9, {}, {1: (0, 2)}),
        ({}, 1, 10, {}, {}),
    ]


def test_by_recompute_the_same_requests_take_the_same_steps_but_a_longer_one() -> None:
    """The sixth block does not help, request 1 computes its 9 known tokens again."""
    seen = spied(fcfs(6, 4), (0, 7, 4), (0, 7, 4))
    assert [step[:3] for step in seen][4] == ({1: (0, 9)}, 0, 0)
    assert not any(out or back for *_, out, back in seen)


def test_what_does_not_fit_the_host_is_computed_again() -> None:
    seen = spied(fcfs(6, 4, swap_blocks=1), (0, 7, 4), (0, 7, 4))
    assert not any(out or back for *_, out, back in seen)
    scheduler = fcfs(6, 4, swap_blocks=2)
    assert sum(bool(out) for *_, out, _ in spied(scheduler, (0, 7, 4), (0, 7, 4))) == 1
    assert scheduler.swap_space.free == 2


def test_a_prompt_half_computed_goes_on_from_there() -> None:
    """A budget of 4: request 1 has 8 of its 20 tokens when request 0 takes its blocks."""
    scheduler = fcfs(
        8,
        4,
        swap_blocks=10,
        max_num_batched_tokens=4,
        max_num_seqs=4,
        scheduler_reserve_full_isl=False,
    )
    seen = spied(scheduler, (0, 4, 14), (0, 20, 1))
    out = [step for step in seen if step[3]]
    back = [step for step in seen if step[4]]
    assert len(out) == len(back) == 1
    (moved,) = out[0][3].values()  # type: ignore[attr-defined]
    assert back[0][4] == {1: (0, moved)}
    start, _ = back[0][0][1]  # type: ignore[index]
    assert (moved - 1) * 4 < start <= moved * 4


def test_blocks_found_in_the_prefix_cache_are_not_copied_back() -> None:
    """Two blocks are request 0's, too, and the third still lies idle: only the fourth moves."""
    load = workload((0, 8, 14), (1, 9, 14))
    load.segments = [(("s", 8),), (("s", 8), (("in", 1), 1))]
    scheduler = made(Scheduler, BlockManager(8, 4, prefix_caching=True), swap_blocks=100)
    spy = Spy(scheduler)
    play(load, scheduler, spy, leap=False)
    out = [step[3] for step in spy.seen if step[3]]
    back = [step[4] for step in spy.seen if step[4]]
    assert out[0][1] == 4
    assert back[0] == {1: (3, 1)}


def test_listed_spells_out_prefills_then_singles_then_the_set() -> None:
    """Contexts are those before the step, in running order."""
    scheduler = fcfs(100, 4, max_num_batched_tokens=8, max_num_seqs=4)
    requests = [Request(i, 0.0, n, 9) for i, n in enumerate((3, 2, 12))]
    for request in requests[:2]:
        scheduler.add(request)
    step = scheduler.schedule(0.0)
    assert _plain(listed(scheduler, step)) == [(0, 0, 3), (1, 0, 2)]
    scheduler.commit(step, [1.0])
    step = scheduler.schedule(1.0)
    assert _plain(listed(scheduler, step)) == [(0, 3, 1), (1, 2, 1)]
    scheduler.commit(step, [2.0, 3.0, 4.0])
    scheduler.add(requests[2])
    step = scheduler.schedule(4.0)
    assert _plain(listed(scheduler, step)) == [(2, 0, 6), (0, 6, 1), (1, 5, 1)]


def _plain(chunks: list[Chunk]) -> list[tuple[int, int, int]]:
    return [(chunk.request.id, chunk.start, chunk.tokens) for chunk in chunks]


@st.composite
def tight(draw: st.DrawFn) -> Callable[[], Scheduler]:
    """An engine with little memory, so that most workloads preempt, and some room to swap."""
    size = draw(st.sampled_from([1, 2, 4]))
    num_blocks = 1 + draw(st.integers(70, 100)) // size
    named, caching = draw(st.booleans()), draw(st.booleans())
    options = {
        "max_num_seqs": draw(st.integers(2, 8)),
        "max_num_batched_tokens": draw(st.integers(8, 64)),
        "max_model_len": 72,
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 5])),
        "swap_blocks": draw(st.sampled_from([20, 60, 10000])) // size,
        "prefill_schedule_interval": draw(st.sampled_from([1, 1, 3])),
    }

    policy = draw(st.sampled_from([None, Priority]))

    def make() -> Scheduler:
        blocks = (
            BlockManager(num_blocks, size, caching) if named else BlockCounter(num_blocks, size)
        )
        return made(Scheduler, blocks, policy=policy and policy(), **options)

    return make


@st.composite
def crowds(draw: st.DrawFn) -> Workload:
    """Many requests at once, half of which begin alike."""
    n = draw(st.integers(4, 12))
    sizes = st.lists(st.integers(1, 36), min_size=n, max_size=n)
    load = workload(
        *((0.5 * i, p, o) for i, (p, o) in enumerate(zip(draw(sizes), draw(sizes), strict=True)))
    )
    load.priority = np.array(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    if draw(st.booleans()):
        load.segments = [
            (("s" if i % 2 else f"own{i}", tokens),)
            for i, tokens in enumerate(load.prompt_tokens.tolist())
        ]
    return load


@given(crowds(), tight())
@settings(max_examples=200, deadline=None)
def test_leaping_and_stepwise_runs_that_swap_agree_to_the_last_bit(load, engine) -> None:
    """The law of test_laws.py, where memory is short; and nothing is left on the host."""
    clock = Clock(1.0, 0.01, 0.001)
    one, two = engine(), engine()
    host = one.swap_space.free
    leapt, _ = play(load, one, clock)
    stepped, _ = play(load, two, clock, leap=False)
    event(f"preempted: {bool(leapt.requests['preemptions'].sum())}")
    assert leapt.request_rows == stepped.request_rows
    assert leapt.run_rows == stepped.run_rows
    assert leapt.tick_ends == stepped.tick_ends
    assert one.swap_space.free == two.swap_space.free == host
    assert one.blocks.free == one.blocks.usable


def test_a_victim_takes_only_what_has_been_computed() -> None:
    """10 blocks of 1 token: request 0 is given the last one, then 1, more urgent, wants it.

    So request 0 leaves with the 5 tokens that it had before this step.
    """
    load = workload((0, 2, 9), (2, 3, 3))
    load.priority = np.array([1, 0])
    scheduler = fcfs(11, 1, policy=Priority(), swap_blocks=100)
    spy = Spy(scheduler)
    play(load, scheduler, spy, leap=False)
    out = [step for step in spy.seen if step[3]]
    back = [step for step in spy.seen if step[4]]
    assert [(step[1], step[3]) for step in out] == [(1, {0: 5})]
    assert [(step[1:3], step[4]) for step in back] == [((1, 6), {0: (0, 5)})]


def test_asynchronous_scheduling_does_not_swap(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"engine\.preemption_mode: swap cannot be used with"):
        scenario(tmp_path, "engine.async_scheduling=true")


# ------------------------------------------------------------------ cost and scenario


def test_the_swap_terms_are_charged_per_request_and_block() -> None:
    cost = LinearCost(1.0, 0.0, 0.0, swap_out=10.0, swap_out_per_block=0.1, swap_in_per_block=0.01)
    request = Request(0, 0.0, 1, 1)
    step = Step([], 1, 1, copies=Copies([Swap(request, 3), Swap(request, 4)]))
    assert cost.execute(step).seconds == pytest.approx(1 + 20 + 0.7)
    step.add_copies().incoming = [Swap(request, 5)]
    assert cost.execute(step).seconds == pytest.approx(1 + 20 + 0.7 + 0.05)
    assert cost.execute(Step([], 1, 1)).seconds == 1.0


SCENARIO = """
model: llama-3-8b
gpu: {name: H200}
engine: {num_gpu_blocks_override: 40, preemption_mode: swap, max_model_len: 300, max_num_seqs: 8}
workload: {num_prompts: 20, input_len: 60, output_len: 100, request_rate: .inf}
"""


def scenario(tmp_path: Path, *settings: str) -> Scenario:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    return load_scenario(path, list(settings))


def test_without_terms_the_bytes_go_over_the_bus(tmp_path: Path) -> None:
    """2 MiB a block over 85 % of PCIe 5.0's 64 GB/s, each way."""
    cost = resolve(scenario(tmp_path)).cost
    assert cost.swap_in_per_block == cost.swap_out_per_block == 2**21 / (0.85 * 64e9)  # type: ignore[attr-defined]
    assert find_gpu("A100-80GB").host_bandwidth == 32e9


def test_swap_space_holds_so_many_blocks(tmp_path: Path) -> None:
    assert resolve(scenario(tmp_path)).swap_blocks == 2048
    two = scenario(tmp_path, "engine.tensor_parallel_size=2", "gpu.count=2")
    assert resolve(two).swap_blocks == 4096


def test_a_scenario_swaps_when_told_to(tmp_path: Path) -> None:
    """Less is computed than by recompute, and every request ends."""
    by_swap, again = (
        run(scenario(tmp_path, f"engine.preemption_mode={mode}")) for mode in ("swap", "recompute")
    )
    assert by_swap.summary()["completed"] == again.summary()["completed"] == 20
    computed = [result.logs[0].steps["prefill_tokens"].sum() for result in (by_swap, again)]
    assert by_swap.logs[0].requests["preemptions"].sum() > 0
    assert computed[0] == 20 * 60 < computed[1]


def test_static_batches_compute_again(tmp_path: Path) -> None:
    told = scenario(tmp_path, "engine.scheduling_policy=static")
    with pytest.warns(HeadwayWarning, match="preemption_mode has no effect"):
        spec = resolve(told)
    assert make_scheduler(spec, False).swap_space.free == 0


def test_swap_goes_with_pages(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"engine\.preemption_mode: swap needs paged"):
        scenario(tmp_path, "engine.allocation=contiguous")
