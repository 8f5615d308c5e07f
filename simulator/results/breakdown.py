"""Where each request's time went: parts that add up to its e2el, from the facts of the log.

Nothing is followed token by token. What a step's prompts add to the time of its decodes is summed
up over the steps once; a request's share is the difference of that sum between two times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from simulator.core.log import Log
from simulator.core.request import Step
from simulator.costs.cost_model import CostModel
from simulator.results.request_table import (
    DELIVERY,
    Flags,
    Floats,
    Ints,
    RequestTable,
    Rows,
    find_rows,
)
from simulator.results.token_times import last_tokens

PARTS = (
    "prefill_time",
    "decode_alone_time",
    "decode_slowed_time",
    "preempted_time",
    "recompute_time",
    "swap_time",
)
"""Columns of requests.csv that, with `queue_time`, add up to `e2el`."""
SLICE = 1 << 16  # rows or requests looked at together: bounds the temporaries


class CumulativeTime:
    """Seconds that fall on moments, summed up to any time."""

    def __init__(self, times: Floats, seconds: Floats, side: str) -> None:
        """`times` ascend; `side` "left" leaves out what falls on the very time asked for."""
        self._times = times
        self._sums = np.concatenate(([0.0], np.cumsum(seconds)))
        self._side = side

    def between(self, start: Floats, end: Floats) -> Floats:
        """Return the seconds between each two times; 0 where nothing falls anywhere."""
        low, high = (np.searchsorted(self._times, at, self._side) for at in (start, end))  # type: ignore[call-overload]
        between: Floats = self._sums[high] - self._sums[low]
        return between


@dataclass(slots=True, eq=False)
class Preemptions:
    """Preemptions: a request waits from `start` to `resumed`, and computes again to `until`."""

    id: Ints
    start: Floats
    resumed: Floats
    until: Floats

    def __getitem__(self, which: Flags) -> "Preemptions":
        return Preemptions(
            self.id[which], self.start[which], self.resumed[which], self.until[which]
        )


def break_down(
    table: RequestTable, logs: Sequence[Log], costs: Sequence[CostModel]
) -> dict[str, Floats]:
    """Return the seconds of each of PARTS for every request, by id; NaN: it was not completed.

    `costs`, of each replica, tell what the decodes of a step would have taken alone. Where answers
    are given together, DELIVERY follows.
    """
    size = len(table.sent)
    parts = {name: np.full(size, np.nan) for name in PARTS}
    completed = table.completed
    if any(log.delivers_together for log in logs):
        given, table = table.finish, as_computed(table, logs)
        parts[DELIVERY] = np.where(completed, given - table.finish, np.nan)
    done = np.flatnonzero(completed)
    done = done[np.argsort(table.replica[done], kind="stable")]
    bounds = np.searchsorted(table.replica[done], np.arange(len(logs) + 1))
    for number, log in enumerate(logs):
        here = done[bounds[number] : bounds[number + 1]]
        if not len(here):
            continue
        for ids, values in _break_down(table, log, here, completed, costs[number]):
            for name, seconds in zip(PARTS, values, strict=True):
                parts[name][ids] = seconds
    return parts


def as_computed(table: RequestTable, logs: Sequence[Log]) -> RequestTable:
    """Return the table with the times at which tokens were computed, whenever they were given."""
    first, finish = table.first_token.copy(), table.finish.copy()
    for log in logs:
        if log.delivers_together:
            first[log.seats["id"]] = log.seats["first_token"]
            finish[log.seats["id"]] = log.seats["end"]
    return replace(table, first_token=first, finish=finish)


def _break_down(
    table: RequestTable, log: Log, ids: Ints, completed: Flags, cost: CostModel
) -> Iterator[tuple[Ints, tuple[Floats, ...]]]:
    """Do it for the completed requests of one replica, some at a time."""
    slowed = CumulativeTime(log.steps["end"][prompt_rows(log)], prompt_stalls(log, cost), "right")
    copies = CumulativeTime(log.swaps["start"], log.swaps["added"], "left")
    pauses = find_preemptions(log, completed)
    for at in range(0, len(ids), SLICE):
        some = ids[at : at + SLICE]
        yield some, _divide(table, some, pauses, (slowed, copies))


def _divide(
    table: RequestTable,
    ids: Ints,
    pauses: Preemptions,
    sums: tuple[CumulativeTime, CumulativeTime],
) -> tuple[Floats, ...]:
    """Divide the time of the requests `ids`; `sums` as for `_phase`."""
    scheduled, first, finish = table.first_scheduled[ids], table.first_token[ids], table.finish[ids]
    early = pauses.resumed < table.first_token[pauses.id]
    before = _phase(ids, scheduled, first, pauses[early], sums)
    after = _phase(ids, first, finish, pauses[~early], sums)
    prefill, decode = before.active, after.active
    stall = np.clip(after.slowed, 0.0, np.maximum(decode, 0.0))
    lost = before.preempted + after.preempted, before.recompute + after.recompute
    every = (prefill, decode - stall, stall, *lost, before.swap + after.swap)
    return tuple(np.maximum(part, 0.0) for part in every)  # below 0: rounding in the sums


class _Phase(NamedTuple):
    """What became of each request's time between two moments; `slowed` is a part of `active`."""

    active: Floats
    slowed: Floats
    preempted: Floats
    recompute: Floats
    swap: Floats


def _phase(
    ids: Ints,
    start: Floats,
    end: Floats,
    pauses: Preemptions,
    sums: tuple[CumulativeTime, CumulativeTime],
) -> _Phase:
    """Divide the time from `start` to `end` of the requests `ids`, whose pauses are given.

    `sums` are what decodes are slowed by and what is copied.
    """
    slowed, copies = sums
    active, copied = end - start, copies.between(start, end)
    stall = slowed.between(start, end)
    if not len(pauses.id):
        return _Phase(active - copied, stall, np.zeros(len(ids)), np.zeros(len(ids)), copied)
    size = int(max(ids.max(), pauses.id.max())) + 1

    def total(values: Floats) -> Floats:
        sums: Floats = np.bincount(pauses.id, values, size)[ids].astype(np.float64, copy=False)
        return sums

    preempted = total(pauses.resumed - pauses.start)
    again = total(pauses.until - pauses.resumed)
    copied_again = total(copies.between(pauses.resumed, pauses.until))
    copied -= total(copies.between(pauses.start, pauses.resumed))
    active -= preempted + again + copied - copied_again
    stall -= total(slowed.between(pauses.start, pauses.until))
    return _Phase(active, stall, preempted, again - copied_again, copied)


def prompt_rows(log: Log) -> Ints:
    """Number the rows of the steps that compute prompts; each stands for a single step."""
    return np.flatnonzero(log.steps["prefill_context"] > 0)


def prompt_stalls(log: Log, cost: CostModel) -> Floats:
    """Return, for each step that computes prompts, its time beyond that of its decodes alone.

    Copies of KV blocks are left out. Never below 0, nor above the step's own time.
    """
    prompts = prompt_rows(log)
    slices = (prompts[at : at + SLICE] for at in range(0, len(prompts), SLICE))
    return np.concatenate([np.empty(0), *(_stalls(log, part, cost) for part in slices)])


def _stalls(log: Log, prompts: Ints, cost: CostModel) -> Floats:
    """Do it for the rows of these numbers."""
    rows = log.steps[prompts]
    starts = rows["start"]
    time = rows["end"] - starts
    if len(starts) and len(log.swaps):
        swaps = log.swaps
        here, at = find_rows(starts, swaps["start"])
        np.subtract.at(time, at, swaps["added"][here])
        time = np.maximum(time, 0.0)
    decodes = rows["decodes"].astype(np.int64)
    if len(log.drafts):
        alone = _verification(log, rows, cost)
    else:
        alone = cost.decode_seconds(decodes, rows["context"])
    stalls: Floats = np.clip(time - np.where(decodes > 0, alone, 0.0), 0.0, time)
    return stalls


def _verification(log: Log, rows: Rows, cost: CostModel) -> Floats:
    """Return what the decodes of these steps, and their drafts, would have taken alone."""
    drafts = log.drafts
    here, at = find_rows(drafts["start"], rows["start"])
    alone = np.zeros(len(rows))
    for k, found in zip(np.flatnonzero(here), drafts[at], strict=True):
        step = Step([], int(found["decodes"]), int(rows["context"][k]), drafts=int(found["drafts"]))
        alone[k] = cost.execute(step).seconds
    return alone


def find_preemptions(log: Log, wanted: Flags) -> Preemptions:
    """Find when each preemption of the `wanted` requests (by id) was over; by id and time.

    Asynchronous scheduling may preempt a request whose last token is on its way: the pause begins
    with that token. Where nothing is to be computed again, it ends as the request is admitted.
    """
    pauses = log.pauses[wanted[log.pauses["id"]]]
    pauses = pauses[np.lexsort((pauses["resumed"], pauses["id"]))]
    ids = pauses["id"]
    if not len(ids):
        return Preemptions(ids, pauses["start"], pauses["resumed"], pauses["resumed"])
    hit = np.zeros(len(wanted), bool)
    hit[ids] = True
    runs = log.runs[hit[log.runs["id"]]]
    runs = runs[np.lexsort((runs["start"], runs["id"]))]
    after = _following(runs, pauses)
    before = np.maximum(after - 1, 0)
    last = last_tokens(runs, log.column("tick_ends"))
    had_token = (after > 0) & (runs["id"][before] == ids)
    start = np.where(had_token, np.maximum(pauses["start"], last[before]), pauses["start"])
    after = np.minimum(after, len(runs) - 1)
    until = np.where(runs["id"][after] == ids, runs["start"][after], np.inf)
    again = np.append(np.where(ids[1:] == ids[:-1], pauses["start"][1:], np.inf), np.inf)
    until = np.minimum(until, again)
    until = np.where((pauses["recomputed"] > 0) & np.isfinite(until), until, pauses["resumed"])
    return Preemptions(ids, start, pauses["resumed"], until)


def _following(runs: Rows, pauses: Rows) -> Ints:
    """Find for each pause the place of the run that begins next after it.

    Both are ordered by request and time.
    """
    order = np.lexsort(  # at the same time the token comes first
        (
            np.repeat((0, 1), (len(runs), len(pauses))),
            np.concatenate((runs["start"], pauses["resumed"])),
            np.concatenate((runs["id"], pauses["id"])),
        )
    )
    following: Ints = np.cumsum(order < len(runs), dtype=np.int64)[order >= len(runs)]
    return following
