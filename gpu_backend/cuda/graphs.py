"""CUDA graphs of decode steps, in sizes: one launch from the host instead of some three hundred.

A graph replays its kernels on the addresses it was captured with, so a step's numbers (token ids,
positions, slots, lengths, block tables) go into one block of int32 that lies at the same place
every time, with one copy from pinned memory. A batch runs in the graph of the next size; rows
that only pad have length 0 and slot -1, so they read and write no cache. What the matrix products
cost follows the padded size, not the batch's.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpu_backend.input_batch import InputBatch, InputBatchBuilder

if TYPE_CHECKING:
    from gpu_backend.model import Transformer

WARM_REPLAYS = 3  # before replays are timed


def sizes_for(most: int) -> tuple[int, ...]:
    """Sizes of the graphs for batches of up to `most`: 1, 2, 4, then multiples of 8."""
    return (*(size for size in (1, 2, 4, *range(8, most, 8)) if size < most), most)


class Graphs:
    """Runs a model's decode steps, each in the graph of its size; other steps as they come.

    All `capture_sizes` of the inputs are captured when it is made. Without CUDA the same padded
    batches run uncaptured.
    """

    def __init__(self, model: "Transformer", inputs: InputBatchBuilder) -> None:
        self._model = model
        self._inputs = inputs
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # and its tokens
        if inputs.device.type == "cuda":
            self._capture_all(inputs.capture_sizes)

    def sample(self, batch: InputBatch) -> Tensor:
        """Run a step; give the likeliest next tokens, int64 [m], good until the next step.

        Nothing waits for the device.
        """
        if not batch.bucket:
            return self._model.sample(batch)
        count = len(batch.host.emits)
        if batch.bucket not in self._captured:
            return self._model.sample(batch)[:count]
        graph, tokens = self._captured[batch.bucket]
        graph.replay()
        return tokens[:count]

    def replay_all(self) -> None:
        """Replay every graph once on rows that only pad: the first time costs more."""
        for size, (graph, _) in self._captured.items():
            self._inputs.padding(size)
            graph.replay()
        if self._captured:
            torch.cuda.synchronize()

    def replay_seconds(self, size: int, repeats: int) -> float:
        """Give the device's seconds of a replay of the graph that has just run: kernels alone."""
        graph, _ = self._captured[size]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        for _ in range(WARM_REPLAYS):
            graph.replay()
        events[0].record()
        for _ in range(repeats):
            graph.replay()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3 / repeats

    def _capture_all(self, sizes: list[int]) -> None:
        """Capture every size, the largest first: its memory then serves the others."""
        pool = torch.cuda.graph_pool_handle()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            for size in reversed(sizes):
                self._captured[size] = self._capture(size, pool, aside)
            torch.cuda.synchronize()

    def _capture(
        self, size: int, pool: object, aside: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture the graph of one size; `aside` is the stream of all warm-up runs, whose
        libraries keep a workspace for each stream."""
        batch = self._inputs.padding(size)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._model.sample(batch)  # compiles and makes handles, which a capture may not
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type]
            tokens = self._model.sample(batch)
        return graph, tokens
