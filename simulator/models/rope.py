"""How a model turns its queries and keys: rope_theta and rope_scaling of a config.json.

A step takes the same time whatever these are; an engine that runs real weights needs them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

PARTS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class RopeScaling:
    """The rotation stretched to more positions than the model was first trained on."""

    rope_type: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: float = 8192


def read_rope(raw: Mapping[str, object]) -> tuple[float, RopeScaling | None]:
    """Give theta and scaling; ValueError, `key: what is wrong`, where they are no numbers.

    Newer files hold both in `rope_parameters`.
    """
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(key) or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"{key}: must be a mapping, not {scaling!r}")
    theta = read_number({**raw, **scaling}, "rope_theta", 10000.0)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return theta, None
    values = {part: read_number(scaling, part, 0.0) for part in PARTS if part in scaling}
    return theta, RopeScaling(kind, **values)


def read_number(raw: Mapping[str, object], key: str, default: float) -> float:
    """Give a positive number, the default where the key is missing or null."""
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{key}: must be a positive number, not {value!r}")
    return value
