"""What is around this process: packages, environment variables, the commit that is running."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from simulator.util.errors import HeadwayError

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Keeps a Python that is started by `-m` or `-c` from importing files of the current folder."""


def need_package(what: str, extra: str, *modules: str) -> None:
    """Raise HeadwayError where a module that `what` needs is missing: `extra` installs it."""
    for module in modules:
        try:
            import_module(module)
        except ImportError:
            install = f"pip install 'headway[{extra}]', or '.[{extra}]' in a checkout"
            raise HeadwayError(f"{what}: needs {module}: {install}") from None


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def source_commit() -> str:
    """Return the commit, with a `+` where files differ from it; "unknown" outside a checkout.

    A copy without its history is told by the variable HEADWAY_COMMIT.
    """
    if told := os.environ.get("HEADWAY_COMMIT"):
        return told
    import subprocess

    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        dirty = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short=12", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
