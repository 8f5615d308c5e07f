"""Lines of a trace's file, plain or packed by gzip."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from simulator.util.errors import HeadwayError
from simulator.util.files import check_regular

GZIP = b"\x1f\x8b"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
BOM = "\ufeff"
BLOCK = 1 << 22  # bytes read at a time, so that a long file costs its columns and no more
FIRST_BLOCK = 1 << 16  # likewise, where the first line alone is wanted


def line_blocks(path: Path, size: int = BLOCK) -> Iterator[tuple[int, str]]:
    """Yield whole lines, `size` bytes or more at a time, each time with the number of the first.

    A gzip file is known by its first bytes, not by its name. Every block ends with a newline,
    even where the file does not.
    """
    number = 1
    check_regular(path)  # besides, a trace is read more than once
    try:
        with path.open("rb") as raw:
            begins = raw.read(2)
            if begins in UTF_16:
                raise HeadwayError(f"{path}:1: line: is UTF-16; write it as UTF-8")
            if path.suffix.lower() == ".parquet":
                raise HeadwayError(f"{path}: is not Parquet: does not begin with PAR1")
            packed = begins == GZIP
            raw.seek(0)
            file = gzip.GzipFile(fileobj=raw) if packed else raw
            while data := file.read(size) + file.readline():
                text = data.decode("utf-8", errors="replace").removesuffix("\n") + "\n"
                yield number, text.removeprefix(BOM) if number == 1 else text
                number += text.count("\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise HeadwayError(f"{path}:{number}: gzip: cut short or damaged: {error}") from None
    except OSError as error:
        raise HeadwayError(f"{path}: cannot be read: {error.strerror}") from None


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, each with its number and without its end."""
    for number, text in line_blocks(path):
        for i, line in enumerate(text.split("\n"), number):
            if line := line.strip():
                yield i, line


def first_line(path: Path) -> tuple[int, str]:
    """Give the first line that is not blank and its number, or raise HeadwayError."""
    for number, text in line_blocks(path, FIRST_BLOCK):
        if body := text.lstrip():
            blank = text.count("\n", 0, len(text) - len(body))
            return number + blank, body[: body.find("\n")].rstrip()
    raise HeadwayError(f"{path}:1: line: the file is empty")
