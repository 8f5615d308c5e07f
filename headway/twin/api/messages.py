"""Anthropic's words for chats and answers, as vLLM's server has them (0.33): /v1/messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from headway.twin.api.answers import ChatAnswer, Choice, event
from headway.twin.api.bodies import MOST_STOPS, BadRequestError, Open
from headway.twin.api.openai import compact
from headway.twin.api.tables import table

WORDS: dict[str, Any] = table("messages")
"""Anthropic's words for statuses of errors and for ends of answers; OpenAI's for `tool_choice`; and
keys that are a chat's, too, of which vLLM has those from `request_id` to `seed` elsewhere only.
"""


TYPED = AfterValidator(lambda schema: schema | {"type": schema.get("type", "object")})
"""What a tool takes is an object, unless it says otherwise."""


class Block(Open):
    """A part of a message."""

    type: str
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[dict[str, Any]] | None = None


class Message(BaseModel):
    """What one side has said."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(BaseModel):
    """A tool that the model may use."""

    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any], TYPED] = Field(alias="input_schema")


class MessageToolChoice(BaseModel):
    """Whether it must."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class CountTokensBody(Open):
    """Of a chat whose tokens are counted."""

    model: Annotated[str, Field(min_length=1)]
    messages: list[Message]
    system: str | list[Block] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> dict[str, Any]:
        """Return the same as the body of a chat."""
        found: dict[str, Any] = self.model_dump(include={*WORDS["kept"]}, exclude_unset=True)
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        found["messages"] = system + [one for said in self.messages for one in _messages(said)]
        if self.tools:
            found["tools"] = [{"function": one.model_dump()} for one in self.tools]
        if (choice := self.tool_choice) is not None:
            named = {"type": "function", "function": {"name": choice.name or ""}}
            found["tool_choice"] = WORDS["tool choices"].get(choice.type, named)
        return found


class MessagesBody(CountTokensBody):
    """Of a chat."""

    max_tokens: Annotated[int, Field(gt=0)]
    output_config: dict[str, Any] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: str | None = None
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None

    def chat(self) -> dict[str, Any]:
        """Return the same as the body of a chat."""
        found = super().chat() | {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        form = (self.output_config or {}).get("format")
        if isinstance(form, dict):
            found["response_format"] = {**form, "json_schema": {"name": "", **form}}
        user = (self.metadata or {}).get("user_id")
        return found | ({"user": user} if isinstance(user, str) else {})


def _text(content: str | Sequence[Block]) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text or "" for block in content if block.type == "text")


def _image(source: Mapping[str, Any] | None) -> dict[str, Any]:
    source = source or {}
    data = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    url = source.get("url", "") if source.get("type") == "url" else data
    return {"type": "image_url", "image_url": {"url": url}}


def _messages(said: Message) -> list[dict[str, Any]]:
    """Return a message as those of a chat: results of tools are messages of their own."""
    if isinstance(said.content, str) or said.role == "system":
        return [{"role": said.role, "content": _text(said.content)}]
    before: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in said.content:
        if block.type == "text" and block.text:
            parts.append({"type": "text", "text": block.text})
        elif block.type == "image":
            parts.append(_image(block.source))
        elif block.type == "tool_use":
            function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type == "tool_result":
            inner = block.content or ""
            items: Any = [{"type": "text", "text": inner}] if isinstance(inner, str) else inner
            text = "\n".join(str(one.get("text", "")) for one in items if "text" in one)
            result = {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": text}
            images = [_image(one.get("source")) for one in items if one.get("type") == "image"]
            before += [result, *([{"role": "user", "content": images}] if images else ())]
    if not parts and not calls and said.role == "user":
        return before
    message = {"role": said.role, "content": parts}
    return [*before, message | ({"tool_calls": calls} if calls else {})]


class MessageAnswer(ChatAnswer):
    """What goes back to a client that speaks Anthropic's API."""

    def error_chunk(self, error: BadRequestError) -> bytes:
        """Return what ends a stream that has begun and cannot go on."""
        return b"event: error\ndata: " + message_error(error) + b"\n\n"

    def open(self, choice: Choice) -> bytes:
        """Return what comes before the first token."""
        message = self._message([], {"stop_reason": None, "stop_sequence": None})
        message["usage"] = {key: message["usage"][key] for key in ("input_tokens", "output_tokens")}
        out = event("message_start", message=message)
        return out + event("content_block_start", index=0, content_block=self._block("", {}))

    def piece(self, choice: Choice, first: int, count: int, reason: str | None) -> bytes:
        """Return the event of some tokens."""
        text = choice.said.text(first, count)
        said = {"type": "text_delta", "text": text}
        if choice.said.call:
            said = {"type": "input_json_delta", "partial_json": text}
        return event("content_block_delta", index=0, delta=said) if text else b""

    def end(self) -> bytes:
        """Return what comes after the last token."""
        stop = event("content_block_stop", index=0)
        stop += event("message_delta", delta=self._stop(), usage=self._message_usage())
        return stop + event("message_stop")

    def _stop(self) -> dict[str, Any]:
        said, reason = self.choices[0].said, WORDS["stop reasons"][self.choices[0].reason]
        if reason == "end_turn":
            reason = "tool_use" if said.call else "stop_sequence" if said.stop else reason
        return {"stop_reason": reason, "stop_sequence": said.stop}

    def _block(self, text: str, given: Any) -> dict[str, Any]:
        """Return a part of the message: a text, or a call with what is given to it."""
        choice = self.choices[0]
        if not choice.said.call:
            return {"type": "text", "text": text}
        name = {"name": choice.said.call, "input": given}
        return {"type": "tool_use", "id": self.call_id(choice), **name}

    def _message(self, content: list[Any], stop: Mapping[str, Any]) -> dict[str, Any]:
        head = {"id": self.head["id"], "type": "message", "role": "assistant", "content": content}
        return head | {"model": self.head["model"], **stop, "usage": self._message_usage()}

    def _message_usage(self) -> dict[str, int]:
        count, details = self.choices[0].generated, self._details()
        read, made = details["cached_tokens"], details["created_cache_tokens"]
        found = {"input_tokens": len(self.wanted.tokens) - read - made, "output_tokens": count}
        return found | {"cache_read_input_tokens": read, "cache_creation_input_tokens": made}

    def whole(self) -> bytes:
        """Return the whole answer at once; a call that was cut short is empty."""
        choice = self.choices[0]
        calls = choice.said.call and choice.reason == "stop" and choice.said.stop is None
        content = [self._block(choice.text, json.loads(choice.text) if calls else {})]
        stop = {key: value for key, value in self._stop().items() if value is not None}
        return compact(self._message(content, stop))


def message_error(error: BadRequestError) -> bytes:
    """Return the body of an error as Anthropic's API words it."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = WORDS["errors"].get(str(error.status), usual)
    return compact({"type": "error", "error": {"type": kind, "message": str(error)}})
