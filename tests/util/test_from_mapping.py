"""Dataclasses of mappings: every wrong key in a line, beside what is wrong with the others."""

from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Annotated

import numpy as np
import pytest

from simulator.util.from_mapping import (
    annotation_faults,
    from_mapping,
    parse_faults,
    raise_if,
)


@dataclass
class Queue:
    """A number that must be given, and some that need not."""

    rate: Annotated[float, "1/s"]
    places: int = 1
    name: str | None = None
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        raise_if(
            (not self.rate > 0, "rate", f"{self.rate} is not above 0"),
            (self.places < 1, "places", f"{self.places} is less than 1"),
        )


def messages_of(values: object) -> list[str]:
    """Return the lines of the error."""
    with pytest.raises(ValueError, match=":") as caught:
        from_mapping(Queue, values)
    return str(caught.value).split("\n")


@pytest.mark.parametrize(
    ("values", "queue"),
    [
        ({"rate": "inf"}, Queue(inf)),
        ({"rate": "1e-3", "places": np.int64(2)}, Queue(0.001, 2)),
        ({"rate": 2, "name": None}, Queue(2)),
        ({"rate": 1, "weights": "anything"}, Queue(1, weights="anything")),
    ],
)
def test_good_values(values: dict, queue: Queue) -> None:
    """YAML's words for numbers are numbers; other types than plain ones are the class's affair."""
    assert from_mapping(Queue, values) == queue


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        ([], [": must be a mapping of keys, as {rate: <1/s>}, not []"]),
        ({}, ["rate: is missing (1/s)"]),
        ({"rate": True}, ["rate: must be a number, not true (1/s)"]),
        ({"rate": float("nan")}, ["rate: must be a number, not nan (1/s)"]),
        ({"rate": 10**400}, [f"rate: must be a number, not 1{'0' * 59}... (1/s)"]),
        ({"rate": 1, "places": 1.0}, ["places: must be a whole number such as 64, not 1.0"]),
        ({"rate": 1, "name": 3}, ["name: must be text, not 3"]),
        ({"rate": 1, "lanes": 3}, ["lanes: unknown key; there is rate"]),
        ({"rate": 0, "places": 0}, ["rate: 0 is not above 0 (1/s)", "places: 0 is less than 1"]),
        ({"places": 0}, ["rate: is missing (1/s)", "places: 0 is less than 1"]),
        (
            {"rate": "x", "places": 0},
            ["rate: must be a number, not 'x' (1/s)", "places: 0 is less than 1"],
        ),
    ],
)
def test_wrong_values(values: object, messages: list[str]) -> None:
    assert messages_of(values) == messages


def test_an_error_within_has_the_whole_path() -> None:
    """Also where it is about the value itself."""
    read = partial(from_mapping, Queue)
    assert parse_faults("queue", read, {"rate": 0}) == [
        (("queue", "rate"), "0 is not above 0 (1/s)", "unsupported")
    ]
    assert parse_faults("queue", read, 3) == [
        (("queue",), "must be a mapping of keys, as {rate: <1/s>}, not 3", "value")
    ]
    assert parse_faults("queue", read, {"rate": 1}) == []


@pytest.mark.parametrize(
    ("annotation", "value", "wrong"),
    [
        ("int", 1.5, True),
        ("int | None", None, False),
        (int, None, True),
        (str | None, 3, True),
        (list[int], "x", False),
        ("Anything", 3, False),
    ],
)
def test_annotations(annotation: object, value: object, wrong: bool) -> None:
    """Of plain types, by themselves or beside None; as types or as their text."""
    assert bool(annotation_faults("x", annotation, value)) == wrong
