"""Make dataclasses of the mappings in a scenario, and say of each wrong key what is wrong.

An error is a ValueError of lines `key: what is wrong`; whoever holds the mapping puts its own key
before them, so that at last each begins with the whole path, as in `input_len.parts.0.low`.

Why not pydantic's TypeAdapter on the same 22 dataclasses, of 180 fields: in strict mode it takes
instances alone, so that every field would have to be marked strict; it refuses numpy's numbers and
knows nothing of `inf` in a text; and beside a wrong type it does not run `__post_init__`, so what
else is wrong has to be found as here. Of this file's 116 lines of code 25 would go, `from_mapping`
and `_check_field`: the others find these errors, or check the arguments of policies and schedulers,
too. As many would come, to keep adapters and to put errors into these words. It would build a
`Generator` in 45 us rather than 95, once a run, after 65 ms to prepare the class. Why not this in
place of pydantic: the 23 blocks have 166 keys with bounds, nested blocks and a JSON schema, all of
which pydantic has.
"""

import dataclasses
from collections.abc import Callable, Mapping
from datetime import date
from math import isnan
from numbers import Integral, Real
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
S = TypeVar("S")

PLAIN_TYPES: dict[type, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
    bool: (bool, "true or false"),
}
MAX_REPR = 60  # characters of a wrong value that a message quotes


def raise_if(*checks: tuple[bool, str]) -> None:
    """Raise ValueError with the messages, one in a line, of the checks that are true."""
    if messages := [message for wrong, message in checks if wrong]:
        raise ValueError("\n".join(messages))


def check_range(name: str, value: float, low: float, high: float) -> tuple[bool, str]:
    """Check for `raise_if` that a number is from `low` to `high`; NaN is not."""
    return not low <= value <= high, f"{name}: must be from {low:g} to {high:g}, not {value}"


def check_least(name: str, value: float, low: float) -> tuple[bool, str]:
    """Check for `raise_if` that a number is at least `low`."""
    return value < low, f"{name}: must be at least {low:g}, not {value}"


def prefix_keys(name: str, error: ValueError) -> ValueError:
    """Put the name of the mapping before the key that each line of an error begins with."""
    lines = str(error).split("\n")
    return ValueError("\n".join(name + ("" if s[0] == ":" else ".") + s for s in lines))


def check_parses(name: str, make: Callable[[S], object], value: S) -> tuple[bool, str]:
    """Try to make something of a value; give what ValueError says as a check for `raise_if`."""
    try:
        make(value)
    except ValueError as error:
        return True, str(prefix_keys(name, error))
    return False, ""


def from_mapping(cls: type[T], values: object) -> T:
    """Make a dataclass of a scenario's mapping; ValueError names each wrong key in a line."""
    if not isinstance(values, Mapping):
        raise ValueError(f": {short_repr(values)} is not a mapping")
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}
    values = {
        key: parse_number(value)
        if key in known and _plain_type(known[key].type) is float
        else value
        for key, value in values.items()
    }
    wrong = {key: f"{key}: unknown key" for key in values if key not in known}
    for name, f in known.items():
        bad, message = _check_field(f, values.get(name, f.default))
        if bad:
            wrong[name] = message
    if wrong:
        others = _other_errors(cls, known, values, set(wrong))
        raise ValueError("\n".join([*wrong.values(), *others]))
    return cls(**values)


def _other_errors(
    cls: type[T],
    known: "Mapping[str, dataclasses.Field[object]]",
    values: Mapping[str, object],
    wrong: set[str],
) -> list[str]:
    """Say what else is wrong once a 1 stands for each that is wrong or missing."""
    rest = {key: value for key, value in values.items() if key not in wrong}
    for name in wrong & set(known):
        kind = _plain_type(known[name].type) or int
        if kind in (int, float) or known[name].default is dataclasses.MISSING:
            rest[name] = kind(1)
    try:
        cls(**rest)
    except ValueError as error:
        return [s for s in str(error).split("\n") if s.partition(":")[0].split(".")[0] not in wrong]
    except TypeError:  # 1 is no value of the wrong key's type
        return []
    return []


def parse_number(value: S) -> S | float:
    """Read a number that YAML took for a text: `inf`, and `1e-3` for want of a dot."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _check_field(f: "dataclasses.Field[object]", value: object) -> tuple[bool, str]:
    """Check that a field has a value and, where its type is a plain one, that this fits."""
    if value is dataclasses.MISSING:
        return True, f"{f.name}: missing"
    if value is None and f.default is None:
        return False, ""
    return check_annotation(f.name, f.type, value)


def _plain_type(annotation: object) -> type | None:
    """Return the plain type that an annotation, or its text, has by itself or beside None."""
    for kind in PLAIN_TYPES:
        if annotation in (kind, kind | None, kind.__name__, f"{kind.__name__} | None"):
            return kind
    return None


def check_annotation(name: str, annotation: object, value: object) -> tuple[bool, str]:
    """Check that a value fits an annotation, where this has a plain type; others fit always."""
    kind = _plain_type(annotation)
    if kind is None or (value is None and annotation not in (kind, kind.__name__)):
        return False, ""
    return check_type(name, kind, value)


def check_type(name: str, kind: type, value: object) -> tuple[bool, str]:
    """Check that a value is of a plain type; a whole number is a number, true and NaN are not."""
    accepted, words = PLAIN_TYPES[kind]
    good = isinstance(value, accepted) and (kind is bool) == isinstance(value, bool)
    good = good and not (isinstance(value, Real) and _is_nan_or_too_large(value))
    return not good, f"{name}: {short_repr(value)} is not {words}"


def short_repr(value: object) -> str:
    """Write a wrong value for a message, and not too much of it."""
    text = _as_yaml(value)
    return text if len(text) <= MAX_REPR else text[:MAX_REPR] + "..."


def _as_yaml(value: object) -> str:
    """Write a value as YAML does in one line, texts in quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, date):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_as_yaml(of)}" for key, of in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_as_yaml, value)) + "]"
    return repr(value)


def _is_nan_or_too_large(value: Real) -> bool:
    """Say whether a number is NaN, or a whole one beyond all floats."""
    try:
        return isnan(value)
    except OverflowError:
        return True
