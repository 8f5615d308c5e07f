"""The schedule never changes the text.

Paged, chunked, batched, preempted and prefix-shared execution must give, token for token, what
each request gives alone, in one piece and without blocks.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'headway[gpu]'")

from gpu_backend.engine import Engine  # noqa: E402
from gpu_backend.executor import TorchExecutor  # noqa: E402
from gpu_backend.request_states import prompt_ids  # noqa: E402
from simulator.core.executor import Timing  # noqa: E402
from simulator.core.request import Request, Step  # noqa: E402
from simulator.kv_cache.block_manager import BlockManager  # noqa: E402
from simulator.policies.orders import Priority  # noqa: E402
from simulator.schedulers.static import Static  # noqa: E402
from simulator.schedulers.vllm.scheduler import Scheduler  # noqa: E402
from simulator.workload.workload import Workload  # noqa: E402
from tests.support.engines import listed, made, play, workload  # noqa: E402
from tests.support.reference_transformer import likeliest  # noqa: E402


class Recorder:
    """A live executor on a made-up clock that counts what it has carried out."""

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self.mixed = self.chunked = self.shared = self.out = self.back = 0

    def execute(self, step: Step) -> Timing:
        chunks = listed(self.executor.scheduler, step)
        assert len(chunks) == step.decodes + len(step.prefills)
        assert sum(c.start + 1 for c in chunks[len(step.prefills) :]) == step.context
        self.mixed += bool(step.decodes and step.prefills)
        self.chunked += sum(c.start + c.tokens < c.request.prompt_tokens for c in step.prefills)
        self.shared += self.executor.scheduler.blocks.shared > 0
        self.out += sum(swap.count for swap in step.outgoing)
        self.back += sum(swap.count for swap in step.incoming)
        self.executor.execute(step)
        return Timing(1.0)


def live(engine: Engine, load: Workload, scheduler: Scheduler) -> tuple[Recorder, np.ndarray]:
    """Run a workload on the engine; also give the log's rows of the requests."""
    engine.reset()
    recorder = Recorder(TorchExecutor(engine, scheduler))
    log, _ = play(load, scheduler, recorder)
    return recorder, np.sort(log.requests, order="id")


def texts(engine: Engine, load: Workload) -> dict[int, list[int]]:
    """Each request's answer by the reference, alone.

    The reference is asked after every token of the engine's answer: the first one that it would
    not have said itself differs.
    """
    answers: dict[int, list[int]] = {}
    found = {}
    for i in range(len(load)):
        segments = None if load.segments is None else load.segments[i]
        request = Request(i, 0.0, int(load.prompt_tokens[i]), 1, segments=segments)
        known = {k: np.array(v, np.int32) for k, v in answers.items()}
        prompt = prompt_ids(request, engine.spec.vocab_size, known.get).tolist()
        answers[i] = engine.answer(i) or []
        assert len(answers[i]) == load.output_tokens[i]
        found[i] = likeliest(engine, prompt + answers[i])[len(prompt) - 1 : -1]
    return found


def mixed_requests(count: int = 14, seed: int = 0) -> Workload:
    """Requests of all sizes that come in quick succession."""
    rng = np.random.default_rng(seed)
    return workload(
        *((i * 1.5, int(rng.integers(1, 40)), int(rng.integers(1, 25))) for i in range(count))
    )


def manager(num_blocks: int, caching: bool = False) -> BlockManager:
    return BlockManager(num_blocks, 4, prefix_caching=caching)


OPTIONS = {"max_num_seqs": 6, "max_num_batched_tokens": 12, "max_model_len": 128}


def test_batched_and_chunked_texts_are_those_of_each_request_alone(engine: Engine) -> None:
    """Steps mix prompts, chunks of prompts and decodes."""
    load = mixed_requests()
    done, _ = live(engine, load, made(Scheduler, manager(200), **OPTIONS))
    assert done.mixed > 10
    assert done.chunked > 10
    assert {i: engine.answer(i) for i in range(len(load))} == texts(engine, load)


@pytest.mark.many
@pytest.mark.parametrize("swap_blocks", [0, 1000, 14], ids=["recompute", "swap", "both"])
def test_preempted_texts_are_those_of_each_request_alone(engine: Engine, swap_blocks: int) -> None:
    """17 blocks for requests of up to 16: preemption by recompute, by swap, by either in turn."""
    load = mixed_requests()
    done, rows = live(
        engine, load, made(Scheduler, manager(18), swap_blocks=swap_blocks, **OPTIONS)
    )
    assert rows["preemptions"].sum() >= 5
    assert (done.out > 0) == (swap_blocks > 0)
    assert done.out == done.back
    assert {i: engine.answer(i) for i in range(len(load))} == texts(engine, load)


@pytest.mark.medium
@pytest.mark.parametrize("swap_blocks", [0, 1000], ids=["recompute", "swap"])
def test_texts_under_priorities_are_those_of_each_request_alone(
    engine: Engine, swap_blocks: int
) -> None:
    """A victim may lose what this very step was to compute."""
    load = mixed_requests(16)
    load.priority = np.arange(16)[::-1] % 5
    scheduler = made(Scheduler, manager(18), policy=Priority(), swap_blocks=swap_blocks, **OPTIONS)
    done, rows = live(engine, load, scheduler)
    assert rows["preemptions"].sum() >= 5
    assert (done.out > 0) == (swap_blocks > 0)
    assert {i: engine.answer(i) for i in range(len(load))} == texts(engine, load)


@pytest.mark.many
@pytest.mark.parametrize("num_blocks", [200, 24])
@pytest.mark.parametrize("swap_blocks", [0, 1000])
def test_texts_over_shared_pages_are_those_of_each_request_alone(
    engine: Engine, num_blocks: int, swap_blocks: int
) -> None:
    """Three prompts begin alike: they share pages, in the very step that fills them, too."""
    load = mixed_requests()
    load.arrival[:] = np.arange(len(load)) // 4 * 6.0
    load.segments = [
        tuple(
            (name, count)
            for name, count in (("system", min(17, n)), (("in", i), n - min(17, n)))
            if count
        )
        for i, n in enumerate(load.prompt_tokens.tolist())
    ]
    scheduler = made(Scheduler, manager(num_blocks, True), swap_blocks=swap_blocks, **OPTIONS)
    done, rows = live(engine, load, scheduler)
    assert done.shared > 3
    assert rows["cached"].sum() > 30
    if num_blocks == 24:
        assert rows["preemptions"].sum() > 0
        assert (done.out > 0) == (swap_blocks > 0)
    assert {i: engine.answer(i) for i in range(len(load))} == texts(engine, load)


def test_a_later_turn_quotes_the_answers_before_it(engine: Engine) -> None:
    """The prompt of turn two is turn one, its true answer, and more; it is found in the cache."""
    load = workload((0.0, 10, 9), (None, 25, 6))
    load.after, load.delay = np.array([-1, 0]), np.zeros(2)
    load.segments = [None, ((("in", 0), 10), (("out", 0), 9), (("in", 1), 6))]
    _, rows = live(engine, load, made(Scheduler, manager(200, True), **OPTIONS))
    assert rows["cached"].tolist() == [0, 16]
    assert {i: engine.answer(i) for i in range(2)} == texts(engine, load)


def test_a_static_batch_gives_the_text_of_the_padded_prompt(engine: Engine) -> None:
    """Padding is computed like any token: the engine has no mask for it."""
    load = workload((0, 5, 6), (0, 9, 3))
    live(engine, load, made(Static, manager(200), batch_size=2, max_model_len=128))
    prompt = [0] * 4 + prompt_ids(Request(0, 0.0, 5, 6), engine.spec.vocab_size).tolist()
    answer = (engine.answer(0) or [])[:6]
    assert len(answer) == 6
    assert likeliest(engine, prompt + answer)[8:-1] == answer
