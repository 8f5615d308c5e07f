"""The scenario's JSON Schema, with which editors complete keys and mark mistakes."""

import dataclasses
from typing import Any

from simulator.scenario.reference_page import WORKLOAD
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
    blocks = schema["$defs"]
    workload = blocks["WorkloadConfig"]
    workload["properties"] |= {
        field.name: {"description": WORKLOAD[field.name]}
        for field in dataclasses.fields(Generator)
        if field.name not in workload["properties"]
    }
    workload["properties"]["frontend"]["anyOf"].append({"enum": [*FRONTENDS]})
    workload["additionalProperties"] = False
    engine = schema["properties"]["engine"]
    named = {"type": "string", "description": "a named engine, such as vllm"}
    kinds = [{"$ref": "#/$defs/EngineConfig"}, named, {"type": "null"}]
    schema["properties"]["engine"] = {"anyOf": kinds}
    if "default" in engine:
        schema["properties"]["engine"]["default"] = engine["default"]
    _loosen(schema)
    return {"$schema": DIALECT, "title": "Headway scenario", **schema}


def _loosen(node: Any) -> None:
    """Let any block be null, which stands for its defaults, and a short dtype for a long one."""
    from simulator.scenario.engine_config import DTYPES

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
            node["properties"][name] = {
                **{k: v for k, v in value.items() if k != "$ref"},
                "anyOf": [{"$ref": value["$ref"]}, {"type": "null"}],
            }
