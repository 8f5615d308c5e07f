"""Anthropic's Messages, and the smaller addresses of a vLLM server."""

import ast
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession

from headway.twin.api import refusals
from headway.twin.api.bodies import REFUSALS, ChatBody
from headway.twin.api.messages import WORDS
from headway.twin.api.openai import USUAL
from headway.twin.api.refusals import openapi
from headway.twin.api.tokenizers import BpeTokens
from headway.twin.commands import _tell_end
from headway.twin.fault_injection import FAILURES
from headway.twin.options import ServeOptions
from headway.twin.server import Server, token_counter
from simulator.scenario.load import load_scenario
from simulator.schedulers.door import REQUESTS, TOKENS
from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError
from tests.support.commands import ROOT
from tests.support.twins import events, named_events, served_by
from tests.support.wire import described

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
VLLM = json.loads((Path(ROOT) / "tests/support/vllm_openapi.json").read_text("utf-8"))
"""vLLM 0.32's addresses and the fields of bodies there; tests/live_engine compares them."""
NOT_SERVED = {
    *["GET /kv_event_sources", "POST /generative_scoring", "POST /invocations"],
    *["POST /is_scaling_elastic_ep", "POST /scale_elastic_ep", "POST /v1/systemone"],
    "POST /v1/chat/completions/batch",
}
OWN = {
    *["GET /openapi.json", "GET /report", "GET /report/requests", "GET /v1/models/{}"],
    "GET /server_info",  # vLLM has it with VLLM_SERVER_DEV_MODE=1
}
UNCHANGED = {
    *[
        "watermarking",
        "length_penalty",
        "session_id",
        "mm_payload",
        "return_mm_kwargs",
    ],
    *["add_special_tokens", "reasoning_effort", "include_reasoning", "parallel_tool_calls"],
    *[
        "prompt_cache_key",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "routed_experts_prompt_start",
        "output_config",
    ],
}
"""Fields by which no answer of a simulation changes, since its words mean nothing."""
LONG = {"vllm_xargs": {"output_tokens": 20}}


def message(**more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": [{"type": "text", "text": "one two three"}]}]
    return {"model": "llama-3-8b", "messages": said, "max_tokens": 50, **more}


def test_messages_are_answered_whole_and_streamed() -> None:
    async def play(client: ClientSession, server: Server) -> None:
        body = message(**LONG, system="be brief")
        answer = await (await client.post("/v1/messages", json=body)).json()
        (content,) = answer["content"]
        assert (content["type"], len(content["text"].split())) == ("text", 20)
        assert (answer["type"], answer["role"]) == ("message", "assistant")
        assert answer["stop_reason"] == "end_turn"
        usage = {"input_tokens": 5, "output_tokens": 20}
        assert answer["usage"].items() >= usage.items()

        found = await named_events(await client.post("/v1/messages", json=body | {"stream": True}))
        names = [one["type"] for one in found]
        begin, end = names[:2], ["content_block_stop", "message_delta", "message_stop"]
        assert begin == ["message_start", "content_block_start"]
        assert names[2:] == [*(["content_block_delta"] * 20), *end]
        assert found[0]["message"]["usage"]["output_tokens"] == 0
        assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert found[-2]["usage"].items() >= usage.items()

        counted = await client.post("/v1/messages/count_tokens", json=body)
        assert (await counted.json())["input_tokens"] == 5
        cut = message(max_tokens=3, ignore_eos=True)
        assert (await (await client.post("/v1/messages", json=cut)).json())["stop_reason"] == (
            "max_tokens"
        )
        assert len(server.engine.result().requests) == 3

    served_by(play)


def test_a_stop_sequence_of_a_message_is_told() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = message(stop_sequences=["w"], ignore_eos=True)
        answer = await (await client.post("/v1/messages", json=body)).json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "w")
        assert answer["content"] == [{"type": "text", "text": " "}]
        assert answer["usage"]["output_tokens"] == 1

    served_by(play)


def test_messages_call_tools() -> None:
    tool = {"name": "find", "description": "finds", "input_schema": SCHEMA}

    async def play(client: ClientSession, _: Server) -> None:
        for choice in ({"type": "any"}, {"type": "tool", "name": "find"}):
            body = message(tools=[tool], tool_choice=choice)
            answer = await (await client.post("/v1/messages", json=body)).json()
            (call,) = answer["content"]
            assert (call["type"], call["name"], [*call["input"]]) == ("tool_use", "find", ["q"])
            assert answer["stop_reason"] == "tool_use"
            stream = await client.post("/v1/messages", json=body | {"stream": True})
            found = await named_events(stream)
            assert found[1]["content_block"]["name"] == "find"
            parts = [one["delta"] for one in found if one["type"] == "content_block_delta"]
            assert [*json.loads("".join(one["partial_json"] for one in parts))] == ["q"]
            assert found[-2]["delta"]["stop_reason"] == "tool_use"

            # The call and its result are part of the next prompt.
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "x " * 30}
            more = [
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
            ]
            body["messages"] = [*body["messages"], *more]
            counted = await client.post("/v1/messages/count_tokens", json=body)
            before = sum(answer["usage"][key] for key in answer["usage"] if "input" in key)
            assert (await counted.json())["input_tokens"] >= before + 32

    served_by(play)


def test_errors_of_messages_are_in_anthropics_form() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        for body, status, kind in (
            (message(model="gpt"), 404, "not_found_error"),
            (message(max_tokens=0), 400, "invalid_request_error"),
            (message(messages=[{"role": "user"}]), 400, "invalid_request_error"),
            (message(messages=[]), 400, "invalid_request_error"),
        ):
            response = await client.post("/v1/messages", json=body)
            found = await response.json()
            assert (response.status, found["type"]) == (status, "error")
            assert found["error"]["type"] == kind

    served_by(play)


def test_the_smaller_addresses(tokenizer: Path) -> None:
    counter = BpeTokens(tokenizer)

    async def play(client: ClientSession, _: Server) -> None:
        async def get(path: str, status: int = 200) -> Any:
            response = await client.get(path)
            assert response.status == status
            return await response.json()

        assert (await get("/v1/models/llama-3-8b"))["id"] == "llama-3-8b"
        assert "does not exist" in (await get("/v1/models/gpt", 404))["error"]["message"]
        assert await get("/load") == {"server_load": 0}
        found = await get("/server_info?config_format=json")
        assert found["vllm_config"]["max_num_seqs"] > 0
        assert "max_num_seqs=" in (await get("/server_info"))["vllm_config"]
        body = {"prompt": "def f(x): return x", "return_token_strs": True}
        told = await (await client.post("/tokenize", json=body)).json()
        assert "".join(told["token_strs"]) == body["prompt"].replace(" ", "\u0120")
        text = await (await client.post("/detokenize", json={"tokens": told["tokens"]})).json()
        assert text == {"prompt": body["prompt"]}
        assert counter.encode(body["prompt"]) == told["tokens"]
        # Of a server that only generates, as vLLM's.
        response = await client.post("/v1/embeddings", json={"input": "a"})
        assert (response.status, await response.json()) == (404, {"detail": "Not Found"})

    served_by(play, tokenizer=tokenizer)


def test_words_cannot_be_read_back_from_their_tokens() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = {"prompt": "one two", "return_token_strs": True}
        found = await client.post("/tokenize", json=body)
        assert found.headers["X-Headway-Estimated"] == "prompt_tokens"
        told = await found.json()
        assert told["token_strs"] == ["one", "two"]
        response = await client.post("/detokenize", json={"tokens": told["tokens"]})
        assert response.status == 501

    served_by(play)


def test_what_vllm_refuses_is_refused_in_its_words() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        for more, told in (
            ({"suffix": "x"}, "suffix is only supported for models with FIM completion rendering"),
            (
                {"response_format": {"type": "json_schema"}},
                "When response_format type is 'json_schema', the 'json_schema' field must be "
                "provided. (parameter=response_format)",
            ),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
                "You must use one kind of structured outputs constraint but none are specified: {",
            ),
            (
                {"structured_outputs": {}},
                "You must use one kind of structured outputs constraint but none are specified: {",
            ),
            (
                {"structured_outputs": {"json": {"type": "word"}}},
                "Grammar error: ",
            ),
            (
                {"structured_outputs": {"regex": "a", "choice": ["a"]}},
                "You can only use one kind of constraints for structured outputs ('json', 'regex'",
            ),
            ({"structured_outputs": {"choice": []}}, "Choice '[]' cannot be an empty list"),
            ({"structured_outputs": {"json": "{bad"}}, "Invalid JSON grammar specification."),
            (
                {"structured_outputs": {"regex": "[0-9"}},
                "Grammar error: at 1(8): invalid regex ",
            ),
            (
                {"logprobs": -2},
                "`logprobs` must be a positive value or -1. (parameter=logprobs, value=-2)",
            ),
            (
                {"logprobs": -1},
                "Requested sample logprobs of 128256, which is greater than max allowed: 20 "
                "(parameter=logprobs, value=128256)",
            ),
            (
                {"prompt_logprobs": 1, "stream": True},
                "`prompt_logprobs` are not available when `stream=True`. "
                "(parameter=prompt_logprobs)",
            ),
            (
                {"truncate_prompt_tokens": 9000},
                "truncate_prompt_tokens=9000 cannot be greater than max_model_len = 8192. Please "
                "request a smaller truncation size. "
                "(parameter=truncate_prompt_tokens, value=9000)",
            ),
            ({"truncate_prompt_tokens": 0}, "The decoder prompt cannot be empty"),
        ):
            response = await client.post("/v1/completions", json={"prompt": "a", **more})
            found = (await response.json())["error"]["message"]
            assert (response.status, found[: len(told)]) == (400, told)

    served_by(play)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"truncate_prompt_tokens": 2}, " three four"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "one two three"),
        ({"truncate_prompt_tokens": -1}, "one two three four"),
        ({"truncate_prompt_tokens": 9}, "one two three four"),
    ],
)
def test_a_prompt_is_truncated_as_vllm_does(more: Any, text: str) -> None:
    async def play(client: ClientSession, server: Server) -> None:
        body = {"prompt": "one two three four", "echo": True, "max_tokens": 0, **more}
        answer = await (await client.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["prompt_tokens"] == len(text.split())
        body = {"input": "a " * 9000, "max_output_tokens": 1, "truncation": "auto"}
        answer = await (await client.post("/v1/responses", json=body)).json()
        assert answer["usage"]["input_tokens"] == 8191

    served_by(play)


def test_each_refusal_is_one_of_the_table() -> None:
    """And each of the table is made somewhere."""
    made = set()
    for path in (Path(ROOT) / "headway/twin").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name, first = ast.unparse(call.func), call.args[0]
            if name == "BadRequestError.of" and isinstance(first, ast.Constant):
                made.add(first.value)
            elif name == "refuse" and isinstance(first, ast.Dict):
                made |= {one.value for one in first.keys if isinstance(one, ast.Constant)}
    assert made | {*FAILURES, REQUESTS, TOKENS} == REFUSALS.keys()


def test_a_missing_package_is_named_with_both_ways_to_install_it() -> None:
    told = re.escape("pip install 'headway[serve]', or '.[serve]' in a checkout")
    with pytest.raises(HeadwayError, match=f"serve: needs no_such_package: {told}"):
        need_package("serve", "serve", "no_such_package")


def test_serve_says_at_its_start_that_it_needs_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(HeadwayError, match="serve: needs llguidance: pip install"):
        runpy.run_path(refusals.__file__)


def test_the_last_line_counts_whole_answers(capsys: pytest.CaptureFixture[str]) -> None:
    async def play(client: ClientSession, server: Server) -> None:
        body = {"prompt": "a", "max_tokens": 7000, "ignore_eos": True, "stream": True}
        await (await client.post("/v1/completions", json={"prompt": "a"})).read()
        response = await client.post("/v1/completions", json=body)
        await response.content.readany()
        server.engine.clock.lateness = lambda **_: {"p99": 7.0}  # type: ignore[method-assign]
        _tell_end(server, None)
        response.close()

    served_by(play, speed=1)
    told = capsys.readouterr()
    assert (
        told.out == "1 of 2 requests served; answers late by 7.0 ms, first tokens by 7.0 ms (P99)\n"
    )
    assert "later than 5 ms: lower the load" in told.err


def test_addresses_and_bodies_are_vllms() -> None:
    """A field of vLLM's is read, named as ignored where a request has it, or changes nothing.

    What is read is of the kinds of values that vLLM takes.
    """
    server = Server(load_scenario("demo"), ServeOptions(), token_counter(None))
    ours = described(openapi(server.routes(), "0"))
    assert ours.keys() == VLLM.keys() - NOT_SERVED | OWN
    for address in ours.keys() & VLLM.keys():
        own, vllm = ours[address], VLLM[address]
        assert own.keys() <= vllm.keys(), address
        assert own.items() <= vllm.items(), address
        passed = {*WORDS["kept"]} if "messages" in address else set()
        passed |= {*ChatBody.model_fields} if address == "POST /tokenize" else set()
        passed |= {"echo"} if address == "POST /v1/chat/completions" else set()  # named as ignored
        unread = vllm.keys() - own.keys() - {*USUAL} - UNCHANGED - passed
        assert unread == set(), address


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "Cannot set both `cont"),
        ({"chat_template": "{{ 1 }}"}, "Chat template is passed with request, but --trust-request"),
        ({"chat_template_kwargs": {"chat_template": "a"}}, "Chat template is passed with request"),
        ({"continue_final_message": True}, None),
        ({"chat_template_kwargs": {"a": 1}, "add_generation_prompt": True}, None),
        ({"structured_outputs": {"regex": r"\p{L}+\d"}}, None),
    ],
)
def test_chats_that_vllm_refuses(more: dict[str, Any], told: str | None) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        said = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 3}
        response = await client.post("/v1/chat/completions", json=said | more)
        assert response.status == (200 if told is None else 400)
        if told is not None:
            assert (await response.json())["error"]["message"].startswith(told)

    served_by(play)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_told_where_they_are_asked_for(stream: bool, tokenizer: Path) -> None:
    """A completion has its prompt's in the choice, a chat beside the choices."""
    counter = BpeTokens(tokenizer)

    async def play(client: ClientSession, _: Server) -> None:
        more = {"max_tokens": 5, "ignore_eos": True, "return_token_ids": True, "stream": stream}
        body: dict[str, Any]
        for path, body in (
            ("completions", {"prompt": "def f"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "def f"}]}),
        ):
            response = await client.post(f"/v1/{path}", json=body | more)
            assert "X-Headway-Ignored" not in response.headers
            found = await events(response) if stream else [await response.json()]
            choices = [one["choices"][0] for one in found]
            placed = choices if path == "completions" else found
            (prompt,) = [one["prompt_token_ids"] for one in placed if one.get("prompt_token_ids")]
            assert prompt == counter.encode("def f")
            texts = [
                one.get("text") or one.get("delta", one.get("message", {})).get("content") or ""
                for one in choices
            ]
            tokens = [token for one in choices for token in one.get("token_ids") or []]
            assert len(tokens) == 5
            assert counter.decode(tokens) == "".join(texts)

    served_by(play, tokenizer=tokenizer)
