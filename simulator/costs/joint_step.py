"""How the steps of data-parallel ranks that go in lock-step make one."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from simulator.core.executor import CanLeap, Executor
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

    def seconds(
        self, own: Executor, steps: Sequence[Step], tokens: Sequence[int], repeats: int
    ) -> list[float]:
        """Return the seconds of the ranks' steps, so often; `tokens` has those of all ranks."""
        together = self.shared(tokens)
        alone = _slowest(own, steps, repeats)
        if self.kernels is None:
            return [seconds + together for seconds in alone]
        kernels = _slowest(self.kernels, steps, repeats)
        pairs = zip(kernels, alone, strict=True)
        return [max(seconds + together, least) for seconds, least in pairs]


def _slowest(executor: Executor, steps: Sequence[Step], repeats: int) -> Iterable[float]:
    """Return the seconds of the slowest of some steps, and of each repeat."""
    if repeats == 1:
        return [max(map(executor.execute, steps))]
    assert isinstance(executor, CanLeap)
    return map(max, zip(*(executor.leap(step, repeats) for step in steps), strict=True))
