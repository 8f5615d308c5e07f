"""A small config.json, written by hand."""

import json
from pathlib import Path

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
