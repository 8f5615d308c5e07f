"""A table of what a scenario may name, of which only what it names is imported."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


class Imported(Mapping[str, T]):
    """Objects by name, each imported when it is first asked for.

    To import all that a scenario may name takes longer than a small run.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        """`places` has where each is, as `package.module:attribute`."""
        self._places = places

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self._places[name].partition(":")
        found: T = getattr(import_module(module), attribute)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._places

    def name_of(self, found: Any) -> str | None:
        """Return the name of a class or function; None: it is not in the table."""
        place = f"{found.__module__}:{found.__qualname__}"
        return next((name for name, known in self._places.items() if known == place), None)
