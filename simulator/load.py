"""From a scenario file and its overrides to a scenario, or to a list of all that is wrong.

Three rounds, so that one call tells as much as possible: what YAML says, what each key says by
itself, and what keys say together. The last round leaves out keys that the second found wrong.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from simulator.errors import HeadwayError
from simulator.scenario import EngineBlock, Scenario, WorkloadBlock
from simulator.yamlpos import Fault, Key, Places, faults, parse, read_text

PARTIAL = "no longer in vLLM; long_prefill_token_threshold limits the tokens of a long prompt"
ONE_ENGINE = "not simulated: one engine, with tensor parallelism at most"
ABSENT = {
    "max_num_partial_prefills": PARTIAL,
    "max_long_partial_prefills": PARTIAL,
    "swap_space": "no longer in vLLM: a preempted request is computed again, nothing is swapped",
    "preemption_mode": "no longer in vLLM: a preempted request is always computed again",
    "num_scheduler_steps": "no longer in vLLM: each step is scheduled by itself",
    "scheduler_delay_factor": "no longer in vLLM: a request is admitted as soon as it fits",
    "use_v2_block_manager": "no longer in vLLM: there is one block manager",
    "async_scheduling": "not simulated: a step is scheduled when the one before it has ended",
    "enforce_eager": "not simulated: the cost profile says what a step takes, CUDA graphs included",
    "speculative_config": "not simulated: there is no speculative decoding",
    "num_lookahead_slots": "not simulated: there is no speculative decoding",
    "enable_lora": "not simulated: there are no LoRA adapters",
    "cpu_offload_gb": "not simulated: weights stay on the GPU",
    "kv_transfer_config": "not simulated: prompts and answers are computed by the same engine",
    "pipeline_parallel_size": ONE_ENGINE,
    "data_parallel_size": ONE_ENGINE,
    "enable_expert_parallel": ONE_ENGINE,
    "kv_cache_memory_bytes": "not simulated: give num_gpu_blocks_override",
    "scheduler_cls": "write scheduling_policy: {policy: package.module:Class}",
    "disable_sliding_window": "not simulated: attention reads the whole context",
}
"""Keys that vLLM has or had under `engine`, and why they are not here."""

WORDS = {
    "missing": "is missing",
    "int_type": "must be a whole number, not {input!r}",
    "int_from_float": "must be a whole number, not {input!r}",
    "float_type": "must be a number, not {input!r}",
    "bool_type": "must be true or false, not {input!r}",
    "string_type": "must be text, not {input!r}",
    "dict_type": "must be a mapping of keys, not {input!r}",
    "model_type": "must be a mapping of keys, not {input!r}",
    "finite_number": "must be finite, not {input!r}",
    "greater_than": "must be more than {gt}, not {input!r}",
    "greater_than_equal": "must be at least {ge}, not {input!r}",
    "less_than": "must be less than {lt}, not {input!r}",
    "less_than_equal": "must be at most {le}, not {input!r}",
    "literal_error": "must be {expected}, not {input!r}",
    "string_pattern_mismatch": "must begin with a letter or digit and have only these, blanks and "
    "_ . , + = -, not {input!r}",
    "string_too_long": "must have at most {max_length} characters",
}


def load_scenario(
    path: str | Path, overrides: Iterable[str] = (), seed: int | None = None
) -> Scenario:
    """Read a scenario file, put the overrides `dotted.key=value` over it, and check it all.

    `seed` overrides the scenario's. Raises HeadwayError with everything that is wrong.
    """
    path = Path(path)
    raw, lines = parse(read_text(path), str(path))
    places = Places(str(path), lines)
    if raw is None:
        raise HeadwayError(f"{path}: is empty; `model: llama-3-8b` alone would do")
    if not isinstance(raw, dict):
        raise HeadwayError(f"{path}:1: must be a mapping of keys, not {type(raw).__name__}")
    messages: list[str] = []
    for override in overrides:
        messages += _override(raw, places, override)
    if seed is not None:
        raw["seed"] = seed
        places.override(("seed",), f"--seed {seed}")
    raw.setdefault("name", path.name.split(".")[0])
    scenario, wrong = _validate(raw)
    if scenario is not None:
        scenario = scenario.came_from(path.parent, places)
        wrong += _contradictions(scenario, {key for key, _ in wrong})
    messages += [places.tell(fault) for fault in wrong]
    if messages or scenario is None:
        raise HeadwayError(dict.fromkeys(messages))
    return scenario


def _override(raw: dict[str, Any], places: Places, override: str) -> list[str]:
    """Set one dotted key; return what is wrong with the override."""
    place = f"--set {override}"
    name, equals, text = override.partition("=")
    key = tuple(name.strip().split("."))
    if not equals or not all(key):
        return [f"{place}: must be dotted.key=value"]
    try:
        value, _ = parse(text, place)
    except HeadwayError as error:
        return error.messages
    block: Any = raw
    for depth, part in enumerate(key[:-1]):
        if block.get(part) is None:
            block[part] = {}
        block = block[part]
        if not isinstance(block, dict):
            return [f"{place}: {'.'.join(key[: depth + 1])} is {block!r}, which has no keys"]
    block[key[-1]] = value
    places.override(key, place)
    return []


def _validate(raw: dict[str, Any]) -> tuple[Scenario | None, list[Fault]]:
    """Check each key by itself; where some are wrong, put defaults in their place."""
    try:
        return Scenario.model_validate(raw), []
    except ValidationError as error:
        wrong = [fault for details in error.errors(include_url=False) for fault in _told(details)]
    rest = deepcopy(raw)
    for key, _ in wrong:
        _remove(rest, key)
    try:
        return Scenario.model_validate(rest), wrong
    except ValidationError:
        return None, wrong


def _told(details: Any) -> list[Fault]:
    """Put one of pydantic's errors into our words."""
    key = tuple(str(part) for part in details["loc"])
    kind, context = details["type"], details.get("ctx", {})
    if kind == "value_error":
        return faults(key, context["error"])
    if kind == "extra_forbidden":
        return [(key, _unknown(key))]
    if kind in WORDS:
        return [(key, WORDS[kind].format(input=details["input"], **context))]
    return [(key, details["msg"])]


def _unknown(key: Key) -> str:
    """Say why a key is unknown, or which one may be meant."""
    from difflib import get_close_matches

    name = key[-1]
    block: type[BaseModel] = Scenario
    for part in key[:-1]:
        inner = block.model_fields[part].annotation
        block = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else TRACE
    if name in ABSENT:
        return ABSENT[name]
    homes = [
        ".".join([*path, name])
        for path, home in ((("engine",), EngineBlock), ((), Scenario), (("workload",), WorkloadBlock))
        if name in home.model_fields
    ]
    if homes:
        return f"unknown key; did you mean {homes[0]}?"
    near = get_close_matches(name, block.model_fields, 1)
    known = ", ".join(block.model_fields)
    return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; known are {known}"
