"""What is derived from a command agrees with what vLLM's own EngineArgs derived from it.

`tools/engine_configs.py` recorded `derived_configs.json.gz` from the wheels of five releases, for
up to 57 shipped checkpoints, 17 commands and 6 GPUs; and, by `--states`, `derived_states.jsonl.gz`,
of seven checkpoints with states, eight commands and two releases.
"""

import gzip
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from simulator.build.kv_room import engine_sizes
from simulator.core.engine_config import EngineConfig
from simulator.launch.keys import read_launch
from simulator.models.gpus import GIB, find_gpu
from simulator.models.kv_budget import estimate
from simulator.models.load import load_model
from simulator.scenario.engine_defaults import with_defaults
from tools.engine_configs import COMMANDS, GPUS, STATES

RECORDED = Path(__file__).parent / "derived_configs.json.gz"
STATES_RECORDED = RECORDED.with_name("derived_states.jsonl.gz")
KEYS = ("command", "gpu", "model")
EVERY = 1 if os.environ.get("CI") == "full" else 20


@cache
def launched(command: str, release: str) -> dict[str, Any]:
    words = " ".join(f"'{word}'" if "{" in word else word for word in command.split())
    return read_launch(f"vllm serve m {words}", release).engine


def rows() -> Iterator[tuple[str, str, str, str, dict[str, Any]]]:
    """Yield release, command, GPU, model and what vLLM derived."""
    packed = json.loads(gzip.decompress(RECORDED.read_bytes()))
    for release, commands in packed["recorded"].items():
        for command, gpus in commands.items():
            for gpu, found in gpus.items():
                for number, ranges in found.items():
                    for first, last in ranges:
                        for model in packed["models"][first : last + 1]:
                            yield release, command, gpu, model, packed["configs"][int(number)]


def test_every_field_is_derived_as_vllm_derives_it():
    """But for a draft model before 0.28, where vLLM takes a GLM-4.5 that drafts for MTP."""
    seen = 0
    for number, (release, command, gpu, model, derived) in enumerate(rows()):
        if number % EVERY:
            continue
        seen += 1
        engine = with_defaults(launched(command, release), {"name": gpu}, model)
        assert isinstance(engine, dict)
        ours = {key: engine.get(key, EngineConfig.model_fields[key].default) for key in derived}
        if differing := [key for key in derived if ours[key] != derived[key]]:
            what = release, command, gpu, model, ours, derived
            assert differing == ["async_scheduling"], what
            assert "draft_model" in command, what
            assert release < "0.28", what
    assert seen > 25_000 / EVERY


def test_the_recording_covers_what_it_should():
    packed = json.loads(gzip.decompress(RECORDED.read_bytes()))
    assert len(packed["recorded"]) == 5
    for release, commands in packed["recorded"].items():
        have = {model for row in rows() if row[0] == release for model in (row[3],)}
        assert len(have) >= 40, release
        lacks = {"-tp 2", "-pp 2", "-dp 2"} if release == "0.19.1" else set()  # it counts GPUs
        assert {*commands} == {*COMMANDS} - lacks
        assert all({*gpus} == {*GPUS} for gpus in commands.values())
    for name, (_, gib, capability) in GPUS.items():
        gpu = find_gpu(name)
        assert gpu.memory == int(gib * GIB)
        assert gpu.compute_capability == capability[0] + capability[1] / 10


def test_blocks_of_states_are_as_long_as_vllm_makes_them():
    """By the model's own classes, for FlashAttention and CUDA 13; also whether they are cached."""
    rows = [*map(json.loads, gzip.decompress(STATES_RECORDED.read_bytes()).splitlines())]
    for row in rows:
        release, command, gpu, model = (row.pop(key) for key in ("release", *KEYS))
        block = with_defaults(launched(command, release), {"name": gpu}, model)
        assert isinstance(block, dict)
        engine = EngineConfig(**block)
        spec = load_model(model)
        layout = estimate(spec, find_gpu(gpu), engine_sizes(engine, spec)).layout
        ours = {key: getattr(engine, key) for key in row} | {"block_size": layout.least_block}
        assert ours == row, (release, command, gpu, model)
    assert len(rows) == 2 * 7 * len(STATES) * len(GPUS)
