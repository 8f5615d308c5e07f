"""`engine: NAME` and what it fills in."""

from pathlib import Path
from typing import Any

import pytest

from headway.report.text import run_table
from simulator.build.policy_table import POLICIES
from simulator.core.engine_config import EngineConfig
from simulator.core.request import Request
from simulator.scenario.engine_defaults import (
    describe_engine,
    with_defaults,
)
from simulator.scenario.load import check_scenario, load_scenario
from simulator.scenario.scenario import Scenario
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from simulator.util.yaml_lines import SourceMap


def check(**blocks: object) -> Scenario:
    return check_scenario(blocks, SourceMap("s.yaml", {}))


@pytest.mark.parametrize(
    ("gpu", "tokens", "seqs"),
    [
        ("A100-80GB", 2048, 256),
        ("L4", 2048, 256),
        ("H100-80GB", 8192, 1024),
        ("H200", 8192, 1024),
        ("B200", 16384, 1024),
    ],
)
def test_vllm_sizes_its_batches_by_gpu(gpu: str, tokens: int, seqs: int) -> None:
    """EngineArgs.get_batch_defaults of vLLM 0.33, as its server calls it."""
    engine = check(engine="vllm", gpu={"name": gpu}).engine
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (tokens, seqs)
    assert engine.async_scheduling


def test_what_is_given_beside_the_name_stands() -> None:
    """Also a value that is the default without the name."""
    engine = check(engine={"name": "vllm", "max_num_seqs": 64, "async_scheduling": False}).engine
    assert (engine.max_num_seqs, engine.async_scheduling) == (64, False)
    assert engine.max_num_batched_tokens == 2048


def test_the_resolved_scenario_is_the_same_scenario() -> None:
    """All keys are written out, whoever filled them in."""
    scenario = check(engine="vllm", gpu={"name": "H200"})
    again = check(**{k: v for k, v in scenario.resolved().items() if k != "cost"})
    assert again.engine == scenario.engine


def test_a_named_engine_takes_overrides(tmp_path: Path) -> None:
    """`engine: vllm` is a block with one key, in the file as on the command line."""
    path = tmp_path / "s.yaml"
    path.write_text("engine: vllm\n")
    assert load_scenario(path, ["engine.max_num_seqs=7"]).engine.max_num_seqs == 7
    path.write_text("seed: 1\n")
    loaded = load_scenario(path, ["engine=vllm", "engine.max_num_seqs=7"])
    assert (loaded.engine.name, loaded.engine.max_num_seqs) == ("vllm", 7)


def test_a_named_gpu_takes_overrides(tmp_path: Path) -> None:
    """`gpu: L4` is a block with one key, in groups of a cluster, too."""
    path = tmp_path / "s.yaml"
    path.write_text("gpu: L4\n")
    assert load_scenario(path, ["engine.tensor_parallel_size=2"]).gpu.count == 2
    loaded = load_scenario(path, ["gpu=H100-SXM", "gpu.carbon_intensity=7"])
    assert (loaded.gpu.name, loaded.gpu.carbon_intensity) == ("H100-SXM", 7)
    path.write_text("gpu: L4\ncluster: {groups: {a: {}, b: {gpu: H200, engine: sglang}}}\n")
    loaded = load_scenario(path, ["cluster.groups.b.gpu.carbon_intensity=8"])
    b = loaded.of_group("b")
    assert (b.gpu.name, b.gpu.carbon_intensity, b.engine.name) == ("H200", 8, "sglang")
    assert loaded.of_group("a").gpu.name == "L4"
    path.write_text("seed: 1\ngpu: H1000\n")
    told = r"s.yaml:2: gpu.name: no GPU 'H1000': take a similar one, as H[^,]+(, [^,]+){0,2}$"
    with pytest.raises(HeadwayError, match=told):
        load_scenario(path)


@pytest.mark.parametrize(
    ("gpu", "engine", "size"),
    [
        ("{name: H100, count: 4}", "{}", 4),
        ("{name: H100, count: 4}", "{pipeline_parallel_size: 2}", 2),
        ("{name: H100, count: 8}", "{data_parallel_size: 2}", 4),
        ("{name: H100, count: 1}", "{}", 1),
        ("H100", "{tensor_parallel_size: 2}", 2),
    ],
)
def test_gpus_are_shared_out_by_tensors(write, gpu: str, engine: str, size: int) -> None:
    """As `vllm serve` users expect of a server with four GPUs; groups of a cluster alike."""
    text = f"model: llama-3-8b\ngpu: {gpu}\nengine: {engine}\n"
    loaded = load_scenario(write(text))
    assert loaded.engine.tensor_parallel_size == size
    assert loaded.gpu.count == loaded.engine.gpus
    groups = f"model: llama-3-8b\ncluster: {{groups: {{a: {{gpu: {gpu}, engine: {engine}}}}}}}\n"
    assert load_scenario(write(groups)).of_group("a").engine.tensor_parallel_size == size


def test_an_unknown_engine_is_told_with_its_line(tmp_path: Path) -> None:
    """And an unknown GPU is told once."""
    path = tmp_path / "s.yaml"
    path.write_text("seed: 1\nengine: vlm\n")
    with pytest.raises(
        HeadwayError, match=r"s.yaml:2: engine.name: must be 'vllm', 'textbook', .*, not 'vlm'"
    ):
        load_scenario(path)
    with pytest.raises(HeadwayError) as told:
        check(engine="vllm", gpu={"name": "H1000"})
    assert len(told.value.messages) == 1


def test_other_values_pass_untouched() -> None:
    """They are checked where all values are."""
    for engine in (None, 3, [], {"name": "x"}, {"name": 7, "max_num_seqs": 2}):
        assert with_defaults(engine, None) == engine


def test_without_a_name_it_is_vllm_as_it_starts_on_that_gpu() -> None:
    """Whatever else is given; with a version, that release."""
    for block in (None, {}, {"name": None}):
        assert check(engine=block).engine == check(engine="vllm").engine == EngineConfig()
    bare = check(gpu={"name": "H100-80GB"}).engine
    assert (bare.max_num_seqs, bare.max_num_batched_tokens) == (1024, 8192)
    assert bare.async_scheduling
    old = check(engine={"version": "0.11", "max_num_seqs": 9}).engine
    assert (old.async_scheduling, old.gpu_memory_utilization, old.max_num_seqs) == (False, 0.9, 9)
    groups = {"a": None, "b": {"gpu": {"name": "H200"}}}
    fleet = check(cluster={"groups": groups})
    assert [fleet.of_group(name).engine.max_num_seqs for name in "ab"] == [256, 1024]


def test_the_textbook_is_alike_on_every_gpu_and_takes_one_step_after_another() -> None:
    """By vLLM's rules, those of an older version, too."""
    for gpu in ("A100-80GB", "H100-80GB", "B200"):
        engine = check(engine="textbook", gpu={"name": gpu}).engine
        assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (256, 2048)
        assert not engine.async_scheduling
    old = check(engine={"name": "textbook", "version": "0.18"}).engine
    assert not old.scheduler_reserve_full_isl


@pytest.mark.parametrize(
    "more",
    [
        {"prefix_cache": "radix"},
        {"preemption_mode": "swap"},
        {"scheduling_policy": "sarathi"},
    ],
)
def test_what_needs_the_step_before_is_synchronous_unless_told_otherwise(more: dict) -> None:
    oracle = {"kind": "oracle"}
    assert not check(engine=more, predictor=oracle).engine.async_scheduling
    with pytest.raises(HeadwayError, match="async_scheduling"):
        check(engine={**more, "async_scheduling": True}, predictor=oracle)


@pytest.mark.parametrize(
    ("model", "more", "gives_back"),
    [
        ("gpt-oss-20b", {}, True),
        ("gemma-3-27b", {"scheduling_policy": "sjf", "async_scheduling": False}, True),
        ("gpt-oss-20b", {"version": "0.10.2"}, True),
        ("gpt-oss-20b", {"version": "0.9.0"}, False),
        ("gpt-oss-20b", {"name": "textbook"}, False),
        ("gpt-oss-20b", {"preemption_mode": "swap"}, False),
        ("gpt-oss-20b", {"scheduling_policy": "srpt"}, False),
        ("llama-4-scout", {"tensor_parallel_size": 8}, False),  # chunks
        ("llama-3-8b", {}, False),
    ],
)
def test_windows_are_given_back_where_vllm_does_and_that_is_simulated(
    model: str, more: dict, gives_back: bool
) -> None:
    engine = check(engine=more, model=model, predictor={"kind": "oracle"}).engine
    assert engine.disable_hybrid_kv_cache_manager is not gives_back
    if not more:
        assert engine.async_scheduling
        assert engine.enable_prefix_caching


class Displacing:
    """A policy of the user's own that lets one request displace another."""

    def key(self, request: Request) -> float:
        return request.arrival

    def displaces(self, waiting: Request, running: object) -> None:
        return None


class Own(Scheduler):
    """A scheduler of the user's own."""


def test_policies_of_the_users_own_are_asynchronous_and_schedulers_are_not() -> None:
    """Of the scenario's engine and of a group's."""
    here = {name: f"{__name__}:{name}" for name in ("Displacing", "Own")}
    for name, overlaps in (("Displacing", True), ("Own", False)):
        assert check(engine={"scheduling_policy": here[name]}).engine.async_scheduling == overlaps
    groups = {"a": {"engine": {"scheduling_policy": here["Own"]}}, "b": None}
    fleet = check(cluster={"groups": groups})
    assert [fleet.of_group(name).engine.async_scheduling for name in "ab"] == [False, True]
    with pytest.raises(HeadwayError, match="Own schedules a step when the one before"):
        check(engine={"scheduling_policy": here["Own"], "async_scheduling": True})


def test_a_run_tells_its_engine_which_defaults_applied_and_what_was_set() -> None:
    """Whoever fills the defaults in: the resolved scenario tells the same."""
    raw: dict[str, Any] = {"gpu": {"name": "H100-80GB"}, "workload": {"num_prompts": 2}}
    scenario = check(engine={"max_num_seqs": 64, "block_size": 16}, **raw)
    (told,) = run(scenario).summary()["headway"]["engines"]
    assert (told["name"], told["follows"]) == ("vllm", "vLLM 0.33 (newest known)")
    assert told["set"] == {"max_num_seqs": 64}
    assert told["defaults"]["max_num_batched_tokens"] == 8192
    again = check(**{k: v for k, v in scenario.resolved().items() if k != "cost"})
    assert run(again).summary()["headway"]["engines"] == [told]
    text = run_table(run(scenario).summary())
    assert "Engine: vLLM 0.33 (newest known)\n  Defaults on H100-80GB: max_num_batched" in text
    assert "\n  Set: max_num_seqs 64\n" in text
    for name, follows in (("textbook", "textbook, with the rules"), ("sglang", "SGLang 0.5.23")):
        (one,) = run(check(engine=name, **raw)).summary()["headway"]["engines"]
        assert one["follows"].startswith(follows)
        assert not one["set"]


@pytest.mark.parametrize("policy", POLICIES)
def test_vllm_is_asynchronous_under_the_policies_that_can_be(policy: str) -> None:
    """Whoever asks for the impossible is told so by name, with the key to change."""
    block = {"name": "vllm", "scheduling_policy": policy}
    oracle = {"kind": "oracle"}
    overlaps = check(engine=block, predictor=oracle).engine.async_scheduling
    alone = {"static", "hf-static", "orca", "fcfs-v0", "sarathi", "trtllm", "tgi", "fastgen"}
    assert overlaps == (policy not in alone)
    if overlaps:
        return
    what = rf"engine.async_scheduling: {policy} schedules a step when the one before has ended"
    with pytest.raises(HeadwayError, match=what):
        check(engine=block | {"async_scheduling": True}, predictor=oracle)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
def test_async_scheduling_is_a_little_faster_and_serves_everybody(policy: str) -> None:
    """Same tokens; leaping and stepwise agree."""
    scenario = check(
        engine={"name": "vllm", "scheduling_policy": policy, "num_gpu_blocks_override": 200},
        workload={"num_prompts": 60, "request_rate": 20, "input_len": 100, "output_len": 80},
    )
    leapt, stepped = run(scenario), run(scenario, stepwise=True)
    assert leapt.logs[0].request_rows == stepped.logs[0].request_rows
    assert leapt.logs[0].run_rows == stepped.logs[0].run_rows
    assert leapt.logs[0].tick_ends == stepped.logs[0].tick_ends
    assert (leapt.logs[0].requests["generated"] == 80).all()
    assert len(leapt.logs[0].steps) < len(stepped.logs[0].steps)
    assert leapt.logs[0].steps["preempted"].sum() == leapt.logs[0].requests["preemptions"].sum()


def test_what_vllm_would_have_and_is_not_simulated_is_named() -> None:
    """A window beside swapping."""

    def missing(model: str, **engine: object) -> object:
        checked = check(engine=engine, model=model).engine
        return describe_engine(checked, "H100-80GB", model).get("not_simulated")

    assert missing("gpt-oss-20b", preemption_mode="swap") == {
        "disable_hybrid_kv_cache_manager": False
    }
    assert missing("gpt-oss-20b") is None


def test_sglangs_decodes_do_not_count_towards_the_tokens_of_a_step() -> None:
    """Its chunked_prefill_size may be less than its seats, vLLM's budget may not."""
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 32}
    assert run(check(engine={"name": "sglang", **sizes}, workload={"num_prompts": 5})).logs
    with pytest.raises(HeadwayError, match="every running request wants a token"):
        check(engine={"name": "vllm", **sizes})
