"""What the modules of a compiled wheel say to mypyc, and to nobody else."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

__all__ = ["mypyc_attr"]
T = TypeVar("T")

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:  # not to need that package beside a live engine

    def _unchanged(**_: object) -> Callable[[T], T]:
        return lambda cls: cls

    mypyc_attr = _unchanged
