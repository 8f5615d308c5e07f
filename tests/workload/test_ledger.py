"""What becomes of each column: used, without effect, not understood; nothing changes in silence."""

import json
import warnings

import numpy as np
import pytest

from headway.cli.main import main
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayWarning
from simulator.workload.traces import read_trace
from simulator.workload.traces.formats import FORMATS
from simulator.workload.traces.read import read_measured
from tools.trace_columns import PAGE, page

ROWS = (
    "request_id,start,prompt_tokens,completion_tokens,cache_hit,call_type,e2e\n"
    "a,0,100,20,False,acompletion,2\nb,1,100,20,True,acompletion,0.003\n"
    "c,2,100,0,False,aembedding,2\nd,3,100,20,None,acompletion,2\n"
)
HEAD = "arrival,prompt_tokens,output_tokens"


def told(path, **options):
    """Read a trace; with what is told of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work = read_trace(path, **options)
    return work, [str(one.message).removeprefix(f"{path}: ") for one in caught]


def as_json(text):
    """Return the rows of a CSV as JSON lines, numbers as such."""
    head, *rows = [line.split(",") for line in text.splitlines()]
    number = {k: lambda one: float(one or 0) for k in range(len(head)) if rows[0][k].isdigit()}
    return "\n".join(
        json.dumps({n: number.get(k, str)(row[k]) for k, n in enumerate(head)}) for row in rows
    )


@pytest.mark.parametrize("form", [str, as_json])
def test_what_no_engine_generated_is_no_load(put, form):
    """Answers of a proxy's cache, and calls that are none to generate text, each counted."""
    path = put(form(ROWS), "spend.csv")
    work, said = told(path)
    assert work.arrival.tolist() == [0, 3]
    assert said[:2] == [
        "cache_hit: requests left out: 1, answered by a proxy's cache",
        "call_type: requests left out: 1, no calls to generate text",
    ]
    assert read_measured(path, None, {})[1].measured.e2el.tolist() == [2, 2]


def test_the_number_of_images_is_read(put):
    """Of Azure's multimodal trace, under the name that its columns have."""
    text = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
    text += "".join(f"2024-10-15T12:00:0{k}Z,{k},{100 + k},5\n" for k in range(4))
    work, said = told(put(text))
    assert work.images.tolist() == [0, 1, 2, 3]
    assert not said


def test_images_without_sizes_are_told(tmp_path):
    """Where the scenario does not say how many tokens each has."""
    (tmp_path / "t.csv").write_text(f"{HEAD},num_images\n0,9,5,1\n1,9,5,2\n")
    (tmp_path / "s.yaml").write_text("model: llama-3-8b\nworkload: {trace: {path: t.csv}}\n")
    with pytest.warns(HeadwayWarning, match="images: 3, whose sizes nothing tells"):
        make_workload(load_scenario(tmp_path / "s.yaml"))


def test_several_models_on_one_engine_are_told(tmp_path):
    (tmp_path / "t.csv").write_text(f"{HEAD},model\n0,9,5,a\n1,9,5,b\n2,9,5,b\n")
    (tmp_path / "s.yaml").write_text("model: llama-3-8b\nworkload: {trace: {path: t.csv}}\n")
    with pytest.warns(HeadwayWarning, match=r"several models: b \(2\), a \(1\); one serves all"):
        make_workload(load_scenario(tmp_path / "s.yaml"))


def test_when_it_was_sent_not_when_it_was_planned(put):
    """And a prefix that the log counts apart is part of the prompt: BLIS' TraceV2."""
    head = "client_id,prefix_group,prefix_length,input_tokens,output_tokens,server_input_tokens"
    rows = "".join(
        f"c,doc,400,16,5,{whole},{k * 10_000},{k // 2 * 10**6},ok,length\n"
        for k, whole in enumerate([416, 416, 0, 416])
    )
    text = f"{head},arrival_time_us,send_time_us,status,finish_reason\n{rows}"
    work, said = told(put(text))
    assert work.arrival.tolist() == [0, 0, 1, 1]
    assert work.prompt_tokens.tolist() == [416] * 4
    assert [parts[0] for parts in work.segments] == [(("prefix", "doc"), 400)] * 4
    assert not said


@pytest.mark.parametrize("column", ["finish_reason", "status", "status_code"])
def test_each_column_that_tells_a_failure_counts(put, column):
    """A status beside a finish_reason, too."""
    others = {"finish_reason": "stop", "status": "ok", "status_code": "200"}
    bad = others | {column: "503" if column == "status_code" else "timeout"}
    head = f"{HEAD},{','.join(others)}\n"
    rows = f"0,9,5,{','.join(others.values())}\n1,9,5,{','.join(bad.values())}\n"
    work, said = told(put(head + rows))
    assert len(work) == 1
    assert said == [
        "1 request left out: failed or cancelled when recorded, or without output tokens"
    ]


def test_what_an_engine_had_cached_is_told(put):
    """Which prompts share it is not; `cached=` lets all begin alike."""
    path = put(f"{HEAD},cached_tokens\n0,100,5,0\n1,100,5,80\n2,100,5,48\n")
    work, said = told(path)
    assert work.segments is None
    assert "input tokens that the engine's cache had when it was recorded: 128;" in said[0]
    columns = "arrival=arrival,prompt=prompt_tokens,output=output_tokens,cached=cached_tokens"
    work, said = told(path, columns=columns)
    assert [parts[0] for parts in work.segments[1:]] == [(("cached",), 80), (("cached",), 48)]
    assert not said


def test_requests_of_one_conversation_share_what_came_before(put):
    """Prompt and answer, cut to the prompt's length; without `prefix=` that is told."""
    path = put(f"{HEAD},conversation_id\n0,10,5,a\n1,30,5,b\n2,40,5,a\n3,12,5,a\n")
    work, said = told(path)
    assert work.segments is None
    assert said == [
        "conversation_id: requests that continue a conversation: 2; they come at their recorded "
        "times, and share nothing but with prefix=conversation_id"
    ]
    columns = "arrival=arrival,prompt=prompt_tokens,output=output_tokens,prefix=conversation_id"
    work, said = told(path, columns=columns)
    first = (("in", 0, 0), 10)
    assert work.segments[2] == (first, (("out", 0), 5), (("in", 2, 15), 25))
    assert work.segments[3] == (first, (("out", 0), 2))
    assert said == [
        "conversation_id: prompts that are no longer than what they are to begin with, and all of "
        "it: 1",
        "conversation_id: requests that follow another's answer, and come at their recorded times "
        "all the same: 2",
    ]


@pytest.mark.parametrize(
    ("name", "value", "none", "said"),
    [
        ("deadline_us", "500", "0", "have a deadline"),
        ("reasoning_tokens", "4", "0", "reason, in tokens"),
        ("n", "4", "1", "ask for several answers"),
        ("num_retries", "1", "0", "were tried again"),
        ("audio_tokens", "5", "", "have audio"),
        ("video_tokens", "5", "0", "have video"),
        ("attempt_number", "2", "1", "were tried more than once"),
        ("previous_response_id", "r1", "", "follow another's answer"),
        ("system_prompt_id", "p1", "", "begin with a prefix of unknown length"),
        ("service_tier", "flex", "", "have a class of service"),
        ("parent_chat_id", "3", "-1", "follow another's answer"),
    ],
)
@pytest.mark.parametrize("form", [str, as_json])
def test_what_changes_a_load_and_is_not_simulated_is_counted(put, name, value, none, said, form):
    path = put(form(f"{HEAD},{name}\n0,9,5,{value}\n1,9,5,{none}\n2,9,5,{value}\n"))
    _, all_said = told(path)
    assert len(all_said) == 1
    assert all_said[0].startswith(f"{name}: requests that {said}")
    assert all_said[0].endswith(": 2")
    mooncake = [{"timestamp": k, "input_length": 9, "output_length": 5} for k in range(2)]
    mooncake[1][name] = value
    _, all_said = told(put("\n".join(map(json.dumps, mooncake))))
    assert all_said[0].startswith(f"{name}: requests that {said}")


def test_the_ledger_of_columns(put, capsys):
    """Told by `trace describe`, and what is not understood once on stderr."""
    path = put(f"id,{HEAD},mood,total_cost\n1,0,9,5,x,0.1\n", "log.csv")
    assert main(["trace", "describe", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "columns used    arrival=arrival, prompt=prompt_tokens, output=output_tokens" in out
    assert "without effect  id, total_cost" in out
    assert "not understood  mood" in out
    assert err == f"headway: warning: {path}: not understood, and without effect: mood\n"
    assert main(["trace", "describe", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["columns"]["not_understood"] == ["mood"]


def test_prompts_as_anthropic_counts_them(put):
    """What its cache had, and what went into it, comes on top of `input_tokens`."""
    head = "start,input_tokens,output_tokens,cache_read_input_tokens,cache_creation_input_tokens"
    work, _ = told(put(f"{head}\n0,10,5,0,90\n1,10,5,90,0\n"))
    assert work.prompt_tokens.tolist() == [100, 100]


def test_a_wait_at_the_client_is_part_of_when_it_was_sent(put):
    work, _ = told(put(f"{HEAD},client_queue_time\n0,9,5,0\n0,9,5,1.5\n"))
    assert np.allclose(work.arrival, [0, 1.5])


def test_the_tables_of_columns_are_up_to_date():
    """Made again by `python -m tools.trace_columns`; each format says what it uses."""
    text = PAGE.read_text("utf-8")
    assert page(text) == text
    by_name = {name for name, form in FORMATS.items() if not form.used}
    assert by_name == {"requests", "access_log"}


def test_formats_of_agents_tell_of_their_keys(put):
    """What nobody knows is named; what a subagent's requests have, too."""
    call = {"t": 0.5, "type": "n", "in": 20, "out": 4, "hash_ids": [1], "mood": 3}
    play = {"id": "p", "block_size": 64, "requests": [call], "think_time": 1}
    _, said = told(put(json.dumps(play)))
    assert said == ["not understood, and without effect: mood"]
    line = {"request_id": "a", "input_length": 5, "output_length": 2, "timestamp": 0, "x": {"y": 1}}
    _, said = told(put(json.dumps(line | {"wait_for": [], "mood": 1})))
    assert said == ["not understood, and without effect: mood"]


def test_a_conversation_goes_by_arrival(put):
    """Its log may be in the order of answers, and name the column `prefix_group`."""
    rows = "t,n,m,id\n5,300,10,a\n0,100,10,a\n1,50,10,b\n"
    columns = "arrival=t,prompt=n,output=m,prefix_group=id"
    with pytest.warns(HeadwayWarning, match="earlier than one before"):
        work = read_trace(put(rows), columns=columns)
    assert work.arrival.tolist() == [0, 1, 5]
    first, _, last = work.segments
    assert last == (*first, (("out", 0), 10), (("in", 0, 110), 190))


def test_days_without_a_time_come_all_at_once_and_say_so(put):
    head = "date,prompt_tokens,output_tokens"
    _, said = told(put(f"{head}\n2026-03-30,9,5\n2026-03-30,9,5\n"), columns="arrival=date,"
                   "prompt=prompt_tokens,output=output_tokens")  # fmt: skip
    assert said == ["date: is the same of each request: all come at once"]
    assert told(put(f"{HEAD}\n0,9,5\n0,9,5\n"))[1] == []  # a burst that was meant


def test_adapters_have_their_servers_names(put):
    work, said = told(put(f"{HEAD},lora_path\n0,9,5,a\n1,9,5,\n"))
    assert (list(work.model), said) == (["a", ""], [])


def test_tries_of_a_run_of_headways_are_counted(put):
    """Where none was tried again, its time is 0.000000000."""
    rows = "0,9,5,0.000000000\n1,9,5,0.250000000\n"
    (said,) = told(put(f"{HEAD},retry_time\n{rows}"))[1]
    assert said.startswith("retry_time: requests that were tried again, and are played once")
    assert said.endswith(": 1")
