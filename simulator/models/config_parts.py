"""Parts of a config.json: what each layer is, windows, latents, states, rotary embeddings.

ValueError, `key: what is wrong`, where a part is not what it must be.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from simulator.models.attention import LatentAttention, LinearAttention
from simulator.models.spec import RopeScaling
from simulator.util.from_mapping import short_repr

BLOCKS = (
    {"M": "mamba", "E": "moe", "*": "full_attention", "-": "mlp", "mlp": "mlp"}
    | {word: word for word in ("mamba", "moe")}
    | {"attention": "full_attention"}
)
"""What Nemotron-H's `hybrid_override_pattern` and `layers_block_type` call each layer."""


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
    qk_norm_whole: bool = False
    gated_mlp: bool = True
    expert_bias: bool = False
    sizes: Mapping[str, object] = {}


def read_kinds(raw: Mapping[str, object], layers: int) -> tuple[str, ...]:
    """Read what each layer is; () where the file does not list them."""
    kinds = raw.get("hybrid_override_pattern") or raw.get("layers_block_type")
    key = "hybrid_override_pattern" if isinstance(kinds, str) else "layers_block_type"
    if kinds:
        unknown = {str(word) for word in kinds if word not in BLOCKS}  # type: ignore[attr-defined]
        if unknown:
            raise ValueError(f"{key}: {', '.join(sorted(unknown))}: not a kind of layer")
        kinds = [BLOCKS[word] for word in kinds]  # type: ignore[attr-defined]
    else:
        key, kinds = "layer_types", raw.get("layer_types")
        if not isinstance(kinds, list):
            return ()
        same = {"chunked_attention": "sliding_attention"}
        kinds = [same.get(str(word), str(word)) for word in kinds]
    if len(kinds) != layers:
        raise ValueError(f"{key}: must name {layers} layers, not {len(kinds)}")
    return tuple(kinds)


def read_mamba(raw: Mapping[str, object], layers: int) -> LinearAttention:
    """Read the sizes of Mamba-2's layers (Nemotron-H)."""
    keys = ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel")
    names = LinearAttention._fields[1:6]
    sizes: dict[str, Any] = {name: size_of(raw, key) for name, key in zip(names, keys, strict=True)}
    dtype = str(raw.get("mamba_ssm_cache_dtype", "float32"))
    return LinearAttention(layers, state_dtype=dtype, is_mamba=True, **sizes)


def read_linear(raw: Mapping[str, object], family: Family, layers: int) -> LinearAttention:
    """Read the sizes of the layers with linear attention."""
    every = family.full_attention_interval
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        count = kinds.count("linear_attention")
    else:
        if "full_attention_interval" in raw:
            every = size_of(raw, "full_attention_interval")
        count = layers - layers // every
    keys = LinearAttention._fields[1:6]
    dtype = str(raw.get("mamba_ssm_dtype") or "")
    sizes: dict[str, Any] = {key: size_of(raw, f"linear_{key}") for key in keys}
    return LinearAttention(count, state_dtype=dtype, **sizes)


def read_latent(raw: Mapping[str, object], family: Family) -> LatentAttention | None:
    """Read the sizes of multi-head latent attention; None where there is none.

    ValueError, `key: what is wrong`, where one is missing or no positive whole number.
    """
    if raw.get("kv_lora_rank") is None and not family.latent_attention:
        return None
    missing = {"q_lora_rank", "index_n_heads", "index_head_dim"} - {k for k in raw if raw[k]}
    keys = [key for key in LatentAttention._fields if key not in missing]
    return LatentAttention(**{key: size_of(raw, key) for key in keys})


class Window(NamedTuple):
    """A sliding window."""

    tokens: int = 0
    layers: int = 0  # that have it
    full_first: bool = False  # the first layer has none


def read_window(raw: Mapping[str, object], family: Family, sizes: Mapping[str, int]) -> Window:
    """Get the sliding window, of no tokens where there is none.

    `layer_types` names each layer's kind (gpt-oss and new files of other families); without it all
    layers have the window (Mistral-7B-v0.1), in Qwen's families those from `max_window_layers` on,
    in Gemma's all but each `sliding_window_pattern`-th.
    Llama 4's chunks are taken for windows: at most so far back each of its queries sees.
    A window as long as the model's longest request is none. ValueError where a key is wrong.
    """
    if "attention_chunk_size" in raw:
        raw = {"sliding_window": raw["attention_chunk_size"]}
    if raw.get("sliding_window") is None or not raw.get("use_sliding_window", True):
        return Window()
    window, layers = size_of(raw, "sliding_window"), sizes["num_hidden_layers"]
    kinds, full_first = raw.get("layer_types"), False
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise ValueError(f"layer_types: must name {layers} layers, not {len(kinds)}")
        windowed = kinds.count("sliding_attention")
        full_first = kinds[0] != "sliding_attention"
    elif "use_sliding_window" in raw and raw.get("max_window_layers") is not None:
        windowed = max(layers - size_of(raw, "max_window_layers"), 0)
        full_first = windowed < layers
    elif (every := family.sliding_window_pattern) > 1:
        if raw.get("sliding_window_pattern") is not None:
            every = size_of(raw, "sliding_window_pattern")
        windowed = layers - layers // every
    else:
        windowed = layers
    if not windowed or window >= sizes["max_position_embeddings"]:
        return Window()
    return Window(window, windowed, full_first)


def read_rope(raw: Mapping[str, object]) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling; ValueError, `key: what is wrong`, where they are no numbers.

    Newer files hold both in `rope_parameters`.
    """
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(key) or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"{key}: must be a mapping, not {short_repr(scaling)}")
    theta = number({**raw, **scaling}, "rope_theta", 10000.0)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return theta, None
    keys = [name for name in RopeScaling._fields[1:] if name in scaling]
    return theta, RopeScaling(kind, **{key: number(scaling, key, 0.0) for key in keys})


def number(raw: Mapping[str, object], key: str, default: float) -> float:
    """Return a positive number, the default where the key is missing or null."""
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{key}: must be a positive number, not {short_repr(value)}")
    return value


def whole_or_zero(raw: Mapping[str, object], key: str) -> int:
    """Return a positive whole number, 0 where the key is missing or null."""
    return 0 if raw.get(key) is None else size_of(raw, key)


def size_of(raw: Mapping[str, object], key: str) -> int:
    """Return a positive whole number."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: must be a positive whole number, not {short_repr(value)}")
    return value
