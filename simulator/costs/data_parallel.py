"""What a step costs on data-parallel ranks that go in lock-step, experts spread over their GPUs.

A rank computes attention, norms and what else every token meets for itself, by its own cost model.
The tokens of all ranks come together at the routed experts, of which each of the n = ranks x
tensor_parallel_size GPUs holds a share: whole ones with vLLM's --enable-expert-parallel, slices
without. Where tokens choose evenly a GPU has as many bytes to read and FLOPs to do either way. For
each layer with experts the hidden states are gathered from all ranks and the outcome is added up
and scattered again (vLLM's `allgather_reducescatter`): as many bytes as an all-reduce passes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from simulator.core.executor import Leap, Timing
from simulator.core.request import Step
from simulator.costs.cost_model import CostDecorator, CostModel, Counts, JointStep, Seconds
from simulator.costs.roofline import efficiency_of
from simulator.models.dtypes import HALF
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec

MAX_PADDED_TOKENS = 512
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
        """Return the seconds of all layers' experts, for so many tokens of all ranks together."""
        model, gpu, share = self.model, self.gpu, efficiency_of(self.gpu)
        gpus = self.tensor_parallel_size * self.data_parallel_size
        layers = model.num_hidden_layers - model.dense_layers
        one = (model.matrix_bytes(1, None) - model.matrix_bytes(0, None)) / gpus
        dtype = model.weight_dtype(self.dtype)
        met = model.expected_experts(tokens) / model.num_experts
        experts = model.matrix_bytes(model.num_experts, dtype) - model.matrix_bytes(0, dtype)
        moving = met * experts / gpus / (gpu.bandwidth * share.weights)
        products = 2 * model.num_experts_per_tok * one * tokens / share.flops(gpu, dtype)
        passed = 2 * (1 - 1 / self.data_parallel_size) * tokens * model.hidden_size * HALF
        exchange = share.link_latency + passed / (gpu.link_bandwidth * share.link)
        return max(moving, products) + layers * exchange

    @property
    def note(self) -> str:
        """Say what of this nobody has measured."""
        gpus = self.tensor_parallel_size * self.data_parallel_size
        far = ", also between servers" if gpus > 8 else ""
        return (
            f"experts of {self.model.name} over {gpus} GPUs: by roofline, chosen evenly, exchanged "
            f"like an all-reduce of the same bytes{far}; Headway has no measurements of them"
        )


@dataclass(frozen=True)
class DataParallelCost(CostDecorator):
    """A rank's own cost, `inner`, and that of the experts; without them, of lock-step alone.

    As a cost model it prices a step that is alike on all ranks.
    """

    ranks: int
    experts: Experts | None
    kernels: CostModel | None = None  # as `inner`, without the host's work that kernels hide

    def shared(self, tokens: Sequence[int]) -> float:
        """Get the seconds of the experts, by the tokens of each rank; 0: it runs a dummy batch."""
        if self.experts is None:
            return 0.0
        most = max(tokens)
        every = (
            self.ranks * most
            if most <= MAX_PADDED_TOKENS
            else sum(max(count, 1) for count in tokens)
        )
        return self.experts.seconds(every)

    @property
    def rank_cost(self) -> CostModel:
        return self.inner

    @property
    def joint(self) -> JointStep:
        """How the steps of ranks make one of all."""
        return JointStep(self.shared, self.kernels)

    def change_rank(self, change: Callable[[CostModel], CostModel]) -> CostModel:
        """Change what a rank does for itself; what ranks do together stays as it is."""
        kernels = None if self.kernels is None else change(self.kernels)
        return replace(self, inner=change(self.inner), kernels=kernels)

    def replace_rank(self, given: CostModel) -> CostModel:
        """Put a given cost in place of a rank's own; the ranks still go in lock-step."""
        return DataParallelCost(given, self.ranks, None)

    def execute(self, step: Step) -> Timing:
        (seconds,), (own,) = self._joint_step(step, 1)
        return Timing(seconds, own.swap, own.features)

    def leap(self, step: Step, repeats: int) -> Leap:
        return Leap(self._joint_step(step, repeats)[0])

    def _joint_step(self, step: Step, repeats: int) -> tuple[list[float], list[Timing | Leap]]:
        return self.joint.execute(self.inner, [step], [step.tokens] * self.ranks, repeats)

    def decode_seconds(self, counts: Counts, contexts: Counts) -> Seconds:
        unique, inverse = np.unique(counts, return_inverse=True)
        together = np.array([self.shared([int(count)] * self.ranks) for count in unique])[inverse]
        alone = self.inner.decode_seconds(counts, contexts)
        if self.kernels is None:
            return np.asarray(alone + together)
        kernels = self.kernels.decode_seconds(counts, contexts)
        return np.asarray(np.maximum(kernels + together, alone))

    @property
    def unmeasured(self) -> str:
        """What of its times nobody has measured: experts over ranks, whatever is known of one."""
        spread = f"experts over {self.ranks} ranks"
        return f"{self.inner.unmeasured}; {spread}" if self.inner.unmeasured else spread

    def host_seconds(self, prompts: Counts, sequences: Counts, new: Counts) -> Seconds | None:
        """Return None: a rank waits for the others, too."""
        return None

    def range_warnings(self, *logged: npt.NDArray[np.void]) -> list[str]:
        """Say what cannot be trusted: steps outside the fitted range, and the experts."""
        note = (
            f"cost {self.name or 'given'} prices one rank alone, without experts spread over "
            f"{self.ranks} ranks and their exchange"
        )
        return [self.experts.note if self.experts else note, *self.inner.range_warnings(*logged)]
