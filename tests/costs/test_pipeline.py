"""What stages take of a model: of its cost, its memory and its link; runs with stages."""

from pathlib import Path

import pytest

from headway.report.vllm_serve import serve_command
from simulator.build.settle_cost import load_cost
from simulator.core.request import Chunk, Request, Step
from simulator.costs.linear import LinearCost
from simulator.costs.pipeline import PipelineCost, stages_of
from simulator.costs.roofline import efficiency_of
from simulator.models.gpus import GPUS
from simulator.models.load import load_model
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from tests.support.budgets import kv_budget
from tests.support.costs import overhead_of

H100 = GPUS["H100-80GB"]
LLAMA = load_model("llama-3-70b")
PIPED = """name: piped
model: llama-3-70b
gpu: {name: H100-80GB}
engine: {name: vllm, tensor_parallel_size: 2, pipeline_parallel_size: 2}
workload: {num_prompts: 30, request_rate: 3, input_len: 300, output_len: 20}
"""
DECODES = Step([], 16, 16_000)
PROMPT = Step([Chunk(Request(0, 0.0, 600, 1), 100, 500)], 16, 16_000)


def piped(tmp_path: Path, **engine: object):
    """The cost of the scenario, by its shipped profile."""
    path = tmp_path / "s.yaml"
    path.write_text(PIPED)
    changes = [f"engine.{key}={value}" for key, value in engine.items()]
    scenario = load_scenario(path, overrides=changes)
    return load_cost(
        {"profile": "llama-3-70b.h100-tp2.bf16"}, model=LLAMA, gpu=H100, engine=scenario.engine
    )


def test_layers_are_shared_out_as_vllm_does() -> None:
    """By `get_pp_indices`: what is left over goes to the last stages but one."""
    assert LLAMA.split_layers(4) == [20, 20, 20, 20]
    assert load_model("gemma-3-27b").split_layers(4) == [15, 16, 16, 15]  # 62 layers
    assert load_model("deepseek-v3").split_layers(8) == [7, 7, 8, 8, 8, 8, 8, 7]  # 61
    assert LLAMA.split_layers(3) == [27, 27, 26]
    with pytest.raises(ValueError, match="pipeline_parallel_size: must be at most the 80 layers"):
        LLAMA.split_layers(81)


@pytest.mark.parametrize("step", [DECODES, PROMPT], ids=["decodes", "prompts"])
def test_the_kernels_of_all_stages_are_those_of_the_model(tmp_path: Path, step: Step) -> None:
    """Each stage has the wait of a step besides, but the logits are sorted in the last alone."""
    cost = piped(tmp_path)
    assert isinstance(cost, PipelineCost)
    host, stages, send = cost.stage_seconds(step)
    whole = cost.inner.without_host().execute(step).seconds
    overhead = overhead_of(asynchronous=True, gpu=H100.name)
    sequences = step.decodes + len(step.prefills)
    waits = overhead.step + overhead.per_sequence * sequences
    assert sum(stages) == pytest.approx(whole + waits, rel=1e-9)
    assert stages[1] > stages[0]  # it has the lm_head and the sampler
    work = overhead.host + overhead.host_ranks + overhead.host_per_sequence * sequences
    assert host == pytest.approx(work)
    assert cost.execute(step).seconds == pytest.approx(host + stages[0] + send + stages[1])


def test_what_is_sent_by_hand(tmp_path: Path) -> None:
    """Two hidden states of 8,192 numbers of 2 bytes for each token, at 25 GB/s."""
    latency = efficiency_of(H100).link_latency
    send = piped(tmp_path, pipeline_parallel_bandwidth=25).stage_seconds(PROMPT).send
    assert send == pytest.approx(latency + 516 * 2 * 8192 * 2 / 25e9)
    send = piped(tmp_path).stage_seconds(PROMPT).send
    rate = H100.link_bandwidth * efficiency_of(H100).link
    assert send == pytest.approx(latency + 516 * 2 * 8192 * 2 / rate)


def test_stages_of_a_line_and_of_a_table() -> None:
    """Of a straight line each stage takes its share, whatever the term; 27 of 80 layers here."""
    first, _, last = stages_of(LLAMA, 3)
    line = LinearCost(0.08, per_token=0.008, per_context=0.0008)
    assert first.part(line).execute(DECODES).seconds == pytest.approx(
        27 / 80 * line.execute(DECODES).seconds
    )
    assert last.part(line).execute(DECODES).seconds == pytest.approx(
        26 / 80 * line.execute(DECODES).seconds
    )


def test_the_stage_with_the_least_room_says_how_many_blocks_there_are() -> None:
    """The last one has the lm_head and the sampler's peak, the first the embedding."""
    one = kv_budget(LLAMA, H100, tensor_parallel_size=4)
    two = kv_budget(LLAMA, H100, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert two.sizes.gpus == 4
    assert two.layers == 40
    # Half of the layers, of which each GPU has a half, as before a quarter of each.
    assert two.kv_bytes_per_token == one.kv_bytes_per_token == 40 * 2 * 4 * 128 * 2
    table = LLAMA.vocab_size * LLAMA.hidden_size * 2
    inner = LLAMA.weight_bytes() - 2 * table
    whole = 2 * (8192 * 128 + 8192 + 40 * 2 * 8192)  # on each: angles, norms
    assert two.weights == pytest.approx(inner // 2 // 2 + table // 2 + whole, rel=1e-4)
    assert two.activations == 256 * LLAMA.vocab_size * 14  # the sampler's


def test_the_stage_that_drafts_has_a_table_and_a_layer_more() -> None:
    """The last, of 26 layers: EAGLE's own is the 27th to be cached, and reads a table of tokens."""
    drafts = {"method": "eagle", "num_speculative_tokens": 2, "acceptance": 0.0}
    keys = {"speculative_config": drafts | {"draft": {"seconds": 0.0}}}
    budget = kv_budget(LLAMA, GPUS["H200"], pipeline_parallel_size=3, **keys)
    assert budget.layers == 26
    assert budget.kv_bytes_per_token == pytest.approx(27 * 2 * 8 * 128 * 2)
    assert budget.layout.block_bytes == pytest.approx(16 * budget.kv_bytes_per_token)
    plain = kv_budget(LLAMA, GPUS["H200"], pipeline_parallel_size=4)  # the last: 20 layers
    table = LLAMA.vocab_size * LLAMA.hidden_size * 2
    layer = (LLAMA.weight_bytes() - 2 * table) / 80
    assert plain.layers == 20
    more = budget.weights - plain.weights - budget.drafts
    assert more == pytest.approx(6 * layer + table, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("mixtral-8x7b", 43.747),  # with both tables on each stage
        ("qwen3.5-35b-a3b", 34.091),  # with the encoder and the embedding on each
        ("deepseek-v2-lite", 14.723),  # whose first layer has no experts
    ],
)
def test_the_fullest_stage_of_vllms_own_classes(name: str, gib: float) -> None:
    """GiB that parameters and buffers of vLLM 0.32 have there, on torch's meta device."""
    model = load_model(name)
    keys = {"pipeline_parallel_size": 2, "release": (0, 32, 0), "max_num_seqs": 1024}
    budget = kv_budget(model, GPUS["H200"], **keys)
    weights = budget.weights
    if own := model.latent:  # unpacked after the load
        unpacked = own.kv_lora_rank * (own.qk_nope_head_dim + own.v_head_dim)
        weights -= 2 * budget.layers * model.num_attention_heads * unpacked
    assert weights / 2**30 == pytest.approx(gib, rel=0.002)


def test_a_scenario_with_stages_runs_and_tells_how_to_start_it(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(PIPED)
    scenario = load_scenario(path)
    assert scenario.gpu.count == 4
    result = run(scenario)
    assert result.summary()["completed"] == 30
    starts, ends = result.logs[0].steps["start"], result.logs[0].steps["end"]
    assert (starts[1:] >= ends[:-1]).all()
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 2 " in serve_command(scenario)


def test_data_parallel_ranks_may_have_stages(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(PIPED)
    changes = ["engine.data_parallel_size=2", "engine.tensor_parallel_size=1"]
    changes += ["engine.quantization=fp8"]
    scenario = load_scenario(path, overrides=changes)
    assert scenario.gpu.count == 4
    result = run(scenario)
    assert result.summary()["completed"] == 30
    assert len(result.logs) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["gpu.count=2"], "gpu.count: must equal engine.tensor_parallel_size x pipeline_parallel"),
        (["engine.pipeline_parallel_size=0"], "engine.pipeline_parallel_size: must be at least 1"),
        (["engine.pipeline_parallel_size=81"], "must be at most the 80 layers of llama-3-70b"),
        (["engine.scheduling_policy=srpt"], "pipeline_parallel_size: srpt has one batch in flight"),
        (["engine.preemption_mode=swap"], "pipeline_parallel_size: needs preemption_mode: rec"),
        (["engine.kv_offloading_size=1"], "needs kv_offloading_size: null"),
        (["engine.scheduler=vllm"], "pipeline_parallel_size: needs scheduler: headway"),
        (["engine.name=sglang"], "the batch queue is vLLM's; sglang is simulated with one stage"),
        (
            ["engine.pipeline_parallel_size=1", "engine.pipeline_parallel_bandwidth=25"],
            "pipeline_parallel_bandwidth: needs a pipeline_parallel_size of 2",
        ),
        (
            ["model=qwen3-30b-a3b", "engine.data_parallel_size=2"],
            "pipeline_parallel_size: must be 1 where data-parallel ranks share experts",
        ),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, list) else "",
)
def test_what_does_not_go_with_stages(tmp_path: Path, changes: list[str], message: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(PIPED)
    with pytest.raises(HeadwayError) as caught:
        run(load_scenario(path, overrides=changes))
    found = [line for line in caught.value.messages if message in line]
    assert len(found) == 1, caught.value.messages


@pytest.mark.parametrize(("version", "ahead"), [("0.14", False), ("0.15", True), ("0.13", False)])
def test_versions_that_schedule_stages_asynchronously(
    tmp_path: Path, version: str, ahead: bool
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(PIPED)
    scenario = load_scenario(path, overrides=[f"engine.version='{version}'"])
    assert scenario.engine.async_scheduling is ahead
