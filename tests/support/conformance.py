"""Small cases for `headway conform`, and what Headway decides on them."""

import json
import os
from pathlib import Path

import pytest

from headway.conformance.cases import read_cases
from headway.conformance.replay import Replay

STEP = {"base_ns": 100, "per_token_ns": 10, "per_context_token_ns": 1, "empty_ns": 50}
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64, "block_size": 4}


def recorded(pattern: str) -> pytest.MarkDecorator:
    """Run a test for each file of recorded schedules, by `path`, beside that of HEADWAY_DATA.

    Each is a test of its own, so that a search for faults finds the fastest that runs a line.
    """
    folder = os.environ.get("HEADWAY_DATA")
    root = Path(folder).resolve().parent if folder else Path()
    some = sorted(root.glob(pattern)) if folder else []
    named = [pytest.param(one, id=one.relative_to(root).as_posix()) for one in some]
    none = pytest.param(None, marks=pytest.mark.skip("no recorded schedules beside HEADWAY_DATA"))
    return pytest.mark.parametrize("path", named or [none])


def make(folder: Path, requests: list[tuple[int, int, int]], **more: object) -> Path:
    """Write a case of (arrival, prompt, output); `more` goes into its config."""
    case = {
        "schema": 1,
        "name": "small",
        "config": SMALL | {"num_gpu_blocks": 100, "enable_prefix_caching": False} | more,
        "step_time": STEP,
        "requests": [
            {"id": k, "arrival_ns": at, "prompt_len": prompt, "output_len": output}
            for k, (at, prompt, output) in enumerate(requests)
        ],
    }
    path = folder / "cases" / "small.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(case, indent=1))
    return path


def play(path: Path, leap: bool = False) -> list[dict]:
    """Return the rows of a case."""
    (case,) = read_cases(path)
    return [json.loads(row) for row in Replay(case, leap=leap).rows()]


def steps_of(rows: list[dict], *names: str) -> list[tuple]:
    """Return some fields of every step."""
    return [tuple(row[name] for name in names) for row in rows if row["type"] == "step"]
