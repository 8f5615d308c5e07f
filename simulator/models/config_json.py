"""Read a Hugging Face config.json.

`WHOLE_NUMBERS` tells which key means what, `FAMILIES` what the files of a `model_type` leave
unsaid because its code in transformers says it. Files of models that read images, too, hold the
language model in `text_config`; of the rest `vision.py` reads the encoder's sizes. What is wrong in
a file is told by line and key.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator.models.config_parts import (
    Family,
    number,
    read_kinds,
    read_latent,
    read_linear,
    read_mamba,
    read_rope,
    read_window,
    size_of,
    whole_or_zero,
)
from simulator.models.dtypes import BYTES
from simulator.models.quantization import read_quantization
from simulator.models.spec import REQUIRED, ModelSpec
from simulator.models.vision import read_vision
from simulator.util.errors import HeadwayError
from simulator.util.from_mapping import short_repr
from simulator.util.json_text import parse_json
from simulator.util.yaml_lines import read_text

WHOLE_NUMBERS = {
    **{name: (name,) for name in (*REQUIRED, "num_key_value_heads", "head_dim")},
    "num_experts_per_tok": ("num_experts_per_tok", "top_k_experts"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_intermediate_size": ("moe_intermediate_size",),
    "num_shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "dense_intermediate_size": ("intermediate_size_mlp",),
    "rotary_dim": ("rotary_dim",),
    "moe_latent_size": ("moe_latent_size",),
    "full_head_dim": ("global_head_dim",),
    "kv_shared_layers": ("num_kv_shared_layers",),
    "per_layer_input": ("hidden_size_per_layer_input",),
}
"""Keys of each size, of which the first that is there counts."""


SHARED = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)
"""Keys of the width of what all tokens meet beside the experts."""

MOST_LAYERS = 10_000  # each is read by itself
TOWERS = ("vision_config", "audio_config")


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "phi3": Family(),
    "qwen2": Family(attention_bias=True),
    "qwen2_vl": Family(attention_bias=True),
    "qwen2_5_vl": Family(attention_bias=True),
    "qwen3": Family(use_qk_norm=True),
    "qwen3_moe": Family(use_qk_norm=True),
    "qwen3_vl": Family(use_qk_norm=True),
    "qwen3_vl_moe": Family(use_qk_norm=True),
    "deepseek_v2": Family(latent_attention=True),
    "deepseek_v3": Family(latent_attention=True),
    "deepseek_v32": Family(latent_attention=True),
    "kimi_k2": Family(latent_attention=True),
    "llama4_text": Family(num_shared_experts=1, sliding_window_pattern=4),
    "ministral3": Family(),
    "qwen3_next": Family(
        use_qk_norm=True, attention_gate=True, shared_expert_gate=True, full_attention_interval=4
    ),
    "qwen3_5": Family(use_qk_norm=True, attention_gate=True, full_attention_interval=4),
    "qwen3_5_moe": Family(
        use_qk_norm=True, attention_gate=True, shared_expert_gate=True, full_attention_interval=4
    ),
    "gemma2": Family(tie_word_embeddings=True, norms_per_layer=4, sliding_window_pattern=2),
    "gemma3_text": Family(
        tie_word_embeddings=True,
        use_qk_norm=True,
        norms_per_layer=4,
        sliding_window_pattern=6,
        sizes={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
        },
    ),
    "gemma4": Family(
        tie_word_embeddings=True,
        use_qk_norm=True,
        norms_per_layer=4,
        sliding_window_pattern=6,
        sizes={"global_head_dim": 512, "hidden_size_per_layer_input": 256, "sliding_window": 512},
    ),
    "minimax_m2": Family(use_qk_norm=True, qk_norm_whole=True),
    "granite": Family(),
    "granitemoe": Family(),
    "granitemoeshared": Family(),
    "nemotron_h": Family(norms_per_layer=1, gated_mlp=False),
    "glm": Family(),
    "glm4": Family(norms_per_layer=4),
    "glm4_moe": Family(),
    "gpt_oss": Family(attention_bias=True, expert_bias=True),
}
"""Values of `model_type` whose architecture is the one that `ModelSpec` counts."""

OUTER = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
"""Keys that a file with a `text_config` may have beside it."""


def read_config(path: Path) -> ModelSpec:
    """Read a Hugging Face config.json; HeadwayError names the file and every bad key.

    Where it says no formats, ModelOpt's `hf_quant_config.json` beside it may.
    """
    text = read_text(path)
    whole = _object(path, text)
    beside = path.with_name("hf_quant_config.json")
    if beside.is_file() and not _says_formats(whole):
        whole["quantization_config"] = _read_beside(beside)
    raw = whole
    if isinstance(text_config := whole.get("text_config"), dict):
        raw = {key: whole[key] for key in OUTER if key in whole} | text_config
    raw = {"model_type": _kind(raw, whole)} | {k: v for k, v in raw.items() if k != "model_type"}
    try:
        spec = _spec(path.resolve().parent.name, raw)
        vision = read_vision(whole, spec.hidden_size)
        towers = [key for key in TOWERS if isinstance(whole.get(key), dict)]
        unread = [key for key in towers if key != "vision_config" or vision is None]
        if spec.single_blocks and spec.num_experts and not spec.num_shared_experts:
            unread.append(f"{SHARED[1]} is missing: no shared expert is counted")
        return replace(spec, vision=vision, unread=", ".join(unread))
    except ValueError as error:
        messages = str(error).split("\n")
        raise HeadwayError(
            f"{path}{_line(text, message)}: {message}" for message in messages
        ) from None


def _read_beside(path: Path) -> object:
    """Return what ModelOpt's own file says of the formats, if it can be understood."""
    found = _object(path, read_text(path)).get("quantization")
    try:
        read_quantization(found)
    except ValueError as error:
        told = str(error).removeprefix("quantization_config: ")
        raise HeadwayError(f"{path}: quantization: {told}") from None
    return found


def _object(path: Path, text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        raw = parse_json(text)
    except json.JSONDecodeError as error:
        raise HeadwayError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(raw, dict):
        raise HeadwayError(f"{path}:1: must be a JSON object, not {type(raw).__name__}")
    return raw


def _says_formats(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json says of each module what it is in, or that none is quantized."""
    config = raw.get("quantization_config")
    mixed = isinstance(config, dict) and config.get("quant_algo") == "MIXED_PRECISION"
    return config is not None and not (mixed and not config.get("quantized_layers"))


def _kind(raw: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Return the family of a file: its `model_type`, or its architecture where it has none."""
    kind = raw.get("model_type") or whole.get("model_type")
    if kind is None and isinstance(names := whole.get("architectures"), list) and names:
        word = str(names[0]).partition("For")[0].replace("_", "").lower()
        plain = {name.replace("_", ""): name for name in FAMILIES}
        kind = plain.get(word) or plain.get(f"{word}text") or names[0]
    kind = str(kind or "llama")
    return kind if kind in FAMILIES else kind.removesuffix("_text")


def _line(text: str, message: str) -> str:
    """Find the line of the key that a message begins with."""
    key = f'"{message.partition(":")[0]}"'
    return next((f":{k}" for k, line in enumerate(text.splitlines(), 1) if key in line), "")


def _wrong(raw: Mapping[str, object]) -> list[str]:
    """Tell what a config lacks and what it has that a ModelSpec does not count."""
    kind = raw.get("model_type", "llama")
    family = FAMILIES.get(str(kind), Family())
    wrong = [
        f"{key}: is missing"
        for key in REQUIRED
        if raw.get(key) is None and key not in family.sizes
        if key != "intermediate_size" or raw.get("moe_intermediate_size") is None
    ]
    wrong += [
        f"{key}: must be a whole number, not {short_repr(raw[key])}"
        for keys in WHOLE_NUMBERS.values()
        for key in keys
        if raw.get(key) is not None and (not isinstance(raw[key], int) or raw[key] is True)
    ]
    layers = raw.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        wrong.append(f"num_hidden_layers: must be at most {MOST_LAYERS:,}, not {layers}")
    if kind not in FAMILIES:
        wrong.append(
            f"model_type: {short_repr(kind)} is not supported; there are {', '.join(FAMILIES)}"
        )
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        wrong.append("mlp_only_layers: every layer must have experts, or none")
    dtype = _dtype(raw)
    if dtype not in BYTES:
        wrong.append(f"torch_dtype: {short_repr(dtype)} is none of {', '.join(BYTES)}")
    return wrong


def _dtype(raw: Mapping[str, object]) -> str:
    given = raw.get("dtype") or raw.get("torch_dtype") or "float16"
    return str(given).removeprefix("torch.")


def _spec(name: str, raw: Mapping[str, object]) -> ModelSpec:
    """Make the ModelSpec of a config; ValueError, a line `key: what is wrong` for each fault."""
    if wrong := _wrong(raw):
        raise ValueError("\n".join(wrong))
    family = FAMILIES[str(raw.get("model_type", "llama"))]
    raw = {**family.sizes, **{key: value for key, value in raw.items() if value is not None}}
    sizes: dict[str, int] = {}
    for size, keys in WHOLE_NUMBERS.items():
        value = next((raw[key] for key in keys if key in raw), 0)
        sizes[size] = value if isinstance(value, int) else 0
    sizes["intermediate_size"] = sizes["intermediate_size"] or sizes["expert_intermediate_size"]
    heads = sizes["num_attention_heads"]
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
    if not sizes["head_dim"]:
        sizes["head_dim"], over = divmod(sizes["hidden_size"], max(heads, 1))
        if over and not family.latent_attention:
            raise ValueError(f"hidden_size: {sizes['hidden_size']} is no multiple of {heads} heads")
    _set_experts(raw, family, sizes)
    window = read_window(raw, family, sizes)
    rope_theta, rope_scaling = read_rope(raw)
    kinds, linear = read_kinds(raw, sizes["num_hidden_layers"]), None
    if "mamba" in kinds:
        linear = read_mamba(raw, kinds.count("mamba"))
    elif family.full_attention_interval:
        linear = read_linear(raw, family, sizes["num_hidden_layers"])
    return ModelSpec(
        name,
        **sizes,  # type: ignore[arg-type]
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", family.tie_word_embeddings)),
        attention_bias=bool(raw.get("attention_bias", family.attention_bias)),
        qk_norm=bool(raw.get("use_qk_norm", family.use_qk_norm)),
        norms_per_layer=family.norms_per_layer,
        shared_expert_gate=family.shared_expert_gate,
        attention_gate=family.attention_gate,
        latent=read_latent(raw, family),
        linear=linear,
        kinds=kinds,
        single_blocks="mamba" in kinds,
        gated_mlp=family.gated_mlp,
        expert_bias=family.expert_bias,
        qk_norm_whole=family.qk_norm_whole,
        full_kv_heads=whole_or_zero(raw, "num_global_key_value_heads")
        if raw.get("attention_k_eq_v")
        else 0,
        wide_shared_mlp=bool(raw.get("use_double_wide_mlp")),
        sliding_window=window.tokens,
        windowed_layers=window.layers,
        full_first=window.full_first,
        chunked=bool(window.tokens) and "attention_chunk_size" in raw,
        dtype=_dtype(raw),
        checkpoint=read_quantization(raw.get("quantization_config")),
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
    )


def _set_experts(raw: Mapping[str, object], family: Family, sizes: dict[str, int]) -> None:
    """Put sizes of experts, and of the layers without, under the names of ModelSpec.

    Llama 4's files name the size of an expert `intermediate_size` and count every
    `interleave_moe_layer_step`-th layer; those of Qwen3-Next give the width of what is shared.
    """
    inner, expert_size = sizes["intermediate_size"], sizes.pop("expert_intermediate_size")
    if not sizes["num_experts"]:
        others = ("num_experts_per_tok", "num_shared_experts", "dense_layers")
        sizes.update(dict.fromkeys((*others, "dense_intermediate_size"), 0))
        return
    sizes["intermediate_size"] = expert_size or inner
    sizes["num_shared_experts"] = sizes["num_shared_experts"] or family.num_shared_experts
    key = next((key for key in SHARED if raw.get(key)), None)
    if key is None and raw.get("enable_moe_block"):  # an MLP beside the experts (Gemma 4)
        key = "intermediate_size"
    if key is not None:
        shared = size_of(raw, key)
        sizes["num_shared_experts"], over = divmod(shared, sizes["intermediate_size"])
        if over:
            raise ValueError(f"{key}: {shared} is no multiple of moe_intermediate_size")
    if "interleave_moe_layer_step" in raw:
        layers = sizes["num_hidden_layers"]
        sizes["dense_layers"] = layers - layers // size_of(raw, "interleave_moe_layer_step")
    given = sizes["dense_intermediate_size"]
    sizes["dense_intermediate_size"] = (given or inner) if sizes["dense_layers"] else 0
