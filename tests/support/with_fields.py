"""Requests and steps as they are after a while: what no constructor takes."""

from typing import Any, TypeVar

T = TypeVar("T")


def with_fields(thing: T, **fields: Any) -> T:
    """Set fields, and return what has them now."""
    for name, value in fields.items():
        setattr(thing, name, value)
    return thing
