"""What goes wrong on the user's side, told in one line each: `file:line: field: what is wrong`."""

from collections.abc import Iterable


def printable(text: str) -> str:
    """Write what a terminal would act on, such as colours, as escapes that it shows."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


class HeadwayError(ValueError):
    """The user's input, file or machine is at fault; every message names the place, in one line."""

    def __init__(self, messages: str | Iterable[str]) -> None:
        lines = [messages] if isinstance(messages, str) else messages
        self.messages = [printable(line) for line in lines]
        super().__init__("\n".join(self.messages))


Key = tuple[str, ...]
"""Where a value stands: the keys that lead to it; an item of a list has its index as a key."""
FieldError = tuple[Key, str]
"""A key and what is wrong with it."""


class MappingError(ValueError):
    """What is wrong with the keys of one mapping, and of those in it."""

    def __init__(self, faults: list[FieldError]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "\n".join(f"{'.'.join(key)}: {what}" for key, what in self.faults)


def field_errors(key: Key, error: ValueError) -> list[FieldError]:
    """Take apart an error about the value at `key`.

    Each of its lines begins with the key below that is wrong, or, where there is none, with the
    colon alone: `input_len.low: ...`, `: ...`.
    """
    if isinstance(error, MappingError):
        return [((*key, *below), what) for below, what in error.faults]
    found = []
    for line in str(error).split("\n"):
        below, _, what = line.partition(":")
        found.append(((*key, *below.split(".")) if below else key, what.strip()))
    return found


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


class HeadwayWarning(UserWarning):
    """The result stands, but the user should know this."""
