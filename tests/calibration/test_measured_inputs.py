"""Each input of a validation against measured runs is used, or named."""

import json

import pytest

from calibration.measured.predict import validate_measured
from calibration.measured.requests import read_requests
from calibration.measured.workload import replay
from simulator.util.errors import HeadwayWarning
from tests.support.measured_runs import run_of

RUN = {"run_id": "a", "gpu": "H100", "model": "llama-3-8b", "engine_version": "0.19.0"}


@pytest.fixture
def mean_e2el(tmp_path):
    """Return a function that predicts one run of some requests: ms, and its notes."""

    def predict(requests, *cells, columns=None, **row):
        (tmp_path / "requests.csv").write_text(requests)
        row = {**RUN, "per_request_file": "requests.csv", **row}
        (tmp_path / "runs.csv").write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
        (outcome,) = validate_measured(tmp_path, cells=cells, columns=columns)
        assert outcome.reason == ""
        found = {each.metric: each.predicted for each in outcome.rows}
        return found["mean_e2el_ms"], outcome.notes

    return predict


def table(*columns, extra=lambda k: (), count=8):
    """Write requests of 4,000 tokens, one a second, with more columns."""
    lines = [f"{k},4000,2" + "".join(f",{cell}" for cell in extra(k)) for k in range(count)]
    return "\n".join([",".join(("arrival_s,input_tokens,output_tokens", *columns)), *lines]) + "\n"


def test_prompt_ids_count_with_times_and_without(mean_e2el):
    apart, _ = mean_e2el(table())
    alike, _ = mean_e2el(table("prompt_id", extra=lambda k: (k % 2,)))
    timed, _ = mean_e2el(table("prompt_id", "e2e_s", extra=lambda k: (k % 2, 0.1)))
    assert alike < apart * 0.6
    assert timed < alike  # its mean lacks the first, which is cold
    named, _ = mean_e2el(
        table("text", extra=lambda k: (k % 2,)).replace("input_tokens", "n"),
        columns="arrival=arrival_s,prompt=n,output=output_tokens,prompt_id=text",
    )
    assert named == alike


def test_an_empty_prompt_id_is_no_id(mean_e2el):
    apart, _ = mean_e2el(table())
    assert mean_e2el(table("prompt_id", extra=lambda k: ("",)))[0] == apart
    some, _ = mean_e2el(table("prompt_id", extra=lambda k: ("" if k % 2 else "x",)))
    own, _ = mean_e2el(table("prompt_id", extra=lambda k: (f"own-{k}" if k % 2 else "x",)))
    assert some == own < apart


def test_prompt_ids_of_json_lines_count(put):
    lines = [
        {"arrival_s": k, "input_tokens": 9, "output_tokens": 2, "prompt_id": "x"} for k in range(3)
    ]
    found = read_requests(put("\n".join(map(json.dumps, lines)), "r.jsonl"))
    assert found.prompt_id == ["x"] * 3


def test_a_pool_repeats_the_prompts_of_recorded_requests(mean_e2el):
    alike, _ = mean_e2el(table("prompt_id", extra=lambda k: (k % 2,)))
    assert mean_e2el(table(), "prompt_pool=2")[0] == alike
    assert mean_e2el(table(), prompt_pool="2")[0] == alike
    own, notes = mean_e2el(table("prompt_id", extra=lambda k: (k,)), prompt_pool="2")
    assert own > alike  # the file's ids come first
    assert "cells without effect on this run: prompt_pool" in notes


def test_cells_that_change_nothing_are_named(mean_e2el):
    row = {"n_requests": "8", "burstiness": "2", "router": "random", "arrival": "poisson"}
    _, notes = mean_e2el(table(), **row)
    told = "cells without effect on this run: n_requests, burstiness, router, arrival"
    assert told in notes
    assert not any("without effect" in note for note in mean_e2el(table())[1])


def test_a_set_cell_that_no_row_lacks_is_named(mean_e2el):
    with pytest.warns(HeadwayWarning, match=r"--set tp=2: without effect: each row of .* its own"):
        mean_e2el(table(), "tp=2", tp="1")


def test_what_a_file_asks_for_and_no_server_here_has_is_named(mean_e2el):
    _, notes = mean_e2el(table("model", "images", extra=lambda k: ("ab"[k % 2], 1)))
    assert any("requests ask for several models: a (4), b (4); one serves" in n for n in notes)
    assert any("images: 8, whose sizes nothing tells: not simulated" in n for n in notes)


def test_turns_of_conversations_keep_what_they_ask_for(put):
    text = table("client_id", "conversation", "priority", extra=lambda k: ("a", "x", k), count=3)
    work = replay(run_of(), read_requests(put(text, "r.csv")), {})
    assert work.priority.tolist() == [0, 1, 2]
    text = table("client_id", "conversation", "prompt_id", extra=lambda k: ("a", "x", k))
    found = read_requests(put(text, "r.csv"))
    with pytest.warns(HeadwayWarning, match="prompt_id: without effect: conversations say"):
        replay(run_of(), found, {})
