"""What servers and gateways log of requests: spans, spend logs, access logs, tables."""

import datetime
import json
from pathlib import Path

import numpy as np
import pytest

from calibration.measured.requests import read_requests
from headway.cli.main import main
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.traces import read_trace
from simulator.workload.traces.detect import detect_format

SAMPLES = Path(__file__).parent / "samples"


def lengths(trace):
    return trace.prompt_tokens.tolist(), trace.output_tokens.tolist()


def test_spans_of_opentelemetry():
    """The same three spans from the SDK's console and in OTLP's JSON."""
    text = (SAMPLES / "otel_console.json").read_text()
    for name in ("otel_console.json", "otlp.jsonl"):
        path = SAMPLES / name
        assert detect_format(path) == "otel"
        trace = read_trace(path)
        assert lengths(trace) == ([7, 13, 19], [6, 7, 8])
        assert trace.max_tokens.tolist() == [6, 7, 8]
        assert trace.arrival[1] == pytest.approx(0.045535, abs=1e-6)
    assert text.count('"gen_ai.usage.input_tokens"') == 3


def test_spans_of_langfuses_sdk(put):
    """Its attributes hold JSON as text; spans around generations tell no tokens."""
    path = SAMPLES / "langfuse.json"
    assert detect_format(path) == "otel"
    trace, found = read_trace(path), read_requests(path)
    assert lengths(trace) == ([100, 101, 102], [10, 11, 12])
    assert trace.client == ["user-0", "user-1", "user-0"]
    assert found.ttft == pytest.approx([0.0202, 0.0203, 0.0232], abs=2e-4)
    assert (found.e2el > found.ttft).all()
    text = path.read_text()
    key = '"langfuse.observation.usage_details": '
    failed = text.replace(key, '"langfuse.observation.level": "ERROR", ' + key, 1)
    with pytest.warns(HeadwayWarning, match="1 request left out"):
        assert lengths(read_trace(put(failed))) == ([101, 102], [11, 12])
    whole = text.replace(r'"{\"input\": 100,', r'"{\"input\": 100.5,')
    with pytest.raises(HeadwayError, match=r"usage.*100\.5 is not a whole number"):
        read_trace(put(whole))
    damaged = text.replace(r'"{\"input\": 100,', '"{100,')
    with pytest.warns(HeadwayWarning, match="requests left out, which have no token counts: 1"):
        assert lengths(read_trace(put(damaged))) == ([101, 102], [11, 12])


def span(name, parent, tokens=None, **more):
    """Make a span of OTLP's JSON, of 1 s."""
    attributes = {} if tokens is None else {"gen_ai.usage.prompt_tokens": tokens[0]}
    attributes |= {} if tokens is None else {"gen_ai.usage.completion_tokens": tokens[1]}
    return {
        "spanId": name,
        "parentSpanId": parent,
        "startTimeUnixNano": str(1_700_000_000_000_000_000 + more.pop("at", 0)),
        "endTimeUnixNano": str(1_700_000_001_000_000_000 + more.pop("at", 0)),
        "attributes": [
            {"key": key, "value": {"intValue": str(value)}} for key, value in attributes.items()
        ]
        + [{"key": key, "value": {"doubleValue": v}} for key, v in more.pop("doubles", {}).items()],
        **more,
    }


def otlp(*spans):
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]})


def test_spans_that_hold_others_are_sums(put):
    """An agent's span tells the tokens of the calls in it, too; tools and errors are left out."""
    path = put(
        otlp(
            span("agent", "", (300, 30)),
            span("tool", "agent"),
            span("one", "tool", (100, 10)),
            span("two", "agent", (200, 20), at=500_000_000),
            span("bad", "", (5, 5), status={"code": 2}),
        )
    )
    with pytest.warns(HeadwayWarning, match="1 request left out"):
        trace = read_trace(path)
    assert lengths(trace) == ([100, 200], [10, 20])
    assert trace.arrival.tolist() == [0.0, 0.5]


def test_spans_of_vllm_are_a_measured_run(put):
    """vLLM's own spans tell when the first token came."""
    times = {"gen_ai.latency.time_to_first_token": 0.25, "gen_ai.latency.e2e": 1.0}
    found = read_requests(put(otlp(span("one", "", (100, 11), doubles=times))))
    assert (found.ttft.tolist(), found.e2el.tolist()) == ([0.25], [1.0])
    assert found.tpot == pytest.approx([0.075])


def test_langfuse(put):
    """Observations as its API gives them; those that are no generation tell no tokens."""
    one = {
        "id": "g1",
        "traceId": "t",
        "type": "GENERATION",
        "startTime": "2026-11-01T09:00:00.000Z",
        "completionStartTime": "2026-11-01T09:00:00.500Z",
        "endTime": "2026-11-01T09:00:02.500Z",
        "parentObservationId": "s1",
        "usageDetails": {"input": 120, "output": 21, "total": 141},
    }
    outer = {"id": "s1", "traceId": "t", "type": "SPAN", "startTime": "2026-11-01T08:59:59Z"}
    for text in (
        json.dumps({"data": [outer, one]}),
        "\n".join(map(json.dumps, (outer, one))),
        json.dumps([outer, one], indent=1),
    ):
        path = put(text)
        assert detect_format(path) == "otel"
        found = read_requests(path)
        assert (found.prompt.tolist(), found.output.tolist()) == ([120], [21])
        assert (found.ttft.tolist(), found.e2el.tolist()) == ([0.5], [2.5])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (otlp(span("a", "")), ":1: gen_ai.usage.input_tokens: no span tells its tokens"),
        (
            otlp(span("a", "", ("x", 1))),
            ":1: gen_ai.usage.prompt_tokens: 'x' is not a whole number",
        ),
        ('{"context": {}, "attributes": {}}\n{"context"', ":2: line: bad JSON"),
    ],
)
def test_bad_spans(put, text, wrong):
    with pytest.raises(HeadwayError) as caught:
        read_trace(put(text))
    assert wrong in str(caught.value)


def test_spend_logs_of_litellm():
    path = SAMPLES / "litellm.json"
    assert detect_format(path) == "requests"
    trace = read_trace(path)
    assert lengths(trace) == ([812, 95, 1500], [64, 210, 33])
    assert trace.arrival.tolist() == [0, 1.25, 2.5]
    assert trace.client == ["ann", "bob", "ann"]
    found = read_requests(path)
    assert found.ttft == pytest.approx([0.2] * 3)
    assert found.e2el == pytest.approx([0.8 + 0.02 * n for n in (64, 210, 33)])


def test_answers_of_openais_api():
    """A line for each, as a client may log them; `created` has whole seconds."""
    path = SAMPLES / "openai.jsonl"
    assert detect_format(path) == "requests"
    assert lengths(read_trace(path)) == ([7, 13, 19], [6, 7, 8])


def test_results_of_openais_batches(put):
    """The answer lies in `response.body`; one that failed is left out."""
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    rows = [
        {"id": f"batch_{k}", "custom_id": str(k),
         "response": {"status_code": code, "body": {"created": 1_700_000_000 + k, "usage": usage}}}
        for k, code in enumerate((200, 200, 500))
    ]  # fmt: skip
    with pytest.warns(HeadwayWarning, match="1 request left out"):
        trace = read_trace(put("\n".join(map(json.dumps, rows))))
    assert trace.arrival.tolist() == [0, 1]


NGINX = (
    '10.0.0.7 - - [16/Nov/2026:18:15:46 +0000] "POST /v1/chat/completions HTTP/1.1" 200 5120 '
    '"-" "openai/2" request_time=2.500 prompt_tokens=812 completion_tokens=64 user="ann b"\n'
    '10.0.0.7 - - [16/Nov/2026:18:15:47 +0000] "GET /health HTTP/1.1" 200 2 "-" "curl"\n'
    '10.0.0.8 - - [16/Nov/2026:18:15:48 +0000] "POST /v1/chat/completions HTTP/1.1" 200 5120 '
    '"-" "openai/2" request_time=3.500 prompt_tokens=99 completion_tokens=12 user="bob"\n'
)


def test_access_logs(put):
    """nginx tells when the answer was sent, and how long it took; others when a request came."""
    path = put(NGINX)
    assert detect_format(path) == "access_log"
    trace = read_trace(path)
    assert lengths(trace) == ([812, 99], [64, 12])
    assert trace.arrival.tolist() == [0, 1.0]
    assert trace.client == ["ann b", "bob"]
    assert read_requests(path).e2el.tolist() == [2.5, 3.5]
    other = (
        "[2026-11-16 18:15:46,250] INFO done id=3 prompt_tokens: 7, completion_tokens: 5\n"
        "2026-11-16T18:15:47.500Z INFO done id=4 input_tokens=9 output_tokens=6 status=200\n"
        "2026-11-16T18:15:48.500Z INFO done id=5 input_tokens=9 output_tokens=6 status=503\n"
    )
    rows = other.splitlines(keepends=True)
    assert lengths(read_trace(put(rows[0]))) == ([7], [5])
    with pytest.warns(HeadwayWarning, match="1 request left out"):
        assert lengths(read_trace(put("".join(rows[1:])))) == ([9], [6])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (NGINX.splitlines()[1], ":1: prompt_tokens: no line tells its tokens"),
        (NGINX.replace("16/Nov", "32/Nov"), ":1: date: '32/Nov/2026:18:15:46 +0000', or"),
        (NGINX + "prompt_tokens=1 completion_tokens=1\n", ":4: date: missing"),
        (NGINX.replace("=812", "=many"), ":1: prompt_tokens: 'many' is not a whole number"),
    ],
)
def test_bad_access_logs(put, text, wrong):
    with pytest.raises(HeadwayError) as caught:
        read_trace(put(text))
    assert wrong in str(caught.value)


def table(tmp_path, **columns):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path = tmp_path / "log.parquet"
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


def test_parquet(tmp_path, capsys):
    """Names that are known, Azure's among them; others as they are told, or proposed."""
    when = [datetime.datetime(2026, 1, 1, 9, 0, k) for k in (0, 2)]
    path = table(tmp_path, TIMESTAMP=when, ContextTokens=[5, 6], GeneratedTokens=[2, 3])
    assert detect_format(path) == "requests"
    assert read_trace(path).arrival.tolist() == [0, 2]
    path = table(tmp_path, when=[0.5, 1.0], n_in=np.array([5, 6], np.int32), n_out=[2, 3])
    told = read_trace(path, columns="arrival=when,prompt=n_in,output=n_out")
    assert (told.arrival.tolist(), *lengths(told)) == ([0, 0.5], [5, 6], [2, 3])
    assert main(["trace", "describe", str(path)]) == 2
    assert "try --columns arrival=when,prompt=n_in,output=n_out" in capsys.readouterr().err


def test_bad_parquet(tmp_path, put):
    path = table(tmp_path, timestamp=[1, 2], isl=[5, -6], osl=[2, 3])
    with pytest.raises(HeadwayError, match=":2: isl: -6 is negative"):
        read_trace(path)
    with pytest.raises(HeadwayError, match="cannot be read: "):
        read_trace(put(b"PAR1" + b"x" * 40))
    path = table(tmp_path, foo=[1])
    with pytest.raises(HeadwayError, match="'foo' are the columns of no known format"):
        read_trace(path)


def test_sharegpt(put):
    """As vllm bench serve: the first two messages, pruned; lengths by `chars_per_token`."""
    talk = [{"from": "human", "value": "a" * 40}, {"from": "gpt", "value": "b" * 81}]
    rows = [
        {"id": "1", "conversations": [*talk, *talk]},
        {"id": "2", "conversations": talk[:1]},
        {"id": "3", "conversations": [{"value": "x"}, talk[1]]},
        {"id": "4", "conversations": [talk[0], {"value": "b" * 9000}]},
    ]
    path = put(json.dumps(rows))
    assert detect_format(path) == "sharegpt"
    assert lengths(read_trace(path, chars_per_token=4)) == ([10], [21])
    with pytest.raises(HeadwayError, match=":1: conversations: counting tokens needs"):
        read_trace(path)
    bad = put(json.dumps([{"conversations": talk}, {"conversations": [{}, {}]}], indent=0))
    with pytest.raises(HeadwayError, match="conversations: a message without a value"):
        read_trace(bad, chars_per_token=4)


def test_a_delay_as_dynamo_spells_it(put):
    row = {"session_id": "s", "input_length": 5, "output_length": 2}
    text = json.dumps(row | {"timestamp": 0}) + "\n" + json.dumps(row | {"delay_ms": 50})
    assert read_trace(put(text)).delay.tolist() == [0, 0.05]
