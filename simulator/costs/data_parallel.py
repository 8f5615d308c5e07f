"""What a step costs on data-parallel ranks that go in lock-step, experts spread over their GPUs.

A rank computes attention, norms and what else every token meets for itself, by its own cost model.
The tokens of all ranks come together at the routed experts, of which each of the n = ranks x
tensor_parallel_size GPUs holds a share: whole ones with vLLM's --enable-expert-parallel, slices
without. Where tokens choose evenly a GPU has as many bytes to read and FLOPs to do either way. For
each layer with experts the hidden states are gathered from all ranks and the outcome is added up
and scattered again (vLLM's `allgather_reducescatter`): as many bytes as an all-reduce passes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from simulator.core.executor import CanLeap, Executor
from simulator.core.request import Step
from simulator.costs.cost_model import CostDecorator, CostModel, Counts, Seconds
from simulator.costs.roofline import efficiency_of
from simulator.models.gpus import Gpu
from simulator.models.spec import HALF, ModelSpec

MAX_PADDED_TOKENS = 512
"""Tokens up to which a step runs as a CUDA graph (vLLM's default), where all ranks are padded to
the one with the most (`coordinate_batch_across_dp`)."""


def no_shared_work(tokens: Sequence[int]) -> float:
    """Let ranks share no work: a step takes as long as that of the slowest."""
    return 0.0


@dataclass(frozen=True)
class JointStep:
    """How the steps of ranks make one of all: the slowest rank's own part, then the shared one.

    Where the host's work is hidden behind the kernels (asynchronous scheduling) it hides behind
    those of `shared`, too: `kernels` then prices a rank's step without it.
    """

    shared: Callable[[Sequence[int]], float] = no_shared_work
    """Seconds of what all ranks compute together, by the tokens of each; 0: a dummy batch."""
    kernels: CanLeap | None = None

    def seconds(
        self, own: Executor, steps: Sequence[Step], tokens: Sequence[int], repeats: int
    ) -> list[float]:
        """Return the seconds of the ranks' steps, so often; `tokens` has those of all ranks."""
        together = self.shared(tokens)
        alone = _slowest(own, steps, repeats)
        if self.kernels is None:
            return [seconds + together for seconds in alone]
        kernels = _slowest(self.kernels, steps, repeats)
        pairs = zip(kernels, alone, strict=True)
        return [max(seconds + together, least) for seconds, least in pairs]


def _slowest(executor: Executor, steps: Sequence[Step], repeats: int) -> Iterable[float]:
    """Return the seconds of the slowest of some steps, and of each repeat."""
    if repeats == 1:
        return [max(map(executor.execute, steps))]
    assert isinstance(executor, CanLeap)
    return map(max, zip(*(executor.leap(step, repeats) for step in steps), strict=True))


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
        one, dtype = model.expert_parameters * layers / gpus, model.weight_dtype(self.dtype)
        met = model.expected_experts(tokens) / model.num_experts
        moving = met * model.expert_bytes(dtype) / gpus / (gpu.bandwidth * share.weights)
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
            f"experts of {self.model.name} over {gpus} GPUs: by roofline, chosen evenly; their "
            f"exchange takes what an all-reduce of the same bytes would{far}: not measured"
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
    def joint(self) -> JointStep:
        """How the steps of ranks make one of all."""
        return JointStep(self.shared, self.kernels)

    def execute(self, step: Step) -> float:
        return self.leap(step, 1)[0]

    def leap(self, step: Step, repeats: int) -> list[float]:
        return self.joint.seconds(self.inner, [step], [step.tokens] * self.ranks, repeats)

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

    def range_warnings(self, steps: npt.NDArray[np.void]) -> list[str]:
        """Say what cannot be trusted: steps outside the fitted range, and the experts."""
        note = (
            f"cost {self.name or 'given'} is that of a rank alone: experts spread over "
            f"{self.ranks} ranks, and their exchange, are not in it"
        )
        return [self.experts.note if self.experts else note, *self.inner.range_warnings(steps)]


def split_ranks(cost: CostModel) -> tuple[CostModel, JointStep | None]:
    """Return what a rank does for itself, and what makes one step of all; None: nothing does."""
    return (cost.inner, cost.joint) if isinstance(cost, DataParallelCost) else (cost, None)


def change_rank_cost(cost: CostModel, change: Callable[[CostModel], CostModel]) -> CostModel:
    """Change what a rank does for itself; what ranks do together stays as it is."""
    if not isinstance(cost, DataParallelCost):
        return change(cost)
    kernels = None if cost.kernels is None else change(cost.kernels)
    return replace(cost, inner=change(cost.inner), kernels=kernels)


def replace_rank_cost(cost: CostModel, given: CostModel) -> CostModel:
    """Put a given cost in place of another; ranks that go in lock-step still do."""
    if isinstance(cost, DataParallelCost):
        return DataParallelCost(given, cost.ranks, None)
    return given
