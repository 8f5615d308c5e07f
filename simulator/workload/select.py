"""Parts of a workload, taken in this order: window, skip, repeat, limit, rate, lengths.

Turns of a session go with their predecessor: one whose predecessor is left out is left out too,
since its prompt would hold an answer that nobody gave.
"""

import warnings
from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any, TypeGuard

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


SAME_PROMPTS = "repeat: prompts with contents come again, and a prefix cache finds them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which part of a workload is taken; HeadwayError for impossible values.

    Each time that a trace is repeated begins one mean gap after the last arrival. Its prompts stay
    the same, for a prefix cache to find as in a real replay; the outputs are new.
    """

    start_s: float | None = None  # of the trace, when or after which is kept; turns as their first
    end_s: float | None = None  # before which is kept
    skip: int = 0  # requests left out, the first ones
    limit: int | None = None  # requests kept, the first ones of all repetitions
    rate_scale: float = 1.0  # 2: requests arrive twice as fast; think times stay as they are
    repeat: int = 1
    max_input_len: int | None = None  # tokens; longer prompts are left out, with a warning
    max_output_len: int | None = None  # likewise; nothing is shortened

    def __post_init__(self) -> None:
        wrong = []
        for name in ("skip", "limit", "repeat", "max_input_len", "max_output_len"):
            value, least = getattr(self, name), 0 if name == "skip" else 1
            if value is not None and value < least:
                wrong.append(f"{name}: {value} is not {least} or more")
        if not 0 < self.rate_scale < inf:
            wrong.append(f"rate_scale: {self.rate_scale} is not above 0")
        if wrong:
            raise HeadwayError(wrong)

    @property
    def window(self) -> tuple[float, float]:
        """From when on, and before when, requests are kept, s."""
        start, end = self.start_s, self.end_s
        return -inf if start is None else start, inf if end is None else end


def select(workload: Workload, **part: Any) -> Workload:
    """Take the part of a workload that a `Selection` of these names says; it stays as it is.

    The first arrival that is left is moved to 0. HeadwayError if nothing or too much is left.
    """
    chosen, times = Selection(**part), session_starts(workload)
    low, high = chosen.window
    rows = np.flatnonzero((times >= low) & ~(times >= high))[chosen.skip :]
    found = _repeat(take(workload, rows), chosen.repeat, chosen.limit)
    if chosen.limit is not None and chosen.limit < len(found):
        found = take(found, np.arange(chosen.limit))
    found = _drop_long(found, chosen.max_input_len, chosen.max_output_len)
    if not len(found):
        raise HeadwayError(f"{workload.source or 'workload'}: no request is left after selecting")
    return replace(found, arrival=(found.arrival - np.nanmin(found.arrival)) / chosen.rate_scale)


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
        warnings.warn(f"{SAME_PROMPTS}: {times - 1} times", HeadwayWarning, stacklevel=3)
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
