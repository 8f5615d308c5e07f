"""Tables in CSV: whole columns at once give what Python's own csv and datetime give."""

import csv
import datetime as dt
import io
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.util.errors import HeadwayError
from simulator.workload.traces import read_trace
from simulator.workload.traces.documents import line_blocks
from simulator.workload.traces.read import read_table

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
STAMPS = st.datetimes(
    min_value=dt.datetime(1990, 1, 1), max_value=dt.datetime(2099, 12, 31)
) | st.sampled_from([dt.datetime(2024, 2, 29), dt.datetime(1999, 12, 31, 23, 59, 59, 1)])
ROWS = st.tuples(STAMPS, st.integers(1, 10**6), st.integers(1, 10**6), st.booleans())


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("csv") / "trace.csv"


@given(rows=st.lists(ROWS, min_size=1, max_size=20), windows=st.booleans(), quoted=st.booleans())
def test_in_bulk_and_row_by_row_give_the_same(trace, rows, windows, quoted):
    """And what datetime gives."""
    end = "\r\n" if windows else "\n"
    mark = '"' if quoted else ""
    text = end.join(
        f"{when}{'00' if when.microsecond else ''}{'+00:00' * utc},{mark}{a}{mark},{b}"
        for when, a, b, utc in rows
    )
    trace.write_text(f"{HEAD}{end}{text}", "utf-8", newline="")
    table = read_table(trace, "azure", {})
    epoch = dt.datetime(1970, 1, 1)
    times = [(when - epoch) // dt.timedelta(microseconds=1) * 1000 for when, *_ in rows]
    assert table.time.tolist() == times
    assert table.prompt.tolist() == [a for _, a, _, _ in rows]
    assert table.output.tolist() == [b for _, _, b, _ in rows]


LINES = st.sampled_from(
    ["2023-11-16 18:15:46.68,374,44", "2024-02-29 00:00:00+00:00,1,1", "1.5,2,3", "7,8,9"]
)
TYPOS = st.tuples(st.integers(0, 40), st.sampled_from([*"09,-: .eE+TZ_\u0663", "", '"', "nan"]))


@given(lines=st.lists(st.tuples(LINES, st.none() | TYPOS), min_size=1, max_size=4))
def test_nothing_passes_that_is_no_whole_number(trace, lines):
    """What is taken has the values that the csv module and int find in it."""
    rows = [
        line if typo is None else line[: typo[0]] + typo[1] + line[typo[0] + 1 :]
        for line, typo in lines
    ]
    trace.write_text("\n".join(["arrival,prompt_tokens,output_tokens", *rows]), "utf-8")
    with suppress(HeadwayError):
        table = read_table(trace, "requests", {})
        cells = [row for row in csv.reader(io.StringIO("\n".join(rows))) if "".join(row).strip()]
        cells = [[int(float(cell)) for cell in row[1:]] for row in cells]
        cells = [row for row in cells if row[1]]
        assert table.output.tolist() == [output for _, output in cells]
        assert table.prompt.tolist() == [max(prompt, 1) for prompt, _ in cells]


def test_columns_in_any_order_among_others(put):
    """Blank lines, blanks around values and the last line's end do not matter."""
    work = read_trace(put("num_prefill_tokens,num_decode_tokens,x,arrived_at\n"
                          "5,6,x,0.5\r\n\n 7 ,8,,1e1\n  \n"))  # fmt: skip
    assert work.arrival.tolist() == [0.0, 9.5]
    assert work.prompt_tokens.tolist() == [5, 7]
    assert work.output_tokens.tolist() == [6, 8]


@pytest.mark.parametrize("size", [1 << 22, 8])
def test_a_cell_of_several_lines(put, monkeypatch, size):
    """As texts have it, and names; what comes behind it has its own line, in any block."""
    monkeypatch.setattr(line_blocks, "__defaults__", (size,))
    rows = '0,5,3,"one\n""two"", three\nfour",a\n1,5,3,none,"b\nc"\n2,x,3,,a\n'
    text = f"arrival,prompt_tokens,output_tokens,text,client\n{rows}"
    assert read_trace(put(text.replace("x", "7"))).client == ["a", "b\nc", "a"]
    path = put(text)
    with pytest.raises(HeadwayError) as caught:
        read_trace(path)
    assert caught.value.messages == [
        f"{path}:7: prompt_tokens: 'x' is not a whole number such as 64 (tokens)"
    ]


def test_a_quote_that_is_never_closed_is_told_where_it_begins(put):
    path = put(
        'arrival,prompt_tokens,output_tokens,text\n0,5,3,a\n1,5,3,"b\n' + "2,5,3,c\n" * 20_000
    )
    with pytest.raises(HeadwayError, match=":3: line: cannot be split"):
        read_trace(path)


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_other_marks_than_commas(put, mark):
    """Commas are in decimals where semicolons part the values."""
    decimal = "," if mark == ";" else "."
    rows = [["t", "n", "m"], ["1", f"3{decimal}0", "4"], ["2", "5", "6"]]
    text = "\n".join(mark.join(row) for row in rows)
    work = read_trace(put(text), columns="arrival=t,prompt=n,output=m")
    assert work.prompt_tokens.tolist() == [3, 5]


@pytest.mark.parametrize("row", ['0,"1,024",5,7', '0,9,"1,024",7', '0,9,5,"1,024"', '"0,5",9,5,7'])
@pytest.mark.parametrize(
    "field", ["max_tokens", "priority", "prefix_tokens", "num_images", "cached"]
)
def test_a_comma_in_a_number_is_refused(put, row, field):
    """It is no second number, in whatever column."""
    path = put(f"arrival,prompt_tokens,output_tokens,{field}\n{row}\n1,9,5,7\n")
    columns = f"arrival=arrival,prompt=prompt_tokens,output=output_tokens,{field}={field}"
    with pytest.raises(HeadwayError, match=r":2: .*comma may mark thousands or decimals"):
        read_trace(path, columns=columns.replace("num_images=", "images="))


def test_a_comma_in_a_number_of_json_is_refused(put):
    path = put('{"arrival": "0", "prompt_tokens": "1,024", "output_tokens": "5"}\n' * 2)
    with pytest.raises(HeadwayError, match="1: prompt_tokens: '1,024' is not a whole number"):
        read_trace(path)


def test_commas_where_semicolons_part_the_values(put):
    """Decimals of times are read; a count that may have thousands is refused."""
    head = "arrival;prompt_tokens;output_tokens\n0,5;9;5\n1,75;9;5\n"
    assert read_trace(put(head)).arrival.tolist() == [0, 1.25]
    with pytest.raises(HeadwayError, match=":4: prompt_tokens: '1,000' is not a whole number"):
        read_trace(put(f"{head}2,25;1,000;5\n"))
