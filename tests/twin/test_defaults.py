"""What a vLLM does that has only the options of its command: tools, names, order of chunks."""

import json
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession

from headway.cli.options import with_launch
from headway.twin.options import OBEYED, ServeOptions
from headway.twin.server import Server
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError
from tests.support.twins import events, served_by, twin

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "look_up"}}
CHAT = {"messages": [{"role": "user", "content": "who is it"}], "max_tokens": 4}
LAUNCH = "vllm serve Qwen/Qwen3-8B"
PARSED = f"{LAUNCH} --enable-auto-tool-choice --tool-call-parser hermes"
NEEDS = "requires --tool-call-parser to be set"
AUTO = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
REFUSED = [
    ({}, AUTO),
    ({"tool_choice": "required"}, f'tool_choice="required" {NEEDS}'),
    ({"tool_choice": NAMED}, f'tool_choice=function "look_up" {NEEDS}'),
]


@pytest.mark.parametrize(("more", "told"), REFUSED)
def test_tools_need_vllms_options(more: dict[str, Any], told: str) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS, **more})
        assert (answer.status, (await answer.json())["error"]["message"]) == (400, told)
        for path, body in (
            ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": "none"}),
            ("/v1/responses", {"input": "a", "tools": [{**TOOLS[0]["function"], **TOOLS[0]}]}),
            ("/tokenize", {**CHAT, "tools": TOOLS}),
        ):
            assert (await client.post(path, json=body)).status == 200

    served_by(play, parses_tools=False)


def test_a_command_says_whether_tools_are_taken(recwarn: pytest.WarningsRecorder) -> None:
    assert ServeOptions().parses_tools
    assert not ServeOptions().with_command(LAUNCH).parses_tools
    assert ServeOptions().with_command(PARSED).parses_tools
    assert ServeOptions().with_command("python -m sglang.launch_server --model a").parses_tools
    with pytest.raises(HeadwayError, match="requires --tool-call-parser"):
        ServeOptions().with_command(f"{LAUNCH} --enable-auto-tool-choice")
    load_scenario("demo", with_launch(PARSED, [], OBEYED))
    assert not [one for one in recwarn if "without effect" in str(one.message)]


def test_tokens_of_words_are_in_the_vocabulary_and_make_the_same_prompt() -> None:
    async def play(client: ClientSession, server: Server) -> None:
        body = {"prompt": "once upon a time " * 50, "max_tokens": 3, "return_token_ids": True}
        ids = (await (await client.post("/tokenize", json=body)).json())["tokens"]
        answers = [
            await (await client.post("/v1/completions", json={**body, "prompt": one})).json()
            for one in (body["prompt"], ids)
        ]
        assert [one["choices"][0]["prompt_token_ids"] for one in answers] == [ids, ids]
        told = [*ids, *answers[0]["choices"][0]["token_ids"]]
        assert max(told) < server.engine.spec.model.vocab_size
        cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers]
        assert cached == [0, 192]

    served_by(play, "engine.enable_prefix_caching=true")


def test_all_choices_of_a_streamed_chat_begin_before_the_first_word() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = {**CHAT, "n": 3, "stream": True, "ignore_eos": True}
        found = await events(await client.post("/v1/chat/completions", json=body))
        roles = ["role" in one["choices"][0]["delta"] for one in found]
        assert roles == [True] * 3 + [False] * (len(found) - 3)
        assert [one["choices"][0]["index"] for one in found[:3]] == [0, 1, 2]

    served_by(play)


def test_greedy_sampling_says_the_same_again() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        for path, body in (
            ("/v1/completions", {"prompt": "one two", "max_tokens": 4000}),
            ("/v1/chat/completions", {**CHAT, "max_tokens": 4000}),
        ):
            texts = set()
            for _ in range(3):
                answer = await client.post(path, json={**body, "temperature": 0})
                (choice,) = (await answer.json())["choices"]
                texts.add(choice.get("text") or choice["message"]["content"])
            assert len(texts) == 1

    served_by(play, speed=1000)


def test_one_flag_takes_several_names() -> None:
    named = "--served-model-name", "a", "b"
    with twin("demo", "--port", "0", *named) as ((url,), _), urlopen(f"{url}/v1/models") as answer:
        assert [one["id"] for one in json.load(answer)["data"]] == ["a", "b"]


def test_a_refusal_names_the_host() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        answer = await client.get("/health", headers={"Host": "example.com"})
        assert "Host 'example.com'" in (await answer.json())["error"]["message"]
        (card,) = (await (await client.get("/v1/models")).json())["data"]
        assert card["owned_by"] == "vllm"

    served_by(play)


def test_what_vllm_reads_and_the_twin_does_not_is_named() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        guided = {"guided_choice": ["a"], "length_penalty": 2.0, "mm_processor_kwargs": {"a": 1}}
        for path, body, names in (
            ("/v1/chat/completions", {**CHAT, **guided}, [*guided]),
            ("/v1/chat/completions", {**CHAT, "length_penalty": 1.0, "functions": []}, []),
            ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, ["web_search"]),
        ):
            answer = await client.post(path, json=body)
            ignored = answer.headers.get("X-Headway-Ignored", "")
            assert {*ignored.split(", ")} == set(names or [""])
        answer = await client.post("/v1/responses", json={"input": "a", "tools": [{"type": "a\n"}]})
        assert answer.status == 400

    served_by(play)


def test_calls_and_echoes_tell_how_likely_their_tokens_are() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = {**CHAT, "tools": TOOLS, "tool_choice": "required", "max_tokens": 40}
        body |= {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
        (choice,) = (await (await client.post("/v1/chat/completions", json=body)).json())["choices"]
        tokens = [one["token"] for one in choice["logprobs"]["content"]]
        assert len(choice["token_ids"]) == len(tokens)
        (call,) = json.loads("".join(tokens))
        assert call["name"] == "look_up"
        assert call["parameters"] == json.loads(
            choice["message"]["tool_calls"][0]["function"]["arguments"]
        )
        asked = {"prompt": "one two three", "echo": True, "logprobs": 2, "max_tokens": 2}
        (choice,) = (await (await client.post("/v1/completions", json=asked)).json())["choices"]
        tops = choice["logprobs"]["top_logprobs"]
        assert tops.pop(0) is None
        assert [len(top) for top in tops] == [2] * 4

    served_by(play)
