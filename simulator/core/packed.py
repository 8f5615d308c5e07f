"""Columns of a log that nobody changes any more, a page at a time, in fewer bytes.

Whole numbers take the narrowest type that holds a page's. A float's bits, read as a whole number,
ascend with it: of times in a list, which ascend, the distances are kept. A step begins where the
one before it ended, but for those that `starts` has.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

PAGE = 1024  # rows
KINDS = [np.dtype(f"u{next(n for n in (1, 2, 4, 8) if bits <= 8 * n)}") for bits in range(65)]
"""The types of whole numbers of so many bits."""

Rows = npt.NDArray[np.void]
Values = npt.NDArray[Any]


class Distances(NamedTuple):
    """Times of a page that ascend, as distances of their bits: a few bytes of each are not 0."""

    first: int  # the bits of the first
    bytes: Values  # a row for each, the lowest byte first


def pack_column(values: Values) -> Values | Distances:
    """Pack a column of times or of whole numbers; not of an empty page."""
    if values.dtype.kind != "f":
        return _pack(values)
    bits = values.copy().view(np.int64)
    distances = np.diff(bits, prepend=bits[:1])
    if bits[0] < 0 or distances.min() < 0:
        return bits.view(np.float64)
    width = (int(distances.max()).bit_length() + 7) // 8
    return Distances(int(bits[0]), distances.view(np.uint8).reshape(-1, 8)[:, :width].copy())


def _pack(values: Values) -> Values:
    """Pack whole numbers; times are copied: those of rows are read too often."""
    if values.dtype.kind == "f":
        return values.copy()
    whole = values.view(f"u{values.itemsize}")  # of one below 0 all bytes are kept
    return whole.astype(KINDS[int(whole.max()).bit_length()])


def unpack_column(column: Values | Distances) -> Values:
    """Return the values again."""
    if not isinstance(column, Distances):
        return column
    whole = np.zeros((len(column.bytes), 8), np.uint8)
    whole[:, : column.bytes.shape[1]] = column.bytes
    bits = whole.view(np.int64)[:, 0]
    bits[0] = column.first
    return np.cumsum(bits).view(np.float64)


def first_of(column: Values | Distances) -> float:
    """Return the first of a page of times."""
    if isinstance(column, Distances):
        return float(np.int64(column.first).view(np.float64))
    return float(column[0])


class Page(NamedTuple):
    """A page of rows."""

    columns: dict[str, Values]
    starts: Values | None  # which of the rows do not begin where the one before ended


def pack(rows: Rows) -> Page:
    """Pack a page of rows."""
    names, starts = rows.dtype.names or (), None
    columns = {name: rows[name] for name in names}
    if "end" in names and "start" in names:
        apart = rows["start"][1:] != rows["end"][:-1]
        starts = np.flatnonzero(np.append(True, apart)).astype(np.uint16)
        columns["start"] = rows["start"][starts]
    return Page({name: _pack(column) for name, column in columns.items()}, starts)


def unpack(page: Page, name: str) -> Values:
    """Return a column of a page of rows."""
    values = page.columns[name]
    if name != "start" or page.starts is None:
        return values
    whole = np.empty(PAGE)
    whole[1:] = page.columns["end"][:-1]
    whole[page.starts] = values
    return whole


class PackedRows:
    """Packed pages and the rows that follow, as an array has them.

    By the name of a column, a slice of rows, or their numbers: of these, rows come unpacked.
    """

    def __init__(self, pages: Sequence[Page], tail: Rows) -> None:
        self._pages, self._tail = pages, tail
        self.dtype = tail.dtype

    def __len__(self) -> int:
        return PAGE * len(self._pages) + len(self._tail)

    def __iter__(self) -> Iterator[np.void]:
        for at in range(0, len(self), PAGE):
            yield from self[at : at + PAGE]

    def __getitem__(self, key: Any) -> Values:
        if isinstance(key, str):
            return self._column(key)
        if isinstance(key, slice):
            begin, end, step = key.indices(len(self))
            if step != 1:
                return self[np.arange(begin, end, step)]
            sub, first = self._between(begin, end)
            rows = np.empty(len(sub), self.dtype)
            for name in self.dtype.names or ():
                rows[name] = sub._column(name)
            return rows[begin - first : max(end, begin) - first]
        numbers = np.asarray(key)
        if numbers.dtype == bool:
            numbers = np.flatnonzero(numbers)
        if not numbers.size:
            return np.empty(numbers.shape, self.dtype)
        numbers = np.where(numbers < 0, numbers + len(self), numbers)
        sub, first = self._between(int(numbers.min()), int(numbers.max()) + 1)
        found = np.empty(numbers.shape, self.dtype)
        for name in self.dtype.names or ():
            found[name] = sub._column(name)[numbers - first]
        return found

    def _column(self, name: str) -> Values:
        whole = np.empty(len(self), self.dtype[name])
        for at, page in zip(count(0, PAGE), self._pages, strict=False):
            whole[at : at + PAGE] = unpack(page, name)
        whole[PAGE * len(self._pages) :] = self._tail[name]
        return whole

    def _between(self, begin: int, end: int) -> tuple["PackedRows", int]:
        """Return the pages that these rows are in, and the number of their first row."""
        first = min(begin // PAGE, len(self._pages))
        pages = self._pages[first : -(-end // PAGE)]
        tail = self._tail if end > PAGE * len(self._pages) else self._tail[:0]
        return PackedRows(pages, tail), PAGE * first
