"""Options that several verbs have."""

from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from simulator.util.errors import HeadwayError

ScenarioFile = Annotated[Path, Parameter(name="SCENARIO", help="scenario file (YAML)")]
ScenarioOrName = Annotated[
    Path, Parameter(name="SCENARIO", help="scenario file (YAML), or a shipped one's name: demo")
]
Vary = Annotated[
    list[str] | None,
    Parameter(negative="", help="dotted.key=a,b,c (repeated: all combinations)"),
]
Overrides = Annotated[
    list[str] | None,
    Parameter(name="--set", negative="", help="set a key: dotted.key=value (repeatable)"),
]
Seed = Annotated[int | None, Parameter(help="seed, in place of the scenario's")]
Stepwise = Annotated[
    bool,
    Parameter(negative="", show_default=False, help="every step by itself: same result, slower"),
]
Format = Annotated[Literal["csv", "parquet"], Parameter(help="of the tables")]
Quiet = Annotated[
    bool, Parameter(negative="", show_default=False, help="print errors and warnings only")
]
Replications = Annotated[
    int | None,
    Parameter(help="runs with other arrivals, lengths and errors of the cost model; intervals"),
]
Warmup = Annotated[
    float, Parameter(show_default=False, help="seconds from the first request on to leave out")
]
Cooldown = Annotated[
    float, Parameter(show_default=False, help="seconds before the last request to leave out")
]
Workers = Annotated[
    int | None, Parameter(help="workers [default: one per core]", show_default=False)
]


def check_trim(warmup: float, cooldown: float) -> tuple[float, float]:
    """Refuse seconds to leave out that are none."""
    given = {"--warmup": warmup, "--cooldown": cooldown}
    if wrong := [
        f"{option} {seconds:g}: must be seconds, 0 or more"
        for option, seconds in given.items()
        if not 0 <= seconds < inf
    ]:
        raise HeadwayError(wrong)
    return warmup, cooldown


def at_least_one(**given: int | None) -> None:
    """Refuse an option that is given and less than 1."""
    for name, value in given.items():
        if value is not None and value < 1:
            raise HeadwayError(f"--{name} {value}: must be at least 1")


def workers_asked_for(jobs: int | None, backend: str | None, address: str | None) -> dict[str, Any]:
    """Give what `use_backend` needs; nothing where no workers are asked for."""
    at_least_one(jobs=jobs)
    if jobs is None and backend is None and address is None:
        return {}
    return {"name": backend or "loky", "jobs": jobs, "address": address}
