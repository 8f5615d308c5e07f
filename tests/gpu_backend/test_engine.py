"""The engine: the schedule never changes the text.

Paged, chunked, batched, preempted and prefix-shared execution must give, token for token, what
each request gives alone, in one piece and without pages. The yardstick is a forward pass of its
own, written as plainly as it can be.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'headway[gpu]'")

from gpu_backend.engine import Engine  # noqa: E402
from gpu_backend.executor import TorchExecutor  # noqa: E402
from gpu_backend.prompts import prompt_ids, token_ids  # noqa: E402
from simulator.core.request import Chunk, Request, Step  # noqa: E402
from simulator.kv_cache.block_manager import BlockCounter, BlockManager  # noqa: E402
from simulator.models.load import load_model  # noqa: E402
from simulator.models.spec import ModelSpec, RopeScaling  # noqa: E402
from simulator.policies.orders import Priority  # noqa: E402
from simulator.schedulers.static import Static  # noqa: E402
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler  # noqa: E402
from simulator.schedulers.vllm.scheduler import Scheduler  # noqa: E402
from simulator.util.errors import HeadwayError  # noqa: E402
from simulator.workload.workload import Workload  # noqa: E402
from tests.support.engines import play, workload  # noqa: E402

QWEN = ModelSpec("q", 2, 64, 4, 2, 32, 96, 500, True, qk_norm=True, max_position_embeddings=512)
LLAMA = replace(
    QWEN,
    name="l",
    tie_word_embeddings=False,
    attention_bias=True,
    qk_norm=False,
    rope_theta=500.0,
    rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
)
BLOCK = 4


def reference(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """Continue a prompt greedily, the whole text through the model for every token."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(logits(engine, text)[-1].argmax()))
    return text


def logits(engine: Engine, text: list[int]) -> "torch.Tensor":
    """All logits [t, V] of a text: no cache, no pages, no batch, one head at a time."""
    spec, weights = engine.spec, engine.model.weights
    queries, keys, width = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    x = weights.embedding[text]
    angles = torch.outer(torch.arange(len(text)).double(), speeds(spec))
    later = torch.ones(len(text), len(text)).triu(1).bool()
    for layer in weights.layers:
        h = norm(x, layer.input_norm, spec)
        heads = (h @ layer.qkv.T).view(len(text), -1, width)
        if layer.qkv_bias is not None:
            heads = heads + layer.qkv_bias.view(-1, width)
        seen = []
        for head in range(queries):
            own = queries + head // (queries // keys)
            q = turn(norm(heads[:, head], layer.q_norm, spec), angles)
            k = turn(norm(heads[:, own], layer.k_norm, spec), angles)
            scores = (q @ k.T / width**0.5).masked_fill(later, -torch.inf)
            seen.append(scores.softmax(-1) @ heads[:, own + keys])
        x = x + torch.cat(seen, -1) @ layer.o.T
        h = norm(x, layer.post_norm, spec)
        gate, up = (h @ layer.gate_up.T).split(spec.intermediate_size, -1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ layer.down.T
    return norm(x, weights.norm, spec) @ weights.head.T


def norm(x: "torch.Tensor", weight: "torch.Tensor | None", spec: ModelSpec) -> "torch.Tensor":
    if weight is None:
        return x
    return x / (x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * weight


def turn(x: "torch.Tensor", angles: "torch.Tensor") -> "torch.Tensor":
    """Rotate by complex multiplication."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angles).to(torch.complex64)
    return torch.cat((turned.real, turned.imag), -1)


def speeds(spec: ModelSpec) -> "torch.Tensor":
    """Radians per position of each pair, as in the paper of Llama 3.1's release."""
    found = []
    for pair in range(spec.head_dim // 2):
        speed = spec.rope_theta ** (-2 * pair / spec.head_dim)
        if (s := spec.rope_scaling) is not None:
            wave = 2 * np.pi / speed
            if wave > s.original_max_position_embeddings / s.low_freq_factor:
                speed /= s.factor
            elif wave > s.original_max_position_embeddings / s.high_freq_factor:
                smooth = s.original_max_position_embeddings / wave - s.low_freq_factor
                smooth /= s.high_freq_factor - s.low_freq_factor
                speed = (1 - smooth) * speed / s.factor + smooth * speed
        found.append(speed)
    return torch.tensor(found, dtype=torch.float64)


class Recorder:
    """A live executor on a made-up clock that counts what it has carried out."""

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self.mixed = self.chunked = self.shared = self.out = self.back = 0

    def execute(self, step: Step) -> float:
        chunks = self.executor.scheduler.listed(step)
        assert len(chunks) == step.decodes + len(step.prefills)
        assert sum(c.start + 1 for c in chunks[len(step.prefills) :]) == step.context
        self.mixed += bool(step.decodes and step.prefills)
        self.chunked += sum(c.start + c.tokens < c.request.prompt_tokens for c in step.prefills)
        self.shared += self.executor.scheduler.blocks.shared > 0
        self.out += step.swapped_out
        self.back += step.swapped_in
        self.executor.execute(step)
        return 1.0


def live(engine: Engine, load: Workload, scheduler: Scheduler) -> tuple[Recorder, np.ndarray]:
    """Run a workload on the engine; also give the log's rows of the requests."""
    engine.reset()
    recorder = Recorder(TorchExecutor(engine, scheduler))
    log, _ = play(load, scheduler, recorder)
    return recorder, np.sort(log.requests, order="id")


def texts(engine: Engine, load: Workload) -> dict[int, list[int]]:
    """Each request's answer by the reference, alone."""
    answers: dict[int, list[int]] = {}
    for i in range(len(load)):
        segments = None if load.segments is None else load.segments[i]
        request = Request(i, 0.0, int(load.prompt_tokens[i]), 1, segments=segments)
        said = {k: np.array(v, np.int32) for k, v in answers.items()}
        prompt = prompt_ids(request, engine.spec.vocab_size, said.get).tolist()
        whole = reference(engine, prompt, int(load.output_tokens[i]))
        answers[i] = whole[len(prompt) :]
    return answers


def crowd(count: int = 14, seed: int = 0) -> Workload:
    """Requests of all sizes that come in quick succession."""
    rng = np.random.default_rng(seed)
    return workload(
        *((i * 1.5, int(rng.integers(1, 40)), int(rng.integers(1, 25))) for i in range(count))
    )


@pytest.fixture(scope="module", params=[QWEN, LLAMA], ids=["qwen3", "llama"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param, 200, BLOCK, seed=1)


def manager(num_blocks: int, caching: bool = False) -> BlockManager:
    return BlockManager(num_blocks, BLOCK, prefix_caching=caching)


OPTIONS = {"max_num_seqs": 6, "max_num_batched_tokens": 12, "max_model_len": 128}


def test_batched_and_chunked_texts_are_those_of_each_request_alone(engine: Engine) -> None:
    """Steps mix prompts, chunks of prompts and decodes."""
    load = crowd()
    done, _ = live(engine, load, Scheduler(manager(200), **OPTIONS))
    assert done.mixed > 10
    assert done.chunked > 10
    assert {i: engine.answer(i) for i in range(len(load))} == texts(engine, load)


@pytest.mark.parametrize("swap_blocks", [0, 1000, 14], ids=["recompute", "swap", "both"])
def test_preempted_texts_are_those_of_each_request_alone(engine: Engine, swap_blocks: int) -> None:
    """17 blocks for requests of up to 16: preemption by recompute, by swap, by either in turn."""
    load = crowd()
    done, rows = live(engine, load, Scheduler(manager(18), swap_blocks=swap_blocks, **OPTIONS))
    assert rows["preemptions"].sum() >= 5
    assert (done.out > 0) == (swap_blocks > 0)
    assert done.out == done.back
    assert {i: engine.answer(i) for i in range(len(load))} == texts(engine, load)


@pytest.mark.parametrize("swap_blocks", [0, 1000], ids=["recompute", "swap"])
def test_texts_under_priorities_are_those_of_each_request_alone(
    engine: Engine, swap_blocks: int
) -> None:
    """A victim may lose what this very step was to compute."""
    load = crowd(16)
    load.priority = np.arange(16)[::-1] % 5
    scheduler = Scheduler(manager(18), policy=Priority(), swap_blocks=swap_blocks, **OPTIONS)
    done, rows = live(engine, load, scheduler)
    assert rows["preemptions"].sum() >= 5
    assert (done.out > 0) == (swap_blocks > 0)
    assert {i: engine.answer(i) for i in range(len(load))} == texts(engine, load)


@pytest.mark.parametrize("num_blocks", [200, 24])
@pytest.mark.parametrize("swap_blocks", [0, 1000])
def test_texts_over_shared_pages_are_those_of_each_request_alone(
    engine: Engine, num_blocks: int, swap_blocks: int
) -> None:
    """Three prompts begin alike: they share pages, in the very step that fills them, too."""
    load = crowd()
    load.arrival[:] = np.arange(len(load)) // 4 * 6.0
    load.segments = [
        tuple(
            (name, count)
            for name, count in (("system", min(17, n)), (("in", i), n - min(17, n)))
            if count
        )
        for i, n in enumerate(load.prompt_tokens.tolist())
    ]
    scheduler = Scheduler(manager(num_blocks, True), swap_blocks=swap_blocks, **OPTIONS)
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
    _, rows = live(engine, load, Scheduler(manager(200, True), **OPTIONS))
    assert rows["cached"].tolist() == [0, 16]
    assert {i: engine.answer(i) for i in range(2)} == texts(engine, load)


def test_a_static_batch_gives_the_text_of_the_padded_prompt(engine: Engine) -> None:
    """Padding is computed like any token: the engine has no mask for it."""
    load = workload((0, 5, 6), (0, 9, 3))
    live(engine, load, Static(manager(200), batch_size=2, max_model_len=128))
    pad = prompt_ids(Request(0, 0.0, 5, 6), engine.spec.vocab_size).tolist()
    whole = reference(engine, [0] * 4 + pad, 6)
    answer = engine.answer(0)
    assert answer is not None
    assert answer[:6] == whole[9:]


def test_logits_are_those_of_the_reference(engine: Engine) -> None:
    """To float32's rounding, not only in their order."""
    engine.reset()
    request = Request(0, 0.0, 33, 9, blocks=list(range(1, 10)))
    batch, _ = engine.inputs.build([Chunk(request, 0, 33)])
    with torch.inference_mode():
        found = engine.model.logits(batch)[-1]
    want = logits(engine, engine.tokens(0))[-1]
    assert torch.allclose(found, want, atol=2e-5 * float(want.abs().max()))


@pytest.mark.parametrize("recycles", [False, True])
def test_a_swap_brings_back_every_bit(
    engine: Engine, recycles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to other blocks, from the middle, in more pieces than one, through memory used before.

    Only behind CUDA is the host's memory kept for later copies.
    """
    monkeypatch.setattr(engine.cache, "recycles", recycles)
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
    request = Request(0, 0.0, 20, 9, generated=1, blocks=[1, 2, 3, 4, 5, 6])
    engine.execute([Chunk(request, 20, 1)], keep=False)
    first = engine.tokens(0)
    engine.execute([Chunk(request, 20, 1)], keep=False)
    assert engine.tokens(0) == first
    assert len(first) == 21
    engine.execute([Chunk(request, 20, 1)])
    assert len(engine.tokens(0)) == 22


def test_rows_of_requests_that_are_over_are_given_up(engine: Engine) -> None:
    """A long run needs no more rows than requests at once, and the slack."""
    load = workload(*((2.0 * i, 2, 2) for i in range(300)))
    live(engine, load, Scheduler(manager(200), **OPTIONS))
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


# ------------------------------------------------------------ weights from files


def checkpoint(engine: Engine, dtype: "torch.dtype") -> dict[str, "torch.Tensor"]:
    """Give an engine's weights under the names and in the parts of a Hugging Face checkpoint."""
    spec, weights = engine.spec, engine.model.weights
    width = spec.head_dim
    rows = [spec.num_attention_heads * width, *[spec.num_key_value_heads * width] * 2]
    found = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if not spec.tie_word_embeddings:
        found["lm_head.weight"] = weights.head
    for number, layer in enumerate(weights.layers):
        at = f"model.layers.{number}."
        for name, part in zip("qkv", layer.qkv.split(rows), strict=True):
            found[f"{at}self_attn.{name}_proj.weight"] = part
        if layer.qkv_bias is not None:
            for name, part in zip("qkv", layer.qkv_bias.split(rows), strict=True):
                found[f"{at}self_attn.{name}_proj.bias"] = part
        if layer.q_norm is not None and layer.k_norm is not None:
            found[f"{at}self_attn.q_norm.weight"] = layer.q_norm
            found[f"{at}self_attn.k_norm.weight"] = layer.k_norm
        gate, up = layer.gate_up.chunk(2)
        found |= {
            f"{at}self_attn.o_proj.weight": layer.o,
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.down_proj.weight": layer.down,
            f"{at}input_layernorm.weight": layer.input_norm,
            f"{at}post_attention_layernorm.weight": layer.post_norm,
        }
    return {name: tensor.to(dtype).contiguous() for name, tensor in found.items()}


def save(path: Path, tensors: dict[str, "torch.Tensor"]) -> None:
    """Write a safetensors file."""
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16"}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.flatten().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": kinds[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_from_safetensors(
    engine: Engine, tmp_path: Path, dtype: "torch.dtype"
) -> None:
    """Out of two files, in their own precision."""
    tensors = checkpoint(engine, dtype)
    names = list(tensors)
    save(tmp_path / "model-1.safetensors", {name: tensors[name] for name in names[:5]})
    save(tmp_path / "model-2.safetensors", {name: tensors[name] for name in names[5:]})
    found = Engine(engine.spec, 2, BLOCK, weights=tmp_path).model.weights
    mine = engine.model.weights
    assert torch.equal(found.head, mine.head.to(dtype).float())
    for own, other in zip(mine.layers, found.layers, strict=True):
        for name in ("qkv", "qkv_bias", "q_norm", "o", "gate_up", "down"):
            one, two = getattr(own, name), getattr(other, name)
            assert (one is None) == (two is None)
            assert one is None or torch.equal(two, one.to(dtype).float())


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(
    engine: Engine, tmp_path: Path
) -> None:
    """All tensors that are missing or misshapen are named at once."""
    tensors = checkpoint(engine, torch.float32)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(7)
    save(tmp_path / "model.safetensors", tensors)
    with pytest.raises(HeadwayError) as caught:
        Engine(engine.spec, 2, BLOCK, weights=tmp_path)
    told = [message.removeprefix(f"{tmp_path}: ") for message in caught.value.messages]
    assert told == [
        "model.layers.1.mlp.up_proj.weight: missing",
        "model.norm.weight: has shape [7], the config says [64]",
    ]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda raw: raw[:-1], "cut off"),
        (lambda raw: raw[:6], "no safetensors"),
        (lambda raw: raw[:8] + b"x" + raw[9:], "no JSON"),
    ],
)
def test_a_damaged_checkpoint_is_refused(engine: Engine, tmp_path: Path, damage, told) -> None:
    path = tmp_path / "model.safetensors"
    save(path, checkpoint(engine, torch.float32))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(HeadwayError, match=told):
        Engine(engine.spec, 2, BLOCK, weights=tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"no .*safetensors"):
        Engine(QWEN, 2, BLOCK, weights=tmp_path)


# ------------------------------------------------------------ what cannot be run


def test_a_model_that_does_not_fit_is_refused_before_anything_is_allocated() -> None:
    """The message says what it takes and how many blocks would fit."""
    with pytest.raises(HeadwayError, match=r"llama-3-70b in float32 does not fit cpu: 262.*GiB"):
        Engine(load_model("llama-3-70b"), 100)
    with pytest.raises(HeadwayError, match=r"at most \d+ blocks fit"):
        Engine(QWEN, 10**9)


@pytest.mark.parametrize(
    ("device", "told"),
    [("tpu9", "none"), ("meta", "not supported"), ("cuda:99", "no cuda:99")],
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
    scheduler = AsyncScheduler(BlockCounter(1000, 16), max_model_len=513)
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
