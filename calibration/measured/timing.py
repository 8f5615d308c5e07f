"""An executor: what a step takes with the engine's overhead on top of its kernels."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from calibration.measured.engine import version
from calibration.measured.overheads import (
    FLASHINFER_LAUNCH,
    KEY_SECONDS,
    LAYER_LAUNCH,
    MULTIPROCESSORS,
    SPLIT_SINCE,
    THREAD_BLOCKS,
    Overhead,
    overhead,
)
from calibration.measured.runs import Run
from simulator.assemble import Parts
from simulator.cost import CostModel
from simulator.piecewise import PiecewiseCost
from simulator.request import Step
from simulator.scheduler import Scheduler


@dataclass
class Timing:
    """Kernels, and what the engine adds to them.

    Decode attention is split among as many thread blocks as `THREAD_BLOCKS` per multiprocessor
    allow, each of which takes `per_key` seconds a key. Where there are more pairs of sequence and
    KV head than multiprocessors it waits for the longest sequence, else they share evenly.
    """

    kernels: CostModel
    scheduler: Scheduler
    overhead: Overhead
    launch: float  # s, of a step with prompts
    per_key: float = 0.0
    kv_heads: int = 1  # on each GPU

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.kernels.name

    def outside(self, steps: npt.NDArray[np.void]) -> list[str]:
        """Say which logged steps lie outside the fitted range."""
        return self.kernels.outside(steps)

    def execute(self, step: Step) -> float:
        """Give the seconds that a step takes."""
        seconds = self.kernels.execute(step)
        if not step.prefills:
            return self._with_host(step, [seconds])[0]
        return self._with_host(step, [seconds + self.launch])[0]

    def leap(self, step: Step, repeats: int) -> list[float]:
        """Give the seconds of each of so many successive decode steps."""
        return self._with_host(step, self.kernels.leap(step, repeats))

    def _with_host(self, step: Step, kernels: list[float]) -> list[float]:
        extra, sequences = self.overhead, step.decodes + len(step.prefills)
        waits = extra.step + extra.per_sequence * sequences
        least = extra.host + extra.host_per_sequence * sequences
        pairs = step.decodes * self.kv_heads
        if not self.per_key or not pairs:
            return [max(seconds, least) + waits for seconds in kernels]
        key = self.per_key / max(1, THREAD_BLOCKS * MULTIPROCESSORS // pairs)
        keys = self._longest() if pairs > MULTIPROCESSORS else step.context / step.decodes
        return [max(seconds + key * (keys + k), least) + waits for k, seconds in enumerate(kernels)]

    def _longest(self) -> int:
        """Give the tokens in the cache of the running request that has most of them."""
        tick = self.scheduler.decodes.tick
        return max(
            request.computed + (tick - request.joined if request.joined >= 0 else 0)
            for request in self.scheduler.running
        )


def timing(run: Run, parts: Parts, scheduler: Scheduler, tensor_parallel_size: int) -> Timing:
    """Put the overhead of a run's engine on its kernels, in place of the profile's own."""
    kernels, model = parts.cost, parts.model
    if isinstance(kernels, PiecewiseCost):
        kernels = replace(
            kernels,
            overhead=0.0,
            host=0.0,
            host_per_sequence=0.0,
            host_per_prefill=0.0,
            host_per_prefill_token=0.0,
        )
    b200 = parts.gpu.name == "B200"
    uneven = b200 and version(run.word("engine_version")) >= SPLIT_SINCE
    return Timing(
        kernels=kernels,
        scheduler=scheduler,
        overhead=overhead(run),
        launch=model.num_hidden_layers * (FLASHINFER_LAUNCH if b200 else LAYER_LAUNCH),
        per_key=KEY_SECONDS * model.num_hidden_layers if uneven else 0.0,
        kv_heads=max(1, model.num_key_value_heads // tensor_parallel_size),
    )
