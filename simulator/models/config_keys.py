"""What kind of value each key of a config.json has, at whatever depth it is read.

`config_keys.csv` has a line a key: its kind, and the field of ModelSpec that it is by itself.
"""

import csv
from collections.abc import Callable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

from simulator.util.from_mapping import short_repr

MOST, MOST_LAYERS = 10**8, 10_000  # of whole numbers; of layers, each of which is read by itself


def _whole(value: object, most: int = MOST, least: int = 0) -> bool:
    return type(value) is int and least <= value <= most


def _list(value: object, fits: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _text(value: object) -> bool:
    return isinstance(value, str)


def _block(value: object) -> bool:
    return isinstance(value, Mapping)


def _blocks(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_block, value.values()))


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "layers": (lambda n: _whole(n, MOST_LAYERS), f"a whole number up to {MOST_LAYERS:,}"),
    "whole": (_whole, f"a whole number up to {MOST:,}"),
    "signed": (lambda n: _whole(n, MOST, -1), "a whole number"),
    "pattern": (lambda n: _whole(n) or _text(n), "a whole number"),
    "number": (lambda n: type(n) in (int, float) and 0 < n < inf, "a positive number"),
    "share": (lambda n: type(n) in (int, float) and 0 < n <= 1, "above 0 and at most 1"),
    "flag": (lambda flag: isinstance(flag, bool), "true or false"),
    "text": (_text, "a text"),
    "names": (lambda names: _list(names, _text), "a list of names"),
    "numbers": (lambda n: _list(n, _whole), "a list of numbers"),
    "pair": (
        lambda n: _list(n, lambda one: _whole(one, MOST, 1)) and len(n) == 2,
        "two positive whole numbers",
    ),
    "mapping": (_block, "a mapping"),
    "mappings": (_blocks, "a mapping of mappings"),
    "changes": (
        lambda one: isinstance(one, bool) or one == "local" or _blocks(one),
        "a mapping of mappings",
    ),
}
ROWS = [*csv.DictReader(Path(__file__).with_suffix(".csv").read_text("utf-8").splitlines())]
KIND_OF = {row["key"]: KINDS[row["kind"]] for row in ROWS}


def keys_of(*kinds: str) -> dict[str, list[str]]:
    """Return the keys of each field that is of these kinds; the first that is there counts."""
    fields = {row["field"]: list[str]() for row in ROWS if row["kind"] in kinds and row["field"]}
    for row in ROWS:
        if row["field"] in fields:
            fields[row["field"]].append(row["key"])
    return fields


def wrong_kinds(block: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is of the wrong kind in a block and in those within it; null is always right."""
    for key, value in block.items():
        fits, what = KIND_OF.get(key, (None, ""))
        if value is not None and fits is not None and not fits(value):
            yield f"{key}: must be {what}, not {short_repr(value)}"
        elif isinstance(value, Mapping):
            yield from wrong_kinds(value)


def size_of(raw: Mapping[str, object], key: str) -> int:
    """Return a positive whole number that must be there."""
    value = raw.get(key)
    if not _whole(value, MOST, 1):
        raise ValueError(f"{key}: must be a positive whole number, not {short_repr(value)}")
    assert isinstance(value, int)
    return value
