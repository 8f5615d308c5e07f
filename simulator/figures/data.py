"""What pictures are drawn of: runs, from memory or from their folders, and tables of many."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from simulator.results.time_series import mean_in_bins
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    import pandas as pd

    from simulator.simulation.result import Result

Floats = npt.NDArray[np.float64]
BINS = 300  # points of a line over time
REQUESTS = (
    *("id", "arrival", "client_queue_time", "queue_time", "e2el", "preemptions"),
    *("ttft", "tpot"),
)
EVERYWHERE = ("id", "prompt_tokens", "output_tokens")  # columns without an empty cell
STEPS = (
    *("start", "duration", "steps", "running", "decode_tokens", "kv_blocks_used"),
    *("kv_blocks_free", "preempted"),
)


@dataclass(slots=True)
class Run:
    """One run under a label, as its files tell it; fairness is None without several clients."""

    label: str
    summary: dict[str, Any]
    scenario: dict[str, Any]
    requests: "pd.DataFrame"
    steps: "pd.DataFrame"
    fairness: "pd.DataFrame | None" = None

    @classmethod
    def of(cls, label: str, result: "Result") -> "Run":
        """Take a run from memory."""
        import pandas as pd

        from simulator.results.fairness import several_clients
        from simulator.results.frames import client_tables

        fairness = None
        if several_clients(result.workload):
            fairness = pd.DataFrame(client_tables(result)["fairness"])
        scenario = result.scenario.resolved()
        return cls(label, result.summary(), scenario, result.requests, result.steps, fairness)

    @classmethod
    def read(cls, folder: Path, label: str) -> "Run":
        """Read the folder that `headway run` wrote; HeadwayError for what is missing or damaged."""
        import yaml

        summary = folder / "summary.json"
        if not summary.is_file():
            raise HeadwayError(f"{folder}: no run's folder: has no summary.json")
        try:
            told = json.loads(summary.read_text("utf-8"))
            scenario = yaml.safe_load((folder / "scenario.yaml").read_text("utf-8"))
            _ = told["headway"], scenario["name"]
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            raise HeadwayError(f"{folder}: cannot read the run: {error}") from None
        fairness = table(folder, "fairness") if has_table(folder, "fairness") else None
        requests, steps = table(folder, "requests"), table(folder, "steps")
        need_numbers(requests, REQUESTS, folder / "requests")
        need_numbers(steps, STEPS, folder / "steps")
        return cls(label, told, scenario, requests, steps, fairness)

    @property
    def end(self) -> float:
        """When the last step ended, in s."""
        return float((self.steps.start + self.steps.duration).max()) if len(self.steps) else 0.0

    def over_time(self, levels: "pd.Series", edges: Floats) -> Floats:
        """Average over each bin what each row of steps holds, added up over replicas."""
        total = np.zeros(len(edges) - 1)
        for rows in replicas(self.steps):
            start = self.steps.start.to_numpy()[rows]
            end = start + self.steps.duration.to_numpy()[rows]
            total += mean_in_bins(start, end, levels.to_numpy()[rows], edges)
        return total


def replicas(steps: "pd.DataFrame") -> Iterable[npt.NDArray[np.bool_]]:
    """Give the rows of each replica."""
    if "replica" not in steps:
        return [np.ones(len(steps), bool)]
    numbers = steps.replica.to_numpy()
    return [numbers == number for number in np.unique(numbers)]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs; a folder of `headway compare` stands for its runs."""
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise HeadwayError(f"{folder}: no such folder")
        inner = [folder]
        if (folder / "comparison.csv").is_file():
            inner = [folder / str(name) for name in table(folder, "comparison").run]
        found += inner
    return [Run.read(path, label) for path, label in zip(found, labels(found), strict=True)]


def labels(folders: Sequence[Path]) -> list[str]:
    """Name each run by its folder, with the folders above where two are called the same."""
    for depth in range(1, 20):
        names = ["/".join(folder.resolve().parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    raise HeadwayError(f"{folders[0]}: is given twice")


def has_table(folder: Path, name: str) -> bool:
    """Tell whether a table is there, as CSV or Parquet."""
    return any((folder / f"{name}.{kind}").is_file() for kind in ("csv", "parquet"))


def table(folder: Path, name: str) -> "pd.DataFrame":
    """Read one of a folder's tables; HeadwayError where it is missing or broken."""
    import pandas as pd

    path = folder / f"{name}.csv"
    try:
        if not path.is_file() and (folder / f"{name}.parquet").is_file():
            path = folder / f"{name}.parquet"
            return pd.read_parquet(path)
        return pd.read_csv(path)
    except FileNotFoundError:
        raise HeadwayError(f"{folder}: has no {name}.csv") from None
    except (OSError, ValueError, ImportError) as error:
        raise HeadwayError(f"{path}: cannot read: {' '.join(str(error).split())}") from None


def need_numbers(frame: "pd.DataFrame", columns: Sequence[str], where: object) -> None:
    """Raise HeadwayError unless the table has these columns, and numbers in them."""
    import pandas as pd

    need(frame, columns, where)
    for name in columns if len(frame) else ():  # without rows there is no telling
        lacking = name in EVERYWHERE and frame[name].isna().any()
        if lacking or not pd.api.types.is_numeric_dtype(frame[name]):
            raise HeadwayError(f"{where}: damaged: {name} holds what is no number")


def need(frame: "pd.DataFrame", columns: Sequence[str], where: object) -> None:
    """Raise HeadwayError unless the table has these columns."""
    if missing := [name for name in columns if name not in frame]:
        raise HeadwayError(f"{where}: has no column {', '.join(missing)}")
