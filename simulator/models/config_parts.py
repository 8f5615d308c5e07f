"""Parts of a config.json: what each layer is, windows, latents, states, rotary embeddings.

ValueError, `key: what is wrong`, where a part is not what it must be.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from simulator.models.attention import LatentAttention, LinearAttention
from simulator.models.config_keys import size_of
from simulator.models.dtypes import BYTES
from simulator.models.spec import RopeScaling

KINDS = {word: word for word in ("mamba", "moe", "mlp", "linear_attention")} | {
    **dict.fromkeys(("full_attention", "attention", "*"), "full_attention"),
    **dict.fromkeys(("sliding_attention", "chunked_attention"), "sliding_attention"),
    "M": "mamba",
    "E": "moe",
    "-": "mlp",
}
"""What `layer_types`, and Nemotron-H's `hybrid_override_pattern`, call each layer."""
LISTED = ("hybrid_override_pattern", "layers_block_type", "layer_types")
HYBRIDS = {"nemotron_h": LISTED[0], "granitemoehybrid": LISTED[2]}
MAMBA = (
    ("n_groups", "mamba_n_groups"),
    ("mamba_num_heads", "mamba_n_heads"),
    ("ssm_state_size", "mamba_d_state"),
    ("mamba_head_dim", "mamba_d_head"),
    ("conv_kernel", "mamba_d_conv"),
)
"""Keys of Mamba-2's sizes in Nemotron-H's files and in Granite's."""


def read_kinds(raw: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Read what each layer is; () where the file does not list them."""
    key = next((key for key in LISTED if raw.get(key)), None)
    if key is None:
        if raw["model_type"] in HYBRIDS:
            raise ValueError(f"{HYBRIDS[raw['model_type']]}: is missing")
        return ()
    if not isinstance(raw[key], list | str):
        raise ValueError(f"{key}: must be a list of names")
    if unknown := {str(word) for word in raw[key]} - {*KINDS}:
        raise ValueError(f"{key}: {', '.join(sorted(unknown))}: not a kind of layer")
    if len(raw[key]) != layers:
        raise ValueError(f"{key}: must name {layers} layers, not {len(raw[key])}")
    return tuple(KINDS[word] for word in raw[key])


def read_linear(
    raw: Mapping[str, Any], layers: int, kinds: tuple[str, ...]
) -> LinearAttention | None:
    """Read the sizes of the layers that keep states; None where there are none."""
    names = LinearAttention._fields[1:6]
    if "mamba" in kinds:
        keys = [next((key for key in one if key in raw), one[0]) for one in MAMBA]
        count, key = kinds.count("mamba"), "mamba_ssm_cache_dtype"
    elif "full_attention_interval" in raw:
        keys = [f"linear_{name}" for name in names]
        count = layers - layers // size_of(raw, "full_attention_interval")
        count = kinds.count("linear_attention") if kinds else count
        key = "mamba_ssm_dtype"
    else:
        return None
    dtype = str(raw.get(key, ""))
    if dtype and dtype not in BYTES:
        raise ValueError(f"{key}: {dtype!r} is none of {', '.join(BYTES)}")
    sizes: dict[str, Any] = {name: size_of(raw, key) for name, key in zip(names, keys, strict=True)}
    return LinearAttention(count, state_dtype=dtype, is_mamba="mamba" in kinds, **sizes)


def read_latent(raw: Mapping[str, Any]) -> LatentAttention | None:
    """Read the sizes of multi-head latent attention; None where there is none."""
    if not raw.get("kv_lora_rank") and "latent_attention" not in raw:
        return None
    missing = {"q_lora_rank", "index_n_heads", "index_head_dim"} - {k for k in raw if raw[k]}
    keys = [key for key in LatentAttention._fields if key not in missing]
    return LatentAttention(**{key: size_of(raw, key) for key in keys})


class Window(NamedTuple):
    """A sliding window, under the names of ModelSpec."""

    sliding_window: int = 0  # tokens
    windowed_layers: int = 0
    full_first: bool = False  # the first layer has none
    chunked: bool = False


def read_window(raw: Mapping[str, Any], layers: int, kinds: tuple[str, ...]) -> Window:
    """Get the sliding window, of no tokens where there is none.

    `layer_types` names each layer's kind (gpt-oss and new files of other families); without it all
    layers have the window (Mistral-7B-v0.1), in Qwen's families those from `max_window_layers` on,
    in Gemma's all but each `sliding_window_pattern`-th.
    Llama 4's chunks are taken for windows: at most so far back each of its queries sees.
    A window as long as the model's longest request is none.
    """
    chunked = "attention_chunk_size" in raw
    key = "attention_chunk_size" if chunked else "sliding_window"
    if key not in raw or not (chunked or raw.get("use_sliding_window", True)):
        return Window()
    window, every = size_of(raw, key), raw.get("sliding_window_pattern")
    full_first = False
    if kinds and not chunked:
        windowed = kinds.count("sliding_attention")
        full_first = kinds[0] != "sliding_attention"
    elif "use_sliding_window" in raw and "max_window_layers" in raw:
        windowed = max(layers - raw["max_window_layers"], 0)
        full_first = windowed < layers
    else:
        windowed = layers - (layers // every if type(every) is int and every > 1 else 0)
    if not windowed or window >= raw["max_position_embeddings"]:
        return Window()
    return Window(window, windowed, full_first, chunked)


def read_rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling; newer files hold both in `rope_parameters`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return theta, None
    given = {name: scaling[name] for name in RopeScaling._fields[1:] if scaling.get(name)}
    return theta, RopeScaling(kind, **given)
