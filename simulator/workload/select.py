"""Parts of a workload, taken in this order: window, skip, repeat, limit, rate, lengths.

Also of one whose requests come some at a time, without sessions.

Turns of a session go with their predecessor: one whose predecessor is left out is left out too,
since its prompt would hold an answer that nobody gave.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from math import ceil, inf, nan
from typing import Annotated, Any, TypeGuard

import numpy as np

from simulator.core.request import Segments
from simulator.util.config import Config, Count, NonNegativeFloat, PositiveFloat, WholeNumber
from simulator.util.errors import HeadwayError, MappingError, warn
from simulator.util.from_mapping import Field
from simulator.workload.workload import COLUMNS, MAX_KEPT_REQUESTS, Floats, Ints, Workload


def session_starts(workload: Workload) -> Floats:
    """Return each request's arrival, and to the turns of a session that of its first."""
    times = workload.arrival.copy()
    if workload.after is not None:
        for i in np.flatnonzero(workload.after >= 0).tolist():
            times[i] = times[workload.after[i]]
    return times


UNTOLD: dict[str, Any] = {"cancel_after": nan, "client": "", "segments": None}
"""What a workload says of a request where others say more."""
Read = Callable[[], Iterator[Workload]]
SAME_PROMPTS = "repeat: prompts with contents come again, and a prefix cache finds them"


class Selection(Config):
    """Which part of a workload is taken.

    Each time that a trace is repeated begins one mean gap after the last arrival. Its prompts stay
    the same, for a prefix cache to find as in a real replay; the outputs are new. A window takes
    the turns of a session by when it begins; think times are the same at any rate.
    """

    start_s: NonNegativeFloat | None = Field(None, description="s; earlier requests are left out")
    end_s: PositiveFloat | None = Field(None, description="s; requests from then on are left out")
    skip: WholeNumber = Field(0, description="requests to leave out at the start")
    limit: Count | None = Field(None, description="requests to play, at most")
    rate_scale: PositiveFloat = Field(1.0, description="factor of rates; 2: twice as fast")
    repeat: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        1, description="how often to play it, end to end, with the same prompts"
    )
    max_input_len: Count | None = Field(None, description="leave out longer prompts, tokens")
    max_output_len: Count | None = Field(None, description="leave out longer answers, tokens")

    def _check(self) -> None:
        if self.end_s is not None and self.end_s <= (self.start_s or 0):
            raise MappingError("end_s", f"must be more than start_s ({self.start_s or 0})")

    @property
    def window(self) -> tuple[float, float]:
        """From when on, and before when, requests are kept, s."""
        start, end = self.start_s, self.end_s
        return -inf if start is None else start, inf if end is None else end


def select(workload: Workload, chosen: Selection) -> Workload:
    """Take a part of a workload, which stays as it is.

    The first arrival that is left is moved to 0. HeadwayError if nothing or too much is left.
    """
    times, (low, high) = session_starts(workload), chosen.window
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
        warn(f"{wanted - len(rows)} turns of sessions are left out with the turn before them")
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
        if not is_output(old):
            return old
        new = int(place[old[1]])
        return ("out", new) if new >= 0 else ("gone", old[1])

    return [
        tuple([(name(old), count) for old, count in parts])
        if parts and any(is_output(old) for old, _ in parts)
        else parts
        for parts in segments
    ]


def is_output(name: Hashable) -> TypeGuard[tuple[str, int]]:
    """Return whether a run of a prompt is the answer to a request."""
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
        warn(f"{SAME_PROMPTS}: {times - 1} times")
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
            warn(f"{text}tokens and are left out")
    return workload if fine.all() else take(workload, np.flatnonzero(fine))


def join(parts: Sequence[Workload]) -> Workload:
    """Put workloads one after the other; what one of them does not say is filled in."""
    if len(parts) == 1:
        return parts[0]
    whole = replace(parts[0])
    for name in COLUMNS:
        columns = [getattr(part, name) for part in parts]
        if all(column is None for column in columns):
            continue
        for k, part in enumerate(parts):
            if columns[k] is None:
                columns[k] = [UNTOLD.get(name, 0)] * len(part)
        lists = name in ("client", "segments", "model")
        setattr(whole, name, [*chain(*columns)] if lists else np.concatenate(columns))
    return whole


def select_pieces(read: Read, chosen: Selection) -> Iterator[Workload]:
    """Take a part of what `read` gives, as `select` does, some requests at a time."""
    low, high = chosen.window
    longest_in, longest_out = chosen.max_input_len or inf, chosen.max_output_len or inf
    left, base, period, long = chosen.limit or inf, None, 0.0, 0
    again = 0
    for turn in range(chosen.repeat):
        first, last, count = None, 0.0, 0
        for work in read():
            if left <= 0 or work.arrival[0] >= high:
                break
            within = np.flatnonzero((work.arrival >= low) & (work.arrival < high))
            rows = within[max(chosen.skip - count, 0) :]
            count += len(within)
            if not len(rows):
                continue
            times = work.arrival[rows]
            again = turn if work.segments else again
            first, last = float(times[0]) if first is None else first, float(times[-1])
            rows = rows[: int(min(left, len(rows)))]
            left -= len(rows)
            found = work.rows(rows)
            fine = (found.prompt_tokens <= longest_in) & (found.output_tokens <= longest_out)
            long += int((~fine).sum())
            found = found.rows(np.flatnonzero(fine))
            if len(found):
                moved = found.arrival + turn * period
                base = moved[0] if base is None else base
                yield replace(found, arrival=(moved - base) / chosen.rate_scale)
        if first is not None:
            period = (last - first) * (1 + 1 / max(count - chosen.skip - 1, 1))
    if again:
        warn(f"{SAME_PROMPTS}: {again} times")
    if long:
        warn(f"max_input_len, max_output_len: longer requests, which are left out: {long}")


def rechunk(parts: Iterator[Workload], size: int) -> Iterator[Workload]:
    """Yield the same requests `size` at a time; the last are fewer."""
    held: list[Workload] = []
    for part in parts:
        held.append(part)
        if sum(map(len, held)) >= size:
            whole = join(held)
            ends = [*range(0, len(whole) + 1, size), len(whole)]
            *full, rest = [whole.rows(np.arange(*two)) for two in pairwise(ends)]
            yield from full
            held = [rest]
    if any(map(len, held)):
        yield join(held)
