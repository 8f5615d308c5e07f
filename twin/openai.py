"""OpenAI's words for requests and answers, as vLLM's server has them (0.33)."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.core.request import Request, Segments
from simulator.workload.traces.format import name_problem
from twin.tokenizers import TokenCounter

DEFAULT_MAX_TOKENS = 16  # of a completion, in OpenAI's API; a chat may fill the context
MOST_TOKENS = 2**31 - 1
LONGEST_NAME = 256  # of a client
MOST_PRIORITY = 10**9 - 1  # what a trace can tell
RANGES = {
    "temperature": "[0, 2]",
    "top_p": "(0, 1]",
    "min_p": "[0, 1]",
    "presence_penalty": "[-2, 2]",
    "frequency_penalty": "[-2, 2]",
    "repetition_penalty": "(0, inf)",
}
"""What vLLM takes of keys that change no length (SamplingParams._verify_args)."""
WHOLE_RANGES = {
    "top_k": (-1, MOST_TOKENS),
    "seed": (-(2**63), 2**63 - 1),
    "top_logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "stream_interval": (1, MOST_TOKENS),
}
"""The same of whole numbers; 20 is the default of vLLM's --max-logprobs."""
NOT_SIMULATED = (
    *("stop", "stop_token_ids", "logprobs", "prompt_logprobs", "echo", "suffix", "tools"),
    *("response_format", "structured_outputs", "use_beam_search", "truncate_prompt_tokens"),
    *("bad_words", "logit_bias", "allowed_token_ids", "return_token_ids", "return_token_strs"),
    *("include_stop_str_in_output", "prompt_embeds", "chat_template", "chat_template_kwargs"),
)
"""Keys that would change vLLM's answer, and are ignored here, with a note."""
USUAL = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "best_of": 1}
"""The same of keys that have a value by which nothing changes."""


class BadRequestError(Exception):
    """What the client has asked for cannot be."""

    def __init__(
        self,
        why: str,
        status: int = 400,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        super().__init__(why)
        self.status, self.kind, self.param = status, kind, param


def error_body(message: str, kind: str, status: int, param: str | None = None) -> bytes:
    """Return an error as vLLM words it; `param`: the key of the body that is wrong."""
    error = {"message": message, "type": kind, "param": param, "code": status}
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
    continuous_usage: bool  # in every chunk, too
    client: str
    priority: int
    hint: int | None  # predicted output tokens
    request_id: str  # "": a serial number
    salt: str  # prompts are shared only with those of the same
    notes: list[str] = field(default_factory=list)  # what is not simulated
    length: int = 0  # tokens after which the answer ends by itself; the server says


def read_body(
    body: object,
    chat: bool,
    model: str,
    counter: TokenCounter,
    max_model_len: int,
    *,
    vocab_size: int = MOST_TOKENS,
) -> Wanted:
    """Understand the body of a completion, or of a chat; raise BadRequestError.

    Ids of tokens are below `vocab_size`.
    """
    if not isinstance(body, Mapping):
        raise BadRequestError("the body is not a JSON object")
    if (asked := body.get("model")) not in (None, "", model):
        why = f"The model `{asked}` does not exist."
        raise BadRequestError(why, 404, "NotFoundError", "model")
    if (_whole(body, "n") or 1) > 1:
        raise BadRequestError("n: only 1 answer is simulated", param="n")
    _check_sampling(body, chat)
    if chat:
        tokens = _chat_tokens(body, counter)
    else:
        tokens = _prompt_tokens(body.get("prompt"), counter, vocab_size)
    if not tokens:
        key, what = ("messages", "text") if chat else ("prompt", "tokens")
        raise BadRequestError(f"{key}: no {what}", param=key)
    if len(tokens) >= max_model_len:
        raise BadRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your request "
            f"has {len(tokens)} input tokens. Please reduce the length of the input messages.",
            param="messages" if chat else "prompt",
        )
    room = max_model_len - len(tokens)
    limit = _whole(body, "max_completion_tokens")
    limit = _whole(body, "max_tokens") if limit is None else limit
    if limit is None:
        limit = room if chat else DEFAULT_MAX_TOKENS
    if limit > room and (body.get("max_tokens") or body.get("max_completion_tokens")):
        raise BadRequestError(
            f"'max_tokens' or 'max_completion_tokens' is too large: {limit}. This model's maximum "
            f"context length is {max_model_len} tokens and your request has {len(tokens)} input "
            f"tokens ({limit} > {max_model_len} - {len(tokens)}).",
            param="max_tokens",
        )
    if body.get("cache_salt") == "":
        why = "Parameter 'cache_salt' must be a non-empty string if provided."
        raise BadRequestError(why, param="cache_salt")
    options, more = _mapping(body, "stream_options"), _mapping(body, "vllm_xargs")
    stream = _flag(body, "stream")
    if options and not stream:
        why = "Stream options can only be defined when `stream=True`."
        raise BadRequestError(why, param="stream_options")
    usage = _flag(options, "include_usage")
    least = _whole(body, "min_tokens", 0) or 0
    if least > limit:
        why = f"min_tokens must be less than or equal to max_tokens={limit}, got {least}."
        raise BadRequestError(why, param="min_tokens")
    return Wanted(
        tokens,
        min(limit, room),
        least,
        _flag(body, "ignore_eos"),
        stream,
        usage,
        _flag(options, "continuous_usage_stats") and usage,  # as in vLLM
        client_name(body.get("user") or more.get("client") or ""),
        _whole(body, "priority", -MOST_PRIORITY, MOST_PRIORITY) or 0,
        _whole(more, "predicted_output_tokens"),
        _text(body, "request_id"),
        _text(body, "cache_salt"),
        [name for name in NOT_SIMULATED if body.get(name)]
        + [name for name, usual in USUAL.items() if body.get(name, usual) not in (None, usual)],
    )


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequestError(f"{name}: {json.dumps(value)[:40]} is not text", param=name)
    return value or ""


def client_name(name: object, key: str = "user") -> str:
    """Return who asks, by a name that a trace can hold, too, from `key`; raise BadRequestError."""
    if not isinstance(name, str) or len(name) > LONGEST_NAME or name_problem(name):
        why = f"{key}: not a name of at most {LONGEST_NAME} characters"
        raise BadRequestError(why, param=key)
    return name


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = {} if body.get(name) is None else body[name]
    if not isinstance(value, Mapping):
        raise BadRequestError(f"{name}: not an object", param=name)
    return value


def _check_sampling(body: Mapping[str, Any], chat: bool) -> None:
    """Refuse what vLLM refuses of keys that are not simulated."""
    for name, bounds in RANGES.items():
        value = body.get(name)
        if isinstance(value, str):  # as pydantic reads numbers
            value = _float(value)
        if value is None:
            continue
        least, most = (float(bound) for bound in bounds[1:-1].split(", "))
        closed = [least] * (bounds[0] == "[") + [most] * (bounds[-1] == "]")
        if not isinstance(value, int | float):
            why = f"{name}: {json.dumps(value)[:40]} is not a number"
        elif least < value < most or value in closed:
            continue
        elif name == "temperature" and value < 0:
            why = f"temperature must be non-negative, got {float(value)}."
        else:
            why = f"{name} must be in {bounds}, got {value}."
        raise BadRequestError(why, param=name)
    for name, limits in WHOLE_RANGES.items():
        _whole(body, name, *limits)
    if not chat:
        _whole(body, "logprobs", 0, 20)
    elif _whole(body, "top_logprobs", 0) and not body.get("logprobs"):
        why = "when using `top_logprobs`, `logprobs` must be set to true."
        raise BadRequestError(why, param="top_logprobs")


def _float(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _flag(body: Mapping[str, Any], name: str) -> bool:
    """Read true or false, which may come as 1 or 0."""
    value = body.get(name)
    if value not in (None, False, True):
        raise BadRequestError(f"{name}: {json.dumps(value)[:40]} is not true or false", param=name)
    return bool(value)


def _whole(
    body: Mapping[str, Any], name: str, least: int = 1, most: int = MOST_TOKENS
) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, str) and value.lstrip("-").isdigit() and len(value) < 12:
        value = int(value)  # vllm_xargs may come as text
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        why = f"{name}: {json.dumps(value)[:40]} is not a whole number"
    elif value < least:
        why = f"{name} must be at least {least}, got {value}."
    elif value > most:
        why = f"{name} must be at most {most}, got {str(value)[:40]}."
    else:
        return value
    raise BadRequestError(why, param=name)


def _prompt_tokens(prompt: object, counter: TokenCounter, vocab_size: int) -> Sequence[int]:
    if isinstance(prompt, str):
        return counter.encode(prompt)
    if isinstance(prompt, list):
        if all(isinstance(one, int) and not isinstance(one, bool) for one in prompt):
            for edge in (min(prompt), max(prompt)) if prompt else ():
                if not 0 <= edge < vocab_size:
                    why = f"Token id {str(edge)[:40]} is out of vocabulary"
                    raise BadRequestError(why, param="prompt")
            return prompt
        only = prompt[0]
        batch = isinstance(only, list) and only and not isinstance(only[0], int)
        if len(prompt) == 1 and not batch:
            return _prompt_tokens(only, counter, vocab_size)
        raise BadRequestError("prompt: only one at a time is simulated", param="prompt")
    raise BadRequestError("prompt: neither text nor a list of tokens", param="prompt")


def _chat_tokens(body: Mapping[str, Any], counter: TokenCounter) -> Sequence[int]:
    """Tokenize each message by itself, so that what one turn has said is what the next repeats."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages: not a list of at least one", param="messages")
    tokens: list[int] = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise BadRequestError("messages: one is not an object", param="messages")
        if not isinstance(message.get("role"), str):
            raise BadRequestError("messages: one has no role", param="messages")
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, Mapping)]
            content = "".join(part for part in parts if isinstance(part, str))
        if content is not None and not isinstance(content, str):
            why = "messages: a content is neither text nor a list of parts"
            raise BadRequestError(why, param="messages")
        tokens += counter.encode(content or "")
    return tokens


def name_blocks(tokens: Sequence[int], size: int, salt: str = "") -> Segments:
    """Name a prompt block by block by its contents, so that equal beginnings are shared.

    With a `salt` only by prompts with the same, as vLLM's cache_salt: it is in the first name.
    """
    pieces = [tuple(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    names = [hash(piece) for piece in pieces]
    if salt:  # as numbers: the hash of a text is another in each process
        names[0] = hash((*pieces[0], -1, *salt.encode(errors="surrogatepass")))
    return tuple((name, len(piece)) for name, piece in zip(names, pieces, strict=True))


class Answer:
    """What goes back to a client: chunks of a stream, or all at once."""

    def __init__(
        self, wanted: Wanted, chat: bool, model: str, serial: int, words: list[str]
    ) -> None:
        self.wanted, self.chat = wanted, chat
        self.words, self.offset = words, serial * 7919
        self._last = min(wanted.length, wanted.max_tokens)
        kind = "chat.completion" if chat else "text_completion"
        self.head: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{wanted.request_id or f'{serial:012x}'}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        if chat and wanted.stream:
            self.head["object"] += ".chunk"
        text = self._chunk({"content": "@@"} if chat else "@@")
        self._before, self._after = text.rsplit(b"@@", 1)  # a request's id may hold one
        self._frames: dict[int, bytes] = {}  # what comes before a word, by its length
        self._end = self._after + b"\r\n"

    def _chunk(self, said: object, count: int | None = None, reason: str | None = None) -> bytes:
        """Write a chunk; of a token's the `count` so far, and the `reason` where it is the last."""
        key = "delta" if self.chat else "text"
        choice = {"index": 0, key: said, "logprobs": None, "finish_reason": reason}
        if reason is not None or not self.chat:
            choice["stop_reason"] = None
        chunk = self.head | {"choices": [choice]}
        if count is not None and self.wanted.continuous_usage:
            chunk["usage"] = self._usage(count)
        return b"data: " + _compact(chunk) + b"\n\n"

    def text(self, first: int, last: int) -> str:
        """Return the words from number `first` up to `last`."""
        words, offset = self.words, self.offset
        return "".join(words[(offset + number) % len(words)] for number in range(first, last))

    def chunk(self, new: int, count: int) -> bytes:
        """Return the chunk of `new` tokens, `count` in all; before the first of a chat its role.

        That of the last token says why it is the last, as vLLM's does: N chunks for N tokens.
        """
        role = b""
        if new == count and self.chat:
            role = self._chunk({"role": "assistant", "content": ""}, 0)
        text = self.text(count - new, count)
        if count >= self._last:
            reason = "stop" if self.wanted.length <= self.wanted.max_tokens else "length"
        elif not self.wanted.continuous_usage:
            return role + self._before + text.encode() + self._after
        else:
            reason = None
        return role + self._chunk({"content": text} if self.chat else text, count, reason)

    def framed(self, new: int, count: int) -> bytes:
        """Return that chunk as one of HTTP's; of one token, from parts that are written once."""
        if (
            new > 1
            or self.wanted.continuous_usage
            or count >= self._last
            or (self.chat and count == 1)
        ):
            data = self.chunk(new, count)
            return b"%x\r\n%b\r\n" % (len(data), data)
        words = self.words
        word = words[(self.offset + count - 1) % len(words)].encode()
        if (frame := self._frames.get(len(word))) is None:
            size = len(self._before) + len(word) + len(self._after)
            self._frames[len(word)] = frame = b"%x\r\n%b" % (size, self._before)
        return frame + word + self._end

    def end(self, request: Request) -> bytes:
        """Return what comes after the last token."""
        out = b""
        if self.wanted.usage:
            end = self.head | {"choices": [], "usage": self._usage(request.generated, request)}
            out = b"data: " + _compact(end) + b"\n\n"
        return out + b"data: [DONE]\n\n"

    def error_chunk(self, message: str) -> bytes:
        """Return what ends a stream that has begun and cannot go on."""
        error = error_body(message, "BadRequestError", 400)
        return b"data: " + error + b"\n\ndata: [DONE]\n\n"

    def whole(self, request: Request, reason: str) -> bytes:
        """Return the whole answer at once."""
        text = self.text(0, request.generated)
        said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        why = {"finish_reason": reason, "stop_reason": None}
        choice = {"index": 0, **said, "logprobs": None, **why}
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
