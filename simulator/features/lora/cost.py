"""What adapters (LoRA) add to a step: kernels beside each projection, and loading.

By roofline: nobody has measured it. vLLM runs two kernels, shrink and expand, beside each group of
projections of a layer (queries, keys and values; attention's output; gate and up; down), in any
step with an adapter: it has CUDA graphs without them for the others. They read the weights of every
adapter in the step once, and for each token under an adapter inputs and outputs of the projections.
Before the step come the copies of adapters to the GPU, over its bus, and of those that are not in
host memory the reading: `lora_load_bandwidth`. Its default is what vLLM 0.33's own loader reached
on one core, from the page cache (38 ms for the 84 MB of a rank of 16 for Llama-3-8B, 2.8 GB/s for
one of 64); a disk or a download is slower. The step waits for all of it.
"""

from dataclasses import dataclass

from simulator.core.engine_config import EngineConfig
from simulator.core.executor import Leap, Timing
from simulator.core.request import Step
from simulator.costs.cost_model import CostDecorator, CostModel
from simulator.costs.roofline import LAUNCH, STREAM_SHARE, efficiency_of
from simulator.features.lora.size import adapter_size
from simulator.features.lora.work import KEY, work_of
from simulator.models.dtypes import HALF
from simulator.models.gpus import HOST_SHARE, Gpu
from simulator.models.spec import ModelSpec

KERNELS = 8
"""Of a layer."""


@dataclass(frozen=True)
class LoraCost(CostDecorator):
    """A cost and what adapters add; `decode_seconds` are those of the model without an adapter."""

    kernels: float  # s, of a step with an adapter
    per_adapter: float  # s, to read its weights
    per_token: float  # s, under an adapter
    copy: float  # s, of an adapter to the GPU
    read: float  # s, of an adapter into host memory

    @property
    def unmeasured(self) -> str:
        return self.unmeasured_and("what adapters add")

    def _seconds(self, step: Step) -> float:
        work = work_of(step)
        if work is None or not work.active:
            return 0.0
        return self.kernels + work.active * self.per_adapter + work.tokens * self.per_token

    def execute(self, step: Step) -> Timing:
        """Say what a step takes, with what is loaded before it."""
        timing, work = self.inner.execute(step), work_of(step)
        if work is None:
            return timing
        loading = work.read * self.read + work.copied * self.copy
        seconds = timing.seconds + self._seconds(step) + loading
        return Timing(seconds, timing.swap, {**(timing.features or {}), KEY: loading}, timing.host)

    def leap(self, step: Step, repeats: int) -> Leap:
        """Say what successive steps of decodes take, before which nothing is loaded."""
        more, leap = self._seconds(step), self.inner.leap(step, repeats)
        return Leap([seconds + more for seconds in leap.seconds], leap.host)


def lora_cost(inner: CostModel, model: ModelSpec, gpu: Gpu, engine: EngineConfig) -> LoraCost:
    """Put what adapters add on an engine's cost; ValueError for models that have none here."""
    size = adapter_size(model, engine.max_lora_rank, engine.tensor_parallel_size)
    share, weights = efficiency_of(gpu), HALF * size.weights
    moving = size.moved / (gpu.bandwidth * STREAM_SHARE)
    products = 2 * size.weights / (gpu.bf16_flops * share.compute)
    whole = HALF * adapter_size(model, engine.max_lora_rank).weights
    return LoraCost(
        inner,
        kernels=KERNELS * model.num_hidden_layers * LAUNCH,
        per_adapter=weights / (gpu.bandwidth * share.weights),
        per_token=max(moving, products),
        copy=weights / (gpu.host_bandwidth * HOST_SHARE),
        read=whole / (engine.lora_load_bandwidth * 1e9),
    )
