"""What a model sees of a chat: its messages, tool definitions and past tool calls as one prompt.

A tokenizer's chat template makes it, as in vLLM; without one it is estimated.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from headway.twin.api.bodies import BadRequestError, ChatBody
from headway.twin.api.chat_template import to_json
from headway.twin.api.tokenizers import TokenCounter

NO_LIMITS: Mapping[str, int] = {}
MEDIA_PARTS = {
    **dict.fromkeys(("image_url", "input_image", "image_pil", "image_embeds"), "image"),
    **dict.fromkeys(("audio_url", "input_audio", "audio_embeds"), "audio"),
    "video_url": "video",
    "file": "file",
}
"""Kinds of vLLM's parts of a message that are no text, with their modality: no token counts."""


def chat_tokens(
    chat: ChatBody, counter: TokenCounter, limits: Mapping[str, int] = NO_LIMITS
) -> tuple[Sequence[int], list[str]]:
    """Tokenize a chat; return the kinds of parts, as `image_url`, that count nothing, too.

    Raises BadRequestError for messages that are none, and for more images, clips or sounds than
    `limits` (vLLM's `limit_mm_per_prompt`) allows.
    """
    if not chat.messages:
        raise BadRequestError(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    ignored: Counter[str] = Counter()
    messages = [_read_message(message, ignored) for message in chat.messages]
    for modality, most in limits.items():
        if sum(n for kind, n in ignored.items() if MEDIA_PARTS[kind] == modality) > most:
            raise BadRequestError(f"At most {most} {modality}(s) may be provided in one prompt.")
    if counter.template is not None:
        tokens = counter.encode(counter.template.render(chat, messages))
    else:
        tokens = _estimated_tokens(chat, messages, counter)
    if not tokens:
        raise BadRequestError("The decoder prompt cannot be empty")
    return tokens, [*ignored]


def _estimated_tokens(
    chat: ChatBody, messages: Sequence[Mapping[str, Any]], counter: TokenCounter
) -> list[int]:
    """Count definitions and calls as JSON, without what a template has between messages.

    Each message by itself, so that what one turn has said is what the next repeats.
    """
    tokens: list[int] = []
    for tool in chat.tools or ():
        tokens += counter.encode(to_json(tool.model_dump(exclude_none=True)))
    for message in messages:
        tokens += counter.encode(message["content"])
        for call in message.get("tool_calls") or ():
            tokens += counter.encode(to_json(call))
    return tokens


def _read_message(message: object, ignored: Counter[str]) -> dict[str, Any]:
    """Return a message with its content as text, and the arguments of its calls as objects."""
    if not isinstance(message, Mapping):
        raise _wrong_message("one is not an object")
    if not isinstance(message.get("role"), str):
        raise _wrong_message("one has no role")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                texts.append(text)
            elif isinstance(kind, str) and kind in MEDIA_PARTS:
                ignored[kind] += 1
        content = "\n".join(texts)
    if content is not None and not isinstance(content, str):
        raise _wrong_message("a content is neither text nor a list of parts")
    found = {**message, "content": content or ""}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise _wrong_message("tool_calls is not a list")
    if calls:
        found["tool_calls"] = [_read_call(call) for call in calls]
    else:
        found.pop("tool_calls", None)
    return found


def _read_call(call: object) -> dict[str, Any]:
    """Return a past call; its arguments, a text of JSON, become what templates iterate over."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _wrong_message("a tool call has no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise _wrong_message("the arguments of a tool call are no JSON") from None
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _wrong_message(why: str) -> BadRequestError:
    """Refuse a message; vLLM tells of each kind that it could have been, which is not done here."""
    return BadRequestError(f"messages: {why}", kind="Bad Request", param="body.messages")
