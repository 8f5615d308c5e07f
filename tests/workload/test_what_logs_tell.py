"""What logs say of a load in shapes of their own: sent, cached, conversations, images, gaps."""

import json

import numpy as np
import pytest

from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.workload.traces import read_trace
from simulator.workload.traces.read import read_measured
from tests.workload.test_ledger import HEAD, as_json, told

ZEROS = "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("planned", "sent"),
    [("timestamp", "actual_send_time"), ("scheduled_at", "dispatched_at"), ("start", "sent_time")],
)
def test_sent_goes_before_planned_in_any_order(put, planned, sent):
    head = f"{planned},{sent},prompt_tokens,output_tokens\n"
    work = read_trace(put(head + "0,0,9,5\n0.01,0.5,9,5\n"))
    assert work.arrival.tolist() == [0, 0.5]


def test_a_planned_time_that_is_named_goes_before_sent(put):
    """As the user has it, in CSV and JSON."""
    columns = "arrival=planned_time,prompt=prompt_tokens,output=output_tokens"
    csv = "planned_time,send_time,prompt_tokens,output_tokens\n0,0,9,5\n0.01,0.5,9,5\n"
    for text in (csv, as_json(csv)):
        work, table = read_measured(put(text), None, {"columns": columns})
        assert work.arrival.tolist() == [0, 0.01]
        assert [k for k, as_what in table.ledger.used.items() if as_what == "arrival"] == [
            "planned_time"
        ]


@pytest.mark.parametrize(
    ("field", "failed", "fine", "unknown"),
    [
        ("cancelled", ["Y", "T", "1.0", "true", "Cancelled"], ["N", "f", "0.0", "-", ""], "ja"),
        ("success", ["0.0", "n", "F", "error"], ["1.0", "y", "T", "", "ok"], "ja"),
        ("is_error", ["1.0", "y", "boom"], ["0.0", "n", "{}", "[]", "-", "N/A", ""], None),
        ("cache_hit", ["1.0", "Y", "HIT"], ["0.0", "n", "-", ""], "ja"),
    ],
)
def test_words_for_yes_and_no(put, field, failed, fine, unknown):
    words = [*failed, *fine, *([unknown] if unknown else [])]
    rows = "".join(f"{k},{k + 1},5,{word}\n" for k, word in enumerate(words))
    work, said = told(put(f"arrival,prompt_tokens,output_tokens,{field}\n{rows}"))
    assert work.prompt_tokens.tolist() == [*range(len(failed) + 1, len(words) + 1)]
    named = [one for one in said if "not understood" in one]
    assert named == (
        [f"{field}: 'ja': not understood, and taken as answered by the engine: requests: 1"]
        if unknown
        else []
    )


def test_times_in_a_wrong_unit_are_asked_about(put):
    """Seconds that a format takes as ns; not a burst that came at once."""
    row = {"num_input_tokens": 9, "num_output_tokens": 5}
    for step, count in ((0.25, 1), (0, 0), (10**9, 0)):
        lines = [row | {"start_timestamp": k * step} for k in range(4)]
        _, said = told(put(json.dumps(lines)), format="trtllm_bench")
        assert (
            sum("requests/s, if its times are nanoseconds; if not, say so" in one for one in said)
            == count
        )


@pytest.mark.parametrize("unit", ["", "_ms"])
def test_sent_goes_before_what_a_format_names(put, unit):
    """In the format's unit, if its name tells none."""
    rows = "".join(f"{k / 100},9,5,{k * (1000 if unit else 1)}\n" for k in range(3))
    head = f"arrived_at,num_prefill_tokens,num_decode_tokens,send_time{unit}\n"
    assert read_trace(put(head + rows), "lengths").arrival.tolist() == [0, 1, 2]


def test_a_session_is_a_conversation_where_it_is_the_client_too(put):
    work, said = told(put(f"{HEAD},session_id\n0,9,5,a\n1,9,5,a\n2,9,5,\n3,9,5,\n"))
    assert work.client == ["a", "a", "unknown", "unknown"]
    assert said[0].startswith("session_id: requests that continue a conversation: 1;")


@pytest.mark.parametrize("text", [False, True])
def test_gaps_between_chunks_make_a_mean_by_tokens(put, text):
    """Of 5 tokens in 3 chunks; also as JSON in a cell of a CSV, in ms."""
    row = {"start": 0, "prompt_tokens": 9, "output_tokens": 5, "ttft": 0.5, "itl_ms": [200, 600]}
    lines = [json.dumps(row), json.dumps(row | {"output_tokens": 1, "itl_ms": []})]
    if text:
        lines = [",".join(row), '0,9,5,0.5,"[200, 600]"', "0,9,1,0.5,[]"]
    _, table = read_measured(put("\n".join(lines)), None, {})
    assert np.allclose(table.measured.tpot, [0.2, np.nan], equal_nan=True)
    assert np.allclose(table.measured.e2el, [1.3, 0.5])


def test_images_in_a_list_are_counted(put):
    row = {"timestamp": 0, "input_length": 9, "output_length": 5, "images": ["a.png", "b.png"]}
    assert read_trace(put(json.dumps(row))).images.tolist() == [2]


def test_langfuse_counts_apart_what_came_from_a_cache_or_was_thought(put):
    span = {"id": "a", "traceId": "t", "startTime": "2026-03-01T10:00:00Z"}
    span["usageDetails"] = {"input": 300, "input_cached_tokens": 700, "output": 60}
    span["usageDetails"] |= {"output_reasoning_tokens": 100, "total": 1160}
    whole = {"input_cached_tokens": 200, "output_reasoning_tokens": 20, "total": 360}  # 200 of 300
    whole = span | {"usageDetails": span["usageDetails"] | whole}
    work, _ = told(put("\n".join(json.dumps(one) for one in (span, whole | {"id": "b"}))))
    assert work.prompt_tokens.tolist() == [1000, 300]
    assert work.output_tokens.tolist() == [160, 60]


def test_a_total_tells_whether_reasoning_and_cached_tokens_are_counted_in(put):
    """Row by row: in, apart, both apart, and a total that nothing explains."""
    rows = ["9,5,4,2,14", "9,5,0,2,16", "9,5,4,2,20", "9,5,4,2,99", "9,5,4,2,"]
    head = f"{HEAD},cached_tokens,reasoning_tokens,total_tokens\n"
    work, _ = told(put(head + "".join(f"{k},{row}\n" for k, row in enumerate(rows))))
    assert work.prompt_tokens.tolist() == [9, 9, 13, 9, 9]
    assert work.output_tokens.tolist() == [5, 7, 7, 5, 5]


@pytest.mark.parametrize(
    ("names", "cells", "prompt"),
    [
        ("cached_tokens", "5000", 5020),
        ("cached_tokens,cache_creation_input_tokens", "5000,300", 5320),
        ("cached_tokens,cache_creation_input_tokens,total_tokens", "5000,300,5330", 5320),
        ("prompt_cache_read_tokens,prompt_cache_write_tokens", "5000,300", 5320),
        (
            "gen_ai.usage.cache_read.input_tokens,gen_ai.usage.cache_creation.input_tokens",
            "0,30",
            50,
        ),
        ("cached_tokens,cache_creation_input_tokens", "16,4", 20),
    ],
)
def test_cached_tokens_that_are_more_than_a_prompt_are_not_in_it(put, names, cells, prompt):
    work, _ = told(put(f"timestamp,prompt_tokens,completion_tokens,{names}\n0,20,10,{cells}\n"))
    assert work.prompt_tokens.tolist() == [prompt]


@pytest.mark.parametrize("names", ["cached_tokens_percent", "approx_cached_percent"])
def test_a_share_that_was_cached_is_not_understood(put, names):
    _, said = told(put(f"{HEAD},{names}\n0,9,5,80\n"))
    assert said == [f"not understood, and without effect: {names}"]


def test_a_total_that_contradicts_its_tokens_is_told(put):
    _, said = told(put(f"{HEAD},total_tokens\n0,9,5,14\n1,9,5,99\n2,9,5,\n"))
    assert said == ["total_tokens: requests whose tokens are not its sum, taken as they are: 1"]


@pytest.mark.parametrize(
    ("name", "times", "said"),
    [
        ("timestamp_ms", [1_764_500_000, 1_764_500_001], "are dates, if it counts seconds"),
        ("timestamp_ms", [1_764_500_000_000, 1_764_500_000_500], ""),
        ("timestamp_us", [0, 1_764_500_001], ""),
        ("timestamp", [45991.5, 45991.75], "are a spreadsheet's dates, if it counts days"),
        ("timestamp", [45991, 45992], ""),
    ],
)
def test_arrivals_that_are_dates_in_another_unit(put, name, times, said):
    rows = "".join(f"{one},9,5\n" for one in times)
    _, all_said = told(put(f"{name},prompt_tokens,output_tokens\n{rows}"))
    assert [one.startswith(f"{name}: {said}") for one in all_said] == [True] * bool(said)


@pytest.mark.parametrize("key", ["request", "response", "body"])
@pytest.mark.parametrize("csv", [True, False])
def test_json_in_a_text_is_read_under_its_keys(put, key, csv):
    """As an inference table has it: an adapter, and counts that are named."""
    body = json.dumps({"model": "a", "usage": {"prompt_tokens": 600, "completion_tokens": 40}})
    row = {"request_time": "2026-03-01 10:00:00", "took_ms": 5, key: body}
    quoted = body.replace('"', '""')
    text = f'request_time,took_ms,{key}\n2026-03-01 10:00:00,5,"{quoted}"\n'
    found = {f: f"{key}.usage.{f}_tokens" for f in ("prompt", "completion")}
    columns = f"arrival=request_time,prompt={found['prompt']},output={found['completion']}"
    work, _ = told(put(text if csv else json.dumps(row)), columns=columns)
    assert (work.prompt_tokens.tolist(), work.output_tokens.tolist()) == ([600], [40])
    assert work.model == ["a"]


@pytest.mark.parametrize(
    ("row", "took"),
    [
        ({"created_at": 0, "req_units": 9, "res_units": 5, "response_time": 1500}, 1.5),
        ({"created_at": 0, "tokens_in": 9, "tokens_out": 5, "timings": {"latency": 1800}}, 1.8),
        ({"msec": 9, "prompt_tokens": 9, "completion_tokens": 5, "request_time": 2}, 2.0),
    ],
)
def test_how_long_gateways_took(put, row, took):
    table = read_measured(put(json.dumps(row)), None, {})[1]
    assert table.measured.e2el.tolist() == [took]


def test_sglangs_json_log_dates_requests_by_their_ends(put):
    """An adapter, priorities, an abort; also after the lines of when each came."""
    lines = []
    for k, (kind, took) in enumerate([("stop", 1.0), ("length", 4.0), ("abort", 2.0)]):
        meta = {"id": f"r{k}", "finish_reason": {"type": kind}, "e2e_latency": took}
        meta |= {"prompt_tokens": 500, "completion_tokens": 40, "cached_tokens": 0}
        head = {"timestamp": f"2026-03-01T10:00:0{k}Z", "event": "request.received", "rid": f"r{k}"}
        obj = {"rid": f"r{k}", "lora_path": [None, "a", "a"][k], "priority": k}
        when = {"timestamp": f"2026-03-01T10:00:0{k + took:g}Z", "event": "request.finished"}
        lines += [head | {"obj": obj}, head | when | {"obj": obj, "out": {"meta_info": meta}}]
    failed = "1 request left out: failed or cancelled when recorded, or without output tokens"
    left = "event: requests left out, whose end is not logged: 1"
    for some, said in ((lines, []), (lines[1::2], []), (lines[:1] + lines, [left])):
        work, all_said = told(put("\n".join(map(json.dumps, some))))
        assert work.arrival.tolist() == [0, 1]
        assert work.model == ["", "a"]
        assert work.priority.tolist() == [0, 1]
        given_up = "requests left out as cancelled when recorded: 1"
        assert sorted(all_said) == sorted([failed, given_up, *said])


def test_choices_are_several_answers_where_there_are_several(put):
    row = {"created": 0, "prompt_tokens": 9, "completion_tokens": 5, "choices": [{}]}
    lines = [row, row | {"created": 1, "choices": [{}, {}]}]
    work, said = told(put("\n".join(map(json.dumps, lines))))
    assert work.output_tokens.tolist() == [5, 3, 2]
    assert said[0].startswith("choices: requests that ask for several answers, each played as a")


def test_an_answer_of_helicones_cache_names_the_one_before(put):
    cells = ("ba7fb08e-3b1c-4c5d-9e3e-0123456789ab", ZEROS, "")
    rows = "".join(f"{k},9,5,{cell}\n" for k, cell in enumerate(cells))
    work, said = told(put(f"{HEAD},cache_reference_id\n{rows}"))
    assert work.arrival.tolist() == [0, 1]
    assert said == ["cache_reference_id: requests left out: 1, answered by a proxy's cache"]


def test_sglangs_log_names_how_a_request_ended(put):
    line = (
        "[2026-03-01 10:00:0{}] Finish: out={{'meta_info': {{'finish_reason': {{'type': '{}', "
        "'matched': 1}}, 'prompt_tokens': 300, 'completion_tokens': 20, 'cached_tokens': 0}}}}\n"
    )
    text = line.format(0, "stop") + line.format(1, "abort") + line.format(2, "length")
    assert read_trace(put(text)).arrival.tolist() == [0, 2]


def test_lists_of_a_benchmark_are_columns(put):
    result = {"input_lens": [9, 9], "output_lens": [5, 5], "start_times": [0.0, 1.0]}
    result |= {"cached_tokens": [0, 8], "total_input_tokens": 18, "notes": [1, 2, 3]}
    work, said = told(put(json.dumps(result)))
    assert len(work) == 2
    assert "cached_tokens: input tokens that the engine's cache had" in said[0]


def test_aiperf_tells_images_and_reasoning(put):
    values = {"input_sequence_length": 9, "output_sequence_length": 5, "num_images": 2}
    values["reasoning_token_count"] = 3
    line = {"metadata": {"request_start_ns": 10**18, "benchmark_phase": "profiling"}}
    line["metrics"] = {name: {"value": value, "unit": "x"} for name, value in values.items()}
    work, said = told(put(json.dumps(line)))
    assert work.images.tolist() == [2]
    assert said[0].startswith("metrics.reasoning_token_count.value: requests that reason")
    warmup = line | {"metadata": {"request_start_ns": 1, "benchmark_phase": "warmup"}}
    work, said = told(put("\n".join(map(json.dumps, [warmup, warmup, line]))))
    assert work.images.tolist() == [2]
    assert said[0] == "metadata.benchmark_phase: requests of the warm-up left out: 2"


def test_burstgpt_tells_sessions_models_and_how_long_it_took(put):
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type\n"
    rows = "0,s,2.5,ChatGPT,9,5,API log\n1,s,2.5,GPT-4,9,5,API log\n2,,2.5,GPT-4,9,5,API log\n"
    path = put(f"{head}{rows}3,,2.5,GPT-4,9,5,API log\n")
    work, said = told(path)
    assert said == [
        "Model: requests that name one of several models or providers, of which one "
        "serves all here: 4",
        "Session ID: requests that continue a conversation: 1; they come at their recorded times, "
        "and share nothing but with prefix=Session ID",
    ]
    assert read_measured(path, None, {})[1].measured.e2el.tolist() == [2.5] * 4
    assert work.model is None


def test_a_key_that_is_null_at_first_is_known_later(put):
    line = {"created_at": 0, "prompt_tokens": 9, "output_tokens": 5, "previous_response_id": None}
    later = line | {"created_at": 1, "previous_response_id": "r0"}
    _, said = told(put("\n".join(json.dumps(one) for one in (line, later))))
    assert said[0].startswith("previous_response_id: requests that follow another's answer")


def test_a_prefix_without_a_length_is_told_and_not_shared(put):
    work, said = told(put(f"{HEAD},prefix_group\n0,9,5,a\n1,9,5,a\n"))
    assert work.segments is None
    assert said[0].startswith("prefix_group: requests that begin with a prefix of unknown length")
    work, said = told(put(f"{HEAD},prefix_group,prefix_tokens\n0,9,5,a,8\n1,9,5,a,8\n"))
    assert work.segments[1][0] == (("prefix", "a"), 8)
    assert not said


def test_a_column_of_latencies_may_be_empty(put):
    _, said = told(put(f"{HEAD},ttft,e2e\n0,9,5,,\n1,9,5,,\n"))
    assert not said


def test_images_of_sglangs_log_are_told(put):
    meta = {"prompt_tokens": 9, "completion_tokens": 5, "e2e_latency": 1.5}
    obj = {"image_data": ["a.jpg"], "lora_path": "ad0", "priority": 1}
    line = {"timestamp": "2025-06-03T09:00:00Z", "event": "request.finished", "rid": "0"}
    work, said = told(put(json.dumps(line | {"obj": obj, "out": {"meta_info": meta}})))
    assert (work.model, work.priority.tolist()) == (["ad0"], [1])
    assert said == [
        "obj.image_data: requests that have media without sizes, whose encoder is not simulated: 1"
    ]


def test_media_without_an_encoder_are_told(write, recwarn):
    """A run's own file has them; an engine without multimodal_config takes them as text."""
    head = f"{HEAD},prefix_request,prefix_tokens,media\n"
    write(f"{head}0,600,5,,0,image:0:500@10\n", "mm.csv")
    text = "model: llama-3-8b\nworkload: {trace: {path: mm.csv}}\n"
    for engine, count in (
        ("", 1),
        ("engine: {multimodal_config: {encoder_seconds: [[1, 0.01], [4096, 0.1]]}}\n", 0),
    ):
        recwarn.clear()
        make_workload(load_scenario(write(text + engine, "s.yaml")))
        said = [str(one.message) for one in recwarn]
        assert sum("prompts have images or clips" in one for one in said) == count
