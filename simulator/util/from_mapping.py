"""The reader of values: it makes dataclasses and blocks of a scenario's mappings, and says of each
wrong key what is wrong.

An error has the keys that are wrong (`MappingError`); whoever has the mapping puts its own key
before them, so that at last each is the whole path, as in `input_len.parts.0.low`.

Why not pydantic, which read the blocks until it was replaced by `read`: it took 0.1 s to import and
to prepare the classes, a third of what a run of one request takes; and it cannot read the
dataclasses: in strict mode it takes instances alone, it refuses numpy's numbers, and beside a wrong
type it does not run `__post_init__`, so that what else is wrong has to be found as here.
"""

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import date
from functools import partial
from math import isfinite, isnan
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from simulator.util.errors import (
    FieldError,
    Kind,
    MappingError,
    did_you_mean,
    field_errors,
    split_key,
    unknown_key,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
S = TypeVar("S")
Limits = Mapping[str, Any]
NO_LIMITS: Limits = {}

NUMERIC = re.compile(r"\b(int|float|list|dict|Distribution)\b")
"""Types, as an annotation's text has them, of whose keys an error also says what they mean."""
MAX_REPR = 60  # characters of a wrong value that a message quotes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FieldInfo:
    """A key of a block: its type and default, what it means, and the bounds of its value."""

    default: Any = dataclasses.MISSING
    description: str = ""
    limits: Limits = dataclasses.field(default_factory=dict)
    kind: Any = None

    @classmethod
    def of(cls, kind: Any, default: Any) -> "FieldInfo":
        """Describe a class's attribute."""
        found = default if isinstance(default, FieldInfo) else cls(default)
        notes = kind.__metadata__ if get_origin(kind) is Annotated else ()
        meaning = next((note for note in notes if isinstance(note, str)), found.description)
        return cls(found.default, meaning, found.limits, kind)

    @property
    def annotation(self) -> Any:
        """The type without what is noted beside it."""
        return _bare(self.kind)

    @property
    def unit(self) -> str:
        """What an error about a number adds: its unit or meaning, in brackets."""
        numeric = self.description and NUMERIC.search(str(self.annotation))
        return f" ({self.description})" if numeric else ""


def _bare(kind: Any) -> Any:
    return kind.__origin__ if get_origin(kind) is Annotated else kind


def Field(  # noqa: N802
    default: Any = dataclasses.MISSING, *, description: str = "", **limits: Any
) -> Any:
    """Describe a key, or note bounds of a type: ge, gt, le, lt, pattern, min_length, max_length."""
    return FieldInfo(default, description, limits)


WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number such as 64",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping of keys",
}
"""What a value of a plain type must be."""
PLAIN_KINDS = (int, float, str, bool)
# Types that arguments are checked against, by their text.
PLAIN: dict[str, Any] = {kind.__name__: kind for kind in PLAIN_KINDS}
PLAIN |= {f"{name} | None": kind | None for name, kind in PLAIN.items()}
ACCEPTED: dict[Any, Any] = {int: Integral, float: Real}
"""What else is of a plain type: a whole number is a number; numpy's are both."""
LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "finite": (
        lambda value, _: not isinstance(value, float) or isfinite(value),
        "must be finite, not {1}",
    ),
    "gt": (operator.gt, "must be more than {}, not {}"),
    "ge": (operator.ge, "must be at least {}, not {}"),
    "lt": (operator.lt, "must be less than {}, not {}"),
    "le": (operator.le, "must be at most {}, not {}"),
    "pattern": (
        lambda value, pattern: re.fullmatch(pattern, value) is not None,
        "must match {}, not {}",
    ),
    "min_length": (lambda value, least: len(value) >= least, "must not be empty"),
    "max_length": (lambda value, most: len(value) <= most, "is longer than {}"),
}
"""Whether a value keeps to a limit, and what to say of one that does not."""


def read(kind: Any, value: Any, limits: Limits = NO_LIMITS) -> Any:
    """Return a value as an annotation has it; ValueError of lines `key: what is wrong`.

    Beside a type `Annotated` may have its limits, functions that the value goes through before, and
    a text, what a dataclass's key means.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        for note in kind.__metadata__:
            if isinstance(note, FieldInfo):
                limits = {**note.limits, **limits}
            elif not isinstance(note, str):
                value = note(value)
        return read(inner[0], value, limits)
    if origin in (Union, UnionType):
        return None if value is None and NoneType in inner else _read_one_of(inner, value, limits)
    if origin is Literal:
        return _read_literal(inner, value)
    plain = origin or kind
    if plain not in WORDS:
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return value if isinstance(value, kind) else from_mapping(kind, value)
        return kind.model_validate(value) if hasattr(kind, "model_validate") else value
    given, value = value, _read_plain(plain, inner, value)
    for name, limit in limits.items():
        keeps, words = LIMITS[name]
        if not keeps(value, limit):
            shown = f"{float(limit):g}" if plain is float else limit
            raise MappingError("", words.format(shown, short_repr(given)), "value")
    return plain(value) if "finite" in limits and plain in (int, float) else value


def _read_plain(plain: Any, inner: tuple[Any, ...], value: Any) -> Any:
    """Return a value of a plain type, with what is in it."""
    fits = isinstance(value, ACCEPTED.get(plain, plain))
    fits = fits and (plain is bool) == isinstance(value, bool)
    if not fits or (plain in (int, float) and _is_nan_or_too_large(value)):
        text = value if isinstance(value, str) and plain in (int, float) else ""
        bare = ", without a unit" if text[:1].isdigit() else ""
        bare = ", without quotes" if text.replace(".", "", 1).isdigit() else bare
        raise MappingError("", f"must be {WORDS[plain]}{bare}, not {short_repr(value)}", "value")
    if plain is list and inner:
        return [*_read_items(inner[0], enumerate(value)).values()]
    return _read_items(inner[1], value.items()) if plain is dict and inner else value


def _read_one_of(kinds: tuple[Any, ...], value: object, limits: Limits) -> Any:
    """Return a value as the first of several types has it that it fits."""
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) == 1:
        return read(others[0], value, limits)
    for kind in others:
        with suppress(ValueError):
            return read(kind, value, limits)
    plain = {get_origin(_bare(kind)) or _bare(kind): kind for kind in others}
    if type(value) in plain:  # what is wrong with it is less than its type
        return read(plain[type(value)], value, limits)
    words = [WORDS.get(kind, "a mapping of keys") for kind in plain]
    *first, last = words
    what = f"must be {', '.join(first)} or {last}, not {short_repr(value)}"
    raise MappingError("", what, "value")


def _read_literal(known: tuple[Any, ...], value: object) -> object:
    if any(type(value) is type(one) and value == one for one in known):
        return value
    near = did_you_mean(str(value), (one for one in known if isinstance(one, str)))
    *first, last = map(repr, known)
    listed = f"{', '.join(first)} or {last}" if first else last
    raise MappingError("", f"must be {listed}, not {short_repr(value)}{near}", "value")


def _read_items(kind: Any, items: Iterable[tuple[Any, object]]) -> dict[Any, Any]:
    """Read each value of a mapping or list; ValueError names those that are wrong."""
    found, faults = {}, []
    for key, value in items:
        try:
            found[key] = read(kind, value)
        except ValueError as error:
            faults += field_errors((str(key),), error)
    if faults:
        raise MappingError(faults)
    return found


def as_plain(value: Any, exclude_unset: bool = False) -> Any:
    """Return a value with mappings for the blocks and dataclasses in it."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_unset=exclude_unset)
    if dataclasses.is_dataclass(value):
        return {f.name: as_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: as_plain(one, exclude_unset) for key, one in value.items()}
    return [as_plain(one, exclude_unset) for one in value] if isinstance(value, list) else value


Check = tuple[bool, str, str] | tuple[bool, str, str, Kind]
"""Whether a value is wrong, its key, what is wrong with it, and of what kind that is."""


def raise_if(*checks: Check, others: Iterable[FieldError] = ()) -> None:
    """Raise a MappingError of all checks that are true, and of `others` beside them."""
    found = (FieldError(split_key(check[1]), *check[2:]) for check in checks if check[0])
    if faults := [*found, *others]:
        raise MappingError(faults)


def check_range(name: str, value: float, low: float, high: float) -> Check:
    """Check for `raise_if` that a number is from `low` to `high`; NaN is not."""
    return not low <= value <= high, name, f"must be from {low:g} to {high:g}, not {value}", "value"


def check_least(name: str, value: float, low: float, of: str = "") -> Check:
    """Check for `raise_if` that a number is at least `low`, which the key `of` may give."""
    least = f"{of} ({low:g})" if of else f"{low:g}"
    kind: Kind = "unsupported" if of else "value"
    return value < low, name, f"must be at least {least}, not {value}", kind


def parse_faults(name: str, make: Callable[[S], object], value: S) -> list[FieldError]:
    """Try to make something of the value at a key; return what is wrong with it."""
    try:
        make(value)
    except ValueError as error:
        return field_errors(split_key(name), error)
    return []


def keys_of(cls: "type[DataclassInstance]") -> dict[str, FieldInfo]:
    """Return the keys that a scenario may give of a dataclass: `name: Annotated[type, "meaning"]`.

    Errors, the JSON Schema and the reference page have what a key means from here.
    """
    return {f.name: FieldInfo.of(f.type, f.default) for f in dataclasses.fields(cls) if f.init}


def from_mapping(cls: type[T], values: Any) -> T:
    """Make a dataclass of a scenario's mapping; ValueError names each wrong key in a line."""
    known = keys_of(cls)
    check_mapping(values, known)
    numbers = {key for key, field in known.items() if _is_number(field.kind)}
    values = {k: parse_number(value) if k in numbers else value for k, value in values.items()}
    found, faults = read_keys(known, values)
    named = [key for key, field in known.items() if field.description] or known
    unknown = {key: unknown_key(key, named) for key in values if key not in known}
    if faults := [*MappingError.of(unknown, "key").faults, *faults]:
        raise MappingError(faults + _other_errors(cls, known, values, found))
    try:
        return cls(**found)
    except ValueError as error:
        raise MappingError(_explain(known, field_errors((), error))) from None


def check_mapping(value: object, known: Mapping[str, FieldInfo]) -> None:
    """Raise MappingError, with an example of the `known` keys, unless a value is a mapping.

    The example has the keys that are needed, with their meanings, else two with plain defaults;
    where none has one, the first with its meaning.
    """
    if not isinstance(value, Mapping):
        plain = {key: of.default for key, of in known.items() if type(of.default) in PLAIN_KINDS}
        needed = [key for key, of in known.items() if of.default is dataclasses.MISSING]
        shown = needed or [*plain][:2] or [*known][:1]
        pairs = {key: plain.get(key, f"<{known[key].description}>") for key in shown}
        example = _as_yaml(pairs).replace("'", "")
        what = f"must be a mapping of keys, as {example}, not {short_repr(value)}"
        raise MappingError("", what, "value")


def from_kind(kinds: Mapping[str, type[T]], values: Any) -> T:
    """Make the dataclass that `kind` names of a mapping's other keys; ValueError as `from_mapping`.

    Its lines of what there is have the names of `kinds`.
    """
    check_mapping(values, {"kind": FieldInfo(next(iter(kinds)))})
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        given = "is missing" if kind is None else f"{short_repr(kind)} is unknown"
        near = did_you_mean(str(kind), kinds)
        raise MappingError("kind", f"{given}; there are {', '.join(kinds)}{near}", "value")
    return from_mapping(kinds[kind], {key: values[key] for key in values if key != "kind"})


def _is_number(kind: Any) -> bool:
    """Return whether a value may be a number with a fraction."""
    inner = get_args(kind) if get_origin(kind) in (Annotated, Union, UnionType) else ()
    return kind is float or any(map(_is_number, inner))


def read_keys(
    known: Mapping[str, FieldInfo], values: Mapping[str, object], limits: Limits = NO_LIMITS
) -> tuple[dict[str, Any], list[FieldError]]:
    """Read the values of keys, or take their defaults; say what is wrong with the others."""
    found: dict[str, Any] = {}
    faults: list[FieldError] = []
    for name, field in known.items():
        meaning = f" ({field.description})" if field.description else ""
        try:
            if name in values:
                found[name] = read(field.kind, values[name], {**limits, **field.limits})
            elif field.default is dataclasses.MISSING:
                faults.append(FieldError((name,), f"is missing{meaning}"))
            else:
                found[name] = field.default
        except ValueError as error:
            faults += field_errors((name,), error)
    return found, _explain(known, faults)


def _explain(known: Mapping[str, FieldInfo], faults: Iterable[FieldError]) -> list[FieldError]:
    """Add to the faults of numbers what their keys mean, unless they say it or guess at a slip."""
    found = []
    for fault in faults:
        field = known.get(fault.key[0]) if fault.key else None
        unit = "" if field is None or fault.what.endswith((")", "?")) else field.unit
        found.append(fault._replace(what=fault.what + unit))
    return found


def _other_errors(
    cls: type[T],
    known: Mapping[str, FieldInfo],
    values: Mapping[str, object],
    found: Mapping[str, Any],
) -> list[FieldError]:
    """Say what else is wrong once a 1 stands for each that is missing or no number."""
    rest = {
        name: given if isinstance(given := values.get(name), int | float) else 1
        for name, field in known.items()
        if field.default is dataclasses.MISSING
        or (field.default is None and _is_number(field.kind))
    }
    try:
        cls(**{**rest, **found})
    except ValueError as error:
        return _explain(known, [f for f in field_errors((), error) if f.key[0] in found])
    except (TypeError, AttributeError):  # 1 is no value of the wrong key's type
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


def annotation_faults(name: str, annotation: object, value: object) -> list[FieldError]:
    """Return why a value does not fit an annotation, or its text, of a plain type; others fit.

    Of an `Annotated` number it says the unit too.
    """
    field = FieldInfo.of(annotation, None)
    kinds = [kind for text, kind in PLAIN.items() if field.annotation in (text, kind)]
    faults = [fault for kind in kinds for fault in parse_faults(name, partial(read, kind), value)]
    return _explain({split_key(name)[0]: field}, faults)


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
