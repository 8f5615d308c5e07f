"""The base of all blocks of a scenario, and values that are a name with arguments."""

import pickle
import re
from typing import Annotated, Literal

import numpy as np
import pytest

from simulator.util.config import Config, Count, Named, PositiveFloat, read_named
from simulator.util.from_mapping import Field


class Block(Config):
    """One key."""

    size: PositiveFloat = 1.0


def test_a_block_without_keys_has_its_defaults() -> None:
    assert Block.model_validate(None) == Block()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sice": 1}, "sice: unknown key"),
        ({"size": "1"}, "size: must be a number, without quotes, not '1'"),
        ({"size": float("inf")}, "size: must be finite, not inf"),
        ({"size": True}, "size: must be a number, not true"),
        ({"size": 0, "sice": 1}, "size: must be more than 0, not 0\nsice: unknown key"),
        (3, ": must be a mapping of keys, as {size: 1.0}, not 3"),
    ],
)
def test_nothing_is_guessed(values: object, message: str) -> None:
    """Neither keys nor types; all that is wrong is told at once."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        Block.model_validate(values)


@pytest.mark.parametrize(
    ("value", "arguments"), [("fcfs", {}), ({"weight": 2, "policy": "fcfs"}, {"weight": 2})]
)
def test_a_name_comes_with_its_arguments(value: object, arguments: dict[str, int]) -> None:
    """And is written as it was read; what was read once is taken as it is."""
    read = read_named("policy", "module:Class")
    found = read(value)
    assert (found.name, found.arguments, found.model_dump()) == ("fcfs", arguments, value)
    assert read(found) is found
    assert Named("fcfs").model_dump() == "fcfs"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"name": "fcfs"},
            "must be a name or a mapping with a key `policy` (a name or module:Class), not {name: "
            "'fcfs'}",
        ),
        (3, "must be a name or a mapping with a key `policy` (a name or module:Class), not 3"),
        (
            None,
            "must be a name or a mapping with a key `policy` (a name or module:Class), not null",
        ),
    ],
)
def test_what_has_no_name_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^: {re.escape(message)}$"):
        read_named("policy", "module:Class")(value)


class Shelf(Config):
    """A block with others in it, and one key of each type."""

    block: Block = Block()
    blocks: list[Block] = Field([])
    named: dict[str, Block] = Field({})
    kind: Literal["wide", "high"] | None = None
    count: Count | list[Count] = 1
    title: Annotated[str, str.strip, Field(pattern="[a-z]+", max_length=3)] = "a"

    def _check(self) -> None:
        if self.kind == "wide" and not self.blocks:
            raise ValueError("blocks: a wide one has some")


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        ({"block": {"size": 0}}, ["block.size: must be more than 0, not 0"]),
        ({"block": 3}, ["block: must be a mapping of keys, as {size: 1.0}, not 3"]),
        ({"blocks": [{}, {"sice": 1}]}, ["blocks.1.sice: unknown key"]),
        ({"named": {"a.b": 3}}, ["named.a.b: must be a mapping of keys, as {size: 1.0}, not 3"]),
        ({"kind": "wid"}, ["kind: must be 'wide' or 'high', not 'wid'; did you mean wide?"]),
        ({"kind": 1, "count": "x"}, ["kind: must be 'wide' or 'high', not 1",
                                   "count: must be a whole number such as 64 or a list, not 'x'"]),
        ({"title": " abcd "}, ["title: is longer than 3"]),
        ({"kind": "wide"}, ["blocks: a wide one has some"]),
    ],
)  # fmt: skip
def test_what_is_wrong_within_is_told_with_its_path(
    values: dict[str, object], messages: list[str]
) -> None:
    with pytest.raises(ValueError, match=":") as caught:
        Shelf(**values)
    assert str(caught.value).split("\n") == messages


def test_blocks_are_read_frozen_compared_copied_and_dumped() -> None:
    shelf = Shelf(block={"size": 2}, blocks=[None], named={"a": {}}, count=np.int64(3), title=" b")
    assert (shelf.block, shelf.blocks, shelf.title) == (Block(size=2.0), [Block()], "b")
    assert (type(shelf.block.size), type(shelf.count)) == (float, int)
    assert shelf.model_dump(exclude={"title"}, exclude_unset=True) == {
        "block": {"size": 2.0}, "blocks": [{}], "named": {"a": {}}, "count": 3,
    }  # fmt: skip
    assert pickle.loads(pickle.dumps(shelf)) == shelf
    other = shelf.model_copy(update={"kind": "high"})
    assert other != shelf
    assert other.model_fields_set == shelf.model_fields_set | {"kind"}
    assert Shelf(**dict(other)) == other
    assert hash(Block()) == hash(Block(size=1))
    assert repr(Block()) == "Block(size=1.0)"
    with pytest.raises(KeyError, match="sice"):
        other.block.model_copy(update={"sice": 3})
    with pytest.raises(AttributeError, match="size: Block is frozen"):
        other.block.size = 3
