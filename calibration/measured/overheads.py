"""What an engine adds to its kernels, by its version: one model for all runs of a version."""

from dataclasses import dataclass, replace

from calibration.measured.engine import schedules_asynchronously
from calibration.measured.runs import Run
from simulator.assemble import Parts
from simulator.piecewise import PiecewiseCost
from simulator.workload import Frontend


@dataclass(frozen=True)
class Overhead:
    """Seconds outside of the kernels."""

    step: float  # per step


SYNC = Overhead(step=0.9e-3)
ASYNC = Overhead(step=0.5e-3)
SERVER = Frontend(latency=1.8e-3)
"""From the stamp of arrival in the server to the scheduler, and from a token to its stamp."""
CLIENT = Frontend(latency=4e-3, per_request=2e-3, per_token=2e-6)
"""The same from a client's point of view."""


def overhead(run: Run) -> Overhead:
    """Give the overhead of a run's engine."""
    return ASYNC if schedules_asynchronously(run) else SYNC


def charge(run: Run, parts: Parts) -> tuple[Parts, Frontend]:
    """Put a run's overheads into its cost; give what its requests pass before the scheduler."""
    extra = overhead(run)
    cost = parts.cost
    if isinstance(cost, PiecewiseCost):
        cost = replace(cost, overhead=extra.step)
    client = run.word("clock").lower().startswith("client")
    return replace(parts, cost=cost), CLIENT if client else SERVER
