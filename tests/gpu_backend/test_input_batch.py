"""Metadata made out of the step before: what listing every sequence would have given."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'headway[gpu]'")

from gpu_backend.engine import Engine  # noqa: E402
from gpu_backend.executor import TorchExecutor  # noqa: E402
from gpu_backend.input_batch import InputBatch, InputBatchBuilder  # noqa: E402
from simulator.core.request import Step  # noqa: E402
from simulator.kv_cache.block_manager import BlockManager  # noqa: E402
from simulator.models.load import load_model  # noqa: E402
from simulator.schedulers.static import Static  # noqa: E402
from simulator.schedulers.vllm.scheduler import Scheduler  # noqa: E402
from tests.support.engines import play, workload  # noqa: E402

BLOCK = 4
RANDOM = np.random.default_rng(5)
LOAD = [
    (float(RANDOM.uniform(0, 60)), int(RANDOM.integers(1, 60)), int(RANDOM.integers(2, 70)))
    for _ in range(40)
]
HOST = ("starts", "counts", "lengths", "query_starts", "ids", "positions", "slots", "emits")
THERE = ("ids", "positions", "slots", "lengths", "emits")


class Compared(TorchExecutor):
    """Builds every step that goes on a second time, out of its chunks, and compares."""

    went_on = listed = 0

    def execute(self, step: Step) -> float:
        engine, inputs = self.engine, self.engine.inputs
        advance = inputs.advance

        def both() -> tuple[InputBatch, np.ndarray]:
            type(self).went_on += 1
            batch, rows = advance()
            plain, same = InputBatchBuilder(engine.states, BLOCK, engine.device).build(
                self.scheduler.running.listed(step)
            )
            assert rows.tolist() == same.tolist()
            assert batch.decodes == plain.decodes
            for name in HOST:
                assert getattr(batch.host, name).tolist() == getattr(plain.host, name).tolist()
            for name in THERE:
                assert getattr(batch, name).tolist() == getattr(plain, name).tolist()
            for row, length in enumerate(plain.host.lengths.tolist()):
                pages = -(-length // BLOCK)
                for tables, other in ((batch.host.tables, plain.host.tables),
                                      (batch.tables, plain.tables)):  # fmt: skip
                    assert tables[row, :pages].tolist() == other[row, :pages].tolist()
            assert batch.width.item() >= plain.width.item() - 16
            return batch, rows

        inputs.advance = both  # type: ignore[method-assign]
        type(self).listed += 1
        try:
            return super().execute(step)
        finally:
            inputs.advance = advance  # type: ignore[method-assign]


@pytest.fixture
def engine() -> Engine:
    """An engine that says tokens at random, since texts are not what is compared."""
    found = Engine(load_model("tiny-test"), 400, BLOCK)
    random = torch.Generator().manual_seed(0)
    found.model.sample = lambda batch: torch.randint(  # type: ignore[method-assign]
        0, 4096, (len(batch.emits),), generator=random
    )
    found.model.hidden = lambda batch: None  # type: ignore[method-assign]
    Compared.went_on = Compared.listed = 0
    return found


@pytest.mark.parametrize("kind", ["roomy", "recompute", "swap", "chunked", "static"])
def test_a_step_that_goes_on_is_the_step_listed(kind: str, engine: Engine) -> None:
    """For whoever joins, ends, is preempted or comes back; a good part of the steps goes on."""
    blocks = BlockManager(60 if kind in {"recompute", "swap"} else 400, BLOCK, prefix_caching=True)
    options = {"max_num_seqs": 12, "max_num_batched_tokens": 2048, "max_model_len": 200}
    if kind == "static":
        scheduler: Scheduler = Static(
            BlockManager(400, BLOCK, prefix_caching=False), batch_size=6, timeout=5.0, **options
        )
    else:
        options["swap_blocks"] = 200 if kind == "swap" else 0
        options["max_num_batched_tokens"] = 24 if kind == "chunked" else 2048
        scheduler = Scheduler(blocks, **options)  # type: ignore[arg-type]
    executor = Compared(engine, scheduler)

    class Ticks:
        def execute(self, step: Step) -> float:
            executor.execute(step)
            return 1.0

    log, _ = play(workload(*LOAD), scheduler, Ticks(), leap=False)
    assert len(log.requests) == len(LOAD)
    if kind in {"recompute", "swap"}:
        assert log.requests["preemptions"].sum() > 0
    assert Compared.went_on > Compared.listed / 10
    assert Compared.went_on < Compared.listed
