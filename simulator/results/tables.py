"""What a run wrote down, as columns: one row per request, one per logged row of steps, or one
per step with the leaps unrolled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from simulator.core.log import REASONS, REQUEST, Log
from simulator.util.csv_text import Column, Numbers, Words
from simulator.workload.workload import Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

COMPLETED = (REASONS.index("stop"), REASONS.index("length"))
REJECTED = REASONS.index("rejected")
UNFINISHED = REASONS.index("unfinished")
TRANSFER_PARTS = ("decode_queue_time", "transfer_time")
"""Columns of requests.csv that are parts of `e2el` only where prefill and decode are apart."""


RETRY = "retry_time"
"""A further part of `e2el`, where a cluster's clients try again or its replicas fail."""


@dataclass(slots=True, frozen=True)
class Tries:
    """What clients of a cluster have to do with a request beside sending it once."""

    again: Mapping[int, float]  # s, when a request was last sent once more, by id
    given_up: Log | None = None  # a row for each request that no replica ended


@dataclass(slots=True)
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

    @property
    def completed(self) -> Flags:
        """Tell which came to their end."""
        return np.isin(self.reason, COMPLETED)

    @property
    def arrival(self) -> Floats:
        """Give the time each was due; for a session turn, its delay after the end before it."""
        arrival, after = self.workload.arrival, self.workload.after
        if after is None:
            return arrival
        delay = self.workload.delay
        due = self.left[after] + (0.0 if delay is None else delay)
        return np.where(np.isnan(arrival), due, arrival)

    @property
    def left(self) -> Floats:
        """Give the time each was over for its client, whether or not it was served."""
        ended = np.where(self.reason == REJECTED, self.sent, self.finish)
        return np.where(np.isnan(self.given_up), ended, self.given_up)

    @property
    def client_queue_time(self) -> Floats:
        """Give the seconds each waited at the client, behind max_concurrency."""
        if self.workload.max_concurrency is None:
            return self.sent - self.sent
        return np.maximum(self.sent - self.arrival, 0.0)  # below 0: rounding in the delay's sum

    @property
    def queue_time(self) -> Floats:
        """Give the seconds from sent, of several tries the last, to first scheduled."""
        return self.first_scheduled - self.entered

    @property
    def retry_time(self) -> Floats:
        """Give the seconds from sent to sent for the last time; NaN: it was not completed."""
        return np.where(self.completed, self.entered - self.sent, np.nan)

    @property
    def ttft(self) -> Floats:
        """Give the seconds from sent to the first token."""
        return self.first_token - self.sent

    @property
    def e2el(self) -> Floats:
        """Give the seconds from sent to the last token."""
        return self.finish - self.sent

    @property
    def tpot(self) -> Floats:
        """Give the seconds per token after the first; NaN for a single token."""
        gaps = np.where(self.generated > 1, self.generated - 1, 1)
        return np.where(self.generated > 1, (self.e2el - self.ttft) / gaps, np.nan)


def gather_requests(
    workload: Workload, sent: Floats, logs: Sequence[Log], tries: Tries | None = None
) -> RequestTable:
    """Collect the request rows of all replicas by id, and what a cluster's clients did."""
    size = len(workload)
    first_scheduled, first_token, finish, given_up = (np.full(size, np.nan) for _ in range(4))
    generated, preemptions, cached = (np.zeros(size, np.int64) for _ in range(3))
    reason, replica = np.full(size, -1), np.full(size, -1)
    table = RequestTable(
        workload,
        sent,
        sent,
        given_up,
        first_scheduled,
        first_token,
        finish,
        generated,
        preemptions,
        cached,
        reason,
        replica,
    )
    rows = np.frombuffer(b"".join(log.request_rows for log in logs), REQUEST)
    ids = rows["id"]
    for name in ("first_scheduled", "first_token", "finish"):
        getattr(table, name)[ids] = np.where(rows[name] >= 0.0, rows[name], np.nan)
    for name in ("generated", "preemptions", "cached", "reason"):
        getattr(table, name)[ids] = rows[name]
    counts = [len(log.request_rows) // REQUEST.itemsize for log in logs]
    replica[ids] = np.repeat(np.arange(len(logs)), counts)
    if tries is not None and tries.again:
        table.entered = sent.copy()
        table.entered[[*tries.again]] = [*tries.again.values()]
    if tries is not None and tries.given_up is not None:
        rows = tries.given_up.requests
        reason[rows["id"]] = rows["reason"]
        given_up[rows["id"]] = rows["finish"]
    return table


def run_span(table: RequestTable, logs: Sequence[Log]) -> tuple[float, float]:
    """Give the first time a request was sent and the last at which anything ended."""
    start = float(np.min(table.sent, initial=inf, where=~np.isnan(table.sent)))
    if start == inf:
        return 0.0, 0.0
    end = float(np.max(table.finish, initial=start, where=~np.isnan(table.finish)))
    return start, max([end, *(float(log.steps["end"][-1]) for log in logs if log.step_rows)])


def request_columns(
    workload: Workload,
    sent: Floats,
    logs: Sequence[Log],
    parts: Mapping[str, Floats],
    hints: Ints | None = None,
    *,
    tries: Tries | None = None,
    prefilled: Ints | None = None,
) -> dict[str, Column]:
    """Give the columns of requests.csv, a row for each request of the workload, by id.

    `parts` are those of its time (`breakdown.py`). With `hints`, the predicted output tokens,
    there is a column for them; so with `prefilled`, the replicas that computed the
    prompts. `tries` says what a cluster's clients did.
    """
    table = gather_requests(workload, sent, logs, tries)
    apart: dict[str, Column] = {} if prefilled is None else {"prefill_replica": prefilled}
    predicted: dict[str, Column] = {} if hints is None else {"predicted_output_tokens": hints}
    return {
        "id": np.arange(len(workload)),
        "client": client_words(workload),
        "arrival": table.arrival,
        "client_queue_time": table.client_queue_time,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": table.generated,
        **predicted,
        "queue_time": table.queue_time,
        "ttft": table.ttft,
        "tpot": table.tpot,
        "e2el": table.e2el,
        **parts,
        "preemptions": table.preemptions,
        "cached_tokens": table.cached,
        "replica": table.replica,
        **apart,
        "finish_reason": Words(table.reason, REASONS),
    }


def client_words(workload: Workload) -> Words:
    """Give each request's client, numbered in order of their first requests; -1: not said."""
    codes: dict[str, int] = {}
    if workload.client is None:
        return Words(np.full(len(workload), -1), [])
    numbers = [codes.setdefault(name, len(codes)) for name in workload.client]
    return Words(np.array(numbers, np.int64), list(codes))


def step_columns(
    log: Log, rows: slice = slice(None), copy_seconds: Floats | None = None
) -> dict[str, Numbers]:
    """Give the columns of steps.csv but `replica`: a row for each logged row, in order of time.

    A row stands for `steps` successive steps; `duration` is that of all of them, the token
    counts are those of each, `context` and the blocks are those of the first. The columns of
    `copy_columns` follow.
    """
    part = log.steps[rows]
    used = part["blocks_used"].astype(np.int64)
    return {
        "start": part["start"],
        "duration": part["end"] - part["start"],
        "steps": part["steps"],
        "running": part["running"],
        "waiting": part["waiting"],
        "prefill_tokens": part["prefill_tokens"],
        "decode_tokens": part["decodes"],
        "wasted_tokens": part["wasted"],
        "context": part["context"],
        "kv_blocks_used": used,
        "kv_blocks_free": log.num_blocks - used,
        "preempted": part["preempted"],
    } | copy_columns(log, part["start"], copy_seconds)


def copy_columns(log: Log, starts: Floats, seconds: Floats | None) -> dict[str, Numbers]:
    """Give the blocks that went to the host and back in steps that start then, and their time.

    `seconds` is the time of each of `log.swaps`. Without any in the whole run it is None, and there
    are no columns; where others swapped and this replica did not, they hold zeros.
    """
    swaps = log.swaps
    if not len(swaps):
        none = np.zeros(len(starts), np.int64)
        zeros: dict[str, Numbers] = {"swapped_out_blocks": none, "swapped_in_blocks": none}
        return {} if seconds is None else zeros | {"swap_time": np.zeros(len(starts))}
    at = np.minimum(np.searchsorted(swaps["start"], starts), len(swaps) - 1)
    moved = swaps["start"][at] == starts
    columns: dict[str, Numbers] = {
        "swapped_out_blocks": np.where(moved, swaps["blocks_out"][at], 0),
        "swapped_in_blocks": np.where(moved, swaps["blocks_in"][at], 0),
    }
    if seconds is not None:
        columns["swap_time"] = np.where(moved, seconds[at], 0.0)
    return columns


def arrivals(log: Log) -> Floats:
    """Give the times at which requests joined this replica's queue, ascending."""
    return np.sort(log.joined)


def decisions(log: Log) -> Floats:
    """Give the time at which each row's first step was decided: `waiting` is as of then."""
    decided: Floats = np.asarray(log.decided) if log.decided else log.steps["start"]
    return decided


def queue_levels(log: Log) -> tuple[Floats, Ints]:
    """Give the times at which the length of the queue is known, and the length then."""
    times, waiting = decisions(log), log.steps["waiting"].astype(np.int64)
    if not log.emptied:
        return times, waiting
    at = np.searchsorted(times, log.emptied, side="left")
    return np.insert(times, at, log.emptied), np.insert(waiting, at, 0)


def block_growth(log: Log, rows: npt.NDArray[np.void]) -> Floats:
    """Estimate the blocks that each step of a leapt row takes after the first, with paging.

    Every sequence grows by a token per step, so together they take one block per `block_size`
    tokens: right on average, where the row tells not at which step.
    """
    if log.reserves:
        return np.zeros(len(rows))
    grown = (rows["decodes"] + rows["wasted"]) / log.block_size
    return np.where(rows["steps"] > 1, grown, 0.0)


def expand_steps(
    log: Log, *, contiguous: bool = False, copy_seconds: Floats | None = None
) -> dict[str, Numbers]:
    """Unroll the leaps: the columns of steps.csv with one row per step, in order of time.

    `waiting` is what the row began with and the requests that have come since.
    `kv_blocks_used` is exact at the first step of a row and estimated by even growth after it,
    or constant where allocation is `contiguous`.
    """
    rows = log.steps
    row, index = _unroll(rows["steps"].astype(np.int64))
    starts, ends = _step_times(log, row, index)
    queue, decided = arrivals(log), starts
    if log.decided:  # each step when the one before it began
        decided = np.where(index > 0, np.append(0.0, starts[:-1]), decisions(log)[row])
    since = np.searchsorted(queue, decided, "right")
    since -= np.searchsorted(queue, decisions(log), "right")[row]
    used = rows["blocks_used"].astype(np.int64)[row]
    if not contiguous:
        used = np.minimum(used + (index * block_growth(log, rows)[row]).astype(int), log.num_blocks)
    return {
        "start": starts,
        "duration": ends - starts,
        "running": rows["running"][row],
        "waiting": rows["waiting"][row] + since,
        "prefill_tokens": rows["prefill_tokens"][row],
        "decode_tokens": rows["decodes"][row],
        "wasted_tokens": rows["wasted"][row],
        "context": rows["context"][row] + index * (rows["decodes"] + rows["wasted"])[row],
        "kv_blocks_used": used,
        "kv_blocks_free": log.num_blocks - used,
        "preempted": np.where(index == 0, rows["preempted"][row], 0),
    } | copy_columns(log, np.where(index == 0, rows["start"][row], -1.0), copy_seconds)


def _unroll(steps: Ints) -> tuple[Ints, Ints]:
    """Give, for every step, its row and its place in the row."""
    row = np.repeat(np.arange(len(steps)), steps)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(steps) - steps, steps)


def _step_times(log: Log, row: Ints, index: Ints) -> tuple[Floats, Floats]:
    """Give start and end of every step; those inside a leap are ticks."""
    rows = log.steps
    steps = rows["steps"].astype(np.int64)
    starts: Floats = rows["start"][row]
    ends: Floats = rows["end"][row]
    ticks = np.asarray(log.tick_ends)
    last = np.searchsorted(ticks, rows["end"], side="right") - 1
    leapt = np.flatnonzero(steps[row] > 1)
    ends[leapt] = ticks[last[row[leapt]] - (steps[row] - 1 - index)[leapt]]
    inner = np.flatnonzero(index > 0)
    starts[inner] = ends[inner - 1]
    return starts, ends
