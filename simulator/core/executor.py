"""The seam: whoever carries out a step and says how long it took. A cost model is one, a GPU
is another, and the loop never asks which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from simulator.core.request import Step

MIXED_GRAPH_PROMPTS = 8
"""Chunks of prompts that a CUDA graph of a step with prompts has room for, on our own engine: its
attention is launched for so many tiles that are not full."""


@dataclass(slots=True, eq=False)
class Timing:
    """What one step takes, in s, and by how much each part of its work makes it longer."""

    seconds: float
    swap: float = 0.0  # copies of preempted requests' KV blocks
    features: Mapping[str, float] | None = None  # what each feature does before it, by its key
    host: float = 0.0  # the engine's work on the host, where kernels hide the rest of it


@dataclass(slots=True, eq=False)
class Leap:
    """What each step of a stretch of decode steps takes, in s."""

    seconds: list[float]
    host: Sequence[float] = ()  # by which the host's work makes each longer; (): none
    swap: ClassVar[float] = 0.0
    features: ClassVar[None] = None


class StageTimes(NamedTuple):
    """What a step takes, in s: of the host, of each pipeline stage, and from stage to stage."""

    host: float
    stages: list[float]
    send: float


class Executor(Protocol):
    """Carries out forward passes."""

    def execute(self, step: Step) -> Timing:
        """Carry out one forward pass and say what it took."""


@runtime_checkable
class CanLeap(Executor, Protocol):
    """An executor that knows beforehand what a stretch of decode steps will take."""

    def leap(self, step: Step, repeats: int) -> Leap:
        """Say what each of `repeats` successive decode steps takes, `step` being the first.

        `step` has no prefills, copies or loads nothing; every further one has `step.decodes` more
        tokens of context. Item i equals, to the last bit, what `execute` says of the i-th of them.
        """


@runtime_checkable
class StagedExecutor(Executor, Protocol):
    """An executor whose GPUs have a part of the layers each: pipeline parallelism."""

    def stage_seconds(self, step: Step) -> StageTimes:
        """Say what a step takes of the host, of each stage, and between them."""
