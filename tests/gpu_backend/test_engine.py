"""The engine and the executor: logits, copies of blocks, what is forgotten, what is refused."""

import subprocess
import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'headway[gpu]'")

from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from gpu_backend.engine import Engine, graph_bytes  # noqa: E402
from gpu_backend.executor import TorchExecutor  # noqa: E402
from gpu_backend.request_states import token_ids  # noqa: E402
from simulator.core.request import Chunk, Request  # noqa: E402
from simulator.kv_cache.block_manager import BlockCounter, BlockManager  # noqa: E402
from simulator.models.load import load_model  # noqa: E402
from simulator.models.spec import RopeScaling  # noqa: E402
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler  # noqa: E402
from simulator.schedulers.vllm.scheduler import Scheduler  # noqa: E402
from simulator.util.errors import HeadwayError  # noqa: E402
from tests.support.engines import made, play, workload  # noqa: E402
from tests.support.reference_transformer import logits  # noqa: E402
from tests.support.tiny_models import QWEN  # noqa: E402
from tests.support.with_fields import with_fields  # noqa: E402


def test_logits_are_those_of_the_reference(engine: Engine) -> None:
    """To float32's rounding, not only in their order."""
    engine.reset()
    request = Request(0, 0.0, 33, 9, blocks=list(range(1, 10)))
    batch, _ = engine.inputs.build([Chunk(request, 0, 33)])
    with torch.inference_mode():
        found = engine.model.logits(batch)[-1]
    want = logits(engine, engine.tokens(0))[-1]
    assert torch.allclose(found, want, atol=2e-5 * float(want.abs().max()))


@pytest.mark.parametrize("reuses_buffers", [False, True])
def test_a_swap_brings_back_every_bit(
    engine: Engine, reuses_buffers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to other blocks, from the middle, in more pieces than one, through memory used before.

    Only behind CUDA is the host's memory kept for later copies.
    """
    monkeypatch.setattr(engine.cache, "reuses_buffers", reuses_buffers)
    engine.reset()
    for blocks in (3, 70):
        engine.swap_out(Request(9, 0.0, 5, 5), [1] * blocks)
        engine.swap_in(Request(9, 0.0, 5, 5), [1] * blocks)
    engine.fill_random()
    before = engine.cache.kv.clone()
    request = Request(0, 0.0, 5, 5)
    assert engine.swap_out(request, list(range(1, 101))) > 0
    engine.cache.kv[:, :, 101:199] = 0
    engine.swap_in(request, list(range(199, 130, -1)), first=31)
    assert torch.equal(engine.cache.kv[:, :, 131:200].flip(2), before[:, :, 32:101])
    assert torch.equal(engine.cache.kv[:, :, :131][:, :, :101], before[:, :, :101])


def test_a_step_that_is_not_kept_can_be_repeated(engine: Engine) -> None:
    engine.reset()
    request = with_fields(Request(0, 0.0, 20, 9), generated=1, blocks=[1, 2, 3, 4, 5, 6])
    engine.execute([Chunk(request, 20, 1)], keep=False)
    first = engine.tokens(0)
    engine.execute([Chunk(request, 20, 1)], keep=False)
    assert engine.tokens(0) == first
    assert len(first) == 21
    engine.execute([Chunk(request, 20, 1)])
    assert len(engine.tokens(0)) == 22


def test_attention_may_come_out_in_any_layout(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA torch's kernels keep heads beside tokens, and their output is no contiguous one."""
    real, request = functional.scaled_dot_product_attention, Request(0, 0.0, 20, 9)
    request.blocks, texts = [1, 2, 3, 4, 5, 6], []

    def transposed(*given: Tensor, **named: object) -> Tensor:
        out = real(*given, **named)
        return out.transpose(1, 2).contiguous().transpose(1, 2)

    for attend in (real, transposed):
        monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
        engine.reset()
        for start, new in ((0, 20), (20, 1)):
            engine.execute([Chunk(request, start, new)])
        texts.append(engine.tokens(0))
    assert texts[0] == texts[1]


def test_rows_of_requests_that_are_over_are_given_up(engine: Engine) -> None:
    """A long run needs no more rows than requests at once, and the slack."""
    load = workload(*((2.0 * i, 2, 2) for i in range(150)))
    blocks = BlockManager(200, 4, prefix_caching=False)
    scheduler = made(
        Scheduler, blocks, max_num_seqs=6, max_num_batched_tokens=12, max_model_len=128
    )
    engine.reset()
    play(load, scheduler, TorchExecutor(engine, scheduler))
    assert len(engine.states.num_tokens) <= 128
    assert engine.answer(0) is not None
    engine.reset()
    assert engine.answer(0) is None


def test_token_ids_depend_on_name_and_place_alone() -> None:
    """Fixed for ever: measurements name them."""
    ids = token_ids(("in", 3), 0, 1000, 4096)
    assert ids[:4].tolist() == [3618, 3149, 36, 654]
    assert token_ids(("in", 3), 10, 5, 4096).tolist() == ids[10:15].tolist()
    assert len(set(ids.tolist())) > 800
    assert token_ids("in", 0, 4, 4096).tolist() != ids[:4].tolist()


def test_a_model_that_does_not_fit_is_refused_before_anything_is_allocated() -> None:
    """The message says what it takes and how many blocks would fit."""
    with pytest.raises(HeadwayError, match=r"llama-3-70b in float32 does not fit cpu: 262.*GiB"):
        Engine(load_model("llama-3-70b"), 100)
    with pytest.raises(
        HeadwayError, match=r"at most \d+ blocks fit: engine.num_gpu_blocks_override, or "
    ):
        Engine(QWEN, 10**9)


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("tpu9", "must be cpu or cuda"),
        ("meta", "must be cpu or cuda"),
        ("cuda:99", "--device cuda:99: "),
    ],
)
def test_a_device_that_is_not_there_is_refused(device: str, told: str) -> None:
    with pytest.raises(HeadwayError, match=told):
        Engine(QWEN, 10, device=device)


def test_models_that_the_engine_does_not_run_are_refused() -> None:
    with pytest.raises(HeadwayError, match="mixture of experts"):
        Engine(load_model("mixtral-8x7b"), 10)
    with pytest.raises(HeadwayError, match="glm-4-9b has 4 norms in a layer; the engine has 2"):
        Engine(load_model("glm-4-9b"), 10)
    yarn = replace(QWEN, rope_scaling=RopeScaling("yarn", 4.0))
    with pytest.raises(HeadwayError, match="yarn"):
        Engine(yarn, 10)


def test_a_scheduler_that_does_not_match_the_engine_is_refused(engine: Engine) -> None:
    """All that is wrong is told at once, each with the scenario's key."""
    scheduler = made(AsyncScheduler, BlockCounter(1000, 16), max_model_len=513)
    with pytest.raises(HeadwayError) as caught:
        TorchExecutor(engine, scheduler)
    assert [message.split(":")[0] for message in caught.value.messages] == [
        "engine.async_scheduling",
        "engine.allocation",
        "engine.block_size",
        "engine.num_gpu_blocks_override",
        "engine.max_model_len",
    ]


def test_a_text_beyond_the_models_positions_is_refused(engine: Engine) -> None:
    request = Request(0, 0.0, 513, 1, blocks=list(range(1, 130)))
    with pytest.raises(ValueError, match="512 positions, not 513"):
        engine.execute([Chunk(request, 0, 513)])


def test_without_torch_the_extra_is_named() -> None:
    """Importing any part of the engine says what to install."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib.util as util; found = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'torch' else found(name, *more)\n"
        "from simulator.util.errors import HeadwayError\n"
        "try:\n    import gpu_backend.engine\n"
        "except HeadwayError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "torch is not installed: pip install 'headway[gpu]' brings it\n"


def test_the_memory_of_graphs_is_counted() -> None:
    """Of 8B: 512 tokens' activations of a layer, and two streams for each token of all sizes."""
    spec = load_model("llama-3.1-8b")
    layer = 3 * 4096 + 3 * 14336 + 2 * (32 + 8) * 128
    decodes = 256 * (layer + 128256)
    assert graph_bytes(spec, 256, (), torch.bfloat16) == 2 * decodes
    outputs = (16 + 512) * 2 * 4096
    assert graph_bytes(spec, 8, (16, 512), torch.bfloat16) == 2 * (512 * layer + outputs)
    assert graph_bytes(spec, 256, (16, 512), torch.bfloat16) == 2 * (decodes + outputs)
