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
    newer = raw.get("rope_parameters") or {}
    key = "rope_parameters" if newer else "rope_scaling"
    scaling = newer or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"{key}: must be a mapping, not {scaling!r}")
    theta = scaling.get("rope_theta", raw.get("rope_theta"))
    theta = 10000.0 if theta is None else theta
    if not _positive(theta):
        raise ValueError(f"rope_theta: must be a positive number, not {theta!r}")
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return theta, None
    values = {part: scaling[part] for part in PARTS if part in scaling}
    for part, value in values.items():
        if not _positive(value):
            raise ValueError(f"{key}: {part} must be a positive number, not {value!r}")
    return theta, RopeScaling(kind, **values)


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
