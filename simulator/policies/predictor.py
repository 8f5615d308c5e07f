"""Length predictors: what a policy may know of the length of an answer that nobody has seen yet.

A prediction is a whole number of output tokens, `request.hint`, made when the request is sent. Its
errors are drawn by the seed and the request's id alone, on streams of their own: neither the
workload nor the order in which requests arrive changes them, and two values of `sigma` stretch the
same errors.
"""

from bisect import insort
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, Protocol

import numpy as np

from simulator.core.request import Request
from simulator.util.from_mapping import check_range, from_kind, raise_if
from simulator.workload.workload import Ints, Workload

STREAM = 1  # beside the seed; the generator of workloads has streams of its own
MOST = 2**31 - 1  # tokens


class Predictor(Protocol):
    """Predicts, and may learn from those who have ended."""

    def predict(self, request: Request) -> int:
        """Say how many output tokens the request will have, 1 or more."""

    def observe(self, request: Request) -> None:
        """Take note that a request has ended after `request.generated` tokens."""


class FixedPredictions:
    """Predictions made beforehand, by id."""

    def __init__(self, hints: Ints) -> None:
        self.hints = hints
        self._list = hints.tolist()

    def predict(self, request: Request) -> int:
        hint: int = self._list[request.id]
        return hint

    def observe(self, request: Request) -> None:
        """Learn nothing."""


@dataclass(frozen=True)
class Oracle:
    """The true length: the bound for every predictor."""

    kind: str = field(default="oracle", init=False)

    def predictor(self, workload: Workload, rng: "np.random.Generator") -> Predictor:
        return FixedPredictions(workload.output_tokens)


@dataclass(frozen=True)
class Noisy:
    """The true length times a lognormal error with median 1: exp(sigma * a normal number)."""

    kind: str = field(default="noisy", init=False)
    sigma: Annotated[float, "standard deviation of the logarithm"]

    def __post_init__(self) -> None:
        raise_if(check_range("sigma", self.sigma, 0, 10))

    def predictor(self, workload: Workload, rng: "np.random.Generator") -> Predictor:
        error = np.exp(self.sigma * rng.standard_normal(len(workload)))
        return FixedPredictions(
            np.clip(np.rint(workload.output_tokens * error), 1, MOST).astype(np.int64)
        )


@dataclass(frozen=True)
class Bucketed:
    """The median length of the class that the request is taken for.

    The lengths of the workload are cut into `classes` of equal counts; with probability `confusion`
    a request is taken for another class, all alike (classifiers of length buckets: Zheng et al.,
    "Response length perception and sequence scheduling", NeurIPS 2023; S3, Jin et al., NeurIPS
    2023, cuts into equal widths and predicts the upper end, to reserve memory).
    """

    kind: str = field(default="bucketed", init=False)
    classes: Annotated[int, "classes of lengths"] = 5
    confusion: Annotated[float, "probability of another class"] = 0.0

    def __post_init__(self) -> None:
        raise_if(
            check_range("classes", self.classes, 1, 1000),
            check_range("confusion", self.confusion, 0, 1),
            (
                self.classes == 1 and self.confusion > 0,
                "confusion",
                "must be 0 with one class: there is no other",
            ),
        )

    def predictor(self, workload: Workload, rng: "np.random.Generator") -> Predictor:
        lengths, k = workload.output_tokens, self.classes
        draws = rng.random((len(workload), 2))
        edges = np.quantile(lengths, np.arange(1, k) / k) if len(lengths) else np.zeros(k - 1)
        true = np.searchsorted(edges, lengths, side="right")
        medians = [
            float(np.median(lengths[true == c])) if (true == c).any() else edges[max(c - 1, 0)]
            for c in range(k)
        ]
        other = (true + 1 + (draws[:, 1] * (k - 1)).astype(np.int64)) % k
        taken = np.where(draws[:, 0] < self.confusion, other, true)
        return FixedPredictions(np.maximum(np.rint(np.array(medians)[taken]), 1).astype(np.int64))


@dataclass(frozen=True)
class Percentile:
    """A percentile of the lengths of the client's answers so far; `prior` tokens before the first.

    Nearest rank, over all answers of the client that have ended when the request is sent (the
    history of output lengths of the Past-Future scheduler, Gong et al., ASPLOS 2025, which keeps
    it for the engine as a whole).
    """

    kind: str = field(default="percentile", init=False)
    percentile: Annotated[float, "percentile, 0 to 100"] = 50.0
    prior: Annotated[int, "tokens before the first answer"] = 256

    def __post_init__(self) -> None:
        raise_if(
            (
                not 0 < self.percentile <= 100,
                "percentile",
                f"must be more than 0 and at most 100, not {self.percentile}",
            ),
            (not 1 <= self.prior <= MOST, "prior", f"must be 1 token or more, not {self.prior}"),
        )

    def predictor(self, workload: Workload, rng: "np.random.Generator") -> Predictor:
        return History(self)


class History:
    """The lengths of the answers that each client has got."""

    def __init__(self, spec: Percentile) -> None:
        self._spec = spec
        self._lengths: dict[str, list[int]] = {}  # by client, ascending

    def predict(self, request: Request) -> int:
        lengths = self._lengths.get(request.client)
        if not lengths:
            return self._spec.prior
        return lengths[ceil(self._spec.percentile / 100 * len(lengths)) - 1]

    def observe(self, request: Request) -> None:
        if request.generated:  # else it was rejected
            insort(self._lengths.setdefault(request.client, []), request.generated)


Spec = Oracle | Noisy | Bucketed | Percentile
KINDS: dict[str, type[Spec]] = {cls.kind: cls for cls in (Oracle, Noisy, Bucketed, Percentile)}


def parse_predictor(values: object) -> Spec:
    """Read {kind: ..., and its fields}; ValueError says which field is wrong."""
    return from_kind(KINDS, values)


def make_predictor(spec: Spec | None, workload: Workload, seed: int) -> Predictor | None:
    """Make the predictor that a scenario describes; None where it has none."""
    if spec is None:
        return None
    rng = np.random.default_rng(np.random.SeedSequence([seed, STREAM]))
    return spec.predictor(workload, rng)
