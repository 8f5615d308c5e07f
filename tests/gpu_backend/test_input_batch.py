"""Metadata made out of the steps before: what spelling every sequence out would have given."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'headway[gpu]'")

from gpu_backend.engine import Engine  # noqa: E402
from gpu_backend.executor import TorchExecutor  # noqa: E402
from gpu_backend.input_batch import InputBatch, InputBatchBuilder  # noqa: E402
from simulator.core.executor import Timing  # noqa: E402
from simulator.core.request import Chunk, Request, Step  # noqa: E402
from simulator.kv_cache.block_manager import BlockManager  # noqa: E402
from simulator.models.load import load_model  # noqa: E402
from simulator.schedulers.static import Static  # noqa: E402
from simulator.schedulers.vllm.scheduler import Scheduler  # noqa: E402
from tests.support.engines import listed, made, play, workload  # noqa: E402

BLOCK = 4
RANDOM = np.random.default_rng(5)
LOAD = [
    (float(RANDOM.uniform(0, 60)), int(RANDOM.integers(1, 60)), int(RANDOM.integers(2, 70)))
    for _ in range(40)
]
HOST = ("counts", "lengths", "query_starts", "emits")
THERE = ("ids", "positions", "slots", "lengths", "emits")


def same(batch: InputBatch, plain: InputBatch) -> None:
    """Two batches are the same step, though one's block tables may be wider."""
    assert batch.decodes == plain.decodes
    assert batch.host.longest == plain.host.longest
    for name in HOST:
        assert getattr(batch.host, name).tolist() == getattr(plain.host, name).tolist()
    for name in THERE:
        assert getattr(batch, name).tolist() == getattr(plain, name).tolist()
    for row, length in enumerate(plain.host.lengths.tolist()):
        pages = -(-length // BLOCK)
        for tables, other in ((batch.host.tables, plain.host.tables), (batch.tables, plain.tables)):
            assert tables[row, :pages].tolist() == other[row, :pages].tolist()
    assert batch.width.item() >= plain.width.item() - 16


class Compared(TorchExecutor):
    """Builds every step a second time, every sequence spelled out and read from its text."""

    went_on = listed = joined = 0

    def execute(self, step: Step) -> Timing:
        engine, inputs = self.engine, self.engine.inputs
        advance, build = inputs.advance, inputs.build
        chunks = listed(self.scheduler, step)

        def compare(batch: InputBatch, rows: np.ndarray) -> tuple[InputBatch, np.ndarray]:
            plain, spelled = InputBatchBuilder(engine.states, BLOCK, engine.device).build(chunks)
            same(batch, plain)
            assert rows.tolist() == spelled.tolist()
            return batch, rows

        def gone_on() -> tuple[InputBatch, np.ndarray]:
            type(self).went_on += 1
            return compare(*advance())

        def built(some: list[Chunk], decoding: list[Request]) -> tuple[InputBatch, np.ndarray]:
            type(self).joined += bool(decoding)
            return compare(*build(some, decoding))

        inputs.advance, inputs.build = gone_on, built  # type: ignore[method-assign]
        type(self).listed += 1
        try:
            return super().execute(step)
        finally:
            inputs.advance, inputs.build = advance, build  # type: ignore[method-assign]


@pytest.fixture
def engine() -> Engine:
    """An engine that says tokens at random, since texts are not what is compared."""
    found = Engine(load_model("tiny-test"), 400, BLOCK)
    random = torch.Generator().manual_seed(0)
    found.model.sample = lambda batch: torch.randint(  # type: ignore[method-assign]
        0, 4096, (len(batch.emits),), generator=random
    )
    found.model.hidden = lambda batch: None  # type: ignore[method-assign]
    Compared.went_on = Compared.listed = Compared.joined = 0
    return found


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["roomy", "recompute", "swap", "chunked", "static"])
def test_a_step_that_goes_on_is_the_step_listed(kind: str, engine: Engine) -> None:
    """For whoever joins, ends, is preempted or comes back; a good part of the steps goes on."""
    blocks = BlockManager(60 if kind in {"recompute", "swap"} else 400, BLOCK, prefix_caching=True)
    options = {"max_num_seqs": 12, "max_num_batched_tokens": 2048, "max_model_len": 200}
    if kind == "static":
        scheduler: Scheduler = made(
            Static,
            BlockManager(400, BLOCK, prefix_caching=False),
            batch_size=6,
            timeout=5.0,
            **options,
        )
    else:
        options["swap_blocks"] = 200 if kind == "swap" else 0
        options["max_num_batched_tokens"] = 24 if kind == "chunked" else 2048
        scheduler = made(Scheduler, blocks, **options)  # type: ignore[arg-type]
    executor = Compared(engine, scheduler)

    class Ticks:
        def execute(self, step: Step) -> Timing:
            executor.execute(step)
            return Timing(1.0)

    log, _ = play(workload(*LOAD), scheduler, Ticks(), leap=False)
    assert len(log.requests) == len(LOAD)
    if kind in {"recompute", "swap"}:
        assert log.requests["preemptions"].sum() > 0
    assert Compared.went_on > Compared.listed / 10
    assert Compared.joined or kind == "static"
    assert Compared.went_on < Compared.listed
