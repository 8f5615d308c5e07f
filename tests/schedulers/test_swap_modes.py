"""How victims are chosen for swap, when they come back, and what the log says of it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import load_scenario, run
from simulator.build.assemble_scheduler import swap_prices
from simulator.core.request import Copies, Request, Step, Swap
from simulator.costs.linear import LinearCost
from simulator.kv_cache.block_manager import BlockCounter
from simulator.kv_cache.host_memory import Prices, SwapSpace
from simulator.policies.orders import HRRN, SJF
from simulator.policies.waiting_queues import KeyQueue, SwappedFirst
from simulator.results.frames import with_copy_seconds
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.schedulers.vllm.dynamic import DynamicScheduler
from simulator.util.errors import HeadwayError
from tests.support.engines import fcfs, made, play, workload
from tests.support.single_steps import expand_steps


def prices(recompute: float = 0.0, out: float = 0.0, back: float = 0.0) -> Prices:
    """So many seconds per token, per block out, per block back."""
    return Prices(lambda n: recompute * n, lambda n: out * n, lambda n: back * n)


@pytest.mark.parametrize(("out", "swapped"), [(1.9, 8), (2.1, 0)])
def test_a_victim_is_swapped_if_two_copies_cost_less_than_its_tokens(
    out: float, swapped: int
) -> None:
    """8 tokens are 2 blocks: 8 s to compute, 2 out + 2 x 2 s to copy."""
    host = SwapSpace(10, 4, prices(1.0, out, 2.0))
    request = Request(0, 0.0, 8, 1)
    host.swap_out(request, 8)
    assert request.swapped == swapped
    assert len(host.outgoing) == bool(swapped)
    assert host.free == 10 - swapped // 4


def test_those_who_find_their_blocks_again_need_no_copy() -> None:
    """Half of the tokens of those who came back were found: so out must be worth half the rest.

    Computing again: half of 8 s; copies: 2 x 1.5 + half of 2 x 1.5 s. Before, 8 against 6 s.
    """
    host, request = SwapSpace(10, 4, prices(1.0, 1.5, 1.5)), Request(0, 0.0, 8, 1)
    host.observe(16, 8)
    host.swap_out(request, 8)
    assert request.swapped == 0
    fresh = SwapSpace(10, 4, prices(1.0, 1.5, 1.5))
    fresh.swap_out(request, 8)
    assert request.swapped == 8
    request.swapped = 0
    free = SwapSpace(10, 4, prices(1.0, 0.01, 0.0))
    free.observe(8, 8)  # all is found again, so that even a copy of 0.02 s is for nothing
    free.swap_out(request, 8)
    assert request.swapped == 0


def test_auto_chooses_for_each_victim() -> None:
    """A copy of 0.1 s a block pays at 1 s a token, one of 9 s a block does not."""
    log, _ = play(
        workload((0, 12, 9), (0, 12, 9), (0, 4, 9)),
        fcfs(9, 4, swap_blocks=99, swap_prices=prices(1.0, 0.1, 0.0)),
    )
    assert log.requests["preemptions"].sum() > 0
    assert log.swaps["blocks_out"].sum() == log.swaps["blocks_in"].sum() > 0
    dear, _ = play(
        workload((0, 12, 9), (0, 12, 9), (0, 4, 9)),
        fcfs(9, 4, swap_blocks=99, swap_prices=prices(1.0, 9.0, 0.0)),
    )
    assert dear.requests["preemptions"].sum() > 0
    assert not len(dear.swaps)


def test_swapped_requests_come_back_before_all_others() -> None:
    """Whatever the policy ranks first; the last preempted of them first."""
    queue = SwappedFirst(KeyQueue(SJF()))
    long, short, out, again = (Request(i, 0.0, n, 1) for i, n in enumerate((50, 5, 90, 70)))
    assert queue.add(long)
    assert queue.add(short)
    out.swapped = again.swapped = 8
    queue.put_back(out)
    queue.put_back(again)
    assert not queue.add(Request(9, 0.0, 1, 1))
    assert len(queue) == 5
    assert queue.head() is again
    queue.remove(again)
    assert [queue.take().id for _ in range(4)] == [2, 9, 1, 0]
    computed = Request(4, 0.0, 3, 1)
    queue.put_back(computed)
    queue.remove(computed)
    assert len(queue) == 0


def test_a_shorter_newcomer_waits_for_the_swapped() -> None:
    """By sjf the newcomer, request 2, would board when there is room; request 1 does.

    6 blocks of 4, prompts of 2: at 12 tokens each wants a fourth.
    """
    load = workload((0, 8, 9), (0, 8, 9), (6, 1, 2))
    seen = {}
    for blocks in (0, 99):
        log, _ = play(load, fcfs(7, 4, policy=SJF(), swap_blocks=blocks))
        rows = {row["id"]: row for row in log.requests}
        assert [rows[i]["preemptions"] for i in range(3)] == [0, 1, 0]
        seen[blocks] = rows[2]["first_scheduled"]
    assert seen == {0: 6.0, 99: 9.0}


def test_they_come_back_first_also_where_the_order_changes_with_time() -> None:
    """By hrrn too, which ranks its queue anew; without swap it is ranked as ever."""
    for blocks, first in ((99, 0), (0, 1)):
        scheduler = made(DynamicScheduler, BlockCounter(9, 4), policy=HRRN(), swap_blocks=blocks)
        out, newcomer = Request(0, 0.0, 30, 2), Request(1, 0.0, 3, 2)
        out.swapped = 8
        scheduler.waiting.put_back(out)
        scheduler.add(newcomer)
        assert next(iter(scheduler.schedule(5.0).prefills)).request.id == first


def test_overlapped_copies_cost_the_longer_of_the_two() -> None:
    """A step of 1 s with copies of 0.4 s takes 1.4 s or 1 s; with copies of 4 s, 5 or 4 s."""
    step = Step([], 1, 1, copies=Copies([Swap(Request(0, 0.0, 1, 1), 4)]))
    for per_block, apart, beside in ((0.1, 1.4, 1.0), (1.0, 5.0, 4.0)):
        cost = LinearCost(1.0, swap_out_per_block=per_block)
        assert cost.execute(step).seconds == pytest.approx(apart)
        cost = LinearCost(1.0, swap_out_per_block=per_block, swap_overlap=True)
        assert cost.execute(step).seconds == pytest.approx(beside)


SCENARIO = """
model: llama-3-8b
gpu: {name: A100-80GB}
engine: {num_gpu_blocks_override: 40, preemption_mode: swap, max_model_len: 300, max_num_seqs: 8}
workload: {num_prompts: 20, input_len: 60, output_len: 100, request_rate: .inf}
"""


def scenario(tmp_path: Path, *settings: str) -> Scenario:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    return load_scenario(path, list(settings))


def test_a_gigabyte_over_pcie_4_takes_forty_milliseconds(tmp_path: Path) -> None:
    """25 GB/s: 2 MiB a block are 84 us, a GB is 40 ms; 2 ms would need 500 GB/s."""
    cost = resolve(scenario(tmp_path, "engine.swap_bandwidth=25")).cost
    blocks = round(1e9 / 2**21)
    step = Step([], copies=Copies([Swap(Request(0, 0.0, 1, 1), blocks)]))
    assert cost.swap_seconds(step) == pytest.approx(0.040, rel=1e-3)
    assert cost.swap_in_per_block == 2**21 / 25e9  # type: ignore[attr-defined]


def test_the_price_of_computing_again_is_that_of_steps_of_its_own(tmp_path: Path) -> None:
    """base + tokens, budget 2048: 5000 tokens take three steps."""
    told = scenario(tmp_path, "cost={kind: linear, base: 1, per_token: 0.01}")
    price = swap_prices(resolve(told))
    assert price.recompute(5000) == pytest.approx(3 + 50)
    assert price.recompute(10) == pytest.approx(1.1)
    assert price.swap_out(3) == price.swap_in(3) == pytest.approx(3 * 2**21 / (0.85 * 32e9))


def test_the_log_tells_what_moved_and_what_it_took(tmp_path: Path) -> None:
    """Blocks and seconds by step, bytes in the summary, the same with and without leaps."""
    leapt = run(scenario(tmp_path))
    stepped = run(scenario(tmp_path), stepwise=True)
    frame, single = leapt.steps, stepped.steps
    for name in ("swapped_out_blocks", "swapped_in_blocks", "swap_time"):
        assert [x for x in frame[name] if x] == [x for x in single[name] if x] != []
        ((log, seconds),) = with_copy_seconds(leapt)
        both = expand_steps(log, copy_seconds=seconds)[name]
        assert np.array_equal(both, single[name])
    gauges = leapt.summary()["headway"]
    moved = frame.swapped_out_blocks.sum() + frame.swapped_in_blocks.sum()
    assert gauges["swapped_bytes"] == moved * 2**21
    assert gauges["swap_time"] == pytest.approx(moved * 2**21 / (0.85 * 32e9))
    assert "swap_time" not in run(scenario(tmp_path, "engine.preemption_mode=recompute")).steps


def test_overlap_is_never_slower(tmp_path: Path) -> None:
    """The schedule is the same but for its times."""
    apart, beside = (
        run(scenario(tmp_path, f"engine.swap_overlap={word}")).summary()["duration"]
        for word in ("false", "true")
    )
    assert beside < apart


def test_auto_picks_the_cheaper(tmp_path: Path) -> None:
    """At 1 MB/s everything is computed again, at 1 TB/s everything is swapped."""
    for bandwidth, swaps in ((0.001, False), (1000, True)):
        done = run(
            scenario(
                tmp_path,
                "engine.preemption_mode=auto",
                f"engine.swap_bandwidth={bandwidth}",
                "engine.enable_prefix_caching=false",
            )
        )
        gauges = done.summary()["headway"]
        assert gauges["preemptions"] > 0
        assert (gauges["swapped_out_blocks"] > 0) == swaps


@given(st.integers(1, 60), st.floats(0, 2), st.floats(0, 2), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_auto_never_pays_more_than_it_must(tokens, out, back, found, lost) -> None:
    """Of the two expected costs the smaller one is taken."""
    price = prices(1.0, out, back)
    host, request = SwapSpace(99, 4, price), Request(0, 0.0, tokens, 1)
    host.observe(found + lost, found)
    host.swap_out(request, tokens)
    share = lost / (found + lost) if found + lost else 1.0
    swap = price.swap_out(-(-tokens // 4)) + share * price.swap_in(-(-tokens // 4))
    again = share * price.recompute(tokens)
    if abs(swap - again) > 1e-9:
        assert bool(request.swapped) == (swap < again)


@pytest.mark.parametrize("line", ["swap_bandwidth=10", "swap_overlap=true"])
def test_what_means_nothing_without_swap_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(HeadwayError, match="needs preemption_mode swap or auto"):
        scenario(tmp_path, "engine.preemption_mode=recompute", f"engine.{line}")
