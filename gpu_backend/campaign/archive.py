"""A campaign's folder in one file, which is all that may come back from a machine."""

import io
import json
import tarfile
import zlib
from pathlib import Path
from typing import Any

from simulator.util.errors import HeadwayError
from simulator.util.files import write_atomic

MAX_BYTES = (
    15 << 20
)  # of an archive, so that it can leave a machine that gives back small files alone


def write_archive(folder: Path, path: Path, most: int = MAX_BYTES) -> list[str]:
    """Pack a folder, also one whose files grow; return the names of files left out.

    The archive appears whole or not at all, in place of the one before. Where it would be larger
    than `most` bytes, the largest files stay out.
    """
    files = {}
    for file in sorted(folder.rglob("*")):
        try:
            if file.is_file():
                files[file.relative_to(folder).as_posix()] = file.read_bytes()
        except OSError:  # it went away while we looked
            continue
    left_out: list[str] = []
    while len(packed := _pack(files)) > most:
        largest = max(files, key=lambda name: len(files[name]))
        left_out.append(largest)
        del files[largest]
    write_atomic(path, packed)
    return left_out


def _pack(files: dict[str, bytes]) -> bytes:
    """Give the bytes of a tar.gz."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz", compresslevel=3) as out:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            out.addfile(entry, io.BytesIO(content))
    return whole.getvalue()


def unpack_archive(path: Path, folder: Path) -> None:
    """Unpack what `write_archive` wrote; HeadwayError where it is damaged."""
    try:
        with tarfile.open(path, "r:gz") as packed:
            packed.extractall(folder, filter="data")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise HeadwayError(f"{path}: is no archive of a campaign: {error}") from None


def read_record(path: Path, name: str) -> dict[str, Any]:
    """Read a campaign's record out of its archive; HeadwayError where it is damaged."""
    try:
        with tarfile.open(path, "r:gz") as packed:
            file = packed.extractfile(name)
            record = json.load(file) if file is not None else None
    except (OSError, EOFError, zlib.error, tarfile.TarError, KeyError, ValueError) as error:
        raise HeadwayError(f"{path}: is no archive of a campaign: {error}") from None
    if not isinstance(record, dict):
        raise HeadwayError(f"{path}: is no archive of a campaign: {name} is no record of one")
    return record
