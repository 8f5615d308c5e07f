"""What exports of tools in use say of a load in columns of their own, and what runs lack."""

import json
import re
import warnings

import pytest

from headway.cli.main import main
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError
from simulator.workload.prefixes import shared_prefix_tokens
from simulator.workload.traces import read_trace
from simulator.workload.traces.read import read_table
from tests.workload.test_ledger import HEAD, told
from tests.workload.test_what_is_left_out import AGAIN, langfuse


@pytest.mark.parametrize(("whole", "differs"), [(140, False), (100, True)])
def test_an_enclosing_span_is_added_up_again(put, whole, differs):
    """A call that nobody traced is in its parent's tokens alone."""
    parent = {"usageDetails": {"input": whole, "output": 80}}
    child = {"usageDetails": {"input": 70, "output": 40}, "parentObservationId": "o0"}
    work, said = langfuse(put, parent, child, child)
    assert len(work) == 2
    assert any("not the sum of what they enclose" in one for one in said) == differs


def test_more_was_cached_than_prompts_share(put):
    """Two prompts of 100 begin with 16 alike, and 80 of each were cached."""
    text = f"{HEAD},prefix_id,prefix_tokens,cached_tokens\n0,100,5,a,16,0\n1,100,5,a,16,80\n"
    _, said = told(put(text))
    assert any("cache had when it was recorded: 64;" in one for one in said)
    assert not told(put(text.replace("80", "16")))[1]


def test_a_column_that_says_no_hides_none_that_says_yes(put):
    head = "start_time,input_tokens,output_tokens"
    rows = "0,9,5,false,\n1,9,5,false,hang up\n2,9,5,true,\n"
    work, said = told(put(f"{head},is_error,error_type\n{rows}"))
    assert (len(work), said[0].partition(":")[0]) == (1, "2 requests left out")
    rows = "0,9,5,false,false\n1,9,5,false,true\n"
    work, said = told(put(f"{head},cache_hit,semantic_cache_hit\n{rows}"))
    assert (len(work), said) == (
        1,
        ["cache_hit or semantic_cache_hit: requests left out: 1, answered by a proxy's cache"],
    )


@pytest.mark.parametrize(
    ("column", "cells", "said"),
    [
        ("response_flags", "-|DC", "1 request left out"),
        ("tool_wait_s", "0|3", "wait for tools or their users"),
        ("think_time", "0|3.5", "wait for tools or their users"),
        ("Latency (ms)", "900|900", ""),
        ("state", "DONE|FAILED", "1 request left out"),
        ("request_kind", "chat|embedding", "no calls to generate text"),
        ("slo_ttft_ms", "|500", "have a deadline"),
        ("max_latency_s", "|2", "have a deadline"),
        ("depends_on", "|0", "follow another's answer"),
        ("image_input_tokens", "0|258", "have tokens of images"),
        ("audio_input_tokens", "0|25", "have audio"),
        ("was_retried", "false|true", "were tried again"),
        ("span_kind", "LLM|CHAIN", "no calls to generate text"),
    ],
)
def test_columns_of_tools_in_use(put, column, cells, said):
    first, last = cells.split("|")
    _, found = told(put(f"{HEAD},{column}\n0,9,5,{first}\n1,9,5,{last}\n"))
    assert said in found[0] if said else not found


def test_streams_of_guidellm_are_a_closed_loop(put):
    request = {"prompt_tokens": 9, "output_tokens": 5, "request_start_time": 1.0}
    bench = {"requests": {"successful": [request, request]}}
    args = {"args": {"strategy": {"type_": "concurrent", "streams": 8}}}
    _, said = told(put(json.dumps({"benchmarks": [bench | args]})))
    assert said == [f"requests recorded under 8 streams, {AGAIN}: 2"]


def test_names_of_models_none_of_which_is_the_engines(put):
    """As where --served-model-name is free: one of them may be no adapter."""
    path = put(f"{HEAD},model\n0,9,5,ours\n1,9,5,sql\n2,9,5,sql\n")
    load = {"trace": {"path": str(path)}}
    raw = {"model": "llama-3-8b", "engine": {"enable_lora": True}, "workload": load}
    with pytest.warns(match=r"no request asks for llama-3-8b: .*: sql \(2\), ours \(1\); if one"):
        make_workload(load_scenario(raw))
    path.write_text(f"{HEAD},model\n0,9,5,base\n1,9,5,sql\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_workload(load_scenario(raw)).model == ["", "sql"]


@pytest.mark.parametrize("option", [[], ["--no-tables"]])
def test_images_over_the_limit_of_every_prompt(tmp_path, capsys, option):
    load = {"num_prompts": 8, "input_len": 9, "multimodal": {"image": {"items": 3}}}
    engine = {"multimodal_config": {"limit_mm_per_prompt": {"image": 1}}}
    path = tmp_path / "s.yaml"
    path.write_text(json.dumps({"model": "qwen2.5-vl-7b", "workload": load, "engine": engine}))
    assert main(["run", str(path), "--out", str(tmp_path / "out"), *option]) == 1
    err = capsys.readouterr().err
    said = "requests with more than the 1 of image that limit_mm_per_prompt allows (up to 3): 8"
    assert f"{said}: the engine rejects them" in err
    assert option or f"all 8 requests were rejected: {said}\n" in err


def test_media_in_a_list_and_spans_of_their_own_lines(put):
    rows = [{"arrival": k, "input_tokens": 9, "output_tokens": 5, "asset_ids": []} for k in (0, 1)]
    rows[1]["asset_ids"] = ["a"]
    _, said = told(put("\n".join(map(json.dumps, rows))))
    assert said == [
        "asset_ids: requests that have media without sizes, whose encoder is not simulated: 1"
    ]
    span = {"traceId": "t", "spanId": "a", "startTimeUnixNano": "1772366400000000000"}
    usage = {"gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 5}
    assert len(told(put(json.dumps(span | {"attributes": usage})))[0]) == 1


def test_a_value_before_a_bracket(put):
    """As SGLang's log ends what was asked for."""
    line = "[2026-03-01 12:00:0{}] Finish: obj=GenerateReqInput(rid='r', lora_path=None, "
    line += "priority=None), out={{'meta_info': {{'prompt_tokens': 9, 'completion_tokens': 5}}}}\n"
    work, _ = told(put(line.format(0) + line.format(1)))
    assert (work.prompt_tokens.tolist(), work.model) == ([9, 9], None)


def rows(head, *cells):
    """Return a table of 20 requests, half a second apart but for what `cells` say."""
    return f"{head}\n" + "".join(f"{','.join(str(one(k)) for one in cells)}\n" for k in range(20))


def nine(_):
    return 9


@pytest.mark.parametrize(
    ("name", "time", "said"),
    [
        ("arrival", lambda k: 50 * k, "one request in 50 s, if its times are seconds; .*:ms"),
        ("arrival", lambda k: 3 * k, "one request in 3 s, if its times are seconds; .*:ms"),
        ("arrival", lambda k: 20.5 * k, "one request in 20.5 s, if its times are seconds"),
        ("arrival_s", lambda k: 50 * k, ""),
        ("arrival", lambda k: 0.5 * k, ""),
        ("arrival", lambda k: 1772359200 + 3 * k, ""),
    ],
)
def test_a_clock_without_a_unit_is_told(put, name, time, said):
    """Whole numbers may be ms, however close they are; dates and told units are none of these."""
    text = rows(f"{name},input_tokens,output_tokens", time, nine, nine)
    _, warned = told(put(text, "log.csv"))
    assert len(warned) == bool(said)
    assert not said or re.search(said, warned[0])
    _, warned = told(put(text, "log.csv"), columns=f"arrival={name}:s")
    assert not warned


@pytest.mark.parametrize(
    ("name", "last"),
    [("t (min)", 60), ("t_hours", 3600), ("t_millis", 1e-3), ("t_minutes", 60), ("t_usec", 1e-6)],
)
def test_units_that_a_name_ends_in(put, name, last):
    text = f"{name},input_tokens,output_tokens\n0,9,5\n1,9,5\n"
    work, _ = told(put(text, "log.csv"), columns=f"arrival={name}")
    assert work.arrival[-1] == pytest.approx(last)


def test_the_least_latency_is_no_latency_in_minutes(put):
    table = read_table(put(f"{HEAD},latency_min\n0,9,5,2\n", "log.csv"), None, {})
    assert table.measured is None


def test_seconds_that_a_mooncake_trace_counts_as_ms(put):
    line = '{{"timestamp": {}, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}}\n'
    path = put("".join(line.format(k) for k in range(20)), "moon.jsonl")
    assert (
        "1,000 requests/s, if its times are milliseconds; if not, say so: time_unit: s"
        in told(path)[1]
    )
    assert not told(path, time_unit="s")[1]


def test_conversations_of_sharegpt_may_have_times(put):
    """A time that nobody read would let all come at once."""
    talk = [{"value": "x" * 40}, {"value": "y" * 40}]
    some = [{"id": "a", "timestamp": 2.5 * k, "conversations": talk} for k in range(3)]
    work, said = told(put(json.dumps(some)), chars_per_token=4)
    assert (work.arrival.tolist(), said) == ([0, 2.5, 5], [])


def test_a_project_of_langsmith_is_no_conversation(put):
    text = "run_type,session_id,start_time,prompt_tokens,completion_tokens\n"
    text += "".join(f"llm,p,2026-03-01T10:00:0{k},9,5\n" for k in range(3))
    work, said = told(put(text, "runs.csv"))
    assert (work.client, said) == (None, [])


def test_helicones_delay_is_how_long_a_request_took(put):
    text = (
        "request_created_at,prompt_tokens,completion_tokens,delay_ms\n2026-03-01T10:00:00,9,5,900\n"
    )
    table = read_table(put(text, "helicone.csv"), None, {})
    assert table.measured.e2el.tolist() == [0.9]


@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        ("prefix_len", 4, "requests whose prefix has no name, so they share none here .*: 1"),
        ("shared_prefix_id", 0, "begin with a prefix of unknown length, and share none"),
        ("context_id", "a", "begin with a prefix of unknown length, and share none"),
        ("retry_of", "r1", "were tried again"),
        ("rejected", "true", "1 request left out"),
        ("is_valid", "false", "1 request left out"),
        ("num_calls", "1", ""),
        ("cache_hit", "0.5", "cache_hit: '0.5': not understood, and taken as answered"),
        ("method", "POST", ""),
        ("", "7", ""),
    ],
)
def test_columns_that_change_a_load_and_two_that_do_not(put, column, cell, said):
    _, warned = told(put(f"{HEAD},{column}\n0,9,5,\n1,9,5,{cell}\n", "log.csv"))
    assert len(warned) == bool(said), warned
    assert not said or re.search(said, warned[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"data": [{"traceID": "0", "spans": []}]}', "is Jaeger's or Tempo's own JSON"),
        ('{"took": 3, "hits": {"hits": [{"_source": {"a": 1}}]}}', "an answer of Elasticsearch"),
        ('{"events": [{"message": "{}"}]}', "is events of CloudWatch"),
        ('{"time": "", "category": "RequestResponse"}', "Azure OpenAI's diagnostic log"),
        ("sep=;\narrival;prompt_tokens\n", "Excel's sep= or a comment: delete it"),
        ("# of March\narrival,prompt_tokens\n", "Excel's sep= or a comment: delete it"),
        (f"{HEAD}\n0,1.100,5\n", "its dot may mark thousands; write it without one"),
        ("timestamp,input_tokens,output_tokens\n10:00:00,9,5\n", "is not a date and time as"),
        (
            "timestamp,input_tokens,output_tokens\n1900-01-01 00:00:00,9,5\n",
            "1900-01-01T00:00:00 is the year 1900",
        ),
        ('{"input_lens": [9], "output_lens": [5], "request_rate": 4.0}', "do by --save-detailed"),
    ],
)
def test_what_a_file_is_or_lacks_is_named(put, text, said):
    with pytest.raises(HeadwayError) as caught:
        read_trace(put(text))
    assert said in str(caught.value)


def test_a_latency_that_is_hardly_of_seconds(put):
    _, said = told(put(rows("arrival_s,input_tokens,output_tokens,tpot", nine, nine, nine, nine)))
    assert any("tpot: half of the requests take more than 1 s, if it counts" in one for one in said)


def test_adapters_that_a_column_of_vllms_names(put):
    work, _ = told(put(f"{HEAD},lora_request\n0,9,5,a\n1,9,5,b\n", "log.csv"))
    assert work.model == ["a", "b"]


def test_prompts_without_what_was_cached_are_whole(put):
    text = "arrival,uncached,cached_tokens,output_tokens\n0,100,40,5\n1,90,0,5\n"
    work, _ = told(put(text, "log.csv"), columns="prompt=uncached")
    assert work.prompt_tokens.tolist() == [140, 90]


def test_prefix_groups_of_a_trace_like_mooncakes(put):
    """They were read and then dropped where no line has ids of blocks."""
    line = '{{"timestamp": {}, "input_length": 90, "output_length": 5, '
    line += '"prefix_group": "a", "prefix_len": 64}}\n'
    work, said = told(put(line.format(0) + line.format(900)))
    assert (shared_prefix_tokens(work), said) == (64, [])


def test_sums_and_means_are_no_requests(put):
    with pytest.raises(HeadwayError, match="num_calls: 30 requests in a row: these are totals"):
        read_trace(put(f"{HEAD},num_calls\n0,900,500,30\n", "log.csv"))
    with pytest.raises(HeadwayError, match="lacks a column of each request's prompt, output"):
        read_trace(put("arrival,avg_input_tokens,mean_output_tokens\n0,9,5\n", "log.csv"))
