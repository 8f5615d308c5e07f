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
from typing import NamedTuple

from simulator.models.spec import (
    BYTES,
    REQUIRED,
    LatentAttention,
    LinearAttention,
    ModelSpec,
    RopeScaling,
)
from simulator.models.vision import read_vision
from simulator.util.errors import HeadwayError
from simulator.util.from_mapping import short_repr
from simulator.util.json_text import parse_json
from simulator.util.yaml_lines import read_text

WHOLE_NUMBERS = {
    **{name: (name,) for name in (*REQUIRED, "num_key_value_heads", "head_dim")},
    "num_experts_per_tok": ("num_experts_per_tok",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_intermediate_size": ("moe_intermediate_size",),
    "num_shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "dense_intermediate_size": ("intermediate_size_mlp",),
}
"""Keys of each size, of which the first that is there counts."""


class Family(NamedTuple):
    """What holds for the files of a `model_type` where they do not say otherwise."""

    tie_word_embeddings: bool = False
    attention_bias: bool = False
    use_qk_norm: bool = False
    norms_per_layer: int = 2  # 4: before attention and MLP, and behind each
    latent_attention: bool = False  # True: its sizes must be there
    sliding_window_pattern: int = 1  # each n-th layer has no window; 1: all have it
    num_shared_experts: int = 0
    shared_expert_gate: bool = False
    attention_gate: bool = False
    full_attention_interval: int = 0  # each n-th layer has a KV cache, the others a state; 0: all
    sizes: Mapping[str, int] = {}


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "phi3": Family(),
    "qwen2": Family(attention_bias=True),
    "qwen2_5_vl": Family(attention_bias=True),
    "qwen3": Family(use_qk_norm=True),
    "qwen3_moe": Family(use_qk_norm=True),
    "deepseek_v2": Family(latent_attention=True),
    "deepseek_v3": Family(latent_attention=True),
    "kimi_k2": Family(latent_attention=True),
    "llama4_text": Family(num_shared_experts=1, sliding_window_pattern=4),
    "ministral3": Family(),
    "qwen3_next": Family(
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
    "glm": Family(),
    "glm4": Family(norms_per_layer=4),
    "glm4_moe": Family(),
    "gpt_oss": Family(),
}
"""Values of `model_type` whose architecture is the one that `ModelSpec` counts."""

OUTER = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
"""Keys that a file with a `text_config` may have beside it."""

QUANTIZATIONS = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "mxfp4": "mxfp4",
    "awq": "int4",
    "modelopt_fp4": "nvfp4",
}
"""Values of `quantization_config.quant_method` that say the width by themselves."""


def read_config(path: Path) -> ModelSpec:
    """Read a Hugging Face config.json; HeadwayError names the file and every bad key."""
    text = read_text(path)
    try:
        raw = parse_json(text)
    except json.JSONDecodeError as error:
        raise HeadwayError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(raw, dict):
        raise HeadwayError(f"{path}:1: must be a JSON object, not {type(raw).__name__}")
    whole = raw
    if isinstance(text_config := raw.get("text_config"), dict):
        raw = {key: raw[key] for key in OUTER if key in raw} | text_config
    try:
        spec = _spec(path.resolve().parent.name, raw)
        return replace(spec, vision=read_vision(whole, spec.hidden_size))
    except ValueError as error:
        messages = str(error).split("\n")
        raise HeadwayError(
            f"{path}{_line(text, message)}: {message}" for message in messages
        ) from None


def _line(text: str, message: str) -> str:
    """Find the line of the key that a message begins with."""
    key = f'"{message.partition(":")[0]}"'
    return next((f":{k}" for k, line in enumerate(text.splitlines(), 1) if key in line), "")


def _wrong(raw: Mapping[str, object]) -> list[str]:
    """Tell what a config lacks and what it has that a ModelSpec does not count."""
    kind = raw.get("model_type", "llama")
    family = FAMILIES.get(str(kind), Family())
    wrong = [
        f"{key}: is missing" for key in REQUIRED if raw.get(key) is None and key not in family.sizes
    ]
    wrong += [
        f"{key}: must be a whole number, not {short_repr(raw[key])}"
        for keys in WHOLE_NUMBERS.values()
        for key in keys
        if raw.get(key) is not None and (not isinstance(raw[key], int) or raw[key] is True)
    ]
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
    sizes = {}
    for size, keys in WHOLE_NUMBERS.items():
        value = next((raw[key] for key in keys if key in raw), 0)
        sizes[size] = value if isinstance(value, int) else 0
    heads = sizes["num_attention_heads"]
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
    if not sizes["head_dim"]:
        sizes["head_dim"], over = divmod(sizes["hidden_size"], max(heads, 1))
        if over and not family.latent_attention:
            raise ValueError(f"hidden_size: {sizes['hidden_size']} is no multiple of {heads} heads")
    _set_experts(raw, family, sizes)
    window, windowed_layers, full_first = _read_window(raw, family, sizes)
    rope_theta, rope_scaling = read_rope(raw)
    return ModelSpec(
        name,
        **sizes,  # type: ignore[arg-type]
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", family.tie_word_embeddings)),
        attention_bias=bool(raw.get("attention_bias", family.attention_bias)),
        qk_norm=bool(raw.get("use_qk_norm", family.use_qk_norm)),
        norms_per_layer=family.norms_per_layer,
        shared_expert_gate=family.shared_expert_gate,
        attention_gate=family.attention_gate,
        latent=_read_latent(raw, family),
        linear=_read_linear(raw, family, sizes["num_hidden_layers"]),
        sliding_window=window,
        windowed_layers=windowed_layers,
        full_first=full_first,
        chunked=bool(window) and "attention_chunk_size" in raw,
        dtype=_dtype(raw),
        quantization=_read_quantization(raw),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
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
    if "shared_expert_intermediate_size" in raw:
        shared = _size(raw, "shared_expert_intermediate_size")
        sizes["num_shared_experts"], over = divmod(shared, sizes["intermediate_size"])
        if over:
            raise ValueError(
                f"shared_expert_intermediate_size: {shared} is no multiple of moe_intermediate_size"
            )
    if "interleave_moe_layer_step" in raw:
        layers = sizes["num_hidden_layers"]
        sizes["dense_layers"] = layers - layers // _size(raw, "interleave_moe_layer_step")
    given = sizes["dense_intermediate_size"]
    sizes["dense_intermediate_size"] = (given or inner) if sizes["dense_layers"] else 0


def _read_linear(raw: Mapping[str, object], family: Family, layers: int) -> LinearAttention | None:
    """Read the sizes of the layers with linear attention; None where there are none."""
    every = family.full_attention_interval
    if not every:
        return None
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        count = kinds.count("linear_attention")
    else:
        if "full_attention_interval" in raw:
            every = _size(raw, "full_attention_interval")
        count = layers - layers // every
    keys = LinearAttention._fields[1:]
    return LinearAttention(count, *(_size(raw, f"linear_{key}") for key in keys))


def _read_quantization(raw: Mapping[str, object]) -> str:
    """Return the dtype that the weights are published in, "" for that of the rest.

    ValueError, `key: what is wrong`, for one that is not known.
    """
    config = raw.get("quantization_config")
    if config is None:
        return ""
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config: must be a mapping, not {config!r}")
    method = str(config.get("quant_method"))
    if method in QUANTIZATIONS:
        return QUANTIZATIONS[method]
    if method not in {"gptq", "modelopt", "compressed-tensors"}:
        known = ", ".join((*QUANTIZATIONS, "gptq", "modelopt", "compressed-tensors"))
        raise ValueError(
            f"quantization_config: quant_method {method!r} is not known; there are {known}. "
            "Without this key, engine.quantization says what the weights are"
        )
    if method == "modelopt":
        return "nvfp4" if config.get("quant_algo") == "NVFP4" else "fp8"
    weights: Mapping[str, object] = config
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
        given = first.get("weights") if isinstance(first, Mapping) else None
        weights = given if isinstance(given, Mapping) else {}
    bits = weights.get("num_bits", weights.get("bits"))
    floats = {4: "nvfp4", 8: "fp8"} if weights.get("type") == "float" else {}
    found = floats.get(bits, f"int{bits}") if isinstance(bits, int) else ""
    if found not in BYTES:
        raise ValueError(f"quantization_config: weights of {bits} bits are not supported")
    return found


def _read_latent(raw: Mapping[str, object], family: Family) -> LatentAttention | None:
    """Read the sizes of multi-head latent attention; None where there is none.

    ValueError, `key: what is wrong`, where one is missing or no positive whole number.
    """
    if raw.get("kv_lora_rank") is None and not family.latent_attention:
        return None
    keys = [*LatentAttention._fields]
    if raw.get("q_lora_rank") is None:
        keys.remove("q_lora_rank")
    return LatentAttention(**{key: _size(raw, key) for key in keys})


def _read_window(
    raw: Mapping[str, object], family: Family, sizes: Mapping[str, int]
) -> tuple[int, int, bool]:
    """Get the tokens of a sliding window, the layers that have it, and whether the first has none.

    Without a window that is 0, 0, False.

    `layer_types` names each layer's kind (gpt-oss and new files of other families); without it all
    layers have the window (Mistral-7B-v0.1), in Qwen's families those from `max_window_layers` on,
    in Gemma's all but each `sliding_window_pattern`-th.
    Llama 4's chunks are taken for windows: at most so far back each of its queries sees.
    A window as long as the model's longest request is none. ValueError where a key is wrong.
    """
    if "attention_chunk_size" in raw:
        raw = {"sliding_window": raw["attention_chunk_size"]}
    if raw.get("sliding_window") is None or not raw.get("use_sliding_window", True):
        return 0, 0, False
    window, layers = _size(raw, "sliding_window"), sizes["num_hidden_layers"]
    kinds, full_first = raw.get("layer_types"), False
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise ValueError(f"layer_types: must name {layers} layers, not {len(kinds)}")
        windowed = kinds.count("sliding_attention")
        full_first = kinds[0] != "sliding_attention"
    elif "use_sliding_window" in raw and raw.get("max_window_layers") is not None:
        windowed = max(layers - _size(raw, "max_window_layers"), 0)
        full_first = windowed < layers
    elif (every := family.sliding_window_pattern) > 1:
        if raw.get("sliding_window_pattern") is not None:
            every = _size(raw, "sliding_window_pattern")
        windowed = layers - layers // every
    else:
        windowed = layers
    if not windowed or window >= sizes["max_position_embeddings"]:
        return 0, 0, False
    return window, windowed, full_first


def read_rope(raw: Mapping[str, object]) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling; ValueError, `key: what is wrong`, where they are no numbers.

    Newer files hold both in `rope_parameters`.
    """
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(key) or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"{key}: must be a mapping, not {short_repr(scaling)}")
    theta = _number({**raw, **scaling}, "rope_theta", 10000.0)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return theta, None
    keys = [name for name in RopeScaling._fields[1:] if name in scaling]
    return theta, RopeScaling(kind, **{key: _number(scaling, key, 0.0) for key in keys})


def _number(raw: Mapping[str, object], key: str, default: float) -> float:
    """Return a positive number, the default where the key is missing or null."""
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{key}: must be a positive number, not {short_repr(value)}")
    return value


def _size(raw: Mapping[str, object], key: str) -> int:
    """Return a positive whole number."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: must be a positive whole number, not {short_repr(value)}")
    return value
