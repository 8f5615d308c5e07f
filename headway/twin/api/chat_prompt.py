"""What a model sees of a chat: its messages, tool definitions and past tool calls as one prompt.

A tokenizer's chat template makes it, as in vLLM; without one it is estimated.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any

from pydantic import BaseModel, create_model

from headway.twin.api.bodies import BadRequestError, ChatBody, ChatMessage, read_types, refuse
from headway.twin.api.chat_template import to_json
from headway.twin.api.prompts import MediaLaws, Prompt
from headway.twin.api.tables import table
from headway.twin.api.tokenizers import TokenCounter
from simulator.core.request import Item, Media

MARK = f"\0{token_hex(8)}-"  # before the number of an image or a clip; no client knows it
MARKED = re.compile(re.escape(MARK) + r"(\d+)\0")
PARTS: dict[str, dict[str, str]] = table("parts")
MEDIA_PARTS, TEXT_PARTS = PARTS["media"], PARTS["texts"]
"""Kinds of parts of a message that are no text, with their modality; a "file" counts nothing. The
other kinds, with the key of their text.
"""


class Url(BaseModel):
    """Where an image or a clip is, or its data."""

    url: str


class Sound(BaseModel):
    """A sound."""

    data: str
    format: str


CONTENTS: dict[str, type[BaseModel]] = {
    kind: create_model(kind, **{kind: (Url, ...)})  # type: ignore[call-overload]
    for kind in ("image_url", "audio_url", "video_url")
}
CONTENTS["input_audio"] = create_model("input_audio", input_audio=(Sound, ...))
"""What a part must have that has a type, and no uuid."""
Found = list[tuple[Media, int]]
"""Images and clips of a chat, with their tokens."""


def chat_prompt(chat: ChatBody, counter: TokenCounter, laws: MediaLaws | None = None) -> Prompt:
    """Return a chat's prompt.

    Images and clips count by `laws`; None: nothing. Raises BadRequestError for a chat without a
    message or a token, and for more images or clips than the laws allow.
    """
    refuse({"empty chat": not chat.messages})
    contents = [said.content for said in chat.messages if isinstance(said.content, list)]
    parts = [one for content in contents for one in content]
    kinds = Counter(kind for part in parts if (kind := _checked_kind(part)) not in TEXT_PARTS)
    for kind in kinds.keys() - MEDIA_PARTS:
        supported = ", ".join(sorted(TEXT_PARTS.keys() | MEDIA_PARTS.keys() - {"file"}))
        raise BadRequestError.of("part", value=kind, known=supported)
    if laws is not None:
        laws.check(Counter(MEDIA_PARTS[kind] for kind in kinds.elements()))
    found: Found = []
    template = counter.template
    by_parts = template is not None and template.takes_parts
    messages = [_plain(said, laws, found, by_parts=by_parts) for said in chat.messages]
    texts = _estimated(chat, messages) if template is None else [template.render(chat, messages)]
    tokens: list[int] = []
    items = []
    for number, piece in (one for text in texts for one in enumerate(re.split(MARKED, text))):
        if number % 2 == 0:
            tokens += counter.encode(piece)
        else:
            media, size = found[int(piece)]
            items.append(Item(media, len(tokens), len(tokens) + size))
            tokens += [0] * size
    ignored = [kind for kind in kinds if laws is None or MEDIA_PARTS[kind] == "file"]
    none, unseen = not tokens, [kind for kind in ignored if MEDIA_PARTS[kind] != "file"]
    refuse({"no images": none and unseen, "empty prompt": none}, model=chat.model or "The model")
    return Prompt(tokens, items=items, unseen=ignored)


def _estimated(chat: ChatBody, messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return definitions and calls as JSON, without what a template has between messages.

    Each message is by itself, so that what one turn has said is what the next repeats.
    """
    texts = [to_json(tool.model_dump(exclude_none=True)) for tool in chat.tools or ()]
    for message in messages:
        texts += [message["content"], *map(to_json, message.get("tool_calls", ()))]
    return texts


def _kind(part: str | Mapping[str, Any]) -> str:
    """Return the kind of a part, which a key of its own may say, too."""
    if isinstance(part, str):
        return "text"
    named = next((key for key in MEDIA_PARTS if key in part), "")
    return str(part.get("type", named))


def _checked_kind(part: str | Mapping[str, Any]) -> str:
    """Return it; raise BadRequestError where there is none, or nothing that it is of."""
    refuse({"no type": not (kind := _kind(part))})
    if kind in CONTENTS and "type" in part and "uuid" not in part:
        read_types(part, CONTENTS[kind])
    return kind


def _plain(
    said: ChatMessage, laws: MediaLaws | None, found: Found, *, by_parts: bool
) -> dict[str, Any]:
    """Return a message for a template: its content as one text, or `by_parts`.

    Its images and clips are `found`; marks are in their places, before the texts as in vLLM.
    """
    message = said.model_dump(exclude_unset=True)
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    content = said.content or ""
    parts, marks, texts = [], [], []
    for part in [content] if isinstance(content, str) else content:
        kind = _kind(part)
        text = part if isinstance(part, str) else part.get(TEXT_PARTS.get(kind, ""))
        if isinstance(text, str):
            texts.append(text)
            parts.append({"type": "text", "text": text})
        elif laws is not None and MEDIA_PARTS.get(kind, "file") != "file":
            assert not isinstance(part, str)
            marks.append(f"{MARK}{len(found)}\0")
            found.append(laws.read(MEDIA_PARTS[kind], part))
            parts += [{"type": MEDIA_PARTS[kind]}, {"type": "text", "text": marks[-1]}]
    message["content"] = parts if by_parts else "\n".join([*marks, *texts])
    return message
