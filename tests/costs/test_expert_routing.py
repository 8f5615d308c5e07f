"""Experts in profiles: by routing, in slices or whole; what is asked and what there is."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from simulator.build.settle_cost import load_cost
from simulator.core.engine_config import EngineConfig
from simulator.core.request import Step
from simulator.costs.piecewise import PiecewiseCost, add_tables
from simulator.costs.profile import (
    PROFILES,
    published_routing,
    read_profile,
    shipped_profiles,
)
from simulator.models.gpus import GPUS
from simulator.models.load import load_model
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve
from simulator.util.errors import HeadwayError
from tests.support.costs import cost_of, mixed

PROFILE = """\
model: mixtral-8x7b
hardware: {gpu: H100-80GB, tensor_parallel_size: 2}
cost: {kind: piecewise, dense: [[1, 0.001], [101, 0.002]]}
experts:
  "uniform": [[1, 0.01], [51, 0.02]]
  "power_law_1.2": [[1, 0.03]]
expert_parallel:
  "uniform": [[1, 0.05]]
"""
OSS = (
    PROFILE.replace("mixtral-8x7b", "gpt-oss-120b")
    + """\
experts_marlin:
  "uniform": [[1, 0.07]]
  "power_law_1.2": [[1, 0.09]]
"""
)
H100, MIXTRAL = GPUS["H100-80GB"], load_model("mixtral-8x7b")


def engine(**keys: object) -> EngineConfig:
    return EngineConfig.model_validate({"tensor_parallel_size": 2, **keys})


def write(folder: Path, text: str = PROFILE) -> Path:
    path = folder / "p.yaml"
    path.write_text(text)
    return path


def test_tables_are_added_at_the_rows_of_both() -> None:
    """Each goes on beyond its last row with the slope of its upper half."""
    both = add_tables([[1, 1.0], [101, 2.0]], [[1, 10.0], [51, 20.0]])
    assert [row[0] for row in both] == [1, 51, 101]
    assert [row[1] for row in both] == pytest.approx([11.0, 21.5, 32.0])


@pytest.mark.parametrize(
    ("keys", "seconds"),
    [
        ({}, 0.011),
        ({"expert_routing": "power_law_1.2"}, 0.031),
        ({"enable_expert_parallel": True}, 0.051),
    ],
)
def test_experts_as_an_engine_has_and_chooses_them(tmp_path: Path, keys, seconds: float) -> None:
    cost = load_cost(str(write(tmp_path)), model=MIXTRAL, gpu=H100, engine=engine(**keys))
    counts = np.array([1])
    assert cost.decode_seconds(counts, counts)[0] == pytest.approx(seconds)


def oss_seconds(folder: Path, more: dict[str, str] | None = None, **keys: object) -> float:
    """What one decode of gpt-oss-120b takes by a profile that has the times of both kernels."""
    spec = {"profile": str(write(folder, OSS)), **(more or {})}
    model = load_model("gpt-oss-120b")
    cost = load_cost(spec, model=model, gpu=H100, engine=engine(**keys))
    return float(cost.decode_seconds(np.array([1]), np.array([1]))[0])


def test_models_of_many_experts_choose_unevenly_where_nobody_says(tmp_path: Path) -> None:
    """By 1.2 of a power law, where the profile has that; models of few, or of one a token, evenly;
    DeepSeek's by 1.01."""
    assert oss_seconds(tmp_path) == pytest.approx(0.031)
    assert oss_seconds(tmp_path, expert_routing="uniform") == pytest.approx(0.011)
    named = ("mixtral-8x7b", "llama-4-maverick", "qwen3-30b-a3b", "kimi-k2")
    found = [published_routing(load_model(name)) for name in named]
    assert found == ["uniform", "uniform", "power_law_1.2", "power_law_1.01"]


@pytest.mark.parametrize(
    ("more", "keys", "seconds"),
    [
        ({}, {"version": "0.11.0"}, 0.091),
        ({}, {"version": "0.12"}, 0.031),
        ({}, {"version": "0.11.0", "enable_expert_parallel": True}, 0.051),
        ({"experts": "marlin"}, {"version": "0.22", "expert_routing": "uniform"}, 0.071),
        ({"experts": "triton"}, {"version": "0.11.0", "expert_routing": "uniform"}, 0.011),
    ],
)
def test_experts_run_the_kernel_of_their_version_or_the_one_told(
    tmp_path: Path, more: dict[str, str], keys: dict[str, object], seconds: float
) -> None:
    assert oss_seconds(tmp_path, more, async_scheduling=False, **keys) == pytest.approx(seconds)


def test_a_kernel_that_no_table_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^cost\.experts: must be marlin or triton, not 'cutlass'"
    ):
        oss_seconds(tmp_path, {"experts": "cutlass"})
    spec = {"profile": str(write(tmp_path)), "experts": "marlin"}
    with pytest.raises(
        ValueError, match=r"^cost\.experts: must be no choice of kernels, not 'marl"
    ):
        load_cost(spec, model=MIXTRAL, gpu=H100, engine=engine())


STEPS = (  # profile, GPUs, prompts, decodes of 300 tokens, measured ms
    ("gpt-oss-120b", 1, (128,) * 64, 0, 350.0),
    ("gpt-oss-120b", 1, (), 4, 7.99),
    ("gpt-oss-120b", 2, (4096, 4096), 0, 210.0),
    ("gpt-oss-20b", 1, (4096, 4096), 0, 226.0),
)
"""Median gaps of gpt-oss on H100 under vLLM 0.10.2 and 0.11.0 (GPUStack's performance lab, Apache-
2.0): of requests that come all at once, steps full of prompts; of four clients, decodes."""


@pytest.mark.parametrize(("model", "gpus", "prompts", "decodes", "measured"), STEPS)
def test_steps_of_gpt_oss_with_marlins_kernel(
    model: str, gpus: int, prompts: tuple[int, ...], decodes: int, measured: float
) -> None:
    """Nothing was fitted to them: with Triton's kernel those of prompts take half as long."""
    on = "h100" if gpus == 1 else f"h100-tp{gpus}"
    keys = {"tensor_parallel_size": gpus, "version": "0.11.0", "generation_config": "vllm"}
    cost = cost_of({"profile": f"{model}.{on}.mxfp4"}, model, "H100-80GB", **keys)
    step = (
        mixed(*((0, tokens) for tokens in prompts)) if prompts else Step([], decodes, 300 * decodes)
    )
    assert 1e3 * cost.execute(step).seconds == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"expert_routing": "power_law_1.01"}, "engine.expert_routing: p has no times of such"),
        (
            {"enable_expert_parallel": True, "expert_routing": "power_law_1.2"},
            "engine.expert_routing: p has no times of such",
        ),
    ],
)
def test_what_a_profile_does_not_have(tmp_path: Path, keys, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}"):
        load_cost(str(write(tmp_path)), model=MIXTRAL, gpu=H100, engine=engine(**keys))


def test_a_roofline_knows_even_routing_alone() -> None:
    keys = {"model": MIXTRAL, "gpu": H100, "engine": engine(expert_routing="power_law_1.2")}
    with pytest.raises(ValueError, match=r"^engine.expert_routing: a roofline knows uniform"):
        load_cost({"kind": "roofline"}, **keys)


@pytest.mark.parametrize("key", ["expert_routing", "enable_expert_parallel"])
def test_a_dense_model_has_no_experts(tmp_path: Path, key: str) -> None:
    value = {"expert_routing": "power_law_1.2", "enable_expert_parallel": "true"}[key]
    path = tmp_path / "s.yaml"
    path.write_text(f"model: llama-3-8b\nengine: {{{key}: {value}}}\n")
    with pytest.raises((ValueError, HeadwayError), match=f"engine.{key}: llama-3-8b has no exp"):
        resolve(load_scenario(path))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"uniform": [[1, 0.01], [51, 0.02]]', '"other": [[1, 1.0]]', "4: experts.uniform: is m"),
        ("[[1, 0.03]]", "[[1, -1]]", r"4: experts.power_law_1.2: must be rows \[tokens"),
        ('\n  "uniform": [[1, 0.05]]', " 3", "7: expert_parallel: must be a mapping of"),
    ],
)
def test_damaged_tables_of_experts(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in PROFILE
    with pytest.raises(HeadwayError, match=f"p.yaml:{told}"):
        read_profile(write(tmp_path, PROFILE.replace(old, new, 1)))


WITH_EXPERTS = [
    name for name in shipped_profiles() if "\nexperts:" in (PROFILES / f"{name}.yaml").read_text()
]


@pytest.mark.many
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_skewed_routing_is_near_the_even_one(name: str) -> None:
    """A few experts with most of the tokens: less to read in small steps, longer in large ones."""
    profile = read_profile(PROFILES / f"{name}.yaml")
    assert set(profile.experts) >= {"uniform"}
    for tables in (profile.experts, profile.expert_parallel):
        for routing in tables:
            even, skewed = PiecewiseCost(tables["uniform"]), PiecewiseCost(tables[routing])
            for tokens in (1, 16, 256, 4096):
                ratio = skewed.dense_seconds(tokens) / even.dense_seconds(tokens)
                assert 0.3 < ratio < 4.0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("gpu: MI300X", "no profile is shipped of qwen3-30b-a3b on MI300X with tensor_parallel_si"),
        ("cost: {kind: roofline}", "a roofline knows uniform routing alone"),
    ],
)
def test_why_experts_are_chosen_evenly_is_told(tmp_path: Path, more: str, told: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(f"model: qwen3-30b-a3b\nengine: {{expert_routing: power_law_1.2}}\n{more}\n")
    with pytest.raises(HeadwayError, match=told):
        load_scenario(path)


@pytest.mark.parametrize(
    ("model", "gpu", "degrees"),
    [
        ("mixtral-8x7b.{}.bf16", "H100-80GB", (2, 4, 8)),
        ("mixtral-8x7b.{}.bf16", "A100-80GB", (2, 4, 8)),
        ("mixtral-8x7b.{}.bf16", "H200", (1, 2, 4, 8)),
        ("qwen3-30b-a3b.{}.bf16", "H100-80GB", (1, 2, 4)),
        ("gpt-oss-120b.{}.mxfp4", "H100-80GB", (1, 2, 4, 8)),
        ("llama-4-scout.{}.fp8", "H100-80GB", (2, 4, 8)),
        ("qwen3-235b-a22b.{}.fp8", "H200", (4, 8)),
    ],
)
def test_more_gpus_on_nvlink_take_no_longer(model, gpu, degrees):
    """Decodes and prompts, few and many, in the order of the degrees."""
    name, _, dtype = model.partition(".{}.")
    chip = gpu.partition("-")[0].lower()
    quantized = {} if dtype == "bf16" else {"quantization": dtype}
    steps = [Step([], count, 1000 * count) for count in (1, 16, 64, 256)]
    steps += [mixed((0, tokens)) for tokens in (512, 4096)]
    found = []
    for degree in degrees:
        on = chip if degree == 1 else f"{chip}-tp{degree}"
        profile = {"profile": model.format(on)}
        engine = {"tensor_parallel_size": degree, **quantized}
        cost = cost_of(profile, name, gpu, **engine)
        found.append([cost.execute(step).seconds for step in steps])
    for fewer, more in pairwise(found):
        assert all(one < 1.02 * other for one, other in zip(more, fewer, strict=True))
    assert found[-1][-1] < 0.8 * found[0][-1]  # long prompts gain most
