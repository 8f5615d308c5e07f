"""A live server's record: a case with its recording, and the replay of it.

`headway.vllm.RecordedScheduler` writes such a file (`headway/vllm/steps.py` has its rows). What
happened when is taken from it; what was decided is compared.

Headway's engine decides at once when a step is over, and wastes no time of its own. So the replay's
clock stands still where the server's did such work: a step ends when the server next asked its
scheduler, a request arrives when it was first there at such a moment, and what the server asked
before it had an outcome, or found nothing to do, happens at one instant. Times of rows are of that
clock. The order of all events is the server's.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import simpy

from headway.conformance.case_model import Case
from headway.conformance.cases import parse_line, read_lines
from headway.conformance.recorder import Recorder, dump
from headway.conformance.replay import (
    RecordedAsyncReplica,
    RecordedReplica,
    Replay,
)
from headway.vllm.engine_fields import unknown_fields
from simulator.core.alarm import Alarm
from simulator.core.executor import Timing
from simulator.core.request import Step
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.rules import Release, read_release
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError

Row = dict[str, Any]
ROWS = ("case", "arrival", "step", "empty", "request", "abort")


@dataclass
class LiveRecord:
    """The rows of a record, read and checked."""

    path: Path
    header: Row = field(default_factory=dict)
    arrivals: list[Row] = field(default_factory=list)  # by id
    steps: list[Row] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)  # of the steps
    empties: list[int] = field(default_factory=list)  # ns, when a step had nobody in it
    ends: dict[int, Row] = field(default_factory=dict)  # by id of the request
    aborts: list[Row] = field(default_factory=list)


def is_live(path: Path) -> bool:
    """Say whether a file is a live server's record: its first row is of a case named live."""
    if not path.name.removesuffix(".gz").endswith(".jsonl"):
        return False
    first = next(iter(read_lines(path)), "")
    return first.startswith('{"type":"case"') and '"name":"live"' in first


def read_live(path: Path) -> LiveRecord:
    """Read a record; HeadwayError tells file, line and what is wrong.

    A last line that is cut off, as by a server that was killed, is left out.
    """
    record = LiveRecord(path)
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_line(path, number, line)
        except HeadwayError:
            if number == len(lines):
                break
            raise
        kind = row.get("type") if isinstance(row, dict) else None
        if kind not in ROWS or (kind == "case") != (number == 1):
            raise HeadwayError(f"{path}:{number}: type: {kind!r} is out of place in a live record")
        try:
            _take(record, kind, row, number)
        except (KeyError, TypeError) as error:
            raise HeadwayError(f"{path}:{number}: damaged: {error}") from None
    return record


def _take(record: LiveRecord, kind: str, row: Row, number: int) -> None:
    if kind == "case":
        record.header = row
    elif kind == "arrival":
        if row["id"] != len(record.arrivals):
            raise HeadwayError(f"{record.path}:{number}: id: must be {len(record.arrivals)}")
        record.arrivals.append(row)
    elif kind == "step":
        record.steps.append(row)
        record.lines.append(number)
    elif kind == "empty":
        record.empties.append(row["t"])
    else:
        record.ends[row["id"]] = row
        if kind == "abort":
            record.aborts.append(row)


@dataclass
class Timeline:
    """When things happened, on the replay's clock, ns."""

    decided: list[int]  # by step
    ends: list[int]  # by step
    instants: list[int]  # at which the scheduler was asked
    seen: list[tuple[int, int]]  # by request: the instant, and how often it had been asked there

    def after(self, now: int) -> int:
        """Return the next instant; where there is none, a moment later."""
        index = bisect_right(self.instants, now)
        return self.instants[index] if index < len(self.instants) else now + 1


ARRIVES, ENDS, ASKED = range(3)


def timeline(record: LiveRecord) -> Timeline:
    """Bring the events of a record in order, and find their times on the replay's clock."""
    steps, asynchronous = record.steps, record.header["config"]["async_scheduling"]
    begun = {row["t"] for row in steps}
    events = [(row["t"], ARRIVES, row["id"]) for row in record.arrivals]
    events += [(t, ASKED, -1) for t in record.empties if t not in begun]
    for index, row in enumerate(steps):
        events.append((row["t"], ASKED, index))
        if row["tokens"]:
            events.append((row.get("start", row["t"]) + row["dur"], ENDS, index))
    line = Timeline([0] * len(steps), [0] * len(steps), [], [])
    over: list[int] = []  # steps, until the scheduler is asked again
    come = 0  # requests, until then
    in_flight, count = 0, 0
    fresh, starved = True, False  # a new instant begins; nothing could be scheduled beside a step
    for t, kind, index in sorted(events):
        if kind == ARRIVES:
            come += 1
        elif kind == ENDS:
            fresh = True
            in_flight -= 1
            line.ends[index] = t
            if not (starved and asynchronous):  # else the engine sleeps after it
                over.append(index)
        else:
            if fresh:
                line.instants.append(t)
                fresh, count = False, 0
            for step in over:
                line.ends[step] = t
            over.clear()
            line.seen += [(line.instants[-1], count)] * come
            count, come = count + 1, 0
            computes = index >= 0 and steps[index]["tokens"] > 0
            in_flight += computes
            starved = not computes and in_flight > 0
            fresh = not computes
            if index >= 0:
                line.decided[index] = line.instants[-1]
    return line


@dataclass(slots=True)
class LiveCase:
    """A record as what Headway's scheduler is given, and as what it has to decide."""

    case: Case
    line: Timeline
    ends: list[int]  # of the steps that compute
    ranks: list[int]  # by request: its arrival in the order that priorities go by
    rows: list[tuple[int, str]]  # with their lines in the file
    release: Release


def live_case(path: Path) -> LiveCase:
    """Read a live server's record; HeadwayError where it is damaged or beyond what is replayed."""
    record = read_live(path)
    header = record.header
    _check(record)
    line = timeline(record)
    asynchronous = header["config"]["async_scheduling"]
    cut = len(record.ends) < len(record.arrivals)
    steps = len(record.steps) - (1 + asynchronous if cut else 0)
    requests = _requests(record, line)
    ranks = [0] * len(requests)
    last = -1
    begin = min((row["arrival_time"] for row in record.arrivals), default=0.0)
    for row in sorted(record.arrivals[: len(requests)], key=_urgency):
        last = ranks[row["id"]] = max(last + 1, round((row["arrival_time"] - begin) * 1e9))
    case = Case.model_validate(
        {
            "schema": 1,
            "name": header["name"],
            "config": header["config"],
            "max_steps": steps if cut else None,
            "requests": requests,
        }
    )
    release = read_release(header["vllm"])
    assert release is not None
    ends = [end for end, row in zip(line.ends, record.steps, strict=True) if row["tokens"]]
    rows = [*_rows(record, line, ranks, steps)]
    return LiveCase(case, line, ends, ranks, rows=rows, release=release)


def _urgency(row: Row) -> tuple[float, str]:
    """Return what orders vLLM's requests of one priority."""
    return row["arrival_time"], row["name"]


def _check(record: LiveRecord) -> None:
    """Refuse what is not replayed."""
    place = f"{record.path}:1"
    if not record.steps:
        raise HeadwayError(f"{record.path}: has no step")
    if unknown := [*unknown_fields(place, record.header)]:
        raise HeadwayError(unknown)
    if record.header["beyond"]:
        raise HeadwayError(f"{place}: cannot be replayed: {', '.join(record.header['beyond'])}")
    if record.aborts:
        raise HeadwayError(
            f"{record.path}: request {record.aborts[0]['id']} was aborted: cannot be replayed"
        )
    if read_release(record.header["vllm"]) is None:
        raise HeadwayError(f"{place}: vllm: must be a version, not {record.header['vllm']!r}")


def _requests(record: LiveRecord, line: Timeline) -> list[Row]:
    """Describe those that the scheduler has seen, with the names of their contents."""
    size = record.header["config"]["block_size"]
    prompts: set[int] = set()  # hashes of their blocks
    said: dict[int, list[list[Any]]] = {}  # by hash of a block of an answer, contents to its end
    found = []
    for row, (instant, _) in zip(record.arrivals, line.seen, strict=False):
        number, prompt, end = row["id"], row["prompt_len"], record.ends.get(row["id"])
        contents: list[list[Any]] = []
        for key in row["hash_ids"]:
            if key in said:
                contents = [*said[key]]
            else:
                contents.append([f"h{key}", size])
                prompts.add(key)
        if rest := prompt - size * len(row["hash_ids"]):
            contents.append([f"rest{number}", rest])
        for place, key in enumerate(end["hash_ids"] if end else ()):
            if key in said or key in prompts:
                raise HeadwayError(
                    f"{record.path}: request {number} said what another had said: cannot be "
                    "replayed"
                )
            tokens = size * (prompt // size + place + 1) - prompt
            said[key] = [*contents, [f"out:{number}", tokens]]
        found.append(
            {
                "id": number,
                "arrival_ns": instant,
                "prompt_len": prompt,
                "output_len": end["output_tokens"] if end else row["max_tokens"],
                "max_tokens": row["max_tokens"],
                "priority": row["priority"],
                "segments": contents,
            }
        )
    return found


def _rows(
    record: LiveRecord, line: Timeline, ranks: list[int], steps: int
) -> Iterator[tuple[int, str]]:
    """Yield the rows of the recorded schedule, on the replay's clock."""
    asynchronous = record.header["config"]["async_scheduling"]
    prompts = [row["prompt_len"] for row in record.arrivals]
    first_scheduled: dict[int, int] = {}
    first_token: dict[int, int] = {}
    finish: dict[int, int] = {}
    free_at = 0  # when the last step is over
    for index, row in enumerate(record.steps[:steps]):
        t, end = line.decided[index], line.ends[index]
        start = max(t, free_at) if asynchronous else t
        if row["tokens"]:
            free_at = end
        else:
            end = start if asynchronous else line.after(t)
        for number, _ in row["new"]:
            first_scheduled[number] = t
        for number, tokens, before in row["sched"]:
            if before + tokens >= prompts[number]:
                first_token.setdefault(number, end)
        finish |= dict.fromkeys(row["finished"], end)
        row |= {"t": t, "dur": end - start}
        if asynchronous:
            row["start"] = start
        yield record.lines[index], dump(row)
    last = record.lines[-1]
    for number in sorted(finish):
        seen = record.ends[number]
        yield (
            last,
            dump(
                {
                    "type": "request",
                    "id": number,
                    "arrival": ranks[number],
                    "first_scheduled": first_scheduled[number],
                    "first_token": first_token[number],
                    "finish": finish[number],
                    "output_tokens": seen["output_tokens"],
                    "cached": seen["cached"],
                    "preemptions": seen["preemptions"],
                }
            ),
        )
    done = len(finish) == len(line.seen)
    yield last, dump({"type": "end", "steps": steps, "complete": done})


class _LiveClock:
    """Steps end when they did; an executor."""

    def __init__(self, recorder: Recorder, ends: list[int]) -> None:
        self.recorder = recorder
        self._ends = deque(ends)
        self._free_at = 0

    def execute(self, step: Step) -> Timing:
        self.recorder.add_step(step)
        start = max(int(self.recorder.env.now), self._free_at)
        self._free_at = self._ends.popleft() if self._ends else start + 1
        return Timing(self._free_at - start)


class _LiveScheduler(Scheduler):
    """Gets requests as the live server's scheduler got them."""

    replay: "LiveReplay"

    def schedule(self, now: float) -> Step:
        self.replay.add_seen(int(now))
        return super().schedule(now)


class _LiveAsyncScheduler(_LiveScheduler, AsyncScheduler):
    """The same, asynchronous."""


class _LivePauses(RecordedReplica):
    """Sleeps, where nothing can be scheduled, as long as the live engine did."""

    line: Timeline

    def _pause(self, now: float) -> float:
        self.empty_step_seconds = self.line.after(int(now)) - now
        return super()._pause(now)


class _LiveReplica(_LivePauses):
    """One batch in flight."""

    def _rest(self, now: float) -> float:
        self.empty_step_seconds = self.line.after(int(now)) - now
        return super()._rest(now)


class _LiveAsyncReplica(_LivePauses, RecordedAsyncReplica):
    """Two."""


class LiveReplay(Replay):
    """A live server's record, played by Headway's scheduler in its own loop."""

    schedulers = (_LiveScheduler, _LiveAsyncScheduler)
    replicas = (_LiveReplica, _LiveAsyncReplica)

    def __init__(self, live: LiveCase, *, release: Release | None = None) -> None:
        self._live = live
        super().__init__(live.case, release=release or live.release)
        assert isinstance(self._scheduler, _LiveScheduler)
        assert isinstance(self._engine, _LivePauses)
        self._scheduler.replay, self._engine.line = self, live.line

    def _make_clock(self) -> _LiveClock:
        return _LiveClock(self._recorder, self._live.ends)

    def _await_arrivals(self) -> None:
        for request, rank in zip(self.requests, self._live.ranks, strict=True):
            request.arrival = rank
        pairs = zip(self._live.line.seen, self.requests, strict=True)
        self._coming = deque(pairs)
        self._alarm = Alarm(self._env, self._arrive)
        self._instant, self._asked = -1, 0
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Wait for the next who wakes the engine up: whoever is there when it is first asked."""
        if self._coming and self._coming[0][0][1] == 0:
            self._alarm.set(self._coming[0][0][0])

    def _arrive(self, alarm: simpy.Event) -> None:
        now = int(self._env.now)
        while self._coming and self._coming[0][0] <= (now, 0):
            self._engine.submit(self._coming.popleft()[1])
        self._set_alarm()

    def add_seen(self, now: int) -> None:
        """Hand the scheduler who came since it was asked last, at this instant."""
        self._asked = self._asked + 1 if now == self._instant else 0
        self._instant = now
        while self._coming and self._coming[0][0] <= (now, self._asked):
            self._scheduler.add(self._coming.popleft()[1])
            self._set_alarm()

    def rows(self) -> Iterator[str]:
        """Play it; yield a line for every step, and every request that ended."""
        for text in super().rows():
            if text.startswith('{"type":"step"') or '"finish":null' not in text:
                yield text
