"""The Triton kernels, without a GPU: what they compute in Triton's interpreter, and what becomes of
them when they are compiled for an H100 or H200."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'headway[gpu]'")
pytest.importorskip("triton", reason="triton is not installed: it comes with torch for CUDA")

from gpu_backend.cuda import ops
from gpu_backend.input_batch import prefill_tiles

ROOT = Path(__file__).parents[2]


def python(*words: str, interpret: bool) -> list[dict[str, object]]:
    """Run a module that prints lines of JSON, with Triton's kernels interpreted or not."""
    env = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kernels_agree_with_plain_torch() -> None:
    """Attention, norm, activation and whole texts on the kernels are those of the reference."""
    planned, *rows = python("tools.campaign.checks", interpret=True)
    assert planned == {"planned": 10}
    assert len(rows) == 10
    assert [row for row in rows if not row["ok"]] == []


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-0.6b", "llama-3.2-1b"])
def test_kernels_compile_for_hopper(model: str) -> None:
    """Nothing spills, every pointer and stride is known to divide by 16, and data come in ahead."""
    words = ("--capability", "90", "--layers", model, "--describe", "--jobs", "2")
    kernels = python("tools.campaign.precompile", *words, interpret=False)
    assert {k["name"] for k in kernels} == {
        "rope_store", "decode_split", "decode_combine", "prefill_tile", "add_rmsnorm", "silu_mul",
    }  # fmt: skip
    for kernel in kernels:
        found = {key: kernel[key] for key in ("stack", "local", "spills", "unhinted")}
        assert found == {"stack": 0, "local": 0, "spills": 0, "unhinted": []}, kernel["name"]
    for kernel in kernels:
        if kernel["name"] == "decode_split":
            assert kernel["async_copies"]
            assert "HMMA" in kernel["matrix"]
            assert kernel["reg"] <= 128  # no fewer than three programs on a multiprocessor,
            assert 3 * kernel["shared"] <= 227 << 10  # also by what they share
            assert max(kernel["waits"]) > 0  # tiles are on their way while one is computed
        if kernel["name"] == "prefill_tile":
            assert kernel["async_copies"]
            assert "HGMMA" in kernel["matrix"]


def test_splits_fill_the_gpu_and_no_more() -> None:
    """Few rows are cut into many splits; many rows still into a few, lest one long one drag."""
    assert [ops.splits_for(rows, 8) for rows in (1, 2, 4, 8, 16, 127, 128)] == [
        32,
        32,
        16,
        8,
        4,
        4,
        2,
    ]
    assert ops.splits_for(1, 64) == 8


def test_prefill_tiles_cover_each_chunk_once() -> None:
    """Tiles of 128 rows, each with its place in its sequence; those with most keys come first."""
    tiles = prefill_tiles(np.array([0, 37], np.int32), np.array([50, 200], np.int32), 3, 128)
    assert tiles.tolist() == [[181, 72, 165, 1], [53, 128, 37, 1], [3, 50, 0, 0]]
