"""Exports of gateways and tracers under their own names: understood, or named, never wrong."""

import json
import warnings

import pytest

from headway.cli.main import main
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.traces import read_trace
from simulator.workload.traces.read import read_measured

DATE = "2026-07-01T00:00:{:02d}.000Z"


def rows(row, count=8, **varied):
    """Return a row so often, with what `varied` makes of each number."""
    return [row | {name: make(k) for name, make in varied.items()} for k in range(count)]


def as_lines(found):
    return "\n".join(map(json.dumps, found))


def as_csv(found):
    return "\n".join([",".join(found[0]), *(",".join(map(str, one.values())) for one in found)])


OPENROUTER = rows(
    {"native_tokens_prompt": 120, "native_tokens_completion": 40, "latency": 1200, "id": "g"},
    created_at=DATE.format,
    cancelled=lambda k: k == 3,
)
HELICONE = rows(
    {"time_to_first_token": 150, "prompt_tokens": 120, "completion_tokens": 40},
    request_created_at=DATE.format,
    response_created_at=lambda k: f"2026-07-01T00:00:{k + 1:02d}.200Z",
    response_status=lambda k: 500 if k == 3 else 200,
)
CLOUDFLARE = rows(
    {"tokens_in": 120, "tokens_out": 40, "success": True},
    created_at=DATE.format,
    cached=lambda k: k == 3,
)
LANGSMITH = rows(
    {"prompt_tokens": 120, "completion_tokens": 40},
    start_time=DATE.format,
    run_type=lambda k: "chain" if k == 3 else "llm",
)
BEDROCK = rows(
    {"operation": "ConverseStream", "output": {"outputTokenCount": 40}},
    timestamp=DATE.format,
    input=lambda k: {"inputTokenCount": 56, "cacheReadInputTokenCount": 64},
)
GEMINI = rows(
    {"promptTokenCount": 120, "candidatesTokenCount": 10, "thoughtsTokenCount": 30},
    timestamp=DATE.format,
)
NGINX = rows(
    {"request_time": "1.250", "prompt_tokens": "120", "completion_tokens": "40"},
    time_iso8601=lambda k: f"2026-07-01T00:00:{k + 2:02d}+00:00",
    status=lambda k: "499" if k == 3 else "200",
)
LANGFUSE = rows(
    {"inputUsage": 120, "outputUsage": 40, "latency": 1.2, "input": '"a\nb"'},
    startTime=DATE.format,
    level=lambda k: "ERROR" if k == 3 else "DEFAULT",
)


@pytest.mark.parametrize(
    ("text", "count", "e2el"),
    [
        (json.dumps({"data": OPENROUTER}), 7, 1.2),
        (as_csv(HELICONE), 7, 1.2),
        (as_lines(CLOUDFLARE), 7, None),
        (as_lines(LANGSMITH), 7, None),
        (as_lines(BEDROCK), 8, None),
        (as_lines(GEMINI), 8, None),
        (as_lines(NGINX), 7, 1.25),
        (as_csv(LANGFUSE), 7, 1.2),
    ],
    ids=["openrouter", "helicone", "cloudflare", "langsmith", "bedrock", "gemini", "nginx", "lf"],
)
def test_exports(put, text, count, e2el):
    """The load that an engine had, and how long it took, in the units that are meant."""
    path = put(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadwayWarning)
        work, table = read_measured(path, None, {})
    assert len(work) == count
    assert work.arrival[:3].tolist() == [0, 1, 2]
    assert {*work.prompt_tokens.tolist()} == {120}
    assert {*work.output_tokens.tolist()} == {40}
    if e2el is not None:
        assert table.measured.e2el == pytest.approx([e2el] * count)


@pytest.mark.parametrize(
    ("prompt", "output"),
    [
        ("llm.token_count.prompt", "llm.token_count.completion"),
        ("llm.usage.prompt_tokens", "llm.usage.completion_tokens"),
    ],
)
def test_spans_of_other_conventions(put, prompt, output):
    span = {"parent_id": None, "attributes": {prompt: 120, output: 40}}
    found = rows(span, context=lambda k: {"span_id": k}, start_time=DATE.format)
    work = read_trace(put(as_lines(found)))
    assert work.prompt_tokens.tolist() == [120] * 8


def test_what_sglang_logs_of_requests(put):
    """Its lines come when a request is over."""
    out = "out={{'meta_info': {{'prompt_tokens': {}, 'completion_tokens': 4, 'e2e_latency': {}}}}}"
    text = "".join(
        f"[2026-07-01 00:00:0{k + 3}] Finish: obj=x, {out.format(9 + k, k / 2)}\n" for k in range(3)
    )
    with pytest.warns(HeadwayWarning, match="not understood"):
        work = read_trace(put(text))
    assert work.arrival.tolist() == [0, 0.5, 1]
    assert work.prompt_tokens.tolist() == [9, 10, 11]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (as_csv(rows({"start_time": 1751328000, "input_tokens": 9, "output_tokens": 9,
                      "num_model_requests": 500})), "num_model_requests: 500 requests in a row"),
        ("metric_name,timestamp,metric_value,check\nhttp_reqs,1,1,\n", "report of k6 or Locust"),
        ("INFO 07-01 00:00:01 [loggers.py:118] Engine 000: Avg prompt throughput: 8 tokens/s",
         "is a server's log of its throughput"),
        ('{"request_throughput": {"avg": 1}, "request_latency": {"avg": 5}}', "a summary of a run"),
        ("# HELP vllm:x y\n", "trace from-metrics"),
    ],
)  # fmt: skip
def test_what_has_no_requests_is_named(put, text, said):
    with pytest.raises(HeadwayError) as caught:
        read_trace(put(text))
    assert said in str(caught.value)


def test_words_that_nobody_knows_are_told(put):
    """Their requests are played."""
    words = ["200 OK", "weird", "aborted", "odd", "success"]
    table = as_csv(rows({"prompt_tokens": 9, "output_tokens": 5}, 5,
                        arrival=int, status=words.__getitem__))  # fmt: skip
    with pytest.warns(HeadwayWarning) as caught:
        assert len(read_trace(put(table))) == 4
    told = [str(one.message) for one in caught]
    assert any("status: 'weird', 'odd': not understood, and taken as answered" in one
               and one.endswith("requests: 2") for one in told)  # fmt: skip


def test_hashes_of_blocks_that_a_format_does_not_read_are_told(put):
    found = rows({"prompt_tokens": 9, "output_tokens": 5, "hash_ids": [1, 2]}, arrival=int)
    with pytest.warns(HeadwayWarning, match="hash_ids: requests that name the blocks.*: 8$"):
        read_trace(put(as_lines(found)))


def test_latencies_that_are_hardly_seconds_are_told(put):
    table = as_csv(rows({"prompt_tokens": 9, "output_tokens": 5, "latency": 900}, arrival=int))
    with pytest.warns(HeadwayWarning, match="latency: half of the requests take more than 120 s"):
        read_trace(put(table))


def test_one_of_several_results(put, capsys):
    """Of guidellm's benchmarks, and of lines of vLLM's or SGLang's."""
    one = {"request_start_time": 5.0, "prompt_tokens": 3, "output_tokens": 2}
    later = [one | {"request_start_time": 9.0 + k, "time_to_first_token_ms": -1.0} for k in (0, 2)]
    loads = [{"requests": {"successful": found}} for found in ([one], later)]
    path = put(json.dumps({"benchmarks": loads}))
    with pytest.warns(HeadwayWarning, match="time_to_first_token_ms: below 0.*: 2$"):
        assert read_trace(path, result=2).arrival.tolist() == [0, 2]
    with pytest.raises(HeadwayError, match="result: 3: there are 2"):
        read_trace(path, result=3)
    bench = {"input_lens": [3, 4], "output_lens": [2, 2], "start_times": [0.0, 1.5]}
    path = put(as_lines([bench | {"request_rate": rate} for rate in (1.0, 4.0)]))
    assert main(["trace", "describe", str(path)]) == 2
    said = "say --result 1, in a scenario trace: {result: 1} (which of 2? 1: request_rate 1.0, 2:"
    assert said in capsys.readouterr().err
    assert main(["trace", "describe", str(path), "--result", "2"]) == 0
    assert "requests        2" in capsys.readouterr().out


def test_what_the_requests_of_a_run_do_not_carry(tmp_path):
    """Told by the scenario beside them."""
    text = "arrival,prompt_tokens,output_tokens,decode_slowed_time\n0,9,5,0\n"
    (tmp_path / "requests.csv").write_text(text)
    (tmp_path / "scenario.yaml").write_text(
        "cluster:\n  router: prefix_hash\n  failures:\n    mtbf: 5\n  autoscaling: null\n"
    )
    with pytest.warns(HeadwayWarning) as caught:
        read_trace(tmp_path / "requests.csv")
    told = " ".join(str(one.message) for one in caught)
    assert "its run had failures: " in told
    assert "its run had router: prefix_hash: " in told
    assert "autoscaling" not in told
    (tmp_path / "scenario.yaml").write_text("cluster:\n  router: session_hash\n")
    with pytest.warns(HeadwayWarning, match="its run had router: session_hash: the file has no s"):
        read_trace(tmp_path / "requests.csv")
