"""Columns to CSV text: every cell reads back, empty ones are empty, nothing is clamped."""

import csv
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.util.csv_text import (
    Signed,
    Words,
    encode_header,
    encode_rows,
    escape_formula,
    unescape_formula,
)

cells = st.integers(0, 2**62)
seconds = st.one_of(st.none(), st.floats(0, 8.9e9), st.floats(0, 1))
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)


@given(st.lists(st.tuples(cells, seconds, words), min_size=1, max_size=20))
def test_rows_read_back(rows: list[tuple[int, float | None, str]]) -> None:
    """Python's csv reader finds the integers, the floats to the nanosecond, and any word."""
    integers, floats, names = zip(*rows, strict=True)
    words = sorted(set(names))
    times = np.array([np.nan if f is None else f for f in floats])
    codes = np.array([words.index(name) for name in names])
    text = encode_rows([np.array(integers), times, Words(codes, words)]).decode()
    back = list(csv.reader(io.StringIO(text, newline="")))
    assert [int(row[0]) for row in back] == list(integers)
    assert [unescape_formula(row[2]) for row in back] == list(names)
    for cell, value in zip((row[1] for row in back), floats, strict=True):
        if value is None:
            assert cell == ""
        else:
            assert float(cell) == pytest.approx(value, rel=1e-15, abs=5.1e-10)
            assert cell[-10] == "."


def test_empty_cells() -> None:
    """A negative integer, a NaN and the word -1 are empty; no rows are no text."""
    columns = [np.array([-1, 12]), np.array([np.nan, 0.5]), Words(np.array([-1, 0]), ["a"])]
    assert encode_rows(columns) == b",,\n12,0.500000000,a\n"
    assert encode_rows([c[slice(0)] for c in columns]) == b""
    assert encode_header(["a", "b"]) == b"a,b\n"


STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


@given(st.text(), st.sampled_from(["", *STARTS]), st.sampled_from(["", " ", "'", "''", "'\n"]))
def test_no_text_is_a_formula_and_each_reads_back(text: str, start: str, before: str) -> None:
    cell = escape_formula(before + start + text)
    assert not cell.lstrip(" ").startswith(STARTS)
    assert unescape_formula(cell) == before + start + text


def test_signed_integers() -> None:
    """Of these -1 is a number like any other."""
    values = Signed(np.array([-1, 0, 12, -999_999_999]))
    assert encode_rows([values, np.arange(4)]) == b"-1,0\n0,1\n12,2\n-999999999,3\n"
    assert encode_rows([values[2:], np.arange(2)]) == b"12,0\n-999999999,1\n"


@pytest.mark.parametrize("value", [-1e-6, 1e19, np.inf])
def test_a_time_that_cannot_be_written_is_refused(value: float) -> None:
    """Nothing is clamped in silence."""
    with pytest.raises(ValueError, match="not every value lies in"):
        encode_rows([np.array([0.0, value])])


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (9e9, "9000000000.000000000"),
        (9.1e9, "9100000000.00000000"),
        (1e12, "1000000000000.000000"),
        (1e18, "1000000000000000000"),
    ],
)
def test_large_values_have_fewer_decimals(value: float, cell: str) -> None:
    """Such as the service of a client with a small weight; a float has no more digits."""
    text = encode_rows([np.array([value, np.nan, 0.5]), np.array([1, 2, 3])]).decode()
    first, empty, half = text.splitlines()
    assert (first, empty) == (f"{cell},1", ",2")
    decimals = len(cell.partition(".")[2])
    assert half == (f"{0.5:.{decimals}f},3")


def test_a_column_of_zeros() -> None:
    """It takes a short cut, to the same text; a cell that is empty is no zero."""
    zeros = np.zeros(2)
    assert encode_rows([zeros, np.array([3, 4])]) == b"0.000000000,3\n0.000000000,4\n"
    assert encode_rows([np.array([0.0, np.nan])]) == b"0.000000000\n\n"
    assert encode_rows([np.zeros(0)]) == b""
