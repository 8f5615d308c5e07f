"""Anthropic's Messages, and the smaller addresses of a vLLM server."""

import json
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession

from headway.twin.api.bodies import ChatBody
from headway.twin.api.messages import KEPT
from headway.twin.api.openai import NOT_SIMULATED, USUAL
from headway.twin.api.tokenizers import BpeTokens, train
from headway.twin.server import Server
from tests.support.twins import named_events, served_by

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
VLLM_FIELDS = {
    "/v1/completions": "model prompt echo frequency_penalty logit_bias logprobs max_tokens n "
    "presence_penalty seed stop stream stream_options suffix temperature top_p user "
    "use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids "
    "include_stop_str_in_output ignore_eos min_tokens skip_special_tokens "
    "spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids "
    "prompt_logprobs logprob_token_ids bad_words prompt_embeds add_special_tokens response_format "
    "structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids "
    "return_weight_versions routed_experts_prompt_start return_token_offsets mm_payload "
    "return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs "
    "repetition_detection thinking_token_budget stream_interval",
    "/v1/chat/completions": "messages model frequency_penalty logit_bias logprobs top_logprobs "
    "max_tokens max_completion_tokens n presence_penalty response_format seed stop stream "
    "stream_options temperature top_p tools tool_choice reasoning_effort thinking_token_budget "
    "include_reasoning parallel_tool_calls user use_beam_search top_k min_p repetition_penalty "
    "watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens "
    "skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side "
    "prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt "
    "continue_final_message add_special_tokens documents chat_template chat_template_kwargs "
    "media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id "
    "return_tokens_as_token_ids return_token_ids return_weight_versions "
    "routed_experts_prompt_start return_token_offsets return_prompt_text mm_payload "
    "return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs "
    "repetition_detection stream_interval",
    "/v1/responses": "background include input instructions max_output_tokens max_tool_calls "
    "metadata model logit_bias parallel_tool_calls previous_response_id prompt reasoning "
    "include_reasoning service_tier store stream temperature text tool_choice tools top_logprobs "
    "top_p top_k min_p truncation user skip_special_tokens include_stop_str_in_output "
    "presence_penalty frequency_penalty prompt_cache_key watermarking request_id session_id "
    "media_io_kwargs mm_processor_kwargs priority mm_payload return_mm_kwargs cache_salt "
    "enable_response_messages previous_input_messages structured_outputs repetition_penalty seed "
    "stop stop_token_ids ignore_eos vllm_xargs kv_transfer_params ec_transfer_params "
    "chat_template_kwargs",
    "/v1/messages": "model messages max_tokens metadata output_config thinking stop_sequences "
    "stream system temperature tool_choice tools top_k top_p mm_payload return_mm_kwargs "
    "cache_salt watermarking kv_transfer_params ec_transfer_params vllm_xargs chat_template_kwargs",
    "/v1/messages/count_tokens": "model messages output_config system thinking tool_choice tools "
    "chat_template_kwargs",
    "/tokenize": "model prompt messages add_generation_prompt return_token_strs tools "
    "continue_final_message add_special_tokens chat_template chat_template_kwargs media_io_kwargs "
    "mm_processor_kwargs",
    "/detokenize": "model tokens",
}
"""The fields of bodies in vLLM 0.33, read from its classes; `tools` of /v1/messages are typed."""
UNCHANGED = {
    *[
        "watermarking",
        "length_penalty",
        "truncation_side",
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
        assert len(server.result().requests) == 3

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


def test_the_smaller_addresses(tmp_path: Any) -> None:
    train(tmp_path, 600)
    counter = BpeTokens(tmp_path)

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

    served_by(play, tokenizer=tmp_path)


def test_words_cannot_be_read_back_from_their_tokens() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = {"prompt": "one two", "return_token_strs": True}
        told = await (await client.post("/tokenize", json=body)).json()
        assert told["token_strs"] == ["one", "two"]
        response = await client.post("/detokenize", json={"tokens": told["tokens"]})
        assert response.status == 501

    served_by(play)


def test_bodies_have_the_fields_of_vllms() -> None:
    """A field of vLLM's is read, named as ignored where a request has it, or changes nothing."""

    async def play(client: ClientSession, _: Server) -> None:
        document = await (await client.get("/openapi.json")).json()
        for path, fields in VLLM_FIELDS.items():
            body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            name = body["schema"]["$ref"].rpartition("/")[2]
            own = {*document["components"]["schemas"][name]["properties"]}
            vllm = {*fields.split()}
            assert own - vllm <= {"max_completion_tokens"}, path
            passed = {*KEPT.split()} if "messages" in path else set()
            passed |= {*ChatBody.model_fields} if path == "/tokenize" else set()
            passed |= {"echo"} if path == "/v1/chat/completions" else set()  # named as ignored
            unread = vllm - own - {*NOT_SIMULATED} - {*USUAL} - UNCHANGED - passed
            assert unread == set(), path

    served_by(play)
