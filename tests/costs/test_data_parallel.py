"""Experts over the GPUs of all data-parallel ranks: their cost, their memory, a run of them."""

from pathlib import Path

import numpy as np
import pytest

from simulator.core.request import Chunk, Request, Step
from simulator.costs.data_parallel import MAX_PADDED_TOKENS, DataParallelCost, Experts
from simulator.costs.linear import LinearCost
from simulator.costs.roofline import efficiency_of, roofline
from simulator.models.gpus import GPUS
from simulator.models.load import load_model
from simulator.scenario.load import load_scenario
from simulator.simulation.result import Result
from simulator.simulation.run import run
from simulator.simulation.write import write_run
from tests.support.budgets import kv_budget

H100 = GPUS["H100-80GB"]
QWEN = load_model("qwen3-30b-a3b")
DEEPSEEK = load_model("deepseek-v2-lite")  # shared experts, a dense layer
MOE = """name: moe
model: qwen3-30b-a3b
gpu: {name: H100-80GB, count: 2}
engine: {data_parallel_size: 2, max_num_seqs: 32, enable_prefix_caching: false}
workload: {num_prompts: 60, request_rate: 20, input_len: 600, output_len: 40}
"""


def spread(model=QWEN, ranks: int = 1, tensor: int = 1) -> Experts:
    return Experts(model, H100, "bfloat16", tensor, ranks)


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK], ids=lambda model: model.name)
@pytest.mark.parametrize("tokens", [1, 1 << 16])
def test_a_rank_and_its_experts_add_up_to_the_model(model, tokens: int) -> None:
    """One token and 65,536: there all products wait for bytes, or all for FLOPs.

    One rank exchanges nothing with itself; what it would begin takes a latency for each layer.
    """
    whole, own = (roofline(model, H100, routed=routed) for routed in (True, False))
    latencies = (model.num_hidden_layers - model.dense_layers) * efficiency_of(H100).link_latency
    both = own.dense_seconds(tokens) + spread(model).seconds(tokens) - latencies
    assert both == pytest.approx(whole.dense_seconds(tokens), rel=1e-6)


def test_what_experts_cost_by_hand() -> None:
    """Many tokens on 2 x 2 GPUs: FLOPs of 8 experts a token, a quarter of them on each GPU, and
    half of the hidden states passed twice in each of 48 layers."""
    share = efficiency_of(H100)
    flops = 2 * 8 * 3 * 2048 * 768 * 48 * 8192 / 4
    passed = 2 * 0.5 * 8192 * 2048 * 2
    exchange = 48 * (share.link_latency + passed / (H100.link_bandwidth * share.link))
    expected = flops / (H100.bf16_flops * share.compute) + exchange
    assert spread(QWEN, 2, 2).seconds(8192) == pytest.approx(expected, rel=1e-12)


def test_small_steps_are_padded_to_the_fullest_rank_and_large_ones_are_not() -> None:
    cost = DataParallelCost(LinearCost(1.0, 0.0, 0.0), 2, experts := spread(QWEN, 2))
    assert cost.shared([100, 7]) == experts.seconds(200)
    assert cost.shared([MAX_PADDED_TOKENS + 1, 7]) == experts.seconds(MAX_PADDED_TOKENS + 8)
    assert cost.shared([MAX_PADDED_TOKENS + 1, 0]) == experts.seconds(
        MAX_PADDED_TOKENS + 2
    )  # a dummy batch of one
    chunk = Chunk(Request(0, 0.0, 50, 1), 0, 50)
    assert cost.execute(Step([chunk])).seconds == 1.0 + experts.seconds(100)
    counts, contexts = np.array([3, 1, 3]), np.array([30, 10, 60])
    decodes = [cost.execute(Step([], *pair)).seconds for pair in ((3, 30), (1, 10), (3, 60))]
    assert cost.decode_seconds(counts, contexts).tolist() == decodes
    assert (
        cost.leap(Step([], 3, 30), 3).seconds == [decodes[0]] * 3
    )  # nothing here grows with the context


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK], ids=lambda model: model.name)
def test_a_rank_holds_all_but_the_experts_of_the_others(model) -> None:
    one, four = (kv_budget(model, H100, data_parallel_size=ranks) for ranks in (1, 4))
    layers = model.num_hidden_layers - model.dense_layers
    experts = layers * model.num_experts * 3 * model.hidden_size * model.intermediate_size * 2
    assert one.weights - four.weights == pytest.approx(0.75 * experts, abs=1)
    dense = load_model("llama-3-8b")
    budgets = [kv_budget(dense, H100, data_parallel_size=ranks) for ranks in (1, 4)]
    assert budgets[0].weights == budgets[1].weights
    assert budgets[0].kv_cache == budgets[1].kv_cache


def made(folder: Path, *overrides: str, **options: object) -> Result:
    path = folder / "s.yaml"
    path.write_text(MOE)
    return run(load_scenario(path, overrides), **options)


def test_ranks_with_experts_go_in_lock_step_and_say_what_is_not_measured(tmp_path: Path) -> None:
    result = made(tmp_path)
    assert result.spec.cost.name.startswith("roofline")
    assert any("no measurements" in message for message in result.warnings)
    assert len(result.logs) == 2
    steps = result.steps
    both = steps.merge(steps, on="start", suffixes=("", "_other")).query("replica < replica_other")
    assert len(both) > 50
    names = ["requests.csv", "steps.csv"]
    write_run(result, tmp_path / "leap")
    write_run(made(tmp_path), tmp_path / "again")
    for name in names:
        assert (tmp_path / "leap" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    write_run(made(tmp_path, stepwise=True), tmp_path / "step")
    assert (tmp_path / "leap" / names[0]).read_bytes() == (
        tmp_path / "step" / names[0]
    ).read_bytes()


@pytest.mark.parametrize("said", [True, False])
def test_a_given_cost_is_that_of_a_rank_alone(tmp_path: Path, said: bool) -> None:
    if said:
        result = made(tmp_path, "cost={kind: linear, base: 0.01, per_token: 0.00001}")
    else:
        result = made(tmp_path, cost=LinearCost(0.01, 1e-5, 0.0))
    assert any("prices one rank alone" in message for message in result.warnings)
    rows = np.concatenate([log.steps for log in result.logs])
    tokens = rows["prefill_tokens"] + rows["decodes"]
    first = rows["steps"] == 1
    for start in np.unique(rows["start"][first]):
        here = rows["start"] == start
        seconds = 0.01 + 1e-5 * tokens[here].max()
        assert rows["end"][here & first] == pytest.approx(start + seconds)


def test_what_the_host_does_hides_behind_the_experts_too(tmp_path: Path) -> None:
    """Asynchronous scheduling: a step takes the longer of the host's 10 ms and all kernels."""
    slow = "cost={kind: roofline, overhead: {host: 0.01}}"
    result = made(tmp_path, slow, "engine.async_scheduling=true")
    cost = result.spec.cost
    assert isinstance(cost, DataParallelCost)
    step = Step([], 4, 4000)
    assert cost.kernels is not None
    kernels, least = cost.kernels.execute(step).seconds, cost.inner.execute(step).seconds
    experts = cost.shared([4, 4])
    assert kernels < 0.01 < least  # and the waits that nothing hides
    assert cost.execute(step).seconds == max(kernels + experts, least) < least + experts
    assert cost.decode_seconds(np.array([4]), np.array([4000])) == [cost.execute(step).seconds]
    waiting = made(tmp_path, slow, "engine.async_scheduling=false")
    assert result.summary()["mean_tpot_ms"] < waiting.summary()["mean_tpot_ms"]
