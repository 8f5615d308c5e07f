"""Options that several verbs have."""

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from simulator.util.errors import HeadwayError, MappingError
from simulator.util.user_code import NO_OWN_CODE

DEPLOYMENT = "headway.deploy.deployment"
"""What writes the files of `--deploy`: it stands on the simulator, which knows it by name."""


def silent(help: str, name: str | None = None, *, json_list: bool = False) -> Parameter:
    """Describe an option whose help names no default; of a flag there is no `--no-` form."""
    return Parameter(
        name=name, negative="", show_default=False, help=help, json_list=json_list or None
    )


def between(least: float, most: float = inf) -> Parameter:
    """Bound an option's number; NaN is beyond all bounds."""
    bound = f"{least:g} or more" if most == inf else f"{least:g} to {most:,}"

    def check(_: object, value: float | None) -> None:
        if value is not None and not least <= value <= most:
            raise ValueError(f"must be {bound}")

    return Parameter(validator=check)


def whole(least: int = 1, most: float = inf) -> Parameter:
    """Bound an option's whole number; a part of one is refused, which cyclopts rounds."""
    return Parameter(
        validator=between(least, most).validator, converter=lambda _, tokens: int(tokens[0].value)
    )


ScenarioOrName = Annotated[
    Path, Parameter(name="SCENARIO", help="scenario file (YAML), or a shipped one's name: demo")
]
Port = Annotated[int, Parameter(help="port to listen at; 0: one that is free"), whole(0, 65535)]
SetKeys = Annotated[list[str] | None, silent("set a key, as gpu.count=2 (repeatable)", "--set")]
LaunchOption = Annotated[
    str | None,
    silent(
        "a launch command, or a file that has it: its model and engine replace the scenario's",
        "--command",
    ),
]
Vary = Annotated[list[str] | None, silent("values to try, as seed=1,2 (repeated: all combined)")]
Workers = Annotated[int | None, silent("worker processes [default: one per core]"), whole()]
Quiet = Annotated[bool, silent("print errors and warnings only")]
Json = Annotated[bool, silent("print JSON in place of tables", "--json")]
Slo = Annotated[
    list[str] | None,
    silent("service level, as 'p99_ttft_ms<=1000' (repeatable) [default: the scenario's]"),
]
NoOwnCode = Annotated[bool, silent("refuse a scenario that names code of its own", "--no-own-code")]


CharsPerToken = Annotated[
    float | None,
    silent("characters per token, where a file has texts: about 4 in English"),
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Reading:
    """How a file of requests is read, where its beginning does not tell."""

    columns: Annotated[
        str | None,
        silent("which column has what, as arrival=start_ms,prompt=tokens_in,output=tokens_out"),
    ] = None
    chars_per_token: CharsPerToken = None
    encoding: Annotated[str | None, silent("encoding of the file, as cp1252 [default: UTF-8]")] = (
        None
    )
    result: Annotated[
        int | None, silent("number of the benchmark, if the file has several; from 1"), whole()
    ] = None

    @property
    def given(self) -> dict[str, Any]:
        """What was given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


DEFAULT_READING = Reading()


@contextmanager
def named_by_option(given: Mapping[str, Any]) -> Iterator[None]:
    """Name arguments that are wrong as the options that gave them, with their values."""
    try:
        yield
    except MappingError as error:
        if not {fault.key for fault in error.faults} <= {(name,) for name in given}:
            raise
        raise HeadwayError(
            f"--{name.replace('_', '-')} {given[name]}: {what}" for (name,), what, _ in error.faults
        ) from None


def refuse_own_code(flag: bool) -> None:
    """Refuse users' code in this process and in its workers, which inherit the environment."""
    if flag:
        os.environ[NO_OWN_CODE] = "1"


@Parameter(name="*")
@dataclass(slots=True, eq=False)
class Settings:
    """What is put over the scenario's own keys."""

    set_: SetKeys = None
    seed: Annotated[int | None, Parameter(help="seed, in place of the scenario's"), whole(0)] = None
    no_own_code: NoOwnCode = False
    command: LaunchOption = None

    def __post_init__(self) -> None:
        """Refuse users' code, if so asked."""
        refuse_own_code(self.no_own_code)

    @property
    def overrides(self) -> list[str]:
        """What `--command` and `--set` set."""
        return with_launch(self.command, self.set_ or [])


DEFAULT_SETTINGS = Settings()


def with_launch(
    command: str | None, overrides: Sequence[str], obeyed: tuple[str, ...] = ()
) -> list[str]:
    """Return overrides after the launch command that goes before them, if there is one.

    Its options that are `obeyed` by the verb are not said to be without effect, and no warning
    asks for a variable that it sets.
    """
    if command is None:
        return [*overrides]
    from simulator.launch.keys import LaunchCommand
    from simulator.launch.words import find_command
    from simulator.models.engine_sizes import LONGER

    for variable, value in find_command(command).environment.items():
        if variable in LONGER.values() and value.lower() in ("1", "true"):
            warnings.filterwarnings("ignore", f".* only with {variable}=1")
    launch = LaunchCommand(command)
    launch.obeyed = obeyed
    return [launch, *overrides]


def with_slo(overrides: Sequence[str], slo: Sequence[str] | None) -> list[str]:
    """Return the overrides, and service levels in the place of the scenario's.

    The blank tells errors that `--slo` gave them, and not `--set slo=[...]`.
    """
    return [*overrides] if slo is None else [*overrides, f"slo= {json.dumps([*slo])}"]


@Parameter(name="*")
@dataclass(slots=True, eq=False)
class RunOptions:
    """How run and compare simulate, measure and report."""

    slo: Slo = None
    stepwise: Annotated[bool, silent("simulate each step by itself: same result, slower")] = False
    format: Annotated[Literal["csv", "parquet"], Parameter(help="format of the tables")] = "csv"
    quiet: Quiet = False
    json_: Json = False
    replications: Annotated[
        int | None,
        silent("runs, 2 or more; each draws arrivals, lengths and cost errors anew [default: 1]"),
        whole(2, 10_000),
    ] = None
    warmup: Annotated[float, silent("seconds left out after the first request"), between(0)] = 0.0
    cooldown: Annotated[float, silent("seconds left out before the last request"), between(0)] = 0.0


DEFAULT_RUN = RunOptions()


def print_json(found: object) -> None:
    """Print what a verb has found; a path is a file that it has written, JSON or CSV."""
    if isinstance(found, Path) and found.suffix == ".csv":
        import pandas as pd

        from headway.runs.read import unescape_frame

        print(unescape_frame(pd.read_csv(found)).to_json(orient="records", indent=2))
    elif isinstance(found, Path):
        print(found.read_text("utf-8"), end="")
    else:
        print(json.dumps(found, indent=2, allow_nan=False))
