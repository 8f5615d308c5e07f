"""What encoding images and clips adds to a step, before the language model runs.

By a table of one's own, [tokens, seconds] of one image, or by roofline from the `vision_config` of
the model, which nobody has measured: products and attention at the shares of the FLOP/s that the
language model's kernels reach, no less than reading the weights once, and a launch of each kernel
in a step that encodes. Images encoded in one step are added up; their batch is no faster.
"""

from dataclasses import dataclass

import numpy as np

from simulator.core.executor import Leap, Timing
from simulator.core.request import Step
from simulator.costs.cost_model import CostDecorator, CostModel, Counts, Seconds
from simulator.costs.linear import Fitted
from simulator.costs.roofline import LAUNCH, efficiency_of
from simulator.features.images.work import KEY, work_of
from simulator.models.dtypes import HALF
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec
from simulator.util.errors import ScenarioError

KERNELS = 9
"""Of a layer: two norms, rotary embedding, attention, activation, four products."""


@dataclass(frozen=True)
class NothingElse(Fitted):
    """Of an engine that encodes for others: it runs no language model."""

    name: str = "encoder"

    def execute(self, step: Step) -> Timing:
        return Timing(0.0)

    def leap(self, step: Step, repeats: int) -> Leap:
        return Leap([0.0] * repeats)

    def decode_seconds(self, counts: Counts, contexts: Counts) -> Seconds:
        return np.zeros(len(counts))


@dataclass(frozen=True)
class EncoderCost(CostDecorator):
    """A cost and what encoding adds; of it `tokens` and `seconds` are the table for one image."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    launch: float = 0.0  # s, of a step that encodes
    least: float = 0.0  # s, that the images of a step take together
    measured: bool = True

    @property
    def unmeasured(self) -> str:
        if self.measured:
            return self.inner.unmeasured
        return self.unmeasured_and("what encoding adds")

    def image_seconds(self, tokens: int) -> float:
        """Return what one image takes; beyond the table it goes on straight, through 0 if short."""
        most, last = self.tokens[-1], self.seconds[-1]
        if tokens <= most:
            return float(np.interp(tokens, self.tokens, self.seconds))
        before, less = ((0, *self.tokens)[-2], (0.0, *self.seconds)[-2])
        return last + (tokens - most) * max(last - less, 0.0) / (most - before)

    def _encoding(self, step: Step) -> float:
        work = work_of(step)
        if work is None or not work.encoded:
            return 0.0
        together = sum(map(self.image_seconds, work.sizes()))
        return self.launch + max(together, self.least)

    def execute(self, step: Step) -> Timing:
        """Say what a step takes, with what is encoded before it."""
        timing, encoding = self.inner.execute(step), self._encoding(step)
        seconds = timing.seconds + encoding
        return Timing(seconds, timing.swap, {**(timing.features or {}), KEY: encoding}, timing.host)

    def leap(self, step: Step, repeats: int) -> Leap:
        """Say what successive steps of decodes take, which encode nothing."""
        return self.inner.leap(step, repeats)


def encoder_cost(inner: CostModel, model: ModelSpec, gpu: Gpu, gpus: int) -> EncoderCost:
    """Put what encoding takes by roofline on an engine's cost; ValueError of a model unknown."""
    vision = model.vision
    if vision is None:
        what = f"must be given: the config.json of {model.name} has no vision_config that is known"
        raise ScenarioError("engine.multimodal_config.encoder_seconds", what)
    share = efficiency_of(gpu)
    rows = [2**n for n in range(18)]
    times = []
    for tokens in rows:
        products, attention = vision.flops(tokens)
        seconds = products / share.compute + attention / share.attention
        times.append(seconds / (gpu.bf16_flops * gpus))
    weights = HALF * vision.parameters / gpus
    return EncoderCost(
        inner,
        tuple(rows),
        tuple(times),
        launch=KERNELS * vision.layers * LAUNCH,
        least=weights / (gpu.bandwidth * share.weights),
        measured=False,
    )
