"""A scenario behind HTTP: OpenAI's words, vLLM's metrics, and clients that behave badly."""

import asyncio
import json
import math
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("aiohttp")

from aiohttp import ClientSession

from headway.twin.api.bodies import BadRequestError, ChatBody, CompletionBody, read_types
from headway.twin.api.openai import Reader
from headway.twin.api.tokenizers import BpeTokens, TokenCounter
from headway.twin.server import Server
from simulator.util.errors import HeadwayError
from tests.support.twins import events, malformed, served_by, twin

JSON = {"Content-Type": "application/json"}
READER = Reader("m", TokenCounter(), 100)
PROMPT = " ".join(f"word{number}" for number in range(100))


@pytest.mark.medium
def test_a_completion_has_as_many_tokens_as_were_asked_for(tokenizer: Path) -> None:
    counter = BpeTokens(tokenizer)

    async def play(client: ClientSession, _: Server) -> None:
        body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True}
        answer = await (await client.post("/v1/completions", json=body)).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert len(counter.encode(choice["text"])) == 30
        asked = len(counter.encode(PROMPT))
        assert answer["usage"] == {
            "prompt_tokens": asked,
            "total_tokens": asked + 30,
            "completion_tokens": 30,
            "prompt_tokens_details": {
                "cached_tokens": 0,
                "created_cache_tokens": None,
                "multimodal_tokens": None,
            },
            "completion_tokens_details": None,
        }
        found = await (await client.post("/tokenize", json={"prompt": PROMPT})).json()
        assert found["count"] == asked
        assert found["tokens"] == counter.encode(PROMPT)

    served_by(play, tokenizer=tokenizer)


def test_a_stream_has_a_chunk_for_each_token_and_usage_at_the_end() -> None:
    """The chunk of the last token says why it is the last, as vLLM 0.33's does."""

    async def play(client: ClientSession, _: Server) -> None:
        asked: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "stream": True}
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = asked | {"prompt": PROMPT}
        plain = await events(await client.post("/v1/completions", json=body))
        reasons = [one["choices"][0]["finish_reason"] for one in plain]
        assert reasons == [None] * 11 + ["length"]
        assert all(one["choices"][0]["text"] and "usage" not in one for one in plain)

        parts = [{"type": "text", "text": PROMPT}]
        body = asked | {"messages": [{"role": "user", "content": parts}]}
        body |= {"stream_options": options}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.headers["Content-Type"].startswith("text/event-stream")
        first, *chunks, usage = await events(response)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [one["choices"][0]["finish_reason"] for one in chunks] == reasons
        assert all(len(one["choices"][0]["delta"]["content"].split()) == 1 for one in chunks)
        counted = [one["usage"]["completion_tokens"] for one in (first, *chunks)]
        assert counted == [*range(13)]
        assert usage["choices"] == []
        assert usage["usage"]["prompt_tokens"] == 100

        # An answer that ends by itself; usage in each chunk is only beside usage at the end.
        body = {"prompt": PROMPT, "max_tokens": 4000, "stream": True}
        body |= {"stream_options": {"continuous_usage_stats": True}}
        *some, last = await events(await client.post("/v1/completions", json=body))
        assert last["choices"][0]["finish_reason"] == "stop"
        assert not any("usage" in one for one in (*some, last))

    served_by(play)


def test_an_answer_bears_the_clients_id() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        for head, key in (({}, "a@@b"), ({"X-Request-Id": "mine"}, "mine")):
            for stream in (False, True):
                body = {"prompt": PROMPT, "max_tokens": 2, "request_id": "a@@b", "stream": stream}
                response = await client.post("/v1/completions", json=body, headers=head)
                found = await events(response) if stream else [await response.json()]
                assert {one["id"] for one in found} == {f"cmpl-{key}"}
        assert found[-1]["choices"][0]["stop_reason"] is None

    served_by(play)


def test_prompts_of_another_salt_are_not_found_in_the_cache() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        found = []
        for salt in (None, "a", "b", "a", None):
            body = {"prompt": PROMPT, "max_tokens": 2, "cache_salt": salt}
            answer = await (await client.post("/v1/completions", json=body)).json()
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert found == [0, 0, 0, 96, 96]

    served_by(play, "engine.enable_prefix_caching=true")


def test_a_prompt_that_came_before_is_found_in_the_cache() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        found = []
        for prompt in (PROMPT, PROMPT + " and more", "other " + PROMPT):
            body = {"prompt": prompt, "max_tokens": 2}
            answer = await (await client.post("/v1/completions", json=body)).json()
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert found == [0, 96, 0]  # 6 full blocks of 16
        text = await (await client.get("/metrics")).text()
        for name, tokens in (("hits", 96.0), ("queries", 303.0)):
            labels = 'model_name="llama-3-8b",engine="0"'
            assert f"vllm:prefix_cache_{name}_total{{{labels}}} {tokens}" in text

    served_by(play, "engine.enable_prefix_caching=true")


def test_what_is_not_simulated_is_told() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        for stream in (True, False):
            body = {"prompt": PROMPT, "max_tokens": 2, "bad_words": ["."], "stream": stream}
            body |= {
                "use_beam_search": True,
                "temperature": 0.7,
                "top_p": "0.5",
                "top_k": 2.0,
                "seed": None,
            }
            response = await client.post("/v1/completions", json=body)
            assert response.headers["X-Headway-Ignored"] == "use_beam_search, bad_words"
        more = {
            "prompt_logprobs": 3,
            "logit_bias": {"3": 1.0},
            "best_of": 2,
            "skip_special_tokens": False,
        }
        response = await client.post("/v1/completions", json={"prompt": "a", **more})
        assert response.headers["X-Headway-Ignored"] == (
            "prompt_logprobs, logit_bias, skip_special_tokens, best_of"
        )
        tools = [{"function": {"name": "f", "parameters": {"not": {}}}}]
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "tools": tools}
        chat |= {"tool_choice": "required"}
        response = await client.post("/v1/chat/completions", json=chat)
        assert response.headers["X-Headway-Ignored"] == "tool_choice.not"

    served_by(play)


def test_who_hangs_up_frees_the_engine() -> None:
    async def play(client: ClientSession, server: Server) -> None:
        body = {"prompt": PROMPT, "max_tokens": 7000, "ignore_eos": True, "stream": True}
        response = await client.post("/v1/completions", json=body)
        await response.content.readany()
        assert server.engine.streams
        response.close()
        while server.engine.streams:
            await asyncio.sleep(0.01)
        text = await (await client.get("/metrics")).text()
        assert 'finished_reason="abort"} 0.0' in text  # vLLM forgets it, too

    served_by(play, speed=1)


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"{", 400, "JSON decode error"),
        (b"[1]", 400, "Input should be a valid dictionary or object to extract fields from"),
        (b"[" * 100_000, 400, "error parsing the body"),
        ({"prompt": 3}, 400, "4 validation errors"),
        ({"prompt": ""}, 400, "Either prompt or prompt_embeds must be provided and non-empty."),
        ({"prompt_embeds": "AAAA"}, 400, "You must set `--enable-prompt-embeds` to input"),
        ({"prompt": "a", "prompt_embeds": ["AAAA"]}, 400, "(parameter=prompt_embeds)"),
        ({"prompt": ["a", ""]}, 400, "Either prompt or prompt_embeds must be provided and"),
        ({"prompt": "a", "n": 129}, 400, "more than 128 answers to one request"),
        ({"prompt": "a", "n": 2, "temperature": 0}, 400, "n must be 1 when using greedy sampling"),
        ({"prompt": "a", "stop": ["b", ""]}, 400, "stop cannot contain an empty string."),
        ({"prompt": "a", "model": "gpt"}, 404, "`gpt` does not exist"),
        ({"prompt": "a", "n": 0}, 400, "n must be at least 1, got 0."),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens must be at least 1, got 0."),
        ({"prompt": "a", "max_tokens": 2.5}, 400, "got a number with a fractional part"),
        ({"prompt": "a", "temperature": -4}, 400, "temperature must be non-negative, got -4.0."),
        ({"prompt": "a", "temperature": 2.0000001}, 400, "temperature must be in [0, 2]"),
        ({"prompt": "a", "temperature": math.nan}, 400, "temperature must be in [0, 2], got nan."),
        ({"prompt": "a", "temperature": [1]}, 400, "Input should be a valid number"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p must be in (0, 1], got 0."),
        ({"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty must be in [-2, 2]"),
        ({"prompt": "a", "repetition_penalty": 0}, 400, "must be greater than zero, got 0.0."),
        ({"prompt": "a", "min_p": 1.1}, 400, "min_p must be in [0, 1], got 1.1."),
        ({"prompt": "a", "top_k": -2}, 400, "top_k must be 0 (disable), or at least 1, got -2."),
        (
            {"prompt": "a", "logprobs": 21},
            400,
            "logprobs of 21, which is greater than max allowed: 20",
        ),
        ({"prompt": "a", "stream": "maybe"}, 400, "Input should be a valid boolean"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "when `stream=True`"),
        ({"prompt": "a", "max_tokens": 8193}, 400, "cannot be greater than max_model_len=8192"),
        ({"prompt": "a", "max_tokens": 4, "min_tokens": 5}, 400, "min_tokens must be"),
        ({"prompt": [1] * 9000}, 400, "maximum context length is 8192 tokens"),
        ({"prompt": "a", "user": "\ud800"}, 400, "user: not a name"),
        ({"prompt": "a", "user": {"id": 1}}, 400, "<dict of 1 items>"),
        ({"prompt": [5, -1]}, 400, "Input should be greater than or equal to 0"),
        ({"prompt": [[5, 128256]]}, 400, "Token id 128256 is out of vocabulary"),
        ({"prompt": "a", "request_id": 3}, 400, "Input should be a valid string"),
        ({"prompt": "a", "cache_salt": ""}, 400, "must be a non-empty string"),
        ({"prompt": "a", "stream_options": 3}, 400, "Input should be a valid dictionary or object"),
        ({"prompt": "a", "vllm_xargs": []}, 400, "Input should be a valid dictionary"),
        ({"prompt": "a" * 17_000_000}, 413, "more than"),
    ],
)
def test_what_cannot_be_is_refused_in_vllms_form(body: object, status: int, told: str) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await client.post("/v1/completions", data=data, headers=JSON)
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (status, status)
        assert told in error["message"]

    served_by(play)


def test_what_vllm_takes_is_taken() -> None:
    """Bounds that belong to the range, numbers as text, and flags as 1 and 0."""
    edges = {"temperature": 2, "top_p": 1, "min_p": 0, "presence_penalty": -2, "top_k": -1}
    for more in (edges, {"temperature": "0.5", "top_k": "3"}, {"temperature": -0.0, "n": 1}):
        body = {"prompt": "a", "model": "", "stream": 1, "ignore_eos": 0, "logprobs": 0, **more}
        wanted = READER.read(read_types(body, CompletionBody))
        assert (wanted.asked.stream, wanted.asked.ignore_eos, wanted.notes) == (True, False, [])


def test_refusals_that_are_not_ours_have_the_form_of_vllms_server() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        for method, path, status, told in (
            ("GET", "/v1/nothing", 404, "Not Found"),
            ("GET", "/v1/completions", 405, "Method Not Allowed"),
            ("DELETE", "/metrics", 405, "Method Not Allowed"),
        ):
            response = await client.request(method, path)
            assert (response.status, await response.json()) == (status, {"detail": told})
        for path in ("/v1/completions", "/tokenize"):
            response = await client.post(path, data='{"prompt": "a"}')
            assert response.status == 400
            assert "Only 'application/json'" in (await response.json())["error"]["message"]
        body = {"messages": [{"content": "a"}]}
        response = await client.post("/v1/chat/completions", json=body)
        assert (await response.json())["error"]["param"] == "body.messages.0.role"
        head = {"X-Client": "a" * 257}
        response = await client.post("/v1/completions", json={"prompt": "a"}, headers=head)
        assert (await response.json())["error"]["message"].startswith("X-Client: not a name")
        body = {"prompt": "a", "top_p": 2}
        response = await client.post("/v1/completions", json=body)
        assert (await response.json())["error"]["param"] == "top_p"

    served_by(play)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
names = ("prompt", "messages", "max_tokens", "min_tokens", "stream", "stream_options", "priority")
more = ("n", "user", "stop", "ignore_eos", "vllm_xargs", "max_completion_tokens", "model")
ranged = ("temperature", "top_p", "top_k", "seed", "logprobs", "top_logprobs")


@pytest.mark.medium
@given(st.dictionaries(st.sampled_from([*names, *more, *ranged]), values), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_body_is_understood_or_refused(body: dict[str, object], chat: bool) -> None:
    try:
        wanted = READER.read(read_types(body, ChatBody if chat else CompletionBody))
    except BadRequestError:
        return
    assert 1 <= len(wanted.tokens) <= 100
    assert 1 <= wanted.max_tokens <= 100 - len(wanted.tokens)
    assert wanted.asked.min_tokens <= wanted.max_tokens


def test_a_request_that_never_fits_is_refused() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        for stream in (True, False):
            body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": stream}
            response = await client.post("/v1/completions", json=body)
            assert response.status == 400

    served_by(play, "engine.num_gpu_blocks_override=7", "engine.max_model_len=200")


@pytest.mark.medium
def test_any_text_has_tokens(tokenizer: Path) -> None:
    counter = BpeTokens(tokenizer)
    assert counter.encode("caf\u00e9 \ud800 \x00")
    assert counter.encode("\ud800") == counter.encode("?")


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="--tokenizer"):
        BpeTokens(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(HeadwayError, match="--tokenizer"):
        BpeTokens(tmp_path)


def test_what_is_no_http_is_answered_without_a_traceback() -> None:
    with twin("demo", "--port", "0") as ([address], process):
        port = int(address.rpartition(":")[2])
        assert [answer.split()[1] for answer in malformed(port)] == [b"400"] * 3
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.communicate(timeout=30)[1]


def test_requests_pass_the_frontend_one_after_the_other() -> None:
    """As through vLLM's API server; the engine's own record begins behind it."""

    async def play(client: ClientSession, server: Server) -> None:
        async def ask() -> float:
            begin = time.perf_counter()
            body = {"prompt": PROMPT, "max_tokens": 1, "stream": True}
            await (await client.post("/v1/completions", json=body)).read()
            return time.perf_counter() - begin

        took = sorted(await asyncio.gather(*(ask() for _ in range(3))))
        assert took[0] >= 0.2 + 0.15
        assert took[2] >= 0.2 + 3 * 0.15
        table = server.engine.result().requests
        assert (np.diff(np.sort(table.arrival)) > 0.1).all()
        assert (table.ttft < 0.3).all()

    served_by(play, "workload.frontend={latency: 200, per_request: 150}", speed=1)
