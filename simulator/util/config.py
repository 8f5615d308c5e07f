"""What all blocks of a scenario share."""

from pydantic import BaseModel, ConfigDict, model_validator


class Config(BaseModel):
    """What all blocks of a scenario share: no unknown key, no guessing of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_nothing(cls, value: object) -> object:
        """Take a block without keys, which YAML calls null, as one with every default."""
        return {} if value is None else value
