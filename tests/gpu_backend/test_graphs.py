"""CUDA graphs of decode steps, with stand-ins for the model and for what CUDA would do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'headway[gpu]'")

import torch

from gpu_backend.cuda.graphs import Graphs, sizes_for
from gpu_backend.engine import Engine
from gpu_backend.input_batch import InputBatch, InputBatchBuilder
from gpu_backend.request_states import RequestStates
from gpu_backend.staging import StagingBuffer, aligned
from simulator.core.request import Chunk, Request
from simulator.models.load import load_model

CPU = torch.device("cpu")


class Model:
    """Says of each row its id plus its position; behaves as launched kernels do when captured."""

    def __init__(self) -> None:
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


def inputs(most: int) -> InputBatchBuilder:
    """Inputs of made-up requests, padded to the sizes of graphs up to `most`."""
    sizes = sizes_for(most)
    return InputBatchBuilder(RequestStates(1000), 16, CPU, capture_sizes=sizes, max_blocks=32)


def decodes(rows: int, answered: int = 0) -> list[Chunk]:
    """A step in which each of some requests has one new token; requests of 1, 11, 21 ... tokens."""
    return [
        Chunk(Request(k, 0.0, 10 * k + 1 + answered, 4, blocks=[k + 1] * (k + 2)), 10 * k, 1)
        for k in range(rows)
    ]


def expected(batch: InputBatch) -> list[int]:
    return (batch.host.ids + batch.host.positions).tolist()


def test_sizes() -> None:
    """1, 2, 4, then multiples of 8, and the largest batch itself."""
    assert sizes_for(20) == (1, 2, 4, 8, 16, 20)
    assert sizes_for(1) == (1,)
    assert sizes_for(256)[-2:] == (248, 256)


def test_a_batch_is_padded_with_rows_that_touch_no_cache() -> None:
    """Three rows run as four: the fourth has length 0 and slot -1; three tokens come out."""
    model, made = Model(), inputs(8)
    batch, _ = made.build(decodes(3))
    assert Graphs(model, made).sample(batch).tolist() == expected(batch)
    assert batch.bucket == 4
    assert batch.positions.tolist() == [0, 10, 20, 0]
    assert batch.slots.tolist() == [16, 42, 52, -1]
    assert batch.lengths.tolist() == [1, 11, 21, 0]
    assert batch.width.tolist() == [16]
    assert batch.tables.view(3, 16)[:, :3].tolist() == [[1, 1, 0], [2, 2, 2], [3, 3, 3]]
    assert batch.tokens == len(batch.emits) == batch.decodes == 4
    assert batch.host.lengths.tolist() == [1, 11, 21]
    assert len(batch.host.emits) == 3


def test_a_padded_batch_decodes_on_in_its_place() -> None:
    """One more token each, the same addresses, and still nothing for the row that pads."""
    made = inputs(8)
    before, rows = made.build(decodes(3))
    places = [part.data_ptr() for part in (before.ids, before.positions, before.tables)]
    batch, again = made.advance()
    assert rows.tolist() == again.tolist()
    assert [part.data_ptr() for part in (batch.ids, batch.positions, batch.tables)] == places
    assert batch.positions.tolist() == [1, 11, 21, 0]
    assert batch.lengths.tolist() == [2, 12, 22, 0]
    assert batch.slots.tolist() == [17, 43, 53, -1]
    assert batch.bucket == 4


def test_other_steps_run_as_they_come() -> None:
    """A batch that is too large, or of which not every row emits a token, is not padded."""
    model, made = Model(), inputs(4)
    graphs = Graphs(model, made)
    for chunks in (decodes(5), decodes(3, answered=1)):
        made.reset(RequestStates(1000))
        batch, _ = made.build(chunks)
        assert batch.bucket == 0
        graphs.sample(batch)
        assert model.seen[-1] is batch
    assert [made.bucket(rows) for rows in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 0]


def test_a_step_is_sent_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is padded, holds prompts, or goes on from the one before."""
    sent: list[StagingBuffer] = []

    def count(self: StagingBuffer) -> None:
        sent.append(self)

    monkeypatch.setattr(StagingBuffer, "send", count)
    made = inputs(4)
    made.tile_rows = 8
    for step in (lambda: made.build(decodes(3)), made.advance, lambda: made.build(decodes(5))):
        sent.clear()
        step()
        assert len(sent) == 1
    sent.clear()
    prompt = Chunk(Request(9, 0.0, 20, 4, blocks=[1, 2]), 0, 20)
    batch, _ = made.build([*decodes(2), prompt])
    assert len(sent) == 1
    assert batch.tiles is not None
    assert batch.tiles.tolist() == [[18, 4, 16, 2], [10, 8, 8, 2], [2, 8, 0, 2]]


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
        "mem_get_info": lambda device: (0, 0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    made = inputs(4)
    monkeypatch.setattr(made, "device", torch.device("cuda"))
    graphs = Graphs(model, made)
    assert [batch.decodes for batch in model.seen] == [4, 4, 2, 2, 1, 1]  # warmed up, captured
    with torch.inference_mode():  # as the engine runs
        for rows in (3, 2, 4):
            made.reset(RequestStates(1000))
            batch, _ = made.build(decodes(rows))
            assert graphs.sample(batch).tolist() == expected(batch)
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
    engine = Engine(load_model("tiny-test"), 20)
    assert engine.capture_sizes == []
    engine.inputs = InputBatchBuilder(
        engine.states, 16, CPU, capture_sizes=sizes_for(8), max_blocks=20
    )
    engine.graphs = Graphs(Model(), engine.inputs)  # the plain backend knows no padding
    assert engine.capture_sizes == [1, 2, 4, 8]

    def chunk(id: int, start: int, new: int, prompt: int) -> Chunk:
        return Chunk(Request(id, 0.0, prompt, 4, blocks=[1 + id]), start, new)

    decoding = engine.execute([chunk(id, 5, 1, 6) for id in range(3)], keep=False)
    assert (decoding.bucket, decoding.n_logits) == (4, 3)
    with engine.launched_one_by_one():
        alone = engine.execute([chunk(id, 5, 1, 6) for id in range(3)], keep=False)
        assert (alone.bucket, alone.n_logits, engine.capture_sizes) == (0, 3, [])
    prompt = engine.execute([chunk(3, 0, 9, 9)], keep=False)
    assert (prompt.bucket, prompt.n_logits) == (0, 1)
    part = engine.execute([chunk(4, 0, 1, 9)], keep=False)
    assert (part.bucket, part.n_logits) == (0, 0)
