"""What goes wrong on the user's side, told in one line each: `file:line: field: what is wrong`."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, Self


def printable(text: str) -> str:
    """Write what a terminal would act on, such as colours, as escapes that it shows."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


Key = tuple[str, ...]
"""Where a value stands: the keys that lead to it; an item of a list has its index as a key."""
Kind = Literal["key", "value", "model", "memory", "own code", "unsupported"]
"""A kind of fault. `key`: an unknown key. `value`: a name that nothing has, or a value of another
type or out of range, whatever the other keys say. `model`: a value that the model does not take.
`memory`: the model does not fit the GPUs. `own code`: code that the caller does not let run.
`unsupported`: the engine, the hardware or Headway does not do it with what the other keys say."""


class FieldError(NamedTuple):
    """What is wrong with the value at a key."""

    key: Key
    what: str
    kind: Kind = "unsupported"


class HeadwayError(ValueError):
    """The user's input, file or machine is at fault; every message names the place, in one line.

    `faults` are the same by their keys, where a scenario is at fault.
    """

    def __init__(self, messages: str | Iterable[str], faults: Sequence[FieldError] = ()) -> None:
        self.faults = faults
        lines = [messages] if isinstance(messages, str) else messages
        self.messages = [printable(line) for line in lines]
        super().__init__("\n".join(self.messages))


class TraceFault(NamedTuple):
    """What is wrong in a trace, and where."""

    path: Path
    what: str
    line: int | None = None  # from 1 on; None: the file as a whole
    field: str = ""  # a column or key; "": none

    def __str__(self) -> str:
        place = str(self.path) if self.line is None else f"{self.path}:{self.line}"
        return ": ".join(filter(None, (place, self.field, self.what)))


class TraceError(HeadwayError):
    """A trace cannot be read. The attributes are those of its first fault, `more` the others."""

    def __init__(
        self, path: Path, what: str, line: int | None = None, field: str = "", *more: TraceFault
    ) -> None:
        first = TraceFault(path, what, line, field)
        super().__init__(map(str, (first, *more)))
        self.path, self.what, self.line, self.field = first
        self.more = more

    def __reduce__(self) -> tuple[type["TraceError"], tuple[object, ...]]:
        return type(self), (self.path, self.what, self.line, self.field, *self.more)


class MappingError(ValueError):
    """What is wrong with keys of a mapping; they are those below it, "" the mapping itself."""

    def __init__(
        self, key: str | Sequence[FieldError], what: str = "", kind: Kind = "unsupported"
    ) -> None:
        super().__init__(key, what, kind)
        self.faults = [FieldError(split_key(key), what, kind)] if isinstance(key, str) else [*key]

    @classmethod
    def of(cls, wrong: Mapping[str, str], kind: Kind = "unsupported") -> Self:
        """Make one of what is wrong by key."""
        return cls([FieldError((key,), what, kind) for key, what in wrong.items()])

    @property
    def what(self) -> str:
        """What is wrong in one line, without the keys: for one who gave them by an option."""
        return "; ".join(fault.what for fault in self.faults)

    def __str__(self) -> str:
        return "\n".join(f"{'.'.join(fault.key)}: {fault.what}" for fault in self.faults)


class ScenarioError(MappingError):
    """What is wrong with keys of a scenario, which are whole: `engine.block_size`."""


def split_key(key: str) -> Key:
    """Take a dotted key apart."""
    return tuple(key.split(".")) if key else ()


def field_errors(key: Key, error: ValueError) -> list[FieldError]:
    """Return what an error about the value at `key` blames, by whole keys."""
    if isinstance(error, MappingError):
        above = () if isinstance(error, ScenarioError) else [*key]
        return [fault._replace(key=(*above, *fault.key)) for fault in error.faults]
    return [FieldError(key, line) for line in str(error).split("\n")]


@contextmanager
def at_key(name: str, kind: type[MappingError] = MappingError) -> Iterator[None]:
    """Blame the value at a dotted key for what is wrong; a HeadwayError has its place already."""
    try:
        yield
    except HeadwayError:
        raise
    except ValueError as error:
        raise kind(field_errors(split_key(name), error)) from error


class NoAnswerError(HeadwayError):
    """The input is right, and the answer is no: nothing meets what is asked."""


def one_line(error: BaseException) -> str:
    """Return what an exception says without its line breaks."""
    return " ".join(str(error).split())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say, for a message's end, which known name a wrong one may mean; nothing if none is near."""
    from difflib import get_close_matches

    names = {one.lower(): one for one in known}
    near = get_close_matches(name.lower(), names, 1, cutoff=0.6)
    return f"; did you mean {names[near[0]]}?" if near else ""


def unknown_key(key: object, known: Iterable[str]) -> str:
    """Say of a key that a mapping does not know which one it may mean, or all that there are."""
    there = [*known]
    near = did_you_mean(str(key), there)
    more = f", ... (all {len(there)}: headway schema)" if len(there) > 20 else ""
    return "unknown key" + (near or f"; there is {', '.join(there[:20])}{more}")


class HeadwayWarning(UserWarning):
    """The result stands, but the user should know this."""


def warn(text: str) -> None:
    """Tell the user something that does not change what can be answered."""
    warnings.warn(text, HeadwayWarning, stacklevel=3)
