"""Steps of the engine without CUDA graphs or kernels of its own, to compare theirs with."""

from collections.abc import Iterator
from contextlib import contextmanager

from gpu_backend.engine import Engine
from gpu_backend.input_batch import InputBatchBuilder
from gpu_backend.torch_backend import TorchBackend


def use_torch(engine: Engine) -> None:
    """Do what lies between the products in plain torch, every step launched as it comes."""
    engine.model.backend = TorchBackend(engine.spec, engine.cache, engine.rotary)
    engine.inputs = InputBatchBuilder(engine.states, engine.block_size, engine.device)
    engine.graphs = None


@contextmanager
def launched_one_by_one(engine: Engine) -> Iterator[None]:
    """Let no step run as a CUDA graph within a `with` block."""
    graphs, inputs = engine.graphs, engine.inputs
    sizes = inputs.capture_sizes, inputs.mixed_sizes
    engine.graphs, inputs.capture_sizes, inputs.mixed_sizes = None, [], []
    try:
        yield
    finally:
        engine.graphs, (inputs.capture_sizes, inputs.mixed_sizes) = graphs, sizes
