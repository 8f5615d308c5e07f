"""Small engines and workloads on which `check.py` tries out a policy, and what it sees there."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from simulator.core.log import Log
from simulator.core.request import Request, Step
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload

LONGEST = 64  # max_model_len of the cases, tokens
LONGEST_ANSWER = 28  # tokens


@dataclass(frozen=True, slots=True)
class Case:
    """An engine and what is asked of it: rows of arrival, prompt, output, client, priority."""

    requests: tuple[tuple[float, int, int, str, int], ...]
    seats: int
    budget: int
    block_size: int
    blocks: int
    caching: bool
    overlapping: bool

    def __str__(self) -> str:
        rows = "".join(f"\n  {row}" for row in self.requests)
        return (
            f"max_num_seqs {self.seats}, max_num_batched_tokens {self.budget}, {self.blocks} "
            f"blocks of {self.block_size}, max_model_len {LONGEST}, prefix caching "
            f"{'on' if self.caching else 'off'}, async_scheduling "
            f"{'on' if self.overlapping else 'off'}; requests (arrival in s, prompt tokens, output "
            f"tokens, client, priority):{rows}"
        )


@dataclass(slots=True)
class Run:
    """What a policy did with a case."""

    log: Log
    scheduler: Scheduler
    steps: list[tuple[object, ...]] = field(default_factory=list)
    before_end: int = 0  # of the steps, those that were decided before anybody had ended
    secrets: list[str] = field(default_factory=list)  # where the length was read
    error: Exception | None = None
    endless: bool = False


class Guarded(Request):
    """A request that notes who asks for the length of its answer."""

    __slots__ = ("ends", "hidden", "places", "secret")

    def __init__(self, request: Request, forbidden: "Forbidden", places: list[str]) -> None:
        self.secret, self.places = forbidden, places
        for name in Request.__dataclass_fields__:
            setattr(self, name, getattr(request, name))

    def _tell(self, name: str) -> None:
        frame = sys._getframe(2)
        if self.secret.hides(name, frame.f_globals.get("__name__", "")):
            place = f"request.{name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
            self.places.append(place)

    @property
    def output_tokens(self) -> int:
        self._tell("output_tokens")
        return self.hidden

    @output_tokens.setter
    def output_tokens(self, value: int) -> None:
        self.hidden = value

    @property
    def max_tokens(self) -> int:
        self._tell("max_tokens")
        return self.ends

    @max_tokens.setter
    def max_tokens(self, value: int) -> None:
        self.ends = value


@dataclass(frozen=True, slots=True)
class Forbidden:
    """Whose code may not read what: a policy nothing of the length, a scheduler not the oracle's.

    A scheduler must end its requests: it may ask for `max_tokens`.
    """

    modules: frozenset[str]
    scheduler: bool

    def hides(self, name: str, module: str) -> bool:
        """Say whether a field must not be read by code of a module."""
        if name == "max_tokens" and self.scheduler:
            return False
        return module in self.modules or not module.startswith("simulator.")


class Clock:
    """A linear cost that notes what each step computes, and for whom."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def execute(self, step: Step) -> float:
        running = tuple(request.id for request in self.run.scheduler.running)
        chunks = tuple((c.request.id, c.start, c.tokens) for c in step.prefills)
        self.run.steps.append((running, chunks, step.decodes, step.context))
        return 0.25 + 0.01 * step.tokens + 0.001 * step.context


class Leaper(Clock):
    """The same, for equal steps at once."""

    def leap(self, step: Step, repeats: int) -> list[float]:
        """Give the seconds of each of `repeats` steps."""
        fixed = 0.25 + 0.01 * step.decodes
        return [fixed + 0.001 * (step.context + k * step.decodes) for k in range(repeats)]


def draw_case(rng: np.random.Generator, size: int, overlapping: bool) -> Case:
    """Draw a case with `size` requests."""
    pick = rng.choice
    seats = int(rng.integers(1, 5))
    block_size = int(pick([1, 2, 4, 16]))
    at_once = rng.random() < 0.4
    arrivals = np.zeros(size) if at_once else np.sort(pick([0, 0, 0.25, 1, 2.5, 4, 9], size))
    prompts, outputs = rng.integers(1, 36, size), rng.integers(1, 25, size)
    if rng.random() < 0.5:
        outputs += 4  # nobody ends at once
    clients, priorities = pick(["a", "b", "c"], size), rng.integers(0, 3, size)
    return Case(
        tuple(
            (float(t), int(p), int(o), str(c), int(u))
            for t, p, o, c, u in zip(arrivals, prompts, outputs, clients, priorities, strict=True)
        ),
        seats=seats,
        budget=int(rng.integers(max(seats, 3), 48)),
        block_size=block_size,
        blocks=1 + int(LONGEST * pick([1, 1.25, 2, 5])) // block_size,
        caching=bool(rng.random() < 0.5),
        overlapping=overlapping,
    )


def make_workload(case: Case) -> Workload:
    """Make the requests; prompts of a client begin alike."""
    columns = list(zip(*case.requests, strict=True))
    return Workload(
        np.array(columns[0], float),
        np.array(columns[1], np.int64),
        np.array(columns[2], np.int64),
        client=list(columns[3]),
        priority=np.array(columns[4], np.int64),
        segments=[
            ((client, tokens // 2), (number, tokens - tokens // 2)) if tokens > 1 else None
            for number, (_, tokens, _, client, _) in enumerate(case.requests)
        ],
    )


def smaller(case: Case) -> Iterator[Case]:
    """Yield cases a little simpler than this one."""
    rows = case.requests
    if len(rows) > 1:
        for place in range(len(rows)):
            yield replace(case, requests=rows[:place] + rows[place + 1 :])
    if case.overlapping:
        yield replace(case, overlapping=False)
    if case.caching:
        yield replace(case, caching=False)
    simple = (0.0, 1, 1, "a", 0)
    for place, row in enumerate(rows):
        for column, value in enumerate(row):
            for less in _less(value, simple[column]):
                changed = (*row[:column], less, *row[column + 1 :])
                if place == 0 or changed[0] >= rows[place - 1][0]:  # arrivals ascend
                    yield replace(case, requests=(*rows[:place], changed, *rows[place + 1 :]))


def _less(value: Any, simple: Any) -> Iterator[Any]:
    if value != simple:
        yield simple
        if isinstance(value, int) and value > 3:
            yield value // 2
