"""Bodies that vLLM 0.33 refuses, by its own words (its protocol classes were asked), and takes."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession

from headway.twin.api.messages import CountTokensBody
from headway.twin.api.tokenizers import train
from headway.twin.server import Server
from tests.support.twins import served_by

CHAT = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 3}
NO_INT = "'msg': 'Input should be a valid integer, unable to parse string as an integer'"
ANY = ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"stop": [*"abcde"]}, "'msg': 'List should have at most 4 items after validation, not 5'"),
        ({"stop_token_ids": ["a"]}, f"'loc': 'body.stop_token_ids.0', {NO_INT}"),
        (
            {"logit_bias": {"1": "x"}},
            "'loc': 'body.logit_bias.1', 'msg': 'Input should be a valid n",
        ),
        ({"bad_words": "x"}, "'loc': 'body.bad_words', 'msg': 'Input should be a valid list'"),
        ({"use_beam_search": "x"}, "'loc': 'body.use_beam_search', 'msg': 'Input should be a val"),
        ({"mm_payload": "x"}, "'loc': 'body.mm_payload', 'msg': \"Input should be 'tensors' or "),
        ({"prompt_cache_key": 3}, "'loc': 'body.prompt_cache_key', 'msg': 'Input should be a val"),
        ({"session_id": 3}, "'loc': 'body.session_id', 'msg': 'Input should be a valid string'"),
        ({"stream_interval": 0}, "'loc': 'body.stream_interval', 'msg': 'Input should be greater "),
        (
            {"cache_salt": "a/b"},
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', "
            "'\\\\', or NUL. (parameter=cache_salt)",
        ),
        ({"cache_salt": "a" * 129}, "Parameter 'cache_salt' must be at most 128 characters and "),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "You can only use one kind of constraints for structured outputs ('json', 'regex' or "
            "'choice'). (parameter=structured_outputs)",
        ),
        (
            {"structured_outputs": {"json_object": False}},
            "structured_outputs.json_object must be True if set; omit structured_outputs to "
            "disable structured outputs",
        ),
        ({"stream_options": {"include_usage": False}}, "Stream options can only be defined when"),
        (
            {"bad_words": ["a", ""]},
            "bad_words cannot contain an empty string. Got bad_words=['a', ",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty! (parameter=allowed_"),
        (
            {"allowed_token_ids": [7, 128256]},
            "allowed_token_ids contains out-of-vocab token id! (parameter=allowed_token_ids, value="
            "[128256])",
        ),
        (
            {"stop_token_ids": [-1, 128255]},
            "token_id(s) [-1] in stop_token_ids contain out-of-vocab token ids. Vocabulary size: "
            "128256 (parameter=stop_token_ids, value=[-1])",
        ),
        ({"logit_bias": {"128256": 1}}, "token_id(s) [128256] in logit_bias contain out-of-vocab "),
        ({"logit_bias": {"a": 1}}, f"'loc': 'body.logit_bias.a', {NO_INT}"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "You can only use one kind of structured outputs constraint but multiple are specified:"
            " json_object, regex",
        ),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "multiple are specified: grammar"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_what_vllm_refuses_of_completions_and_chats(more: dict[str, Any], told: str) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        for path, body in zip(ANY, ({"prompt": "a", "max_tokens": 1}, CHAT), strict=True):
            async with client.post(path, json=body | more) as response:
                assert response.status == 400
                assert told in (await response.json())["error"]["message"]

    served_by(play)


def test_a_chat_without_a_tool_in_its_tools_is_refused() -> None:
    async def play(client: ClientSession, server: Server) -> None:
        async with client.post("/v1/chat/completions", json=CHAT | {"tools": []}) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "tools")
        assert error["message"].startswith("`tools` must not be an empty array. Either provide")
        body = MESSAGE | {"tools": [], "model": server.names[0]}
        async with client.post("/v1/messages", json=body) as response:
            assert response.status == 200  # Anthropic's may

    served_by(play)


@pytest.mark.parametrize("path", ANY)
def test_empty_stream_options_are_none(path: str) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = {"prompt": "a", **CHAT, "stream_options": {}}
        async with client.post(path, json=body) as response:
            assert response.status == 200

    served_by(play)


@pytest.mark.parametrize("torn", ['{"a":', "[1]", "3", "", {}])
def test_a_torn_past_call_is_one_without_arguments(torn: Any) -> None:
    """It lies in the history of an agent, which goes on."""

    async def play(client: ClientSession, _: Server) -> None:
        counts = []
        for arguments in (torn, "{}", '{"a": 1}'):
            call = {"id": "1", "type": "function", "function": {"name": "f"}}
            call["function"]["arguments"] = arguments  # type: ignore[index]
            past = [{"role": "assistant", "content": None, "tool_calls": [call]}]
            body = CHAT | {"messages": CHAT["messages"] + past}  # type: ignore[operator]
            async with client.post("/v1/chat/completions", json=body) as response:
                counts.append((await response.json())["usage"]["prompt_tokens"])
        assert counts[0] == counts[1] < counts[2]

    served_by(play)


MESSAGE: dict[str, Any] = {"max_tokens": 60, "messages": CHAT["messages"]}


def test_a_message_has_the_format_that_it_is_asked_for() -> None:
    """Anthropic's format of an answer has a schema, and no name."""
    schema = {"type": "object", "properties": {"a": {"const": 3}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "schema": schema}}

    async def play(client: ClientSession, server: Server) -> None:
        body = MESSAGE | {"output_config": form, "model": server.names[0]}
        async with client.post("/v1/messages", json=body) as response:
            assert (await response.json())["content"][0]["text"] == '{"a":3}'
        more = {"output_config": {}, "stop_sequences": [*"abcde"]}
        async with client.post("/v1/messages", json=body | more) as response:
            assert response.status == 400
            assert "at most 4 items" in (await response.json())["error"]["message"]

    served_by(play)


@pytest.mark.parametrize(
    ("header", "priority"), [("-3", -3), ("x", 5), ("", 5), (None, 5), ("9" * 30, 5), ("0", 0)]
)
def test_the_header_for_priorities_comes_before_the_body(header: str | None, priority: int) -> None:
    async def play(client: ClientSession, server: Server) -> None:
        head = {} if header is None else {"X-Vllm-Priority": header}
        body = CHAT | {"priority": 5}
        async with client.post("/v1/chat/completions", json=body, headers=head) as response:
            assert response.status == 200
        found = server.engine.result().workload.priority
        assert (0 if found is None else found[0]) == priority

    served_by(play)


def test_keys_of_chats_are_no_completions() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True, "max_completion_tokens": [None]}
        async with client.post("/v1/completions", json=body) as response:
            assert (await response.json())["usage"]["completion_tokens"] == 2

    served_by(play)


def test_tokens_of_another_model_are_not_read_back(tmp_path: Path) -> None:
    train(tmp_path)

    async def play(client: ClientSession, _: Server) -> None:
        for model, status in (("no", 404), ("", 200), (None, 200)):
            body = {"tokens": [300], "model": model}
            async with client.post("/detokenize", json=body) as response:
                assert response.status == status

    served_by(play, tokenizer=tmp_path)


def test_a_tool_takes_an_object_unless_it_says_otherwise() -> None:
    tools = [{"name": "a", "input_schema": one} for one in ({"b": 1}, {"b": 1, "type": "x"})]
    body = CountTokensBody(model="m", messages=[], tools=tools)  # type: ignore[arg-type]
    texts = [json.dumps(one["function"]["parameters"]) for one in body.chat()["tools"]]
    assert texts == ['{"b": 1, "type": "object"}', '{"b": 1, "type": "x"}']
