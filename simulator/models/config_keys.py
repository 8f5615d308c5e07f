"""What kind of value each key of a config.json has, at whatever depth it is read.

`config_keys.csv` has a line a key: its kind, the field of ModelSpec that it is by itself, and
whether a file must have it, or another key of this field.
"""

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any

from simulator.util.errors import MappingError
from simulator.util.files import read_table
from simulator.util.from_mapping import short_repr

MOST, MOST_LAYERS = 10**8, 10_000  # of whole numbers; of layers, each of which is read by itself


Check = Callable[[Any], bool]


def _whole(most: int = MOST, least: int = 0) -> Check:
    return lambda n: type(n) is int and least <= n <= most


def _all(fits: Check, number: int = 0) -> Check:
    """Check a list, of so many where a number is given."""
    return lambda some: (
        isinstance(some, list) and all(map(fits, some)) and len(some) == (number or len(some))
    )


def _is(*kinds: type) -> Check:
    return lambda value: isinstance(value, kinds)


def _blocks(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is(Mapping), value.values()))


KINDS: dict[str, tuple[Check, str]] = {
    "layers": (_whole(MOST_LAYERS), f"a whole number up to {MOST_LAYERS:,}"),
    "size": (_whole(least=1), f"a positive whole number up to {MOST:,}"),
    "whole": (_whole(), f"a whole number up to {MOST:,}"),
    "signed": (_whole(MOST, -1), "a whole number"),
    "pattern": (lambda n: isinstance(n, str) or _whole()(n), "a whole number"),
    "number": (lambda n: type(n) in (int, float) and 0 < n < inf, "a positive number"),
    "share": (lambda n: type(n) in (int, float) and 0 < n <= 1, "above 0 and at most 1"),
    "flag": (_is(bool), "true or false"),
    "text": (_is(str), "a text"),
    "names": (_all(_is(str)), "a list of names"),
    "numbers": (_all(_whole()), "a list of numbers"),
    "pair": (_all(_whole(MOST, 1), 2), "two positive whole numbers"),
    "mapping": (_is(Mapping), "a mapping"),
    "scheme": (_is(Mapping, str), "a mapping"),
    "mappings": (_blocks, "a mapping of mappings"),
    "changes": (
        lambda one: isinstance(one, bool) or one == "local" or _blocks(one),
        "a mapping of mappings",
    ),
}
ROWS = read_table(__file__, "config_keys.csv")
REQUIRED = [row["field"] for row in ROWS if row["required"]]
KIND_OF = {row["key"]: KINDS[row["kind"]] for row in ROWS}


def keys_of(*kinds: str) -> dict[str, list[str]]:
    """Return the keys of each field that is of these kinds; the first that is there counts."""
    fields = {row["field"]: list[str]() for row in ROWS if row["kind"] in kinds and row["field"]}
    for row in ROWS:
        if row["field"] in fields:
            fields[row["field"]].append(row["key"])
    return fields


def wrong_kinds(block: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is of the wrong kind in a block and in those within it; null is always right."""
    for key, value in block.items():
        fits, what = KIND_OF.get(key, (None, ""))
        if value is not None and fits is not None and not fits(value):
            yield key, f"must be {what}, not {short_repr(value)}"
        elif isinstance(value, Mapping):
            yield from wrong_kinds(value)


def size_of(raw: Mapping[str, object], key: str) -> int:
    """Return a positive whole number that must be there."""
    value: Any = raw.get(key)
    if not _whole(MOST, 1)(value):
        raise MappingError(key, f"must be a positive whole number, not {short_repr(value)}")
    return int(value)
