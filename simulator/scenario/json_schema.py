"""The scenario's keys for editors: their JSON Schema."""

import dataclasses
from typing import Any

from simulator.core.engine_config import DTYPES
from simulator.scenario.scenario import Scenario
from simulator.workload.generate import Generator
from simulator.workload.workload import FRONTENDS

GENERATOR_KEYS = {
    "request_rate": "requests (with sessions: sessions) per second; inf: all at once",
    "burstiness": "shape of the Gamma distribution of the gaps: 1 Poisson, less is burstier",
    "rescale": "stretch the gaps so that the last arrival is at num_prompts / request_rate",
    "ramp_up_strategy": "linear or exponential; in place of request_rate",
    "ramp_up_start_rps": "rate at the beginning, requests per second",
    "ramp_up_end_rps": "rate at the end, requests per second",
    "diurnal": "{period: s, amplitude: share}: the load swings about request_rate, from its "
    "lowest on; left out, 86400 and 0.5; {rates: [...]}: each for an equal part of the period, "
    "relative to their mean, which is request_rate",
    "num_prompts": "requests; with sessions, their turns",
    "max_concurrency": "most requests sent and unfinished; null: no limit; also beside trace",
    "input_len": "tokens of a prompt: a number or a distribution; null: 1024",
    "output_len": "tokens of an answer: a number or a distribution; null: 128",
    "range_ratio": "r makes a length n uniform from n (1 - r) to n (1 + r); a number, or "
    "{input: r, output: r}",
    "n": "samples of each prompt, sent together and ended each by itself",
    "lengths": "{path, format}: draw prompt and answer lengths together from a trace",
    "prefix_len": "tokens that all prompts begin with, before input_len",
    "prefix_groups": "prompts that begin with one of a few prefixes, see below",
    "sessions": "conversations of several turns, see below",
    "clients": "how many clients, or a list with the weight of each; null: no names; also "
    "beside trace",
    "priorities": "a whole number for each client, the smaller the more urgent; also beside trace",
    "max_tokens": "output tokens that each request's client allows, a number or a distribution: "
    "longer answers end there, with finish_reason length; null: no limit; also "
    "beside trace",
    "models": "{name: weight} of the models that requests ask for, where a cluster's groups serve "
    "several; null: the trace's, or one; also beside trace",
    "adapters": "which adapters (LoRA) requests ask for, see below; null: none; also beside trace",
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""Of JSON Schema."""


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
    group = schema["$defs"]["GroupConfig"]
    for key, what in (("engine", "a named engine, such as vllm"), ("gpu", "a GPU, such as L4")):
        for block in (schema, group):
            named = {"type": "string", "description": what}
            block["properties"][key]["anyOf"].insert(1, named)
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
