"""How the steps of data-parallel ranks that go in lock-step make one."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from simulator.core.executor import CanLeap, Executor, Leap, Timing
from simulator.core.request import Step


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
