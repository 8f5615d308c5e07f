"""CUDA graphs of steps, with stand-ins for the model and for what CUDA would do."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'headway[gpu]'")

import torch

from gpu_backend.cuda.graphs import Graphs, mixed_sizes_for, sizes_for
from gpu_backend.engine import Engine
from gpu_backend.executor import TorchExecutor
from gpu_backend.input_batch import InputBatch, InputBatchBuilder
from gpu_backend.request_states import RequestStates
from gpu_backend.staging import StagingBuffer, aligned
from simulator.core.executor import Timing
from simulator.core.request import Chunk, Request, Step
from simulator.kv_cache.block_manager import BlockManager
from simulator.models.load import load_model
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayWarning
from tests.support.engines import made, play, workload
from tools.campaign.eager import launched_one_by_one

CPU = torch.device("cpu")


class Model:
    """Says of each row its id plus its position; behaves as launched kernels do when captured."""

    def __init__(self) -> None:
        self.seen: list[InputBatch] = []
        self.capturing: list[Callable[[], object]] | None = None
        self.fails = False

    def hidden(self, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(batch)
        if self.fails:
            raise RuntimeError("CUDA error: operation not permitted\nand more of it")
        out = torch.empty(len(batch.ids), dtype=torch.int64)

        def kernel() -> None:
            out.copy_(batch.ids + batch.positions)

        if self.capturing is None:
            kernel()
        else:
            self.capturing.append(kernel)
        return out, out

    def next_tokens(self, delta: torch.Tensor, _: object, batch: InputBatch) -> torch.Tensor:
        return delta[batch.emits]

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
    tokens = int(batch.host.counts.sum())  # those behind them only pad
    found: list[int] = (batch.ids + batch.positions)[:tokens].tolist()
    return found


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


def fake_capture(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    """Let graphs be lists of what the model would launch."""

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


def test_a_replayed_graph_reads_the_new_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size is captured once, the largest first; replays see what was sent since."""
    model = Model()
    fake_capture(monkeypatch, model)
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
    with pytest.raises(ValueError, match="a step needs 80 numbers and the block has 64"):
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
    with launched_one_by_one(engine):
        alone = engine.execute([chunk(id, 5, 1, 6) for id in range(3)], keep=False)
        assert (alone.bucket, alone.n_logits, engine.capture_sizes) == (0, 3, [])
    prompt = engine.execute([chunk(3, 0, 9, 9)], keep=False)
    assert (prompt.bucket, prompt.n_logits) == (0, 1)
    part = engine.execute([chunk(4, 0, 1, 9)], keep=False)
    assert (part.bucket, part.n_logits) == (0, 0)


# ---------------------------------------------------------- steps with prompts


def mixed_inputs(most: int = 4) -> InputBatchBuilder:
    """Inputs that are padded to 8 and 16 tokens where there are prompts, in tiles of 8."""
    return InputBatchBuilder(
        RequestStates(1000), 16, CPU, capture_sizes=sizes_for(most), mixed_sizes=(8, 16),
        max_blocks=32, tile_rows=8,
    )  # fmt: skip


def prompt(name: int, start: int, new: int, more: int = 0) -> Chunk:
    """A piece of a prompt that goes on by `more` tokens."""
    return Chunk(Request(name, 0.0, start + new + more, 4, blocks=[name, name + 20]), start, new)


def test_sizes_of_steps_with_prompts() -> None:
    assert mixed_sizes_for(512) == (16, 32, 64, 128, 256, 384, 512)
    assert mixed_sizes_for(100) == (16, 32, 64)
    assert mixed_sizes_for(15) == mixed_sizes_for(0) == ()


def test_a_step_with_prompts_is_padded_with_rows_and_tiles_that_touch_nothing() -> None:
    """Two decodes and pieces of 5 and 3 are 10 tokens of 16; the second emits nothing."""
    made = mixed_inputs()
    batch, rows = made.build([prompt(5, 0, 5), *decodes(2), prompt(6, 7, 3, more=1)])
    assert (batch.bucket, batch.mixed, batch.tokens) == (16, True, 16)
    assert batch.positions.tolist() == [0, 10, 0, 1, 2, 3, 4, 7, 8, 9, *[0] * 6]
    assert batch.slots.tolist()[:3] == [16, 42, 80]
    assert batch.slots.tolist()[10:] == [-1] * 6
    assert batch.decodes == len(batch.lengths) == 4  # rows of the decodes' launch
    assert batch.lengths.tolist() == [1, 11, 0, 0]
    assert batch.tiles is not None
    assert batch.tiles.tolist() == [[7, 3, 7, 3], [2, 5, 0, 2], *[[0] * 4] * 8]
    assert batch.emits.tolist() == [0, 1, 6]
    assert len(rows) == 3
    assert batch.host.counts.tolist() == [1, 1, 5, 3]
    assert batch.tables.shape == (4, 16)


@pytest.mark.parametrize(
    ("chunks", "bucket"),
    [
        ([prompt(1, 0, 16)], 16),
        ([prompt(1, 0, 17)], 0),
        ([prompt(k, 0, 2) for k in range(8)], 16),
        ([prompt(k, 0, 2) for k in range(7)] + [prompt(9, 0, 1, more=1)], 16),
        ([Chunk(Request(k, 0.0, 2, 4, blocks=[k]), 0, 1) for k in range(3)], 0),
    ],
)
def test_which_steps_with_prompts_are_padded(chunks: list[Chunk], bucket: int) -> None:
    """Up to the largest size and 8 pieces of more than a token, of which there must be one."""
    assert mixed_inputs().build(chunks)[0].bucket == bucket


def test_nine_pieces_have_no_graph_and_more_decodes_than_captured_none() -> None:
    nine = InputBatchBuilder(
        RequestStates(1000), 16, CPU, capture_sizes=[1], mixed_sizes=[32], max_blocks=32
    )
    assert nine.build([prompt(k, 0, 2) for k in range(9)])[0].bucket == 0
    assert nine.build([*decodes(2), prompt(7, 0, 2)])[0].bucket == 0
    assert nine.build([*decodes(1), prompt(7, 0, 2)])[0].bucket == 32


def test_replays_of_steps_with_prompts_see_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are captured before the decodes' graphs; what is sampled differs from step to step."""
    model = Model()
    fake_capture(monkeypatch, model)
    made = mixed_inputs()
    monkeypatch.setattr(made, "device", torch.device("cuda"))
    graphs = Graphs(model, made)
    assert [batch.tokens for batch in model.seen[:4]] == [16, 16, 8, 8]
    seen = len(model.seen)
    with torch.inference_mode():
        for chunks in ([prompt(1, 0, 5), *decodes(2)], [prompt(3, 3, 12)], [prompt(4, 0, 6, 2)]):
            made.reset(RequestStates(1000))
            batch, _ = made.build(chunks)
            wanted = [expected(batch)[place] for place in batch.host.emits.tolist()]
            assert graphs.sample(batch).tolist() == wanted
    assert len(model.seen) == seen


def test_prompts_that_cannot_be_captured_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning tells; decodes have their graphs."""
    model = Model()
    fake_capture(monkeypatch, model)
    model.fails = True
    made = mixed_inputs()
    monkeypatch.setattr(made, "device", torch.device("cuda"))
    with pytest.warns(HeadwayWarning, match="launched kernel by kernel.*: CUDA error: operation"):
        Graphs(model, made)
    assert made.mixed_sizes == []
    assert made.build([prompt(1, 0, 5)])[0].bucket == 0
    assert made.build(decodes(3))[0].bucket == 4


def answers(*, pads: bool) -> tuple[list[list[int] | None], Counter[int]]:
    """Run a load of chunked prompts on plain torch; also count the sizes of steps with prompts.

    Where it `pads`, steps run as the padded ones that graphs would replay.
    """
    random = np.random.default_rng(3)
    load = [(2.0 * k, int(random.integers(2, 50)), int(random.integers(2, 14))) for k in range(24)]
    engine = Engine(load_model("tiny-test"), 200, 16)
    if pads:
        engine.inputs = InputBatchBuilder(
            engine.states, 16, CPU, capture_sizes=sizes_for(8), mixed_sizes=(8, 16, 32),
            max_blocks=32,
        )  # fmt: skip
        engine.graphs = Graphs(engine.model, engine.inputs)
    blocks = BlockManager(60, 16, prefix_caching=True)
    scheduler = made(
        Scheduler, blocks, max_num_seqs=6, max_num_batched_tokens=32, max_model_len=200
    )
    executor = TorchExecutor(engine, scheduler)
    sizes: Counter[int] = Counter()

    class Ticks:
        def execute(self, step: Step) -> Timing:
            executor.execute(step)
            sizes[executor.last.bucket if step.prefills else 0] += 1
            return Timing(1.0)

    play(workload(*load), scheduler, Ticks(), leap=False)
    return [engine.answer(k) for k in range(24)], sizes


@pytest.mark.medium
def test_padding_changes_no_token() -> None:
    """Each answer is that of the engine without graphs, over steps of every size."""
    found, sizes = answers(pads=True)
    assert min(sizes[size] for size in (8, 16, 32)) > 1
    assert all(found)
    assert found == answers(pads=False)[0]
