"""What servers are asked, right and wrong, and the forms of what they answer."""

import json
import re
import urllib.request
from collections.abc import Collection
from itertools import groupby
from typing import Any
from urllib.error import HTTPError

COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGE = "/v1/messages"
PROMPT = [7, 8, 9, 10]
SAID = [{"role": "user", "content": "abc abd abe"}]
LOGPROBS = ["message.output_text.logprobs"]
USAGE = {"include_usage": True}
COUNTED = {"include_usage": True, "continuous_usage_stats": True}
RIGHT: dict[str, tuple[str, dict[str, Any] | None]] = {
    "completion": (COMPLETION, {"prompt": PROMPT}),
    "completion of a text": (COMPLETION, {"prompt": "abc abd abe"}),
    "completion, stream": (COMPLETION, {"prompt": PROMPT, "stream": True}),
    "completion, stream, usage": (
        COMPLETION,
        {"prompt": PROMPT, "stream": True, "stream_options": USAGE},
    ),
    "completion, stream, usage in each chunk": (
        COMPLETION,
        {"prompt": PROMPT, "stream": True, "stream_options": COUNTED},
    ),
    "chat": (CHAT, {"messages": SAID}),
    "chat, stream": (CHAT, {"messages": SAID, "stream": True}),
    "chat, stream, usage": (CHAT, {"messages": SAID, "stream": True, "stream_options": USAGE}),
    "chat, stream, usage in each chunk": (
        CHAT,
        {"messages": SAID, "stream": True, "stream_options": COUNTED},
    ),
    "response": (RESPONSE, {"input": "abc abd abe"}),
    "response, stream": (RESPONSE, {"input": SAID, "stream": True}),
    "response, logprobs": (RESPONSE, {"input": SAID, "include": LOGPROBS, "top_logprobs": 2}),
    "response, stream, logprobs": (
        RESPONSE,
        {"input": SAID, "stream": True, "include": LOGPROBS, "top_logprobs": 2},
    ),
    "response of several turns": (
        RESPONSE,
        {"instructions": "abc", "input": [*SAID, {"role": "assistant", "content": "abd"}, *SAID]},
    ),
    "message": (MESSAGE, {"messages": SAID}),
    "message, stream": (MESSAGE, {"messages": SAID, "stream": True}),
    "tokens of a message": (f"{MESSAGE}/count_tokens", {"messages": SAID}),
    "models": ("/v1/models", None),
    "version": ("/version", None),
    "tokenize": ("/tokenize", {"prompt": "abc abd abe"}),
    "tokenize to texts": ("/tokenize", {"prompt": "abc abd abe", "return_token_strs": True}),
    "detokenize": ("/detokenize", {"tokens": PROMPT}),
    "load": ("/load", None),
    "health": ("/health", None),
    "ping": ("/ping", None),
}
"""By name: an address and a body, to which `ask` adds what all have; None: a GET."""
LONG = [7] * 3000
WRONG: dict[str, tuple[str, Any]] = {
    "unknown model": (COMPLETION, {"prompt": PROMPT, "model": "other"}),
    "unknown model of a chat": (CHAT, {"messages": SAID, "model": "other"}),
    "prompt beyond the context": (COMPLETION, {"prompt": LONG}),
    "text beyond the context": (COMPLETION, {"prompt": "abc " * 3000}),
    "chat beyond the context": (CHAT, {"messages": [{"role": "user", "content": "abc " * 3000}]}),
    "max_tokens beyond the context": (COMPLETION, {"prompt": PROMPT, "max_tokens": 5000}),
    "max_tokens of a chat beyond the context": (CHAT, {"messages": SAID, "max_tokens": 5000}),
    "max_tokens negative": (COMPLETION, {"prompt": PROMPT, "max_tokens": -1}),
    "max_tokens zero": (COMPLETION, {"prompt": PROMPT, "max_tokens": 0}),
    "max_tokens a word": (COMPLETION, {"prompt": PROMPT, "max_tokens": "many"}),
    "max_tokens a fraction": (COMPLETION, {"prompt": PROMPT, "max_tokens": 2.5}),
    "min_tokens above max_tokens": (COMPLETION, {"prompt": PROMPT, "min_tokens": 99}),
    "min_tokens negative": (COMPLETION, {"prompt": PROMPT, "min_tokens": -1}),
    "temperature negative": (COMPLETION, {"prompt": PROMPT, "temperature": -1}),
    "temperature a word": (COMPLETION, {"prompt": PROMPT, "temperature": "hot"}),
    "temperature of 3": (COMPLETION, {"prompt": PROMPT, "temperature": 3}),
    "top_p of 2": (COMPLETION, {"prompt": PROMPT, "top_p": 2}),
    "top_k of -5": (COMPLETION, {"prompt": PROMPT, "top_k": -5}),
    "presence_penalty of 9": (COMPLETION, {"prompt": PROMPT, "presence_penalty": 9}),
    "n of 0": (COMPLETION, {"prompt": PROMPT, "n": 0}),
    "logprobs of 100": (COMPLETION, {"prompt": PROMPT, "logprobs": 100}),
    "no prompt": (COMPLETION, {}),
    "prompt empty": (COMPLETION, {"prompt": ""}),
    "prompt an empty list": (COMPLETION, {"prompt": []}),
    "prompt an object": (COMPLETION, {"prompt": {"text": "abc"}}),
    "prompt a number": (COMPLETION, {"prompt": 7}),
    "token beyond the vocabulary": (COMPLETION, {"prompt": [7, 999_999]}),
    "token negative": (COMPLETION, {"prompt": [7, -3]}),
    "stream a word": (COMPLETION, {"prompt": PROMPT, "stream": "maybe"}),
    "stream_options without stream": (COMPLETION, {"prompt": PROMPT, "stream_options": USAGE}),
    "stream_options a list": (COMPLETION, {"prompt": PROMPT, "stream": True, "stream_options": []}),
    "priority a word": (COMPLETION, {"prompt": PROMPT, "priority": "high"}),
    "cache_salt empty": (COMPLETION, {"prompt": PROMPT, "cache_salt": ""}),
    "no messages": (CHAT, {}),
    "messages empty": (CHAT, {"messages": []}),
    "messages a text": (CHAT, {"messages": "abc"}),
    "message without a role": (CHAT, {"messages": [{"content": "abc"}]}),
    "content a number": (CHAT, {"messages": [{"role": "user", "content": 7}]}),
    "top_logprobs without logprobs": (CHAT, {"messages": SAID, "top_logprobs": 3}),
    "no input": (RESPONSE, {}),
    "input a number": (RESPONSE, {"input": 7}),
    "input empty": (RESPONSE, {"input": ""}),
    "input an empty list": (RESPONSE, {"input": []}),
    "unknown model of a response": (RESPONSE, {"input": "abc", "model": "other"}),
    "max_output_tokens beyond the context": (
        RESPONSE,
        {"input": "abc", "max_output_tokens": 5000},
    ),
    "max_output_tokens zero": (RESPONSE, {"input": "abc", "max_output_tokens": 0}),
    "max_output_tokens a word": (RESPONSE, {"input": "abc", "max_output_tokens": "many"}),
    "unknown response": (RESPONSE, {"input": "abc", "previous_response_id": "other"}),
    "GET of an unknown response": (f"{RESPONSE}/other", None),
    "background without store": (
        RESPONSE,
        {"input": "abc", "background": True, "store": False},
    ),
    "tool_choice of a response without tools": (
        RESPONSE,
        {"input": "abc", "tool_choice": "required"},
    ),
    "temperature of a response": (RESPONSE, {"input": "abc", "temperature": 3}),
    "cache_salt of a response": (RESPONSE, {"input": "abc", "cache_salt": ""}),
    "prompt template": (RESPONSE, {"input": "abc", "prompt": {"id": "a"}}),
    "service_tier": (RESPONSE, {"input": "abc", "service_tier": "other"}),
    "embeddings": ("/v1/embeddings", {"input": "abc"}),
    "no JSON": (COMPLETION, b"{prompt"),
    "a list": (COMPLETION, [1, 2]),
    "not said to be JSON": (COMPLETION, "text/plain"),
    "unknown address": ("/v1/nothing", {"prompt": PROMPT}),
    "GET of a completion": (COMPLETION, None),
    "POST of the models": ("/v1/models", {}),
}
"""The same of wrong ones; bytes are sent as they stand, a text is a content type."""


def ask(url: str, model: str, where: str, what: Any) -> tuple[int, str, bytes]:
    """Ask a server; give status, content type and body."""
    kind = "application/json"
    if isinstance(what, str):
        kind, what = what, {"prompt": PROMPT}
    if isinstance(what, dict):
        own = {"model": model, "temperature": 0.0}
        if where in {COMPLETION, CHAT, MESSAGE}:
            own |= {"max_tokens": 12, "ignore_eos": True}
        elif where == RESPONSE:
            own |= {"max_output_tokens": 12, "ignore_eos": True}
        what = own | what
    data = what if what is None or isinstance(what, bytes) else json.dumps(what).encode()
    request = urllib.request.Request(url + where, data, {"Content-Type": kind} if data else {})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.headers.get_content_type(), answer.read()
    except HTTPError as error:
        return error.code, error.headers.get_content_type(), error.read()


def chunks(body: bytes) -> list[Any]:
    """Return the events of a stream, or the one object of an answer; none of an empty one."""
    if not body.startswith((b"data: ", b"event: ")):
        return [json.loads(body)] if body.strip() else []
    parts = re.findall(r"(?m)^data: (.*)$", body.decode())
    return ["[DONE]" if part == "[DONE]" else json.loads(part) for part in parts]


def shape(value: Any, without: Collection[str] = ()) -> Any:
    """Return what a value is made of: keys, but for some, and kinds; null stays null."""
    if isinstance(value, dict):
        return {key: shape(one, without) for key, one in value.items() if key not in without}
    if isinstance(value, list):
        return [shape(one, without) for one in value[:1]]
    return value if value is None or value == "[DONE]" else type(value).__name__


def without_repeats(shapes: list[Any]) -> list[Any]:
    """Return shapes, one of those that follow each other: a busy vLLM joins tokens in a chunk."""
    return [one for one, _ in groupby(shapes)]


def families(metrics: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Return the kind and the labels of each family of a page of /metrics."""
    kinds = dict(re.findall(r"(?m)^# TYPE (\S+) (\w+)$", metrics))
    labels: dict[str, set[str]] = {name: set() for name in kinds}
    for name, more in re.findall(r"(?m)^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+$", metrics):
        family = name if name in kinds else re.sub(r"_(bucket|sum|count|created|total)$", "", name)
        labels.setdefault(family, set()).update(re.findall(r'(\w+)="', more or ""))
    return {name: (kinds.get(name, ""), frozenset(found)) for name, found in labels.items()}


def described(document: dict[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Return, of an OpenAPI document, the fields of each address's body with the kinds of values.

    The addresses begin with the method, as in "POST /tokenize"; names in braces are left out.
    """
    schemas = document.get("components", {}).get("schemas", {})

    def resolved(schema: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the schemas of which one must be met."""
        if "$ref" in schema:
            return resolved(schemas[schema["$ref"].rpartition("/")[2]])
        parts = schema.get("anyOf") or schema.get("oneOf")
        return [one for part in parts for one in resolved(part)] if parts else [schema]

    def kinds(schema: dict[str, Any]) -> list[str]:
        found = {one.get("type", "string" if "const" in one else "any") for one in resolved(schema)}
        return sorted(found - {"null"})

    found = {}
    for path, methods in document["paths"].items():
        for method, said in methods.items():
            content = said.get("requestBody", {}).get("content", {})
            bodies = resolved(content.get("application/json", {}).get("schema", {}))
            fields = {k: kinds(v) for body in bodies for k, v in body.get("properties", {}).items()}
            found[f"{method.upper()} {re.sub('{.*?}', '{}', path)}"] = dict(sorted(fields.items()))
    return dict(sorted(found.items()))
