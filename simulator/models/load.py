"""Load a model: a shipped one, or a Hugging Face config.json.

What is wrong in the file is told by line and key. What is read of it makes a `ModelSpec`.
"""

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

from simulator.models.attention import read_latent, read_window
from simulator.models.rope import read_number, read_rope
from simulator.models.shapes import shipped_shape
from simulator.models.spec import BYTES, REQUIRED, ModelSpec
from simulator.util.errors import HeadwayError
from simulator.util.yaml_lines import read_text

MODELS = Path(__file__).parent / "configs"
FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_oss",
)
"""Values of config.json's `model_type` whose architecture is the one that `ModelSpec` counts."""
NORMED_TWICE = {"gemma2", "gemma3_text", "glm4"}  # before attention and MLP, and behind each
NORMED_QK = {"qwen3", "qwen3_moe", "gemma3_text"}
TIED = {"gemma2", "gemma3_text"}  # their files leave tie_word_embeddings out

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
DENSE = ("n_shared_experts", "first_k_dense_replace")

OPTIONAL = ("num_key_value_heads", "head_dim", "num_experts_per_tok", *EXPERTS, *DENSE)


def shipped_models() -> list[str]:
    """Names of the models whose config.json comes with the package."""
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def load_model(name_or_path: str | Path, base: Path | None = None) -> ModelSpec:
    """Load a shipped model by its name, or the config.json at a path or in a folder.

    A Hugging Face name stands for the shipped model of that shape (`shapes.py`).
    A relative path is looked up in `base` (the current folder by default), then in the folder
    that HEADWAY_DATA names. Raises ValueError where neither is there, HeadwayError with all that
    is wrong in the file.
    """
    from simulator.util.files import resolve

    names = shipped_models()
    if name_or_path in names:
        return read_config(MODELS / name_or_path / "config.json")
    path = resolve(name_or_path, base or Path())
    if not path.exists() and (found := shipped_shape(str(name_or_path), names)):
        return read_config(MODELS / found / "config.json")
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        near = get_close_matches(str(name_or_path).lower(), names, n=len(names), cutoff=0.5)
        order = near + [name for name in names if name not in near]
        raise ValueError(
            f"model: no file {path} and no shipped model {str(name_or_path)!r}; there are "
            f"{', '.join(order)}"
        )
    return read_config(path)


def read_config(path: Path) -> ModelSpec:
    """Read a Hugging Face config.json; HeadwayError names the file and every bad key."""
    text = read_text(path)
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise HeadwayError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(raw, dict):
        raise HeadwayError(f"{path}:1: must be a JSON object, not {type(raw).__name__}")
    lines = text.splitlines()

    def tell(messages: Iterable[str]) -> HeadwayError:
        return HeadwayError(f"{path}{_line(lines, message)}: {message}" for message in messages)

    if wrong := _wrong(raw):
        raise tell(wrong)
    try:
        return _spec(path.resolve().parent.name, raw)
    except ValueError as error:
        raise tell(str(error).split("\n")) from None


def _line(lines: list[str], message: str) -> str:
    """Find the line of the key that a message begins with."""
    key = f'"{message.partition(":")[0]}"'
    return next((f":{k}" for k, line in enumerate(lines, 1) if key in line), "")


def _count(raw: Mapping[str, object], *names: str) -> int | None:
    """Give the first of the keys that is there and not null."""
    found = (raw[name] for name in names if raw.get(name) is not None)
    value = next(found, None)
    return value if isinstance(value, int) else None


def _wrong(raw: Mapping[str, object]) -> list[str]:
    """Tell what a config lacks and what it has that a ModelSpec does not count."""
    wrong = [f"{name}: is missing" for name in REQUIRED if raw.get(name) is None]
    wrong += [
        f"{name}: must be a whole number, not {raw[name]!r}"
        for name in (*REQUIRED, *OPTIONAL)
        if raw.get(name) is not None and (not isinstance(raw[name], int) or raw[name] is True)
    ]
    kind = raw.get("model_type", "llama")
    if kind not in FAMILIES:
        wrong.append(f"model_type: {kind!r} is not supported; there are {', '.join(FAMILIES)}")
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        wrong.append("mlp_only_layers: every layer must have experts, or none")
    dtype = _dtype(raw)
    if dtype not in BYTES:
        wrong.append(f"torch_dtype: {dtype!r} is none of {', '.join(BYTES)}")
    return wrong


def _dtype(raw: Mapping[str, object]) -> str:
    given = raw.get("dtype") or raw.get("torch_dtype") or "float16"
    return str(given).removeprefix("torch.")


def _spec(name: str, raw: Mapping[str, object]) -> ModelSpec:
    """Make the ModelSpec of a config whose keys are known to be good."""
    sizes = {key: _count(raw, key) or 0 for key in REQUIRED}
    heads = sizes["num_attention_heads"]
    inner = sizes["intermediate_size"]
    experts = _count(raw, *EXPERTS[:3]) or 0
    dense = (_count(raw, "first_k_dense_replace") or 0) if experts else 0
    longest = sizes["max_position_embeddings"]
    window, windowed = read_window(raw, sizes["num_hidden_layers"], longest)
    if experts:
        moe_size = _count(raw, "moe_intermediate_size")
        sizes["intermediate_size"] = moe_size or sizes["intermediate_size"]
    kind = str(raw.get("model_type", "llama"))
    theta, scaling = read_rope(raw)
    return ModelSpec(
        name=name,
        **sizes,
        num_key_value_heads=_count(raw, "num_key_value_heads") or heads,
        head_dim=_count(raw, "head_dim") or sizes["hidden_size"] // max(heads, 1),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", kind in TIED)),
        attention_bias=bool(raw.get("attention_bias", kind == "qwen2")),
        num_shared_experts=(_count(raw, "n_shared_experts") or 0) if experts else 0,
        dense_layers=dense,
        dense_intermediate_size=inner if dense else 0,
        latent=read_latent(raw),
        sliding_window=window,
        windowed_layers=windowed,
        norms_per_layer=4 if kind in NORMED_TWICE else 2,
        qk_norm=bool(raw.get("use_qk_norm", kind in NORMED_QK)),
        num_experts=experts,
        num_experts_per_tok=_count(raw, "num_experts_per_tok") or 0 if experts else 0,
        dtype=_dtype(raw),
        rms_norm_eps=read_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
    )
