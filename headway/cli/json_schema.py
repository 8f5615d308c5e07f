"""The scenario's keys for editors: their JSON Schema."""

import dataclasses
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from simulator.core.engine_config import DTYPES
from simulator.scenario.scenario import CLASS, Scenario
from simulator.util.config import Config, Named
from simulator.util.from_mapping import FieldInfo, as_plain, keys_of
from simulator.workload.generate import Generator
from simulator.workload.workload import FRONTENDS

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""Of JSON Schema."""


BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "pattern": "pattern",
}
TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    tuple: "array",
    dict: "object",
    NoneType: "null",
}
"""What JSON Schema calls our bounds and types."""


def json_schema() -> Schema:
    """Make the schema (JSON Schema 2020-12) of a scenario file.

    It knows every key and the plain types and bounds; what keys must be to one another, only
    loading a scenario tells. Any block may be null, which stands for its defaults.
    """
    blocks: dict[str, Schema] = {}
    _schema(Scenario, {}, blocks)
    workload = blocks["WorkloadConfig"]
    for name, field in keys_of(Generator).items():
        workload["properties"].setdefault(name, {"description": field.description})
    blocks["GoodputConfig"]["patternProperties"] = {f"^{CLASS}$": {"type": "object"}}
    workload["properties"]["frontend"]["anyOf"].append({"enum": [*FRONTENDS]})
    for key, what in (("engine", "a named engine, such as vllm"), ("gpu", "a GPU, such as L4")):
        for block in ("Scenario", "GroupConfig"):
            named = {"type": "string", "description": what}
            blocks[block]["properties"][key]["anyOf"].insert(1, named)
    scenario = blocks.pop("Scenario")
    return {"$schema": DIALECT, "title": "Headway scenario", **scenario, "$defs": blocks}


def _schema(kind: Any, limits: Mapping[str, Any], blocks: dict[str, Schema]) -> Schema:
    """Describe the values of a type, and put the blocks in it among the others."""
    kind = str | dict[str, Any] if kind is Named else kind
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        for note in kind.__metadata__:
            limits = {**note.limits, **limits} if isinstance(note, FieldInfo) else limits
        return _schema(inner[0], limits, blocks)
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(one, limits, blocks) for one in inner]}
    if origin is Literal:
        return {"enum": [*inner, *(DTYPES if "bfloat16" in inner else ())]}
    if isinstance(kind, type) and issubclass(kind, Config):
        if kind.__name__ not in blocks:
            blocks[kind.__name__] = _block_schema(kind, blocks)
        return {"anyOf": [{"$ref": f"#/$defs/{kind.__name__}"}, {"type": "null"}]}
    if (origin or kind) not in TYPES:
        return {}
    schema: Schema = {"type": TYPES[origin or kind]}
    if origin is list:
        schema["items"] = _schema(inner[0], {}, blocks)
    if origin is dict:
        schema["additionalProperties"] = _schema(inner[1], {}, blocks) or True
    if "max_length" in limits or "min_length" in limits:
        of = {"array": "Items", "string": "Length", "object": "Properties"}[schema["type"]]
        ends = (("min", "min_length"), ("max", "max_length"))
        schema |= {end + of: limits[name] for end, name in ends if name in limits}
    return schema | {BOUNDS[name]: value for name, value in limits.items() if name in BOUNDS}


def _block_schema(block: type[Config], blocks: dict[str, Schema]) -> Schema:
    keys, required = {}, []
    for name, field in block.model_fields.items():
        own: Schema = {"description": field.description} if field.description else {}
        if field.default is dataclasses.MISSING:
            required.append(name)
        else:
            own["default"] = as_plain(field.default)
        keys[name] = _schema(field.kind, field.limits, blocks) | own
    about: Schema = {"description": block.__doc__, "type": "object", "required": required}
    return about | {"properties": keys, "additionalProperties": False}
