"""CUDA graphs of steps, in sizes: one launch from the host instead of some three hundred.

A graph replays its kernels on the addresses it was captured with, so a step's numbers (token ids,
positions, slots, lengths, block tables) go into one block of int32 that lies at the same place
every time, with one copy from pinned memory. A batch runs in the graph of the next size; rows
that only pad have length 0 and slot -1, so they read and write no cache. What the matrix products
cost follows the padded size, not the batch's.

Steps of decodes alone have graphs by sequences, whole ones. Steps with prompts have graphs by
tokens, which end before the output projection: which tokens are sampled after differs from step to
step, and its four launches go out while the graph runs.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from gpu_backend.input_batch import InputBatch, InputBatchBuilder
from simulator.util.errors import HeadwayWarning

if TYPE_CHECKING:
    from gpu_backend.model import Transformer

T = TypeVar("T")
MIXED_SIZES = (16, 32, 64, 128, 256, 384, 512)
"""Tokens of graphs of steps with prompts; vLLM 0.33 has such graphs for up to 512 tokens
(`max_cudagraph_capture_size`)."""


def sizes_for(most: int) -> tuple[int, ...]:
    """Sizes of the graphs for batches of up to `most`: 1, 2, 4, then multiples of 8."""
    return (*(size for size in (1, 2, 4, *range(8, most, 8)) if size < most), most)


def mixed_sizes_for(most: int) -> tuple[int, ...]:
    """Sizes of the graphs for steps with prompts of up to so many tokens."""
    return tuple(size for size in MIXED_SIZES if size <= most)


class Graphs:
    """Runs a model's steps, each in the graph of its size, and those that have none as they come.

    All `capture_sizes` and `mixed_sizes` of the inputs are captured when it is made. Without CUDA
    the same padded batches run uncaptured. Where steps with prompts cannot be captured a warning
    tells, and the inputs lose their `mixed_sizes`.
    """

    def __init__(self, model: "Transformer", inputs: InputBatchBuilder) -> None:
        self._model = model
        self._inputs = inputs
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # and its tokens
        self.mixed: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = {}
        self.bytes = 0  # of the device's memory that they hold
        if inputs.device.type == "cuda":
            self._capture_all()

    def sample(self, batch: InputBatch) -> Tensor:
        """Run a step; give the likeliest next tokens, int64 [m], good until the next step.

        Nothing waits for the device.
        """
        if batch.mixed and batch.bucket in self.mixed:
            graph, hidden = self.mixed[batch.bucket]
            graph.replay()
            return self._model.next_tokens(*hidden, batch)
        if not batch.bucket or batch.mixed:
            return self._model.sample(batch)
        count = len(batch.host.emits)
        if batch.bucket not in self.captured:
            return self._model.sample(batch)[:count]
        graph, tokens = self.captured[batch.bucket]
        graph.replay()
        return tokens[:count]

    def replay_all(self) -> None:
        """Replay every graph once on rows that only pad: the first time costs more."""
        for size, (graph, _) in self.captured.items():
            self._inputs.padding(size)
            graph.replay()
        for size, (graph, _) in self.mixed.items():
            self._inputs.padding(size, mixed=True)
            graph.replay()
        if self.captured:
            torch.cuda.synchronize()

    def _capture_all(self) -> None:
        """Capture every size, the largest first: its memory then serves the others."""
        model, inputs = self._model, self._inputs
        free = torch.cuda.mem_get_info(inputs.device)[0]
        pool = torch.cuda.graph_pool_handle()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            try:
                for size in reversed(inputs.mixed_sizes):
                    batch = inputs.padding(size, mixed=True)
                    self.mixed[size] = _capture(model.hidden, batch, pool, aside)
            except RuntimeError as error:
                self.mixed.clear()
                inputs.mixed_sizes = []
                warnings.warn(
                    "steps with prompts are launched kernel by kernel, since they could not be "
                    f"captured: {str(error).splitlines()[0]}",
                    HeadwayWarning,
                    stacklevel=4,
                )
                pool = torch.cuda.graph_pool_handle()
            for size in reversed(inputs.capture_sizes):
                self.captured[size] = _capture(model.sample, inputs.padding(size), pool, aside)
            torch.cuda.synchronize()
        self.bytes = free - torch.cuda.mem_get_info(inputs.device)[0]


def _capture(
    run: Callable[[InputBatch], T], batch: InputBatch, pool: object, aside: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a graph; `aside` is the stream of all warm-up runs, whose libraries keep a workspace
    for each stream."""
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run(batch)  # compiles and makes handles, which a capture may not
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type]
        found = run(batch)
    return graph, found
