"""A cost model whose terms are easy to add up by hand, and steps for it."""

from typing import Any

from simulator.build.settle_cost import load_cost, version_overhead
from simulator.core.engine_config import EngineConfig
from simulator.core.request import Chunk, Request, Step
from simulator.costs.cost_model import CostModel
from simulator.costs.linear import Fitted
from simulator.costs.overhead import Overhead
from simulator.costs.piecewise import PiecewiseCost
from simulator.models.gpus import find_gpu
from simulator.models.load import load_model

SOMEBODY = Request(0, 0.0, 100, 10)
HAND = PiecewiseCost(
    dense=[[1, 10.0], [11, 20.0], [21, 40.0]],
    overhead=1.0,
    head=3.0,
    head_per_sequence=1.0,
    decode=100.0,
    decode_per_context=0.5,
    decode_per_sequence=2.0,
    prefill=200.0,
    prefill_per_pair=0.25,
    prefill_per_token=4.0,
    mixed_per_context=1.5,
    mixed_per_sequence=5.0,
    serial_per_token=16.0,
)


def mixed(*chunks: tuple[int, int], decodes: int = 0, context: int = 0) -> Step:
    """Make a step of (start, tokens) chunks and some decodes."""
    return Step([Chunk(SOMEBODY, *chunk) for chunk in chunks], decodes, context)


def cost_of(
    spec: dict[str, Any] | str,
    model: str = "llama-3-8b",
    gpu: str = "A100-80GB",
    **engine: Any,
) -> CostModel:
    """Load what a scenario's `cost` says, for a shipped model and a known GPU."""
    config = EngineConfig(**{"async_scheduling": False, **engine})
    return load_cost(spec, model=load_model(model), gpu=find_gpu(gpu), engine=config)


def overhead_of(
    version: str | None = None, *, asynchronous: bool = False, gpu: str = "L40S", **knobs: Any
) -> Overhead:
    """Return what a release of vLLM adds to its kernels."""
    engine = EngineConfig(version=version, async_scheduling=asynchronous, **knobs)
    return version_overhead(engine, find_gpu(gpu))


def with_overhead(terms: Overhead, kernels: Fitted, *, overlapped: bool, **told: Any) -> Any:
    """Put an overhead on kernels; of no layers, on one GPU and without sorting, unless told."""
    standard = {
        "model": load_model("llama-3-8b"),
        "gpu": find_gpu("H100-80GB"),
        "sampled": False,
        "tensor_parallel_size": 1,
        "layers": 0,
    }
    return terms.add_to(kernels, overlapped=overlapped, **(standard | told))
