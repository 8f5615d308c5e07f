"""What all blocks of a scenario share: their base class, and the types of many of their values.

A block has a class, whose annotated attributes are its keys: `size: Count = Field(1, description=
"...")`. It is checked where it is made, and frozen.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from math import inf
from typing import Annotated, Any, ClassVar, Self

from simulator.util.errors import FieldError, MappingError
from simulator.util.from_mapping import (
    Field,
    FieldInfo,
    as_plain,
    check_mapping,
    read_keys,
    short_repr,
)

INT32 = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=INT32)]
WholeNumber = Annotated[int, Field(ge=0, le=INT32)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFinite = Annotated[float, Field(ge=0, lt=inf)]
PositiveFinite = Annotated[float, Field(gt=0, lt=inf)]
Amount = Annotated[float, Field(ge=0, le=1_000_000)]
PositiveAmount = Annotated[float, Field(gt=0, le=1_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
FILE_NAME = r"^\w[\w .,+=-]*$"


def _check_file_name(value: object) -> object:
    if isinstance(value, str) and value and not re.fullmatch(FILE_NAME, value):
        what = "must begin with a letter or digit and have only these, blanks and _ . , + = -"
        raise MappingError("", f"{what}, not {short_repr(value)}", "value")
    return value


FileName = Annotated[str, _check_file_name, Field(pattern=FILE_NAME, max_length=100)]


class Config:
    """A block: no unknown key, no guessing of types. `Block(key=value)` raises ValueError."""

    model_fields: ClassVar[Mapping[str, FieldInfo]] = {}
    model_fields_set: frozenset[str]  # those that were given

    def __init_subclass__(cls) -> None:
        own = {}
        for name, kind in cls.__annotations__.items():
            if name[0] != "_":
                own[name] = FieldInfo.of(kind, cls.__dict__.get(name, MISSING))
                if name in cls.__dict__:
                    delattr(cls, name)
        cls.model_fields = {**own, **{k: v for k, v in cls.model_fields.items() if k not in own}}

    def __init__(self, **values: Any) -> None:
        self._read(values)

    def is_given(self, key: str) -> bool:
        """Say whether a key has another value than by default."""
        return bool(getattr(self, key) != self.model_fields[key].default)

    @classmethod
    def model_validate(cls, value: object) -> Self:
        """Make a block of what a file holds; ValueError names each wrong key."""
        if isinstance(value, cls):
            return value
        block = cls.__new__(cls)
        block._read(value)
        return block

    def _read(self, value: Any) -> None:
        values = self._open(value)
        check_mapping(values, self.model_fields)
        found, faults = read_keys(self.model_fields, values, {"finite": True})
        faults += self._read_others({k: values[k] for k in values if k not in self.model_fields})
        if faults:
            raise MappingError(faults)
        self.__dict__.update(found, model_fields_set=frozenset(values))
        self._check()

    def _open(self, value: Any) -> Any:
        """Return the mapping that a value stands for: null has every default."""
        return {} if value is None else value

    def _read_others(self, values: dict[str, Any]) -> list[FieldError]:
        """Say what is wrong with keys that are no attributes."""
        return [FieldError((key,), "unknown key", "key") for key in values]

    def _check(self) -> None:
        """Raise ValueError, lines of `key: what is wrong`, about what keys are to one another."""

    def __setattr__(self, name: str, value: object) -> None:
        if name[0] != "_":
            raise AttributeError(f"{name}: {type(self).__name__} is frozen; see model_copy")
        object.__setattr__(self, name, value)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, self.__dict__[name]) for name in self.model_fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and type(self) is type(other) and [*self] == [*other]

    def __hash__(self) -> int:
        return hash((*self,))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self)})"

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """Return a copy with other values, which nobody checks; KeyError where there is no key."""
        if unknown := update.keys() - self.model_fields:
            raise KeyError(*unknown)
        copy = object.__new__(type(self))
        given = self.model_fields_set | update.keys()
        copy.__dict__.update({**self.__dict__, **update, "model_fields_set": given})
        return copy

    def model_dump(
        self, *, exclude: Collection[str] = (), exclude_unset: bool = False
    ) -> dict[str, Any]:
        """Return the keys and their values, blocks as mappings."""
        return {
            name: as_plain(value, exclude_unset)
            for name, value in self
            if name not in exclude and (not exclude_unset or name in self.model_fields_set)
        }


@dataclass(frozen=True, slots=True)
class Named:
    """A policy or a router: its name, and arguments."""

    name: Any  # text; from Python also a class
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    written: object = field(default=None, hash=False)  # as a file has it; None: the name alone

    def model_dump(self, exclude_unset: bool = False) -> object:
        """Return what a file would have."""
        return self.name if self.written is None else self.written


def read_named(key: str, example: str) -> Callable[[object], Named]:
    """Make a reader of a name, or of a mapping that has it under a key, beside arguments."""

    def read(value: object) -> Named:
        if isinstance(value, Named):
            return value
        if isinstance(value, str):
            return Named(value)
        if not isinstance(value, dict) or not isinstance(name := value.get(key), str):
            what = f"must be a name or a mapping with a key `{key}` (a name or {example})"
            raise MappingError("", f"{what}, not {short_repr(value)}", "value")
        return Named(name, {k: one for k, one in value.items() if k != key}, value)

    return read
