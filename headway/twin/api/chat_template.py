"""A model's chat template, which makes one text of a chat: from a tokenizer's folder or a file."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from headway.twin.api.bodies import BadRequestError, ChatBody
from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError
from simulator.util.yaml_lines import read_text


class ChatTemplate:
    """A chat template in Jinja's sandbox, with what Hugging Face's transformers give it."""

    def __init__(self, source: str, place: str, special: Mapping[str, str] | None = None) -> None:
        """Compile `source`; `special` are the tokenizer's tokens, as `bos_token`.

        Raises HeadwayError, with the line, where it is no template; it is from `place`.
        """
        need_package(place, "serve", "jinja2")
        from jinja2 import TemplateSyntaxError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """Marks what the assistant says, for training: it changes no prompt."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body).set_lineno(line)

        sandbox = ImmutableSandboxedEnvironment(extensions=[loopcontrols, Generation])
        sandbox.trim_blocks = sandbox.lstrip_blocks = True
        sandbox.filters["tojson"] = to_json
        sandbox.globals["raise_exception"] = _raise
        sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise HeadwayError(f"{place}:{error.lineno}: chat template: {error.message}") from None
        self._special = special or {}
        self._knows_developers = bool(re.search("\"developer\"|'developer'", source))
        self.takes_parts = self._takes_parts()

    def _takes_parts(self) -> bool:
        """Say whether it goes through the parts of a content, vLLM's content format "openai"."""
        parts = [{"type": "text", "text": "words"}]
        messages = [{"role": "user", "content": parts}]
        try:
            text = self._template.render(self._special, messages=messages)
        except Exception:  # it wants a text, or more than this
            return False
        return "words" in text and str(parts) not in text

    def render(self, chat: ChatBody, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt's text; raise BadRequestError with what the template objects to."""
        tools = [tool.model_dump() for tool in chat.tools or ()] or None
        given = {**self._special, **(chat.chat_template_kwargs or {})}
        if not self._knows_developers and any(one["role"] == "developer" for one in messages):
            messages = _without_developers(messages)
        given |= {"messages": messages, "tools": tools, "documents": chat.documents}
        given["add_generation_prompt"] = chat.add_generation_prompt
        try:
            return self._template.render(given)
        except Exception as error:  # whatever it was: a template is a program
            raise BadRequestError.of("template", error=error) from None


def _without_developers(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages of developers as the system's, in one at the beginning, as vLLM does."""
    found = [one if one["role"] != "developer" else {**one, "role": "system"} for one in messages]
    own = [one["content"] for one in found if one["role"] == "system"]
    texts = (
        text if isinstance(text, str) else "\n".join(one["text"] for one in text if "text" in one)
        for text in own
    )
    merged = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(one for one in found if one["role"] != "system")]


def to_json(value: object, indent: int | None = None, **_: object) -> str:
    """Return a value as JSON text."""
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's escapes HTML


def _raise(message: object) -> NoReturn:
    raise ValueError(str(message))


def read_template(given: str) -> ChatTemplate:
    """Read the file of `--chat-template`, or take its text, which has braces, as the template."""
    if {*"{}\n"} & {*given}:
        return ChatTemplate(given, "--chat-template")
    return ChatTemplate(_text(Path(given), "--chat-template"), f"--chat-template: {given}")


def own_template(folder: Path) -> ChatTemplate | None:
    """Read the template of a tokenizer's folder, as transformers do; None: it brings none."""
    config_path, path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config: Any = {}
    if config_path.is_file():
        try:
            config = {**json.loads(_text(config_path, "--tokenizer"))}
        except (ValueError, TypeError) as error:
            raise HeadwayError(f"--tokenizer: {config_path}: {error}") from None
    told = {name: token for name, token in config.items() if name.endswith("_token")}
    told |= {name: token.get("content") for name, token in told.items() if isinstance(token, dict)}
    tokens = {name: token for name, token in told.items() if isinstance(token, str)}
    if path.is_file():
        return ChatTemplate(_text(path, "--tokenizer"), f"--tokenizer: {path}", tokens)
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        named = [one for one in source if isinstance(one, dict) and one.get("name") == "default"]
        source = named[0].get("template") if named else None
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, f"--tokenizer: {config_path}", tokens)


def _text(path: Path, option: str) -> str:
    try:
        return read_text(path)
    except HeadwayError as error:
        raise HeadwayError(f"{option}: {error}") from None
