"""The simulator: what turns a scenario into a Result.

Each package may import those below it (`docs/architecture.md` has the order), and nothing outside
`simulator`. Start with `simulation/run.py`, where all of them meet.
"""

from simulator.util.version import __version__ as __version__

TYPE_CHECKING = False  # typing's own costs milliseconds in which Ctrl-C would be a traceback
if TYPE_CHECKING:
    from typing import Any

    from simulator.scenario.load import load_scenario
    from simulator.scenario.scenario import Scenario
    from simulator.simulation.door import run
    from simulator.simulation.result import Result
    from simulator.util.errors import HeadwayError, TraceError

__all__ = ["Result", "Scenario", "diagnose", "load_scenario", "plan", "run", "sweep"]

__all__ += ["HeadwayError", "TraceError"]

_HOMES = {
    "HeadwayError": "simulator.util.errors",
    "Result": "simulator.simulation.result",
    "Scenario": "simulator.scenario.scenario",
    "TraceError": "simulator.util.errors",
    "diagnose": "headway.planning.diagnose",
    "load_scenario": "simulator.scenario.load",
    "plan": "headway.planning.plan_report",
    "run": "simulator.simulation.door",
    "sweep": "headway.planning.sweep",
}


def __getattr__(name: str) -> "Any":
    """Import what is asked for and no more: `headway --help` must not load numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted([*__all__, "__version__"])
