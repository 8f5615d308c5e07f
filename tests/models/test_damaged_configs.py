"""Each value of a config.json replaced by another: it is read on purpose, or refused by its key."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.models.config_json import read_config
from simulator.models.engine_sizes import EngineSizes
from simulator.models.gpus import find_gpu
from simulator.models.kv_budget import estimate
from simulator.models.load import MODELS
from simulator.util.errors import HeadwayError

VALUES = [None, "x", -1, 0, 10**18, 1.5, True, [], ["a"], {}, {"a": 1}]
SHAPES = (
    *("gemma-4-e2b", "gpt-oss-20b", "granite-4.0-h-tiny", "kimi-k2-thinking", "llama-4-scout"),
    *("mistral-small-3.1-24b", "nemotron-nano-9b-v2", "qwen2.5-vl-7b", "qwen3.5-35b-a3b"),
)
MOST = 3e12  # bytes of Kimi-K2 in 16 bits and more; no one wrong value makes more of a model


def leaves(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places in a file, of each list the first."""
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in [*enumerate(value)][:1] if isinstance(value, list) else items:
        yield (*path, key)
        yield from leaves(inner, (*path, key))


@pytest.mark.medium
@pytest.mark.parametrize("name", SHAPES)
def test_a_value_of_another_kind(tmp_path: Path, name: str) -> None:
    """No traceback, and no negative or boundless bytes; a fault is told once, by file and key."""
    text = (MODELS / name / "config.json").read_text()
    path, gpu, refused = tmp_path / "config.json", find_gpu("H200"), 0
    for place in leaves(json.loads(text)):
        for value in VALUES:
            raw = inner = json.loads(text)
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            path.write_text(json.dumps(raw))
            said = messages_of(path)
            keys = [message.split(": ")[1] for message in said]
            assert all(message.startswith(str(path)) for message in said)
            assert len(set(keys)) == len(keys)
            refused += bool(said)
            if not said:
                budget = estimate(read_config(path), gpu, EngineSizes(hybrid=True))
                assert 0 < budget.weights < MOST, (place, value)
    assert refused > 100


def messages_of(path: Path) -> list[str]:
    """Say what is wrong with a file."""
    try:
        read_config(path)
    except HeadwayError as error:
        return error.messages
    return []
