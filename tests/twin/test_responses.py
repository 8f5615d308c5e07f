"""OpenAI's Responses."""

import json
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession

from headway.twin.api import responses
from headway.twin.server import Server
from tests.support.twins import named_events, served_by

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
TOOL = {"type": "function", "name": "find", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "name": "found", "schema": SCHEMA}


@pytest.fixture(autouse=True)
def keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")


def asked(**more: Any) -> dict[str, Any]:
    long = {"vllm_xargs": {"output_tokens": 20}, "max_output_tokens": 50}
    return {"input": "one two three", **long, **more}


async def respond(client: ClientSession, status: int = 200, **more: Any) -> Any:
    answer = await client.post("/v1/responses", json=asked(**more))
    assert answer.status == status
    return await answer.json()


def test_a_response_is_answered_whole_and_streamed() -> None:
    async def play(client: ClientSession, server: Server) -> None:
        one = await respond(client, instructions="be brief")
        assert (one["object"], one["status"]) == ("response", "completed")
        assert one["incomplete_details"] is None
        (message,) = one["output"]
        assert len(message["content"][0]["text"].split()) == 20
        usage = {"input_tokens": 5, "output_tokens": 20, "total_tokens": 25}
        assert one["usage"].items() >= usage.items()
        assert one["instructions"] == "be brief"

        body = asked(instructions="be brief", stream=True)
        found = await named_events(await client.post("/v1/responses", json=body))
        assert [event["sequence_number"] for event in found] == [*range(len(found))]
        names = [event["type"].removeprefix("response.") for event in found]
        begin = ["created", "in_progress", "output_item.added", "content_part.added"]
        end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
        assert names == [*begin, *["output_text.delta"] * 20, *end]
        text = "".join(one["delta"] for one in found if "delta" in one)
        final = found[-1]["response"]
        assert text == found[-4]["text"] == final["output"][0]["content"][0]["text"]
        assert final["usage"].items() >= usage.items()
        assert {one["item_id"] for one in found if "item_id" in one} == {final["output"][0]["id"]}
        assert len(server.engine.result().requests) == 2

    served_by(play)


def test_a_response_that_is_cut_is_incomplete() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        one = await respond(client, max_output_tokens=3, ignore_eos=True)
        assert (one["status"], one["max_output_tokens"]) == ("incomplete", 3)
        assert one["incomplete_details"] == {"reason": "max_output_tokens"}
        assert one["output"][0]["status"] == "incomplete"
        body = asked(max_output_tokens=3, ignore_eos=True, stream=True, safety_identifier="me")
        found = await named_events(await client.post("/v1/responses", json=body))
        assert found[-1]["type"] == "response.incomplete"
        assert found[-1]["response"]["safety_identifier"] == "me"

    served_by(play)


def test_a_response_goes_on_from_an_earlier_one() -> None:
    """Its texts are part of the next prompt, its instructions are not."""

    async def play(client: ClientSession, _: Server) -> None:
        first = await respond(client, instructions="be brief")
        second = await respond(client, previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] == 3 + 20 + 3
        third = await respond(client, previous_response_id=second["id"], store=False)
        assert third["usage"]["input_tokens"] == 26 + 20 + 3
        kept = await (await client.get(f"/v1/responses/{second['id']}")).json()
        assert kept == second
        streamed = await client.get(f"/v1/responses/{second['id']}?stream=true")
        assert streamed.status == 400
        lost = await respond(client, 404, previous_response_id=third["id"])
        assert lost["error"]["message"] == f"Response with id '{third['id']}' not found."
        for status, name in ((400, second["id"]), (404, third["id"])):
            cancel = await client.post(f"/v1/responses/{name}/cancel")
            assert cancel.status == status

    served_by(play)


def test_responses_are_kept_only_where_vllms_variable_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        first = await respond(client, store=True)
        assert (await client.get(f"/v1/responses/{first['id']}")).status == 404
        await respond(client, 404, previous_response_id=first["id"])

    monkeypatch.delenv("VLLM_ENABLE_RESPONSES_API_STORE")
    served_by(play)


def test_only_the_last_responses_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "KEPT", 2)

    async def play(client: ClientSession, _: Server) -> None:
        ids = [(await respond(client))["id"] for _ in range(3)]
        found = [(await client.get(f"/v1/responses/{one}")).status for one in ids]
        assert found == [404, 200, 200]

    served_by(play)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "find"}])
def test_a_response_calls_a_tool(choice: Any) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        given = {"tools": [TOOL], "tool_choice": choice}
        (call,) = (await respond(client, **given))["output"]
        assert (call["type"], call["name"]) == ("function_call", "find")
        assert [*json.loads(call["arguments"])] == ["q"]

        body = asked(stream=True, **given)
        found = await named_events(await client.post("/v1/responses", json=body))
        kinds = [event["type"] for event in found]
        assert kinds[-3] == "response.function_call_arguments.done"
        deltas = "".join(event["delta"] for event in found if "delta" in event)
        assert deltas == found[-3]["arguments"] == found[-1]["response"]["output"][0]["arguments"]

        # The call and its result are a part of the next prompt.
        plain = await respond(client, tools=[TOOL])
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "x " * 30}
        turns = [{"role": "user", "content": "one two three"}, call, result]
        more = await respond(client, tools=[TOOL], input=turns)
        assert more["usage"]["input_tokens"] >= plain["usage"]["input_tokens"] + 31

    served_by(play)


def test_what_changes_no_answer_here_is_named() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = asked(chat_template_kwargs={"a": 1}, logit_bias={"7": 1}, n=3)
        response = await client.post("/v1/responses", json=body)
        ignored = response.headers["X-Headway-Ignored"]
        assert ignored == "logit_bias, chat_template_kwargs"  # vLLM, too, takes no `n` here

    served_by(play)


def test_a_response_satisfies_a_schema() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        one = await respond(client, text={"format": FORMAT})
        assert [*json.loads(one["output"][0]["content"][0]["text"])] == ["q"]
        assert one["text"] == {"format": FORMAT}

    served_by(play)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"background": True}, "background is not simulated"),
        ({"background": True, "store": False}, "only be used when `store` is true"),
        ({"prompt": {"id": "a"}}, "prompt template is not supported"),
        ({"tool_choice": "required"}, "must be specified with 'tools'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "a"}}, "not found in"),
        ({"max_output_tokens": 10**6}, "max_output_tokens=1000000 cannot be greater"),
        ({"input": []}, "empty conversation"),
        ({"input": [{"role": "user", "content": 7}]}, "body.input.0.content"),
        ({"text": {"format": {"type": "other"}}}, "body.text.format.type"),
    ],
)
def test_what_no_response_can_be_is_refused(more: dict[str, Any], told: str) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        assert told in (await respond(client, 400, **more))["error"]["message"]

    served_by(play)


def test_a_response_tells_how_likely_its_tokens_are() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        given = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        (part,) = (await respond(client, **given))["output"][0]["content"]
        assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
        assert {len(one["top_logprobs"]) for one in part["logprobs"]} == {2}

        body = asked(stream=True, **given)
        found = await named_events(await client.post("/v1/responses", json=body))
        told = [one["logprobs"] for one in found if one["type"].endswith("text.delta")]
        assert all(len(one) == 1 and "bytes" not in one[0] for one in told)

    served_by(play)
