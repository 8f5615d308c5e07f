"""Traces of agents: what each request waits for, and how long."""

import json
from pathlib import Path

import pytest

from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.traces import read_trace
from simulator.workload.traces.detect import detect_format

SAMPLES = Path(__file__).parent / "samples"


def call(t, prompt, output, ids=(), **more):
    """Make a request as Weka's plays have them."""
    return {"t": t, "type": "n", "in": prompt, "out": output, "hash_ids": list(ids), **more}


def play(*requests, **more):
    return {"id": "p", "models": ["m"], "block_size": 64, "requests": list(requests), **more}


def put_plays(put, *plays):
    return put("\n".join(json.dumps(one) for one in plays))


def test_dynamo():
    """A session of three turns with a subagent before the last, and another session."""
    path = SAMPLES / "dynamo.jsonl"
    rows = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert detect_format(path) == "dynamo"
    trace = read_trace(path)
    trace.check()
    requests = sorted((row["request"] for row in rows), key=lambda r: r["request_received_ms"])
    assert trace.prompt_tokens.tolist() == [r["replay"]["input_length"] for r in requests]
    assert trace.output_tokens.tolist() == [r["output_tokens"] for r in requests]
    assert trace.after.tolist() == [-1, -1, 0, 2, 3, 4]
    first, second = requests[0], requests[2]
    pause = second["request_received_ms"] - first["request_received_ms"] - first["total_time_ms"]
    assert trace.delay[2] * 1e3 == pytest.approx(pause)
    shared = [parts[0][0] for parts in trace.segments]
    assert len(set(shared)) == 1  # the system prompt fills the first block of all


def test_a_call_of_dynamo_that_was_cancelled_is_left_out(put):
    call = DYNAMO_LINE | {"request": DYNAMO_LINE["request"] | {"finish_reason": "cancelled"}}
    with pytest.warns(HeadwayWarning, match="1 request left out"):
        assert len(read_trace(put(f"{json.dumps(DYNAMO_LINE)}\n{json.dumps(call)}"))) == 1


def test_dynamo_without_sessions_comes_at_its_times(put):
    rows = [json.loads(line) for line in (SAMPLES / "dynamo.jsonl").read_text().splitlines()]
    for row in rows:
        del row["event"]["agent_context"]
    lost = json.loads(json.dumps(rows[0]))
    lost["event"]["request"]["output_tokens"] = 0
    tool = {"event": {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "tool": {}}}
    text = "\n".join(json.dumps(row) for row in (*rows, tool, lost))
    with pytest.warns(HeadwayWarning, match="1 request left out"):
        trace = read_trace(put(text))
    assert trace.after is None
    bare = "\n".join(json.dumps(row["event"]) for row in rows)
    assert read_trace(put(bare)).arrival.tolist() == trace.arrival.tolist()


def test_weka(put):
    """Turns, a subagent that is waited for, one that is not; a pause is what lies between."""
    child = {"t": 2.0, "type": "subagent", "agent_id": "a", "status": "completed"}
    quick = {"t": 2.0, "type": "subagent", "agent_id": "b", "status": "async_launched"}
    path = put_plays(
        put,
        play(
            call(0.0, 100, 5, [1, 2], api_time=1.0),
            child | {"requests": [call(2.5, 64, 3, [1], api_time=0.5)]},
            quick | {"requests": [call(2.6, 64, 3, [9], api_time=1.0)]},
            call(4.0, 130, 6, [1, 2, 3], api_time=1.0),
            call(5.5, 200, 6, [1, 2, 3], api_time=1.0),
        ),
    )
    assert detect_format(path) == "weka"
    trace = read_trace(path)
    trace.check()
    assert trace.prompt_tokens.tolist() == [100, 64, 64, 130, 200]
    assert trace.after.tolist() == [-1, 0, 0, 1, 3]
    assert trace.delay.tolist() == pytest.approx([0, 1.5, 1.6, 1.0, 0.5])
    assert trace.segments[0] == ((("h", "0/1"), 64), (("h", "0/2"), 36))
    assert trace.segments[4][:3] == tuple((("h", f"0/{k}"), 64) for k in (1, 2, 3))
    assert trace.segments[4][3] == (("tail", 4), 8)


def test_times_of_a_subagent_may_count_from_its_own_start(put):
    """In kv-cache-tester's files; one that lies before its subagent tells that they do."""
    child = {"t": 2.0, "type": "subagent", "status": "completed"}
    inner = call(0.5, 64, 3, [1], api_time=0.5)
    path = put_plays(
        put, play(call(0.0, 100, 5, api_time=1.0), child | {"requests": [inner]}, call(4.0, 70, 2))
    )
    trace = read_trace(path)
    assert trace.delay.tolist() == pytest.approx([0, 1.5, 1.0])


def test_lanes(put):
    """Two plays side by side; the third follows the end of the first."""
    plays = [
        play(call(0.0, 10, 2, [1], api_time=1.0), call(1.5, 20, 2, [1], api_time=1.0)),
        play(call(0.0, 11, 2, [1], api_time=1.0)),
        play(call(0.0, 12, 2, [1], api_time=1.0), call(2.0, 22, 2, [1], api_time=1.0)),
    ]
    path = put_plays(put, *plays)
    assert (read_trace(path).arrival == 0).sum() == 3
    trace = read_trace(path, lanes=2)
    trace.check()
    assert trace.prompt_tokens.tolist() == [10, 20, 11, 12, 22]
    assert trace.after.tolist() == [-1, 0, -1, 1, 3]
    assert trace.delay.tolist() == [0, 0.5, 0, 0, 1.0]
    assert read_trace(put(json.dumps(plays[0], indent=1))).after.tolist() == [-1, 0]


def test_lanes_in_a_scenario(write, put):
    """At most so many plays run at a time, whatever their number."""
    put("\n".join([json.dumps(play(call(0.0, 64, 8, [1], api_time=1.0)))] * 6), "plays.jsonl")
    text = (
        "model: llama-3-8b\ncost: {kind: linear, base: 0.01}\n"
        "workload: {trace: {path: plays.jsonl, lanes: 2}}\n"
    )
    table = run(load_scenario(write(text))).requests
    ends = table["arrival"] + table["e2el"]
    running = [((table["arrival"] <= t) & (ends > t)).sum() for t in table["arrival"]]
    assert max(running) == 2
    with pytest.raises(HeadwayError, match="lanes: needs format dynamo or weka or"):
        load_scenario(write(text.replace("lanes: 2", "lanes: 2, format: azure")))


AGENTIC = [
    {"request_id": "a", "session_id": "s", "timestamp": 1000, "input_length": 40,
     "output_length": 4, "hash_ids": [1]},
    {"request_id": "b", "session_id": "s", "input_length": 60, "output_length": 5,
     "hash_ids": [1], "wait_for": ["a"], "delay": 200, "tool_wait_ms": 300},
    {"request_id": "c", "session_id": "s:x", "input_length": 30, "output_length": 5,
     "wait_for": ["a"]},
    {"request_id": "d", "session_id": "s", "input_length": 90, "output_length": 5,
     "wait_for": ["b", "c"], "delay": 100},
]  # fmt: skip


def test_agentic_mooncake(put):
    """Who waits for two answers waits for the last that is named, and that is told."""
    path = put("\n".join(map(json.dumps, AGENTIC)))
    assert detect_format(path) == "agentic_mooncake"
    with pytest.warns(HeadwayWarning, match="1 requests wait for several answers"):
        trace = read_trace(path)
    trace.check()
    assert trace.after.tolist() == [-1, 0, 0, 2]
    assert trace.delay.tolist() == pytest.approx([0, 0.5, 0, 0.1])
    assert trace.segments[0] == ((("h", 1), 40),)
    assert trace.segments[2] is None
    with pytest.warns(HeadwayWarning):
        assert len(read_trace(put("\n".join(map(json.dumps, reversed(AGENTIC)))))) == 4


def test_agentic_mooncake_with_a_header(put):
    """Its second version: the size of blocks is told, dependencies have a delay each."""
    head = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 32}
    first, second = AGENTIC[:2]
    rows = [
        first | {"not_before_ms": 0, "play_id": "p", "hash_ids": [1, 2]},
        {k: v for k, v in second.items() if k not in ("wait_for", "delay", "tool_wait_ms")}
        | {"not_before_ms": 0, "play_id": "p", "hash_ids": [1, 2]}
        | {"dependencies": [{"request_id": "a", "trigger": "completion", "delay_ms": 250}]},
    ]
    trace = read_trace(put("\n".join(map(json.dumps, (head, *rows)))))
    assert trace.delay.tolist() == pytest.approx([0, 0.25])
    assert trace.segments[1] == ((("h", 1), 32), (("h", 2), 28))


DYNAMO_LINE = json.loads((SAMPLES / "dynamo.jsonl").read_text().splitlines()[0])["event"]


def damaged(**changes):
    return json.dumps(DYNAMO_LINE | {"request": DYNAMO_LINE["request"] | changes})


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (damaged(request_received_ms="soon"), ":1: request_received_ms: 'soon' is not a number"),
        (damaged(output_tokens=2.5), ":1: output_tokens: 2.5 is not a whole number"),
        (damaged(replay={"input_length": 9, "trace_block_size": 4,
                         "input_sequence_hashes": [1, 2, 3, 4]}),
         ":1: input_sequence_hashes: 4 blocks of 4 tokens are too many for 9"),
        (damaged(replay={"input_length": 9, "trace_block_size": 0, "input_sequence_hashes": [1]}),
         ":1: replay.trace_block_size: 0 is not a number of tokens"),
        (json.dumps(play(call(0, 10, 1), call("x", 10, 1))), ":1: requests[1].t: 'x' is not a"),
        (json.dumps(play(call(0, -1, 1))), ":1: requests[0].in: -1 is negative"),
        (json.dumps(play() | {"block_size": 0}), ":1: block_size: 0 is not a number of tokens"),
        (json.dumps(play() | {"requests": 5}), ":1: requests: missing, or not a list"),
        (json.dumps(AGENTIC[0]) + "\n" + json.dumps(AGENTIC[0]), ":2: request_id: given twice"),
        (json.dumps(AGENTIC[1]), ":1: wait_for: no request 'a'"),
        (json.dumps(AGENTIC[0] | {"wait_for": ["a"]}), ":1: wait_for: requests wait in a circle"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(put, text, wrong):
    with pytest.raises(HeadwayError) as caught:
        read_trace(put(text))
    assert wrong in str(caught.value)


def copilot_call(second, prompt, output, cached, **more):
    tokens = {"total": prompt + output, "prompt": prompt, "completion": output, "cached": cached}
    return {
        "message_id": f"m{second}",
        "timestamp": f"2026-06-01T10:00:{second:02}.500Z",
        "duration_ms": 2000.0,
        "initiator_type": "agent",
        "model": "Model A",
        "result": "Success",
        "status_code": "OK",
        "tokens": tokens | {"cached_pct": 0.5},
        "message_metadata": [],
    } | more


def test_sessions_of_copilot(put):
    """A call waits for the answer before it and the tools; prompts share what was cached."""
    batch = {"timestamp": "2026-06-01T10:00:02.500Z", "duration_ms": 1500.0, "function_calls": []}
    turns = [
        {
            "turn_id": "t0",
            "llm_calls": [copilot_call(0, 1000, 20, 600), copilot_call(4, 1200, 30, 990)],
            "tool_batches": [batch],
        },
        {"turn_id": "t1", "llm_calls": [copilot_call(50, 1400, 9, 1250, result="UserCancel")]},
        {"turn_id": "t2", "llm_calls": [copilot_call(55, 1400, 0, 0, result="UserCancel")]},
    ]
    other = [{"turn_id": "u", "llm_calls": [copilot_call(1, 700, 5, 600, model="Model B")]}]
    sessions = [
        {"session_id": k, "date": "2026-06-01", "turns": t} for k, t in enumerate([turns, other])
    ]
    path = put("\n".join(json.dumps(one) for one in sessions))
    assert detect_format(path) == "copilot"
    with pytest.warns(HeadwayWarning) as caught:
        trace = read_trace(path)
    trace.check()
    assert [str(one.message).removeprefix(f"{path}: ") for one in caught] == [
        "1 request left out: failed or cancelled when recorded, or without output tokens",
        "model: requests that name one of several models or providers, of which one "
        "serves all here: 4",
        "result: requests that were cancelled, and are played to their end: 1",
    ]
    assert trace.prompt_tokens.tolist() == [1000, 700, 1200, 1400]
    assert trace.after.tolist() == [-1, -1, 0, 2]
    assert trace.delay.tolist() == pytest.approx([0, 0, 2, 44])
    first, second, third, last = trace.segments
    assert first[0] == second[0] == (("cached",), 600)
    assert [sum(n for _, n in parts) for parts in trace.segments] == [1000, 700, 1200, 1400]
    assert third[:2] == (first[0], (first[1][0], 390))
    assert last[: len(third)] == third
    assert len(read_trace(path, lanes=1)) == 4
    broken = [
        {
            "turn_id": "t",
            "llm_calls": [copilot_call(0, 5, 5, 0), copilot_call(1, 5, 5, 0, timestamp="soon")],
        }
    ]
    text = json.dumps({"session_id": "s", "turns": broken})
    with pytest.raises(HeadwayError, match=":1: timestamp: 'soon' is not a date"):
        read_trace(put(text))
