"""What a server showed over time, requests running and KV cache in use, and the simulation's."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from calibration.measured.requests import read_rows_of

if TYPE_CHECKING:
    from simulator.simulation.result import Result

Floats = npt.NDArray[np.float64]
TIME = ("relative_time_sec", "t", "time_s", "time")
COLUMNS = {
    "running": ("num_requests_running", "running"),
    "waiting": ("num_requests_waiting", "waiting"),
    "kv_usage": ("kv_cache_usage_pct", "kv_cache_pct"),
}


@dataclass(frozen=True)
class Gauges:
    """Times in seconds, and the value of each gauge from then on; KV usage in percent."""

    time: Floats
    columns: Mapping[str, Floats]

    def mean(self, name: str) -> float:
        """Give the mean of a gauge over time."""
        widths = np.diff(self.time)
        total = float(widths.sum())
        values = self.columns[name][:-1]
        return float((values * widths).sum()) / total if total > 0 else 0.0


def measured_gauges(path: Path) -> Gauges | None:
    """Read a server's polls; None where they tell nothing. A column of zeros was not recorded.

    HeadwayError where the file is damaged, ValueError where a cell holds no number.
    """
    rows = read_rows_of(path)
    known = list(rows[0]) if rows else []
    time = next((word for word in TIME if word in known), None)
    found = {
        ours: next((word for word in theirs if word in known), None)
        for ours, theirs in COLUMNS.items()
    }
    columns = {
        ours: np.array([float(row[theirs] or "nan") for row in rows])
        for ours, theirs in found.items()
        if theirs is not None
    }
    columns = {name: column for name, column in columns.items() if np.nansum(column) > 0}
    if time is None or not columns:
        return None
    return Gauges(np.array([float(row[time]) for row in rows]), columns)


def predicted_gauges(result: "Result") -> Gauges:
    """Give the simulation's gauges, a value for each logged row of steps."""
    log = result.logs[0]
    steps = log.steps
    return Gauges(
        np.append(steps["start"], steps["end"][-1:]),
        {
            "running": np.append(steps["running"].astype(float), 0.0),
            "waiting": np.append(steps["waiting"].astype(float), 0.0),
            "kv_usage": np.append(steps["blocks_used"] / log.num_blocks * 100.0, 0.0),
        },
    )
