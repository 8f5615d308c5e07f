"""What each key of a scenario says by itself: all that is wrong, and what may be meant."""

import dataclasses
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, get_args

from yaml.reader import Reader

from simulator.launch.fields import why_unknown
from simulator.scenario.scenario import Scenario
from simulator.util.config import Config
from simulator.util.errors import FieldError, Key, field_errors, unknown_key
from simulator.util.yaml_lines import Block

ROUNDS = 5  # of looking for errors that others hide

_NAMES = """gpu engine goodput workload workload.trace plan cluster cluster.kv_transfer
cluster.ec_transfer cluster.admission cluster.client cluster.failures cluster.autoscaling sweep
sweep.random rollouts"""
SECTIONS: list[Key] = [(), *(tuple(name.split(".")) for name in _NAMES.split())]
"""Blocks in which a key may be meant that is found elsewhere."""


def validate(raw: Block) -> tuple[Scenario | None, list[FieldError]]:
    """Check each key by itself; where some are wrong, let defaults take their place.

    What depends on a wrong key can only be seen once that is out of the way: hence the rounds.
    """
    if wrong := list(_unprintable(raw, ())):
        return None, wrong
    rest = deepcopy(raw)
    for _ in range(ROUNDS):
        try:
            return Scenario.model_validate(rest), wrong
        except ValueError as error:
            found = [_explained(fault) for fault in field_errors((), error)]
        # What is wrong now with a block around may be that a wrong key of it was taken out.
        around = {one.key[:depth] for one in wrong for depth in range(len(one.key) + 1)}
        wrong += [fault for fault in found if fault.key not in around]
        for fault in found:
            _remove(rest, fault.key)
    return None, wrong


def _unprintable(value: object, key: Key) -> Iterator[FieldError]:
    """Find characters in keys and text that no shell, YAML file or CSV takes, such as NUL."""
    items = enumerate(value) if isinstance(value, list) else ()
    for name, one in value.items() if isinstance(value, dict) else items:
        yield from _unprintable(name, (*key, str(name)))
        yield from _unprintable(one, (*key, str(name)))
    if isinstance(value, str) and (found := Reader.NON_PRINTABLE.search(value)):
        yield FieldError(key, f"has the control character {found[0]!r}", "value")


def block_class(key: Key) -> type[Config] | None:
    """Return the class of the block at a key, if one is there."""
    kind: Any = Scenario
    for part in key:
        if _is_block(kind):
            field = kind.model_fields.get(part)
            kind = field.annotation if field else None
            if type(None) in get_args(kind):  # Block | None
                kind = get_args(kind)[0]
        else:  # dict[str, Block] or list[Block]: below a name of the user's own, or an index
            kind = get_args(kind)[-1] if get_args(kind) else None
    return kind if _is_block(kind) else None


def _is_block(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Config)


def known_keys(key: Key) -> list[str]:
    """List the keys that the block at a key knows."""
    block = block_class(key)
    known = [*block.model_fields] if block else []
    if key == ("workload",):
        from simulator.workload.generate import Generator

        generated = (field.name for field in dataclasses.fields(Generator))
        known = [*dict.fromkeys(["trace", *generated, *known])]
    if key == ("goodput",):
        known += ["client NAME", "priority N", "model NAME"]
    return known


def _remove(raw: Block, key: Key) -> None:
    """Take out the value at a key, or the one that the key should have been in."""
    block = raw
    for depth, part in enumerate(key):
        inner = block.get(part)
        if depth + 1 < len(key) and isinstance(inner, dict) and key[depth + 1] in inner:
            block = inner
        else:
            block.pop(part, None)
            return


def _explained(fault: FieldError) -> FieldError:
    """Say more of an unknown key."""
    explains = fault.kind == "key" and block_class(fault.key[:-1]) is not None
    return fault._replace(what=_unknown(fault.key)) if explains else fault


def _unknown(key: Key) -> str:
    """Say why a key is unknown, or which one may be meant."""
    name, path = key[-1], key[:-1]
    for home in SECTIONS:
        if name in known_keys(home):
            return f"unknown key here; did you mean {'.'.join((*home, name))}?"
    if path[-1:] == ("engine",) and (note := why_unknown(name)):
        return note
    return unknown_key(name, known_keys(path))
