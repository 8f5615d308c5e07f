"""Schedulers of other engines, and engines by name: what they set, refuse and say."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from simulator.build.engines import ENGINES
from simulator.build.policy_table import POLICIES
from simulator.kv_cache.block_manager import BlockCounter
from simulator.models.gpus import GIB, find_gpu
from simulator.models.load import load_model
from simulator.scenario.load import check_scenario
from simulator.scenario.resolve import engine_specs
from simulator.scenario.scenario import Scenario
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.simulation.run import run
from simulator.util.config import Named
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.yaml_lines import SourceMap
from tests.support.budgets import kv_budget
from tests.support.model_configs import write_config


def check(**blocks: object) -> Scenario:
    return check_scenario(blocks, SourceMap("s.yaml", {}))


SMALL = {"num_prompts": 20, "request_rate": 20, "input_len": 100, "output_len": 20}
OTHERS = ["hf-static", "orca", "fcfs-v0", "sarathi", "sglang", "trtllm", "tgi", "fastgen"]


def warned(recwarn: pytest.WarningsRecorder, **engine: object) -> list[str]:
    """Run a small scenario; give its warnings."""
    run(check(engine={"num_gpu_blocks_override": 2000, **engine}, workload=SMALL))
    return [str(w.message) for w in recwarn if issubclass(w.category, HeadwayWarning)]


def test_sglang_can_be_had_without_its_tree() -> None:
    """By one key: the kind of the cache is a default that goes with it."""
    scenario = check(engine={"name": "sglang", "enable_prefix_caching": False}, workload=SMALL)
    assert scenario.engine.prefix_cache == "hash"
    assert run(scenario).summary()["headway"]["prefix_cache_hit_rate"] == 0


@pytest.mark.parametrize("policy", OTHERS)
def test_other_schedulers_run_from_a_scenario(policy: str) -> None:
    """All tokens come out, leaping as stepwise."""
    scenario = check(engine={"scheduling_policy": policy}, workload=SMALL)
    leapt, stepped = run(scenario), run(scenario, stepwise=True)
    assert (leapt.logs[0].requests["generated"] == 20).all()
    assert leapt.logs[0].request_rows == stepped.logs[0].request_rows
    assert len(leapt.logs[0].steps) < len(stepped.logs[0].steps)


class Uninitialised(Scheduler):
    """A scheduler that forgets whose it is."""

    def __init__(self, blocks: object, **options: object) -> None:
        pass


def test_a_scheduler_must_initialise_its_base() -> None:
    told = r"Uninitialised\.__init__ must call super\(\)\.__init__\(blocks, \*\*options\)"
    with pytest.raises(HeadwayError, match=told):
        run(check(engine={"scheduling_policy": f"{__name__}:Uninitialised"}))


class OneByOne(Scheduler):
    """A scheduler that takes a knob by itself, not as one of its limits."""

    def __init__(self, blocks: BlockCounter, max_num_seqs: int, **options: Any) -> None:
        super().__init__(blocks, **options)


def test_a_scheduler_takes_its_knobs_in_one_piece() -> None:
    told = r"OneByOne\.__init__ takes max_num_seqs by itself: it is limits\.max_num_seqs now"
    with pytest.raises(HeadwayError, match=told):
        check(engine={"scheduling_policy": f"{__name__}:OneByOne"})


@pytest.mark.parametrize(
    ("policy", "room"),
    [
        ("orca", "the 99 KV blocks of 16 tokens, with the longest answer that"),
        (
            {"policy": "tgi", "max_batch_total_tokens": 1000},
            r"max_batch_total_tokens \(992\), with",
        ),
        ({"policy": "trtllm", "capacity_scheduler_policy": "STATIC_BATCH"}, "the 99 KV .*, with"),
    ],
)
def test_who_reserves_answers_says_so_where_nobody_fits(policy: object, room: str) -> None:
    """The prompts of 100 tokens fit; 8,192 that a client might ask for do not."""
    engine = {"scheduling_policy": policy, "num_gpu_blocks_override": 100}
    with pytest.warns(HeadwayWarning, match=f"rejected: 20 too large for {room}"):
        run(check(engine=engine, workload=SMALL))


@pytest.mark.parametrize("policy", [name for name in OTHERS if name != "sglang"])
def test_other_schedulers_are_not_scheduled_asynchronously(policy: str) -> None:
    with pytest.raises(HeadwayError, match=r"engine\.async_scheduling: .* schedules a step when"):
        check(engine={"scheduling_policy": policy, "async_scheduling": True})


@pytest.mark.parametrize(
    ("policy", "engine", "told"),
    [
        ("orca", {"max_num_batched_tokens": 4096}, "orca knows no max_num_batched_tokens: "),
        ("sarathi", {"long_prefill_token_threshold": 5}, "sarathi knows no long_prefill_token_"),
        ("fastgen", {"watermark": 0.1}, "fastgen knows no watermark: engine.watermark has no"),
        ("tgi", {"preemption_mode": "swap"}, "tgi computes a preempted request again: engine."),
        ("tgi", {}, "tgi computes prompts whole: engine.max_num_batched_tokens 2,048 is taken as"),
        ("fcfs-v0", {}, "fcfs-v0 computes prompts whole: engine.max_num_batched_tokens 2,048"),
        ("static", {"watermark": 0.1}, "static knows no watermark: engine.watermark has no effect"),
    ],
)
def test_keys_without_effect_are_told(
    policy: str, engine: dict[str, object], told: str, recwarn: pytest.WarningsRecorder
) -> None:
    messages = warned(recwarn, scheduling_policy=policy, **engine)
    assert any(message.startswith(told) for message in messages), messages


def test_keys_with_effect_are_not_told(recwarn: pytest.WarningsRecorder) -> None:
    engine = {"watermark": 0.01, "preemption_mode": "swap", "max_num_batched_tokens": 8192}
    assert warned(recwarn, scheduling_policy="fcfs-v0", **engine) == []


@pytest.mark.parametrize(
    ("policy", "argument", "told"),
    [
        ("orca", {"max_new_tokens": 0}, "max_new_tokens: must be a whole number of at least 1"),
        ("orca", {"watermark": 0.1}, "watermark: orca takes no such argument"),
        ("trtllm", {"capacity_scheduler_policy": "max"}, "capacity_scheduler_policy: must be GUAR"),
        ("sglang", {"order": "sjf"}, "order: must be fcfs, lof, random, lpm, dfs-weight,"),
        ("sglang", {"retraction_policy": "age"}, "retraction_policy: must be length or priority"),
        ("sglang", {"max_prefill_tokens": 0}, "max_prefill_tokens: must be at least 1, not 0"),
        ("sglang", {"schedule_conservativeness": -1.0}, "schedule_conservativeness: must be from"),
        ("tgi", {"waiting_served_ratio": "x"}, "waiting_served_ratio: must be a number, not 'x'"),
        ("tgi", {"max_batch_total_tokens": 3}, "max_batch_total_tokens: must be at least block_"),
        ("tgi", {"max_waiting_tokens": -1}, "max_waiting_tokens: must be at least 0, not -1"),
        ("fcfs-v0", {"scheduler_delay_factor": -1.0}, "scheduler_delay_factor: must be from 0 to"),
        ("hf-static", {"batch_size": 300}, "batch_size: must be from 1 to max_num_seqs"),
    ],
)
def test_bad_arguments_are_told_with_their_field(
    policy: str, argument: dict[str, object], told: str
) -> None:
    with pytest.raises(HeadwayError) as error:
        check(engine={"scheduling_policy": {"policy": policy, **argument}})
    assert len(error.value.messages) == 1
    assert f": engine.scheduling_policy.{told}" in error.value.messages[0]


@pytest.mark.parametrize(
    ("name", "policy", "sizes", "others"),
    [
        ("vllm-v0", "fcfs-v0", (256, 8192, 16), {"watermark": 0.01}),
        ("sglang", "sglang", (2048, 8192, 1), {"prefix_cache": "radix"}),
        ("tensorrt-llm", "trtllm", (2048, 8192, 32), {"enable_chunked_prefill": False}),
        ("tgi", "tgi", (128, 8192, 1), {"enable_prefix_caching": False}),
        ("deepspeed-fastgen", "fastgen", (512, 768, 64), {"enable_prefix_caching": False}),
        ("orca", "orca", (32, 2048, 16), {"allocation": "contiguous"}),
        ("hf", "hf-static", (64, 2048, 16), {"allocation": "contiguous"}),
    ],
)
def test_a_named_engine_sets_scheduler_and_sizes(
    name: str, policy: str, sizes: tuple[int, ...], others: dict[str, object]
) -> None:
    """For Llama-3-8B on an A100; what it resolves to is the same engine again."""
    scenario = check(engine=name)
    engine = scenario.engine
    assert engine.scheduling_policy == Named(policy)
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.block_size) == sizes
    assert others.items() <= engine.model_dump().items()
    assert engine.async_scheduling == (name == "sglang")
    again = check(**{k: v for k, v in scenario.resolved().items() if k != "cost"})
    assert again.engine == engine
    given = check(engine={"name": name, "max_num_seqs": 7, "scheduling_policy": "fcfs"}).engine
    assert (given.max_num_seqs, given.scheduling_policy) == (7, Named("fcfs"))


@pytest.mark.parametrize("name", [*ENGINES])
def test_every_named_engine_runs_without_a_warning(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    result = run(check(engine=name, workload=SMALL))
    assert (result.logs[0].requests["generated"] == 20).all()
    assert [str(w.message) for w in recwarn if issubclass(w.category, HeadwayWarning)] == []


def test_prompts_set_the_budget_of_engines_that_do_not_split_them() -> None:
    """By the model, or by max_model_len; a model that cannot be found is told once."""
    assert check(engine="vllm-v0", model="llama-3.1-8b").engine.max_num_batched_tokens == 131072
    engine = check(engine={"name": "tensorrt-llm", "max_model_len": 1024}).engine
    assert engine.max_num_batched_tokens == 8192
    engine = check(engine={"name": "tgi", "max_model_len": 1024}).engine
    assert engine.max_num_batched_tokens == 4096
    with pytest.raises(HeadwayError) as told:
        check(engine="vllm-v0", model="nowhere")
    assert len(told.value.messages) == 1


@pytest.mark.parametrize(("name", "most"), [("vllm-v0", 256), ("sglang", 64)])
def test_v0_stretches_yarn_as_vllm_did_before_0_30(tmp_path: Path, name: str, most: int) -> None:
    """It had the positions of the newest release, a quarter of them."""
    path = write_config(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    spec = engine_specs(check(engine=name, model=str(path)))[""]
    assert (spec.max_model_len, spec.memory.max_model_len) == (most, most)


def test_the_share_of_the_memory_is_of_what_each_engine_means() -> None:
    """80 % of 79.25 GiB less 14.96 of weights; or of what is left beside 1.6 of activations."""
    sizes = {"gpu_memory_utilization": 0.8, "max_num_batched_tokens": 8192, "max_num_seqs": 2048}
    budgets = {
        rule: kv_budget(load_model("llama-3-8b"), find_gpu("A100-80GB"), fraction_of=rule, **sizes)
        for rule in ("all", "static", "free")
    }
    beside = {rule: b.activations + b.context + b.graphs for rule, b in budgets.items()}
    assert budgets["all"].activations == 2048 * 128256 * 14
    assert beside["static"] == 8192 * (2 * 4096 + 3 * 14336) * 2 + GIB // 2
    usable, weights = int(79.25 * GIB * 0.8), budgets["all"].weights
    assert budgets["all"].kv_cache == usable - weights - beside["all"]
    assert budgets["static"].kv_cache == int((int(79.25 * GIB) - GIB // 2) * 0.8) - weights
    assert budgets["free"].kv_cache == int((int(79.25 * GIB) - weights - beside["free"]) * 0.8)
    assert [ENGINES[name].fraction_of for name in ("vllm", "sglang", "tgi", "tensorrt-llm")] == [
        "all",
        "static",
        "free",
        "free",
    ]


def test_the_command_lists_what_is_modelled(capsys: pytest.CaptureFixture[str]) -> None:
    """As text and as JSON; the page tells of every engine and of nobody else's scheduler."""
    assert main(["engines"]) == 0
    text = capsys.readouterr().out
    assert main(["engines", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["engine"] for row in rows] == [*ENGINES]
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text("utf-8")
    for row in rows:
        assert f"{row['engine']} (scheduling_policy: {row['scheduler']})\n" in text
        assert f"| `{row['engine']}` | `{row['scheduler']}` |" in page
        assert row["scheduler"] in POLICIES
        assert row["follows"]
        assert row["modelled"]
        assert row["not_modelled"]
    assert rows[2]["sets"]["watermark"] == 0.01
    assert max(map(len, text.splitlines())) <= 100
