"""Answers to completions and chats, whole or token by token, as vLLM's server has them (0.33)."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from headway.twin.api.bodies import BadRequestError
from headway.twin.api.openai import MOST_TOKENS, Wanted, compact, error_body
from headway.twin.api.prompts import Prompt
from headway.twin.api.said import Said
from headway.twin.api.tables import table
from headway.twin.live_engine import Stream
from simulator.core.request import Request

SHAPES: dict[str, Any] = table("shapes")
"""What vLLM's answers have beside what is computed, by their kind and part."""


@dataclass(slots=True)
class Choice:
    """One answer of those to a request, which may ask for several."""

    index: int
    prompt: Prompt
    said: Said
    length: int  # tokens after which it ends by itself
    last: int  # tokens after which it ends at the latest
    over: "asyncio.Future[str]" = field(init=False)  # why it has ended
    stream: Stream | None = None  # once the engine has it
    request: Request | None = None  # once it has ended
    told: int = 0  # characters
    frame: Sequence[bytes] = ()  # what is before and behind the word in the chunk of a token

    @property
    def reason(self) -> str:
        """Return why it ends."""
        return "stop" if self.length <= self.last else "length"

    @property
    def generated(self) -> int:
        """Return its tokens."""
        return 0 if self.request is None else self.request.generated

    @property
    def text(self) -> str:
        """Return all that it says."""
        return self.said.text(0, self.generated)


class Answer:
    """What goes back to a client that asked for a completion: chunks of a stream, or all at once.

    Answers of other kinds differ in what the class says, and in the methods that they have, too.
    """

    kind, prefix, key = "text_completion", "cmpl-", "text"

    def __init__(self, wanted: Wanted, model: str, serial: int, choices: Sequence[Choice]) -> None:
        """Begin an answer."""
        self.wanted, self.choices = wanted, choices
        self.fingerprint: dict[str, str] = {}
        self.due = 0.0  # simulated s, when the engine should have got the request
        self.cached_block = MOST_TOKENS  # tokens of a prefix cache's blocks, if there is one
        self.shape: Mapping[str, Any] = SHAPES[self.kind]
        number = wanted.request_id or f"{serial:012x}"
        kind = self.kind + ".chunk" * (bool(wanted.asked.stream) and self.key == "delta")
        self.head: dict[str, Any] = {"id": self.prefix + number, "object": kind}
        self.head |= {"created": int(time.time()), "model": model}
        plain = wanted.logprobs is None and wanted.encode is None
        self._is_open = False
        self.ended = defaultdict[int, list[int]](list)  # tokens, by prompt
        self._is_plain = plain and not wanted.continuous_usage

    def start(self) -> bytes:
        """Return what comes before all tokens, at once."""
        return b""

    def open(self, choice: Choice) -> bytes:
        """Return what comes before a choice's first token."""
        return b""

    def part(self, choice: Choice, first: int, last: int) -> Any:
        """Return what a chunk has of a choice's tokens from `first` up to `last`; None: nothing."""
        echo = "" if first else "".join(choice.prompt.echo)
        return echo + choice.said.text(first, last)

    def piece(self, choice: Choice, first: int, count: int, reason: str | None) -> bytes:
        """Return the chunk of some tokens; of the last, with the `reason`."""
        delta = self.part(choice, first, count)
        if delta is None and reason is None:
            return b""
        return self._chunk(choice, {} if delta is None else delta, reason, count, first)

    def _chunk(
        self, choice: Choice, delta: Any, reason: str | None, count: int, first: int = 0
    ) -> bytes:
        part = self._told(choice, {self.key: delta}, reason, count, first)
        chunk = self.head | {"choices": [self.shape["chunk"] | part]}
        if self.wanted.continuous_usage:
            chunk["usage"] = self._usage([choice], count)
        if reason is not None and not self.wanted.usage:
            chunk |= self.fingerprint  # of the last chunk
        return b"data: " + compact(chunk) + b"\n\n"

    def _told(self, choice: Choice, said: Any, reason: str | None, count: int, first: int) -> Any:
        """Return what an answer or a chunk has of a choice's tokens, with what is `said`."""
        found = {"index": choice.index, **said, "finish_reason": reason}
        found["logprobs"] = self._logprobs(choice, first, count)
        if reason is not None:
            found["stop_reason"] = choice.said.stop
        return found | self.ids(choice, first, count)

    def chunk(self, choice: Choice, new: int, count: int) -> bytes:
        """Return the chunk of `new` tokens, `count` in all.

        That of the last token says why it is the last, as vLLM's does: N chunks for N tokens.
        """
        first, is_last = count - new, count >= choice.last
        out = b""
        if not self._is_open:  # as vLLM, which begins all choices at once
            out, self._is_open = b"".join(map(self.open, self.choices)), True
        return out + self.piece(choice, first, count, self.reason(choice) if is_last else None)

    def framed(self, choice: Choice, new: int, count: int) -> bytes:
        """Return that chunk as one of HTTP's; of one word, from parts that are written once."""
        said, is_inner = choice.said, new == 1 and 1 < count < choice.last
        if is_inner and self._is_plain and said.pieces is None:
            word = said.words[(said.offset + count - 1) % len(said.words)].encode()
            # A request's id may have the word, too; behind the text there is no space.
            if not choice.frame:
                choice.frame = self.piece(choice, count - 1, count, None).rsplit(word, 1)
            data = word.join(choice.frame)
        else:
            data = self.chunk(choice, new, count)
        return b"%x\r\n%b\r\n" % (len(data), data) if data else b""

    def reason(self, choice: Choice) -> str:
        """Return why a choice ends, in the client's words."""
        return choice.reason

    def end(self) -> bytes:
        """Return what comes after the last token."""
        out = b""
        if self.wanted.usage:
            usage = self._usage(self.choices) | {"prompt_tokens_details": self._details()}
            end = self.head | {"choices": [], "usage": usage} | self.fingerprint
            out = b"data: " + compact(end) + b"\n\n"
        return out + b"data: [DONE]\n\n"

    def error_chunk(self, error: BadRequestError) -> bytes:
        """Return what ends a stream that has begun and cannot go on."""
        return b"data: " + error_body(error) + b"\n\ndata: [DONE]\n\n"

    def message(self, choice: Choice) -> dict[str, Any]:
        """Return what the whole answer has of a choice."""
        return {"text": self.part(choice, 0, choice.generated)}

    def whole(self) -> bytes:
        """Return the whole answer at once."""
        choices = []
        for one in self.choices:
            part = self._told(one, self.message(one), self.reason(one), one.generated, 0)
            choices.append(self.shape["choice"] | part)
        usage = self._usage(self.choices) | {"completion_tokens_details": None}
        usage["prompt_tokens_details"] = SHAPES["prompt tokens"] | self._details()
        found = self.head | {"choices": choices, "usage": usage}
        found |= self.fingerprint | self.shape["answer"]
        return compact(found | (self.prompt_ids(self.choices[0]) if self.key == "delta" else {}))

    def ids(self, choice: Choice, first: int, last: int) -> dict[str, Any]:
        """Return the tokens of a piece, if they are asked for; with a prompt's where they begin."""
        if (encode := self.wanted.encode) is None:
            return {}
        texts = choice.said.tokens(first, last)
        found = {} if first or self.key == "delta" else self.prompt_ids(choice)
        return found | {"token_ids": [token for text in texts for token in encode(text)]}

    def prompt_ids(self, choice: Choice) -> dict[str, Any]:
        """Return the tokens of a prompt, if they are asked for."""
        return {"prompt_token_ids": [*choice.prompt.tokens]} if self.wanted.encode else {}

    def _usage(self, choices: Sequence[Choice], count: int | None = None) -> dict[str, Any]:
        """Count tokens, each prompt once."""
        asked, more = len(choices[0].prompt.tokens), self.shape["chunk usage"]
        if count is None:
            count, more = sum(choice.generated for choice in choices), {}
            asked = sum(len(prompt.tokens) for prompt in self.wanted.prompts)
        found = {"prompt_tokens": asked, "total_tokens": asked + count, "completion_tokens": count}
        return {**found, **more}

    def _details(self) -> dict[str, Any]:
        request = self.choices[0].request
        return {"cached_tokens": 0 if request is None else request.cached}

    def _logprobs(self, choice: Choice, first: int, last: int) -> Any:
        most, said = self.wanted.logprobs, choice.said
        if most is None or first == last:
            return None
        echo = [] if first else [*choice.prompt.echo]
        tokens = said.tokens(first, last)
        tops: list[Any] = [said.likeliest(one, k, max(most, 1)) for k, one in enumerate(echo)]
        tops += [said.logprobs(one, first + k, max(most, 1)) for k, one in enumerate(tokens)]
        tokens = echo + tokens
        values: list[float | None] = [top[one] for top, one in zip(tops, tokens, strict=True)]
        if echo:
            values[0] = tops[0] = None  # nothing is before it
        offsets = [*accumulate(map(len, tokens), initial=choice.told)]
        choice.told = offsets.pop()
        found = {"text_offset": offsets, "token_logprobs": values, "tokens": tokens}
        return found | {"top_logprobs": tops}


class ChatAnswer(Answer):
    """What goes back to a client that asked for a chat."""

    kind, prefix, key = "chat.completion", "chatcmpl-", "delta"

    def open(self, choice: Choice) -> bytes:
        """Return the chunk that says whose words follow."""
        part = {"index": choice.index, "delta": {"role": "assistant", "content": ""}}
        chunk = self.head | {"choices": [part | SHAPES["opening"]]} | SHAPES["opening chunk"]
        chunk |= self.prompt_ids(choice)
        if self.wanted.continuous_usage:
            chunk["usage"] = self._usage([choice], 0)
        return b"data: " + compact(chunk) + b"\n\n"

    def part(self, choice: Choice, first: int, last: int) -> Any:
        """Return a piece of the text, or of the call; None: of neither."""
        text = choice.said.text(first, last)
        if not choice.said.call:
            return {"content": text}
        if not text:
            return None
        if choice.said.text(0, first):
            return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        return {"tool_calls": [{**self._call(choice, text), "index": 0}]}

    def _call(self, choice: Choice, text: str) -> dict[str, Any]:
        function = {"name": choice.said.call, "arguments": text}
        return {"id": self.call_id(choice), "type": "function", "function": function}

    def call_id(self, choice: Choice) -> str:
        """Return the name by which the result of a call is given back."""
        return f"chatcmpl-tool-{self.head['id'].removeprefix(self.prefix)}-{choice.index}"

    def reason(self, choice: Choice) -> str:
        """Return why a choice ends: a call that the model chose is a reason of its own."""
        fixed = self.wanted.fixed
        chose = fixed is not None and fixed.call and fixed.hidden[0] and choice.reason == "stop"
        return "tool_calls" if chose else choice.reason

    def message(self, choice: Choice) -> dict[str, Any]:
        """Return the whole text, or the call."""
        message = SHAPES["message"] | {"content": choice.text}
        if choice.said.call:
            message |= {"content": "", "tool_calls": [self._call(choice, choice.text)]}
        return {"message": message}

    def _details(self) -> dict[str, Any]:
        """Count the whole blocks that the cache had not, and tokens of images and clips, too."""
        prompt, found = self.wanted.prompts[0], super()._details()
        asked = len(prompt.tokens)
        whole = asked - asked % self.cached_block
        found["created_cache_tokens"] = max(whole - found["cached_tokens"], 0)
        media: Counter[str] = Counter()
        for item in prompt.items:
            media[item.media.modality] += item.end - item.start
        return found | ({"multimodal_tokens": media} if media else {})

    def _logprobs(self, choice: Choice, first: int, last: int) -> Any:
        found = super()._logprobs(choice, first, last)
        if found is None:
            return None
        content = []
        for own, value, top in zip(*[*found.values()][1:], strict=True):
            more = [logprob(*one) for one in top.items()] if self.wanted.logprobs else []
            content.append(logprob(value, own) | {"top_logprobs": more})
        return {"content": content}


def event(kind: str, **data: Any) -> bytes:
    """Return an event of a stream whose events have names."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), compact({"type": kind, **data}))


def logprob(token: str, value: float) -> dict[str, Any]:
    """Return how likely a text was, as chats tell it."""
    return {"token": token, "logprob": value, "bytes": [*token.encode()]}
