"""The step recorder of real engines: what one does, as the rows of a recorded schedule.

An adapter watches the engine and tells it: `steps.py` that of vLLM, in a case or on a live
server; `headway/sglang/recorder.py` that of SGLang. (What Headway's own schedulers do,
`headway/conformance/recorder.py` writes down, in the same rows.) Nothing outside the standard
library is imported: it runs in servers.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(slots=True)
class RequestSeen:
    """What was seen of a request; times in ns."""

    first_scheduled: int | None = None
    first_token: int | None = None
    finish: int | None = None
    cached: int | None = None  # tokens found in the prefix cache at first
    thrown_out: int = 0  # times
    tokens: int = 0  # of its answer


class StepRecorder:
    """Keeps the steps in flight and what was seen of requests; gives each row to `write` as text.

    The outcomes of steps come in the order in which they were scheduled.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self.steps = 0  # scheduled so far
        self.requests: dict[int, RequestSeen] = {}
        self._write = write
        self._written = 0
        self._in_flight: deque[Row | None] = deque()

    def write(self, row: Row) -> None:
        """Write a row."""
        self._write(json.dumps(row, separators=(",", ":")))

    def admit(
        self, now: int, starts: Iterable[tuple[int, int]]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Tell [id, tokens found in the cache] of those who are new from those who are back."""
        new, back = [], []
        for number, start in starts:
            seen = self.requests[number]
            if seen.first_scheduled is None:
                seen.first_scheduled, seen.cached = now, start
                new.append([number, start])
            else:
                back.append([number, start])
        return new, back

    def schedule(self, row: Row | None) -> None:
        """Take in a step that has just been scheduled; None: one that gets no row."""
        self._in_flight.append(row)
        self.steps += row is not None

    @property
    def in_flight(self) -> int:
        """Count the steps without an outcome."""
        return len(self._in_flight)

    def oldest(self) -> Row | None:
        """Return the row of the step whose outcome comes next."""
        return self._in_flight[0]

    def newest(self) -> Row | None:
        """Return the row of the step scheduled last."""
        return self._in_flight[-1]

    def finish(self, now: int, numbers: Iterable[int]) -> None:
        """Take in that requests end with the outcome at hand."""
        for number in numbers:
            self.requests[number].finish = now

    def count_tokens(self, now: int, numbers: Iterable[int]) -> None:
        """Take in who gets a token by the outcome at hand."""
        for number in numbers:
            seen = self.requests[number]
            seen.tokens += 1
            if seen.first_token is None:
                seen.first_token = now

    def outcome(self, facts: Row) -> None:
        """Write down the oldest step, with what its outcome tells."""
        row = self._in_flight.popleft()
        if row is not None:
            row |= facts
            self.write({"type": "step", "step": self._written, **row})
            self._written += 1

    def end(self, requests: Iterable[Row], *, complete: bool) -> None:
        """Write down the requests and the end; `complete`: all of them ended."""
        for row in requests:
            self.write({"type": "request", **row})
        self.write({"type": "end", "steps": self.steps, "complete": complete})
