"""OpenAI's words for requests, as vLLM's server has them (0.33)."""

import json
import re
from collections.abc import Mapping, Sequence
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
    refuse,
)
from headway.twin.api.chat_prompt import chat_prompt
from headway.twin.api.guided_text import guided_text
from headway.twin.api.prompts import MediaLaws, Prompt
from headway.twin.api.said import FixedText
from headway.twin.api.tables import table
from headway.twin.api.tokenizers import TokenCounter
from simulator.core.request import Item
from simulator.workload.traces.format import name_problem

DEFAULT_MAX_TOKENS = 16  # of a completion, in OpenAI's API; a chat may fill the context
MOST_TOKENS = 2**31 - 1
LONGEST_NAME = 256  # of a client
MOST_PRIORITY = 10**9 - 1  # what a trace can tell
RANGES: list[dict[str, Any]] = table("ranges")
"""What vLLM says of a sampling parameter beyond its range, or at 0 and below it."""
SALT = r"[^@/\\\0]{0,128}"  # what a cache_salt can be
MOST_LOGPROBS = 20  # the default of vLLM's --max-logprobs
LOGPROBS = {"logprobs": "sample", "top_logprobs": "sample", "prompt_logprobs": "prompt"}
USUAL: dict[str, Any] = table("unsimulated")
"""Keys that would change vLLM's answer, and are ignored here, with a note: each with the value by
which nothing changes.
"""


ANY = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
"""A schema of what any JSON object is allowed to be."""


def error_body(error: BadRequestError) -> bytes:
    """Return an error as vLLM words it."""
    told = {"message": str(error), "type": error.kind, "param": error.param, "code": error.status}
    return compact({"error": told})


class Wanted:
    """What a body asks for, with its defaults settled."""

    def __init__(
        self, asked: Body, prompts: Sequence[Prompt], max_tokens: int, counter: TokenCounter
    ) -> None:
        """Read what is asked beside the prompts; raise BadRequestError where it cannot be."""
        options, more = asked.stream_options or StreamOptions(), asked.vllm_xargs or {}
        self.asked, self.prompts, self.max_tokens = asked, prompts, max_tokens
        self.tokens = prompts[0].tokens
        self.fixed, self.notes = _guided(asked)  # what the answer must be; what is not simulated
        self.notes += [*_ignored(asked, counter), *prompts[0].unseen]
        self.logprobs = _logprobs(asked)  # the likeliest texts that are told of each token
        self.encode = counter.encode if asked.return_token_ids else None
        self.usage = bool(options.include_usage)  # in a chunk of its own at the end
        self.continuous_usage = self.usage and bool(options.continuous_usage_stats)  # in each, too
        self.client = client_name(asked.user or more.get("client") or "")
        self.priority = max(-MOST_PRIORITY, min(asked.priority, MOST_PRIORITY))
        self.hint = output_tokens(more, "predicted_output_tokens")
        self.length = output_tokens(more, "output_tokens")  # None: as the workload says
        self.request_id = asked.request_id or ""  # "": a serial number
        # No tokenizer or template says what the model would see, or images count by a law.
        is_chat, is_text = isinstance(asked, ChatBody), prompts[0].text is not None
        words = type(counter) is TokenCounter and (is_chat or is_text)
        by_law = is_chat and (counter.template is None or bool(prompts[0].items))
        self.estimated = words or by_law


@dataclass(frozen=True, slots=True)
class Reader:
    """Understands bodies for a model."""

    models: Sequence[str]  # names of one
    counter: TokenCounter
    max_model_len: int
    vocab_size: int = MOST_TOKENS
    laws: MediaLaws | None = None  # of images and clips in a chat; None: they count nothing
    parses_tools: bool = True

    def read(self, asked: Body) -> Wanted:
        """Say what a body asks for; raise BadRequestError where it cannot be."""
        self.check_model(asked.model)
        limit = self._limit(asked)
        _check_options(asked)
        if isinstance(asked, ChatBody):
            prompts = [chat_prompt(asked, self.counter, self.laws)]
        else:
            assert isinstance(asked, CompletionBody)
            prompts = _prompts(asked.prompt, self.counter, self.vocab_size)
            if asked.echo:
                prompts = [self._echoed(prompt) for prompt in prompts]
        if asked.truncate_prompt_tokens is not None:
            prompts = [self._truncated(prompt, asked) for prompt in prompts]
        longest = max(len(prompt.tokens) for prompt in prompts)
        most = self.max_model_len
        refuse({"context": longest > most}, most=most, value=longest)
        room = most - longest
        limit = room if limit is None else min(limit, room)  # without a word, as vLLM
        if isinstance(asked, CompletionBody) and asked.echo and asked.max_tokens == 0:
            limit = min(1, room)  # it computes the prompt, and a token that is not told
        _check_sampling(asked, limit, self.vocab_size)
        self._check_tools(asked)
        return Wanted(asked, prompts, limit, self.counter)

    def check_model(self, name: str | None) -> None:
        """Raise BadRequestError for the name of another model."""
        wrong = name and name not in self.models
        refuse({"model": wrong}, model=name, known=", ".join(self.models))

    def _check_tools(self, chat: Body) -> None:
        """Refuse tools as a vLLM without --enable-auto-tool-choice and --tool-call-parser.

        It takes those of a response in any case.
        """
        if self.parses_tools or type(chat) is not ChatBody:
            return
        choice: Any = chat.tool_choice
        if "tool_choice" not in chat.model_fields_set:
            choice = "auto" if chat.tools else None
        refuse({"auto tools": choice == "auto"})
        if choice not in (None, "none"):
            name = '"required"' if choice == "required" else f'function "{choice.function.name}"'
            raise BadRequestError.of("tool parser", choice=name)

    def _truncated(self, prompt: Prompt, asked: Body) -> Prompt:
        """Keep a part of a prompt: its last tokens, unless those of the other side are asked for.

        An image or a clip of which a part is cut off counts as text from there on.
        """
        keep, most, size = asked.truncate_prompt_tokens, self.max_model_len, len(prompt.tokens)
        assert keep is not None
        refuse({"truncate": keep > most}, value=keep, most=most)
        keep = min(most - 1 if keep < 0 else keep, size)
        first = 0 if asked.truncation_side == "right" else size - keep
        inside = [one for one in prompt.items if first <= one.start and one.end <= first + keep]
        items = [Item(one.media, one.start - first, one.end - first) for one in inside]
        refuse({"empty prompt": not keep})
        kept = slice(first, first + keep)
        return Prompt(prompt.tokens[kept], None, prompt.echo[kept], items, prompt.unseen)

    def _echoed(self, prompt: Prompt) -> Prompt:
        counter = self.counter
        told = prompt.tokens if prompt.text is None else prompt.text
        wrong = prompt.text is None and counter.decode(prompt.tokens) is None
        refuse({"tokenizer": wrong}, key="echo: tokens need")
        return prompt._replace(echo=counter.pieces(told))

    def _limit(self, asked: Body) -> int | None:
        """Return the most tokens of an answer that are asked for; refuse what no prompt allows."""
        names = ("max_output_tokens", "max_completion_tokens")  # a response's, a chat's
        given = asked.__dict__
        key = next((one for one in names if given.get(one) is not None), "max_tokens")
        limit: int | None = given[key]
        if limit is None and isinstance(asked, CompletionBody):
            limit = DEFAULT_MAX_TOKENS
        most = self.max_model_len
        refuse({"max_tokens": (limit or 0) > most}, key=key, value=limit, most=most)
        return limit


def _ignored(asked: Body, counter: TokenCounter) -> list[str]:
    """Name the keys of a body that would change a vLLM's answer."""
    more = {"chat_template_kwargs": counter.template is None, "echo": isinstance(asked, ChatBody)}
    ignored = USUAL | {name: False for name, is_so in more.items() if is_so}
    given = {**asked.__dict__, **(asked.model_extra or {})}  # getattr of what is not is slow
    none: tuple[object, ...] = (None, [], {}, "")
    return [name for name, usual in ignored.items() if given.get(name) not in (usual, *none)]


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
                schema: Any = tool.parameters or {"type": "object"}
                hidden = around if name is None else ("", "")
                return _made("json_schema", schema, "tool_choice", call=tool.name, hidden=hidden)
    form, own = asked.response_format, asked.structured_outputs
    if form is not None and form.type != "text":
        named = form.json_schema and form.json_schema.json_schema
        schemas = {"json_schema": named, "json_object": ANY}
        return _made("json_schema", schemas.get(form.type), "response_format")
    if own is None:
        return None, []
    if own.choice:
        return FixedText(own.choice[0]), []
    schema = ANY if own.json_object else own.json_schema
    sources = {"json_schema": schema, "regex": own.regex, "grammar": own.grammar}
    kind = next((one for one in sources if sources[one] is not None), "structural_tag")
    return _made(kind, sources.get(kind), "structured_outputs")


def _made(kind: str, source: Any, key: str, **more: Any) -> tuple[FixedText | None, list[str]]:
    """Return a text that a constraint allows; where none is found any JSON object is a call's."""
    if source is None:
        return None, [key]
    found, words = guided_text(kind, source if isinstance(source, str) else json.dumps(source))
    if found is None:
        return FixedText("{}", **more) if more else None, [key]
    return FixedText(*found, **more), [f"{key}.{word}" for word in words]


def _check_options(asked: Body) -> None:
    """Refuse options that contradict each other."""
    form, chat = asked.response_format, asked if isinstance(asked, ChatBody) else None
    by_schema, named = form and form.type == "json_schema", form and form.json_schema
    own, options = asked.structured_outputs, asked.stream_options
    constraints = {*own.model_dump(exclude_none=True)} if own else set()
    kinds = constraints | ({form.type} if form else set()) - {"text"}
    template = chat and {"chat_template": chat.chat_template, **(chat.chat_template_kwargs or {})}
    refuse(
        {
            "cache_salt": asked.cache_salt == "",
            "long cache_salt": not re.fullmatch(SALT, asked.cache_salt or ""),
            "stream_options": options and options.model_fields_set and not asked.stream,
            "no tools": type(asked) is ChatBody and asked.tools == [],  # a response may have others
            "prompt_embeds": asked.__dict__.get("prompt_embeds"),  # a completion's
            "suffix": isinstance(asked, CompletionBody) and asked.suffix is not None,
            "json_schema": by_schema and named is None,
            "no constraint": (by_schema and named and named.json_schema is None)
            or (own and not constraints),
            "constraints": len({"json_schema", "regex", "choice"} & constraints) > 1,
            "several constraints": len(kinds) > 1,
            "choice": own and own.choice == [],
            "json_object": own and own.json_object is False,
            "chat template": template and template["chat_template"] is not None,
            "both ends": chat
            and "add_generation_prompt" in chat.model_fields_set
            and (chat.add_generation_prompt and chat.continue_final_message),
            "streamed prompt_logprobs": asked.stream and asked.prompt_logprobs,
            "top_logprobs": chat and chat.top_logprobs and not chat.logprobs,
            "stop": "" in asked.stops,
        },
        kinds=", ".join(sorted(kinds)),
    )
    if chat is not None and (choice := chat.tool_choice) not in (None, "none"):
        names = [tool.function.name for tool in chat.tools or ()]
        unknown = isinstance(choice, Tool) and choice.function.name not in names
        refuse({"tools": chat.tools is None, "tool_choice": unknown})


def output_tokens(more: Mapping[str, Any], key: str) -> int | None:
    """Read a number of output tokens, which may come as text; None: there is none."""
    value = more.get(key)
    if value is None:
        return None
    if re.fullmatch("[0-9]{1,10}", str(value)) and 0 < int(str(value)) <= MOST_TOKENS:
        return int(str(value))
    raise BadRequestError.of("output tokens", key=key, got=str(value)[:40])


def client_name(name: object, key: str = "user") -> str:
    """Return who asks, by a name that a trace can hold, too, from `key`; raise BadRequestError."""
    fits = isinstance(name, str) and len(name) <= LONGEST_NAME and not name_problem(name)
    refuse({"client": not fits}, key=key, most=LONGEST_NAME)
    return str(name)


def _check_sampling(asked: Body, limit: int, vocab_size: int) -> None:
    """Refuse what vLLM's SamplingParams refuse (`_verify_args`), of which most is not simulated."""
    given: dict[str, Any] = {**asked.__dict__, "max_tokens": limit}
    for row in RANGES:
        key, value = row["key"], given[row["key"]]
        if value is not None and not row["least"] <= value <= row.get("most", inf):
            words = row.get("below", row["words"]) if value <= 0 else row["words"]
            named = "named" in row
            refuse({"range, named": named, "range": True}, key=key, words=words, value=value)
    n, least = asked.n or 1, asked.min_tokens
    refuse({"n of greedy sampling": n > 1 and asked.temperature == 0}, n=n)
    refuse({"min_tokens": least > limit}, least=least, most=limit)
    for key, kind in LOGPROBS.items():
        count = given.get(key)
        if count is None or isinstance(count, bool):
            continue
        refuse({"logprobs": count < -1}, key=key, value=count)
        value, name = vocab_size if count == -1 else count, key.removeprefix("top_")
        told = {"key": name, "kind": kind, "value": value, "most": MOST_LOGPROBS}
        refuse({"many logprobs": value > MOST_LOGPROBS}, **told)
    more = asked.model_extra or {}
    words, allowed = more.get("bad_words", ()), more.get("allowed_token_ids")
    refuse({"bad_words": "" in words, "allowed_token_ids": allowed == []}, value=words)
    for key in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        beyond = [one for one in map(int, more.get(key) or ()) if not 0 <= one < vocab_size]
        allows = beyond and key == "allowed_token_ids"
        told = {"key": key, "value": beyond, "most": vocab_size}
        refuse({"tokens beyond, allowed": allows, "tokens beyond": beyond}, **told)


def _prompts(prompt: Any, counter: TokenCounter, vocab_size: int) -> list[Prompt]:
    refuse({"prompt": prompt is None or prompt == "", "prompts": prompt == []})
    if isinstance(prompt, str):
        tokens = counter.encode(prompt)
        refuse({"no tokens": not tokens})
        return [Prompt(tokens, prompt)]
    if not isinstance(prompt[0], int):
        return [one for part in prompt for one in _prompts(part, counter, vocab_size)]
    refuse({"vocabulary": max(prompt) >= vocab_size}, token=str(max(prompt))[:40])
    return [Prompt(prompt)]


def compact(value: object) -> bytes:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()
