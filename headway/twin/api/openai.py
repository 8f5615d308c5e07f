"""OpenAI's words for requests, as vLLM's server has them (0.33)."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from headway.twin.api.bodies import (
    BadRequestError,
    Body,
    ChatBody,
    CompletionBody,
    StreamOptions,
    Tool,
)
from headway.twin.api.chat_prompt import chat_prompt
from headway.twin.api.prompts import MediaLaws, Prompt
from headway.twin.api.said import FixedText
from headway.twin.api.schema_text import UnmetSchemaError, schema_text
from headway.twin.api.tokenizers import TokenCounter
from simulator.workload.traces.format import name_problem

DEFAULT_MAX_TOKENS = 16  # of a completion, in OpenAI's API; a chat may fill the context
MOST_TOKENS = 2**31 - 1
LONGEST_NAME = 256  # of a client
MOST_PRIORITY = 10**9 - 1  # what a trace can tell
TINY, MOST = 5e-324, 1.7976931348623157e308  # the least positive and the largest float
FINITE, POSITIVE = "a finite number", "greater than zero"
MOST_LOGPROBS = 20  # the default of vLLM's --max-logprobs
NOT_SIMULATED = (
    *("stop_token_ids", "prompt_logprobs", "use_beam_search", "truncate_prompt_tokens"),
    *("bad_words", "logit_bias", "allowed_token_ids", "return_token_ids", "prompt_embeds"),
    *("chat_template", "continue_final_message", "logprob_token_ids", "return_token_offsets"),
    *("return_tokens_as_token_ids", "return_weight_versions", "return_prompt_text", "thinking"),
    *("thinking_token_budget", "repetition_detection", "kv_transfer_params", "ec_transfer_params"),
    *("enable_response_messages", "previous_input_messages"),
)
"""Keys that would change vLLM's answer, and are ignored here, with a note."""
USUAL = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "best_of": 1}
"""The same of keys that have a value by which nothing changes."""


ANY = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
"""A schema of what any JSON object is allowed to be."""


def error_body(message: str, kind: str, status: int, param: str | None = None) -> bytes:
    """Return an error as vLLM words it; `param`: the key of the body that is wrong."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return compact({"error": error})


class Wanted:
    """What a body asks for, with its defaults settled."""

    def __init__(
        self, asked: Body, prompts: Sequence[Prompt], max_tokens: int, counter: TokenCounter
    ) -> None:
        """Read what is asked beside the prompts; raise BadRequestError where it cannot be."""
        options, more = asked.stream_options or StreamOptions(), asked.vllm_xargs or {}
        self.asked, self.prompts, self.max_tokens = asked, prompts, max_tokens
        self.fixed, self.notes = _guided(asked)  # what the answer must be; what is not simulated
        self.notes += _ignored(asked, counter)
        self.logprobs = _logprobs(asked)  # the likeliest texts that are told of each token
        self.usage = bool(options.include_usage)  # in a chunk of its own at the end
        self.continuous_usage = self.usage and bool(options.continuous_usage_stats)  # in each, too
        self.client = client_name(asked.user or more.get("client") or "")
        self.priority = max(-MOST_PRIORITY, min(asked.priority, MOST_PRIORITY))
        self.hint = output_tokens(more, "predicted_output_tokens")
        self.length = output_tokens(more, "output_tokens")  # None: as the workload says
        self.request_id = asked.request_id or ""  # "": a serial number
        # No chat template says what the model would see, or images count by a law.
        chat = isinstance(asked, ChatBody)
        self.estimated = chat and (counter.template is None or bool(prompts[0].items))

    @property
    def tokens(self) -> Sequence[int]:
        """Return those of the first prompt."""
        return self.prompts[0].tokens


@dataclass(frozen=True, slots=True)
class Reader:
    """Understands bodies for a model."""

    model: str
    counter: TokenCounter
    max_model_len: int
    vocab_size: int = MOST_TOKENS
    laws: MediaLaws | None = None  # of images and clips in a chat; None: they count nothing

    def read(self, asked: Body) -> Wanted:
        """Say what a body asks for; raise BadRequestError where it cannot be."""
        if asked.model not in (None, "", self.model):
            why = f"The model `{asked.model}` does not exist. Valid aliases: {self.model}."
            raise BadRequestError(why, 404, "NotFoundError", "model")
        limit = self._limit(asked)
        _check_options(asked)
        media: list[str] = []  # kinds of parts that count nothing
        if isinstance(asked, ChatBody):
            prompt, media = chat_prompt(asked, self.counter, self.laws)
            prompts = [prompt]
        else:
            assert isinstance(asked, CompletionBody)
            prompts = _prompts(asked.prompt, self.counter, self.vocab_size)
            if asked.echo:
                prompts = [self._echoed(prompt) for prompt in prompts]
        longest = max(len(prompt.tokens) for prompt in prompts)
        room = self._room(longest)
        limit = room if limit is None else min(limit, room)  # without a word, as vLLM
        if isinstance(asked, CompletionBody) and asked.echo and asked.max_tokens == 0:
            limit = min(1, room)  # it computes the prompt, and a token that is not told
        _check_sampling(asked, limit)
        wanted = Wanted(asked, prompts, limit, self.counter)
        wanted.notes += media
        return wanted

    def _echoed(self, prompt: Prompt) -> Prompt:
        counter = self.counter
        if prompt.text is not None:
            return prompt._replace(echo=counter.pieces(prompt.text))
        if counter.decode(prompt.tokens) is None:
            raise BadRequestError("echo: tokens need --tokenizer", 501, "NotImplementedError")
        return prompt._replace(echo=[counter.decode([token]) or "" for token in prompt.tokens])

    def _limit(self, asked: Body) -> int | None:
        """Return the most tokens of an answer that are asked for; refuse what no prompt allows."""
        limit, key = asked.max_tokens, "max_tokens"
        if isinstance(asked, ChatBody):
            for name in ("max_completion_tokens", "max_output_tokens"):  # a chat's, a response's
                if (value := asked.__dict__.get(name)) is not None:
                    limit, key = value, name
        elif limit is None:
            limit = DEFAULT_MAX_TOKENS
        if (limit or 0) > self.max_model_len:
            why = f"{key}={limit} cannot be greater than max_model_len={self.max_model_len}. "
            why += "Please request fewer output tokens."
            raise BadRequestError(why, parameter=key, value=limit)
        return limit

    def _room(self, tokens: int) -> int:
        """Return the tokens of an answer that a prompt of so many leaves room for."""
        if tokens > self.max_model_len:
            why = f"This model's maximum context length is {self.max_model_len} tokens. However, "
            why += f"your prompt contains {tokens} input tokens, which exceeds this limit even "
            why += "without any output tokens. Please reduce the length of the input prompt."
            raise BadRequestError(why, parameter="input_tokens", value=tokens)
        return self.max_model_len - tokens


def _ignored(asked: Body, counter: TokenCounter) -> list[str]:
    """Name the keys of a body that would change a vLLM's answer."""
    ignored = NOT_SIMULATED + ("chat_template_kwargs",) * (counter.template is None)
    ignored += ("echo",) * isinstance(asked, ChatBody)
    return [name for name in ignored if getattr(asked, name, None)] + [
        name for name, usual in USUAL.items() if getattr(asked, name, usual) not in (None, usual)
    ]


def _logprobs(asked: Body) -> int | None:
    if isinstance(asked, ChatBody):
        return (asked.top_logprobs or 0) if asked.logprobs else None
    return asked.logprobs if isinstance(asked, CompletionBody) else None


def _guided(asked: Body) -> tuple[FixedText | None, list[str]]:
    """Return the text that an answer must be, and the key that asks for one that is not made."""
    if isinstance(asked, ChatBody) and asked.tools:
        choice = asked.tool_choice
        name = choice.function.name if isinstance(choice, Tool) else None
        for tool in (one.function for one in asked.tools):
            if choice == "required" or tool.name == name:
                around = f'[{{"name": {json.dumps(tool.name)}, "parameters": ', "}]"
                return _by_schema(
                    tool.parameters or {"type": "object"},
                    "tool_choice",
                    call=tool.name,
                    hidden=around if name is None else ("", ""),
                )
    form, own = asked.response_format, asked.structured_outputs
    if form is not None and form.type != "text":
        named = form.json_schema
        is_json = form.type == "json_schema"
        schema: Any = named.json_schema if named is not None and is_json else ANY
        return _by_schema(schema if form.type != "structural_tag" else None, "response_format")
    if own is None:
        return None, []
    if own.choice:
        return FixedText(own.choice[0]), []
    schema = own.json_schema if own.json_schema is not None else ANY if own.json_object else None
    if isinstance(schema, str):
        with suppress(ValueError, RecursionError):
            schema = json.loads(schema)
    return _by_schema(schema, "structured_outputs")


def _by_schema(schema: object, key: str, **more: Any) -> tuple[FixedText | None, list[str]]:
    try:
        before, after = schema_text(schema)
    except UnmetSchemaError:
        return None, [key]
    return FixedText(before, after, bool(after), **more), []


def _check_options(asked: Body) -> None:
    """Refuse options that contradict each other."""
    if asked.cache_salt == "":
        why = "Parameter 'cache_salt' must be a non-empty string if provided."
        raise BadRequestError(why, parameter="cache_salt")
    if asked.stream_options is not None and not asked.stream:
        why = "Stream options can only be defined when `stream=True`."
        raise BadRequestError(why, parameter="stream_options")
    if isinstance(asked, CompletionBody) and asked.suffix is not None:
        why = "suffix is only supported for models with FIM completion rendering"
        raise BadRequestError(why, param="suffix")
    form = asked.response_format
    if form is not None and form.type == "json_schema" and form.json_schema is None:
        why = "When response_format type is 'json_schema', the 'json_schema' field must be "
        raise BadRequestError(why + "provided.", parameter="response_format")
    if isinstance(asked, ChatBody) and asked.top_logprobs and not asked.logprobs:
        why = "when using `top_logprobs`, `logprobs` must be set to true."
        raise BadRequestError(why, parameter="top_logprobs")
    if "" in asked.stops:
        raise BadRequestError("stop cannot contain an empty string.")
    choice = asked.tool_choice if isinstance(asked, ChatBody) else None
    if choice in (None, "none") or not isinstance(asked, ChatBody):
        return
    if asked.tools is None:
        why = "When using `tool_choice`, `tools` must be set."
        raise BadRequestError(why, parameter="tool_choice")
    names = [tool.function.name for tool in asked.tools]
    if isinstance(choice, Tool) and choice.function.name not in names:
        why = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise BadRequestError(why, parameter="tool_choice")


def output_tokens(more: Mapping[str, Any], key: str) -> int | None:
    """Read a number of output tokens, which may come as text; None: there is none."""
    value = more.get(key)
    if value is None:
        return None
    if re.fullmatch("[0-9]{1,10}", str(value)) and 0 < int(str(value)) <= MOST_TOKENS:
        return int(str(value))
    raise BadRequestError(f"{key}: {str(value)[:40]!r} is no number of tokens", param=key)


def client_name(name: object, key: str = "user") -> str:
    """Return who asks, by a name that a trace can hold, too, from `key`; raise BadRequestError."""
    if not isinstance(name, str) or len(name) > LONGEST_NAME or name_problem(name):
        why = f"{key}: not a name of at most {LONGEST_NAME} characters"
        raise BadRequestError(why, param=key)
    return name


def _check_sampling(asked: Body, limit: int) -> None:
    """Refuse what vLLM's SamplingParams refuse (`_verify_args`), of which most is not simulated."""
    n, least, penalty = asked.n, asked.min_tokens, asked.repetition_penalty
    greedy, cold = asked.temperature == 0, (asked.temperature or 0) < 0
    endless = penalty is not None and not penalty < inf
    # The key, its value, the least and the most that it may be, in words, and whether it is named.
    rules: list[tuple[str, float | None, float, float, str, bool]] = [
        ("n", n, 1, inf, "at least 1", False),
        ("n", n, 1, 1 if greedy else inf, "1 when using greedy sampling", False),
        ("presence_penalty", asked.presence_penalty, -2, 2, "in [-2, 2]", False),
        ("frequency_penalty", asked.frequency_penalty, -2, 2, "in [-2, 2]", False),
        ("repetition_penalty", penalty, TINY, MOST, FINITE if endless else POSITIVE, False),
        ("temperature", asked.temperature, 0, 2, "non-negative" if cold else "in [0, 2]", True),
        ("top_p", asked.top_p, TINY, 1, "in (0, 1]", True),
        ("top_k", asked.top_k, -1, inf, "0 (disable), or at least 1", False),
        ("min_p", asked.min_p, 0, 1, "in [0, 1]", False),
        ("max_tokens", limit, 1, inf, "at least 1", True),
        ("min_tokens", least, 0, inf, "greater than or equal to 0", False),
        ("min_tokens", least, 0, limit, f"less than or equal to max_tokens={limit}", False),
        ("stream_interval", asked.stream_interval, 1, inf, "at least 1", True),
    ]
    for key, value, low, high, words, named in rules:
        if value is not None and not low <= value <= high:
            why = f"{key} must be {words}, got {value}."
            raise BadRequestError(why, **{"parameter": key, "value": value} if named else {})  # type: ignore[arg-type]
    told = asked.top_logprobs if isinstance(asked, ChatBody) else _logprobs(asked)
    for name, count in (("logprobs", told), ("prompt_logprobs", asked.prompt_logprobs)):
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


def _prompts(prompt: Any, counter: TokenCounter, vocab_size: int) -> list[Prompt]:
    if prompt is None or prompt == "":
        why = "Either prompt or prompt_embeds must be provided and non-empty."
        raise BadRequestError(why, parameter="prompt")
    if prompt == []:
        raise BadRequestError("You must pass at least one prompt")
    if isinstance(prompt, str):
        if not (tokens := counter.encode(prompt)):
            raise BadRequestError("prompt: no tokens", param="prompt")
        return [Prompt(tokens, prompt)]
    if not isinstance(prompt[0], int):
        return [one for part in prompt for one in _prompts(part, counter, vocab_size)]
    if (most := max(prompt)) >= vocab_size:
        raise BadRequestError(f"Token id {str(most)[:40]} is out of vocabulary")
    return [Prompt(prompt)]


def compact(value: object) -> bytes:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()
