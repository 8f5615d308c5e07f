"""The configuration that an engine derived, field by field, in the header of a recording.

Each field must have its row in `simulator/launch/fields.csv`: one that a newer engine adds may
change what it decides, and nobody has looked.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from simulator.launch.fields import fields

Row = dict[str, Any]
VLLM = ("scheduler", "cache", "parallel", "speculative", "lora", "kv_transfer", "compilation")
"""Blocks of vLLM's configuration, without `_config`."""


def derived_fields(blocks: dict[str, Any]) -> Row:
    """Write each block's fields with their values, by the name of its class."""
    return {
        type(block).__name__: {
            name: _plain(getattr(block, name, None))
            for name in _names(block)
            if not name.startswith("_")
        }
        for block in blocks.values()
        if block is not None
    }


def _names(block: Any) -> Iterator[str]:
    """Name the fields of a dataclass, as vLLM's, or of msgspec's, as SGLang's."""
    if hasattr(block, "__struct_fields__"):
        yield from block.__struct_fields__
    else:
        yield from (field.name for field in dataclasses.fields(block))


def vllm_fields(config: Any) -> Row:
    """Write the fields of a `VllmConfig`."""
    return derived_fields({name: getattr(config, f"{name}_config", None) for name in VLLM})


def unknown_fields(place: str, header: Row) -> Iterator[str]:
    """Say which fields the engine of a recording had that are not known."""
    engine = "sglang" if "sglang" in header else "vllm"
    known = {row.field for row in fields() if row.engine == engine}
    unknown = [
        f"{owner}.{name}"
        for owner, values in header.get("derived", {}).items()
        for name in values
        if name not in known
    ]
    if unknown:
        yield f"{place}: derived: Headway does not know {', '.join(unknown)}"


def _plain(value: Any) -> Any:
    """Keep what JSON has; write the class of anything else."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    kept = value is None or isinstance(value, bool | int | float | str)
    return value if kept else type(value).__name__
