"""From a scenario file and its overrides to a scenario, or to a list of all that is wrong.

Three rounds, so that one call tells as much as possible: what YAML says, what each key says by
itself, and what keys say together. The last round leaves out keys that the second found wrong.
"""

import dataclasses
import re
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from simulator.cluster.config import (
    AdmissionConfig,
    AutoscalingConfig,
    ClientConfig,
    FailuresConfig,
    KvTransferConfig,
    OutageConfig,
)
from simulator.scenario.checks import contradictions
from simulator.scenario.cluster_config import ClusterConfig, GroupConfig
from simulator.scenario.engine_config import EngineConfig, GpuConfig
from simulator.scenario.plan_config import PlanConfig
from simulator.scenario.scenario import GoodputConfig, Scenario, TraceConfig
from simulator.scenario.shipped import find_scenario
from simulator.scenario.sweep_config import RandomConfig, SpreadConfig, SweepConfig
from simulator.util.errors import HeadwayError, meant
from simulator.util.yaml_lines import Fault, Key, Places, faults, parse, read_text

SHORT = 60  # characters of a wrong value that a message quotes
ROUNDS = 5  # of looking for errors that others hide
PARTIAL = "no longer in vLLM; long_prefill_token_threshold limits the tokens of a long prompt"
ONE_ENGINE = "not simulated: one engine, with tensor parallelism at most"
ABSENT = {
    "max_num_partial_prefills": PARTIAL,
    "max_long_partial_prefills": PARTIAL,
    "num_scheduler_steps": "no longer in vLLM: each step is scheduled by itself",
    "scheduler_delay_factor": "no longer in vLLM: a request is admitted as soon as it fits",
    "use_v2_block_manager": "no longer in vLLM: there is one block manager",
    "enforce_eager": "not simulated: the cost profile says what a step takes, CUDA graphs included",
    "num_lookahead_slots": "no longer in vLLM: speculative_config.method decides",
    "enable_lora": "not simulated: there are no LoRA adapters",
    "cpu_offload_gb": "not simulated: weights stay on the GPU",
    "kv_transfer_config": "give cluster.kv_transfer, and each group a kv_role",
    "pipeline_parallel_size": ONE_ENGINE,
    "enable_expert_parallel": "leave it out: experts chosen evenly cost the same shared out whole "
    "or in slices, see fleet.md",
    "kv_cache_memory_bytes": "not simulated: give num_gpu_blocks_override",
    "disable_sliding_window": "not simulated: give max_model_len",
}
"""Keys that vLLM has or had under `engine`, and why they are not here."""

WORDS = {
    "missing": "is missing",
    "int_type": "must be a whole number, not {input}",
    "int_from_float": "must be a whole number, not {input}",
    "float_type": "must be a number, not {input}",
    "bool_type": "must be true or false, not {input}",
    "string_type": "must be text, not {input}",
    "dict_type": "must be a mapping of keys, not {input}",
    "model_type": "must be a mapping of keys, not {input}",
    "list_type": "must be a list, not {input}",
    "too_short": "must not be empty",
    "finite_number": "must be finite, not {input}",
    "greater_than": "must be more than {gt}, not {input}",
    "greater_than_equal": "must be at least {ge}, not {input}",
    "less_than": "must be less than {lt}, not {input}",
    "less_than_equal": "must be at most {le}, not {input}",
    "literal_error": "must be {expected}, not {input}",
    "string_pattern_mismatch": "must begin with a letter or digit and have only these, blanks and "
    "_ . , + = -, not {input}",
    "string_too_long": "must have at most {max_length} characters",
}


def load_scenario(
    path: str | Path,
    overrides: Iterable[str] = (),
    seed: int | None = None,
    *,
    vary: Iterable[tuple[str, str]] = (),
) -> Scenario:
    """Read a scenario file, put the overrides `dotted.key=value` over it, and check it all.

    `path` may be the name of a shipped scenario, without an ending: `demo`. `seed` overrides the
    scenario's, `vary` the rest with pairs of dotted key and value. Raises HeadwayError with
    everything that is wrong.
    """
    path = find_scenario(Path(path))
    raw, places, messages = _read(path, overrides, seed, vary)
    try:
        scenario = check_scenario(raw, places, path.parent)
    except HeadwayError as error:
        messages += error.messages
    if messages:
        raise HeadwayError(messages)
    return scenario


def load_sweep(
    path: str | Path, overrides: Iterable[str] = (), seed: int | None = None
) -> tuple[SweepConfig | None, int]:
    """Read the block `sweep` of a scenario file, and the seed, whatever is wrong with the rest.

    What is varied may put that right. Raises HeadwayError for what is wrong with these two.
    """
    path = find_scenario(Path(path))
    raw, places, messages = _read(path, overrides, seed, ())
    if messages:
        raise HeadwayError(messages)
    alone: dict[str, Any] = {key: raw[key] for key in ("sweep", "seed") if key in raw}
    scenario = check_scenario(alone, places, path.parent)
    return scenario.sweep, scenario.seed


def _read(
    path: Path, overrides: Iterable[str], seed: int | None, vary: Iterable[tuple[str, str]]
) -> tuple[dict[str, Any], Places, list[str]]:
    """Read a file and put the overrides over it; give what is wrong with them, too."""
    raw, lines = parse(read_text(path), str(path))
    places = Places(str(path), lines)
    if raw is None:
        raise HeadwayError(f"{path}: is empty; `model: llama-3-8b` alone would do")
    if not isinstance(raw, dict):
        raise HeadwayError(f"{path}:1: must be a mapping of keys, not {_said(raw)}")
    _open_engine(raw)
    messages = []
    groups = _groups(raw)
    for override in overrides:
        name, equals, value = override.partition("=")
        place = f"--set {override}"
        messages += _misspelt(groups, place, name)
        messages += _override(raw, places, place, name, value if equals else None)
    for key, value in vary:
        place = f"--vary {key}={value}"
        messages += _misspelt(groups, place, key)
        messages += _override(raw, places, place, key, value)
    if seed is not None:
        messages += _override(raw, places, f"--seed {seed}", "seed", str(seed))
    raw.setdefault("name", _name(path))
    return raw, places, messages


def _name(path: Path) -> str:
    """Name a scenario after its file, less what a name cannot hold."""
    stem = path.name.removeprefix(".").partition(".")[0]
    return re.sub(r"[^\w ,+=-]+", "-", stem).lstrip(" ,+=-") or "scenario"


def check_scenario(raw: dict[str, Any], places: Places, folder: Path = Path()) -> Scenario:
    """Make a scenario of plain values, or raise HeadwayError with everything that is wrong."""
    scenario, wrong = _validate(raw)
    others: list[str] = []  # about other files
    if scenario is not None:
        scenario = scenario.came_from(folder, places)
        contradicting, others = contradictions(scenario, {key for key, _ in wrong})
        wrong += contradicting
    if scenario is None or wrong or others:
        wrong.sort(key=lambda fault: places.line(fault[0]))
        raise HeadwayError(dict.fromkeys([*map(places.tell, wrong), *others]))
    return scenario


def _groups(raw: dict[str, Any]) -> list[str]:
    """List the groups of a cluster that a file names."""
    cluster = raw.get("cluster")
    groups = cluster.get("groups") if isinstance(cluster, dict) else None
    return [*groups] if isinstance(groups, dict) else []


def _misspelt(groups: list[str], place: str, name: str) -> list[str]:
    """Refuse to set a key of a group that the file does not name: it would be one more group."""
    key = name.strip().split(".")
    if not groups or key[:2] != ["cluster", "groups"] or len(key) < 4 or key[2] in groups:
        return []
    there = f"there is no group {key[2]!r}; there is {', '.join(groups)}"
    return [f"{place}: {'.'.join(key[:3])}: {there}"]


def _override(
    raw: dict[str, Any], places: Places, place: str, name: str, text: str | None
) -> list[str]:
    """Set one dotted key; return what is wrong with the override."""
    key = tuple(name.strip().split("."))
    if text is None or not all(key):
        return [f"{place}: must be dotted.key=value"]
    try:
        value, _ = parse(text, place)
    except HeadwayError as error:
        return [message.replace(f"{place}:1:", f"{place}:") for message in error.messages]
    block: Any = raw
    for depth, part in enumerate(key[:-1], 1):
        if block.get(part) is None:
            block[part] = {}
            if key[:depth] not in _known():  # else others may fill the block, too
                places.override(key[:depth], place)
        block = block[part]
        if not isinstance(block, dict):
            return [f"{place}: {'.'.join(key[:depth])} is {_said(block)} and has no keys"]
    block[key[-1]] = value
    _open_engine(raw)
    places.override(key, place)
    return []


def _open_engine(raw: dict[str, Any]) -> None:
    """Write `engine: NAME` as the block that it is short for, so that overrides find one."""
    if isinstance(raw.get("engine"), str):
        raw["engine"] = {"name": raw["engine"]}


def _validate(raw: dict[str, Any]) -> tuple[Scenario | None, list[Fault]]:
    """Check each key by itself; where some are wrong, let defaults take their place.

    What depends on a wrong key can only be seen once that is out of the way: hence the rounds.
    """
    wrong: list[Fault] = []
    rest = deepcopy(raw)
    for _ in range(ROUNDS):
        try:
            return Scenario.model_validate(rest), wrong
        except ValidationError as error:
            found = [fault for one in error.errors(include_url=False) for fault in _told(one)]
        # What is wrong now with a block around may be that a wrong key of it was taken out.
        around = {key[:depth] for key, _ in wrong for depth in range(len(key) + 1)}
        wrong += [fault for fault in found if fault[0] not in around]
        for key, _ in found:
            _remove(rest, key)
    return None, wrong


def _remove(raw: dict[str, Any], key: Key) -> None:
    """Take out the value at a key, or the one that the key should have been in."""
    block = raw
    for depth, part in enumerate(key):
        inner = block.get(part)
        if depth + 1 < len(key) and isinstance(inner, dict) and key[depth + 1] in inner:
            block = inner
        else:
            block.pop(part, None)
            return


def _told(details: Any) -> list[Fault]:
    """Put one of pydantic's errors into our words."""
    key = tuple(str(part) for part in details["loc"])
    kind, context = details["type"], details.get("ctx", {})
    if kind == "value_error":
        return [
            (at, _unknown(at)) if what == "unknown key" and at[:-1] in _known() else (at, what)
            for at, what in faults(key, context["error"])
        ]
    if kind == "extra_forbidden":
        return [(key, _unknown(key))]
    if kind in WORDS:
        limits = {k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()}
        near = meant(str(details["input"]), re.findall(r"'([^']*)'", str(limits.get("expected"))))
        return [(key, WORDS[kind].format(input=_said(details["input"]), **limits) + near)]
    return [(key, details["msg"])]


def _said(value: object) -> str:
    """Write a value as YAML has it, and not too much of it."""
    if value is None or isinstance(value, bool):
        return str({None: "null", True: "true", False: "false"}[value])
    text = repr(value)
    return text if len(text) <= SHORT else text[:SHORT] + "..."


def _unknown(key: Key) -> str:
    """Say why a key is unknown, or which one may be meant."""
    from difflib import get_close_matches

    name, path = key[-1], key[:-1]
    if name in ABSENT:
        return ABSENT[name]
    homes = [home for home, names in _known().items() if name in names]
    if homes:
        return f"unknown key here; did you mean {'.'.join((*homes[0], name))}?"
    known = _known().get(path) or _under_own_name(path)
    near = get_close_matches(name, known, 1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}"
    return f"unknown key; {hint}"


def _under_own_name(path: Key) -> list[str]:
    """List the keys of a block below a name of the user's own."""
    if path[:2] == ("cluster", "failures"):
        return [*OutageConfig.model_fields]
    if path[:2] != ("cluster", "groups"):
        return [*SpreadConfig.model_fields]
    return _known().get(path[3:], []) if path[3:] else [*GroupConfig.model_fields]


def _known() -> dict[Key, list[str]]:
    """List the keys that each block of a scenario knows."""
    from simulator.workload.generate import Generator

    return {
        (): [*Scenario.model_fields],
        ("gpu",): [*GpuConfig.model_fields],
        ("engine",): [*EngineConfig.model_fields],
        ("goodput",): [*GoodputConfig.model_fields],
        ("workload",): ["trace", *(field.name for field in dataclasses.fields(Generator))],
        ("workload", "trace"): [*TraceConfig.model_fields],
        ("plan",): [*PlanConfig.model_fields],
        ("cluster",): [*ClusterConfig.model_fields],
        ("cluster", "kv_transfer"): [*KvTransferConfig.model_fields],
        ("cluster", "admission"): [*AdmissionConfig.model_fields],
        ("cluster", "client"): [*ClientConfig.model_fields],
        ("cluster", "failures"): [*FailuresConfig.model_fields],
        ("cluster", "autoscaling"): [*AutoscalingConfig.model_fields],
        ("sweep",): [*SweepConfig.model_fields],
        ("sweep", "random"): [*RandomConfig.model_fields],
    }
