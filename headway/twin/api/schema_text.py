"""A text that satisfies a JSON schema: fixed parts, and words in the first string of any length."""

import json
import math
from collections.abc import Mapping
from operator import ge, gt, le, lt
from typing import Any

from headway.twin.api.tables import table

FREE = "\0"
"""Stands for the words in that string."""
DEEPEST, DEEP = 30, 4  # levels; below DEEP what is optional is left out: a schema may name itself
LIMITS = {"minimum": ge, "maximum": le, "exclusiveMinimum": gt, "exclusiveMaximum": lt}
FORMATS, UNMET = table("formats").values()
"""A text of each format of JSON Schema that is understood, and keywords that are not."""
WRONG = (TypeError, LookupError, AttributeError, ArithmeticError, ValueError, StopIteration)


FIXED = {"boolean": True, "null": None}
KINDS = ("array", "boolean", "integer", "null", "number", "object", "string")


class UnmetSchemaError(ValueError):
    """A schema has a keyword that is not understood, has no value, or is none."""


class NoSchemaError(UnmetSchemaError):
    """A schema is of a type that JSON does not have."""


def schema_text(schema: object, ignored: set[str] | None = None) -> tuple[str, str]:
    """Return what comes before and behind the words; without room for words, all and nothing.

    Keywords that are not understood are added to `ignored`. Raises UnmetSchemaError, also for these
    keywords where it is None, or NoSchemaError.
    """
    try:
        text = json.dumps(_Values(schema, ignored).value(schema))
    except UnmetSchemaError:
        raise
    except WRONG:
        raise UnmetSchemaError from None
    before, _, after = text.partition(json.dumps(FREE)[1:-1])
    return before, after


class _Values:
    """Makes values of a schema's parts; one that is no mapping raises what `WRONG` has."""

    def __init__(self, root: Any, ignored: set[str] | None) -> None:
        self.root, self.ignored, self.has_words = root, ignored, False

    def value(self, schema: Any, depth: int = 0) -> Any:
        """Return a value that a schema allows."""
        schema = {} if schema is True else schema
        unmet = {*UNMET} & schema.keys()
        if depth > DEEPEST or (unmet and self.ignored is None):
            raise UnmetSchemaError
        if self.ignored is not None:
            self.ignored |= unmet
        if "$ref" in schema:
            found = self.root
            for part in schema["$ref"].removeprefix("#").split("/")[1:]:
                found = found[part.replace("~1", "/").replace("~0", "~")]
            return self.value(found, depth + 1)
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else schema["enum"][0]
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._first(schema[key], {k: schema[k] for k in schema if k != key}, depth)
        usual = "object" if "properties" in schema else "array" if "items" in schema else "string"
        kind = schema.get("type", usual)
        if isinstance(kind, list):
            kind = next((one for one in kind if one != "null"), "null")
        if kind not in KINDS:
            raise NoSchemaError(f"type must be one of {', '.join(KINDS)}; got {str(kind)[:40]!r}")
        return FIXED[kind] if kind in FIXED else getattr(self, f"_{kind}")(schema, depth + 1)

    def _first(self, options: list[Any], rest: Mapping[str, Any], depth: int) -> Any:
        """Return a value of the first option that has one."""
        for option in options:
            before = self.has_words
            try:
                return self.value({**rest, **option}, depth + 1)
            except WRONG:
                self.has_words = before
        raise UnmetSchemaError

    def _object(self, schema: Mapping[str, Any], depth: int) -> Any:
        named, needed = schema.get("properties", {}), schema.get("required", ())
        keys = [key for key in named if depth <= DEEP or key in needed]
        other = schema.get("additionalProperties", True)
        return {
            key: self.value(named.get(key, other), depth) for key in dict.fromkeys([*keys, *needed])
        }

    def _array(self, schema: Mapping[str, Any], depth: int) -> Any:
        count = max(schema.get("minItems", 0), depth <= DEEP)
        count = min(count, schema.get("maxItems", math.inf))
        return [self.value(schema.get("items", True), depth) for _ in range(count)]

    def _string(self, schema: Mapping[str, Any], _: int) -> Any:
        least, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
        if "format" in schema:
            return FORMATS[schema["format"]]
        if self.has_words or least or most < math.inf:
            return "x" * least
        self.has_words = True
        return FREE

    def _number(self, schema: Mapping[str, Any], _: int) -> Any:
        step = schema.get("multipleOf", 1)
        limits = [(LIMITS[key], schema[key]) for key in LIMITS if key in schema]
        near = (bound // step * step + more * step for _, bound in limits for more in (0, 1, -1))
        tried = [0, *near]
        if schema["type"] == "number" and "multipleOf" not in schema and limits:
            tried.append(sum(bound for _, bound in limits) / len(limits))
        return next(one for one in tried if all(within(one, bound) for within, bound in limits))

    _integer = _number
