"""Parts of a workload, taken in this order: window, skip, repeat, limit, rate, lengths.

Turns of a session go with their predecessor: one whose predecessor is left out is left out too,
since its prompt would hold an answer that nobody gave.
"""

import warnings
from collections.abc import Hashable
from dataclasses import replace
from math import ceil, inf
from typing import TypeGuard

import numpy as np

from simulator.core.request import Segments
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.workload import MAX_KEPT_REQUESTS, Floats, Ints, Workload


def session_starts(workload: Workload) -> Floats:
    """Return each request's arrival, and to the turns of a session that of its first."""
    times = workload.arrival.copy()
    if workload.after is not None:
        for i in np.flatnonzero(workload.after >= 0).tolist():
            times[i] = times[workload.after[i]]
    return times


def select(
    workload: Workload,
    *,
    start_s: float | None = None,
    end_s: float | None = None,
    skip: int = 0,
    limit: int | None = None,
    rate_scale: float = 1.0,
    repeat: int = 1,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
) -> Workload:
    """Take a part of a workload; the first arrival that is left is moved to 0.

    Args:
        workload: where to take it from; stays as it is.
        start_s: keep what arrives at this time of the trace or later; turns as their first one.
        end_s: keep what arrives before this time.
        skip: leave out so many requests, the first ones.
        repeat: play the rest so often, each time one mean gap after the last arrival. The prompts
            stay the same, for a prefix cache to find as in a real replay; the outputs are new.
        limit: keep so many requests, the first ones of all repetitions.
        rate_scale: 2 lets requests arrive twice as fast; think times stay as they are.
        max_input_len: leave out longer prompts, with a warning that counts them.
        max_output_len: leave out longer outputs, likewise; nothing is shortened.

    Raises:
        HeadwayError: for impossible values, or if nothing or too much is left.
    """
    lengths = {"max_input_len": max_input_len, "max_output_len": max_output_len}
    check_selection({"skip": skip, "limit": limit, "repeat": repeat, **lengths}, rate_scale)
    times = session_starts(workload)
    begun = times >= (-inf if start_s is None else start_s)
    ended = times >= (inf if end_s is None else end_s)
    part = _repeat(take(workload, np.flatnonzero(begun & ~ended)[skip:]), repeat, limit)
    if limit is not None and limit < len(part):
        part = take(part, np.arange(limit))
    part = _drop_long(part, max_input_len, max_output_len)
    if not len(part):
        raise HeadwayError(f"{workload.source or 'workload'}: no request is left after selecting")
    return replace(part, arrival=(part.arrival - np.nanmin(part.arrival)) / rate_scale)


def check_selection(counts: dict[str, int | None], rate_scale: float) -> None:
    """Raise HeadwayError with all options that cannot be."""
    wrong = []
    for name, value in counts.items():
        least = 0 if name == "skip" else 1
        if value is not None and value < least:
            wrong.append(f"{name}: {value} is not {least} or more")
    if not 0 < rate_scale < inf:
        wrong.append(f"rate_scale: {rate_scale} is not above 0")
    if wrong:
        raise HeadwayError(wrong)


def take(workload: Workload, rows: Ints) -> Workload:
    """Get the requests `rows`, in that order, with their links; a turn comes after the one before.

    Turns whose predecessor is not among them are left out, with a warning that counts them.
    """
    wanted, after = len(rows), workload.after
    if np.array_equal(rows, np.arange(len(workload))):
        return workload
    while True:
        place = np.full(len(workload) + 1, -1)  # one more, for the -1 of no predecessor
        place[rows] = np.arange(len(rows))
        if after is None or not (orphan := (after[rows] >= 0) & (place[after[rows]] < 0)).any():
            break
        rows = rows[~orphan]
    if len(rows) < wanted:
        text = f"{wanted - len(rows)} turns of sessions are left out with the turn before them"
        warnings.warn(text, HeadwayWarning, stacklevel=3)
    part = workload.rows(rows)
    if part.segments:
        part.segments = renumbered(part.segments, place)
    if part.after is not None:
        part.after = np.where(part.after < 0, -1, place[part.after])
    return part


def renumbered(segments: list[Segments | None], place: Ints) -> list[Segments | None]:
    """Let ("out", i), what request i generates, follow request i to its new place.

    What a request that is left out would have generated keeps a name of its own.
    """

    def name(old: Hashable) -> Hashable:
        if not _is_output(old):
            return old
        new = int(place[old[1]])
        return ("out", new) if new >= 0 else ("gone", old[1])

    return [
        tuple([(name(old), count) for old, count in parts])
        if parts and any(_is_output(old) for old, _ in parts)
        else parts
        for parts in segments
    ]


def _is_output(name: Hashable) -> TypeGuard[tuple[str, int]]:
    return isinstance(name, tuple) and len(name) == 2 and name[0] == "out"


def _repeat(workload: Workload, times: int, limit: int | None) -> Workload:
    """Play a workload so many times end to end, but not more often than `limit` requests need."""
    n = len(workload)
    if limit is not None and n:
        times = min(times, ceil(limit / n))
    if times == 1 or not n:
        return workload
    if times * n > MAX_KEPT_REQUESTS:
        raise HeadwayError(
            f"repeat: {times} times {n:,} requests are more than {MAX_KEPT_REQUESTS:,}; "
            "give a limit"
        )
    known = workload.arrival[~np.isnan(workload.arrival)]
    gaps = max(len(known) - 1, 1)
    period = (known[-1] - known[0]) * (1 + 1 / gaps)
    turn = np.repeat(np.arange(times), n)
    played = workload.rows(np.tile(np.arange(n), times))
    played.arrival += turn * period
    if played.after is not None:
        played.after = np.where(played.after < 0, -1, played.after + turn * n)
    if workload.segments:
        places = (np.arange(n + 1) + k * n for k in range(times))
        played.segments = [p for place in places for p in renumbered(workload.segments, place)]
    return played


def _drop_long(workload: Workload, longest_in: int | None, longest_out: int | None) -> Workload:
    """Leave out the requests that are longer than allowed, with a warning that counts them."""
    fine = np.ones(len(workload), dtype=bool)
    for name, lengths, longest in (
        ("max_input_len", workload.prompt_tokens, longest_in),
        ("max_output_len", workload.output_tokens, longest_out),
    ):
        long = np.zeros(len(workload), dtype=bool) if longest is None else lengths > longest
        fine &= ~long
        if long.any():
            text = f"{name}: {long.sum()} of {len(workload)} requests are longer than {longest} "
            warnings.warn(f"{text}tokens and are left out", HeadwayWarning, stacklevel=3)
    return workload if fine.all() else take(workload, np.flatnonzero(fine))
