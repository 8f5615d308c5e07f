"""What the modules of a compiled wheel say to mypyc, and to nobody else."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

__all__ = ["mypyc_attr"]
T = TypeVar("T")

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:  # not to need that package beside a live engine

    def mypyc_attr(**_: object) -> Callable[[T], T]:
        """Return the class as it is."""
        return lambda cls: cls
