"""A number that is none: one line names its key, what was seen, and its unit or meaning."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from headway.cli.json_schema import json_schema
from simulator.build.policy_table import POLICIES, signature
from simulator.cluster.routers import ROUTERS
from simulator.costs.overhead import Overhead
from simulator.costs.profile import FORMS, RESERVED_FIELDS
from simulator.policies.predictor import KINDS as PREDICTORS
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError
from simulator.util.from_mapping import NUMERIC, FieldInfo, keys_of
from simulator.workload.arrivals import Diurnal
from simulator.workload.distributions import KINDS
from simulator.workload.generate import Adapters, Generator
from simulator.workload.multimodal import Multimodal
from simulator.workload.sessions import PrefixGroups, Sessions

Path = tuple[str | int, ...]
"""The keys that lead to a value; a list's item has its index."""
SCHEMA = json_schema()
PLAIN_NUMBERS = (int, float, int | None, float | None)
INPUT_LEN = "tokens of a prompt; null: 1024"
DATACLASSES: list[tuple[Path, type, dict[Path, object]]] = [
    (("workload",), Generator, {("workload", "clients"): 1}),
    (("workload", "prefix_groups"), PrefixGroups, {}),
    (("workload", "sessions"), Sessions, {}),
    (("workload", "adapters"), Adapters, {}),
    (("workload", "diurnal"), Diurnal, {}),
    (("workload", "multimodal", "image"), Multimodal, {}),
    *(
        (("workload", "input_len"), kind, {("workload", "input_len", "kind"): name})
        for name, kind in KINDS.items()
    ),
    *((("predictor",), kind, {("predictor", "kind"): name}) for name, kind in PREDICTORS.items()),
    *((("cost",), FORMS[name], {("cost", "kind"): name}) for name in FORMS),
    (("cost", "overhead"), Overhead, {("cost", "kind"): "roofline"}),
]
"""Blocks that the schema leaves open: where each is, its class, and what must be beside it."""


def is_number(schema: Mapping[str, Any]) -> bool:
    """Say whether a value may be a number."""
    one = schema.get("type") in ("number", "integer")
    return one or any(map(is_number, schema.get("anyOf", ())))


def blocks_in(schema: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield the blocks that a value may be, or be a list or mapping of, and the way to each."""
    if "$ref" in schema:
        yield (), schema["$ref"].rpartition("/")[2]
    for one in schema.get("anyOf", ()):
        yield from blocks_in(one)
    for way, key in ((("x",), "additionalProperties"), ((0,), "items")):
        if isinstance(schema.get(key), dict):
            yield from (((*way, *more), name) for more, name in blocks_in(schema[key]))


def numbers(block: Mapping[str, Any], above: Path, seen: set[str]) -> Iterator[tuple[Path, str]]:
    """Yield the numeric keys of a block, and of those in it that were not seen, with meanings."""
    for key, schema in block["properties"].items():
        if is_number(schema):
            yield (*above, key), schema["description"]
        for way, name in blocks_in(schema):
            if name not in seen:
                seen.add(name)
                yield from numbers(SCHEMA["$defs"][name], (*above, key, *way), seen)


def nested(path: Path, value: object) -> Any:
    """Return a scenario with one value, at a path."""
    for key in reversed(path):
        value = [value] if key == 0 else {key: value}
    return value


def with_values(values: Mapping[Path, object]) -> dict[str, Any]:
    """Return a scenario with values at paths without lists."""
    scenario: dict[Any, Any] = {}
    for path, value in values.items():
        block = scenario
        for key in path[:-1]:
            block = block.setdefault(key, {})
        block[path[-1]] = value
    return scenario


def lines_on(path: Path, scenario: dict[str, Any]) -> list[str]:
    """Return what is wrong with the key at a path."""
    with pytest.raises(HeadwayError) as caught:
        load_scenario({"model": "llama-3-8b", **scenario})
    before = f"scenario: {'.'.join(map(str, path))}: "
    return [line for line in caught.value.messages if line.startswith(before)]


def test_every_numeric_key_of_the_schema_says_what_it_is() -> None:
    keys = [*numbers(SCHEMA, (), set())]
    assert len(keys) > 110
    for path, meaning in keys:
        (line,) = lines_on(path, nested(path, "abc"))
        assert line.endswith(f"not 'abc' ({meaning})")


@pytest.mark.parametrize(("above", "cls", "beside"), DATACLASSES)
def test_numbers_of_dataclasses_say_what_they_are(above, cls, beside) -> None:
    for name, field in keys_of(cls).items():
        path = (*above, name)
        if NUMERIC.search(str(field.annotation)) and name not in RESERVED_FIELDS:
            (line,) = lines_on(path, with_values({**beside, path: "abc"}))
            meanings = [field.description] if field.description else [INPUT_LEN, "seconds", "(s)"]
            assert "'abc'" in line
            assert any(meaning in line for meaning in meanings), line


def test_arguments_of_policies_and_routers_say_what_they_are() -> None:
    tables = ((("engine", "scheduling_policy"), POLICIES), (("cluster", "router"), ROUTERS))
    seen = 0
    for path, table in tables:
        for name, cls in table.items():
            for argument, parameter in signature(cls).parameters.items():
                field = FieldInfo.of(parameter.annotation, None)
                if field.annotation not in PLAIN_NUMBERS:
                    continue
                beside: dict[Path, object] = {("cluster", "replicas"): 2}
                one = {(*path, path[-1].removeprefix("scheduling_")): name}
                (line,) = lines_on(
                    (*path, argument), with_values({**beside, **one, (*path, argument): "abc"})
                )
                assert field.description, f"{name}: {argument}"
                assert line.endswith(f"not 'abc' ({field.description})")
                seen += 1
    assert seen > 40


@pytest.mark.parametrize(
    ("scenario", "what"),
    [
        ({"diurnal": {"rates": ["abc"]}}, "diurnal.rates.0: must be a number, not 'abc'"),
        ({"models": {"a": "abc"}}, "models.a: must be a number, not 'abc'"),
        ({"clients": {"a": "abc"}}, "clients.a: must be a number, not 'abc'"),
        (
            {"input_len": {"kind": "mixture", "parts": [{"weight": "abc", "value": 1}]}},
            "input_len.parts.0.weight: 'abc' is not a number above 0 (share, relative to other "
            "parts)",
        ),
        (
            {"input_len": {"kind": "fixd"}},
            "input_len.kind: 'fixd' is unknown; there are fixed, uniform, exponential, lognormal, "
            "zipf, quantiles, empirical, cycle, mixture; did you mean fixed?",
        ),
    ],
)
def test_numbers_within_others(scenario, what) -> None:
    with pytest.raises(HeadwayError) as caught:
        load_scenario({"model": "llama-3-8b", "workload": scenario})
    (line,) = caught.value.messages
    assert line.startswith(f"scenario: workload.{what}")
    assert "'abc'" in line or line.endswith("?")
