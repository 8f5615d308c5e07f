"""What a log has and a run does not play is counted, by one general rule for each kind."""

import json

import pytest

from tests.workload.test_ledger import HEAD, told

SPAN = {"traceId": "t", "type": "GENERATION"}
USAGE = {"usageDetails": {"input": 100, "output": 40}}
NO_COUNTS = "requests left out, which have no token counts"


def langfuse(put, *spans):
    """Read observations with a number for each, with what is told."""
    named = ({"id": f"o{k}", "startTime": f"2026-03-02T09:00:0{k}Z"} for k in range(len(spans)))
    every = (name | SPAN | span for name, span in zip(named, spans, strict=True))
    return told(put("\n".join(map(json.dumps, every))))


@pytest.mark.parametrize(
    ("silent", "count"),
    [
        ({"usageDetails": {}}, 1),
        ({"usageDetails": {"input": 100}}, 1),
        ({"type": "SPAN"}, 0),
        ({"type": "EMBEDDING", "gen_ai.operation.name": "embeddings"}, 0),
        ({"type": "", "gen_ai.request.model": "m"}, 1),
        ({"type": "", "openinference.span.kind": "LLM"}, 1),
        ({"type": "", "gen_ai.operation.name": "chat"}, 1),
        ({"type": "", "gen_ai.operation.name": "execute_tool"}, 0),
    ],
)
def test_calls_without_token_counts(put, silent, count):
    """In spans that are calls to generate text, by their kind or their model; no other ones."""
    work, said = langfuse(put, USAGE, silent, USAGE)
    assert len(work) == 2
    assert said == [f"{NO_COUNTS}: {count}"] * count


def test_spans_that_enclose_others(put):
    """One without token counts around a call is no request, and not counted."""
    inner = USAGE | {"parentObservationId": "o0"}
    work, said = langfuse(put, USAGE, inner, USAGE)
    assert len(work) == 2
    assert said == ["enclosing spans left out, each taken as the sum of its children: 1"]
    assert not langfuse(put, {}, inner, inner)[1]


def test_spans_that_were_exported_twice(put):
    """By trace and span: a span's number may come again in another trace."""
    work, said = langfuse(put, USAGE, {"id": "o0"} | USAGE, {"id": "o0", "traceId": "u"} | USAGE)
    assert len(work) == 2
    assert said == ["spanId: spans that come again left out: 1"]


def test_requests_whose_id_came_before_are_played_and_counted(put):
    rows = "0,9,5,a\n1,9,5,b\n1,9,5,b\n2,9,5,\n3,9,5,\n"
    work, said = told(put(f"{HEAD},request_id\n{rows}"))
    assert len(work) == 5
    assert said == ["request_id: requests whose id came before, played all the same: 1"]


def test_answers_that_max_tokens_cuts(put):
    """Not those of 0, which is none, and as long as allowed."""
    work, said = told(put(f"{HEAD},max_tokens\n0,9,50,20\n1,9,5,20\n2,9,50,\n3,9,20,20\n"))
    assert work.max_tokens.tolist() == [20, 20, 0, 20]
    assert said == [
        "max_tokens: answers longer than it allows, cut there: 1",
        "max_tokens: output tokens that this cuts off: 30",
    ]


@pytest.mark.parametrize(
    ("columns", "cells", "cached", "later"),
    [
        ("n", ["2", "1", "1"], 240, 2),
        ("prefix_id,prefix_tokens", ["a,16", "a,16", ","], 80, 2),
        ("prefix_id,prefix_tokens", ["a,96", "b,96", "a,96"], 80, 2),
    ],
)
def test_requests_that_share_nothing_beside_some_that_do(put, columns, cells, cached, later):
    """Whether one asks for several answers, or some have a prefix: the others are told."""
    rows = "".join(f"{k},100,5,{cell},80,c\n" for k, cell in enumerate(cells))
    _, said = told(put(f"{HEAD},{columns},cached_tokens,conversation_id\n{rows}"))
    assert any(f"cache had when it was recorded: {cached};" in one for one in said)
    assert any(f"requests that continue a conversation: {later};" in one for one in said)


def test_messages_of_sharegpt_that_are_not_played(put):
    def talk(*lengths):
        return {"conversations": [{"value": "x" * 4 * n} for n in lengths]}

    path = put(json.dumps([talk(9, 9, 9, 9), talk(9, 9), talk(9), talk(1, 9)]))
    work, said = told(path, chars_per_token=4)
    assert len(work) == 2
    assert said == [
        "conversations: later messages left out: 2",
        "conversations left out, as vllm bench serve does: 2",
    ]
