"""CUDA graphs of decode steps, with stand-ins for the model and for what CUDA would do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'headway[gpu]'")

import torch

from gpu_backend.cuda.graphs import Graphs, sizes_for
from gpu_backend.input_batch import HostInputs, InputBatch
from gpu_backend.staging import StagingBuffer, aligned

CPU = torch.device("cpu")


class Model:
    """Says of each row its id plus its position; behaves as launched kernels do when captured."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(max_position_embeddings=512)
        self.seen: list[InputBatch] = []
        self.capturing: list[Callable[[], object]] | None = None

    def sample(self, batch: InputBatch) -> torch.Tensor:
        self.seen.append(batch)
        out = torch.empty(len(batch.emits), dtype=torch.int64)

        def kernel() -> None:
            out.copy_((batch.ids + batch.positions)[: len(out)])

        if self.capturing is None:
            kernel()
        else:
            self.capturing.append(kernel)
        return out


def cache(on_cuda: bool = False) -> SimpleNamespace:
    """What Graphs asks of a KV cache."""
    kv = SimpleNamespace(device=CPU, is_cuda=on_cuda)
    return SimpleNamespace(block_size=16, num_blocks=1000, kv=kv)


def decodes(rows: int, emits: int | None = None) -> InputBatch:
    """A step in which each of some rows has one new token."""
    count = np.arange(rows, dtype=np.int32)
    tables = np.arange(rows * 16, dtype=np.int32).reshape(rows, 16) + 1
    emitting = count[: rows if emits is None else emits]
    host = HostInputs(
        starts=10 * count, counts=count * 0 + 1, lengths=10 * count + 1,
        query_starts=np.arange(rows + 1, dtype=np.int32), ids=100 + count, positions=10 * count,
        slots=7 + count, tables=tables, emits=emitting,
    )  # fmt: skip
    ids, positions, slots, lengths = (
        torch.from_numpy(part) for part in (host.ids, host.positions, host.slots, host.lengths)
    )
    return InputBatch(
        decodes=rows, ids=ids, positions=positions, slots=slots, lengths=lengths,
        width=torch.tensor([16]), tables=torch.from_numpy(tables),
        emits=torch.from_numpy(emitting), on_host=host,
    )  # fmt: skip


def test_sizes() -> None:
    """1, 2, 4, then multiples of 8, and the largest batch itself."""
    assert sizes_for(20) == (1, 2, 4, 8, 16, 20)
    assert sizes_for(1) == (1,)
    assert sizes_for(256)[-2:] == (248, 256)


def test_a_batch_is_padded_with_rows_that_touch_no_cache() -> None:
    """Three rows run as four: the fourth has length 0 and slot -1; three tokens come out."""
    model = Model()
    tokens = Graphs(model, cache(), 8).sample(decodes(3))
    assert tokens.tolist() == [100, 111, 122]
    batch = model.seen[-1]
    assert batch.ids.tolist() == [100, 101, 102, 0]
    assert batch.positions.tolist() == [0, 10, 20, 0]
    assert batch.slots.tolist() == [7, 8, 9, -1]
    assert batch.lengths.tolist() == [1, 11, 21, 0]
    assert batch.width.tolist() == [16]
    assert batch.tables.tolist() == list(range(1, 49))
    assert batch.tokens == len(batch.emits) == batch.decodes == 4


def test_other_steps_run_as_they_come() -> None:
    """A batch that is too large, or of which not every row emits a token, is not padded."""
    model = Model()
    graphs = Graphs(model, cache(), 4)
    for batch in (decodes(5), decodes(3, emits=2)):
        assert graphs.bucket(batch) == 0
        graphs.sample(batch)
        assert model.seen[-1] is batch
    assert [graphs.bucket(decodes(rows)) for rows in (1, 2, 3, 4)] == [1, 2, 4, 4]


def test_a_replayed_graph_reads_the_new_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size is captured once, the largest first; replays see what was sent since."""
    model = Model()

    class Graph:
        def __init__(self) -> None:
            self.kernels: list[Callable[[], object]] = []

        def replay(self) -> None:
            for kernel in self.kernels:
                kernel()

    @contextmanager
    def capture(graph: Graph, pool: object) -> Iterator[None]:
        model.capturing = graph.kernels
        yield
        model.capturing = None

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "CUDAGraph": Graph, "graph": capture, "graph_pool_handle": object,
        "Stream": lambda: stream, "current_stream": lambda: stream,
        "stream": lambda other: nullcontext(), "synchronize": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    graphs = Graphs(model, cache(on_cuda=True), 4)
    assert [batch.decodes for batch in model.seen] == [4, 4, 2, 2, 1, 1]  # warmed up, captured
    with torch.inference_mode():  # as the engine runs
        assert graphs.sample(decodes(3)).tolist() == [100, 111, 122]
        assert graphs.sample(decodes(2)).tolist() == [100, 111]
        assert graphs.sample(decodes(4)).tolist() == [100, 111, 122, 133]
    assert len(model.seen) == 6


def test_staging_keeps_addresses_and_refuses_what_does_not_fit() -> None:
    """Parts begin at multiples of 16 numbers, at the same place every time."""
    staging = StagingBuffer(64, CPU, fixed=True)
    _, first = staging.stage([np.arange(3, dtype=np.int32), np.arange(20, dtype=np.int32)])
    places = [part.data_ptr() for part in first]
    assert places[1] - places[0] == 4 * aligned(3) == 64
    _, again = staging.stage([np.full(3, 9, np.int32), np.full(20, 8, np.int32)])
    assert [part.data_ptr() for part in again] == places
    assert first[0].tolist() == [9, 9, 9]
    with pytest.raises(ValueError, match="a step needs 80 numbers and the block holds 64"):
        staging.stage([np.zeros(70, np.int32)])


def test_an_engine_tells_how_its_steps_were_launched() -> None:
    """Three decodes in the graph of four; a prompt, and a step that emits nothing, outside."""
    from gpu_backend.engine import Engine
    from simulator.core.request import Chunk, Request
    from simulator.models.load import load_model

    class Uncaptured(Graphs):
        def sample(self, batch: InputBatch) -> torch.Tensor:
            return self._model.sample(batch)  # the plain backend knows no padding

    engine = Engine(load_model("tiny-test"), 20)
    assert engine.capture_sizes == []
    engine.graphs = Uncaptured(engine.model, engine.cache, 8)
    assert engine.capture_sizes == [1, 2, 4, 8]

    def chunk(id: int, start: int, new: int, prompt: int) -> Chunk:
        return Chunk(Request(id, 0.0, prompt, 4, blocks=[1 + id]), start, new)

    decoding = engine.execute([chunk(id, 5, 1, 6) for id in range(3)], keep=False)
    assert (decoding.bucket, decoding.n_logits) == (4, 3)
    prompt = engine.execute([chunk(3, 0, 9, 9)], keep=False)
    assert (prompt.bucket, prompt.n_logits) == (0, 1)
    part = engine.execute([chunk(4, 0, 1, 9)], keep=False)
    assert (part.bucket, part.n_logits) == (0, 0)
