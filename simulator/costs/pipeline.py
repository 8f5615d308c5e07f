"""What a step costs on GPUs that have a part of the layers each: pipeline parallelism.

Each stage has its share of the layers, and of all that they take; the last one has the output
projection and the sampler besides. What an engine adds to the kernels of a step every stage adds to
its own. From stage to stage go two hidden states of 16 bits for each token, the residual and what
is to be added to it (vLLM's `IntermediateTensors`); GPUs that share a layer send a part each and
pass it on among themselves, so the time is that of the whole. The host prepares one batch at a
time, while the stages compute others. No pipeline was measured: the layers are taken to be alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simulator.core.executor import Leap, StageTimes, Timing
from simulator.core.request import Step
from simulator.costs.cost_model import CostDecorator, CostModel, Counts, Seconds
from simulator.costs.linear import Fitted
from simulator.costs.roofline import efficiency_of
from simulator.models.dtypes import HALF
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec

SENT = 2
"""Hidden states of a token that a stage sends to the next."""


@dataclass(frozen=True)
class Stage:
    """A part of a model's layers; `last`: with the output projection."""

    layers: int
    share: float  # of the model's layers
    last: bool

    def part(self, cost: Fitted) -> Fitted:
        """Return what a stage takes of what the whole model takes."""
        return cost.part(self.share, last=self.last)


def stages_of(model: ModelSpec, pipeline_parallel_size: int) -> list[Stage]:
    """Return the stages of a model."""
    layers = model.split_layers(pipeline_parallel_size)
    total, last = model.num_hidden_layers, pipeline_parallel_size - 1
    return [Stage(count, count / total, at == last) for at, count in enumerate(layers)]


@dataclass(frozen=True)
class PipelineCost(CostDecorator):
    """The cost of each stage, and of what goes between them; `inner` is that of all layers at once.

    `execute` is the time of a step on its way through an empty pipeline, `decode_seconds` that of
    the slowest stage, which is the pace of a full one.
    """

    inner: Fitted
    stages: Sequence[CostModel]
    send: float = 0.0  # s, between two stages
    send_per_token: float = 0.0

    @property
    def unmeasured(self) -> str:
        """What of its times nobody has measured: the split, whatever is known of all layers."""
        return self.unmeasured_and(f"the split into {len(self.stages)} stages")

    def stage_seconds(self, step: Step) -> StageTimes:
        """Say what a step takes, in s: of the host, of each stage, and from stage to stage."""
        host = self.inner.host_step_seconds(step)
        send = self.send + self.send_per_token * step.tokens
        return StageTimes(host, [stage.execute(step).seconds for stage in self.stages], send)

    def execute(self, step: Step) -> Timing:
        """Say what a step takes from the first stage to the last."""
        host, stages, send = self.stage_seconds(step)
        return Timing(host + sum(stages) + send * (len(stages) - 1))

    def leap(self, step: Step, repeats: int) -> Leap:
        """Say what each of so many successive decode steps takes, one after the other."""
        steps = (Step([], step.decodes, step.context + at * step.decodes) for at in range(repeats))
        return Leap([self.execute(one).seconds for one in steps])

    def decode_seconds(self, counts: Counts, contexts: Counts) -> Seconds:
        """Return the seconds of steps of so many decodes in the slowest stage."""
        paces = [stage.decode_seconds(counts, contexts) for stage in self.stages]
        return np.asarray(np.max(paces, axis=0))

    def host_seconds(self, prompts: Counts, sequences: Counts, new: Counts) -> Seconds | None:
        """Return None: where batches overlap nobody can tell who waits for whom."""
        return None


class Link(NamedTuple):
    """What one stage sends to the next by."""

    latency: float  # s
    bandwidth: float  # bytes/s


def link_of(gpu: Gpu) -> Link:
    """Return what the link of a GPU reaches."""
    share = efficiency_of(gpu)
    return Link(share.link_latency, gpu.link_bandwidth * share.link)


def make_pipeline(
    whole: Fitted, stages: Sequence[Fitted], model: ModelSpec, link: Link
) -> PipelineCost:
    """Put stages together."""
    return PipelineCost(
        whole,
        tuple(stage.without_host() for stage in stages),
        link.latency,
        SENT * model.hidden_size * HALF / link.bandwidth,
    )
