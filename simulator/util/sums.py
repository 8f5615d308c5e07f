"""Sums over the parts of a run: taken out of objects as arrays by name, and added to others.

What can be added up is a number, an array, a dict of such things by name, a dataclass of them, or
an object that names them in `SUMS`; one with a `merge` adds another of its kind itself.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

EXTREMES: dict[str, Callable[[Array, Array], Array]] = {
    "max": np.maximum,
    "most": np.maximum,
    "end": np.maximum,
    "min": np.minimum,
    "start": np.minimum,
}
"""How numbers are joined whose names begin so; others are added."""


def take_sums(value: Any, name: str = "") -> Iterator[tuple[str, Array]]:
    """Yield what can be added up, as arrays by the names of what holds them, parted by `/`."""
    if (names := _names(value)) is not None:
        for one in names:
            yield from take_sums(getattr(value, one), f"{name}/{one}")
    elif isinstance(value, dict):
        for key in value:
            yield from take_sums(value[key], f"{name}/{key}")
    else:
        yield name, np.asarray(value)


def add_sums(value: Any, found: Mapping[str, Array], name: str = "") -> Any:
    """Return a value with what `take_sums` found in another of its kind; objects are changed."""
    if hasattr(value, "merge"):
        other = type(value)()
        for one in _names(value) or ():
            setattr(other, one, add_sums(getattr(other, one), found, f"{name}/{one}"))
        value.merge(other)
    elif (names := _names(value)) is not None:
        for one in names:
            setattr(value, one, add_sums(getattr(value, one), found, f"{name}/{one}"))
    elif isinstance(value, dict):
        inside = (path.removeprefix(f"{name}/") for path in found if path.startswith(f"{name}/"))
        for key in dict.fromkeys(path.partition("/")[0] for path in inside):
            value[key] = add_sums(value[key], found, f"{name}/{key}")
    else:
        word = name.rpartition("/")[2].lstrip("_").partition("_")[0]
        mine, more = (np.atleast_1d(one) for one in (np.asarray(value), found[name]))
        size = max(len(mine), len(more))
        mine, more = (np.pad(one, (0, size - len(one))) for one in (mine, more))
        joined = EXTREMES.get(word, np.add)(mine, more)
        if isinstance(value, np.ndarray):
            return joined
        return joined.tolist() if isinstance(value, list) else joined[0].item()
    return value


def _names(value: Any) -> tuple[str, ...] | None:
    """Name the attributes of an object that can be added up; None: it is no such object."""
    if is_dataclass(value):
        return tuple(field.name for field in fields(value))
    return getattr(value, "SUMS", None)
