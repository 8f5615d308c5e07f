"""Requests in columns of known names, or of names that are told."""

import gzip
import json
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cli.main import main
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError, HeadwayWarning, MappingError
from simulator.workload.traces import read_trace
from simulator.workload.traces.detect import detect_format
from simulator.workload.traces.fields import LONGEST, parse_columns, propose, source, units_in

OWN = "when,user name,n_prompt_tok,n_completion_tok,urgency\n"
ROWS = "1700000000.5,ann,100,20,1\n1700000001.25,bob,50,5,0\n"


def facts(workload):
    """Return times and lengths."""
    return (
        workload.arrival.tolist(),
        workload.prompt_tokens.tolist(),
        workload.output_tokens.tolist(),
    )


def test_the_proposal_works_when_it_is_pasted(put, capsys):
    """The refusal's one line is at most 160 characters, and what it says to try is taken."""
    path = put(OWN + ROWS, "own.csv")
    assert main(["trace", "describe", str(path)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert len(line.rstrip()) <= LONGEST
    option, value = line.rstrip().partition("; try ")[2].split(" ", 1)
    assert option == "--columns"
    assert main(["trace", "describe", str(path), option, value.strip("'")]) == 0
    assert "requests        2" in capsys.readouterr().out


@given(st.lists(st.text("abpromtencuil_ T", min_size=1, max_size=60), min_size=1, max_size=8))
def test_a_proposal_is_short_and_can_be_read(names):
    """Whatever the columns are called."""
    text = propose(names, "--columns ", LONGEST - 40)
    assert len(text) <= LONGEST - 40
    if text:
        columns = parse_columns(text.removeprefix("--columns ").strip("'"))
        assert {"prompt", "output"} <= columns.keys()


@pytest.mark.parametrize(
    ("columns", "arrivals"),
    [
        ("arrival=when,prompt=n_prompt_tok,output=n_completion_tok", [0, 0.75]),
        ("arrival=when:ms,prompt=n_prompt_tok,output=n_completion_tok", [0, 0.75e-3]),
        ({"prompt": "n_prompt_tok", "output": "n_completion_tok"}, [0, 0]),
    ],
)
def test_columns_as_told(put, columns, arrivals):
    """In a CSV and in JSON; without a time all arrive at once."""
    keys = OWN.strip().split(",")
    rows = [dict(zip(keys, line.split(","), strict=True)) for line in ROWS.splitlines()]
    lines = "\n".join(json.dumps(row) for row in rows)
    for text in (OWN + ROWS, lines, json.dumps(rows, indent=1), json.dumps({"all": rows})):
        found = facts(read_trace(put(text), columns=columns))
        assert found == (arrivals, [100, 50], [20, 5])


def test_labels_in_columns_as_told(put):
    """Whose a request is, how urgent, and how long its answer may be."""
    told = "prompt=n_prompt_tok,output=n_completion_tok,client=user name,priority=urgency"
    found = read_trace(put(OWN + ROWS), columns=told)
    assert found.client == ["ann", "bob"]
    assert found.priority.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("2026-01-01 00:00:01", "2026-01-01 00:00:02.5"),
        ("2026-01-01T00:00:01Z", "2026-01-01T01:00:02.5+01:00"),
        ("01/Jan/2026:00:00:01 +0000", "01/Jan/2026:00:00:02.5 +0000"),
        ("1767225601", "1767225602.5"),
        ("1767225601000", "1767225602500"),
        ("1767225601000000000", "1767225602500000000"),
        ("7", "8.5"),
    ],
)
def test_units_and_dates(put, start, end):
    """Dates, with a zone or in UTC; numbers since 1970 in s, ms, us, ns; others are seconds."""
    if start.startswith("01/"):  # web servers log whole seconds
        end = end.replace(".5", "")
    gap = 1.0 if start.startswith("01/") else 1.5
    rows = [{"timestamp": start, "prompt_tokens": 7, "completion_tokens": 3}]
    rows += [{"timestamp": end, "prompt_tokens": 8, "completion_tokens": 4}]
    csv = "timestamp,prompt_tokens,completion_tokens\n" + f"{start},7,3\n{end},8,4\n"
    for text in (csv, json.dumps(rows), "\n".join(map(json.dumps, rows))):
        path = put(text)
        assert detect_format(path) == "requests"
        assert facts(read_trace(path)) == ([0, gap], [7, 8], [3, 4])


def test_nanoseconds_are_exact():
    """A float would be off by hundreds of them."""
    assert units_in(1_700_000_000_000_000_001) == 1e9
    assert source("a", unit="ms").per_second == 1e3


def test_a_mapping_may_leave_out_lengths_of_known_names(put):
    rows = "".join(f"{500 * k},9,5\n" for k in range(3))
    work = read_trace(put(f"t,input_length,output_length\n{rows}"), columns="arrival=t:ms")
    assert facts(work) == ([0, 0.5, 1], [9] * 3, [5] * 3)
    with pytest.raises(HeadwayError, match=r"trace:1: lacks a column of each request's output"):
        read_trace(put(f"t,input_length,m\n{rows}"), columns="arrival=t:ms")


def test_databricks_dates_requests_by_their_request_time(put):
    """Elsewhere it is how long a request took, as nginx has it."""
    names = "databricks_request_id,request_time,input_token_count,output_token_count,requester"
    rows = "".join(f"a{k},2026-03-01T10:00:0{k}Z,9,5,ann\n" for k in range(2))
    assert facts(read_trace(put(f"{names}\n{rows}"))) == ([0, 1], [9, 9], [5, 5])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("x", "'x' must be FIELD=COLUMN, as arrival=start_ms"),
        ("promt=a,output=b", "promt: not a field; did you mean prompt?; there are arrival, "),
        ("arrival=a,arrival=b,prompt=n,output=m", "arrival: is given twice"),
        ("arrival=a,prompt=n,output=n", "prompt and output: are both 'n'"),
    ],
)
def test_a_wrong_mapping_is_told(put, text, wrong):
    with pytest.raises(MappingError, match="columns: ") as caught:
        read_trace(put(OWN + ROWS), columns=text)
    assert wrong in str(caught.value)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("timestamp,isl,osl\n0,5,5\nsoon,5,5\n", ":3: timestamp: 'soon' is not a number"),
        ("timestamp,isl,osl\n0,five,5\n", ":2: isl: 'five' is not a whole number"),
        ('{"timestamp":0,"isl":5,"osl":5}\n{"timestamp":1,"isl":5}\n', ":2: osl: missing"),
        ('[{"timestamp":0,"isl":5,"osl":5},\n{"timestamp":1,"isl":-5,"osl":5}]', ":2: isl: -5 is"),
        ('[{"timestamp":0,"isl":5,"osl":5},\n{"timestamp":"a","isl":5,"osl":5}]', ":2: timestamp"),
        ('[{"timestamp":0,"isl":5,"osl":5},\n7]', ":2: line: not a JSON object"),
        ('{"timestamp":0,"isl":5,"osl":5}\n{"timestamp":1\n', ":2: line: bad JSON"),
    ],
)
def test_bad_values_are_named(put, text, wrong):
    """By line and column, in each layout."""
    with pytest.raises(HeadwayError) as caught:
        read_trace(put(text))
    assert wrong in str(caught.value)


def test_a_column_that_is_not_there_is_told(put):
    for text in (OWN + ROWS, json.dumps([{"prompt": 1, "output": 2}])):
        with pytest.raises(HeadwayError, match=":1: when2: "):
            read_trace(put(text), columns="arrival=when2,prompt=n_prompt_tok,output=output")


def test_a_scenario_names_columns(write, put):
    """`workload.columns`, as a text or a mapping; it goes with a trace that names no format."""
    put(gzip.compress((OWN + ROWS).encode()), "own.csv.gz")
    told = "{arrival: when, prompt: n_prompt_tok, output: n_completion_tok}"
    text = "workload:\n  trace: {path: own.csv.gz}\n  columns: "
    for columns in (told, "arrival=when,prompt=n_prompt_tok,output=n_completion_tok"):
        found = make_workload(load_scenario(write(text + columns + "\n")))
        assert facts(found) == ([0, 0.75], [100, 50], [20, 5])
    with pytest.raises(HeadwayError, match="prompt and output: are both 'a'"):
        load_scenario(write(text + "{prompt: a, output: a}\n"))
    with pytest.raises(HeadwayError, match="need a trace that names no format"):
        load_scenario(write("workload: {columns: 'prompt=a,output=b'}\n"))
    with pytest.raises(HeadwayError, match=r"try --set workload\.columns='arrival=when,"):
        make_workload(load_scenario(write("workload: {trace: {path: own.csv.gz}}\n")))


def test_headways_own_requests_are_a_trace(write, tmp_path, monkeypatch):
    """What a run wrote is read again: the same requests, those that did not end left out."""
    monkeypatch.chdir(tmp_path)
    scenario = (
        "model: llama-3-8b\nworkload: {num_prompts: 20, request_rate: 5, clients: [1, 2]}\n"
        "cost: {kind: linear, base: 0.01}\n"
    )
    path = write(scenario)
    assert main(["run", str(path), "--out", "o", "--quiet"]) == 0
    again = read_trace(tmp_path / "o" / "requests.csv")
    before = make_workload(load_scenario(path))
    assert again.client == before.client
    assert again.prompt_tokens.tolist() == before.prompt_tokens.tolist()
    assert again.output_tokens.tolist() == before.output_tokens.tolist()
    lines = (tmp_path / "o" / "requests.csv").read_text().splitlines()
    (tmp_path / "some.csv").write_text(
        "\n".join([*lines[:-1], lines[-1].replace("stop", "timeout")])
    )
    with pytest.warns(HeadwayWarning, match="1 request left out"):
        assert len(read_trace(tmp_path / "some.csv")) == 19


def test_prompts_of_nothing_are_told(put):
    """Some harnesses count a prompt without what the chat template adds."""
    with pytest.warns(HeadwayWarning, match="1 prompts of no tokens are taken as of one"):
        found = read_trace(put("timestamp,isl,osl\n0,0,5\n1,3,5\n"))
    assert found.prompt_tokens.tolist() == [1, 3]


def test_clients_that_some_requests_do_not_name(put):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_trace(put("timestamp,isl,osl,user\n0,1,5,ann\n1,3,5,\n"))
    assert found.client == ["ann", "unknown"]


def test_without_a_column_of_arrivals_it_is_told(put, capsys):
    """`ts_utc` is one; where there is none, the proposal says what follows, and so does reading."""
    path = put("ts_utc,in_tok,out_tok\n2026-11-02 10:00:00,5,3\n2026-11-02 10:00:04,5,3\n", "u.csv")
    assert main(["trace", "describe", str(path)]) == 2
    assert "try --columns arrival=ts_utc,prompt=in_tok,output=out_tok" in capsys.readouterr().err
    path = put("in_tok,out_tok\n5,3\n6,3\n", "n.csv")
    assert main(["trace", "describe", str(path)]) == 2
    assert "(no column of arrivals: all would come at once); try " in capsys.readouterr().err
    assert main(["trace", "describe", str(path), "--columns", "prompt=in_tok,output=out_tok"]) == 0
    assert "no column of arrivals is named" in capsys.readouterr().err


@pytest.mark.parametrize("zone", ["", " UTC", "Z", " GMT", " +0000", "+00:00"])
def test_dates_with_their_zones(put, zone):
    rows = "".join(f"2026-11-02 10:00:0{k}{zone},5,3\n" for k in (0, 3))
    found = read_trace(put(f"arrival,prompt_tokens,output_tokens\n{rows}", "d.csv"), None)
    assert found.arrival.tolist() == [0, 3]


def test_a_column_of_other_dates_is_one_line(put):
    path = put("arrival,prompt_tokens,output_tokens\n" + "02/11/2026 23:58:00,5,3\n" * 300, "d.csv")
    with pytest.raises(HeadwayError) as caught:
        read_trace(path, None)
    (line,) = caught.value.messages
    assert "is not a date and time as 2023-11-16 18:15:46" in line
    assert line.endswith(", and so in 299 more places")


def row(k):
    return {"created": 1750000000 + 2 * k, "prompt_tokens": 100 + k, "completion_tokens": 50}


TOTALS = {"created": 1750000000, "prompt_tokens": 9000, "completion_tokens": 8000}


@pytest.mark.parametrize(
    "whole",
    [
        {"a": row(0), "b": row(1), "c": row(2)},  # pandas' orient="index"
        {name: {str(k): row(k)[name] for k in range(3)} for name in row(0)},  # its "columns"
        {"alice": [row(0), row(1)], "bob": [row(2)]},
        {"summary": TOTALS, "results": [row(0), row(1), row(2)]},
        TOTALS | {"results": [row(0), row(1), row(2)], "errors": [{"message": "none"}]},
        {"sessions": [{"id": 0, "requests": [row(0)]}, {"id": 1, "requests": [row(1), row(2)]}]},
    ],
)
def test_objects_of_requests_are_read_whole(put, whole):
    """By key, by column, in several lists, and beside their totals; also under told columns."""
    path = put(json.dumps(whole), "log.json")
    right = ([0.0, 2.0, 4.0], [100, 101, 102], [50, 50, 50])
    assert facts(read_trace(path)) == right
    columns = "arrival=created,prompt=prompt_tokens,output=completion_tokens"
    assert facts(read_trace(path, columns=columns)) == right


def test_a_split_table_of_pandas_is_named(put):
    path = put(json.dumps({"columns": ["created"], "index": [0], "data": [[1]]}), "log.json")
    with pytest.raises(HeadwayError, match='orient="split"\\): write orient="records"'):
        read_trace(path)


CELL = {"n": 4, "max_tokens": 20, "tool_choice": {"type": "tool"}}


@pytest.mark.parametrize("column", ["modelParameters", "request_body", "proxy_server_request"])
def test_json_in_cells_of_exports_is_read(put, column):
    """Also where the first row's cell is empty, and as a text in JSONL."""
    quoted = json.dumps(CELL).replace('"', '""')
    head = f"startTime,promptTokens,completionTokens,{column}\n"
    path = put(f'{head}2025-06-03,100,50,{{}}\n2025-06-03,100,80,"{quoted}"\n', "log.csv")
    lines = [
        {"startTime": "2025-06-03", "promptTokens": 100, "completionTokens": n, column: cell}
        for n, cell in ((50, "{}"), (80, json.dumps(CELL)))
    ]
    jsonl = put("\n".join(map(json.dumps, lines)), "log.jsonl")
    for work in (read_trace(path), read_trace(jsonl)):
        assert work.output_tokens.tolist() == [50, 20, 20, 20, 20]
        assert work.max_tokens.tolist() == [0, 20, 20, 20, 20]


def test_told_columns_reach_into_any_cell(put):
    """Whatever the column is called; a text that nobody names stays a text."""
    head = "at,prompt_tokens,completion_tokens,answer\n"
    path = put(head + '0,100,50,"{""k"": 2}"\n', "log.csv")
    assert len(read_trace(path, columns="arrival=at")) == 1
    assert len(read_trace(path, columns="arrival=at,samples=answer.k")) == 2


def test_columns_that_are_told_beside_leave_known_ones(put, recwarn):
    """Advice names one column alone: arrivals and lengths under well-known names stay."""
    text = "created_at,prompt_tokens,completion_tokens,chat\n0,160,640,a\n7,960,64,a\n"
    assert read_trace(put(text, "a.csv"), columns="prefix=chat").arrival.tolist() == [0, 7]
    ends = put("time_local,prompt_tokens,output_tokens,took\n5,9,9,1\n9,9,9,1\n", "b.csv")
    assert read_trace(ends, columns="end=time_local,e2el=took").arrival.tolist() == [0, 4]
    said = [str(one.message) for one in recwarn]
    assert not any("all requests come at once" in one for one in said), said


def test_a_clock_of_many_ms_is_doubted(put):
    rows = "".join(f"{20 * k},100,50\n" for k in range(50))
    path = put("timestamp,prompt_tokens,output_tokens\n" + rows, "ms.csv")
    with pytest.warns(HeadwayWarning, match="one request in 20 s, if its times are seconds; .*:ms"):
        read_trace(path)
