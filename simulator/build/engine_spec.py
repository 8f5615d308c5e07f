"""What an engine of a scenario is, once nothing about it is left open."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from simulator.core.engine_config import EngineConfig, GpuConfig, HostConfig
from simulator.costs.cost_model import CostModel, check_cost
from simulator.costs.noise import Errors
from simulator.models.gpus import GIB, Gpu
from simulator.models.kv_budget import MemoryBudget, kv_block_bytes
from simulator.models.power import Power
from simulator.models.spec import ModelSpec
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.vllm.rules import Release, Rules
from simulator.util.errors import HeadwayError

Role = Literal["kv_producer", "kv_consumer", "ec_producer"]


class EngineBlocks(Protocol):
    """What of a scenario says what its engine is."""

    @property
    def known_model(self) -> str: ...

    @property
    def gpu(self) -> GpuConfig: ...

    @property
    def engine(self) -> EngineConfig: ...

    @property
    def host(self) -> HostConfig | None: ...

    @property
    def cost(self) -> dict[str, Any] | None: ...

    @property
    def predictor(self) -> object: ...

    @property
    def role(self) -> Role | None: ...

    @property
    def retries(self) -> bool: ...

    @property
    def seed(self) -> int: ...

    @property
    def folder(self) -> Path: ...

    def error_at(self, block: str, error: ValueError) -> HeadwayError: ...


@dataclass(slots=True, frozen=True)
class EngineSpec:
    """One engine core: what its scheduler, its executor and its metrics are made from."""

    engine: EngineConfig  # the knobs, as the scenario has them
    model: ModelSpec
    gpu: Gpu
    power: Power | None  # of one GPU; None: not known
    carbon_intensity: float  # g CO2e per kWh
    cost: CostModel
    release: Release  # of vLLM whose rules it follows
    rules: Rules
    memory: MemoryBudget | None  # None: it has no KV cache, as it only encodes
    num_gpu_blocks: int
    max_model_len: int  # tokens
    policy: type
    arguments: Mapping[str, Any]  # of the policy, less SGLang's order where it is a policy
    order: tuple[type, Mapping[str, Any]] | None  # that policy and its arguments
    predicts: bool  # the policy is told how long answers will be
    seed: int
    folder: Path  # where code of the user's is looked for
    blame: Callable[[str, ValueError], HeadwayError]
    """Says where in the scenario's file the value at a dotted key is, and what is wrong with it."""
    role: Role | None = None  # None: both at once
    retries: bool = False  # clients may send a request again
    scheduler: type[SchedulerBase] | None = SchedulerBase
    """What schedules; None: that of the vLLM that is installed; the base: not chosen yet."""
    notes: tuple[str, ...] = ()  # what it does otherwise than asked, or than the real one would

    @property
    def keeps_window(self) -> bool:
        """Whether some layers keep the KV of a window alone."""
        return self.model.keeps_window and not self.engine.disable_hybrid_kv_cache_manager

    @property
    def block_bytes(self) -> float:
        """Bytes of a KV block on each GPU, all layers together."""
        return kv_block_bytes(self.model, self.engine)

    @property
    def swap_blocks(self) -> int:
        """KV blocks that `swap_space` holds."""
        return int(self.engine.swap_space * GIB // self.block_bytes)

    @property
    def host_blocks(self) -> int:
        """The blocks that `kv_offloading_size` has room for."""
        size = self.block_bytes * self.engine.tensor_parallel_size  # on all GPUs
        return int((self.engine.kv_offloading_size or 0) * GIB // size)

    def with_cost(self, cost: CostModel | None, noise: Errors | None = None) -> "EngineSpec":
        """Put a given cost, if there is one, in place of this one, and let `noise` change it."""
        found = self.cost if cost is None else self.cost.replace_rank(check_cost(cost))
        return replace(self, cost=found if noise is None else found.change_rank(noise))
