"""What goes wrong on the user's side, told in one line each: `file:line: field: what is wrong`."""

from collections.abc import Iterable


class HeadwayError(Exception):
    """The user's input, file or machine is at fault; every message names the place."""

    def __init__(self, messages: str | Iterable[str]) -> None:
        self.messages = [messages] if isinstance(messages, str) else list(messages)
        super().__init__("\n".join(self.messages))


class HeadwayWarning(UserWarning):
    """The result stands, but the user should know this."""
