"""What a scenario stands for."""

from dataclasses import dataclass

from simulator.costs.cost_model import CostModel
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec


@dataclass(slots=True, frozen=True)
class Parts:
    """What a scenario stands for, apart from its workload."""

    model: ModelSpec
    gpu: Gpu
    cost: CostModel
    num_gpu_blocks: int
    max_model_len: int
