"""The memory of an engine by its keys alone."""

from simulator.models.engine_sizes import EngineSizes
from simulator.models.gpus import Gpu
from simulator.models.kv_budget import MemoryBudget, estimate, fitting
from simulator.models.spec import ModelSpec


def kv_budget(model: ModelSpec, gpu: Gpu, **keys: object) -> MemoryBudget:
    """Work out the memory by keys of `EngineSizes`; ValueError where too little is left."""
    return fitting(estimate(model, gpu, EngineSizes(**keys)))
