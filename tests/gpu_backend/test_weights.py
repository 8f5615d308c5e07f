"""Weights out of the files of a Hugging Face checkpoint."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'headway[gpu]'")

from gpu_backend.engine import Engine  # noqa: E402
from simulator.util.errors import HeadwayError  # noqa: E402
from tests.support.tiny_models import QWEN  # noqa: E402


def checkpoint(engine: Engine, dtype: "torch.dtype") -> dict[str, "torch.Tensor"]:
    """Return an engine's weights under the names and in the parts of a Hugging Face checkpoint."""
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
    found = Engine(engine.spec, 2, 4, weights=tmp_path).model.weights
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
        Engine(engine.spec, 2, 4, weights=tmp_path)
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
        Engine(engine.spec, 2, 4, weights=tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"no .*safetensors"):
        Engine(QWEN, 2, 4, weights=tmp_path)
