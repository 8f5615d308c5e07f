"""What a cost model is, what to build one around another with, and what drafting adds to one.

A cost model is an executor that computes seconds instead of spending them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from simulator.core.executor import CanLeap, Executor, Leap, StagedExecutor, Timing
from simulator.core.request import Step
from simulator.util.errors import HeadwayError, ScenarioError
from simulator.util.from_mapping import short_repr
from simulator.util.user_code import blaming

T = TypeVar("T")
Counts = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


def no_shared_work(tokens: Sequence[int]) -> float:
    """Let ranks share no work: a step takes as long as that of the slowest."""
    return 0.0


class JointStep(NamedTuple):
    """How the steps of ranks make one of all: the slowest rank's own part, then the shared one.

    Where the host's work is hidden behind the kernels (asynchronous scheduling) it hides behind
    those of `shared`, too: `kernels` then prices a rank's step without it.
    """

    shared: Callable[[Sequence[int]], float] = no_shared_work
    """Seconds of what all ranks compute together, by the tokens of each; 0: a dummy batch."""
    kernels: CanLeap | None = None

    def execute(
        self, own: Executor, steps: Sequence[Step], tokens: Sequence[int], repeats: int
    ) -> tuple[list[float], list[Timing | Leap]]:
        """Return the seconds of the ranks' steps, so often, and what each takes by itself.

        `tokens` has those of all ranks.
        """
        together = self.shared(tokens)
        timings = _each(own, steps, repeats)
        alone = _slowest(timings)
        if self.kernels is None:
            return [seconds + together for seconds in alone], timings
        kernels = _slowest(_each(self.kernels, steps, repeats))
        pairs = zip(kernels, alone, strict=True)
        return [max(seconds + together, least) for seconds, least in pairs], timings


def _each(executor: Executor, steps: Sequence[Step], repeats: int) -> list[Timing | Leap]:
    """Say what each rank's step takes by itself."""
    if repeats == 1:
        return [executor.execute(step) for step in steps]
    assert isinstance(executor, CanLeap)
    return [executor.leap(step, repeats) for step in steps]


def _slowest(timings: Sequence[Timing | Leap]) -> Iterable[float]:
    """Return the seconds of the slowest of some steps, and of each repeat."""
    each = (one.seconds if isinstance(one, Leap) else [one.seconds] for one in timings)
    return map(max, zip(*each, strict=True))


class HostWork(NamedTuple):
    """What the host does for each step, s."""

    per_step: float
    per_sequence: float
    interval: Sequence[float]  # 95 % interval of `per_step`; (): none is known
    gap_interval: Sequence[float]  # of `launch_gap`
    stream_interval: Sequence[float]  # of what an API server streams a sequence's token in
    hidden: bool  # behind the kernels: a step takes the longer of the two
    launch_gap: float | None  # that a step waits for besides; None: nobody knows


class CostModel(CanLeap, Protocol):
    """An executor that computes what a step takes, and knows how far it can be trusted.

    A subclass has `execute`. Without `leap` a run executes each step; all else has a default.
    """

    reads_longest: bool = False
    """What a step takes depends on its longest sequence (`Step.longest`)."""

    @property
    def name(self) -> str:
        """What reports call it: its class, where nothing else is given."""
        return type(self).__name__

    @property
    def residuals(self) -> Mapping[str, float] | None:
        """Standard deviations of its relative errors by regime of steps, see `noise`."""
        return None

    @property
    def unmeasured(self) -> str:
        """What of its times nobody has measured, in words; "" where a fit has told all of it."""
        return ""

    def decode_seconds(self, counts: Counts, contexts: Counts) -> Seconds:
        """Return the seconds of steps of so many decodes each that read so many tokens in all."""
        pairs = zip(counts.tolist(), contexts.tolist(), strict=True)
        steps = (Step([], count, context) for count, context in pairs)
        return np.array([self.execute(one).seconds if one.decodes else 0.0 for one in steps])

    def swap_seconds(self, step: Step) -> float:
        """Return the seconds of a step's copies of KV blocks to the host and back."""
        return 0.0

    def with_copies(self, seconds: float, step: Step) -> tuple[float, float]:
        """Return what a step takes whose compute takes so many seconds, and of it what swaps add.

        Where swaps and loads overlap with compute, what is longer is divided between the two.
        """
        return seconds, 0.0

    def logged_swap_seconds(self, swaps: npt.NDArray[np.void]) -> Seconds:
        """Return the seconds of logged copies of KV blocks (rows of dtype SWAP)."""
        return np.zeros(len(swaps))

    def host_seconds(self, prompts: Counts, sequences: Counts, new: Counts) -> Seconds | None:
        """Return the seconds in which the GPU waits for the engine; None: nobody can tell.

        One value for each step, which computes so many chunks of prompts, sequences (these
        included) and tokens of prompts. What `Timing.host` says of a step comes on top.
        """
        return None

    def range_warnings(self, *logged: npt.NDArray[np.void]) -> list[str]:
        """Say, a line per quantity, which steps of some logs lie outside the fitted range."""
        return []

    @property
    def host_work(self) -> HostWork | None:
        """What the host does for each step; None: that is not told apart."""
        return None

    def with_host(self, **terms: Any) -> Self:
        """Return the cost with other terms of the host; ValueError: it has none."""
        raise ScenarioError("host", "needs a piecewise cost")

    def without_host(self) -> "CostModel":
        """Return what the kernels of a step take, and the waits that nothing hides."""
        return self

    def host_step_seconds(self, step: Step) -> float:
        """Return the seconds of the host's work for a step, hidden or not."""
        return 0.0

    def with_waits(self, step: float, per_sequence: float) -> "CostModel":
        """Return the cost with so many more seconds in every step, and for each sequence in it.

        As it was, where it does not tell the engine's waits from its other terms.
        """
        return self

    @property
    def fitted_terms(self) -> Mapping[str, str]:
        """Fields of the terms `step`, `host` and `per_sequence` that a server's log can tell."""
        return {}

    @property
    def rank_cost(self) -> "CostModel":
        """What one data-parallel rank takes for itself."""
        return self

    @property
    def joint(self) -> JointStep | None:
        """How the steps of ranks make one of all; None: each goes its own way."""
        return None

    def change_rank(self, change: "Callable[[CostModel], CostModel]") -> "CostModel":
        """Change what a rank does for itself."""
        return change(self)

    def replace_rank(self, given: "CostModel") -> "CostModel":
        """Put a given cost in place of a rank's own."""
        return given


@dataclass(frozen=True, init=False, repr=False, eq=False)
class CostDecorator(CostModel):
    """A cost model around another, `inner`, which answers whatever a subclass does not.

    Subclasses have `execute` and `leap`; what they change of decodes, `decode_seconds` must tell.
    """

    inner: CostModel

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def residuals(self) -> Mapping[str, float] | None:
        return self.inner.residuals

    @property
    def unmeasured(self) -> str:
        return self.inner.unmeasured

    @property
    def reads_longest(self) -> bool:  # type: ignore[override]
        return self.inner.reads_longest

    def unmeasured_and(self, what: str) -> str:
        """Say what of `inner` nobody has measured, and what besides."""
        return f"{self.inner.unmeasured}; {what}" if self.inner.unmeasured else what

    def decode_seconds(self, counts: Counts, contexts: Counts) -> Seconds:
        return self.inner.decode_seconds(counts, contexts)

    def swap_seconds(self, step: Step) -> float:
        return self.inner.swap_seconds(step)

    def with_copies(self, seconds: float, step: Step) -> tuple[float, float]:
        return self.inner.with_copies(seconds, step)

    def logged_swap_seconds(self, swaps: npt.NDArray[np.void]) -> Seconds:
        return self.inner.logged_swap_seconds(swaps)

    def host_seconds(self, prompts: Counts, sequences: Counts, new: Counts) -> Seconds | None:
        return self.inner.host_seconds(prompts, sequences, new)

    def range_warnings(self, *logged: npt.NDArray[np.void]) -> list[str]:
        return self.inner.range_warnings(*logged)

    @property
    def host_work(self) -> HostWork | None:
        return self.inner.host_work

    def with_host(self, **terms: Any) -> Self:
        return replace(self, inner=self.inner.with_host(**terms))


def check_cost(cost: CostModel) -> CostModel:
    """Let the answers of a user's cost model be checked; return one of Headway's as it is.

    Raises HeadwayError for what is no cost model, or lacks `execute`.
    """
    cls = type(cost)
    if CostModel not in cls.__mro__:
        raise HeadwayError(f"cost: must be an instance of CostModel, not {short_repr(cost)}")
    if cls.execute is Executor.execute:
        raise HeadwayError(f"cost: {cls.__name__} has no method execute(step)")
    if cls.__module__.startswith("simulator.") or isinstance(cost, StagedExecutor):
        return cost  # a wrapper has no stages
    return UserCost(cost)


@dataclass(frozen=True)
class UserCost(CostDecorator):
    """A user's cost model; HeadwayError says which of its methods answers wrongly."""

    def execute(self, step: Step) -> Timing:
        found = self._ask("execute", Timing, step)
        self._check_times("execute", [found.seconds, found.swap, found.host])
        return found

    def leap(self, step: Step, repeats: int) -> Leap:
        found = self._ask("leap", Leap, step, repeats)
        count = np.size(found.seconds)
        if count != repeats:
            raise self._wrong("leap", f"say what each of {repeats} steps takes", count)
        for part in (found.seconds, found.host):
            times = np.asarray(part)
            if times.dtype.kind != "f" or not ((times >= 0) & (times < inf)).all():
                self._check_times("leap", part)
        first = self.execute(step).seconds
        if found.seconds[0] != first:
            what = f"agree with execute, by which a step takes {first!r} s"
            raise self._wrong("leap", what, found.seconds[0])
        return found

    def _ask(self, method: str, kind: type[T], *given: Any) -> T:
        with blaming([type(self.inner)], "cost"):
            found = getattr(self.inner, method)(*given)
        if not isinstance(found, kind):
            raise self._wrong(method, f"return a {kind.__name__}", found)
        return found

    def _check_times(self, method: str, seconds: Iterable[float]) -> None:
        for one in seconds:
            if not isinstance(one, float | int) or not 0 <= one < inf:
                raise self._wrong(method, "give finite times of 0 s or more", one)

    def _wrong(self, method: str, what: str, found: object) -> HeadwayError:
        code = getattr(self.inner, method).__code__
        place = f"({Path(code.co_filename).name}:{code.co_firstlineno})"
        name = f"{type(self.inner).__name__}.{method}"
        return HeadwayError(f"cost: {name} must {what}, not {short_repr(found)} {place}")
