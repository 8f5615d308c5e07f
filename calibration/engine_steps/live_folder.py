"""The folder of a live run: the files of any run, and what was measured step by step.

It stands for itself: its scenario names its own profile, and traces by their whole path.
"""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf, isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from calibration.engine_steps.steps_file import (
    Row,
    parse_row,
    parse_rows,
    write_chunks,
    write_counts,
)
from calibration.text_files import read_csv, read_json, read_text
from simulator.costs.profile import shipped_profiles
from simulator.scenario.scenario import Scenario
from simulator.simulation.write import in_full, write_run
from simulator.util.errors import HeadwayError
from simulator.util.files import Contents, resolve
from simulator.util.yaml_lines import dump_yaml

if TYPE_CHECKING:
    import pandas as pd

    from gpu_backend.live import LiveRun

RERUN_PATTERN = "rerun-*"
MEASURED, ABOUT, PROFILE = "steps_measured.csv", "live.json", "profile.yaml"
COLUMNS = (
    "start",
    "seconds",
    "predicted_s",
    "device_s",
    "host_s",
    "swap_s",
    "wall_s",
    "schedule_s",
    "decodes",
    "context",
    "chunks",
    "swapped_out",
    "swapped_in",
)
NUMBERS = ("start", "seconds", "predicted_s", "schedule_s", "swap_s")
OPTIONAL_COLUMNS = ("bucket", "unique_ctx", "n_logits")
"""Columns that older folders lack."""
PARTS = ("device_s", "host_s", "swap_s", "schedule_s")
"""Of a step's time; empty, as OPTIONAL_COLUMNS then are, where an engine tells its whole alone."""


@dataclass(frozen=True)
class MeasuredStep:
    """A line of steps_measured.csv, as far as a comparison needs it."""

    row: Row
    predicted: float  # s, by the cost model of the run
    schedule: float  # s, CPU time of scheduler and log before the step; NaN: not measured
    swap: float  # s, copies of KV blocks

    def seconds(self, clock: str) -> float:
        """Return what the step took, by CPU time (`cpu`) or by the wall's clock (`wall`)."""
        if clock == "wall":
            return self.row.wall_s + (self.schedule if isfinite(self.schedule) else 0.0)
        return self.row.device_s + self.row.host_s + self.swap


def write_live(live: "LiveRun", out: Path, about: Mapping[str, object]) -> list[Path]:
    """Write the folder of a live run; return the files' paths."""
    scenario = live.result.scenario
    values = in_full(scenario.resolved(), scenario.folder)
    text = json.dumps(
        {**about, "device": live.device, "clock": live.clock, "steps": len(live.timings)}, indent=1
    )
    writers: dict[str, Contents] = {
        MEASURED: partial(_write_steps, live),
        ABOUT: text.encode() + b"\n",
    }
    if (profile := _profile(scenario)) is not None:
        values["cost"] = {"profile": PROFILE}
        writers[PROFILE] = profile.read_bytes()
    writers["scenario.yaml"] = dump_yaml(values).encode()
    return write_run(live.result, out, more=writers)


def _profile(scenario: Scenario) -> Path | None:
    """Find the file of the scenario's profile, if it has one that does not come with us."""
    named = (scenario.cost or {}).get("profile")
    if not isinstance(named, str) or named in shipped_profiles():
        return None
    return resolve(named, scenario.folder)


def _write_steps(live: "LiveRun", file: BinaryIO) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS + OPTIONAL_COLUMNS)
    for timing in live.timings:
        done = timing.measured
        whole = not isfinite(done.device_s)  # no part of it was measured
        swapped = nan if whole else done.swap_out_s + done.swap_in_s
        parts = (done.device_s, done.host_s, swapped, done.wall_s, timing.schedule_s)
        numbers = (timing.seconds, timing.predicted_s, *parts)
        writer.writerow(
            [
                f"{timing.start:.9g}",
                *(f"{number:.5g}" if isfinite(number) else "" for number in numbers),
                timing.decodes,
                timing.context,
                write_chunks(timing.chunks),
                write_counts(timing.swapped_out),
                write_counts(timing.swapped_in),
                *("" if whole else getattr(done, name) for name in OPTIONAL_COLUMNS),
            ]
        )
    file.write(text.getvalue().encode())


def read_measured(folder: Path) -> list[MeasuredStep]:
    """Read steps_measured.csv, packed or not; HeadwayError where it is damaged or missing."""
    path = folder / MEASURED
    packed = folder / f"{MEASURED}.gz"
    if not path.exists() and not packed.exists():
        raise HeadwayError(f"{folder}: is no folder of `headway live`: has no {MEASURED}")
    text = read_text(path if path.exists() else packed)
    turns = count()
    return parse_rows(path, read_csv(path, text, COLUMNS), lambda line: _step(line, next(turns)))


def _step(line: Mapping[str, str], turn: int) -> MeasuredStep:
    fixed = {"run": "live", "kind": "onpolicy", "path": "", "point": "-1", "turn": str(turn)}
    whole = not any(line[name] for name in PARTS)
    if whole:
        line = {**line, **dict.fromkeys(PARTS, "0"), "bucket": "0"}
    row = parse_row({**fixed, "bucket": "0", "longest": "0", **line})
    others = {name: _number(name, line[name]) for name in NUMBERS}
    schedule = nan if whole else others["schedule_s"]
    return MeasuredStep(row, others["predicted_s"], schedule, others["swap_s"])


def _number(name: str, text: str) -> float:
    """Read a number of at least 0; ValueError tells which is none."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < inf:
        raise ValueError(f"{name}: must be a number, at least 0, not {text!r}")
    return value


def read_about(folder: Path) -> dict[str, object]:
    """Read live.json; HeadwayError where it is damaged or missing."""
    if not folder.is_dir():
        raise HeadwayError(f"{folder}: no such folder")
    path = folder / ABOUT
    if not path.exists():
        raise HeadwayError(f"{folder}: is no folder of `headway live`: has no {ABOUT}")
    about = read_json(path)
    if not {"device", "clock"} <= set(about):
        raise HeadwayError(f"{path}: is no description of a live run")
    return about


def read_requests(folder: Path) -> "pd.DataFrame":
    """Read ttft, tpot and e2el of requests.csv; NaN where a request has none."""
    import pandas as pd

    path, names = folder / "requests.csv", ["ttft", "tpot", "e2el"]
    try:
        exact = dict.fromkeys(names, lambda cell: float(cell or "nan"))
        return pd.read_csv(path, usecols=names, converters=exact)[names]
    except OSError as error:
        raise HeadwayError(f"{path}: cannot read: {error.strerror}") from None
    except pd.errors.EmptyDataError:
        raise HeadwayError(f"{path}: damaged: it is empty") from None
    except ValueError as error:
        raise HeadwayError(f"{path}: damaged: {error}") from None
