"""Logs whose numbers cannot be as they are named: units, parts larger than their whole, repeats."""

import json

import numpy as np
import pytest

from headway.traffic.scrapes import read_metrics
from simulator.util.errors import HeadwayError
from simulator.workload.traces.read import read_measured
from tests.workload.test_ledger import HEAD, told
from tests.workload.test_vllm_log import log

CONVERSATION = "arrival=arrival,prompt=prompt_tokens,output=output_tokens,prefix=chat"


def test_an_answer_longer_than_its_client_allows_is_told_in_mooncakes_words(put):
    row = {"timestamp": 0, "input_length": 9, "output_length": 50, "max_tokens": 20}
    _, said = told(put(json.dumps(row)))
    assert said == [
        "max_tokens: answers longer than it allows, cut there: 1",
        "max_tokens: output tokens that this cuts off: 30",
    ]


@pytest.mark.parametrize(
    ("totals", "prompts"),
    [
        (("", "", ""), [120, 80, 90]),
        ((25, 55, 95), [120, 80, 90]),
        ((125, 55, 95), [120, 50, 90]),
    ],
)
def test_cached_tokens_are_beside_every_prompt_if_they_are_beside_one(put, totals, prompts):
    """Where a total has them in, it says so, unless totals lack them where they must be."""
    cached = (100, 30, 0)
    rows = zip((20, 50, 90), cached, totals, strict=True)
    rows = "".join(f"{k},{n},5,{c},{total}\n" for k, (n, c, total) in enumerate(rows))
    work, said = told(put(f"{HEAD},cached_tokens,total_tokens\n{rows}"))
    assert work.prompt_tokens.tolist() == prompts
    added = sum(prompts) - 160
    text = "tokens added to each prompt that lacks them, as some have fewer tokens than these"
    assert said[0] == f"cached_tokens: {text}: {added}"


def test_reasoning_longer_than_its_answer_is_beside_every_answer(put):
    work, said = told(put(f"{HEAD},reasoning_tokens\n0,9,5,7\n1,9,50,7\n"))
    assert work.output_tokens.tolist() == [12, 57]
    text = "tokens added to each output that lacks them, as some have fewer tokens than these"
    assert said == [f"reasoning_tokens: {text}: 14"]


@pytest.mark.parametrize(
    ("form", "head"),
    [
        ("lengths", "arrived_at,num_prefill_tokens,num_decode_tokens"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens"),
    ],
)
def test_a_slow_load_in_the_unit_of_a_format_is_doubted(put, form, head):
    def said(step):
        path = put(f"{head}\n" + "".join(f"{k * step},9,5\n" for k in range(4)))
        return told(path, format=form)[1]

    slow = said(206)
    assert "one request in 206 s, if its times are seconds; " in slow[0]
    assert slow[0].endswith("workload.trace.rate_scale: 1000")
    assert not said(9)


def test_mooncakes_times_in_us_are_doubted(put):
    row = {"input_length": 9, "output_length": 5}
    text = "\n".join(json.dumps(row | {"timestamp": 2_000_000 * k}) for k in range(3))
    assert "one request in 2,000 s, if its times are milliseconds; " in told(put(text))[1][0]
    work, said = told(put(text), time_unit="s")
    assert work.arrival.tolist() == [0, 2e6, 4e6]
    assert not said


@pytest.mark.parametrize("kind", ["prompt", "output"])
def test_lengths_that_a_log_cut_are_told(put, kind):
    """Three of eight have the same length, and none is longer."""
    size = [9, 3, 9, 4, 9, 5, 6, 7]
    rows = [("01-01 00:00:01", 30, n if kind == "prompt" else k + 1) for k, n in enumerate(size)]
    ids = ([1] * (n if kind == "output" else k + 1) for k, n in enumerate(size))
    text = log("0.9", rows) + "".join(
        f"INFO 01-01 00:00:02 [logger.py:60] Generated response cmpl-{k}: output: 'x', "
        f"output_token_ids: {one}, finish_reason: stop\n"
        for k, one in enumerate(ids)
    )
    assert told(put(text))[1] == [
        f"{kind}_token_ids: 3 {kind}s of 9 tokens, and none is longer: does --max-log-len cut them?"
    ]


@pytest.mark.parametrize("form", ["0.9", "0.11"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_log_that_says_each_line_twice_has_each_request_once(put, form, apart):
    text = log(form) + "".join(
        "INFO 01-01 00:00:02 [logger.py:60] Generated response cmpl-0 (streaming delta): "
        f"output: 'x', output_token_ids: [{one}], finish_reason: None\n"
        for one in (5, 6)
    )
    lines = text.splitlines()
    twice = [*lines, *lines] if apart else [one for one in lines for _ in range(2)]
    once, _ = told(put(text))
    work, said = told(put("\n".join(twice)))
    assert work.output_tokens.tolist() == once.output_tokens.tolist() == [2, 30, 7]
    assert work.prompt_tokens.tolist() == once.prompt_tokens.tolist()
    assert said[0] == "requests whose lines come again, left out: 3"


def test_prompts_no_longer_than_the_conversation_before_them_are_told(put):
    """As where each line has its turn alone."""
    path = put(f"{HEAD},chat\n0,100,50,a\n1,90,5,a\n2,30,5,b\n3,60,5,b\n")
    _, said = told(path, columns=CONVERSATION)
    text = "prompts that are no longer than what they are to begin with, and all of it"
    assert f"chat: {text}: 1" in said


def test_a_prefix_longer_than_its_prompt_is_told(put):
    _, said = told(put(f"{HEAD},prefix_group,prefix_tokens\n0,100,5,a,100\n1,90,5,a,100\n"))
    text = "prompts that are no longer than what they are to begin with, and all of it"
    assert said == [f"prefix_group: {text}: 1"]


def test_requests_that_are_the_sum_of_others_are_told(put):
    rows = "0,100,50,s,\n1,60,20,t,s\n2,40,30,u,s\n3,9,5,v,s9\n"
    _, said = told(put(f"{HEAD},span_id,parent_id\n{rows}"))
    text = "requests that are the sum of the requests that name them, played beside these"
    assert f"parent_id: {text}: 1" in said
    _, said = told(put(f"{HEAD},span_id,parent_id\n0,9,5,,\n1,9,5,a,b\n"))
    assert not [one for one in said if text in one]


def test_scrapes_of_two_engines_are_of_two_servers(put):
    first = put("vllm:prompt_tokens_total 1\n", "a.txt")
    (later := first.with_name("b.txt")).write_text("sglang:prompt_tokens_total 9\n")
    with pytest.raises(HeadwayError) as caught:
        read_metrics(first, later, 60.0)
    assert str(caught.value) == f"{later}: has metrics of another engine than {first}: two servers"


def test_an_answer_that_came_whole_tells_no_ttft(put):
    """It was not streamed; an answer of one token may have been."""
    rows = "0,9,5,2,2\n0,9,5,1,2\n0,9,1,2,2\n"
    path = put(f"{HEAD},first_token_time,end_time\n{rows}")
    measured = read_measured(path, None, {})[1].measured
    assert np.allclose(measured.ttft, [np.nan, 1, 2], equal_nan=True)
    assert np.allclose(measured.tpot, [np.nan, 0.25, np.nan], equal_nan=True)
    assert measured.e2el.tolist() == [2, 2, 2]
    text = "requests whose first token came with the last, so nothing tells their TTFT"
    assert told(path)[1] == [f"first_token_time: {text}: 1"]


def test_nginxs_finer_clock_is_taken(put):
    """Of the two that it may write into its JSON."""
    row = {"prompt_tokens": 9, "completion_tokens": 5, "request_time": 0.5}
    rows = [
        row | {"time_iso8601": f"2026-03-02T09:00:{k:02d}+00:00", "msec": f"{1772442000 + k}.75{k}"}
        for k in range(3)
    ]
    work, _ = told(put("\n".join(map(json.dumps, rows))))
    assert np.allclose(work.arrival, [0, 1.001, 2.002], atol=1e-6)


def test_words_without_an_error_are_no_error(put):
    work, said = told(put(f"{HEAD},error\n0,9,5,ok\n1,9,5,success\n2,9,5,timeout\n"))
    assert len(work) == 2
    assert len(said) == 1


def test_a_rush_is_asked_about_by_the_name_of_its_column(put):
    """In a unit that would be slower; dates have their unit."""
    path = put("t,isl,osl\n" + "".join(f"{k / 1e3},9,5\n" for k in range(4)))
    said = told(path, columns="arrival=t,prompt=isl,output=osl")[1]
    assert "1,000 requests/s, if its times are seconds; if not, say so: arrival=t:min" in said
    dates = "".join(f"2026-03-02T09:00:00.00{k}Z,9,5\n" for k in range(4))
    assert not told(put(f"{HEAD}\n{dates}"))[1]


def test_a_date_of_another_century_is_written_as_one(put):
    with pytest.raises(HeadwayError, match=r":2: arrival: 1926-03-02T09:00:00 is the year 1926$"):
        told(put(f"{HEAD}\n1926-03-02T09:00:00Z,9,5\n"))


def test_hash_ids_that_are_read_say_which_prompts_share_what_was_cached(put):
    row = {"timestamp": 0, "input_length": 9, "output_length": 5, "cached_tokens": 4}
    with_ids = json.dumps(row | {"hash_ids": [1]})
    assert not told(put(with_ids))[1]
    assert "nothing says which prompts share them" in told(put(json.dumps(row)))[1][0]


def test_a_session_of_claude_code_may_begin_with_its_summary(put):
    usage = {"usage": {"input_tokens": 9, "output_tokens": 5}, "id": "m"}
    row = {"parentUuid": None, "sessionId": "s", "timestamp": "2026-03-02T09:00:00Z"}
    lines = [{"type": "summary", "leafUuid": "u"}, row | {"message": usage}]
    assert len(told(put("\n".join(map(json.dumps, lines))))[0]) == 1


def test_an_archive_without_a_file_is_named(tmp_path):
    path = tmp_path / "a.zip"
    path.write_bytes(b"PK\5\6" + bytes(18))
    with pytest.raises(HeadwayError, match=r"is a zip archive without a file$"):
        told(path)


def test_times_of_ends_are_no_arrivals(put):
    work, said = told(put("timestamp,isl,osl,latency,end\n5,9,5,2,5\n6,9,5,2,6\n9,9,5,1,9\n"))
    assert work.arrival.tolist() == [0, 1, 5]
    assert said == ["timestamp: the ends of requests, which came before them"]
