"""What all blocks of a scenario share: their base class, and the types of many of their values."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from simulator.util.from_mapping import short_repr

INT32 = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=INT32)]
WholeNumber = Annotated[int, Field(ge=0, le=INT32)]
Amount = Annotated[float, Field(ge=0, le=1_000_000)]
PositiveAmount = Annotated[float, Field(gt=0, le=1_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]


class Config(BaseModel):
    """A block: no unknown key, no guessing of types."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True
    )

    @model_validator(mode="before")
    @classmethod
    def _read_null(cls, value: object) -> object:
        """Take a block without keys, which YAML calls null, as one with every default."""
        return {} if value is None else value

    def values_of(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of some keys.

        `model_dump` would first build the serializer of this block alone, which takes as long as
        reading the scenario.
        """
        return {name: getattr(self, name) for name in names}


def check_name_under(key: str, example: str) -> Callable[[object], object]:
    """Make a check that lets through a name, or a mapping that has it under a key."""

    def check(value: object) -> object:
        if isinstance(value, dict):
            if not isinstance(value.get(key), str):
                raise ValueError(f": the mapping needs a key `{key}`: a name or {example}")
        elif not isinstance(value, str):
            raise ValueError(
                f": must be a name or a mapping with a key `{key}`, not {short_repr(value)}"
            )
        return value

    return check


def split_spec(spec: str | dict[str, Any], key: str) -> tuple[Any, dict[str, Any]]:
    """Return the name of such a value, and the arguments that the mapping has beside it."""
    if isinstance(spec, str):
        return spec, {}
    return spec[key], {name: value for name, value in spec.items() if name != key}
