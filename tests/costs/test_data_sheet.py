"""Kernels of one GPU on another by their data sheets, held against the other's own tables."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from simulator.build.settle_cost import load_cost
from simulator.core.engine_config import EngineConfig
from simulator.core.request import Chunk, Request, Step
from simulator.costs.data_sheet import SCALED, scale_cost
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.profile import PROFILES, nearest_profile, read_profile
from simulator.costs.roofline import roofline
from simulator.models.gpus import GPUS
from simulator.models.load import load_model

NOBODY = Request(-1, 0.0, 1, 1)
MODELS = {"llama-3-8b": "", "llama-3-70b": "-tp4", "gpt-oss-120b": "-tp2", "qwen3-32b": "-tp2"}
STEPS = (
    *(Step([], count, count * context) for count in (1, 8, 32, 128) for context in (500, 4000)),
    *(Step([Chunk(NOBODY, 0, count)]) for count in (64, 512, 2048, 8192)),
)


def kernels(name: str) -> PiecewiseCost:
    cost = read_profile(PROFILES / f"{name}.yaml").cost
    assert isinstance(cost, PiecewiseCost)
    return cost


def errors(theirs: str, ours: str) -> Iterator[tuple[float, float]]:
    """Yield log(predicted / measured) of steps: scaled from the other GPU's, and by roofline."""
    keys = {"H100-80GB": "h100", "H200": "h200", "B200": "b200", "B300": "b300"}
    for name, gpus in MODELS.items():
        model, dtype = load_model(name), "mxfp4" if "oss" in name else "bf16"
        engine = EngineConfig(tensor_parallel_size=int(gpus[3:] or 1))
        one, other = (kernels(f"{name}.{keys[gpu]}{gpus}.{dtype}") for gpu in (theirs, ours))
        scaled = scale_cost(one, model, engine, GPUS[theirs], GPUS[ours])
        bare = roofline(
            model, GPUS[ours], tensor_parallel_size=engine.tensor_parallel_size, dtype="auto"
        )
        for step in STEPS:
            told = np.log(
                [
                    cost.execute(step).seconds / other.execute(step).seconds
                    for cost in (scaled, bare)
                ]
            )
            yield float(told[0]), float(told[1])


@pytest.mark.parametrize(
    ("theirs", "ours"), [("H100-80GB", "H200"), ("H200", "H100-80GB"), ("B200", "B300")]
)
def test_a_neighbour_is_nearer_than_a_roofline(theirs: str, ours: str) -> None:
    """Within the stated spread, and at most half as far off as the roofline in the median."""
    scaled, bare = np.abs(np.array([*errors(theirs, ours)])).T
    assert np.sqrt(np.mean(scaled**2)) < SCALED
    assert np.median(scaled) < 0.6 * np.median(bare)


def test_a_gpu_that_nobody_measured_takes_the_likest() -> None:
    """A100 on PCIe: 2.039 / 1.935 as long where weights are read, no longer where it computes."""
    model, gpu, engine = load_model("llama-3-8b"), GPUS["A100-80GB-PCIe"], EngineConfig()
    found = nearest_profile(model, gpu, engine)
    assert found == "llama-3-8b.a100.bf16"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cost = load_cost(found, model=model, gpu=gpu, engine=engine)
    own = load_cost(found, model=model, gpu=GPUS["A100-80GB"], engine=engine)
    assert cost.name == "llama-3-8b.a100.bf16 scaled to A100-80GB-PCIe"
    assert cost.unmeasured == "kernels of llama-3-8b on A100-80GB-PCIe"
    decode, prompt = (
        cost.execute(step).seconds / own.execute(step).seconds for step in (STEPS[0], STEPS[-1])
    )
    assert 1.02 < decode < 2.039 / 1.935
    assert prompt == pytest.approx(1.0, abs=0.01)
    assert own.residuals is not None
    assert cost.residuals is not None
    for one, told in cost.residuals.items():
        assert told == pytest.approx(np.hypot(own.residuals[one], SCALED))
    assert nearest_profile(load_model("llama-3-8b"), GPUS["MI300X"], engine) is None


def test_sums_pass_the_link_that_is_there() -> None:
    """Four A100s on PCIe 4.0 add up 8,192 tokens in 64 sums of 67 MB: 0.73 s at 8.8 GB/s."""
    model, engine = load_model("llama-3-8b"), EngineConfig(tensor_parallel_size=4)
    nvlink = kernels("llama-3-8b.a100-tp4.bf16")
    pcie = scale_cost(nvlink, model, engine, GPUS["A100-80GB"], GPUS["A100-80GB-PCIe"])
    more = pcie.execute(STEPS[-1]).seconds - nvlink.execute(STEPS[-1]).seconds
    passed = 64 * 1.5 * 8192 * 4096 * 2 / 8.8e9
    assert more == pytest.approx(passed, rel=0.1)
