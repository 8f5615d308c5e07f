"""A small config.json, written by hand."""

import json
from pathlib import Path

from simulator.models.spec import SMALL, ModelSpec

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 10,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


def write_config(folder: Path, **changes: object) -> Path:
    """Write a small config.json, with some keys changed or, where None, taken out."""
    raw = {key: value for key, value in (TINY | changes).items() if value is not None}
    path = folder / "config.json"
    path.write_text(json.dumps(raw, indent=1))
    return path


def of_attention(model: ModelSpec) -> int:
    """Count the weights of the projections of the first layer that has a KV cache."""
    own = [
        one for one in model.modules if ".self_attn." in one.name and not one.name.endswith(SMALL)
    ]
    layer = own[0].name.partition(".self_attn.")[0]
    return sum(one.numbers for one in own if one.name.startswith(f"{layer}.self_attn."))
