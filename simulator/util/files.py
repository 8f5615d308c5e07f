"""Files appear whole or not at all: they get their names when all of them are complete.

Until then they have none where the system can do that (Linux), so that a kill leaves nothing
behind; elsewhere they are hidden files in the folder.
"""

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from simulator.util.errors import HeadwayError

Writer = Callable[[BinaryIO], object]
"""Writes a file's contents to an open binary file."""
Contents = bytes | Writer

WRITTEN_FILES: list[Path] = []
"""What this command has written: an interrupt tells it."""
READ_FILES: set[Path] = set()
"""What this command has read, or is to read: it writes over none of them."""
OPEN_FILES = Path("/proc/self/fd")  # by number: through it a file without a name gets one


def why_not_regular(path: Path) -> str:
    """Say of a path that names a pipe, a device or a socket that it does: one may never end.

    It is asked of every file before it is read, and kept in READ_FILES.
    """
    READ_FILES.add(path.absolute())
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        return f"{path}: cannot be read: is a pipe or a device, not a file"
    return ""


def check_regular(path: Path) -> None:
    """Raise HeadwayError where a path names a pipe, a device or a socket."""
    if wrong := why_not_regular(path):
        raise HeadwayError(wrong)


def check_replaceable(path: Path) -> None:
    """Raise HeadwayError where a path names what no file may replace: a folder, a pipe, a device.

    A pipe or a device may not be written to either: nothing could be taken back.
    """
    if path.is_dir():
        raise HeadwayError(f"{path}: cannot write: is a folder")
    if path.exists() and not path.is_file():
        raise HeadwayError(f"{path}: cannot write: is a pipe or a device, not a file")


def check_target(source: Path, target: Path) -> None:
    """See beforehand that a file made of another can be written, and is not that other."""
    check_replaceable(target)
    if source.exists() and target.exists() and source.samefile(target):
        raise HeadwayError(f"{target}: cannot write: it is the file to read")
    check_file("OUT", target)


def check_new(option: str, path: Path) -> Path:
    """See beforehand whether a file can be written that people edit: it replaces none."""
    if path.exists():
        raise HeadwayError(f"{path}: is there already; give another name")
    return check_file(option, path)


def check_file(option: str, path: Path) -> Path:
    """See beforehand whether a file that an option names can be written.

    It replaces no scenario, which people edit, and nothing that the command reads.
    """
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise HeadwayError(f"{option} {path}: is a folder")
    if path.exists() and not path.is_file():
        raise HeadwayError(f"{option} {path}: is a pipe or a device, not a file")
    if not there.is_dir():
        raise HeadwayError(f"{option} {path}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise HeadwayError(f"{option} {path}: no permission to write to {there}")
    if path.exists() and path.suffix.lower() in {".yaml", ".yml"}:
        raise HeadwayError(f"{option} {path}: is there already; a scenario is never replaced")
    check_unread(option, path)
    return path


def check_unread(option: str, path: Path) -> None:
    """Raise HeadwayError where a path, however it is spelled, names a file that is read."""
    if path.exists() and any(one.exists() and one.samefile(path) for one in READ_FILES):
        raise HeadwayError(f"{option} {path}: cannot write: it is a file that the command reads")


def write_atomic(path: Path, contents: Contents) -> Path:
    """Write one file, replacing what was there; raise HeadwayError where that cannot be."""
    return write_together(path.parent, {path.name: contents})[0]


def write_together(folder: Path, files: Mapping[str, Contents]) -> list[Path]:
    """Write several files of one folder, which is made if it is missing.

    All are complete before the first gets its name. If anything fails, an interrupt included,
    the folder is left as it was; what the system refuses becomes a HeadwayError, and so does a
    name that `check_replaceable` refuses. A symbolic link stays, and its target is written.
    """
    targets = [folder / name for name in files]
    places = [Path(os.path.realpath(target)) for target in targets]
    drafts = [place.with_name(f".{place.name}.{os.getpid()}.tmp") for place in places]
    made: list[Path] = []
    unnamed: list[tuple[int, Path]] = []
    current = folder
    try:
        for target, place, draft in zip(targets, places, drafts, strict=True):
            current = target.parent
            there = _nearest_folder(place.parent)
            current = target
            check_replaceable(target)
            if place.is_symlink():
                raise OSError(None, "is a symbolic link to itself")
            number = _open_unnamed(there)
            if number is None:
                made += make_folders(place.parent)
            else:
                unnamed.append((number, draft))
            contents = files[target.name]
            with draft.open("wb") if number is None else os.fdopen(os.dup(number), "wb") as file:
                file.write(contents) if isinstance(contents, bytes) else contents(file)
        for place in places:
            current = place.parent
            made += make_folders(place.parent)
        for number, draft in unnamed:
            draft.unlink(missing_ok=True)  # of a process killed here that had our number
            _give_name(number, draft)
        for current, draft in zip(places, drafts, strict=True):
            draft.replace(current)
        WRITTEN_FILES.extend(targets)
    except BaseException as error:
        _roll_back(drafts, made)
        if isinstance(error, OSError):
            raise HeadwayError(f"{current}: cannot write: {error.strerror or error}") from error
        raise
    finally:
        for number, _ in unnamed:
            os.close(number)
    return targets


def _nearest_folder(folder: Path) -> Path:
    """Return the folder, or where it is missing the one above it in which it will be made."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(None, "is not a folder")
    return there


def _open_unnamed(folder: Path) -> int | None:
    """Open a file without a name on the disk of a folder; None: the system cannot do that."""
    if not hasattr(os, "O_TMPFILE") or not OPEN_FILES.exists():
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except OSError:  # whatever it is, files with names meet it too and tell it
        return None


def _give_name(number: int, path: Path) -> None:
    """Link an open file without a name to a name."""
    links = os.open(OPEN_FILES, os.O_RDONLY)
    try:  # relative to a folder: else Python's `os.link` would link the symbolic link itself
        os.link(str(number), path, src_dir_fd=links, follow_symlinks=True)
    finally:
        os.close(links)


def make_folders(folder: Path) -> list[Path]:
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


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a folder and keep other commands that lock it out; take it back if it stays empty.

    The lock is the system's, so it ends with this process however that ends. Where the system
    has none (Windows, some network disks) nobody is kept out. HeadwayError if another has it.
    """
    try:
        made = make_folders(folder)
        number = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise HeadwayError(f"{folder}: cannot write: {error.strerror or error}") from error
    try:
        _lock(number, folder)
        yield
    finally:
        if _is_open(number, folder):  # else it was moved, and what has its name now is another's
            _roll_back([], made)  # folders that are not empty stay
        os.close(number)


def _is_open(number: int, folder: Path) -> bool:
    """Return whether an open folder still has its name."""
    try:
        return os.path.samestat(os.fstat(number), folder.stat())
    except OSError:
        return False


def _lock(number: int, folder: Path) -> None:
    """Lock an open folder."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HeadwayError(
            f"{folder}: another command is writing there; wait for it, or give another --out"
        ) from None
    except OSError:
        return  # a disk without locks


def resolve(path: str | Path, folder: Path) -> Path:
    """Find a file beside the scenario, else in the folder that HEADWAY_DATA names.

    Where it is in neither, return where it would be beside the scenario.
    """
    beside = folder / Path(path).expanduser()
    shared = os.environ.get("HEADWAY_DATA")
    if shared and not beside.exists() and (elsewhere := Path(shared) / path).exists():
        return elsewhere
    return beside


@cache
def read_table(module: str, name: str) -> list[dict[str, str]]:
    """Read a table (CSV with names of columns) in the folder of a module, its `__file__`.

    It is read once: all that ask have the same rows, and change none.
    """
    return [*csv.DictReader(Path(module).with_name(name).read_text("utf-8").splitlines())]
