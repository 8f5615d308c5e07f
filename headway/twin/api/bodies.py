"""The keys of a request's body with their types: checked by pydantic, and told as vLLM tells them.

The classes have the keys of vLLM's `CompletionRequest` and `ChatCompletionRequest` that are read
here, in its order and with its types, so the errors are word for word its own (0.32 and 0.33).
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import from_json

from headway.twin.api.tables import table

INT64 = 2**63
Seed = Annotated[int, Field(ge=-INT64, le=INT64 - 1)]
Token = Annotated[int, Field(ge=0)]
MOST_STOPS = 4  # the default of vLLM's VLLM_MAX_STOP_STRINGS
MOST_ERRORS, MOST_INPUT, MOST_TEXT = 10, 200, 1000
"""Of errors that are told of a body, and of characters: a value's, an error's."""
KEYS = ("type", "loc", "msg", "input", "ctx")
BRANCHES = {"str", "int", "list", "dict", "none", "float", "bool"}
"""Parts of a place that name a type, not a key."""


REFUSALS: dict[str, dict[str, Any]] = table("refusals")


class BadRequestError(Exception):
    """What the client has asked for cannot be; `param` is the key that the answer names."""

    def __init__(
        self, why: str, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(why)
        self.status, self.kind, self.param = status, kind, param

    @classmethod
    def of(cls, name: str, /, **given: Any) -> Self:
        """Return a refusal of refusals.json, with what is `given` in its words."""
        row = REFUSALS[name].items()
        told: Any = {key: v.format(**given) if isinstance(v, str) else v for key, v in row}
        return cls(**told)


def refuse(wrong: Mapping[str, object], **given: Any) -> None:
    """Raise BadRequestError, with what is `given`, for the first whose condition is true."""
    for name, is_so in wrong.items():
        if is_so:
            raise BadRequestError.of(name, **given)


class Open(BaseModel):
    """What keeps keys that it does not know."""

    model_config = ConfigDict(extra="allow")


class JsonSchema(BaseModel):
    """The schema of an answer, by name."""

    name: str
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's own words for it; `structural_tag` is not understood."""

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class StreamOptions(BaseModel):
    """What a stream tells beside its tokens."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Sampling(Open):
    """What all bodies that ask for an answer have in common; other keys are kept."""

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = []
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None
    priority: Seed = 0
    request_id: str | None = None
    cache_salt: str | None = None
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None


class Body(Sampling):
    """What completions and chats have in common."""

    max_tokens: int | None = None
    n: int | None = 1
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT64 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> list[str]:
        """Return the texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionBody(Body):
    """Of a completion."""

    prompt: list[Token] | list[list[Token]] | str | list[str] | None = None
    prompt_embeds: bytes | list[bytes] | None = None
    suffix: str | None = None
    echo: bool | None = False
    logprobs: int | None = None


class FunctionDefinition(Open):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Open):
    """A tool that the model may use."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


def _from_json(arguments: object) -> object:
    """Read the arguments of a past call, a text of JSON; what is no object is an empty one.

    A conversation with a torn call can go on, as in vLLM.
    """
    with suppress(ValueError):
        arguments = from_json(arguments) if isinstance(arguments, str) else arguments
    return arguments if isinstance(arguments, dict) else {}


class CalledFunction(Open):
    """The function of a past call."""

    arguments: Annotated[dict[str, Any], BeforeValidator(_from_json)] = {}


class ToolCall(Open):
    """A past call."""

    function: CalledFunction


class ChatMessage(Open):
    """What one side has said."""

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None


class ChatBody(Body):
    """Of a chat."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Open):
    """Of a prompt or a chat whose tokens are told."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(BaseModel):
    """Of tokens whose text is told."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


UNREAD = create_model(  # type: ignore[call-overload]
    "Unread", __module__=__name__, **{key: (kind, None) for key, kind in table("unread").items()}
)
"""Keys that nothing depends on here, of which vLLM checks the types."""


def parse_json(data: bytes) -> object:
    """Read the JSON of a body; raise BadRequestError where it is none."""
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        found: dict[str, Any] = {"type": "json_invalid", "loc": ("body", error.pos), "input": {}}
        found |= {"msg": "JSON decode error", "ctx": {"error": error.msg}}
        raise _refusal([found]) from None
    except (ValueError, RecursionError):
        raise BadRequestError.of("no body") from None


def read_types(body: object, kind: type[BaseModel]) -> Any:
    """Return a body with its types; raise BadRequestError with all that have another."""
    try:
        return kind.model_validate(body, from_attributes=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise _refusal([{**one, "loc": ("body", *one["loc"])} for one in errors]) from None


def _refusal(errors: Sequence[Mapping[str, Any]]) -> BadRequestError:
    """Word errors as vLLM's `validation_exception_handler`."""
    label = "error" if len(errors) == 1 else "errors"
    lines = [f"{len(errors)} validation {label}:"]
    for one in errors[:MOST_ERRORS]:
        told = {**one, "loc": _place(one["loc"]), "input": _shown(one["input"])}
        text = str({key: told[key] for key in KEYS if key in told})
        lines.append(f"  {text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + '...[truncated]'}")
    if len(errors) > MOST_ERRORS:
        lines.append(f"  ...and {len(errors) - MOST_ERRORS} more {label}")
    return BadRequestError("\n".join(lines), kind="Bad Request", param=_place(errors[0]["loc"]))


def _place(loc: Sequence[object]) -> str:
    parts = [str(part) for part in loc]
    return ".".join(p for p in parts if not re.search(r"[\[\]{}()]", p) and p not in BRANCHES)


def _shown(value: object) -> str:
    if isinstance(value, list | tuple | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= MOST_INPUT else text[:MOST_INPUT] + "...[truncated]"
