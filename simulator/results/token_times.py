"""When tokens came out: how many in a second, and the gaps between those of a request.

The gaps of all requests are one pool (inter-token latency, ITL), without a list of them. Between
two ticks every request in the decode set has the same gap, so the pool is one value per tick,
weighted by how many requests it belongs to, and a few gaps that are one request's own: from a
prefill to the first tick after it, and over a preemption.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, floor, fsum, inf, sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.core.log import Log
from simulator.results.request_table import Flags, Floats, Ints, RequestTable

Counts = npt.NDArray[np.int32]

SLICE = 1 << 18  # ticks looked at together: bounds the temporaries
BIN_BITS = 14
BINS = 1 << BIN_BITS


class Gaps(NamedTuple):
    """Times between successive tokens of requests."""

    lengths: Floats  # s
    counts: Counts  # how often each occurs
    ends: Floats  # when each has ended, s


class TokenTimes:
    """When the tokens of one replica's completed requests came out."""

    def __init__(self, log: Log, completed: Flags) -> None:
        """Count, at each tick, the completed requests (a flag by id) that take part in it."""
        runs = log.runs
        wanted = completed[runs["id"]]
        if not wanted.all():
            runs = runs[wanted]
        self._log, ends = log, log.column("tick_ends")
        self.starts: Floats = runs["start"]
        longer = runs["ticks"] > 0
        first = runs["first_tick"][longer]
        last, began = self._gaps_between(runs, ends)
        self.request_gap_ends: Floats = np.concatenate((ends[first], began))
        self.request_gaps: Floats = np.concatenate((self.starts[longer], last))
        np.subtract(self.request_gap_ends, self.request_gaps, out=self.request_gaps)
        del ends  # of a long run 50 MB and more
        self._begun, self.tokens = _count_members(
            first, first + runs["ticks"][longer], log.size("tick_ends") + 1
        )

    def _gaps_between(self, runs: npt.NDArray[np.void], ends: Floats) -> tuple[Floats, Floats]:
        """Get when the gaps between a request's runs begin, by its last token, and end."""
        ids = runs["id"]
        if not len(ids):
            return np.empty(0), np.empty(0)
        again = runs[np.bincount(ids)[ids] > 1]
        again = again[np.argsort(again["id"], kind="stable")]
        same = again["id"][1:] == again["id"][:-1]
        began: Floats = again["start"][1:][same]
        return last_tokens(again, ends)[:-1][same], began

    def per_second(self, start: float, seconds: int) -> Ints:
        """Count the tokens in each of `seconds` one-second buckets from `start` on."""
        buckets = np.bincount((self.starts - start).astype(np.int64), minlength=seconds)
        edges = np.searchsorted(self._log.column("tick_ends"), start + np.arange(seconds + 1))
        full = np.flatnonzero(edges[:-1] < edges[1:])
        if len(full):
            upto = int(edges[full[-1] + 1])
            sums = np.add.reduceat(self.tokens[:upto], edges[full], dtype=np.int64)
            buckets[full] += sums
        return buckets

    def gap_slices(self) -> Iterator[Gaps]:
        """Yield the gaps between ticks, some at a time."""
        count = self._log.size("tick_ends")
        for at in range(1, count, SLICE):
            stop = min(at + SLICE, count)
            weights = self.tokens[at:stop].astype(np.int32) - self._begun[at:stop]
            used = np.flatnonzero(weights)
            ends = self._log.column("tick_ends", at - 1, stop)
            yield Gaps(np.diff(ends)[used], weights[used], ends[1:][used])


def _count_members(first: Ints, over: Ints, ticks: int) -> tuple[Counts, Counts]:
    """Count who comes into the decode set with each tick, and who takes part in it.

    The gap of who comes reaches back to a prefill. With the last tick nobody is left.
    """
    begun = np.zeros(ticks, np.int32)
    np.add.at(begun, first, 1)
    tokens = begun.copy()
    np.subtract.at(tokens, over, 1)
    np.cumsum(tokens, out=tokens)
    kind = np.min_scalar_type(tokens.max())  # they stay until all is measured
    return begun.astype(kind), tokens.astype(kind)


class TokensTogether:
    """When the tokens of one replica's completed requests were given: each answer at once."""

    def __init__(self, log: Log, completed: Flags) -> None:
        rows = log.requests[completed[log.requests["id"]]]
        self._given: Floats = rows["finish"]
        self._tokens: Counts = rows["generated"]
        self.request_gaps: Floats = np.empty(0)
        self.request_gap_ends: Floats = np.empty(0)

    def per_second(self, start: float, seconds: int) -> Ints:
        """Count the tokens in each of `seconds` one-second buckets from `start` on."""
        buckets = np.zeros(seconds, np.int64)
        np.add.at(buckets, (self._given - start).astype(np.int64), self._tokens)
        return buckets

    def gap_slices(self) -> Iterator[Gaps]:
        """Yield the gaps, all of them 0, by the times at which the answers were given."""
        yield Gaps(np.zeros(len(self._given)), self._tokens - 1, self._given)


def token_times(log: Log, completed: Flags) -> TokenTimes | TokensTogether:
    """Return when the tokens of one replica's completed requests (a flag by id) were given."""
    return (TokensTogether if log.delivers_together else TokenTimes)(log, completed)


def last_tokens(runs: npt.NDArray[np.void], tick_ends: Floats) -> Floats:
    """Return the time of each run's last token."""
    last: Floats = runs["start"].copy()
    longer = runs["ticks"] > 0
    last[longer] = tick_ends[(runs["first_tick"] + runs["ticks"] - 1)[longer]]
    return last


class PeakRate:
    """The most tokens in a second; of parts of a run what is over is only that maximum."""

    SUMS = ("_most", "_tokens")

    def __init__(self, origin: float | None = None) -> None:
        """Count from `origin` on, s, and keep every second: to be added to others of the run."""
        self._most = 0
        self._keeps = origin is not None
        self._origin = origin  # None: when the first completed request was sent
        self._first = 0  # second after it that `_tokens` begins with
        self._tokens = np.zeros(0, np.int64)

    def add(self, table: RequestTable, times: Sequence[TokenTimes | TokensTogether]) -> None:
        """Add the tokens of completed requests."""
        done = table.completed
        if not done.any():
            return
        begin = float(table.sent[done].min())
        self._origin = begin if self._origin is None else self._origin
        first = floor(begin - self._origin)
        if (early := self._first - first) > 0:
            self._tokens, self._first = np.append(np.zeros(early, np.int64), self._tokens), first
        start, at = self._origin + first, first - self._first
        size = ceil(float(table.finish[done].max()) - start) + 1
        counts = np.zeros(max(at + size, len(self._tokens)), np.int64)
        counts[: len(self._tokens)] = self._tokens
        for time in times:
            counts[at : at + size] += time.per_second(start, size)[:size]
        self._tokens = counts

    def forget(self, before: float) -> None:
        """Keep but the maximum of the seconds before a time, s: requests to come are sent later."""
        if self._keeps or self._origin is None:
            return
        over = len(self._tokens)
        if before < inf:
            over = min(floor(before - self._origin) - self._first, over)
        if over > 0:
            self._most = max(self._most, int(self._tokens[:over].max()))
            self._tokens, self._first = self._tokens[over:], self._first + over

    @property
    def most(self) -> int:
        """The most tokens in a second."""
        return max(self._most, int(self._tokens.max(initial=0)))


class GapDistribution:
    """The inter-token gaps of all replicas as a weighted multiset, with exact statistics.

    Percentiles are found by bins: to sort five million gaps takes 4 times as long (1.2 s) and
    150 MB more, and numpy's percentiles would need each gap as often as it occurs.
    """

    def __init__(self, times: Sequence[TokenTimes | TokensTogether]) -> None:
        self._times = times
        count, sums, least, low, high = 0, list[float](), np.inf, np.inf, 0.0
        for values, weights in self._slices():
            count += int(weights.sum(dtype=np.int64))
            sums.append(float((values * weights).sum()))
            least = min(least, float(values.min(initial=np.inf)))
            low = min(low, float(values.min(initial=np.inf, where=values > 0.0)))
            high = max(high, float(values.max(initial=0.0)))
        self.count = count
        self.mean = fsum(sums) / count if count else 0.0
        self.range = (least, high) if count else (0.0, 0.0)
        self._low, self._high = min(low, high), high  # of the gaps above 0

    def _slices(self) -> Iterator[tuple[Floats, Counts]]:
        for times in self._times:
            yield from ((gaps.lengths, gaps.counts) for gaps in times.gap_slices())
            if len(times.request_gaps):
                yield times.request_gaps, np.ones(len(times.request_gaps), np.int32)

    def _merged_slices(self) -> Iterator[tuple[Floats, Counts]]:
        """Yield the same, of many replicas together where each has few gaps."""
        held, size = list[tuple[Floats, Counts]](), 0
        for one in self._slices():
            if held and size + len(one[0]) > SLICE:
                yield _joined(held)
                held, size = [], 0
            held.append(one)
            size += len(one[0])
        if held:
            yield _joined(held)

    def _bin(self, values: Floats) -> Ints:
        """Number the bin of each value; bins ascend with the values.

        A positive float's bits, read as an integer, ascend with it, about as its logarithm
        does: so a gap of minutes among milliseconds does not crowd the others into one bin.
        """
        low, high = np.array([self._low, self._high]).view(np.int64)
        shift = max(int(high - low).bit_length() - BIN_BITS, 0)
        bins: Ints = np.maximum((values.view(np.int64) - low) >> shift, 0)
        return bins

    @property
    def std(self) -> float:
        """The population's standard deviation, as numpy does."""
        squares = [float(((v - self.mean) ** 2 * w).sum()) for v, w in self._slices()]
        return sqrt(fsum(squares) / self.count) if self.count else 0.0

    def percentiles(self, wanted: Sequence[float]) -> list[float]:
        """Get numpy's (linear) percentiles of the pool with every gap listed; 0 if it is empty."""
        if not self.count:
            return [0.0] * len(wanted)
        position = (self.count - 1) * (np.asarray(wanted, np.float64) / 100.0)
        below = np.floor(position).astype(np.int64)
        above = np.minimum(below + 1, self.count - 1)
        low, high = np.split(self._ranked(np.concatenate((below, above))), 2)
        part = position - below
        step = high - low  # written as numpy does it, for the same last bit
        values = np.where(part >= 0.5, high - step * (1.0 - part), low + step * part)
        return [float(value) for value in values]

    def _ranked(self, ranks: Ints) -> Floats:
        """Return the gaps of these ranks, smallest 0: count by bins, then sort the bins met."""
        counts = np.zeros(BINS)
        for values, weights in self._merged_slices():
            counts += np.bincount(self._bin(values), weights, BINS)
        wanted = np.zeros(BINS, bool)
        bins = np.searchsorted(np.cumsum(counts), ranks, side="right")
        wanted[bins] = True
        kept = [(v[m], w[m]) for v, w in self._merged_slices() for m in (wanted[self._bin(v)],)]
        values = np.concatenate([v for v, _ in kept])
        weights = np.concatenate([w for _, w in kept])
        order = np.argsort(values)
        upto = np.cumsum(weights[order], dtype=np.int64)
        skipped = np.cumsum(np.where(wanted, 0.0, counts)).astype(np.int64)
        ranked: Floats = values[order][np.searchsorted(upto, ranks - skipped[bins], side="right")]
        return ranked


def _joined(slices: Sequence[tuple[Floats, Counts]]) -> tuple[Floats, Counts]:
    return np.concatenate([v for v, _ in slices]), np.concatenate([w for _, w in slices])


def lacks_gaps(summary: Mapping[str, Any], key: str) -> bool:
    """Say whether a metric is of the gaps between tokens, and those of each answer come together.

    Such TPOT and ITL are 0 in a summary, as are those of answers of one token, and mean nothing.
    """
    return ("_tpot_" in key or "_itl_" in key) and summary.get("mean_itl_ms") == 0
