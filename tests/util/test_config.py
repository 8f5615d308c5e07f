"""The base of all blocks of a scenario, and values that are a name with arguments."""

import pytest

from simulator.util.config import Config, check_name_under, split_spec


class Block(Config):
    """One key."""

    size: float = 1.0


def test_a_block_without_keys_has_its_defaults() -> None:
    assert Block.model_validate(None) == Block()


@pytest.mark.parametrize(
    "values", [{"sice": 1}, {"size": "1"}, {"size": float("inf")}, {"size": True}]
)
def test_nothing_is_guessed(values: dict) -> None:
    """Neither keys nor types."""
    with pytest.raises(ValueError, match="validation error"):
        Block.model_validate(values)


@pytest.mark.parametrize("value", ["fcfs", {"policy": "fcfs", "weight": 2}])
def test_a_name_or_a_mapping_with_one(value: object) -> None:
    assert check_name_under("policy", "module:Class")(value) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "fcfs"}, "the mapping needs a key `policy`: a name or module:Class"),
        (3, "must be a name or a mapping with a key `policy`, not 3"),
        (None, "must be a name or a mapping with a key `policy`, not null"),
    ],
)
def test_what_has_no_name_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^: {message}$"):
        check_name_under("policy", "module:Class")(value)


def test_a_name_comes_with_its_arguments() -> None:
    assert split_spec("fcfs", "policy") == ("fcfs", {})
    assert split_spec({"weight": 2, "policy": "fcfs"}, "policy") == ("fcfs", {"weight": 2})
