"""What pictures and pages are drawn of: runs, from memory or from their folders."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.results.breakdown import PARTS
from simulator.results.read import (
    COMPLETED,
    WRITES,
    check_completed,
    check_count,
    check_rows,
    check_values,
    find_table,
    load_mapping,
    load_summary,
    need_columns,
    read_table,
    read_yaml,
)
from simulator.results.request_table import RETRY, Floats
from simulator.results.time_series import mean_in_bins
from simulator.util.errors import HeadwayError
from simulator.util.files import check_regular

if TYPE_CHECKING:
    import pandas as pd

    from simulator.simulation.result import Result

BINS = 300  # points of a line over time
REQUESTS = (
    *("id", "arrival", "client_queue_time", "prompt_tokens", "output_tokens"),
    *("queue_time", "ttft", "tpot", "e2el", *PARTS, "preemptions", "replica"),
)
STEPS = (
    *("start", "duration", "steps", "running", "waiting", "prefill_tokens", "decode_tokens"),
    *("wasted_tokens", "kv_blocks_used", "kv_blocks_free", "preempted"),
)
"""Columns that must be there and hold numbers."""


@dataclass(slots=True)
class Run:
    """One run under a label, as its files tell it; fairness is None without several clients."""

    label: str
    summary: Mapping[str, Any]
    scenario: Mapping[str, Any]
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
        summary = load_summary(folder / "summary.json")
        scenario = load_mapping(folder / "scenario.yaml", read_yaml)
        if not isinstance(scenario.get("engine"), Mapping):
            raise HeadwayError(f"{folder / 'scenario.yaml'}: has no key engine")
        requests = read_table(folder, "requests", REQUESTS)
        need_columns(requests, ["finish_reason"], find_table(folder, "requests"))
        check_values(requests, REQUESTS, find_table(folder, "requests"))
        check_rows(requests, find_table(folder, "requests"))
        check_count(find_table(folder, "requests"), len(requests), summary, "num_prompts")
        completed = int(requests["finish_reason"].isin(COMPLETED).sum())
        check_completed(find_table(folder, "requests"), completed, summary)
        steps = read_table(folder, "steps", STEPS)
        check_values(steps, STEPS, find_table(folder, "steps"))
        check_count(find_table(folder, "steps"), steps.steps.sum(), summary, "steps")
        fairness = None
        if summary["headway"].get("clients") is not None:
            clients, fairness = read_table(folder, "clients"), read_table(folder, "fairness")
            check_count(find_table(folder, "clients"), len(clients), summary, "clients")
            check_count(find_table(folder, "fairness"), len(fairness), summary, "fairness_windows")
        return cls(label, summary, scenario, requests, steps, fairness)

    @property
    def end(self) -> float:
        """When the last step ended, in s."""
        return float((self.steps.start + self.steps.duration).max()) if len(self.steps) else 0.0

    @property
    def sent(self) -> "pd.Series[float]":
        """When each request was sent, in s."""
        return self.requests.arrival + self.requests.client_queue_time

    @property
    def admitted(self) -> "pd.Series[float]":
        """When each request was first scheduled, in s."""
        return self.sent + self.requests.get(RETRY, 0.0) + self.requests.queue_time

    @property
    def policy(self) -> str:
        """The name of the scheduling policy, which may have arguments."""
        policy = self.scenario["engine"].get("scheduling_policy", "")
        return str(policy.get("policy", "") if isinstance(policy, Mapping) else policy)

    @property
    def groups(self) -> Mapping[str, Mapping[str, Any]]:
        """What the summary says of each group of a cluster; empty where there is none."""
        cluster = self.summary["headway"].get("cluster")
        found = cluster.get("groups") if isinstance(cluster, Mapping) else None
        if not isinstance(found, Mapping):
            return {}
        return {name: group for name, group in found.items() if isinstance(group, Mapping)}

    def replicas(self) -> "Iterator[tuple[int, pd.DataFrame]]":
        """Yield the number of each replica and its steps."""
        if "replica" not in self.steps:
            yield 0, self.steps
        else:
            yield from self.steps.groupby("replica")

    def there(self, edges: Floats) -> list[Floats]:
        """Give for each replica the share of each bin for which it was paid for."""
        own = self.summary["headway"]
        cluster = own.get("cluster")
        paid = cluster.get("paid_times") if isinstance(cluster, Mapping) else None
        if paid is None:
            known = own.get("replicas")
            many = known if isinstance(known, int) else sum(1 for _ in self.replicas())
            return [np.ones(len(edges) - 1)] * many
        found = []
        try:
            for spans in paid:
                begins = np.array([float(begin) for begin, _ in spans])
                ends = np.array([edges[-1] if end is None else float(end) for _, end in spans])
                known_ends = np.maximum(begins, ends)
                found.append(mean_in_bins(begins, known_ends, np.ones(len(spans)), edges))
        except (TypeError, ValueError):
            raise HeadwayError(
                f"{self.label}: summary.json: headway.cluster.paid_times: must be lists of "
                "[from, to], in s"
            ) from None
        return found

    def over_time(self, levels: "pd.Series[float]", edges: Floats) -> Floats:
        """Average over each bin what each row of steps holds, added up over replicas."""
        total = np.zeros(len(edges) - 1)
        for _, steps in self.replicas():
            start = steps.start.to_numpy(float)
            end = start + steps.duration.to_numpy(float)
            total += mean_in_bins(start, end, levels[steps.index].to_numpy(), edges)
        return total


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs in these folders; HeadwayError for what is missing or damaged.

    A folder of `headway compare`, or one of runs, stands for its runs.
    """
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise HeadwayError(f"{folder}: no such folder; {WRITES}")
        inside = _compared(folder) or sorted(p.parent for p in folder.glob("*/summary.json"))
        if (folder / "summary.json").exists() or not inside:
            inside = [folder]
        found += inside
    return [Run.read(path, label) for path, label in zip(found, _labels(found), strict=True)]


def _compared(folder: Path) -> list[Path]:
    """List the folders of a comparison's runs in its own order, if it says so."""
    import pandas as pd

    check_regular(folder / "comparison.csv")
    try:
        names = pd.read_csv(folder / "comparison.csv", dtype=str, usecols=["run"]).run
    except (OSError, ValueError):
        return []
    found = [folder / str(name) for name in names]
    return found if all((path / "summary.json").exists() for path in found) else []


def _labels(folders: Sequence[Path]) -> list[str]:
    """Name each run by its folder, with the folders above where two are called the same."""
    for depth in range(1, 20):
        names = ["/".join(folder.resolve().parts[-depth:]) for folder in folders]
        # A name's bytes are UTF-8, whatever the locale takes them for.
        names = [os.fsencode(name).decode("utf-8", "replace") for name in names]
        if len(set(names)) == len(names):
            return names
    raise HeadwayError(f"{folders[0]}: is given twice")
