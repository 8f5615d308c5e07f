"""The text of a file, plain or packed: what its first bytes say of packing and encoding."""

import bz2
import codecs
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from simulator.util.environment import need_package
from simulator.util.errors import MappingError, TraceError, one_line
from simulator.workload.traces.fields import NAMES, PATTERNS

PACKERS, OTHERS, MARKS = (
    {begin.encode("latin-1"): what for begin, what in NAMES[kind].items()}
    for kind in ("packed", "no text", "marks")
)
"""How packed files begin, and by what they are packed; how files begin that are not read; marks of
byte order and encoding."""
OPEN: dict[str, Any] = {"gzip": gzip.open, "bz2": bz2.open, "lzma": lzma.open}
TAR = b"ustar"
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
_ENCODINGS: dict[Path, str] = {}


def take_encoding(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Note in which `encoding` a file is from now on, and return the other options.

    MappingError where Python has none of that name.
    """
    others = dict(given)
    if (name := others.pop("encoding", None)) is not None:
        try:
            "".encode(name)
        except LookupError:
            raise MappingError("encoding", f"{name!r} is none that Python knows", "value") from None
        _ENCODINGS[path] = name
    return others


def text_blocks(path: Path, size: int) -> Iterator[str]:
    """Yield whole lines of a file, `size` bytes or more at a time.

    TraceError with the line for what is damaged, is no text or has another encoding.
    """
    line, packer = 1, ""
    try:
        with path.open("rb") as raw:
            begins = raw.peek(8)[:8]
            packer = next((name for mark, name in PACKERS.items() if begins.startswith(mark)), "")
            file = _open(path, raw, packer)
            head = file.peek(512)[:512]
            _check_text(path, head)
            marked = next((name for mark, name in MARKS.items() if head.startswith(mark)), None)
            encoding = _ENCODINGS.get(path) or marked or "utf-8"
            for text in _decoded(file, encoding, size):
                yield text
                line += text.count("\n")
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        what = f"byte 0x{error.object[error.start]:02x} is not {encoding.upper()}"
        if 0 in error.object[:512]:
            what += " beside NUL bytes: no text, if none of another encoding"
        what += "; say its encoding, as --encoding cp1252, in a scenario "
        what += "trace: {encoding: cp1252}, or write it as UTF-8"
        raise TraceError(path, what, line, "line") from None
    except (*DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise TraceError(path, f"cannot be read: {error.strerror}") from None
        why = f"cut short or damaged: {one_line(error)}"
        raise TraceError(path, why, line, packer) from None


def _decoded(file: Any, encoding: str, size: int) -> Iterator[str]:
    """Yield text; UTF-8 by the block, which is faster."""
    if codecs.lookup(encoding).name in {"utf-8", "utf-8-sig"}:
        while data := file.read(size) + file.readline():
            yield data.decode("utf-8")
        return
    reader = io.TextIOWrapper(file, encoding, newline="\n")
    while text := reader.read(size) + reader.readline():
        yield text


def _open(path: Path, raw: IO[bytes], packer: str) -> Any:
    """Return a buffered file of the bytes that are packed in another, or that file."""
    if packer == "zip":
        return _open_zip(path, raw)
    if packer == "zstd":
        need_package(str(path), "parquet", "pyarrow")
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))
    return OPEN[packer](raw) if packer else raw


def _open_zip(path: Path, raw: IO[bytes]) -> Any:
    archive = zipfile.ZipFile(raw)
    names = [one for one in archive.namelist() if not one.endswith("/")]
    files = [n for n in names if not PATTERNS["beside a trace"].search(n)]
    if "xl/workbook.xml" in names:
        raise TraceError(path, "is a workbook of Excel; write its table as CSV (UTF-8)")
    if len(files) != 1:
        named = ", ".join(files[:5])
        raise TraceError(path, f"has {len(files)} files in it ({named}); unpack the one meant")
    try:
        return archive.open(files[0])
    except (RuntimeError, NotImplementedError) as error:  # a password, or another way to pack
        raise TraceError(path, f"cannot be unpacked: {one_line(error)}") from None


def _check_text(path: Path, head: bytes) -> None:
    """Refuse what is known to be no text."""
    for mark, what in OTHERS.items():
        if head.startswith(mark):
            raise TraceError(path, f"is {what}")
    for mark, packer in PACKERS.items():
        if head.startswith(mark):
            raise TraceError(path, f"is packed twice: unpack the {packer} file that is in it")
    if head[257:262] == TAR:
        raise TraceError(path, "is a tar archive; unpack it")
    marked = path in _ENCODINGS or head.startswith(tuple(MARKS))
    if 3 * head.count(0) > len(head) and not marked:
        near = "utf-16-le" if head[0] else "utf-16-be"
        what = "has NUL bytes: packed in another way, or in an encoding to be named, "
        raise TraceError(path, f"{what}as encoding: {near} (--encoding {near})", 1, "line")
