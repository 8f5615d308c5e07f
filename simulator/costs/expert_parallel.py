"""What a step costs where the experts are spread over the GPUs of all data-parallel ranks.

A rank computes attention, norms and what else every token meets for itself, by its own cost model.
The tokens of all ranks come together at the routed experts, of which each of the n = ranks x
tensor_parallel_size GPUs holds a share: whole ones with vLLM's --enable-expert-parallel, slices
without. Where tokens choose evenly a GPU has as many bytes to read and FLOPs to do either way. For
each layer with experts the hidden states are gathered from all ranks and the outcome is added up
and scattered again (vLLM's `allgather_reducescatter`): as many bytes as an all-reduce passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.core.request import Step
from simulator.costs.cost_model import CostModel
from simulator.costs.efficiency import efficiency_of
from simulator.costs.joint_step import Joint
from simulator.models.gpus import Gpu
from simulator.models.spec import HALF, ModelSpec

Counts = npt.NDArray[np.int64]

PADDED = 512
"""Tokens up to which a step runs as a CUDA graph (vLLM's default), where all ranks are padded to
the one with the most (`coordinate_batch_across_dp`)."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of a model on the GPUs of a server."""

    model: ModelSpec
    gpu: Gpu
    dtype: str
    tensor_parallel_size: int
    data_parallel_size: int

    def seconds(self, tokens: int) -> float:
        """Give the seconds of all layers' experts, for so many tokens of all ranks together."""
        model, gpu, share = self.model, self.gpu, efficiency_of(self.gpu)
        gpus = self.tensor_parallel_size * self.data_parallel_size
        layers = model.num_hidden_layers - model.dense_layers
        one = model.expert_parameters * layers / gpus
        width = model.linear_bytes_per_parameter(self.dtype)
        moving = model.experts_met(tokens) * one * width / (gpu.bandwidth * share.weights)
        flops = gpu.flops(self.dtype)
        reached = flops * (share.compute if flops == gpu.bf16_flops else share.compute_fp8)
        products = 2 * model.num_experts_per_tok * one * tokens / reached
        passed = 2 * (1 - 1 / self.data_parallel_size) * tokens * model.hidden_size * HALF
        exchange = share.link_latency + passed / (gpu.link_bandwidth * share.link)
        return max(moving, products) + layers * exchange

    @property
    def note(self) -> str:
        """Say what of this nobody has measured."""
        gpus = self.tensor_parallel_size * self.data_parallel_size
        far = ", also between servers" if gpus > 8 else ""
        return (
            f"experts of {self.model.name} over {gpus} GPUs: by roofline, chosen evenly; their "
            f"exchange takes what an all-reduce of the same bytes would{far}: not measured"
        )


@dataclass(frozen=True)
class ExpertCost:
    """The cost of a rank alone, `own`, and of the experts; without them, of lock-step alone.

    As a cost model it prices a step that is alike on all ranks.
    """

    own: CostModel
    ranks: int
    experts: Experts | None
    kernels: CostModel | None = None  # as `own`, without the host's work that kernels hide

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.own.name

    def shared(self, tokens: Sequence[int]) -> float:
        """Give the seconds of the experts, by the tokens of each rank; 0: it runs a dummy batch."""
        if self.experts is None:
            return 0.0
        most = max(tokens)
        every = self.ranks * most if most <= PADDED else sum(max(count, 1) for count in tokens)
        return self.experts.seconds(every)

    @property
    def joint(self) -> Joint:
        """How the steps of ranks make one of all."""
        return Joint(self.shared, self.kernels)

    def execute(self, step: Step) -> float:
        """Give the seconds of a step."""
        return self.leap(step, 1)[0]

    def leap(self, step: Step, repeats: int) -> list[float]:
        """Give the seconds of each of so many successive decode steps."""
        return self.joint.seconds(self.own, [step], [step.tokens] * self.ranks, repeats)

    def decode_seconds(self, counts: Counts, contexts: Counts) -> npt.NDArray[np.float64]:
        """Give the seconds of pure decode steps of so many sequences that read so many tokens."""
        found, places = np.unique(counts, return_inverse=True)
        together = np.array([self.shared([int(count)] * self.ranks) for count in found])[places]
        own = self.own.decode_seconds(counts, contexts)
        if self.kernels is None:
            return np.asarray(own + together)
        kernels = self.kernels.decode_seconds(counts, contexts)
        return np.asarray(np.maximum(kernels + together, own))

    def swap_seconds(self, step: Step) -> float:
        """Give the seconds of a step's copies of KV blocks to the host and back."""
        return self.own.swap_seconds(step)

    @property
    def residuals(self) -> Mapping[str, float] | None:
        """Those of a rank's own cost."""
        return self.own.residuals

    def with_copies(self, seconds: float, step: Step) -> float:
        """Give the time of a step whose compute takes so many seconds, with its copies."""
        return self.own.with_copies(seconds, step)

    def logged_swap_seconds(self, swaps: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
        """Give the seconds of logged copies of KV blocks (rows of dtype SWAP)."""
        return self.own.logged_swap_seconds(swaps)

    def outside(self, steps: npt.NDArray[np.void]) -> list[str]:
        """Say what cannot be trusted: steps outside the fitted range, and the experts."""
        note = (
            f"cost {self.name or 'given'} is that of a rank alone: experts spread over "
            f"{self.ranks} ranks, and their exchange, are not in it"
        )
        return [self.experts.note if self.experts else note, *self.own.outside(steps)]


def split(cost: CostModel) -> tuple[CostModel, Joint | None]:
    """Give what a rank does for itself, and what makes one step of all; None: nothing does."""
    return (cost.own, cost.joint) if isinstance(cost, ExpertCost) else (cost, None)


def instead(cost: CostModel, given: CostModel) -> CostModel:
    """Put a given cost in place of another; ranks that go in lock-step still do."""
    return ExpertCost(given, cost.ranks, None) if isinstance(cost, ExpertCost) else given
