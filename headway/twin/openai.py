"""OpenAI's words for requests and answers, as vLLM's server has them (0.33)."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from headway.twin.bodies import (
    BadRequestError,
    Body,
    ChatBody,
    CompletionBody,
    StreamOptions,
    read_types,
)
from headway.twin.chat_prompt import NO_LIMITS, chat_tokens
from headway.twin.tokenizers import TokenCounter
from simulator.core.request import Request, Segments
from simulator.workload.traces.format import name_problem

DEFAULT_MAX_TOKENS = 16  # of a completion, in OpenAI's API; a chat may fill the context
MOST_TOKENS = 2**31 - 1
LONGEST_NAME = 256  # of a client
MOST_PRIORITY = 10**9 - 1  # what a trace can tell
MOST_LOGPROBS = 20  # the default of vLLM's --max-logprobs
NOT_SIMULATED = (
    *("stop", "stop_token_ids", "logprobs", "prompt_logprobs", "echo", "suffix"),
    *("response_format", "structured_outputs", "use_beam_search", "truncate_prompt_tokens"),
    *("bad_words", "logit_bias", "allowed_token_ids", "return_token_ids", "return_token_strs"),
    *("include_stop_str_in_output", "prompt_embeds", "chat_template", "continue_final_message"),
)
"""Keys that would change vLLM's answer, and are ignored here, with a note."""
USUAL = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "best_of": 1}
"""The same of keys that have a value by which nothing changes."""


def error_body(message: str, kind: str, status: int, param: str | None = None) -> bytes:
    """Return an error as vLLM words it; `param`: the key of the body that is wrong."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return _compact({"error": error})


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
    estimated: bool = False  # its prompt: no chat template says what the model would see
    length: int = 0  # tokens after which the answer ends by itself; the server says


def read_body(
    body: object,
    chat: bool,
    model: str,
    counter: TokenCounter,
    max_model_len: int,
    *,
    vocab_size: int = MOST_TOKENS,
    limits: Mapping[str, int] = NO_LIMITS,
) -> Wanted:
    """Understand the body of a completion, or of a chat; raise BadRequestError.

    Ids of tokens are below `vocab_size`; `limits` says how many images a chat may have.
    """
    asked = read_types(body, ChatBody if chat else CompletionBody)
    assert isinstance(body, Mapping)
    if asked.model not in (None, "", model):
        why = f"The model `{asked.model}` does not exist. Valid aliases: {model}."
        raise BadRequestError(why, 404, "NotFoundError", "model")
    limit = asked.max_tokens
    if chat and asked.max_completion_tokens is not None:
        limit = asked.max_completion_tokens
    elif not chat and limit is None:
        limit = DEFAULT_MAX_TOKENS
    _check_options(asked)
    if (limit or 0) > max_model_len:
        key = "max_completion_tokens" if chat and asked.max_completion_tokens else "max_tokens"
        raise BadRequestError(
            f"{key}={limit} cannot be greater than max_model_len={max_model_len}. Please request "
            "fewer output tokens.",
            parameter=key,
            value=limit,
        )
    media: list[str] = []  # kinds of parts that count nothing
    if chat:
        tokens, media = chat_tokens(asked, counter, limits)
    else:
        tokens = _prompt_tokens(asked.prompt, counter, vocab_size)
    if len(tokens) > max_model_len:
        raise BadRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains {len(tokens)} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt.",
            parameter="input_tokens",
            value=len(tokens),
        )
    room = max_model_len - len(tokens)
    limit = room if limit is None else min(limit, room)  # without a word, as vLLM
    _check_sampling(asked, limit)
    if (asked.n or 1) > 1:
        raise BadRequestError("n: only 1 answer is simulated", param="n")
    options, more = asked.stream_options or StreamOptions(), asked.vllm_xargs or {}
    estimated = chat and counter.template is None
    ignored = NOT_SIMULATED + ("chat_template_kwargs",) * estimated
    forced = body.get("tool_choice") not in (None, "auto", "none")
    usage = bool(options.include_usage)
    return Wanted(
        tokens,
        limit,
        asked.min_tokens,
        asked.ignore_eos,
        bool(asked.stream),
        usage,
        bool(options.continuous_usage_stats) and usage,  # as in vLLM
        client_name(asked.user or more.get("client") or ""),
        max(-MOST_PRIORITY, min(asked.priority, MOST_PRIORITY)),
        _predicted(more.get("predicted_output_tokens")),
        asked.request_id or "",
        asked.cache_salt or "",
        [name for name in ignored if body.get(name)]
        + [name for name, usual in USUAL.items() if body.get(name, usual) not in (None, usual)]
        + ["tool_choice"] * forced
        + media,
        estimated=estimated,
    )


def _check_options(asked: ChatBody | CompletionBody) -> None:
    """Refuse options that contradict each other."""
    if asked.cache_salt == "":
        why = "Parameter 'cache_salt' must be a non-empty string if provided."
        raise BadRequestError(why, parameter="cache_salt")
    if asked.stream_options is not None and not asked.stream:
        why = "Stream options can only be defined when `stream=True`."
        raise BadRequestError(why, parameter="stream_options")
    if isinstance(asked, ChatBody) and asked.top_logprobs and not asked.logprobs:
        why = "when using `top_logprobs`, `logprobs` must be set to true."
        raise BadRequestError(why, parameter="top_logprobs")


def _predicted(value: object) -> int | None:
    """Read a prediction of output tokens, which may come as text."""
    if value is None:
        return None
    if re.fullmatch("[0-9]{1,10}", str(value)) and 0 < int(str(value)) <= MOST_TOKENS:
        return int(str(value))
    key = "predicted_output_tokens"
    raise BadRequestError(f"{key}: {str(value)[:40]!r} is no number of tokens", param=key)


def client_name(name: object, key: str = "user") -> str:
    """Return who asks, by a name that a trace can hold, too, from `key`; raise BadRequestError."""
    if not isinstance(name, str) or len(name) > LONGEST_NAME or name_problem(name):
        why = f"{key}: not a name of at most {LONGEST_NAME} characters"
        raise BadRequestError(why, param=key)
    return name


def _check_sampling(asked: Body, limit: int) -> None:
    """Refuse what vLLM's SamplingParams refuse (`_verify_args`), of which most is not simulated."""
    n, least = asked.n, asked.min_tokens
    temperature, top_p, min_p = asked.temperature, asked.top_p, asked.min_p
    penalty, top_k, interval = asked.repetition_penalty, asked.top_k, asked.stream_interval
    what = "non-negative" if (temperature or 0) < 0 else "in [0, 2]"
    broken: list[tuple[bool, str, object, bool]] = [  # whether; what; its value; is it named
        (n is not None and n < 1, "n must be at least 1", n, False),
        *(
            (value is not None and not -2 <= value <= 2, f"{name} must be in [-2, 2]", value, False)
            for name in ("presence_penalty", "frequency_penalty")
            for value in (getattr(asked, name),)
        ),
        (penalty is not None and not penalty < inf, "repetition_penalty must be a finite number",
         penalty, False),
        (penalty is not None and penalty <= 0, "repetition_penalty must be greater than zero",
         penalty, False),
        (temperature is not None and not 0 <= temperature <= 2, f"temperature must be {what}",
         temperature, True),
        (top_p is not None and not 0 < top_p <= 1, "top_p must be in (0, 1]", top_p, True),
        (top_k is not None and top_k < -1, "top_k must be 0 (disable), or at least 1",
         top_k, False),
        (min_p is not None and not 0 <= min_p <= 1, "min_p must be in [0, 1]", min_p, False),
        (limit < 1, "max_tokens must be at least 1", limit, True),
        (least < 0, "min_tokens must be greater than or equal to 0", least, False),
        (least > limit, f"min_tokens must be less than or equal to max_tokens={limit}",
         least, False),
        (interval is not None and interval < 1, "stream_interval must be at least 1",
         interval, True),
    ]  # fmt: skip
    for is_broken, why, value, named in broken:
        if is_broken:
            known = {"parameter": why.partition(" ")[0], "value": value} if named else {}
            raise BadRequestError(f"{why}, got {value}.", **known)  # type: ignore[arg-type]
    asked_logprobs = asked.top_logprobs if isinstance(asked, ChatBody) else asked.logprobs  # type: ignore[attr-defined]
    for name, count in (("logprobs", asked_logprobs), ("prompt_logprobs", asked.prompt_logprobs)):
        _check_logprobs(name, count)


def _check_logprobs(name: str, count: int | None) -> None:
    """Refuse more of them than vLLM gives; -1 is all."""
    if count is None or count == -1 or 0 <= count <= MOST_LOGPROBS:
        return
    kind = "sample" if name == "logprobs" else "prompt"
    why = (
        f"Requested {kind} logprobs of {count}, which is greater than max allowed: {MOST_LOGPROBS}"
    )
    if count < 0:
        why = f"{name} must be non-negative or -1, got {count}."
    raise BadRequestError(why, parameter=name, value=count)


def _prompt_tokens(prompt: Any, counter: TokenCounter, vocab_size: int) -> Sequence[int]:
    if prompt is None or prompt == "":
        why = "Either prompt or prompt_embeds must be provided and non-empty."
        raise BadRequestError(why, parameter="prompt")
    if prompt == []:
        raise BadRequestError("You must pass at least one prompt")
    if isinstance(prompt, str):
        if not (tokens := counter.encode(prompt)):
            raise BadRequestError("prompt: no tokens", param="prompt")
        return tokens
    if not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise BadRequestError("prompt: only one at a time is simulated", param="prompt")
        return _prompt_tokens(prompt[0], counter, vocab_size)
    if (most := max(prompt)) >= vocab_size:
        raise BadRequestError(f"Token id {str(most)[:40]} is out of vocabulary")
    found: Sequence[int] = prompt
    return found


def name_blocks(tokens: Sequence[int], size: int, salt: str = "") -> Segments:
    """Name a prompt block by block by its contents, so that equal beginnings are shared.

    With a `salt` only by prompts with the same, as vLLM's cache_salt: it is in the first name.
    """
    pieces = [tuple(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    names = [hash(piece) for piece in pieces]
    if salt:  # as numbers: the hash of a text is another in each process
        names[0] = hash((*pieces[0], -1, *salt.encode(errors="surrogatepass")))
    return tuple((name, len(piece)) for name, piece in zip(names, pieces, strict=True))


NO_MESSAGE = ("refusal", "annotations", "audio", "function_call", "reasoning")
NO_TOKEN_IDS = (("prompt_token_ids", "token_ids"), ("token_ids",))
NO_CHOICE = (
    ("token_ids", "prompt_logprobs", "prompt_token_ids", "routed_experts"),
    ("token_ids", "routed_experts"),
)
NO_ANSWER = (
    ("kv_transfer_params", "ec_transfer_params", "metrics"),
    (
        *("prompt_logprobs", "prompt_token_ids", "prompt_text"),
        *("kv_transfer_params", "ec_transfer_params", "metrics"),
    ),
)
"""Keys of vLLM's answers that are null; where there are two, of completions and of chats."""


class Answer:
    """What goes back to a client: chunks of a stream, or all at once."""

    def __init__(
        self,
        wanted: Wanted,
        chat: bool,
        model: str,
        serial: int,
        words: list[str],
        *,
        fingerprint: str = "",
        cached_block: int = MOST_TOKENS,
    ) -> None:
        """Begin an answer; a prefix cache, if there is one, has blocks of `cached_block` tokens."""
        self.cached_block = cached_block
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
        self.fingerprint = {"system_fingerprint": fingerprint}
        text = self._chunk({"content": "@@"} if chat else "@@")
        self._before, self._after = text.rsplit(b"@@", 1)  # a request's id may hold one
        self._frames: dict[int, bytes] = {}  # what comes before a word, by its length
        self._end = self._after + b"\r\n"

    def _chunk(
        self,
        said: object,
        count: int | None = None,
        reason: str | None = None,
        *,
        is_role: bool = False,
    ) -> bytes:
        """Write a chunk; of a token's the `count` so far, and the `reason` where it is the last."""
        key = "delta" if self.chat else "text"
        choice = {"index": 0, key: said, "logprobs": None, "finish_reason": reason}
        if reason is not None or not self.chat:
            choice["stop_reason"] = None
        choice |= {} if is_role else dict.fromkeys(NO_TOKEN_IDS[self.chat])
        chunk = self.head | {"choices": [choice]}
        if count is not None and self.wanted.continuous_usage:
            chunk["usage"] = self._usage(count)
            chunk["usage"] |= {"completion_tokens_details": None} if self.chat else {}
        if is_role:
            chunk |= {"prompt_token_ids": None, "prompt_text": None}
        elif reason is not None and not self.wanted.usage:
            chunk |= self.fingerprint  # of the last chunk
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
            role = self._chunk({"role": "assistant", "content": ""}, 0, is_role=True)
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
            usage = self._usage(request.generated, request)
            end = self.head | {"choices": [], "usage": usage} | self.fingerprint
            out = b"data: " + _compact(end) + b"\n\n"
        return out + b"data: [DONE]\n\n"

    def error_chunk(self, message: str) -> bytes:
        """Return what ends a stream that has begun and cannot go on."""
        error = error_body(message, "BadRequestError", 400)
        return b"data: " + error + b"\n\ndata: [DONE]\n\n"

    def whole(self, request: Request, reason: str) -> bytes:
        """Return the whole answer at once."""
        text = self.text(0, request.generated)
        message = {"role": "assistant", "content": text, **dict.fromkeys(NO_MESSAGE)}
        said = {"message": message} if self.chat else {"text": text}
        why = {"finish_reason": reason, "stop_reason": None}
        choice = {
            "index": 0,
            **said,
            "logprobs": None,
            **why,
            **dict.fromkeys(NO_CHOICE[self.chat]),
        }
        usage = self._usage(request.generated, request) | {"completion_tokens_details": None}
        usage["prompt_tokens_details"] = {
            "created_cache_tokens": None,
            "multimodal_tokens": None,
            **usage["prompt_tokens_details"],
        }
        return _compact(
            self.head
            | {"choices": [choice], "service_tier": None, **self.fingerprint, "usage": usage}
            | dict.fromkeys(NO_ANSWER[self.chat])
        )

    def _usage(self, count: int, request: Request | None = None) -> dict[str, Any]:
        asked = len(self.wanted.tokens)
        usage: dict[str, Any] = {
            "prompt_tokens": asked,
            "total_tokens": asked + count,
            "completion_tokens": count,
        }
        if request is not None:
            details = usage["prompt_tokens_details"] = {"cached_tokens": request.cached}
            if self.chat:  # the whole blocks of its prompt that the cache had not
                whole = asked - asked % self.cached_block
                details["created_cache_tokens"] = max(whole - request.cached, 0)
        return usage


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
