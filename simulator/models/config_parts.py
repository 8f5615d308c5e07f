"""Parts of a config.json: what each layer is, windows, latents, states, rotary embeddings.

MappingError, by its key, where a part is not what it must be.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.models.config_keys import size_of
from simulator.models.dtypes import BYTES
from simulator.models.modules import FULL, WINDOW, LatentAttention, LinearAttention
from simulator.models.spec import RopeScaling
from simulator.util.errors import MappingError

TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
KINDS = {word: kind for kind, words in TABLE["layers"].items() for word in words.split()}
"""What `layer_types`, and Nemotron-H's `hybrid_override_pattern`, call each layer."""
LISTED = ("hybrid_override_pattern", "layers_block_type", "layer_types")


def read_kinds(raw: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Read what each layer is: from the list of them, else by the keys that stand for one."""
    key = next((key for key in LISTED if raw.get(key)), None)
    if key is None:
        if "lists" in raw:
            raise MappingError(raw["lists"], "is missing")
        return _unlisted(raw, layers)
    if not isinstance(raw[key], list | str):
        raise MappingError(key, "must be a list of names")
    if unknown := {str(word) for word in raw[key]} - {*KINDS}:
        raise MappingError(key, f"{', '.join(sorted(unknown))}: not a kind of layer")
    if len(raw[key]) != layers:
        raise MappingError(key, f"must name {layers} layers, not {len(raw[key])}")
    return tuple(KINDS[word] for word in raw[key])


def _unlisted(raw: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Tell what each layer is: every n-th has full attention, where all have a window none.

    In Qwen's families layers from `max_window_layers` on have one.
    """
    special, every = WINDOW, raw.get("sliding_window_pattern")
    if "full_attention_interval" in raw:
        special, every = "linear_attention", size_of(raw, "full_attention_interval")
    elif not has_window(raw):
        return (FULL,) * layers
    elif "use_sliding_window" in raw and "max_window_layers" in raw:
        first: int = min(raw["max_window_layers"], layers)
        return (FULL,) * first + (WINDOW,) * (layers - first)
    elif not isinstance(every, int) or every < 2:
        return (WINDOW,) * layers
    return tuple(special if (at + 1) % every else FULL for at in range(layers))


def read_linear(raw: Mapping[str, Any], kinds: tuple[str, ...]) -> LinearAttention | None:
    """Read the sizes of the layers that keep states; None where there are none."""
    names, is_mamba = LinearAttention._fields[:5], "mamba" in kinds
    if is_mamba:
        keys = [next((key for key in one if key in raw), one[0]) for one in TABLE["mamba"]]
        key = "mamba_ssm_cache_dtype"
    elif "linear_attention" in kinds:
        keys, key = [f"linear_{name}" for name in names], "mamba_ssm_dtype"
    else:
        return None
    dtype = str(raw.get(key, ""))
    if dtype and dtype not in BYTES:
        raise MappingError(key, f"{dtype!r} is none of {', '.join(BYTES)}")
    sizes: dict[str, Any] = {name: size_of(raw, key) for name, key in zip(names, keys, strict=True)}
    return LinearAttention(**sizes, state_dtype=dtype, is_mamba=is_mamba)


def read_latent(raw: Mapping[str, Any]) -> LatentAttention | None:
    """Read the sizes of multi-head latent attention; None where there is none."""
    if not raw.get("kv_lora_rank") and "latent_attention" not in raw:
        return None
    missing = {"q_lora_rank", "index_n_heads", "index_head_dim"} - {k for k in raw if raw[k]}
    keys = [key for key in LatentAttention._fields if key not in missing]
    return LatentAttention(**{key: size_of(raw, key) for key in keys})


def has_window(raw: Mapping[str, Any]) -> bool:
    """Whether layers may see a window, or a chunk (Llama 4), of the text alone."""
    return "attention_chunk_size" in raw or (
        "sliding_window" in raw and raw.get("use_sliding_window", True)
    )


def read_window(raw: Mapping[str, Any], kinds: tuple[str, ...]) -> int:
    """Get the tokens of the sliding window, 0 where no layer has one.

    Llama 4's chunks are taken for windows: at most so far back each of its queries sees.
    A window as long as the model's longest request is none.
    """
    if WINDOW not in kinds or not has_window(raw):
        return 0
    key = "attention_chunk_size" if "attention_chunk_size" in raw else "sliding_window"
    window = size_of(raw, key)
    return window if window < raw["max_position_embeddings"] else 0


def rope_block(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the block of rotary embeddings; {}: there is none."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def read_rotary(raw: Mapping[str, Any], head_dim: int) -> int:
    """Return how many numbers of a head are turned; 0: all."""
    share = rope_block(raw).get("partial_rotary_factor") or raw.get("partial_rotary_factor")
    return int(head_dim * (share or 0))


def read_rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling; newer files hold both in `rope_parameters`."""
    scaling = rope_block(raw)
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return theta, None
    given = {name: scaling[name] for name in RopeScaling._fields[1:] if scaling.get(name)}
    original = "original_max_position_embeddings"  # Phi's files have it beside the block
    own = raw.get(original) or given.get(original)
    given[original] = own or raw["max_position_embeddings"]  # standardize_rope_params
    counted = "gemma3" in raw.get("model_type", "")
    return theta, RopeScaling(kind, **given, is_counted=counted)
