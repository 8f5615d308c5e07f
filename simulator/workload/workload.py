"""What is asked of the engine: when each request comes, how long it is, what its prompt says."""

from dataclasses import dataclass, fields, replace
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from simulator.core.request import Segments
from simulator.util.errors import MappingError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_REQUESTS = 1_000_000_000
"""Of a run."""
MAX_KEPT_REQUESTS = 10_000_000
"""Of a run that keeps them. Each takes some hundred bytes of memory until the end."""


@dataclass(slots=True, frozen=True)
class Frontend:
    """What lies between a client and the scheduler: network, HTTP, tokenizer; seconds.

    Requests pass one after the other, as through the one process of vLLM's API server, each
    taking `per_request` and `per_token` for its prompt's tokens; `latency` comes on top, and those
    who wait for it do not hold up others. It holds the way back, too: a constant that every
    answer takes longer delays its last token as a later start would.
    """

    latency: float = 0.0
    per_request: float = 0.0
    per_token: float = 0.0

    def delay(self, now: float, free: float, prompt_tokens: int) -> tuple[float, float]:
        """Return after how many s a request sent `now` is at the scheduler, and `free` after it.

        `free` is when the API server has passed on all requests before it, s.
        """
        free = max(free, now) + (self.per_request + self.per_token * prompt_tokens)
        return free - now + self.latency, free


FRONTENDS = {
    "server": Frontend(latency=1.8e-3),
    "client": Frontend(latency=3e-3, per_request=2e-3, per_token=2e-6),
}
"""vLLM's, by whose clock times are taken. On the server's, from the stamp of arrival to the
scheduler and from a token to its stamp: vLLM 0.11's spans, TTFT less queue and prefill, where no
step is in the way. On a client's, HTTP and the tokenizer of one API server, too: InferenceX and
AIConfigurator's points."""


Columns = TypeVar("Columns", bound="DataclassInstance")


def rows_of(table: Columns, rows: Ints) -> Columns:
    """Return some rows, in this order, of all the columns that a dataclass has."""
    found: dict[str, Any] = {}
    for one in fields(table):
        column = getattr(table, one.name)
        if isinstance(column, list):
            found[one.name] = [column[k] for k in rows.tolist()]
        elif isinstance(column, np.ndarray):
            found[one.name] = column[rows]
    return replace(table, **found)


@dataclass(slots=True, kw_only=True, eq=False)
class Requests:
    """What may be told of requests beside times and lengths, in columns; None: nothing is."""

    client: list[str] | None = None
    priority: Ints | None = None  # smaller is sooner
    max_tokens: Ints | None = None  # output tokens that the client allows; 0: it does not say
    segments: list[Segments | None] | None = None  # contents of the prompts, as in request.py
    after: Ints | None = None  # the request that must end first; -1: none
    delay: Floats | None = None  # s, think time
    cancel_after: Floats | None = None  # s after it is sent that its client hangs up; NaN: never
    hint: Ints | None = None  # output tokens that the client predicts; 0: it does not say
    model: list[str] | None = None  # the adapter or model asked for; "": the engine's own model
    images: Ints | None = None  # of each request, where a trace says how many
    images_counted: bool = False  # in the prompts' tokens


@dataclass(slots=True, eq=False)
class Workload(Requests):
    """Requests as columns; a request's id is its index in them.

    `arrival` is in seconds from the start of the run and ascends. A request that continues a
    session has `arrival` NaN: it comes `delay` seconds after the request `after` has ended.
    Under `max_concurrency` a request whose time has come waits at the client until fewer than
    so many are sent and unfinished.
    """

    arrival: Floats  # s; NaN: `delay` after the end of request `after`
    prompt_tokens: Ints  # >= 1
    output_tokens: Ints  # >= 1, at which the request ends by itself
    prompt: Ints | None = None  # the number of the prompt that it is a sample of
    max_concurrency: int | None = None
    frontend: Frontend | None = None  # None: requests reach the scheduler as they are sent
    request_rate: float = inf  # requests/s that were asked for; only reports read it
    burstiness: float = 1.0  # likewise
    source: str = ""  # the file or the generator, in one line

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def total_input(self) -> int:
        """Count the prompt tokens of all requests."""
        return int(self.prompt_tokens.sum())

    @property
    def total_output(self) -> int:
        """Count the tokens that all requests would generate."""
        return int(self.output_tokens.sum())

    @property
    def duration(self) -> float:
        """The time of the last known arrival, in seconds; 0 for no requests."""
        known = self.arrival[~np.isnan(self.arrival)]
        return float(known[-1]) if len(known) else 0.0

    def sessions(self) -> Ints:
        """Number the sessions from 0 on, by their first requests, and give that of each request."""
        if self.after is None:
            return np.arange(len(self))
        numbers: list[int] = []
        started = 0
        for before in self.after.tolist():
            numbers.append(started if before < 0 else numbers[before])
            started += before < 0
        return np.array(numbers, np.int64)

    def rows(self, indices: Ints) -> "Workload":
        """Return some of the requests, in this order; `after` and `segments` stay as they are."""
        return rows_of(self, indices)

    def part(self, indices: Ints) -> "Workload":
        """Return some of the requests, in this order; none of them may follow another's end."""
        return replace(self, after=None, delay=None).rows(indices)

    def check(self) -> None:
        """Raise ValueError, `field: what is wrong`, unless this is a workload that can be run."""
        self._check_columns()
        self._check_times()
        self._check_segments()
        for name in ("prompt_tokens", "output_tokens"):
            lengths = getattr(self, name)
            if (bad := np.flatnonzero(lengths < 1)).size:
                raise MappingError(name, f"request {bad[0]} has {lengths[bad[0]]}, not 1 or more")
        for name in ("cancel_after", "hint", "max_tokens"):
            if (column := getattr(self, name)) is not None and (column < 0).any():
                raise MappingError(name, "not every one is 0 or more")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise MappingError("max_concurrency", f"{self.max_concurrency} is not 1 or more")

    def _check_columns(self) -> None:
        for name in sorted(COLUMNS):
            column = getattr(self, name)
            if column is None:
                continue
            if name not in ("client", "model", "segments"):
                kinds, what = ("iuf", "numbers") if name in TIMES else ("iu", "integers")
                if not isinstance(column, np.ndarray) or column.dtype.kind not in kinds:
                    had = getattr(column, "dtype", type(column).__name__)
                    raise MappingError(name, f"must be a numpy array of {what}, not {had}")
            if len(column) != len(self):
                raise MappingError(name, f"{len(column)} values for {len(self)} requests")

    def _check_times(self) -> None:
        """Look at `arrival`, `after` and `delay` together."""
        timed = ~np.isnan(self.arrival)
        known = self.arrival[timed]
        if not np.isfinite(known).all() or (known < 0).any():
            raise MappingError("arrival", "not every time is finite and 0 or more")
        if (np.diff(known) < 0).any():
            raise MappingError("arrival", "the times do not ascend")
        after = np.full(len(self), -1) if self.after is None else self.after
        if (bad := np.flatnonzero(timed != (after < 0))).size:
            which = "NaN" if np.isnan(self.arrival[bad[0]]) else "known"
            what = f"needs either a time or a predecessor (its arrival is {which})"
            raise MappingError("after", f"request {bad[0]} {what}")
        if (bad := np.flatnonzero(after >= np.arange(len(self)))).size:
            raise MappingError("after", f"request {bad[0]} follows a request that is not before it")
        if self.delay is not None:
            delay = self.delay[~timed]
            if not np.isfinite(delay).all() or (delay < 0).any():
                raise MappingError("delay", "not every think time is finite and 0 or more")

    def _check_segments(self) -> None:
        for i, parts in enumerate(self.segments or ()):
            if parts is not None and sum(count for _, count in parts) != self.prompt_tokens[i]:
                raise MappingError("segments", f"of request {i} do not add up to its prompt")


TIMES = ("arrival", "delay", "cancel_after")
_NAMES = [one.name for one in fields(Workload)]
COLUMNS = {*_NAMES[: _NAMES.index("max_concurrency")]} - {"images_counted"}
"""What each request has."""
