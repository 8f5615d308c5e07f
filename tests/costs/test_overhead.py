"""What an engine adds to its kernels: by version, and the wait for the longest sequence."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.executor import Timing
from simulator.core.request import Chunk, Request, Step
from simulator.costs.noise import Noise
from simulator.costs.overhead import Overhead, read_version, samples_truncated
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.split import SplitCost
from simulator.kv_cache.block_manager import BlockManager
from simulator.models.gpus import find_gpu
from simulator.models.load import load_model
from simulator.scenario.load import check_scenario
from simulator.scenario.resolve import resolve
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from simulator.util.yaml_lines import SourceMap
from simulator.workload.workload import Workload
from tests.support.costs import overhead_of, with_overhead
from tests.support.engines import made, play, workload
from tests.support.with_fields import with_fields

KERNELS = PiecewiseCost(dense=[[1, 1.0]])
PROMPT = Chunk(Request(0, 0.0, 4, 4), 0, 4)


def split(*, kv_heads: int, **terms: float) -> SplitCost:
    """2 multiprocessors, 4 thread blocks; 0.125 s a key."""
    return SplitCost(dense=[[1, 1.0]], per_key=0.125, kv_heads=kv_heads, multiprocessors=2, **terms)


def test_wrong_terms_of_the_wait_are_told() -> None:
    with pytest.raises(ValueError, match="kv_heads: must be at least 1"):
        split(kv_heads=0)
    with pytest.raises(ValueError, match="per_key: "):
        SplitCost(dense=[[1, 1.0]], per_key=-1.0)


def test_who_does_not_tell_the_longest_has_the_mean() -> None:
    cost = split(kv_heads=4)
    assert cost.execute(Step([], 2, 48)).seconds == 1.0 + 0.125 * 24
    assert cost.execute(Step([PROMPT])).seconds == 1.0
    assert cost.decode_seconds(np.array([2, 1]), np.array([48, 48])).tolist() == [4.0, 1.0 + 6.0]


def test_a_wait_beyond_the_mean_is_for_what_tables_of_one_length_lack() -> None:
    """Of 10 and 14 keys, 12 in the mean, the longer has 2 more; 4 blocks: 4 pairs are enough."""
    step = with_fields(Step([], 2, 24), longest=14)
    assert split(kv_heads=2, beyond_mean=True).execute(step).seconds == 1.0 + 0.125 * 2
    assert split(kv_heads=1, beyond_mean=True).execute(step).seconds == 1.0
    assert split(kv_heads=2, beyond_mean=True).leap(step, 2).seconds == [1.25, 1.25]
    assert split(kv_heads=2, beyond_mean=True).execute(Step([], 2, 24)).seconds == 1.0
    assert split(kv_heads=2).execute(step).seconds == 1.0 + 0.125 * 24 * 2 / 4


def test_the_gpu_waits_for_each_sequence_and_launches_the_layers_of_prompts() -> None:
    """Three sequences: 0.25 + 3 x 0.5 s; 32 layers of 0.5 s each where there is a prompt."""
    terms = Overhead(step=0.25, per_sequence=0.5, prompt_per_layer=0.5)
    for overlapped in (False, True):
        cost = with_overhead(terms, KERNELS, overlapped=overlapped, layers=32)
        assert type(cost) is PiecewiseCost
        assert cost.execute(Step([], 3, 9)).seconds == 1.0 + 1.75
        assert cost.execute(Step([PROMPT], 2, 9)).seconds == 1.0 + 1.75 + 16.0
    waiting = Overhead(step=0.25, per_sequence=0.5, host=2.0)
    hidden = with_overhead(waiting, KERNELS, overlapped=True)
    assert (
        hidden.leap(Step([], 3, 9), 2).seconds == [2.0 + 1.75] * 2
    )  # the host takes longer than kernels


@pytest.mark.parametrize(
    ("version", "asynchronous", "step"),
    [
        ("0.11", False, 0.75e-3),
        ("v0.10.2", True, 0.5e-3),
        ("0.13.9", True, 0.5e-3),
        ("0.14.0", True, 0.1e-3),
        ("0.99", True, 0.1e-3),
        (None, True, 0.1e-3),
        ("0.2", False, 0.75e-3),
    ],
)
def test_a_version_takes_the_newest_model_that_is_not_newer(
    version: str | None, asynchronous: bool, step: float
) -> None:
    assert overhead_of(version, asynchronous=asynchronous).step == step


def test_on_rtx_gpus_the_profile_has_what_else_a_step_waits_for() -> None:
    terms = overhead_of("0.19", asynchronous=True, gpu="RTX-PRO-6000")
    assert (terms.step, terms.per_sequence, terms.host) == (0.1e-3, 0.0, 2e-3)
    assert overhead_of("0.19", gpu="RTX-PRO-6000") == overhead_of("0.19", gpu="L40S")
    scaled = resolve(engine_of(gpu="A6000", version="0.19")).cost
    assert isinstance(scaled, SplitCost)
    assert scaled.overhead == 0.1e-3
    cost = resolve(engine_of(gpu="RTX-PRO-6000")).cost
    assert isinstance(cost, SplitCost)
    assert (cost.beyond_mean, cost.multiprocessors) == (True, 188)


STEPS = (  # GPUs, tokens of a prompt, decodes with 4,100 tokens each, measured ms
    *((1, 0, 1, 13.5), (1, 0, 4, 13.95), (1, 0, 8, 14.55), (1, 128, 0, 16.0), (1, 1024, 0, 53.5)),
    *((1, 4096, 0, 204.0), (8, 0, 1, 4.52), (8, 0, 4, 4.62), (8, 0, 8, 4.72), (8, 0, 14, 5.0)),
    *((8, 1024, 0, 17.5), (8, 4096, 0, 49.1)),
)
"""Of Qwen3-32B on B200 under vLLM 0.20.1, by its own clock: AIConfigurator (NVIDIA, Apache-2.0),
fpm_golden_runs."""


@pytest.mark.parametrize(("gpus", "prompt", "decodes", "measured"), STEPS)
def test_steps_of_a_server_of_b200s(gpus: int, prompt: int, decodes: int, measured: float) -> None:
    """Nothing was fitted to them. A prompt waited 22 ms more when all caches had FlashInfer's."""
    model = {"model": "qwen3-32b", "gpu": {"name": "B200", "count": gpus}}
    engine = {"name": "vllm", "version": "0.20", "tensor_parallel_size": gpus}
    engine["generation_config"] = "vllm"
    cost = resolve(check_scenario({**model, "engine": engine}, SourceMap("b200", {}))).cost
    chunks = [Chunk(PROMPT.request, 0, prompt)] if prompt else []
    assert 1e3 * cost.execute(Step(chunks, decodes, 4100 * decodes)).seconds == pytest.approx(
        measured, rel=0.08
    )


def test_prompts_on_b200_are_planned_on_the_host_beside_an_fp8_cache_alone() -> None:
    """To 0.11.0 beside any."""
    told = [
        overhead_of(version, gpu="B200", kv_cache_dtype=cache).prompt_per_layer
        for version in ("0.11.0", "0.11.1", "0.15", "0.20")
        for cache in ("auto", "fp8")
    ]
    assert told == [250e-6, 250e-6, *[30e-6, 300e-6] * 3]


def test_a_step_with_prompts_is_no_faster_than_its_launches() -> None:
    """Unlike a graph of decodes: 32 layers of 0.5 s, waits beside, unless kernels take longer."""
    terms = Overhead(step=0.25, per_sequence=0.5, launch_per_layer=0.5, captured=2)
    cost = with_overhead(terms, KERNELS, overlapped=True, layers=32)
    assert cost.execute(Step([PROMPT], 2, 9)).seconds == 16.0 + 0.25 + 3 * 0.5
    assert cost.execute(Step([], 2, 9)).seconds == 1.0 + 0.25 + 2 * 0.5
    longer = with_overhead(terms, replace(KERNELS, prefill=20.0), overlapped=True, layers=32)
    assert longer.execute(Step([PROMPT], 2, 9)).seconds == 21.0 + 0.25 + 3 * 0.5


def test_only_b200_from_0_14_on_waits_for_the_longest() -> None:
    def waits(version: str, gpu: str, cache: str) -> float:
        engine = overhead_of(version, asynchronous=True, gpu=gpu, kv_cache_dtype=cache)
        return engine.key_per_layer

    assert waits("0.15", "B200", "fp8") > 0
    assert waits("0.15", "B200", "auto") == 0
    assert waits("0.12", "B200", "fp8") == 0
    assert waits("0.15", "H100-80GB", "fp8") == 0
    assert read_version("vllm/vllm-openai:v0.10.2") == (0, 10, 2)
    assert read_version("0.11", 0) == (0, 11, 0)
    assert read_version("nightly") is None


def engine_of(gpu: str = "B200", **words: Any) -> Any:
    raw = {"gpu": {"name": gpu}, "engine": {"name": "vllm", **words}}
    return check_scenario(raw, SourceMap("test", {}))


def test_a_scenario_names_the_version() -> None:
    """It decides the defaults of `name: vllm` and what comes on top of the kernels."""
    old, new = engine_of(version="0.11"), engine_of(kv_cache_dtype="fp8")
    assert (old.engine.async_scheduling, old.engine.gpu_memory_utilization) == (False, 0.9)
    assert (new.engine.async_scheduling, new.engine.gpu_memory_utilization) == (True, 0.92)
    assert type(resolve(old).cost) is PiecewiseCost
    assert resolve(old).cost.overhead == 0.75e-3 + 0.34e-3  # 0.11.2 sorts the logits
    split_cost = resolve(new).cost
    assert isinstance(split_cost, SplitCost)
    assert split_cost.kv_heads == 8
    assert resolve(engine_of(version="0.14", async_scheduling=False)).cost.overhead == 1.09e-3


def test_logits_are_sorted_where_requests_are_sampled_with_top_p() -> None:
    """Three sequences of 128,256 logits, 8 bytes and 2 ns for each."""
    words = {"sampling": 0.125, "sampling_per_logit": 2e-9, "sampling_bytes": 8}
    terms = Overhead(step=0.25, per_sequence=0.5, **words)
    gpu = find_gpu("H100-80GB")
    each = 128256 * (2e-9 + 8 / gpu.bandwidth)
    plain = with_overhead(terms, KERNELS, overlapped=True)
    assert plain.execute(Step([], 3, 9)).seconds == 1.0 + 1.75
    sorts = with_overhead(terms, KERNELS, overlapped=True, sampled=True)
    assert sorts.execute(Step([], 3, 9)).seconds == pytest.approx(1.0 + 1.75 + 0.125 + 3 * each)


def test_vllm_sorted_the_logits_before_0_17_unless_told_otherwise() -> None:
    def waits(**words: str) -> float:
        return resolve(engine_of(**words)).cost.overhead_per_sequence

    sorts = 128256 * (95e-12 + 95 / find_gpu("B200").bandwidth)
    assert waits(version="0.15") == pytest.approx(sorts)
    assert waits(version="0.15", generation_config="vllm") == 0
    assert waits(version="0.17") == 10e-6
    assert samples_truncated(load_model("mistral-nemo"), "auto") is False


def test_ranks_wait_for_one_another_in_each_layer() -> None:
    """On H100, from 0.11.1 to 0.16, where it was measured."""
    terms = overhead_of("0.15", asynchronous=True, gpu="H100-80GB")
    one, two = (
        with_overhead(terms, KERNELS, overlapped=True, tensor_parallel_size=size, layers=32)
        .execute(Step([], 3, 9))
        .seconds
        for size in (1, 2)
    )
    assert two - one == pytest.approx(32 * 4.8e-6)
    assert overhead_of("0.10", gpu="H100-80GB").ranks_per_layer == 0
    assert overhead_of("0.15", gpu="B200").ranks_per_layer == 0


@pytest.mark.parametrize(
    ("gpu", "gpus", "more"), [("H200", (4, 8), 70e-6), ("B200", (2, 4), 64e-6)]
)
def test_nccl_added_up_the_prompts_of_many_gpus(
    gpu: str, gpus: tuple[int, int], more: float
) -> None:
    """To 0.10.2; then symmetric memory was on, whose times the profiles have."""
    terms = replace(overhead_of("0.10.2", asynchronous=True, gpu=gpu), launch_per_layer=0.0)
    few, many = (
        with_overhead(terms, KERNELS, overlapped=True, tensor_parallel_size=size, layers=32)
        for size in gpus
    )
    prompts, decodes = Step([PROMPT], 2, 9), Step([], 3, 9)
    assert many.execute(prompts).seconds - few.execute(prompts).seconds == pytest.approx(32 * more)
    assert many.execute(decodes).seconds == few.execute(decodes).seconds
    assert overhead_of("0.11.0", gpu=gpu).nccl_per_layer == 0


@st.composite
def loads(draw: st.DrawFn) -> Workload:
    rows = [
        (k * draw(st.sampled_from([0, 0.7, 3])), draw(st.integers(1, 40)), draw(st.integers(1, 30)))
        for k in range(draw(st.integers(1, 6)))
    ]
    return workload(*sorted(rows))


@given(loads(), st.booleans(), st.integers(3, 16), st.booleans())
@settings(max_examples=60, deadline=None)
def test_leaps_with_the_longest_are_steps(
    load: Workload, overlaps: bool, blocks: int, noisy: bool
) -> None:
    """To the last bit, with preemptions, in both kinds of engine."""
    cost: Any = split(kv_heads=3, overhead=0.01)
    if noisy:
        cost = Noise(0.5, 0.5).apply(split(kv_heads=3, residuals={"decode": 0.1, "prompts": 0.1}))
    rows = []
    for leap in (True, False):
        kind = AsyncScheduler if overlaps else Scheduler
        manager = BlockManager(blocks * 4, 4, prefix_caching=False)
        scheduler = made(kind, manager, max_num_seqs=3, max_num_batched_tokens=16)
        log, client = play(load, scheduler, cost, leap=leap)
        assert client.done == len(load)
        rows.append((log.requests.tolist(), log.tick_ends))
    assert rows[0] == rows[1]


def test_the_longest_is_told() -> None:
    """Prompts of 9 and 4: the first step decodes 10 and 5 entries, then the longer one ends."""
    seen = []

    class Told:
        reads_longest = True

        def execute(self, step: Step) -> Timing:
            seen.append((step.decodes, step.context, step.longest))
            return Timing(1.0)

    scheduler = Scheduler(BlockManager(99, 4, prefix_caching=False))
    play(workload((0, 9, 3), (0, 4, 4)), scheduler, Told())
    assert seen == [(0, 0, 0), (2, 15, 10), (2, 17, 11), (1, 7, 7)]


def host_of(words: dict[str, Any], **engine: Any) -> Any:
    raw = {"engine": {"name": "vllm", "version": "0.15", **engine}, "host": words}
    return resolve(check_scenario(raw, SourceMap("test", {}))).cost


def test_a_scenario_names_its_host() -> None:
    """Hidden: no step is faster than the host and the gap. Else it takes the version's place."""
    step = Step([], 3, 9)
    hidden = host_of({"per_step": 0.5, "per_sequence": 0.0625, "launch_gap": 0.25})
    sorts = hidden.overhead_per_sequence  # of logits, in either engine
    assert hidden.execute(step).seconds == pytest.approx(
        0.25 + 0.34e-3 + 0.5 + 3 * (0.0625 + sorts)
    )
    assert hidden.host_interval == ()  # what is told is not what the version's interval is of
    version = host_of({}, async_scheduling=False)
    waits = host_of({"per_step": 0.5}, async_scheduling=False)
    assert waits.execute(step).seconds - version.execute(step).seconds == pytest.approx(
        0.5 - 0.75e-3
    )
    assert waits.host_per_sequence == 25e-6  # the version's
    assert host_of({}).host_interval == (1e-3, 4e-3)
    assert hidden.step_interval == ()
    assert host_of({}).step_interval
    told = host_of({"per_step": 0.5, "per_step_interval": [0.25, 1]})
    assert told.host_interval == (0.25, 1.0)


def test_what_a_synchronous_engine_waits_for_is_its_hosts_work() -> None:
    told = Overhead(step=1.0, per_sequence=2.0, host=4.0, host_per_sequence=8.0, sampling=3.0)
    assert told.as_host_work() == Overhead(host=5.0, host_per_sequence=10.0, sampling=3.0)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"per_step": -1}, "host.per_step: must be at least 0, not -1"),
        ({"per_step": 2}, "host.per_step: must be at most 1, not 2"),
        ({"per_step_interval": [3, 1]}, "host.per_step_interval: must be [low, high], s, from 0"),
        ({"per_step_interval": 0.1}, "host.per_step_interval: must be [low, high], s, from 0"),
        ({"step": 1}, "host.step: unknown key"),
    ],
)
def test_a_wrong_host_is_told(words: dict[str, Any], what: str) -> None:
    with pytest.raises(HeadwayError, match=re.escape(what)):
        host_of(words)


@pytest.mark.parametrize(
    ("cost", "host", "what"),
    [
        (
            {"kind": "roofline", "overhead": {"host": 1e-3}},
            "per_step",
            "cost.overhead.host says it",
        ),
        ({"kind": "linear", "base": 1e-3}, "per_step", "host: needs a piecewise cost"),
        ({"kind": "piecewise", "dense": [[1, 1e-3]]}, "launch_gap", "has it within its terms"),
        ({"kind": "piecewise", "dense": [[1, 1]], "host_interval": [2, 1]}, "per_step", "lowest"),
    ],
)
def test_a_host_that_its_cost_contradicts(cost: Any, host: str, what: str) -> None:
    with pytest.raises(HeadwayError, match=what):
        check_scenario({"cost": cost, "host": {host: 1e-3}}, SourceMap("test", {}))


def test_a_group_on_another_gpu_has_another_host() -> None:
    groups = {"same": {}, "other": {"gpu": {"name": "H200"}}, "own": {"host": {"per_step": 0.25}}}
    raw = {"host": {"per_step": 0.5}, "cluster": {"groups": groups}}
    scenario = check_scenario(raw, SourceMap("test", {}))
    hosts = [scenario.of_group(name).host for name in groups]
    assert [host and host.per_step for host in hosts] == [0.5, None, 0.25]


def test_the_summary_tells_the_host() -> None:
    words = {"num_prompts": 3, "input_len": 10, "output_len": 3}
    raw = {"engine": {"name": "vllm", "version": "0.15"}, "workload": words}
    scenario = check_scenario(raw | {"host": {"per_step": 0.25}}, SourceMap("test", {}))
    host = {
        "per_step_s": 0.25,
        "per_sequence_s": 20e-6,
        "per_step_interval_s": None,
        "hidden": True,
    }
    assert run(scenario).summary()["headway"]["host"] == host
