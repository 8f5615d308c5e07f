"""OpenAI's Responses, as vLLM's server has them (0.33): /v1/responses."""

import os
from collections.abc import Sequence
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import Field

from headway.twin.api.answers import ChatAnswer, Choice, event
from headway.twin.api.bodies import BadRequestError, ChatBody, ChatMessage, Open, Sampling, refuse
from headway.twin.api.openai import USUAL, compact

KEPT = 1000  # responses that a later one may go on from
LOGPROBS = "message.output_text.logprobs"


class Item(Open):
    """A part of the conversation: a message, a call, or what a call has brought."""

    type: str = "message"
    role: str | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[dict[str, Any]] = ""


class ResponseTool(Open):
    """A tool that the model may use: a function, or one of the server's own."""

    type: Annotated[str, Field(pattern="^[a-z0-9_]{1,40}$")]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextFormat(Open):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"]


class ResponseText(Open):
    """The same, beside how much it says."""

    format: TextFormat | None = None


PASSED = {*Sampling.model_fields, *USUAL, "chat_template_kwargs"}
"""Keys that are a chat's, too."""


class ResponsesBody(Sampling):
    """Of a response."""

    background: bool | None = False
    include: list[str] | None = None
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    store: bool | None = True
    text: ResponseText | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseTool = "auto"
    tools: tuple[ResponseTool, ...] = ()
    top_logprobs: int | None = 0
    truncation: Literal["auto", "disabled"] | None = "disabled"
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self, before: Sequence[ChatMessage]) -> dict[str, Any]:
        """Return the same as the body of a chat, behind the messages `before` it."""
        self._check()
        found: dict[str, Any] = self.model_dump(include=PASSED, exclude_unset=True)
        found |= {"response": self, "max_output_tokens": self.max_output_tokens}
        if self.truncation == "auto":
            found["truncate_prompt_tokens"] = -1
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        found["messages"] = [*system, *before, *self.messages()]
        if self.tools:
            functions = (one.model_dump() for one in self.tools if one.type == "function")
            found["tools"] = [{"type": "function", "function": one} for one in functions]
            found["tool_choice"] = self.tool_choice
            if isinstance(self.tool_choice, ResponseTool):
                name = {"name": self.tool_choice.name or ""}
                found["tool_choice"] = {"type": "function", "function": name}
        if self.text is not None and self.text.format is not None:
            form = self.text.format.model_dump()
            named = {"json_schema": form} if form["type"] == "json_schema" else {}
            found["response_format"] = {**form, **named}
        if LOGPROBS in (self.include or ()):
            found |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return found

    def _check(self) -> None:
        """Refuse what contradicts itself."""
        choice, names = self.tool_choice, {tool.name for tool in self.tools}
        unknown = isinstance(choice, ResponseTool) and choice.name not in names
        refuse(
            {
                "not stored": self.background and not self.store,
                "background": self.background,
                "prompt template": self.prompt is not None,
                "response without tools": choice == "required" and not names,
                "response without that tool": unknown,
            }
        )

    def messages(self) -> list[dict[str, Any]]:
        """Return the input as messages of a chat: one is of the calls and texts of one turn."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found: list[dict[str, Any]] = []
        for item in self.input:
            if item.type == "function_call":
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant"})
                found[-1].setdefault("tool_calls", []).append(call)
            elif item.type.endswith("_call_output"):
                result = {"content": item.output, "tool_call_id": item.call_id}
                found.append({"role": "tool", **result})
            elif item.type != "reasoning":
                found.append({"role": item.role or "user", "content": item.content})
        return found


class ResponseChat(ChatBody):
    """The chat that is asked for by a response."""

    max_output_tokens: int | None = None
    response: ResponsesBody


class ResponseAnswer(ChatAnswer):
    """What goes back to a client that asked for a response."""

    kind, prefix = "response", ""

    def __init__(self, *given: Any) -> None:
        """Begin an answer."""
        super().__init__(*given)
        assert isinstance(self.wanted.asked, ResponseChat)
        self.chat, self.body = self.wanted.asked, self.wanted.asked.response
        self.numbers = count()
        self.wanted.notes += [one.type for one in self.body.tools if one.type != "function"]
        self._is_plain = False  # each event has a number
        self.head["id"] = self.wanted.request_id or f"resp_{self.head['id']}"
        self.item = {"item_id": self._item("", "in_progress")["id"], "output_index": 0}

    def _event(self, kind: str, **data: Any) -> bytes:
        return event(f"response.{kind}", **data, sequence_number=next(self.numbers))

    def start(self) -> bytes:
        """Return what comes before all tokens."""
        begun = self.response("in_progress", [])
        return self._event("created", response=begun) + self._event("in_progress", response=begun)

    def _item(self, text: str, status: str) -> dict[str, Any]:
        """Return what is in the response: a message, or a call."""
        choice = self.choices[0]
        if choice.said.call:
            call = {"id": f"fc_{self.head['id']}", "call_id": self.call_id(choice)}
            call |= {"type": "function_call", "name": choice.said.call, "arguments": text}
            return call | {"status": status, "namespace": None}
        content = [self._part(choice, text)] if text else []
        message = {"id": f"msg_{self.head['id']}", "type": "message", "role": "assistant"}
        return message | {"content": content, "status": status, "phase": None}

    def _part(self, choice: Choice, text: str) -> dict[str, Any]:
        logprobs = self._logprobs(choice, 0, choice.generated)
        part = {"type": "output_text", "text": text, "annotations": []}
        return part | {"logprobs": logprobs and logprobs["content"]}

    def open(self, choice: Choice) -> bytes:
        """Return what comes before the first token."""
        added = self._event("output_item.added", output_index=0, item=self._item("", "in_progress"))
        if choice.said.call:
            return added
        part = self._part(choice, "") | {"logprobs": []}
        return added + self._event("content_part.added", **self.item, content_index=0, part=part)

    def piece(self, choice: Choice, first: int, count: int, reason: str | None) -> bytes:
        """Return the event of some tokens."""
        if not (text := choice.said.text(first, count)):
            return b""
        if choice.said.call:
            return self._event("function_call_arguments.delta", **self.item, delta=text)
        logprobs = self._logprobs(choice, first, count)
        told = [] if logprobs is None else [_short(one) for one in logprobs["content"]]
        more = {**self.item, "content_index": 0, "delta": text, "logprobs": told}
        return self._event("output_text.delta", **more)

    def end(self) -> bytes:
        """Return what comes after the last token."""
        choice = self.choices[0]
        text = choice.text
        if name := choice.said.call:
            kind, more = "function_call_arguments.done", {"arguments": text, "name": name}
            out = self._event(kind, **self.item, **more)
        else:
            place = {**self.item, "content_index": 0}
            out = self._event("output_text.done", **place, text=text, logprobs=[])
            out += self._event("content_part.done", **place, part=self._part(choice, text))
        final = self.final()
        out += self._event("output_item.done", output_index=0, item=final["output"][0])
        return out + self._event(final["status"], response=final)

    def whole(self) -> bytes:
        """Return the whole answer at once."""
        return compact(self.final())

    def final(self) -> Any:
        """Return the response as it is when all tokens are there."""
        choice = self.choices[0]
        status = "completed" if choice.reason == "stop" else "incomplete"
        return self.response(status, [self._item(choice.text, status)])

    def response(self, status: str, output: list[Any]) -> Any:
        """Return the response with what is there of it."""
        head, body, given, shape = self.head, self.body, self.chat.__dict__, self.shape
        found = shape["answer"] | {"id": head["id"], "created_at": head["created"]}
        found |= {"model": head["model"], "status": status, "output": output}
        found |= shape["told"] | body.model_dump(include={*shape["told"]})
        found |= {k: usual if given[k] is None else given[k] for k, usual in shape["usual"].items()}
        if not body.tools:
            found["tool_choice"] = "none"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        found |= {"incomplete_details": cut, "max_output_tokens": self.wanted.max_tokens}
        found["top_logprobs"] = self.wanted.logprobs
        if output:
            found["usage"] = self._response_usage()
        return found

    def _response_usage(self) -> dict[str, Any]:
        details, shape = self._details(), self.shape
        asked, made = len(self.wanted.tokens), self.choices[0].generated
        found = {"input_tokens": asked, "output_tokens": made, "total_tokens": asked + made}
        caches = {"cached_tokens": details["cached_tokens"]}
        caches["cache_write_tokens"] = details["created_cache_tokens"]
        more = {"input_tokens_details": caches | shape["input"]}
        return found | more | {"output_tokens_details": shape["output"]}


class Stored:
    """The last responses, if VLLM_ENABLE_RESPONSES_API_STORE is 1; vLLM then keeps all."""

    def __init__(self) -> None:
        self.keeps = os.environ.get("VLLM_ENABLE_RESPONSES_API_STORE", "0") not in ("0", "")
        self._kept: dict[str, tuple[dict[str, Any], list[ChatMessage]]] = {}

    def get(self, name: str) -> tuple[dict[str, Any], list[ChatMessage]]:
        """Return a response and the messages up to its end.

        Raises BadRequestError where there is none of that name.
        """
        if (found := self._kept.get(name)) is None:
            raise BadRequestError.of("no response", name=name)
        return found

    def before(self, body: ResponsesBody) -> list[ChatMessage]:
        """Return the messages of all that a body goes on from, without their instructions."""
        return self.get(body.previous_response_id)[1] if body.previous_response_id else []

    def keep(self, answer: ResponseAnswer) -> None:
        """Keep a response, unless its client does not want it kept."""
        if not (self.keeps and answer.body.store):
            return
        told = [one for one in answer.chat.messages if one.role != "system"]
        choice = answer.choices[0]
        if not choice.said.call:  # vLLM leaves calls out, too
            told.append(ChatMessage(role="assistant", content=choice.text))
        self._kept[answer.head["id"]] = answer.final(), told
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]


def _short(told: dict[str, Any]) -> dict[str, Any]:
    """Return how likely a token was as events have it: without its bytes."""
    top = [{"token": one["token"], "logprob": one["logprob"]} for one in told["top_logprobs"]]
    return {"token": told["token"], "logprob": told["logprob"], "top_logprobs": top}
