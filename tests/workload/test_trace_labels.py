"""Client, priority and max_tokens of each request of a trace, in every format."""

import json

import numpy as np
import pytest

from simulator.util.errors import HeadwayError
from simulator.workload.traces import read_trace, write_mooncake
from tests.workload.test_traces import ONE

CLIENTS, PRIORITIES = ["ann", "Smith, J", "7"], [2, -1, 0]


def labelled(form: str, clients=CLIENTS, priorities=PRIORITIES) -> str:
    """Repeat the first line of a trace once for each client; None and "" leave a label out."""
    first, *rest = ONE[form].replace("\r\n", "\n").split("\n")
    pairs = list(zip(clients, priorities, strict=True))
    if first.startswith("{"):
        rows = [
            json.loads(first) | dict(zip(("client", "priority"), pair, strict=True))
            for pair in pairs
        ]
        return "".join(
            json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in rows
        )
    lines = [f'{rest[0]},"{client or ""}",{"" if p is None else p}' for client, p in pairs]
    return "\n".join([first + ",client,priority", *lines])


def read(tmp_path, text: str, **options):
    path = tmp_path / "trace"
    path.write_text(text, newline="")
    return read_trace(path, **options)


def problems(tmp_path, text: str) -> list[str]:
    with pytest.raises(HeadwayError) as caught:
        read(tmp_path, text)
    return [message.removeprefix(f"{tmp_path}/") for message in caught.value.messages]


@pytest.mark.parametrize("form", ONE)
def test_every_format_may_say_whose_a_request_is_and_how_urgent(tmp_path, form):
    workload = read(tmp_path, labelled(form))
    assert workload.client == CLIENTS
    assert workload.priority.tolist() == PRIORITIES


@pytest.mark.parametrize("form", ONE)
def test_a_trace_without_them_has_neither(tmp_path, form):
    workload = read(tmp_path, ONE[form])
    assert workload.client is None
    assert workload.priority is None


@pytest.mark.parametrize("form", ONE)
def test_no_priority_is_vllms_default(tmp_path, form):
    workload = read(tmp_path, labelled(form, priorities=[5, None, None]))
    assert workload.priority.tolist() == [5, 0, 0]


@pytest.mark.parametrize("form", ONE)
def test_a_request_without_a_client_is_nobodys(tmp_path, form):
    assert read(tmp_path, labelled(form, clients=["a", None, "b"])).client == ["a", "unknown", "b"]


def test_names_go_with_their_requests_when_these_are_sorted(tmp_path):
    header, *rows = "arrived_at,num_prefill_tokens,num_decode_tokens,client", "2,9,9,b", "1,8,8,a"
    with pytest.warns(match="sorted by arrival"):
        workload = read(tmp_path, "\n".join([header, *rows]))
    assert workload.client == ["a", "b"]
    assert workload.prompt_tokens.tolist() == [8, 9]


def test_failed_requests_take_their_labels_along(tmp_path):
    text = (
        "Timestamp,Request tokens,Response tokens,priority,client\n"
        "1,5,5,1,a\n2,6,0,2,b\n3,7,7,3,c\n"
    )
    with pytest.warns(match="1 request left out"):
        workload = read(tmp_path, text)
    assert (workload.client, workload.priority.tolist()) == (["a", "c"], [1, 3])


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (True, "true is not a whole number such as 64"),
        (1.5, "1.5 is not a whole number such as 64"),
        ("x", "'x' is not a whole number such as 64"),
        (10**15, "1000000000000000 is not a whole number such as 64"),
    ],
)
def test_a_wrong_priority_in_json(tmp_path, value, why):
    text = labelled("mooncake", ["a"], [value])
    assert problems(tmp_path, text) == [f"trace:1: priority: {why}"]


@pytest.mark.parametrize("value", [["b"], True, "a\0"])
def test_a_wrong_client_in_json_is_told_once(tmp_path, value):
    (told,) = problems(tmp_path, labelled("mooncake", ["a", value], [1, 1]))
    assert told.startswith("trace:2: client: ")
    assert told.endswith(("is no name", "has the character NUL"))


@pytest.mark.parametrize("value", ["x", "1.5", "9" * 16, "1_0"])
def test_a_wrong_priority_in_csv(tmp_path, value):
    text = labelled("azure", ["a"], [value])
    why = f"{value!r} is not a whole number such as 64"
    assert problems(tmp_path, text) == [f"trace:2: priority: {why}"]


@pytest.mark.parametrize("form", ["azure", "mooncake"])
def test_a_whole_number_with_a_point_is_a_priority(tmp_path, form):
    """As tables with gaps have it."""
    assert read(tmp_path, labelled(form, ["a", "b"], [1.0, -2.0])).priority.tolist() == [1, -2]


@pytest.mark.parametrize("name", ["Client", "PRIORITY"])
@pytest.mark.parametrize("form", ["azure", "mooncake"])
def test_columns_in_another_case_are_read(tmp_path, name, form):
    """As those of a table without a format."""
    workload = read(tmp_path, labelled(form).replace(name.lower(), name))
    assert workload.client is not None
    assert workload.priority is not None


def test_they_are_written_and_read_again(tmp_path):
    workload = read(tmp_path, labelled("azure"))
    write_mooncake(workload, tmp_path / "again.jsonl")
    again = read_trace(tmp_path / "again.jsonl")
    assert again.client == workload.client
    assert np.array_equal(again.priority, workload.priority)


def with_limits(form: str, limits: list[object]) -> str:
    """Repeat the first line of a trace once for each `max_tokens`; None leaves it out."""
    first, *rest = ONE[form].replace("\r\n", "\n").split("\n")
    if first.startswith("{"):
        rows = [
            json.loads(first) | ({} if most is None else {"max_tokens": most}) for most in limits
        ]
        return "".join(json.dumps(row) + "\n" for row in rows)
    lines = [f"{rest[0]},{'' if most is None else most}" for most in limits]
    return "\n".join([first + ",max_tokens", *lines])


@pytest.mark.parametrize("form", ONE)
def test_every_format_may_say_how_long_an_answer_may_be(tmp_path, form):
    assert read(tmp_path, with_limits(form, [7, 512])).max_tokens.tolist() == [7, 512]
    assert read(tmp_path, with_limits(form, [7, None])).max_tokens.tolist() == [7, 0]
    assert read(tmp_path, ONE[form]).max_tokens is None


@pytest.mark.parametrize("value", ["-2", "1.5", "x", "9" * 16])
def test_wrong_max_tokens_in_csv(tmp_path, value):
    what = "negative" if value == "-2" else "not a whole number such as 64 (tokens)"
    why = f"{value!r} is {what}"
    assert problems(tmp_path, with_limits("azure", [value])) == [f"trace:2: max_tokens: {why}"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (-2, "-2 is negative"),
        (1.5, "1.5 is not a whole number such as 64 (tokens)"),
        ("x", "'x' is not a whole number such as 64 (tokens)"),
        (True, "true is not a whole number such as 64 (tokens)"),
    ],
)
def test_wrong_max_tokens_in_json(tmp_path, value, why):
    assert problems(tmp_path, with_limits("mooncake", [value])) == [f"trace:1: max_tokens: {why}"]


def test_max_tokens_are_written_and_read_again(tmp_path):
    write_mooncake(read(tmp_path, with_limits("azure", [7, None])), tmp_path / "again.jsonl")
    assert read_trace(tmp_path / "again.jsonl").max_tokens.tolist() == [7, 0]


@pytest.mark.parametrize("form", ONE)
def test_every_format_may_say_which_model_a_request_asks_for(tmp_path, form):
    """Of three lines the second asks for none."""
    first, *rest = ONE[form].replace("\r\n", "\n").split("\n")
    if first.startswith("{"):
        rows = [json.loads(first) | more for more in ({"model": "sql"}, {}, {"model": "a, b"})]
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        lines = [f'{rest[0]},"{name}"' for name in ("sql", "", "a, b")]
        text = "\n".join([first + ",model", *lines])
    workload = read(tmp_path, text)
    assert workload.model == ["sql", "", "a, b"]
    again = tmp_path / "again.jsonl"
    write_mooncake(workload, again)
    assert read_trace(again).model == workload.model
