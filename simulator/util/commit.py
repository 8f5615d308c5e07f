"""Which commit of this repository is running."""

import os
import subprocess
from pathlib import Path


def source_commit() -> str:
    """Give the commit, with a `+` where files differ from it; "unknown" outside a checkout.

    A copy without its history is told by the variable HEADWAY_COMMIT.
    """
    if told := os.environ.get("HEADWAY_COMMIT"):
        return told
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        dirty = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short=12", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
