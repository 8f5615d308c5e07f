"""Files appear whole or not at all: written under another name first, renamed at the end."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from simulator.util.errors import HeadwayError

Writer = Callable[[BinaryIO], object]
"""Writes a file's contents to an open binary file."""
Contents = bytes | Writer

WRITTEN_FILES: list[Path] = []
"""What this command has written: an interrupt tells it."""


def check_target(source: Path, target: Path) -> None:
    """See beforehand that a file made of another can be written, and is not that other."""
    if not target.parent.exists():
        raise HeadwayError(f"{target}: cannot write: no folder {target.parent}")
    if source.exists() and target.exists() and source.samefile(target):
        raise HeadwayError(f"{target}: cannot write: it is the file to read")


def check_file(option: str, path: Path) -> Path:
    """See beforehand whether a file that an option names can be written."""
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise HeadwayError(f"{option} {path}: is a folder")
    if not there.is_dir():
        raise HeadwayError(f"{option} {path}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise HeadwayError(f"{option} {path}: no permission to write to {there}")
    return path


def write_atomic(path: Path, contents: Contents) -> Path:
    """Write one file, replacing what was there; raise HeadwayError where that cannot be."""
    return write_together(path.parent, {path.name: contents})[0]


def write_together(folder: Path, files: Mapping[str, Contents]) -> list[Path]:
    """Write several files of one folder, which is made if it is missing.

    All are complete before the first gets its name. If anything fails, an interrupt included,
    the folder is left as it was; what the system refuses becomes a HeadwayError.
    """
    targets = [folder / name for name in files]
    drafts = [folder / f".{name}.{os.getpid()}.tmp" for name in files]
    made: list[Path] = []
    current = folder
    try:
        made = _make_folders(folder)
        for current, draft, contents in zip(targets, drafts, files.values(), strict=True):
            if current.is_dir():
                raise IsADirectoryError(None, "is a folder")
            with draft.open("wb") as file:
                file.write(contents) if isinstance(contents, bytes) else contents(file)
        for current, draft in zip(targets, drafts, strict=True):
            draft.replace(current)
        WRITTEN_FILES.extend(targets)
    except BaseException as error:
        _roll_back(drafts, made)
        if isinstance(error, OSError):
            raise HeadwayError(f"{current}: cannot write: {error.strerror or error}") from error
        raise
    return targets


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder and those above it; return the ones that were missing, outermost first."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(None, "is not a folder")
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _roll_back(drafts: list[Path], made: list[Path]) -> None:
    """Take back what was written so far."""
    for draft in drafts:
        with suppress(OSError):
            draft.unlink()
    for path in reversed(made):
        with suppress(OSError):
            path.rmdir()


def resolve(path: str | Path, folder: Path) -> Path:
    """Find a file beside the scenario, else in the folder that HEADWAY_DATA names.

    Where it is in neither, return where it would be beside the scenario.
    """
    beside = folder / Path(path).expanduser()
    shared = os.environ.get("HEADWAY_DATA")
    if shared and not beside.exists() and (elsewhere := Path(shared) / path).exists():
        return elsewhere
    return beside
