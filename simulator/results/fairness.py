"""Who got how much: the service of each client over time, and how evenly it was shared.

A client's *service* is `INPUT_WEIGHT` for each prompt token, at the first admission of its request,
and `OUTPUT_WEIGHT` for each token of an answer, when it comes out: the measure of Sheng et al.,
"Fairness in Serving Large Language Models" (OSDI 2024). Where the policy has `weights`, a client's
service counts divided by its weight. All of it is exact, from the log.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from simulator.core.log import REJECTED, Log
from simulator.results.record import Record
from simulator.results.request_table import (
    Flags,
    Floats,
    Ints,
    RequestTable,
    client_column,
    numbered,
    run_span,
)
from simulator.results.service_levels import Bound, keep_bounds
from simulator.util.csv_text import Column, Words
from simulator.workload.workload import Workload

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2
WINDOW = 60.0  # s, at most, over which the shares of clients are compared
WINDOWS = 10  # in a run, at least
PARTS = 20  # clients, and priorities, that the summary tells of
PART_LATENCIES = ("ttft", "tpot", "e2el", "queue_time")


def several_clients(workload: Workload) -> bool:
    """Say whether there is anybody to share with."""
    clients = workload.client
    return clients is not None and any(name != clients[0] for name in clients)


def client_parts(workload: Workload) -> Words:
    """Return each request's client to compare clients by: those that name none are the client ''.

    Without any name there are no clients, and all codes are -1.
    """
    if workload.client is None:
        return client_column(workload)
    return numbered(workload.client, name_empty=True)


def client_weights(arguments: Mapping[str, Any], names: Iterable[str]) -> Floats:
    """Return the weights that arguments of a policy give to clients; 1 if none.

    A policy of the user's own may mean something else by `weights`: then all are 1.
    """
    from simulator.policies.fair import check_shares

    given = arguments.get("weights", {})
    try:
        check_shares(given)
    except ValueError:
        given = {}
    return np.array([float(given.get(name, 1.0)) for name in names])


@dataclass(slots=True, eq=False)
class Clients:
    """The clients of a run; codes are indexes into `names`."""

    table: RequestTable
    logs: Sequence[Log]
    words: Words  # of each request
    weights: Floats  # by code

    @classmethod
    def of(cls, record: Record) -> "Clients":
        """Take the clients of a run, and the weights that its policy gives them."""
        words = client_parts(record.workload)
        weights = client_weights(record.scenario.engine.scheduling_policy.arguments, words.names)
        return cls(record.request_table(), record.logs, words, weights)

    @property
    def span(self) -> tuple[float, float]:
        """When the run began and ended, s."""
        return run_span(self.table, self.logs)

    @property
    def codes(self) -> Ints:
        """Each request's client."""
        return self.words.codes


def fairness_columns(clients: Clients) -> dict[str, Floats | Ints]:
    """Return the columns of fairness.csv: how evenly successive windows of time were shared.

    Compared are the clients that wait throughout a window, `backlogged`: who does not wait gets all
    that it asks for. Jain's index is that of what they got in the window, `window_difference` the
    most that one of them got less the least, `service_difference` the same of what they had got
    since the beginning, at its end. NaN: fewer than two were backlogged.
    """
    start, end = clients.span
    count = max(WINDOWS, int(np.ceil((end - start) / WINDOW)))
    edges = start + (end - start) * (np.arange(count + 1) / count)
    edges[-1] = end
    client, window = _backlogged(clients, edges)
    totals = _Totals(*_events(clients, edges), count)
    weight = clients.weights[client]
    got = totals.between(client, window, window + 1) / weight
    since = totals.between(client, np.zeros_like(window), window + 1) / weight
    several = np.bincount(window, minlength=count)
    sums = np.bincount(window, got, count)
    squares = np.bincount(window, got * got, count)
    alike = squares == 0  # nobody got anything
    jain = np.where(alike, 1.0, sums * sums / np.where(alike, 1.0, squares * several))
    contended = several > 1
    measured = {
        "jain_index": jain,
        "window_difference": _spread(window, got, count),
        "service_difference": _spread(window, since, count),
    }
    columns: dict[str, Floats | Ints] = {
        "start": edges[:-1],
        "end": edges[1:],
        "backlogged": several,
    }
    return columns | {
        name: np.where(contended, values, np.nan) for name, values in measured.items()
    }


def _spread(window: Ints, values: Floats, count: int) -> Floats:
    """Return the greatest less the least value in each window."""
    most, least = np.full(count, -np.inf), np.full(count, np.inf)
    np.maximum.at(most, window, values)
    np.minimum.at(least, window, values)
    with np.errstate(invalid="ignore"):
        spread: Floats = most - least
    return spread


class Periods(NamedTuple):
    """Stretches of time, s."""

    clients: Ints  # whose each is
    begin: Floats
    end: Floats


def backlogged_periods(clients: Clients) -> Periods:
    """List the stretches of time in all of which a client has a request waiting.

    A request waits from when it is sent (of several tries the last) until its first admission, or
    the end of the run.
    """
    table, (_, end) = clients.table, clients.span
    here = np.flatnonzero((table.replica >= 0) & (table.reason != REJECTED))
    begin = table.entered[here]
    stop = np.where(np.isnan(table.first_scheduled[here]), end, table.first_scheduled[here])
    # Times as ranks: clients are told apart in whole numbers, nothing is rounded.
    times, ranks = np.unique(np.concatenate([begin, stop]), return_inverse=True)
    size = len(times)
    base = clients.codes[here] * size
    begins, stops = base + ranks[: len(here)], base + ranks[len(here) :]
    order = np.argsort(begins, kind="stable")
    begins, upto = begins[order], np.maximum.accumulate(stops[order])
    new = np.ones(len(begins), bool)
    new[1:] = begins[1:] > upto[:-1]
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(begins)) - 1
    begins, stops = begins[first], upto[last[: len(first)]]
    size = max(size, 1)
    return Periods(begins // size, times[begins % size], times[stops % size])


def _backlogged(clients: Clients, edges: Floats) -> tuple[Ints, Ints]:
    """List the pairs of a client and a window in all of which it has a request waiting."""
    codes, begin, stop = backlogged_periods(clients)
    opens = np.searchsorted(edges, begin, "left")
    closes = np.searchsorted(edges, stop, "right") - 1
    return expand_ranges(codes, opens, closes)


def expand_ranges(labels: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Spell out ranges from `first` to before `last`, each with its label."""
    lengths = np.maximum(last - first, 0)
    ends = np.cumsum(lengths)
    inside = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    return np.repeat(labels, lengths), np.repeat(first, lengths) + inside


def _events(clients: Clients, edges: Floats) -> tuple[Ints, Ints, Ints]:
    """List all service: the client, the window, how much. Windows begin with their edge."""
    table = clients.table
    count = len(edges) - 1
    admitted = np.flatnonzero(~np.isnan(table.first_scheduled))
    codes = [clients.codes[admitted]]
    windows = [np.searchsorted(edges, table.first_scheduled[admitted], "right") - 1]
    amounts = [INPUT_WEIGHT * table.workload.prompt_tokens[admitted]]
    for log in clients.logs:
        runs = log.runs
        owners = clients.codes[runs["id"]]
        codes.append(owners)
        windows.append(np.searchsorted(edges, runs["start"], "right") - 1)
        amounts.append(np.full(len(runs), OUTPUT_WEIGHT))
        ticks = log.column("tick_ends")
        marks = np.searchsorted(ticks, edges, "left")
        marks[-1] = len(ticks)
        begin, stop = runs["first_tick"], runs["first_tick"] + runs["ticks"]
        opens = np.searchsorted(marks, begin, "right") - 1
        closes = np.where(runs["ticks"] > 0, np.searchsorted(marks, stop, "left"), opens)
        row, window = expand_ranges(np.arange(len(runs)), opens, closes)
        ticks = np.minimum(stop[row], marks[window + 1]) - np.maximum(begin[row], marks[window])
        codes.append(owners[row])
        windows.append(window)
        amounts.append(OUTPUT_WEIGHT * ticks)
    window = np.minimum(np.concatenate(windows), count - 1)
    return np.concatenate(codes), window, np.concatenate(amounts)


class _Totals:
    """Service by client and window, to be asked for any stretch of windows."""

    def __init__(self, client: Ints, window: Ints, amount: Ints, count: int) -> None:
        self._count = count
        keys, place = np.unique(client * count + window, return_inverse=True)
        sums = np.zeros(len(keys), np.int64)
        np.add.at(sums, place, amount)
        self._keys = keys
        self._upto = np.append(0, np.cumsum(sums))

    def between(self, client: Ints, first: Ints, last: Ints) -> Floats:
        """Return what each client got from window `first` to before window `last`."""
        base = client * self._count
        places = np.searchsorted(self._keys, np.stack((base + first, base + last)), "left")
        got: Floats = (self._upto[places[1]] - self._upto[places[0]]).astype(np.float64)
        return got


def summarize_clients(clients: Clients) -> dict[str, object]:
    """Return the keys of the summary; null where no two clients ever were backlogged together."""
    windows = fairness_columns(clients)
    contended = windows["backlogged"] > 1
    jain, difference = (windows[name][contended] for name in ("jain_index", "service_difference"))
    some = bool(contended.any())
    return {
        "clients": len(clients.words.names),
        "fairness_windows": len(contended),
        "contended_share": float(contended.mean()),
        "jain_index": float(jain.mean()) if some else None,
        "jain_index_min": float(jain.min()) if some else None,
        "service_difference_mean": float(difference.mean()) if some else None,
        "service_difference_max": float(difference.max()) if some else None,
    }


def priority_column(workload: Workload) -> Words:
    """Return each request's priority as a word, the most urgent first; all -1: none is said."""
    if workload.priority is None:
        return Words(np.full(len(workload), -1), [])
    found, codes = np.unique(workload.priority, return_inverse=True)
    return Words(codes, [str(one) for one in found.tolist()])


def summarize_parts(
    table: RequestTable, counted: Flags, words: Words, bounds: Mapping[str, Bound]
) -> dict[str, dict[str, object]]:
    """Return what the requests of each client, or of each priority, felt, by its name.

    It is of the PARTS that have the most requests, in that order. Latencies (ms) are those of the
    completed ones among the `counted`; null where there are none. `bounds` (ms) are what each
    request is held against.
    """
    codes, size = words.codes, len(words.names)
    ended = counted & (table.reason >= 0)
    done = counted & table.completed
    counts = np.bincount(codes[counted], minlength=size)
    columns: dict[str, Column] = {
        "requests": counts,
        "completed": np.bincount(codes[done], minlength=size),
        "output_tokens": np.bincount(codes[done], table.generated[done], size).astype(np.int64),
    }
    if bounds:
        kept = np.bincount(codes[keep_bounds(table, done, bounds)], minlength=size)
        whole = np.bincount(codes[ended], minlength=size)
        columns["slo_attainment"] = np.where(whole > 0, kept / np.maximum(whole, 1), np.nan)
    for name in PART_LATENCIES:
        values: Floats = getattr(table, name)
        known = done & ~np.isnan(values)
        if name == "tpot":
            known &= table.generated > 1
        told = _statistics(name, codes[known], values[known], size)
        columns |= {f"{key}_ms": 1000.0 * np.asarray(column) for key, column in told.items()}
    order = np.argsort(-counts, kind="stable")[:PARTS]
    lists = {key: np.asarray(column)[order].tolist() for key, column in columns.items()}
    return {
        words.names[code]: {
            key: None if np.isnan(values[place]) else values[place] for key, values in lists.items()
        }
        for place, code in enumerate(order.tolist())
    }


def parts_of(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return a summary's blocks of clients and priorities, unless these are the clients again."""
    own = summary["headway"]
    found = {block: parts for block in ("per_client", "per_priority") if (parts := own.get(block))}
    if len(found) > 1:
        clients, priorities = found.values()
        if all(one in clients.values() for one in priorities.values()):
            del found["per_priority"]
    return found


def client_columns(clients: Clients) -> dict[str, Column]:
    """Get the columns of clients.csv, a row for each client, in order of their first requests."""
    table, codes = clients.table, clients.codes
    size = len(clients.words.names)
    admitted = ~np.isnan(table.first_scheduled)
    prompts = np.bincount(codes, table.workload.prompt_tokens * admitted, size).astype(np.int64)
    outputs = np.bincount(codes, table.generated, size).astype(np.int64)
    done = table.completed
    columns: dict[str, Column] = {
        "client": Words(np.arange(size), clients.words.names),
        "weight": clients.weights,
        "requests": np.bincount(codes, minlength=size),
        "completed": np.bincount(codes[done], minlength=size),
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "service": (INPUT_WEIGHT * prompts + OUTPUT_WEIGHT * outputs) / clients.weights,
        "preemptions": np.bincount(codes, table.preemptions, size).astype(np.int64),
    }
    for name in ("queue_time", "ttft", "tpot", "e2el"):
        values: Floats = getattr(table, name)
        known = done & ~np.isnan(values)
        columns |= _statistics(name, codes[known], values[known], size)
    return columns


def _statistics(name: str, codes: Ints, values: Floats, size: int) -> dict[str, Column]:
    """Return mean and P99 (linear, as numpy's) of each client's values; NaN where it has none."""
    counts = np.bincount(codes, minlength=size)
    some = counts > 0
    divisor = np.where(some, counts, 1)
    mean = np.where(some, np.bincount(codes, values, size) / divisor, np.nan)
    ordered = np.append(values[np.lexsort((values, codes))], 0.0)
    place = (divisor - 1) * 0.99
    below = np.floor(place).astype(np.int64)
    first = np.cumsum(counts) - counts
    low = ordered[np.minimum(first + below, len(values))]
    high = ordered[np.minimum(first + np.minimum(below + 1, divisor - 1), len(values))]
    p99 = np.where(some, low + (high - low) * (place - below), np.nan)
    return {f"mean_{name}": mean, f"p99_{name}": p99}
