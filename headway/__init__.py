"""Headway: a discrete-event simulator of continuous-batching schedulers.

    import headway as hw
    result = hw.run("demo")

What people touch is here: commands, plans, pictures, reports, a server, and the plug-ins of vLLM
and SGLang. `simulator` turns a scenario into a Result. Start with `cli/main.py`.
"""

try:
    from simulator import __all__ as __all__
    from simulator import __version__ as __version__
except ImportError:
    import sys

    hides = getattr(sys.modules.get("simulator"), "__file__", None)
    if hides is None:
        raise
    what = f"{hides} hides Headway's package `simulator`: rename it, or start Python with -P"
    raise ImportError(what) from None

TYPE_CHECKING = False  # typing's own costs milliseconds in which Ctrl-C would be a traceback
if TYPE_CHECKING:
    from typing import Any

    from headway.planning.diagnose import diagnose as diagnose
    from headway.planning.plan_report import plan as plan
    from headway.planning.sweep import sweep as sweep
    from simulator import HeadwayError as HeadwayError
    from simulator import Result as Result
    from simulator import Scenario as Scenario
    from simulator import TraceError as TraceError
    from simulator import load_scenario as load_scenario
    from simulator import run as run


def __getattr__(name: str) -> "Any":
    """Import what is asked for and no more: `headway --help` must not load numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import simulator

    return getattr(simulator, name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted([*__all__, "__version__"])
