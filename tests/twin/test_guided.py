"""Answers that a client shapes: several at once, guided by a schema, cut at a stop string."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

import jsonschema
from aiohttp import ClientSession

from headway.twin.api.said import FixedText, Said
from headway.twin.api.tokenizers import BpeTokens, TokenCounter
from headway.twin.server import Server
from tests.support.twins import events, served_by

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 18},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age"],
}
CHAT = {"messages": [{"role": "user", "content": "who is it"}], "max_tokens": 40}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": PERSON}}]


def test_a_guided_answer_has_as_many_tokens_as_the_workload_says() -> None:
    said = Said([" one", " two"], 0)
    text = FixedText('{"a": "', '", "b": 3}')
    assert said.fix(text, 9, TokenCounter()) == 9
    assert said.text(0, 9) == '{"a": " one two one two", "b": 3}'
    assert said.fix(text, 2, TokenCounter()) == 5  # what must be there is


@pytest.mark.parametrize(
    ("stops", "least", "keep", "text", "tokens"),
    [
        (["three"], 0, False, " one two ", 3),
        (["three"], 0, True, " one two three", 3),
        (["hree o", "two"], 0, False, " one ", 2),
        (["three one"], 0, False, " one two ", 4),
        (["one"], 1, False, " one two three ", 4),
        (["one t"], 1, False, " ", 2),  # it ends behind the first token
        (["four"], 0, False, " one two three one two three one two", 8),
    ],
)
def test_a_stop_string_ends_an_answer(
    stops: list[str], least: int, keep: bool, text: str, tokens: int
) -> None:
    said = Said([" one", " two", " three"], 0)
    assert said.stop_at(stops, least, 8, keep=keep) == tokens
    assert said.text(0, tokens) == text
    assert (said.stop is None) == (stops == ["four"])


def test_several_prompts_have_several_answers_each() -> None:
    async def play(client: ClientSession, server: Server) -> None:
        body = {"prompt": ["one two", "one two three"], "n": 2, "max_tokens": 5, "ignore_eos": True}
        answer = await (await client.post("/v1/completions", json=body)).json()
        assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]
        assert len({one["text"] for one in answer["choices"]}) == 4
        usage = {key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
        assert usage == {"prompt_tokens": 5, "completion_tokens": 20}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = await events(await client.post("/v1/completions", json=body))
        counts = [sum(one["choices"][0]["index"] == index for one in chunks) for index in range(4)]
        assert counts == [5] * 4
        assert last["usage"]["completion_tokens"] == 20
        assert len(server.engine.result().requests) == 8

    served_by(play)


def test_a_seed_draws_the_same_answer_again() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        found = []
        for seed in (5, 5, 6, None, None):
            body = {"prompt": "one two", "max_tokens": 4000, "seed": seed}
            answer = await (await client.post("/v1/completions", json=body)).json()
            found.append(answer["choices"][0]["text"])
        assert found[0] == found[1]
        assert len({*found}) == 4

    served_by(play)


def test_a_client_says_how_long_an_answer_is() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        for most, reason, count in ((500, "stop", 123), (50, "length", 50)):
            for head, more in (
                ({"X-Output-Tokens": "123"}, {}),
                ({}, {"vllm_xargs": {"output_tokens": 123}}),
            ):
                body = {"prompt": "one two", "max_tokens": most, **more}
                response = await client.post("/v1/completions", json=body, headers=head)
                answer = await response.json()
                assert answer["usage"]["completion_tokens"] == count
                assert answer["choices"][0]["finish_reason"] == reason
        body = {"prompt": "a", "max_tokens": 3, "vllm_xargs": {"output_tokens": 1}}
        for least, reason in ((0, "stop"), (2, "stop"), (3, "length")):
            response = await client.post("/v1/completions", json=body | {"min_tokens": least})
            answer = await response.json()
            assert answer["choices"][0]["finish_reason"] == reason
            assert answer["usage"]["completion_tokens"] == max(least, 1)
        body = {"prompt": "a", "vllm_xargs": {"output_tokens": "many"}}
        response = await client.post("/v1/completions", json=body)
        assert (await response.json())["error"]["param"] == "output_tokens"

    served_by(play)


@pytest.mark.parametrize(
    "asked",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": PERSON},
            }
        },
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON)}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_satisfies_a_schema(asked: dict[str, Any], stream: bool) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = {**CHAT, **asked, "ignore_eos": True, "stream": stream}
        response = await client.post("/v1/chat/completions", json=body)
        assert "X-Headway-Ignored" not in response.headers
        if stream:
            chunks = await events(response)
            text = "".join(one["choices"][0]["delta"]["content"] for one in chunks)
            assert len(chunks) == 1 + 40  # the role, and a chunk for each token
            reason = chunks[-1]["choices"][0]["finish_reason"]
        else:
            answer = await response.json()
            assert answer["usage"]["completion_tokens"] == 40
            text = answer["choices"][0]["message"]["content"]
            reason = answer["choices"][0]["finish_reason"]
        jsonschema.validate(json.loads(text), PERSON)
        assert reason == "stop"

    served_by(play)


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "look_up"}}])
def test_a_call_fits_its_schema(choice: Any) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = {**CHAT, "tools": TOOLS, "tool_choice": choice}
        answer = await (await client.post("/v1/chat/completions", json=body)).json()
        (said,) = answer["choices"]
        (call,) = said["message"]["tool_calls"]
        assert call["function"]["name"] == "look_up"
        assert call["id"].startswith("chatcmpl-tool-")
        jsonschema.validate(json.loads(call["function"]["arguments"]), PERSON)
        assert said["message"]["content"] == ""
        assert said["finish_reason"] == ("tool_calls" if choice == "required" else "stop")

        response = await client.post("/v1/chat/completions", json=body | {"stream": True})
        role, *chunks = [one["choices"][0] for one in await events(response)]
        assert role["delta"]["role"] == "assistant"
        calls = [one["delta"]["tool_calls"][0] for one in chunks if one["delta"]]
        assert [one["function"].get("name") for one in calls[:2]] == ["look_up", None]
        assert all("id" not in one for one in calls[1:])
        text = "".join(one["function"]["arguments"] for one in calls)
        jsonschema.validate(json.loads(text), PERSON)
        assert chunks[-1]["finish_reason"] == said["finish_reason"]

    served_by(play)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"tool_choice": "required"}, "When using `tool_choice`, `tools` must be set."),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "b"}}}, "does not match any of"),
        ({"tools": TOOLS, "tool_choice": "always"}, "Input should be"),
    ],
)
def test_a_tool_that_is_not_there_is_refused(more: dict[str, Any], told: str) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        response = await client.post("/v1/chat/completions", json=CHAT | more)
        assert response.status == 400
        assert told in (await response.json())["error"]["message"]

    served_by(play)


def test_logprobs_are_those_of_words_that_are_equally_likely() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = {"prompt": "one two", "max_tokens": 3, "logprobs": 2, "ignore_eos": True}
        for stream in (False, True):
            response = await client.post("/v1/completions", json=body | {"stream": stream})
            found = await events(response) if stream else [await response.json()]
            parts = [one["choices"][0] for one in found]
            told = [one["logprobs"] for one in parts]
            tokens = [token for one in told for token in one["tokens"]]
            text = "".join(one["text"] for one in parts)
            assert "".join(tokens) == text
            offsets = [at for one in told for at in one["text_offset"]]
            assert offsets == [text.index(token) for token in tokens]
            values = [value for one in told for value in one["token_logprobs"]]
            assert values == pytest.approx([-math.log(1000)] * 3)
            assert all(len(top) == 2 for one in told for top in one["top_logprobs"])
        chat = CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 3, "ignore_eos": True}
        answer = await (await client.post("/v1/chat/completions", json=chat)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert (
            "".join(one["token"] for one in content) == (answer["choices"][0]["message"]["content"])
        )
        assert [len(one["top_logprobs"]) for one in content] == [2, 2, 2]

    served_by(play)


def test_a_prompt_is_echoed() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = {"prompt": "one two", "max_tokens": 2, "echo": True, "ignore_eos": True}
        answer = await (await client.post("/v1/completions", json=body)).json()
        (choice,) = answer["choices"]
        assert choice["text"].startswith("one two w")
        chunks = await events(await client.post("/v1/completions", json=body | {"stream": True}))
        assert chunks[0]["choices"][0]["text"].startswith("one two w")
        assert chunks[1]["choices"][0]["text"].count("w") == 1
        body |= {"max_tokens": 0, "logprobs": 1}
        answer = await (await client.post("/v1/completions", json=body)).json()
        (choice,) = answer["choices"]
        assert choice["text"] == "one two"
        assert choice["logprobs"]["tokens"] == ["one", " two"]
        assert choice["logprobs"]["token_logprobs"][0] is None

    served_by(play)


def test_a_required_call_is_made_by_a_schema_that_is_not_understood_too() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        texts = {"properties": {"q": {"type": "string", "pattern": "a"}}, "uniqueItems": True}
        for schema, keys, words in (
            ({"type": "object", "not": {}}, [], ["not"]),
            ({"type": "object"} | texts, ["q"], ["uniqueItems"]),
        ):
            tools = [{"function": {"name": "f", "parameters": schema}}]
            body = CHAT | {"tools": tools, "tool_choice": "required"}
            response = await client.post("/v1/chat/completions", json=body)
            told = ", ".join(f"tool_choice.{word}" for word in words)
            assert response.headers["X-Headway-Ignored"] == told
            [call] = (await response.json())["choices"][0]["message"]["tool_calls"]
            assert list(json.loads(call["function"]["arguments"])) == keys

    served_by(play)


@pytest.mark.parametrize("stream", [False, True])
def test_patterns_and_expressions_are_obeyed(stream: bool) -> None:
    texts = {"type": "string", "pattern": "^[a-z]{3}$"}
    schema = {"type": "object", "properties": {"id": texts}, "required": ["id"]}
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}

    async def play(client: ClientSession, _: Server) -> None:
        for asked, pattern in (
            ({"response_format": form}, '{"id":"[a-z]{3}"}'),
            ({"structured_outputs": {"json": schema}}, '{"id":"[a-z]{3}"}'),
            ({"structured_outputs": {"regex": "[a-z]{3}"}}, "[a-z]{3}"),
            ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "a|b"),
        ):
            body = CHAT | asked | {"stream": stream}
            response = await client.post("/v1/chat/completions", json=body)
            assert "X-Headway-Ignored" not in response.headers
            if stream:
                chunks = await events(response)
                text = "".join(one["choices"][0]["delta"]["content"] for one in chunks)
            else:
                text = (await response.json())["choices"][0]["message"]["content"]
            assert re.fullmatch(pattern, text)

    served_by(play)


@pytest.mark.parametrize("stream", [False, True])
def test_a_character_of_several_tokens_is_whole(tokenizer: Path, stream: bool) -> None:
    counter = BpeTokens(tokenizer)
    text = "Köln 日本語 🎉"
    assert len(counter.encode("🎉")) == 4
    assert counter.pieces("🎉ö") == ["", "", "", "🎉", "", "ö"]
    assert "".join(counter.pieces(f"{text}\ufffd")) == f"{text}\ufffd"
    torn = counter.encode("🎉")[:3]  # has an end, and a token without its last byte
    assert counter.pieces(torn + counter.encode("a"))[-1] == "\ufffda"
    assert "".join(counter.pieces(torn)) == "\ufffd"
    schema = {"type": "object", "properties": {"ö": {"enum": [text]}}, "required": ["ö"]}
    tools = [{"function": {"name": "f", "parameters": schema}}]

    async def play(client: ClientSession, _: Server) -> None:
        for asked, told in (
            ({"structured_outputs": {"choice": [text]}}, text),
            ({"structured_outputs": {"regex": text}}, text),
            ({"structured_outputs": {"json": schema}}, f'{{"ö":"{text}"}}'),
            ({"tools": tools, "tool_choice": "required"}, f'{{"ö":"{text}"}}'),
        ):
            body = CHAT | asked | {"stream": stream, "max_tokens": 99}
            response = await client.post("/v1/chat/completions", json=body)
            found = await events(response) if stream else [await response.json()]
            said = [one["choices"][0]["delta" if stream else "message"] for one in found]
            parts = [one.get("content") or "" for one in said]
            calls = [call for one in said for call in one.get("tool_calls") or ()]
            parts += [call["function"]["arguments"] for call in calls]
            assert "".join(parts) == told
        for prompt in (text, counter.encode(text)):
            echo = {"prompt": prompt, "echo": True, "max_tokens": 0, "stream": stream}
            response = await client.post("/v1/completions", json=echo)
            found = await events(response) if stream else [await response.json()]
            assert "".join(one["choices"][0]["text"] for one in found) == text

    served_by(play, tokenizer=tokenizer)


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_ends_a_guided_answer(keep: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "one two"}}, "required": ["a"]}

    async def play(client: ClientSession, _: Server) -> None:
        more = {"stop": ["lph", "one"], "include_stop_str_in_output": keep}
        for own, told in (
            ({"choice": ["alphabet"]}, "alph" if keep else "a"),
            ({"json": schema}, '{"a":"one' if keep else '{"a":"'),
            ({"regex": "xyz"}, "xyz"),
        ):
            body = CHAT | more | {"structured_outputs": own}
            answer = await (await client.post("/v1/chat/completions", json=body)).json()
            [choice] = answer["choices"]
            assert choice["message"]["content"] == told
            assert choice["finish_reason"] == "stop"
            assert choice["stop_reason"] == {"a": "lph", "{": "one", "x": None}[told[0]]
        tool = {"name": "f", "input_schema": schema}
        body = {**CHAT, "tools": [tool], "tool_choice": {"type": "tool", "name": "f"}}
        body |= {"model": "llama-3-8b", "stop_sequences": ["one"]}
        answer = await (await client.post("/v1/messages", json=body)).json()
        assert answer["stop_sequence"] == "one"
        assert answer["content"][0]["input"] == {}

    served_by(play)
