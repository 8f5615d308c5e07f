"""Whole columns of CSV at once give what line by line gives."""

import datetime as dt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.util.errors import HeadwayError
from simulator.workload.traces import read_trace
from simulator.workload.traces.csv_columns import (
    Column,
    read_block,
    read_lines,
    seconds,
    timestamps,
    tokens,
)
from simulator.workload.traces.format import Problems

AZURE = dict(enumerate((timestamps("a"), tokens("b"), tokens("c"))))
BURSTGPT = dict(enumerate((seconds("a"), tokens("b"), tokens("c", least=0))))


def slow(text: str, wanted: dict[int, Column]) -> list[list[float]]:
    """Read line by line, without a problem."""
    problems = Problems(Path("rows"))
    columns = read_lines(text, 1, 3, wanted, problems)
    assert not problems.count
    return [column.tolist() for column in columns]


STAMPS = st.datetimes(
    min_value=dt.datetime(1990, 1, 1), max_value=dt.datetime(2099, 12, 31)
) | st.sampled_from([dt.datetime(2024, 2, 29), dt.datetime(1999, 12, 31, 23, 59, 59, 1)])
ROWS = st.tuples(STAMPS, st.integers(1, 10**6), st.integers(1, 10**6), st.booleans())


@given(st.lists(ROWS, min_size=1, max_size=20), st.booleans())
def test_in_bulk_and_line_by_line_give_the_same(rows, windows):
    """And what datetime gives."""
    end = "\r\n" if windows else "\n"
    text = end.join(
        f"{str(when) + ('00' if when.microsecond else '')}{'+00:00' * utc},{a},{b}"
        for when, a, b, utc in rows
    )
    epoch = dt.datetime(1970, 1, 1)
    times = [(when - epoch) // dt.timedelta(microseconds=1) * 1000 for when, *_ in rows]
    expected = [times, [a for _, a, _, _ in rows], [b for _, _, b, _ in rows]]
    assert slow(text, AZURE) == expected
    assert [column.tolist() for column in read_block(text, 3, AZURE)] == expected


LINES = st.sampled_from(
    ["2023-11-16 18:15:46.68,374,44", "2024-02-29 00:00:00+00:00,1,1", "1.5,2,3"]
)
TYPOS = st.tuples(st.integers(0, 40), st.sampled_from([*"09,-: .eE+TZ_", "", "\r", '"', "nan"]))


@given(st.lists(st.tuples(LINES, st.none() | TYPOS), min_size=1, max_size=4), st.booleans())
def test_in_bulk_nothing_passes_that_line_by_line_is_refused(lines, stamped):
    """Whatever the bulk conversion lets through is what the line by line reader says, too."""
    text = "\n".join(
        line if typo is None else line[: typo[0]] + typo[1] + line[typo[0] + 1 :]
        for line, typo in lines
    )
    wanted = AZURE if stamped else BURSTGPT
    try:
        fast = read_block(text, 3, wanted)
    except ValueError:
        return
    assert [column.tolist() for column in fast] == slow(text, wanted)


def test_columns_in_any_order_among_others() -> None:
    """By their places in the line; blank lines and the last line's end do not matter."""
    wanted = {3: seconds("time"), 0: tokens("in"), 1: tokens("out")}
    text = "5,6,x,0.5\r\n\n7,8,,1e1\n\n"
    found = [column.tolist() for column in read_block(text, 4, wanted)]
    assert found == [[0.5, 10.0], [5, 7], [6, 8]]
    problems = Problems(Path("rows"))
    assert [c.tolist() for c in read_lines(text, 1, 4, wanted, problems)] == found
    with pytest.raises(ValueError):  # noqa: PT011
        read_block('5,6,"x",0.5\n', 4, wanted)


def test_a_cell_of_several_lines_is_told_once(tmp_path: Path) -> None:
    """Its first line is named; the lines that belong to it are no requests of their own."""
    trace = tmp_path / "log.csv"
    rows = '0,5,3,"one\ntwo, three\nfour"\n1,5,3,none\n2,x,3,\n'
    trace.write_text(f"arrival,prompt,output,text\n{rows}", "utf-8")
    named = {name: name for name in ("arrival", "prompt", "output")}
    with pytest.raises(HeadwayError) as caught:
        read_trace(trace, columns=named)
    first, second = caught.value.messages
    assert first.startswith(f"{trace}:2: line: a quoted cell goes on in the next")
    assert second == f"{trace}:6: prompt: 'x' is not a whole number"
