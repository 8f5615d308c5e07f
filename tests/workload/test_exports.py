"""What people's tools export: JSON in cells, answers in parts, dots, images that are counted in."""

import json

import pytest

from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError
from simulator.workload.traces import read_trace
from simulator.workload.traces.detect import detect_format
from tests.workload.test_ledger import told


def cell(value):
    return '"' + json.dumps(value).replace('"', '""') + '"'


def test_json_in_the_cells_of_a_csv(put):
    """Langfuse's export has its counts there; LiteLLM's has what the engine's cache had."""
    usage = [{"input": 100 + k, "output": 7, "total": 107 + k} for k in range(3)]
    rows = [f"{k},2026-03-01T10:00:0{k}Z,{cell(one)},gpt\n" for k, one in enumerate(usage)]
    path = put("id,startTime,usageDetails,model\n" + "\n".join(rows), "langfuse.csv")
    assert detect_format(path) == "requests"
    work, said = told(path)
    assert work.prompt_tokens.tolist() == [100, 101, 102]
    assert (work.output_tokens.tolist(), work.arrival.tolist()) == ([7] * 3, [0, 1, 2])
    assert not said
    found = {"usage_object": {"prompt_tokens_details": {"cached_tokens": 64}}}
    head = "request_id,startTime,prompt_tokens,completion_tokens,metadata\n"
    rows = [f"{k},2026-03-01 10:00:0{k},100,7,{cell(found)}\n" for k in range(2)]
    _, said = told(put(head + "".join(rows), "spend.csv"))
    assert any(
        "input tokens that the engine's cache had when it was recorded: 128" in s for s in said
    )
    columns = "arrival=startTime,prompt=usageDetails.input,output=usageDetails.output"
    assert read_trace(path, columns=columns).prompt_tokens.tolist() == [100, 101, 102]
    with pytest.raises(HeadwayError, match=":4: line: 6 values under 5 columns"):
        read_trace(put(head + "".join(rows) + f"3,2026-03-01 10:00:09,1,1,{cell({})},x\n"))


def test_text_that_is_json_is_no_column(put):
    """What users wrote may have any keys."""
    row = {"created": 0, "prompt_tokens": 9, "completion_tokens": 5, "prompt": '{"n": 3}'}
    work, _ = told(put(json.dumps(row) + "\n" + json.dumps(row | {"created": 1})))
    assert work.output_tokens.tolist() == [5, 5]


def test_an_answer_that_claude_code_wrote_in_parts_counts_once(put):
    head = {"parentUuid": None, "sessionId": "s", "isSidechain": False}
    rows = [
        head | {"type": "user", "timestamp": "2026-03-01T10:00:00Z", "message": {"role": "user"}}
    ]
    for second, name, output in ((2, "a", 1), (3, "a", 1), (4, "a", 90), (9, "b", 20)):
        usage = {"input_tokens": 4, "cache_read_input_tokens": 1000, "output_tokens": output}
        message = {"id": f"msg_{name}", "model": "claude", "usage": usage}
        when = f"2026-03-01T10:00:0{second}Z"
        rows.append(head | {"type": "assistant", "timestamp": when, "message": message})
    work, said = told(put("\n".join(map(json.dumps, rows))))
    assert (work.arrival.tolist(), work.output_tokens.tolist()) == ([0, 7], [90, 20])
    assert work.prompt_tokens.tolist() == [1004, 1004]
    assert said[0].endswith("lines without a new answer are left out: 3")


def test_dots_of_thousands_are_refused(put):
    rows = "Zeit;Prompt tokens;Output tokens\n16.11.2023 18:15:46;{};12\n16.11.2023 18:15:47;7;12\n"
    with pytest.raises(HeadwayError, match=r":2: Prompt tokens: '1\.000': its dot may mark"):
        read_trace(put(rows.replace("Zeit", "timestamp").format("1.000")))
    with pytest.raises(HeadwayError) as caught:
        read_trace(put(rows.replace("Zeit", "timestamp").format("1.130")))
    assert str(caught.value).count("1.130") == 1
    work = read_trace(put(rows.replace("Zeit", "timestamp").format("1000.0")))
    assert work.prompt_tokens.tolist() == [1000, 7]


@pytest.mark.parametrize("counted", [True, False])
def test_images_that_a_count_of_tokens_has_in_it(tmp_path, counted):
    """Azure's count of context tokens has them; elsewhere they come on top of the text."""
    prompt = "ContextTokens" if counted else "prompt_tokens"
    output = "GeneratedTokens" if counted else "output_tokens"
    when = "TIMESTAMP" if counted else "timestamp"
    rows = "".join(f"2024-10-15T12:00:0{k}Z,{k},{120 + 700 * k},9\n" for k in range(3))
    (tmp_path / "t.csv").write_text(f"{when},NumImages,{prompt},{output}\n{rows}")
    (tmp_path / "s.yaml").write_text(
        "model: llama-3-8b\n"
        "engine: {multimodal_config: {encoder_seconds: [[1, 0.01], [9, 0.02]]}}\n"
        "workload: {trace: {path: t.csv}, multimodal: {image: {tokens: 700}}}\n"
    )
    work = make_workload(load_scenario(tmp_path / "s.yaml"))
    more = [0, 0, 0] if counted else [0, 700, 1400]
    assert work.prompt_tokens.tolist() == [120 + more[0], 820 + more[1], 1520 + more[2]]
    assert [len(parts) for parts in work.segments] == [1, 2, 3]


def test_fractions_of_milliseconds_are_asked_about(put):
    rows = [{"timestamp": k / 4, "input_length": 9, "output_length": 5} for k in range(3)]
    path = put("\n".join(map(json.dumps, rows)))
    assert "timestamp: has fractions, and counts ms: time_unit: s, if it counts s" in told(path)[1]
    assert not told(path, time_unit="s")[1]


@pytest.mark.parametrize("names", ["input_len,output_len", "prompt_len,output_tokens"])
def test_names_of_a_json_format_in_a_header_are_columns(put, names):
    work = read_trace(put(f"timestamp,{names}\n0,9,5\n1,9,5\n"))
    assert work.arrival.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("cf-cache-status", "HIT", "MISS"),
        ("semantic_cache_hit", "true", "false"),
        ("finish_reasons", "abort", "stop"),
        ("http_status_code", "429", "200"),
        ("cancelled_at", "3.5", ""),
        ("err", "boom", ""),
        ("endpoint", "/v1/embeddings", "/v1/chat/completions"),
        ("path", "/v1/audio/transcriptions", "/v1/completions"),
        ("object", "embedding", "chat.completion"),
    ],
)
def test_words_that_say_that_a_request_was_no_load(put, name, bad, good):
    work, said = told(
        put(f"arrival,prompt_tokens,output_tokens,{name}\n0,9,5,{bad}\n1,7,5,{good}\n")
    )
    assert work.prompt_tokens.tolist() == [7]
    assert "left out" in said[0]


def test_a_request_came_when_it_was_queued_not_when_it_was_scheduled(put):
    rows = "scheduled_at,queued_at,prompt_tokens,output_tokens\n5,0,9,5\n9,1,9,5\n"
    assert read_trace(put(rows)).arrival.tolist() == [0, 1]


PAGES = {
    "requests": lambda k: {"arrival": k, "prompt_tokens": 9 + k, "output_tokens": 5},
    "otel": lambda k: {
        "id": f"s{k}",
        "traceId": "t",
        "startTime": f"2026-01-01T00:00:0{k}Z",
        "usageDetails": {"input": 9 + k, "output": 5},
    },
}


@pytest.mark.parametrize("form", [*PAGES])
@pytest.mark.parametrize("write", [json.dumps, "\n".join, "".join], ids=["list", "lines", "row"])
def test_pages_of_an_export(put, form, write):
    """Pages in a list, a line or one behind the other have the requests of all of them."""
    pages = [{"data": [PAGES[form](2 * k), PAGES[form](2 * k + 1)]} for k in range(3)]
    text = write(pages if write is json.dumps else [json.dumps(page) for page in pages])
    path = put(text)
    assert detect_format(path) == form
    work = read_trace(path)
    assert work.arrival.tolist() == [0, 1, 2, 3, 4, 5]
    assert work.prompt_tokens.tolist() == [9, 10, 11, 12, 13, 14]


def test_no_result_and_no_object_are_named(put):
    with pytest.raises(HeadwayError, match=":1: line: no result in it, as vllm bench serve"):
        read_trace(put("[]"), "vllm_bench")
    request = json.dumps(PAGES["requests"](0))
    for text in (f"{request} 7", f'{{"data": [{request}]}}\n3\n'):
        with pytest.raises(HeadwayError, match=r":[12]: line: not a JSON object"):
            read_trace(put(text), "requests")


@pytest.mark.parametrize("name", ["inter_arrival_s", "time_since_last_ms", "iat", "gap_time"])
def test_gaps_between_requests_are_no_times(put, name):
    """They are not proposed as arrivals, and whoever names them as such is told."""
    path = put(f"{name},prompt_tokens,output_tokens\n0,9,5\n0.5,9,5\n0.5,9,5\n")
    with pytest.raises(
        HeadwayError, match="no column of arrivals: all would come at once"
    ) as found:
        detect_format(path)
    assert name not in str(found.value)
    said = told(path, columns={"arrival": name, "prompt": "prompt_tokens"})[1]
    assert any("gives gaps between requests by its name" in text for text in said)


@pytest.mark.parametrize("wrap", [lambda ones: ones, lambda ones: {"run": "a", "requests": ones}])
def test_requests_by_name_in_an_object(put, wrap):
    """They were read as one request of the first one's time and lengths."""
    ones = {f"r{k}": {"arrival": k, "prompt_tokens": 9, "output_tokens": 5} for k in range(3)}
    assert read_trace(put(json.dumps(wrap(ones)))).arrival.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("e2e_time,arrived_when,n_in,n_out", "arrival=arrived_when,prompt=n_in,output=n_out"),
        ("end_time,n_in,n_out", "no column of arrivals"),
        ("offset_ms,n_in,n_out", "arrival=offset_ms,prompt=n_in"),
        ("arrival,prompt_chars,output_chars", "lacks a column of each request's prompt, output"),
    ],
)
def test_no_latency_end_or_text_is_proposed_for_what_is_needed(put, head, said):
    with pytest.raises(HeadwayError) as caught:
        read_trace(put(f"{head}\n{','.join('1' for _ in head.split(','))}\n", "log.csv"))
    assert said in str(caught.value)
