"""Runs as `headway run` wrote them, read back from their folders."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.figures.data import labels, need, need_numbers
from simulator.results.breakdown import PARTS
from simulator.results.read import WRITES, load_mapping, read_yaml
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    import pandas as pd

REQUESTS = (
    *("id", "arrival", "client_queue_time", "prompt_tokens", "output_tokens"),
    *("queue_time", "ttft", "tpot", "e2el", *PARTS, "preemptions", "replica"),
)
STEPS = (
    *("start", "duration", "steps", "running", "waiting", "prefill_tokens", "decode_tokens"),
    *("wasted_tokens", "kv_blocks_used", "kv_blocks_free", "preempted"),
)
WORDS = ("client", "finish_reason")


@dataclass(slots=True)
class Run:
    """What a run left in its folder."""

    folder: Path
    label: str
    summary: Mapping[str, Any]
    scenario: Mapping[str, Any]
    requests: "pd.DataFrame"
    steps: "pd.DataFrame"

    @property
    def groups(self) -> Mapping[str, Mapping[str, Any]]:
        """What the summary says of each group of a cluster; empty where there is none."""
        cluster = self.summary["headway"].get("cluster")
        found = cluster.get("groups") if isinstance(cluster, Mapping) else None
        if not isinstance(found, Mapping):
            return {}
        return {name: group for name, group in found.items() if isinstance(group, Mapping)}

    @property
    def engine(self) -> Mapping[str, Any]:
        """The scenario's engine."""
        engine: Mapping[str, Any] = self.scenario["engine"]
        return engine


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """List the folders of runs: those given, or those inside, where they are of a comparison."""
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise HeadwayError(f"{folder}: no such folder; {WRITES}")
        inside = _compared(folder) or sorted(p.parent for p in folder.glob("*/summary.json"))
        if (folder / "summary.json").exists() or not inside:
            inside = [folder]
        found += inside
    return found


def _compared(folder: Path) -> list[Path]:
    """List the folders of a comparison's runs in its own order, if it says so."""
    import pandas as pd

    try:
        names = pd.read_csv(folder / "comparison.csv", dtype=str, usecols=["run"]).run
    except (OSError, ValueError):
        return []
    found = [folder / str(name) for name in names]
    return found if all((path / "summary.json").exists() for path in found) else []


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs in these folders; raise HeadwayError for what is missing or damaged."""
    found = find_runs(folders)
    return [read_run(folder, label) for folder, label in zip(found, labels(found), strict=True)]


def read_run(folder: Path, label: str) -> Run:
    """Read one run's folder; raise HeadwayError for what is missing or damaged."""
    summary = load_mapping(folder / "summary.json", json.loads)
    for key in ("headway", "completed", "duration"):
        if key not in summary:
            raise HeadwayError(f"{folder / 'summary.json'}: has no key {key}")
    scenario = load_mapping(folder / "scenario.yaml", read_yaml)
    if not isinstance(scenario.get("engine"), Mapping):
        raise HeadwayError(f"{folder / 'scenario.yaml'}: has no key engine")
    requests = _table(folder, "requests", REQUESTS)
    need(requests, ["finish_reason"], folder / "requests")
    return Run(folder, label, summary, scenario, requests, _table(folder, "steps", STEPS))


def _table(folder: Path, name: str, columns: Sequence[str]) -> "pd.DataFrame":
    """Read a table, CSV or Parquet, whose `columns` must be there and hold numbers."""

    path = folder / f"{name}.csv"
    if not path.exists() and (other := folder / f"{name}.parquet").exists():
        path = other
    try:
        frame = _parquet(path) if path.suffix == ".parquet" else _csv(path)
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file; {WRITES}") from None
    except (OSError, ValueError) as error:  # pandas' ParserError is a ValueError
        told = " ".join(str(error).split())
        raise HeadwayError(f"{path}: damaged: {told}") from None
    need_numbers(frame, columns, path)
    return frame if len(frame) else frame.astype(dict.fromkeys(columns, float))


def _csv(path: Path) -> "pd.DataFrame":
    import pandas as pd

    words = dict.fromkeys(WORDS, "category")
    return pd.read_csv(path, dtype=words, keep_default_na=False, na_values=[""])


def _parquet(path: Path) -> "pd.DataFrame":
    import pandas as pd

    from simulator.simulation.write import need_pyarrow

    need_pyarrow()
    return pd.read_parquet(path, engine="pyarrow")
