"""Laws that hold for every run, whatever the workload, the policy and the options."""

from collections.abc import Callable
from functools import partial
from math import isclose, nan

import numpy as np
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.build.policy_table import DYNAMIC_HOOKS, POLICIES
from simulator.core.log import REASONS, Log
from simulator.core.request import Segments
from simulator.engine.client import Client
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.kv_cache.host_memory import Prices
from simulator.kv_cache.radix_cache import RadixCache
from simulator.kv_cache.tiers import HostTier
from simulator.kv_cache.unshared_prefix_cache import UnsharedPrefixCache
from simulator.results.engine_metrics import StepSums
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.static import Static
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.dynamic import AsyncDynamicScheduler, DynamicScheduler
from simulator.schedulers.vllm.pipeline import PipelineScheduler
from simulator.schedulers.vllm.rules import NEWEST_RELEASE, families, rules_of
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.sums import take_sums
from simulator.workload.workload import Workload
from tests.support.engines import Clock, made
from tests.support.engines import play as play_with
from tests.support.other_engines import answers, other_engines, rejections
from tests.support.single_steps import expand_steps

POLICY_TRIALS: dict[str, Callable[[], object]] = {
    f"{name} {arguments}": partial(cls, **arguments)
    for name, cls in POLICIES.items()
    if not issubclass(cls, SchedulerBase)
    for arguments in ({}, *getattr(cls, "trials", ()))
}
"""Every policy, with its defaults and with the arguments that it names."""
PIPELINES = [
    partial(made, PipelineScheduler, pipeline_parallel_size=stages, async_scheduling=ahead)
    for stages, ahead in ((2, False), (2, True), (3, False), (4, True))
]
IN_STEP, AHEAD = partial(made, Scheduler), partial(made, AsyncScheduler)
DYNAMIC = partial(made, DynamicScheduler)
PLAIN = ["fcfs", "fcfs", "static", "contiguous"]


def play(load: Workload, *args: object, **options: object) -> tuple[Log, Client]:
    """Run a workload with predictions that err."""
    return play_with(load, *args, sigma=0.5, **options)  # type: ignore[arg-type]


# Few distinct values on purpose: arrivals then fall on the very ends of steps.
times = st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0, 1.0, 2.0, 2.5, 3.0, 7.0]) | st.floats(0, 20)
clocks = st.builds(
    Clock,
    base=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    per_token=st.sampled_from([0.0, 0.01, 0.003]),
    per_context=st.sampled_from([0.0, 0.001, 0.0007]),
)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Up to 25 requests: open or closed loop, sessions, shared prompts, quoted answers."""
    n = draw(st.integers(1, 25))
    arrival = sorted(draw(st.lists(times, min_size=n, max_size=n)))
    prompts = draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    outputs = draw(st.lists(st.integers(1, 30), min_size=n, max_size=n))
    load = Workload(np.array(arrival), np.array(prompts), np.array(outputs))
    if draw(st.booleans()):
        load.priority = np.array(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
        load.client = draw(st.lists(st.sampled_from(["a", "b"]), min_size=n, max_size=n))
    if draw(st.booleans()):
        most = st.lists(st.integers(0, 40), min_size=n, max_size=n)
        load.max_tokens = np.array(draw(most), np.int64)
    if draw(st.booleans()):
        load.max_concurrency = draw(st.integers(1, 6))
    if draw(st.booleans()):
        load.segments = []
        for i, tokens in enumerate(prompts):
            load.segments.append(_contents(draw, load, i, tokens))
    if n > 1 and draw(st.booleans()):
        _link(draw, load)
    if draw(st.booleans()):
        load.client = draw(st.lists(st.sampled_from("abc"), min_size=n, max_size=n))
    load.check()
    return load


def _contents(draw: st.DrawFn, load: Workload, i: int, tokens: int) -> Segments:
    """A prompt's contents: a shared beginning, or an earlier prompt and its answer; then its own.

    The answer may still be on its way.
    """
    assert load.segments is not None
    earlier = draw(st.integers(-2, i - 1))
    if earlier >= 0:
        parts = [*(load.segments[earlier] or ()), (("out", earlier), 40)]
    else:
        parts = [(draw(st.sampled_from("ab")), draw(st.integers(0, 40)))]
    cut = []
    for name, count in (*parts, (("in", i), tokens)):
        if take := min(count, tokens):
            cut.append((name, take))
        tokens -= take
    return tuple(cut)


def _link(draw: st.DrawFn, load: Workload) -> None:
    """Turn the second half of the requests into later turns of the first half."""
    half = len(load) // 2
    load.after = np.full(len(load), -1)
    load.delay = np.zeros(len(load))
    for i in range(len(load) - half, len(load)):
        load.arrival[i] = nan
        load.after[i] = i - (len(load) - half)
        load.delay[i] = draw(st.sampled_from([0.0, 0.5, 1.3]))


PRICES = Prices(lambda tokens: 0.1 * tokens, lambda blocks: 1.0, lambda blocks: 0.1 * blocks)
"""Swap pays from 10 tokens on, a little later with larger blocks."""


@st.composite
def engines(draw: st.DrawFn, pipelines: bool = True) -> Callable[[], Scheduler]:
    """Any scheduler with any options, from little memory to plenty; with stages or without."""
    seats = draw(st.integers(1, 8))
    budget = draw(st.integers(max(seats, 3), 48))
    size = draw(st.sampled_from([1, 2, 4, 16]))
    num_blocks = draw(st.integers(2, 300))
    limits = {"max_num_seqs": seats, "max_num_batched_tokens": budget, "max_model_len": 64}
    kind = draw(st.sampled_from([*PLAIN, *POLICY_TRIALS, *["other"] * 4]))
    if kind == "other":
        return draw(other_engines(seats, budget, size, num_blocks))
    if kind == "static":
        batch = draw(st.integers(1, seats))
        timeout = draw(st.sampled_from([0.0, 0.1, 0.5, 3.0]))
        deliver = draw(st.sampled_from(["each", "batch"]))
        tables = draw(st.booleans())
        return lambda: made(
            Static,
            BlockManager(num_blocks, size, False) if tables else BlockCounter(num_blocks, size),
            batch_size=batch,
            timeout=timeout,
            deliver=deliver,
            **limits,
        )
    if kind == "contiguous":
        return lambda: made(Scheduler, BlockCounter(max(2, num_blocks // 20), 64), **limits)
    memory = draw(st.sampled_from(["counted", "named", "own"]))
    caching = draw(st.booleans())
    options = {
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3, 7])),
        "long_prefill_token_threshold_adaptive": draw(st.booleans()),
        "prefill_schedule_interval": draw(st.sampled_from([1, 1, 2, 5])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.2])),
        "min_decode_blocks": draw(st.sampled_from([0, 0, 2])),
        "min_decode_blocks_scope": draw(st.sampled_from(["running", "newcomer"])),
        "reserve_output_tokens": draw(
            st.sampled_from([None, None, None, 0, 5, "max_tokens", "max_model_len"])
        ),
    }
    policy = POLICY_TRIALS.get(kind, lambda: None)
    mechanism = draw(st.sampled_from([IN_STEP, AHEAD, *PIPELINES * pipelines]))
    releases = [*families().values()]
    if hasattr(policy(), "victim"):  # what the oldest do to those they pick cannot be simulated
        releases = releases[1:]
    rules = rules_of(draw(st.sampled_from([NEWEST_RELEASE, NEWEST_RELEASE, *releases])))
    options |= {
        "rules": rules,
        "enable_chunked_prefill": draw(st.sampled_from([True, True, False])),
    }
    if not options["enable_chunked_prefill"]:
        limits["max_num_batched_tokens"] = limits["max_model_len"]
    tier = draw(st.sampled_from([None, None, 5, 1000]))
    if any(hasattr(policy(), hook) for hook in DYNAMIC_HOOKS):
        mechanism = draw(st.sampled_from([DYNAMIC, partial(made, AsyncDynamicScheduler)]))
    one_batch = mechanism in (IN_STEP, DYNAMIC)  # in flight
    tree = one_batch and draw(st.sampled_from([False, False, True]))
    if one_batch:
        options["swap_blocks"] = draw(st.sampled_from([0, 0, 5, 1000]))
        options["swap_prices"] = draw(st.sampled_from([None, PRICES]))

    def make() -> Scheduler:
        if tree:
            blocks = RadixCache(num_blocks, size)
        elif memory == "named":
            blocks = BlockManager(num_blocks, size, caching, tier and HostTier(tier))
        else:
            blocks = (UnsharedPrefixCache if memory == "own" else BlockCounter)(num_blocks, size)
        return mechanism(blocks, policy=policy(), **limits, **options)

    return make


def assert_same_steps(leapt: Log, stepped: Log) -> None:
    """Each row of a run that leaps stands for steps of one that does not."""
    assert _unroll(leapt) == _unroll(stepped)
    rows, steps = leapt.steps, stepped.steps
    firsts = np.concatenate([[0], np.cumsum(rows["steps"])])
    assert firsts[-1] == len(steps)
    same = steps[firsts[:-1]]
    for name in ("start", "kv_tokens", "running", "blocks_used", "preempted"):
        assert (rows[name] == same[name]).all(), name
    assert (rows["end"] == steps["end"][firsts[1:] - 1]).all()
    assert (np.repeat(rows["running"], rows["steps"]) == steps["running"]).all()
    assert rows["preempted"].sum() == steps["preempted"].sum()
    assert expand_steps(leapt)["kv_blocks_used"].tolist() == steps["blocks_used"].tolist()
    one, other = (dict(take_sums(sums_of(log))) for log in (leapt, stepped))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert isclose(value, other[name], rel_tol=1e-9), name


def sums_of(log: Log) -> StepSums:
    """Add up a log's steps, as the gauges of a summary do."""
    sums = StepSums()
    sums.add(log)
    return sums


def _unroll(log: Log) -> list[tuple[float, ...]]:
    """One tuple per step: what it computed."""
    steps = []
    for row in log.steps:
        slots = int(row["decodes"] + row["wasted"])
        for i in range(int(row["steps"])):
            context = int(row["context"]) + (i * slots if row["steps"] > 1 else 0)
            steps.append((*(int(row[k]) for k in ("decodes", "wasted", "prefill_tokens")), context))
    return steps


@given(workloads(), engines(), clocks)
@settings(max_examples=400, deadline=None)
def test_leaping_and_stepwise_runs_agree_to_the_last_bit(load, engine, clock) -> None:
    """Test number one: the leap is an optimisation and nothing else."""
    leapt, _ = play(load, engine(), clock)
    stepped, _ = play(load, engine(), clock, leap=False)
    assert leapt.request_rows == stepped.request_rows
    assert leapt.run_rows == stepped.run_rows
    assert leapt.tick_ends == stepped.tick_ends
    assert leapt.seat_rows == stepped.seat_rows
    assert_same_steps(leapt, stepped)


@given(workloads(), engines(), clocks)
@settings(max_examples=200, deadline=None)
def test_every_request_ends_once_with_the_tokens_it_asked_for(load, engine, clock) -> None:
    """Also: rejected are those that cannot fit, and nobody else."""
    scheduler = engine()
    log, client = play(load, scheduler, clock)
    rows = np.sort(log.requests, order="id")
    assert rows["id"].tolist() == list(range(len(load)))
    assert client.done == len(load)
    asked = answers(load, scheduler)
    rejected = rows["reason"] == REASONS.index("rejected")
    assert (rows["generated"][~rejected] == asked[~rejected]).all()
    assert (rows["generated"][rejected] == 0).all()
    assert (rejected == rejections(load, scheduler)).all()


@given(workloads(), engines(), clocks)
@settings(max_examples=200, deadline=None)
def test_runs_hold_every_token(load, engine, clock) -> None:
    """The runs of a request add up to its tokens, and their times are those of its row."""
    log, _ = play(load, engine(), clock)
    tokens: dict[int, list[float]] = {}
    for run in log.runs:
        first, ticks = int(run["first_tick"]), int(run["ticks"])
        times_of = tokens.setdefault(int(run["id"]), [])
        times_of += [float(run["start"]), *log.tick_ends[first : first + ticks]]
    computed = {row["id"]: (row["first_token"], row["end"]) for row in log.seats}
    for row in log.requests:
        times_of = tokens.get(int(row["id"]), [])
        assert len(times_of) == row["generated"]
        assert times_of == sorted(times_of)
        if times_of:
            given = row["first_token"], row["finish"]
            assert (times_of[0], times_of[-1]) == computed.get(row["id"], given)


@given(workloads(), engines(), clocks)
@settings(max_examples=200, deadline=None)
def test_no_step_goes_over_a_limit_and_nothing_is_left_behind(load, engine, clock) -> None:
    """Budget, seats, blocks, a clock that never goes back; at the end all blocks are free."""
    scheduler = engine()
    host = scheduler.swap_space.free
    log, _ = play(load, scheduler, clock)
    assert scheduler.swap_space.free == host
    rows = log.steps
    computed = rows["prefill_tokens"] + rows["decodes"] + rows["wasted"]
    assert (computed <= scheduler.max_num_batched_tokens).all()
    assert (computed > 0).all()
    assert (rows["running"] <= scheduler.max_num_seqs).all()
    assert (rows["blocks_used"] <= scheduler.blocks.usable).all()
    assert (rows["kv_tokens"] >= 0).all()
    assert (rows["kv_tokens"] <= rows["blocks_used"] * scheduler.blocks.block_size).all()
    assert (rows["end"] > rows["start"]).all()
    assert (rows["start"][1:] >= rows["end"][:-1]).all()
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.decodes.count == scheduler.decodes.context == 0
    assert not any(scheduler.decodes.phases)
    assert scheduler.blocks.free == scheduler.blocks.usable
    assert scheduler.blocks.shared == scheduler.blocks.reserved == 0


@given(workloads(), engines(), clocks)
@settings(max_examples=60, deadline=None)
def test_the_same_run_twice_gives_the_same_bytes(load, engine, clock) -> None:
    """No state leaks from one run to the next."""
    one, _ = play(load, engine(), clock)
    two, _ = play(load, engine(), clock)
    assert one.step_rows == two.step_rows
    assert one.request_rows == two.request_rows


@given(workloads(), engines(), clocks, st.booleans())
@settings(max_examples=60, deadline=None)
def test_an_environment_that_skips_events_gives_the_same_bytes(load, engine, clock, leap) -> None:
    """What an engine does between two events of others is nobody else's business."""
    one, _ = play(load, engine(), clock, leap=leap)
    two, _ = play(load, engine(), clock, leap=leap, env=simpy.Environment())
    assert one.step_rows == two.step_rows
    assert one.request_rows == two.request_rows
    assert one.run_rows == two.run_rows
