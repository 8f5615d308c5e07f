"""Distributions of lengths and of think times, as a scenario writes them.

Each but `Cycle` is an inverse cumulative distribution, so that one uniform number in [0, 1) makes
one value, and another distribution changes nothing else. Lengths are rounded to the nearest whole
token. Bounds keep what lies between them, as if everything else were drawn again: nothing piles up
there.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf, log
from typing import Annotated, Literal, Protocol, get_args

import numpy as np

from simulator.util.config import NonNegativeFinite, NonNegativeFloat, PositiveFinite, Share
from simulator.util.errors import MappingError
from simulator.util.from_mapping import (
    Check,
    Field,
    from_kind,
    parse_number,
    raise_if,
    read,
    short_repr,
)
from simulator.workload.workload import Floats, Ints, Workload

TraceReader = Callable[[str, str | None], Workload]
"""Read the trace at a path, in a format or (None) in the one that it appears to have."""

Spec = float | Mapping[str, object]
"""A number, or a mapping with `kind` and the fields of that kind."""

TOKENS, SECONDS = 0.5, 0.0  # how far beyond a bound a value may lie and still round to it
MAX_TOKENS = 2**31  # tokens: a longer request is a mistake


class Distribution(Protocol):
    """Turns uniform numbers into values, one into one."""

    def quantile(self, u: Floats, edge: float, load: TraceReader | None) -> Floats:
        """Return the values at cumulative probabilities `u`, the bounds widened by `edge`."""


Weight = Annotated[float, Field(ge=0, le=1e100)]
"""Of what is drawn in proportion to it: the sum of many is finite."""


def check_weights(name: str, weights: Iterable[float] | None) -> Check:
    """Check for `raise_if` that something can be drawn by weights, where there are some."""
    return weights is not None and not any(weights), name, "must have a weight above 0"


@dataclass(slots=True, kw_only=True, eq=False)
class Bounded:
    """Between `low` and `high`, where they are given."""

    low: NonNegativeFinite | None = None  # None: the least there is, 1 token or 0 s
    high: NonNegativeFloat | None = None  # None: there is none

    def __post_init__(self) -> None:
        wrong = self.low is not None and self.high is not None and self.low > self.high
        raise_if((wrong, "low", f"{self.low} is more than high, {self.high}"))

    def _bounds(self, edge: float) -> tuple[float, float]:
        """Return the bounds of the values that round to what is allowed."""
        low = 2 * edge if self.low is None else self.low
        return low - edge, inf if self.high is None else self.high + edge


def _clip(x: Floats, low: float, high: float) -> Floats:
    """Undo what rounding may have carried out of [low, high)."""
    return np.clip(x, low, np.nextafter(high, low))


@dataclass(slots=True, eq=False)
class Fixed:
    """Always `value`."""

    value: NonNegativeFinite

    def quantile(self, u: Floats, edge: float, load: TraceReader | None) -> Floats:
        return np.full(len(u), float(self.value))


@dataclass(slots=True, eq=False)
class Uniform(Bounded):
    """All values from `low` to `high` alike, both included."""

    low: NonNegativeFinite
    high: NonNegativeFinite

    def quantile(self, u: Floats, edge: float, load: TraceReader | None) -> Floats:
        low, high = self._bounds(edge)
        return _clip(low + u * (high - low), low, high)


@dataclass(slots=True, eq=False)
class Exponential(Bounded):
    """Exponential, with this `mean` before any cut."""

    mean: PositiveFinite

    def quantile(self, u: Floats, edge: float, load: TraceReader | None) -> Floats:
        low, high = self._bounds(edge)
        share = -np.expm1((low - high) / self.mean)  # below high, of what is above low
        return _clip(low - self.mean * np.log1p(-u * share), low, high)


@dataclass(slots=True, eq=False)
class Lognormal(Bounded):
    """The exponential of a normal distribution, by its `median` or its `mean` before any cut."""

    sigma: Annotated[PositiveFinite, "standard deviation of the logarithm"]
    median: PositiveFinite | None = None
    mean: PositiveFinite | None = None

    def __post_init__(self) -> None:
        raise_if(((self.median is None) == (self.mean is None), "median", "give either it or mean"))
        Bounded.__post_init__(self)  # a class with slots has no super() of no arguments

    def quantile(self, u: Floats, edge: float, load: TraceReader | None) -> Floats:
        from scipy.special import ndtr, ndtri

        mu = log(self.median) if self.median else log(self.mean or 1) - self.sigma**2 / 2
        low, high = self._bounds(edge)
        below = ndtr((log(low) - mu) / self.sigma) if low else 0.0
        above = ndtr((log(high) - mu) / self.sigma) if high < inf else 1.0
        raise_if((above - below < 1e-9, "low", "the distribution is not between low and high"))
        x = np.exp(mu + self.sigma * ndtri(below + u * (above - below)))
        return _clip(x, low, high)


@dataclass(slots=True, kw_only=True, eq=False)
class Zipf(Bounded):
    """Whole numbers k from `low` to `high`, each in proportion to k ** -alpha."""

    alpha: Annotated[NonNegativeFinite, "k is drawn in proportion to k ** -alpha"]
    high: Annotated[int, Field(le=10**7)]
    low: Annotated[int, Field(ge=1)] = 1

    def quantile(self, u: Floats, edge: float, load: TraceReader | None) -> Floats:
        weights = np.arange(self.low, self.high + 1, dtype=np.float64) ** -self.alpha
        return (self.low + weighted_choice(weights, u)).astype(np.float64)


def weighted_choice(weights: Floats, u: Floats) -> Ints:
    """Turn uniform numbers into indices, in proportion to the weights."""
    ends = np.cumsum(weights)
    chosen = np.searchsorted(ends, u * ends[-1], side="right")
    last: Ints = np.minimum(chosen, len(weights) - 1)
    return last


@dataclass(slots=True, eq=False)
class Quantiles:
    """Straight lines between `values`, which lie at the cumulative probabilities `at`."""

    values: list[NonNegativeFinite]
    at: Annotated[list[Share] | None, "probabilities from 0 to 1"] = None  # None: evenly

    def __post_init__(self) -> None:
        at = np.linspace(0, 1, len(self.values)).tolist() if self.at is None else self.at
        falls = len(self.values) < 2 or self.values != sorted(self.values)
        what = f"must be 2 or more numbers that never fall, not {short_repr(self.values)}"
        rises = at[:1] == [0] and at[-1:] == [1] and at == sorted(at)
        raise_if(
            (falls, "values", what),
            (len(at) != len(self.values), "at", f"{len(at)} of them for {len(self.values)} values"),
            (not (falls or rises), "at", "must go from 0 to 1 and never fall"),
        )

    def quantile(self, u: Floats, edge: float, load: TraceReader | None) -> Floats:
        at = np.linspace(0, 1, len(self.values)) if self.at is None else self.at
        return np.interp(u, at, self.values)


@dataclass(slots=True, eq=False)
class Empirical:
    """The lengths of a trace's requests, drawn with replacement."""

    path: Annotated[str, "a trace"]
    column: Literal["input", "output"]
    format: str | None = None

    def quantile(self, u: Floats, edge: float, load: TraceReader | None) -> Floats:
        trace = read_lengths(self.path, self.format, load)
        lengths = trace.prompt_tokens if self.column == "input" else trace.output_tokens
        return lengths[(u * len(lengths)).astype(np.int64)].astype(np.float64)


def read_lengths(path: str, form: str | None, load: TraceReader | None) -> Workload:
    """Read a trace; ValueError if it has no requests."""
    if load is None:
        raise MappingError("path", "no reader of traces was given")
    trace = load(path, form)
    raise_if((len(trace) == 0, "path", f"{path} has no requests"))
    return trace


@dataclass(slots=True, eq=False)
class Cycle:
    """The `values` in turn, request by request, and the first again after the last: no chance."""

    values: Annotated[list[NonNegativeFinite], Field(min_length=1)]

    def quantile(self, u: Floats, edge: float, load: TraceReader | None) -> Floats:
        return np.resize(np.array(self.values, np.float64), len(u))


def _mixture_part(part: object) -> tuple[float, Distribution]:
    """Read a part of a mixture: its weight, and the distribution that the rest of it is."""
    if not isinstance(part, Mapping):
        raise MappingError("", f"{short_repr(part)} is not a mapping")
    weight = part.get("weight")
    if not isinstance(weight, int | float) or not 0 < weight < inf:
        what = f"{short_repr(weight)} is not a number above 0 (share, relative to other parts)"
        raise MappingError("weight", what)
    return float(weight), parse_distribution({key: part[key] for key in part if key != "weight"})


@dataclass(slots=True, eq=False)
class Mixture:
    """Distributions with a `weight` each: one of them is drawn, and then a value from it."""

    parts: Annotated[
        list[Annotated[tuple[float, Distribution], _mixture_part]],
        Field(min_length=1),
        "list of {weight: w, kind: ...}",
    ]

    def quantile(self, u: Floats, edge: float, load: TraceReader | None) -> Floats:
        weights = np.array([weight for weight, _ in self.parts])
        ends = np.cumsum(weights)
        chosen = weighted_choice(weights, u)
        # Where u fell within its part's share is a uniform number again.
        again = (u * ends[-1] - (ends - weights)[chosen]) / weights[chosen]
        again = _clip(again, 0.0, 1.0)
        x = np.empty(len(u))
        for k, (_, kind) in enumerate(self.parts):
            here = chosen == k
            x[here] = kind.quantile(again[here], edge, load)
        return x


Kind = Fixed | Uniform | Exponential | Lognormal | Zipf | Quantiles | Empirical | Cycle | Mixture
KINDS: dict[str, type[Kind]] = {cls.__name__.lower(): cls for cls in get_args(Kind)}


def parse_distribution(spec: Spec) -> Distribution:
    """Make a distribution of what a scenario says; ValueError if it cannot be one."""
    if not isinstance(spec, Mapping):
        value = parse_number(spec)
        read(float, value)
        raise_if((not 0 <= value < inf, "", f"must be 0 or more, and finite, not {value}"))
        return Fixed(value)
    return from_kind(KINDS, spec)


def parse_lengths(spec: Spec) -> Distribution:
    """Make a distribution of lengths; ValueError if one could be less than 1 token."""
    if not isinstance(spec, Mapping):
        value = parse_number(spec)
        read(float, value)
        good = 1 <= value < inf and value == int(value)
        raise_if((not good, "", f"{short_repr(spec)} is not a whole number of 1 or more"))
        return Fixed(value)
    kind = parse_distribution(spec)
    raise_if((shortest_length(kind) < 1, "", "some lengths would be less than 1 token"))
    return kind


def shortest_length(kind: Distribution) -> float:
    """Return the shortest length that a distribution yields; no trace has one below 1."""
    if isinstance(kind, Mixture):
        return min(shortest_length(part) for _, part in kind.parts)
    if isinstance(kind, Empirical):
        return 1
    if isinstance(kind, Cycle):
        return float(np.floor(min(kind.values) + 0.5))
    return float(np.floor(kind.quantile(np.zeros(1), TOKENS, None) + 0.5)[0])


def _parse_length(spec: Spec) -> float | Distribution:
    """Read a length: a number, or a law."""
    if isinstance(spec, Mapping):
        return parse_lengths(spec)
    parse_distribution(spec)
    return parse_number(spec)


Length = Annotated[float | Distribution, _parse_length]
Lengths = Annotated[Distribution, parse_lengths]
Amounts = Annotated[Distribution, parse_distribution]
"""The laws that a number, or a mapping with a `kind`, stands for."""


def token_counts(kind: Distribution, u: Floats, load: TraceReader | None = None) -> Ints:
    """Turn uniform numbers into lengths, in whole tokens."""
    x = np.floor(kind.quantile(u, TOKENS, load) + 0.5)
    if not (x < MAX_TOKENS).all():
        raise MappingError("high", f"without it a length became {x.max(initial=0):.3g} tokens")
    return x.astype(np.int64)


def durations(kind: Distribution, u: Floats) -> Floats:
    """Turn uniform numbers into times."""
    return kind.quantile(u, SECONDS, None)
