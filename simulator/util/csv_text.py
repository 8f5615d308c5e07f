"""Columns to CSV text, many rows at a time.

Every cell is laid out at the full width of its column in a matrix of characters, unused places
zero; leaving the zeros out gives the text. Numbers never become Python objects.

Why not pandas or pyarrow: a million rows of ten columns take 1.0 s here, 10 s by `to_csv` with
`float_format="%.9f"` and 1.4 s by pyarrow's CSV writer. That one is no dependency, cannot fix the
number of decimals (the file is a fifth larger) and quotes every word.
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Chars = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

DECIMALS = 9  # of a float: a nanosecond, where the column is in seconds
FORMULA = re.compile(r"'*\s*[=+@\-\t\r\n\uff1d\uff0b\uff20\uff0d]")
"""How a text begins that a spreadsheet takes for a formula, or that is escaped already."""
LARGEST = 9.0e18  # an int64 holds it
_NUMBERS = np.arange(10_000, dtype=np.int16)[:, None]
_PLACES = np.array([1000, 100, 10, 1], np.int16)
_DIGITS = (_NUMBERS // _PLACES % 10 + ord("0")).astype(np.uint8)
_QUADS = _DIGITS.view(np.uint32).ravel()
_FIRST_QUADS = (_DIGITS * ((_NUMBERS >= _PLACES) | (_PLACES == 1))).view(np.uint32).ravel()
"""Four digits each; the latter without leading zeros, as the first digits of a number."""
_ZERO = np.frombuffer(f"{0:.{DECIMALS}f}".encode(), np.uint8)[None]
_POINT = np.frombuffer(b".", np.uint8)[None]


@dataclass(slots=True, eq=False)
class Words:
    """A column of words that repeat."""

    codes: Ints  # index into names; -1: an empty cell
    names: Sequence[str]

    def __getitem__(self, rows: slice) -> "Words":
        return Words(self.codes[rows], self.names)

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(slots=True, eq=False)
class Signed:
    """A column of integers that may be negative, and has no empty cell."""

    values: Ints

    def __getitem__(self, rows: slice) -> "Signed":
        return Signed(self.values[rows])

    def __len__(self) -> int:
        return len(self.values)


Numbers = Ints | Floats
"""A column of integers (negative: an empty cell) or of floats >= 0 (NaN: an empty cell)."""
Column = Numbers | Words | Signed
"""A column of numbers or of words."""


def encode_rows(columns: Sequence[Column]) -> bytes:
    """Return the rows of columns of one length as CSV text, floats with DECIMALS decimals.

    A column with values above 9e9 has fewer: as many as its largest has digits of worth.
    Raises ValueError for a float that is negative, infinite or above LARGEST, and for a word with
    a NUL or that UTF-8 lacks.
    """
    cells = [_cells(column) for column in columns]
    rows = len(columns[0])
    width = sum(part.shape[1] for cell in cells for part in cell) + len(cells)
    matrix = np.empty((rows, width), np.uint8)
    at = 0
    for cell in cells:
        for part in cell:
            end = at + part.shape[1]
            matrix[:, at:end] = part
            at = end
        matrix[:, at] = ord(",")
        at += 1
    matrix[:, -1] = ord("\n")
    return matrix.tobytes().translate(None, b"\0")


def encode_header(names: Sequence[str]) -> bytes:
    """Return the first line."""
    return _quoted(names) + b"\n"


def escape_formula(text: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would run as a formula.

    The cure is OWASP's against CSV injection: a spreadsheet shows the rest as text.
    """
    return f"'{text}" if FORMULA.match(text) else text


def unescape_formula(cell: Any) -> Any:
    """Return the text that `escape_formula` made this cell of; what is no text as it is."""
    escaped = isinstance(cell, str) and cell[:1] == "'" and FORMULA.match(cell)
    return cell[1:] if escaped else cell


def _cells(column: Column) -> Sequence[Chars]:
    """Lay out a column, in parts that stand side by side; a part of one row is that of all."""
    if isinstance(column, Words):
        return (_words(column),)
    if isinstance(column, Signed):
        minus = np.where(column.values < 0, ord("-"), 0).astype(np.uint8)[:, None]
        return minus, _integers(np.abs(column.values))
    if column.dtype.kind == "f":
        return _decimals(column.astype(np.float64, copy=False))
    return (_integers(column.astype(np.int64, copy=False)),)


def _words(column: Words) -> Chars:
    """Lay out words; the last line of the table is the empty cell."""
    encoded = [_quoted([name]) for name in column.names]
    if any(b"\0" in cell for cell in encoded):
        raise ValueError("a name has the character NUL")
    table = np.array([*encoded, b""], dtype=f"S{max(map(len, encoded), default=1) or 1}")
    return table.view(np.uint8).reshape(len(table), -1)[column.codes]


def _integers(values: Ints) -> Chars:
    """Lay out integers without leading zeros; negative ones as nothing."""
    width = len(str(values.max(initial=0)))
    quads = -(-width // 4)
    out = np.empty((len(values), quads), np.uint32)
    small = width < 10 and values.min(initial=0) >= -1
    rest = values.astype(np.int32) if small else values  # half as much to move
    least = 0  # the last digit is there even of 0
    for place in reversed(range(1, quads)):
        high = rest // 10_000
        quad = rest - high * 10_000
        first = _FIRST_QUADS[quad] * (rest >= least)
        out[:, place] = np.where(high > 0, _QUADS[quad], first)
        rest, least = high, 1
    out[:, 0] = _FIRST_QUADS.take(rest, mode="clip") * (rest >= least)
    return out.view(np.uint8)[:, 4 * quads - width :]


def _decimals(values: Floats) -> Sequence[Chars]:
    """Lay out numbers with DECIMALS decimals; NaN as nothing."""
    if not values.any():  # what hardly ever happens, such as preemption, has whole columns of it
        return (_ZERO,)
    empty = np.isnan(values)
    gaps = bool(empty.any())
    known = np.where(empty, 0.0, values) if gaps else values
    most = known.max(initial=0.0)
    if known.min(initial=0.0) < 0.0 or most > LARGEST:
        raise ValueError(f"not every value lies in 0 to {LARGEST:g}")
    decimals = DECIMALS
    while most * 10**decimals > LARGEST:
        decimals -= 1
    scaled = np.rint(known * 10**decimals).astype(np.int64)
    whole = scaled // 10**decimals
    head = _integers(np.where(empty, -1, whole) if gaps else whole)
    if not decimals:
        return (head,)
    tail = _digits(scaled - whole * 10**decimals, decimals)
    if not gaps:
        return head, _POINT, tail
    tail[empty] = 0
    return head, np.where(empty, 0, _POINT[0]).astype(np.uint8)[:, None], tail


def _digits(values: Ints, width: int) -> Chars:
    """Return numbers of at most `width` digits, 9 or fewer, with leading zeros."""
    quads = -(-width // 4)
    out = np.empty((len(values), quads), np.uint32)
    rest = values.astype(np.int32)
    for place in reversed(range(quads)):
        high = rest // 10_000
        out[:, place] = _QUADS.take(rest - high * 10_000, mode="clip")  # unlike [], unchecked
        rest = high
    return out.view(np.uint8)[:, 4 * quads - width :]


def _quoted(fields: Sequence[str]) -> bytes:
    """Quote as the csv module does, where that is needed."""
    line = io.StringIO()
    csv.writer(line).writerow(map(escape_formula, fields))
    return line.getvalue().removesuffix("\r\n").encode()
