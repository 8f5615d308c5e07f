"""What a run wrote down of its requests, as columns: one row per request, in order of their ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.core.log import LENGTH, REJECTED, STOP, UNFINISHED, Log
from simulator.util.csv_text import Words
from simulator.workload.workload import Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.void]  # of one of the dtypes of core/log.py

TIMES = ("first_scheduled", "first_token", "finish")  # of log.REQUEST: s, below 0 if never
COUNTS = {"generated": np.int64, "preemptions": np.int32, "cached": np.int64}
COMPLETED = (STOP, LENGTH)
TRANSFER_PARTS = ("decode_queue_time", "transfer_time")
"""Columns of requests.csv that are parts of `e2el` only where prefill and decode are apart."""
ENCODER_PARTS = ("encoder_time", "ec_transfer_time")
"""Columns of requests.csv that are parts of `e2el` only where encoders are apart."""
RETRY = "retry_time"
"""A further part of `e2el`, where a cluster's clients try again or its replicas fail."""
DELIVERY = "delivery_time"
"""A further part of `e2el`, where answers of a batch are given together."""


NUMBERS = {"reason": np.int8, "replica": np.int32}


class Attempts(NamedTuple):
    """What clients of a cluster have to do with a request beside sending it once."""

    again: Mapping[int, float]  # s, when a request was last sent once more, by id
    given_up: Log | None = None  # a row for each request that no replica ended
    encoded: Rows | None = None  # of log.ENCODING: whose images others encoded


@dataclass(slots=True, eq=False)
class RequestTable:
    """Every request of the workload, indexed by id; times in seconds, NaN: it never happened."""

    workload: Workload
    sent: Floats
    entered: Floats  # when its last try was sent
    given_up: Floats  # when its client let go of it
    first_scheduled: Floats
    first_token: Floats
    finish: Floats
    generated: Ints
    preemptions: Ints
    cached: Ints
    reason: Ints  # index into REASONS; -1: never sent
    replica: Ints  # -1: never sent
    encoding: Floats  # s from sent until its images were encoded by others, and the outputs there

    def part(self, rows: slice) -> "RequestTable":
        """Return some of the requests, in order; each knows when it was due."""
        work = replace(self.workload, segments=None, after=None, delay=None)
        if self.workload.after is not None:
            work.arrival = self.arrival
        found = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        own = work.rows(np.arange(rows.start, rows.stop))
        return RequestTable(own, **{name: column[rows] for name, column in found.items()})

    @property
    def completed(self) -> Flags:
        """Return which came to their end."""
        done: Flags = (self.reason == STOP) | (self.reason == LENGTH)
        return done

    @property
    def arrival(self) -> Floats:
        """The time each was due; for a session turn, its delay after the end before it."""
        arrival, after = self.workload.arrival, self.workload.after
        if after is None:
            return arrival
        delay = self.workload.delay
        due = self.left[after] + (0.0 if delay is None else delay)
        if self.workload.max_concurrency is None:  # it was sent as it was due
            due = np.where(np.isnan(self.sent), due, self.sent)
        return np.where(np.isnan(arrival), due, arrival)

    @property
    def left(self) -> Floats:
        """The time each was over for its client, whether or not it was served."""
        ended = np.where(self.reason == REJECTED, self.sent, self.finish)
        if (patience := self.workload.cancel_after) is not None:
            ended = np.where(self.reason == UNFINISHED, self.sent + patience, ended)
        return np.where(np.isnan(self.given_up), ended, self.given_up)

    @property
    def client_queue_time(self) -> Floats:
        """The seconds each waited at the client, behind max_concurrency."""
        if self.workload.max_concurrency is None:
            return self.sent - self.sent
        return np.maximum(self.sent - self.arrival, 0.0)  # below 0: rounding in the delay's sum

    @property
    def queue_time(self) -> Floats:
        """The seconds from sent, of several tries the last, to first scheduled, less `encoding`."""
        return self.first_scheduled - self.entered - self.encoding

    @property
    def retry_time(self) -> Floats:
        """The seconds from sent to sent for the last time; NaN: it was not completed."""
        return np.where(self.completed, self.entered - self.sent, np.nan)

    @property
    def ttft(self) -> Floats:
        """The seconds from sent to the first token."""
        return self.first_token - self.sent

    @property
    def e2el(self) -> Floats:
        """The seconds from sent to the last token."""
        return self.finish - self.sent

    @property
    def tpot(self) -> Floats:
        """The seconds per token after the first; NaN for a single token."""
        gaps = np.where(self.generated > 1, self.generated - 1, 1)
        return np.where(self.generated > 1, (self.e2el - self.ttft) / gaps, np.nan)

    def latencies(self, completed: Flags) -> dict[str, Floats]:
        """Return latencies of completed requests, in s; ITL is of tokens and stands elsewhere."""
        found = {
            "ttft": self.ttft[completed],
            "tpot": self.tpot[completed & (self.generated > 1)],
            "e2el": self.e2el[completed],
            "queue_time": self.queue_time[completed],
        }
        if self.workload.max_concurrency is not None:
            waited = found["client_queue_time"] = self.client_queue_time[completed]
            if self.workload.request_rate != inf:
                found["e2el_including_client_queue"] = found["e2el"] + waited
        return found


def gather_requests(
    workload: Workload, sent: Floats, logs: Sequence[Log], tries: Attempts | None = None
) -> RequestTable:
    """Collect the request rows of all replicas by id, and what a cluster's clients did."""
    size = len(workload)
    columns: dict[str, Any] = {name: np.full(size, np.nan) for name in TIMES}
    columns["given_up"] = np.broadcast_to(np.nan, size)
    columns["encoding"] = np.broadcast_to(0.0, size)
    columns |= {name: np.zeros(size, kind) for name, kind in COUNTS.items()}
    columns |= {name: np.full(size, -1, kind) for name, kind in NUMBERS.items()}
    table = RequestTable(workload, sent, sent, **columns)
    for number, log in enumerate(logs):
        rows = log.requests
        ids = rows["id"]
        for name in TIMES:
            times = rows[name]
            columns[name][ids] = np.where(times >= 0.0, times, np.nan)
        for name in (*COUNTS, "reason"):
            columns[name][ids] = rows[name]
        table.replica[ids] = number
    if tries is not None and tries.again:
        table.entered = sent.copy()
        table.entered[[*tries.again]] = [*tries.again.values()]
    if tries is not None and tries.encoded is not None:
        rows, table.encoding = tries.encoded, np.zeros(size)
        table.encoding[rows["id"]] = rows["end"] - rows["begin"]
    if tries is not None and tries.given_up is not None:
        rows, table.given_up = tries.given_up.requests, np.full(size, np.nan)
        table.reason[rows["id"]] = rows["reason"]
        table.given_up[rows["id"]] = rows["finish"]
    return table


def find_rows(keys: Floats | Ints, wanted: Floats | Ints) -> tuple[Flags, Ints]:
    """Return which of `wanted` are among the ascending `keys`, and return the places of these."""
    places = np.searchsorted(keys, wanted)
    there = places < len(keys)
    there[there] = keys[places[there]] == wanted[there]
    return there, places[there]


def run_span(table: RequestTable, logs: Sequence[Log]) -> tuple[float, float]:
    """Return the first time a request was sent and the last at which anything ended; 0 if none."""
    start, end = partial_span(table, logs)
    return (0.0, 0.0) if start == inf else (start, end)


def partial_span(table: RequestTable, logs: Sequence[Log]) -> tuple[float, float]:
    """Return the same of a part of a run; inf where none of its requests was sent."""
    start = float(np.min(table.sent, initial=inf, where=~np.isnan(table.sent)))
    first = 0.0 if start == inf else start
    end = float(np.max(table.finish, initial=first, where=~np.isnan(table.finish)))
    return start, max([end, *(float(log.steps["end"][-1]) for log in logs if log.step_rows)])


def client_column(workload: Workload) -> Words:
    """Return each request's client, numbered in order of their first requests; -1: not said."""
    return numbered(workload.client or [""] * len(workload))


def model_column(workload: Workload) -> Words:
    """Return the adapter or model that each request asks for, likewise; `base`: the model's own."""
    if workload.model is None:
        return numbered([""] * len(workload))
    return numbered([name or "base" for name in workload.model])


def numbered(words: Sequence[str], *, name_empty: bool = False) -> Words:
    """Number words in order of their first appearance.

    An empty one is an empty cell, or with `name_empty` a name as any other.
    """
    codes: dict[str, int] = {}
    numbers = [codes.setdefault(word, len(codes)) if word or name_empty else -1 for word in words]
    return Words(np.array(numbers, np.int64), list(codes))


def prompt_figures(prompt: Ints, table: RequestTable, counted: Flags) -> dict[str, object]:
    """Return what prompts of several samples felt: each ends with the last of its samples."""
    whole = np.zeros(int(prompt.max()) + 1)
    np.maximum.at(whole, prompt, np.where(table.completed & counted, table.e2el, np.nan))
    known = whole[~np.isnan(whole)]
    found: dict[str, object] = {"prompts": len(whole), "completed": len(known)}
    if len(known):
        found |= {"mean_e2el_ms": 1e3 * float(known.mean())}
        found |= {"p99_e2el_ms": 1e3 * float(np.percentile(known, 99))}
    return found
