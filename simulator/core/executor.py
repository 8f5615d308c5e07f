"""The seam: whoever carries out a step and says how long it took. A cost model is one, a GPU
is another, and the loop never asks which."""

from typing import Protocol, runtime_checkable

from simulator.core.request import Step

MIXED_GRAPH_PROMPTS = 8
"""Chunks of prompts that a CUDA graph of a step with prompts has room for, on our own engine: its
attention is launched for so many tiles that are not full."""


class Executor(Protocol):
    """Carries out forward passes."""

    def execute(self, step: Step) -> float:
        """Carry out one forward pass and return the seconds it took."""


@runtime_checkable
class CanLeap(Executor, Protocol):
    """An executor that knows beforehand what a stretch of decode steps will take."""

    def leap(self, step: Step, repeats: int) -> list[float]:
        """Seconds that each of `repeats` successive decode steps takes, `step` being the first.

        `step` has no prefills; every further one has `step.decodes` more tokens of context.
        Item i equals, to the last bit, what `execute` says of the i-th of them.
        """


@runtime_checkable
class StagedExecutor(Executor, Protocol):
    """An executor whose GPUs have a part of the layers each: pipeline parallelism."""

    def stage_seconds(self, step: Step) -> tuple[float, list[float], float]:
        """Say what a step takes, in s: of the host, of each stage, and from stage to stage."""
