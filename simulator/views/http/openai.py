"""OpenAI's words for requests and answers, as vLLM's server has them (0.33)."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.core.request import Request, Segments
from simulator.views.http.tokenizers import TokenCounter
from simulator.workload.traces.format import name_problem

DEFAULT_MAX_TOKENS = 16  # of a completion, in OpenAI's API; a chat may fill the context
MOST_TOKENS = 2**31 - 1
LONGEST_NAME = 256  # of a client
MOST_PRIORITY = 10**9 - 1  # what a trace can tell


class BadRequestError(Exception):
    """What the client has asked for cannot be."""

    def __init__(self, why: str, status: int = 400, kind: str = "BadRequestError") -> None:
        super().__init__(why)
        self.status, self.kind = status, kind


def error_body(message: str, kind: str, status: int) -> bytes:
    """Give an error as vLLM words it."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}).encode()


@dataclass(slots=True)
class Wanted:
    """What a body asks for."""

    tokens: Sequence[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stream: bool
    usage: bool  # in a chunk of its own at the end
    continuous_usage: bool  # in every chunk
    client: str
    priority: int
    hint: int | None  # predicted output tokens
    notes: list[str] = field(default_factory=list)  # what is not simulated


def read_body(
    body: object, chat: bool, model: str, counter: TokenCounter, max_model_len: int
) -> Wanted:
    """Understand the body of a completion, or of a chat; raise BadRequestError."""
    if not isinstance(body, Mapping):
        raise BadRequestError("the body is not a JSON object")
    if (asked := body.get("model")) not in (None, model):
        raise BadRequestError(f"The model `{asked}` does not exist.", 404, "NotFoundError")
    if body.get("n") not in (None, 1):
        raise BadRequestError("n: only 1 answer is simulated")
    tokens = _chat_tokens(body, counter) if chat else _prompt_tokens(body.get("prompt"), counter)
    if not tokens:
        raise BadRequestError("messages: no text" if chat else "prompt: no tokens")
    if len(tokens) >= max_model_len:
        raise BadRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your request "
            f"has {len(tokens)} input tokens. Please reduce the length of the input messages."
        )
    room = max_model_len - len(tokens)
    limit = _whole(body, "max_completion_tokens") or _whole(body, "max_tokens")
    if limit is None:
        limit = room if chat else DEFAULT_MAX_TOKENS
    if limit > room and (body.get("max_tokens") or body.get("max_completion_tokens")):
        raise BadRequestError(
            f"'max_tokens' or 'max_completion_tokens' is too large: {limit}. This model's maximum "
            f"context length is {max_model_len} tokens and your request has {len(tokens)} input "
            f"tokens ({limit} > {max_model_len} - {len(tokens)})."
        )
    options, more = _mapping(body, "stream_options"), _mapping(body, "vllm_xargs")
    least = _whole(body, "min_tokens", 0) or 0
    if least > limit:
        raise BadRequestError(
            f"min_tokens must be less than or equal to max_tokens={limit}, got {least}."
        )
    return Wanted(
        tokens,
        min(limit, room),
        least,
        body.get("ignore_eos") is True,
        body.get("stream") is True,
        options.get("include_usage") is True,
        options.get("continuous_usage_stats") is True,
        client_name(body.get("user") or more.get("client") or ""),
        _whole(body, "priority", -MOST_PRIORITY, MOST_PRIORITY) or 0,
        _whole(more, "predicted_output_tokens"),
        ["stop"] if body.get("stop") else [],
    )


def client_name(name: object) -> str:
    """Give who asks, by a name that a trace can hold, too; raise BadRequestError."""
    if not isinstance(name, str) or len(name) > LONGEST_NAME or name_problem(name):
        raise BadRequestError(f"user: not a name of at most {LONGEST_NAME} characters")
    return name


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = {} if body.get(name) is None else body[name]
    if not isinstance(value, Mapping):
        raise BadRequestError(f"{name}: not an object")
    return value


def _whole(
    body: Mapping[str, Any], name: str, least: int = 1, most: int = MOST_TOKENS
) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, str) and value.lstrip("-").isdigit() and len(value) < 12:
        value = int(value)  # vllm_xargs may come as text
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadRequestError(
            f"{name}: {json.dumps(value)[:40]} is not a whole number, {least} or more"
        )
    return value


def _prompt_tokens(prompt: object, counter: TokenCounter) -> Sequence[int]:
    if isinstance(prompt, str):
        return counter.encode(prompt)
    if isinstance(prompt, list):
        if all(isinstance(one, int) and not isinstance(one, bool) for one in prompt):
            return prompt
        if len(prompt) == 1 and (prompt[0] == [] or not _is_batch(prompt[0])):
            return _prompt_tokens(prompt[0], counter)
        raise BadRequestError("prompt: only one at a time is simulated")
    raise BadRequestError("prompt: neither text nor a list of tokens")


def _is_batch(prompt: object) -> bool:
    return isinstance(prompt, list) and not isinstance(prompt[0], int)


def _chat_tokens(body: Mapping[str, Any], counter: TokenCounter) -> Sequence[int]:
    """Tokenize each message by itself, so that what one turn has said is what the next repeats."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages: not a list of at least one")
    tokens: list[int] = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise BadRequestError("messages: one is not an object")
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, Mapping)]
            content = "".join(part for part in parts if isinstance(part, str))
        if content is not None and not isinstance(content, str):
            raise BadRequestError("messages: a content is neither text nor a list of parts")
        tokens += counter.encode(content or "")
    return tokens


def name_blocks(tokens: Sequence[int], size: int) -> Segments:
    """Name a prompt block by block by its contents, so that equal beginnings are shared."""
    pieces = (tuple(tokens[at : at + size]) for at in range(0, len(tokens), size))
    return tuple((hash(piece), len(piece)) for piece in pieces)


class Answer:
    """What goes back to a client: chunks of a stream, or all at once."""

    def __init__(
        self, wanted: Wanted, chat: bool, model: str, serial: int, words: list[str]
    ) -> None:
        self.wanted, self.chat = wanted, chat
        self.words, self.offset = words, serial * 7919
        kind = "chat.completion" if chat else "text_completion"
        self.head: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{serial:012x}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        if chat and wanted.stream:
            self.head["object"] += ".chunk"
        text = self._chunk({"content": "@@"} if chat else "@@")
        self._before, self._after = text.split(b"@@")

    def _chunk(self, said: object, reason: str | None = None) -> bytes:
        key = "delta" if self.chat else "text"
        choice = {"index": 0, key: said, "logprobs": None, "finish_reason": reason}
        if not self.chat:
            choice["stop_reason"] = None
        return b"data: " + _compact(self.head | {"choices": [choice]}) + b"\n\n"

    def text(self, first: int, last: int) -> str:
        """Give the words from number `first` up to `last`."""
        words, offset = self.words, self.offset
        return "".join(words[(offset + number) % len(words)] for number in range(first, last))

    def first_chunk(self) -> bytes:
        """Give what comes before the first token."""
        return self._chunk({"role": "assistant", "content": ""}) if self.chat else b""

    def chunk(self, new: int, count: int) -> bytes:
        """Give the chunk of `new` tokens, `count` in all."""
        after = self._after
        if self.wanted.continuous_usage:
            usage = b',"usage":' + _compact(self._usage(count)) + b"}\n\n"
            after = after[:-3] + usage
        return self._before + self.text(count - new, count).encode() + after

    def last_chunk(self, request: Request, reason: str) -> bytes:
        """Give what comes after the last token."""
        out = self._chunk({} if self.chat else "", reason)
        if self.wanted.usage or self.wanted.continuous_usage:
            end = self.head | {"choices": [], "usage": self._usage(request.generated, request)}
            out += b"data: " + _compact(end) + b"\n\n"
        return out + b"data: [DONE]\n\n"

    def whole(self, request: Request, reason: str) -> bytes:
        """Give the whole answer at once."""
        text = self.text(0, request.generated)
        said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        usage = self._usage(request.generated, request)
        return _compact(self.head | {"choices": [choice], "usage": usage})

    def _usage(self, count: int, request: Request | None = None) -> dict[str, Any]:
        asked = len(self.wanted.tokens)
        usage: dict[str, Any] = {
            "prompt_tokens": asked,
            "total_tokens": asked + count,
            "completion_tokens": count,
        }
        if request is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": request.cached}
        return usage


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
