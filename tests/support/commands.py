"""The command line as users call it, and what it leaves in a folder."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
FILES = ["requests.csv", "scenario.yaml", "steps.csv", "summary.json"]
TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(
    f"{k},{10 + k},{5 + k}\n" for k in range(4)
)


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run Python, with these packages, in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        text=True,
        check=False,
        **({"capture_output": True, "env": os.environ | {"PYTHONPATH": ROOT}} | options),
    )


def headway(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run the command as users do, in a process of its own."""
    return python("-m", "headway", *arguments, **options)


def names(folder: Path) -> list[str]:
    """List a folder, without what Python itself leaves beside a policy it has imported."""
    return sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")
