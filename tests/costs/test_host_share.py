"""The host's share of the steps, against what the same steps take without the engine."""

from dataclasses import replace
from math import isclose, isnan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.executor import Timing
from simulator.core.log import Log
from simulator.core.request import Chunk, Request, Step
from simulator.costs.cost_model import CostModel
from simulator.costs.linear import LinearCost
from simulator.costs.noise import Noise
from simulator.costs.overhead import Overhead
from simulator.costs.piecewise import PiecewiseCost
from simulator.kv_cache.block_manager import BlockCounter
from simulator.results.engine_metrics import host_time
from simulator.schedulers.static import Static
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload
from tests.support.costs import with_overhead
from tests.support.engines import made, play, workload

KERNELS = PiecewiseCost(dense=[[1, 1.0], [8, 2.0]], decode_per_context=0.125, prefill=0.5)
TERMS = Overhead(
    step=0.25,
    per_sequence=0.125,
    host=1.5,
    host_per_sequence=0.25,
    host_per_prefill=0.5,
    host_per_prefill_token=0.0625,
    prompt_per_layer=0.03125,  # of 32: 1 s more for a step with prompts
)
PROMPT = Chunk(Request(0, 0.0, 4, 4), 0, 4)
LOAD = workload((0, 4, 3), (0, 2, 2))


def engine(*, overlapped: bool, **terms: float) -> PiecewiseCost:
    return with_overhead(replace(TERMS, **terms), KERNELS, overlapped=overlapped, layers=32)


def busy(log: Log) -> float:
    return float((log.steps["end"] - log.steps["start"]).sum())


def test_the_hosts_part_of_three_steps_by_hand() -> None:
    """Two prompts of 6 tokens, then decodes of 2 sequences, then of 1.

    Launch 0.25 and 0.125 a sequence, 1 s for the layers of prompts; host 1.5, 0.25 a sequence, 0.5
    a prompt, 1/16 a token of prompts.
    """
    log, _ = play(LOAD, Scheduler(BlockCounter(99, 4)), engine(overlapped=False))
    first = 0.25 + 2 * 0.125 + 1.0 + 1.5 + 2 * 0.25 + 2 * 0.5 + 6 / 16
    later = [0.25 + n * 0.125 + 1.5 + n * 0.25 for n in (2, 1)]
    assert host_time(log, engine(overlapped=False)) == first + sum(later)


def test_what_kernels_hide_is_no_share_of_the_host() -> None:
    """Decodes of 9 and 10 entries: kernels of 1 + 9/8 s and 1 + 10/8 s, and a host of 2.25 s.

    Of the first the host shows 0.125 s, of the second nothing.
    """
    cost = engine(overlapped=True, host=2.0, prompt_per_layer=0.0)
    step = Step([], 1, 9)
    leap = cost.leap(step, 2)
    assert leap.seconds == [0.375 + 2.25, 0.375 + 2.25]
    assert leap.host == [0.125, 0.0]


def test_who_cannot_tell_says_nothing() -> None:
    """A straight line, and fitted kernels without an engine on top."""
    log, _ = play(LOAD, Scheduler(BlockCounter(99, 4)), KERNELS)
    assert isnan(host_time(log, KERNELS))
    assert isnan(host_time(log, LinearCost(base=1.0)))
    assert host_time(log, with_overhead(Overhead(), KERNELS, overlapped=False)) == 0.0


loads = st.lists(
    st.tuples(st.integers(0, 60).map(float), st.integers(1, 30), st.integers(1, 20)),
    min_size=1,
    max_size=12,
).map(lambda rows: workload(*sorted(rows)))


@given(
    loads,
    st.sampled_from([Scheduler, AsyncScheduler, Static]),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.5, 9.0]),
    st.integers(8, 60),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_the_host_takes_what_steps_take_beyond_their_kernels(
    load: Workload, kind: type[Scheduler], overlapped: bool, host: float, blocks: int, noisy: bool
) -> None:
    """Step by step and leaping, with preemptions, padding, ended requests and noise."""
    cost: CostModel = engine(overlapped=overlapped, host=host)
    kernels: CostModel = KERNELS
    if noisy:
        sd = {"decode": 0.1, "prompts": 0.2}
        cost = Noise(0.5, -0.5).apply(replace(cost, residuals=sd))  # type: ignore[type-var]
        kernels = Noise(0.5, -0.5).apply(replace(KERNELS, residuals=sd))
    beyond = 0.0

    class Watched:
        """Adds up what each step takes beyond its kernels."""

        def execute(self, step: Step) -> Timing:
            nonlocal beyond
            timing = cost.execute(step)
            alone = Step(step.prefills, step.decodes, step.context)
            beyond += timing.seconds - kernels.execute(alone).seconds
            return timing

    def scheduler() -> Scheduler:
        return made(kind, BlockCounter(blocks, 4), max_num_seqs=4, max_num_batched_tokens=16)

    stepped, _ = play(load, scheduler(), Watched(), leap=False)
    leapt, _ = play(load, scheduler(), cost)
    assert busy(stepped) == pytest.approx(busy(leapt))
    for log in (stepped, leapt):
        assert isclose(host_time(log, cost), beyond, rel_tol=1e-9, abs_tol=1e-9)
