"""Texts that satisfy a schema, an expression or a grammar."""

import json
import re
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

import jsonschema
from aiohttp import ClientSession

from headway.twin.api.bodies import BadRequestError
from headway.twin.api.guided_text import guided_text
from headway.twin.server import Server
from tests.support.twins import served_by
from tests.twin.test_guided import CHAT, PERSON

NODE = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object"}}}
NODE["$defs"]["node"] |= {"properties": {"next": {"$ref": "#/$defs/node"}}}
SCHEMAS: list[Any] = [
    {},
    PERSON,
    NODE,
    {"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.2},
    {"type": "integer", "multipleOf": 7, "minimum": 50, "maximum": 60},
    {"type": "integer", "exclusiveMaximum": -3},
    {"type": ["null", "string"], "maxLength": 3, "minLength": 2},
    {"anyOf": [{"type": "string", "pattern": "a"}, {"type": "boolean"}]},
    {"type": "array", "maxItems": 0},
    {"type": "string", "format": "date-time"},
    {"type": "object", "additionalProperties": {"type": "integer"}, "required": ["a"]},
    *(
        {"type": "string", "pattern": one}
        for one in ("^[A-Z]{3}-[0-9]{4}$", "foo", "^.+@.+[.]com$")
    ),
    *({"type": "string", "format": one} for one in ("email", "uri", "uuid", "ipv4", "duration")),
    {"type": "string", "pattern": "^[a-z]+$", "minLength": 4, "maxLength": 6},
    {"allOf": [PERSON, {"properties": {"id": {"type": "string"}}, "required": ["id"]}]},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "integer"}], "minItems": 2},
    {"type": "object", "minProperties": 2},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "required": ["xa"]},
    *(
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}} | more
        for more in (
            {"additionalProperties": False},
            {"additionalProperties": False, "required": ["xa"]},
            {"additionalProperties": {"type": "string"}, "required": ["xa", "b"]},
            {"additionalProperties": False, "properties": {"a": {"type": "string"}}},
        )
    ),
    {"type": "object", "properties": {'"[{': {"const": '"]}'}, "a": {}}, "required": ['"[{', "a"]},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_a_schema_has_a_text_that_satisfies_it(schema: Any) -> None:
    found, ignored = guided_text("json_schema", json.dumps(schema))
    assert found is not None
    assert not ignored
    for words in ("", " some words"):
        text = found[0] + (words if found[1] else "") + found[1]
        jsonschema.validate(json.loads(text), schema)


def test_all_properties_that_have_names_are_there_down_to_a_depth() -> None:
    found, _ = guided_text("json_schema", json.dumps(NODE))
    assert found == ('{"next":{"next":{"next":{"next":{}}}}}', "")
    optional = {"properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {}}}}
    found, _ = guided_text("json_schema", json.dumps({"type": "object", **optional}))
    assert found is not None
    assert {*json.loads("".join(found))} <= {"a", "b"} != set()


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", "[a-z]{3}-[0-9]*", "[a-z]{3}-[0-9]*"),
        ("regex", r"(\d{1,3}\.){3}\d{1,3}", r"(\d{1,3}\.){3}\d{1,3}"),
        ("grammar", 'root ::= "SELECT " name\nname ::= [a-z]+', "SELECT [a-z]+"),
        ("grammar", 'start: "yes" | "no"', "yes|no"),
    ],
)
def test_an_expression_or_a_grammar_has_a_text(kind: str, source: str, pattern: str) -> None:
    found, _ = guided_text(kind, source)
    assert found is not None
    assert found[1] == ""
    assert re.fullmatch(pattern, found[0])


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ("{", "Invalid JSON grammar specification."),
        ("3", "Invalid grammar specification: Expecting object schema to apply options"),
        ({"type": "word"}, "Grammar error: Invalid type: word"),
        ({"enum": []}, "Grammar error: Unsatisfiable schema: anyOf is empty"),
        ({"$ref": "#/a"}, "Grammar error: Pointer '/a' does not exist"),
        ({"properties": 3}, "Grammar error: properties must be an object"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "Grammar error: Unsatisfiable schema"),
    ],
    ids=str,
)
def test_a_schema_that_is_none_is_refused(schema: Any, told: str) -> None:
    with pytest.raises(BadRequestError, match=f"^{re.escape(told)}"):
        guided_text("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, ["not"]),
        ({"type": "array", "uniqueItems": True, "contains": {}}, ["contains", "uniqueItems"]),
        ({"type": "string", "format": "zip"}, ["format"]),
    ],
    ids=str,
)
def test_keywords_that_a_text_may_not_obey_are_told(schema: Any, words: list[str]) -> None:
    assert guided_text("json_schema", json.dumps(schema))[1] == words


def test_a_text_that_is_not_found_is_told() -> None:
    schema = {"type": "string", "pattern": "^[a-p]{1600}$"}
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}

    async def play(client: ClientSession, _: Server) -> None:
        response = await client.post("/v1/chat/completions", json=CHAT | {"response_format": form})
        assert response.headers["X-Headway-Ignored"] == "response_format"
        assert (await response.json())["usage"]["completion_tokens"] > 0

    served_by(play)
