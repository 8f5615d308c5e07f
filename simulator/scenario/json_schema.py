"""The scenario's JSON Schema, with which editors complete keys and mark mistakes."""

import dataclasses
from typing import Any

from simulator.core.engine_config import DTYPES
from simulator.scenario.reference_page import GENERATOR_KEYS
from simulator.scenario.scenario import Scenario
from simulator.workload.generate import Generator
from simulator.workload.workload import FRONTENDS

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Make the schema (JSON Schema 2020-12) of a scenario file.

    It knows every key and the plain types and bounds; what keys must be to one another, only
    loading a scenario tells.
    """
    schema = Scenario.model_json_schema()
    _loosen(schema)
    workload = schema["$defs"]["WorkloadConfig"]
    for field in dataclasses.fields(Generator):
        workload["properties"].setdefault(field.name, {"description": GENERATOR_KEYS[field.name]})
    workload["properties"]["frontend"]["anyOf"].append({"enum": [*FRONTENDS]})
    workload["additionalProperties"] = False
    named = {"type": "string", "description": "a named engine, such as vllm"}
    schema["properties"]["engine"]["anyOf"].insert(1, named)
    return {"$schema": DIALECT, "title": "Headway scenario", **schema}


def _loosen(node: Any) -> None:
    """Let any block be null, which stands for its defaults, and a short dtype for a long one."""
    if isinstance(node, list):
        for item in node:
            _loosen(item)
    if not isinstance(node, dict):
        return
    if "bfloat16" in node.get("enum", ()):
        node["enum"] = [*node["enum"], *DTYPES]
    for value in node.values():
        _loosen(value)
    for name, value in node.get("properties", {}).items():
        if "$ref" in value:
            rest = {key: value[key] for key in value if key != "$ref"}
            kinds = [{"$ref": value["$ref"]}, {"type": "null"}]
            node["properties"][name] = rest | {"anyOf": kinds}
