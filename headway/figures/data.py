"""What pictures and pages are drawn of: runs, from memory or from their folders."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.runs.explain import COLUMNS, TEXTS
from headway.runs.parts import count_rows
from headway.runs.read import (
    COMPLETED,
    WRITES,
    check_changes,
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
from headway.runs.read_parts import FEW, read_share, read_together
from simulator.results.record import COME_AND_GO
from simulator.results.request_table import RETRY, Floats
from simulator.results.time_series import count_in_bins, depth_in_bins, mean_in_bins
from simulator.scenario.engine_defaults import policy_name_of
from simulator.simulation.result import Result
from simulator.util.errors import HeadwayError
from simulator.util.files import check_regular

if TYPE_CHECKING:
    import pandas as pd

SLOW = 3.0  # times the shortest run: a run that takes longer is cut off in charts over time
BINS = 300  # points of a line over time
REQUESTS = tuple(name for name in COLUMNS if name not in {*TEXTS, "cached_tokens"})
STEPS = (
    "start",
    "duration",
    "steps",
    "running",
    "waiting",
    "prefill_tokens",
    "decode_tokens",
    "wasted_tokens",
    "kv_blocks_used",
    "kv_blocks_free",
    "preempted",
)
CHANGES = ("time", "replica")
"""Columns that must be there and hold numbers."""
SERVING = ("up", "draining")  # states in which a replica has requests
RESERVING = {"orca", "tgi", "trtllm"}  # schedulers that reserve the whole answer on admission


@dataclass(slots=True)
class Run:
    """One run under a label, as its files tell it; fairness is None without several clients."""

    label: str
    summary: Mapping[str, Any]
    scenario: Mapping[str, Any]
    requests: "pd.DataFrame"
    steps: "pd.DataFrame"
    fairness: "pd.DataFrame | None" = None
    changes: "pd.DataFrame | None" = None  # of the states of replicas, if any ever changed
    each: float = 1.0
    """Requests that a row stands for: more than 1 of a long run in parts (`read_parts`)."""

    @classmethod
    def of(cls, label: str, result: Result) -> "Run":
        """Take a run from memory."""
        import pandas as pd

        from simulator.results.fairness import several_clients
        from simulator.results.frames import as_frame, client_tables, replica_columns

        fairness = changes = None
        if several_clients(result.workload):
            fairness = pd.DataFrame(client_tables(result)["fairness"])
        if result.cluster is not None and result.cluster.comes_and_goes:
            changes = as_frame(replica_columns(result.cluster))
        tables = (result.requests, result.steps, fairness, changes)
        return cls(label, result.summary(), result.scenario.resolved(), *tables)

    @classmethod
    def read(cls, folder: Path, label: str) -> "Run":
        """Read the folder that `headway run` wrote; HeadwayError for what is missing or damaged."""
        summary = load_summary(folder / "summary.json")
        scenario = load_mapping(folder / "scenario.yaml", read_yaml)
        if not isinstance(scenario.get("engine"), Mapping):
            raise HeadwayError(f"{folder / 'scenario.yaml'}: has no key engine")
        place, each = find_table(folder, "requests"), 1.0
        if count_rows(place) > FEW:
            requests, count, completed = read_share(place, REQUESTS)
            each = count / len(requests)
        else:
            requests = read_table(folder, "requests", REQUESTS)
            need_columns(requests, ["finish_reason"], place)
            check_values(requests, REQUESTS, place)
            check_rows(requests, place)
            count, completed = len(requests), int(requests["finish_reason"].isin(COMPLETED).sum())
        check_count(place, count, summary, "num_prompts")
        check_completed(place, completed, summary)
        steps = _read_steps(folder, summary, scenario, together=each > 1.0)
        check_count(find_table(folder, "steps"), steps.steps.sum(), summary, "steps")
        fairness = None
        told = summary["headway"]
        if told.get("clients") is not None and "fairness_windows" in told:  # else streamed
            clients, fairness = read_table(folder, "clients"), read_table(folder, "fairness")
            check_count(find_table(folder, "clients"), len(clients), summary, "clients")
            check_count(find_table(folder, "fairness"), len(fairness), summary, "fairness_windows")
        changes = None
        cluster = summary["headway"].get("cluster")
        if isinstance(cluster, Mapping) and any(cluster.get(name) for name in COME_AND_GO):
            changes = read_table(folder, "replicas", CHANGES)
            check_changes(changes, find_table(folder, "replicas"))
        return cls(
            label, summary, scenario, requests, steps, fairness=fairness, changes=changes, each=each
        )

    @property
    def count(self) -> int:
        """How many requests there were."""
        return round(self.each * len(self.requests))

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
        return str(policy_name_of(self.scenario["engine"]) or "")

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

    @property
    def cores(self) -> list[tuple[str, float]]:
        """For each engine core its group, and what part of a replica it is."""
        found: list[tuple[str, float]] = []
        for name, group in self.groups.items():
            servers, ranks = group.get("replicas"), group.get("data_parallel_size", 1)
            if isinstance(servers, int) and isinstance(ranks, int) and ranks > 0:
                found += [(name, 1 / ranks)] * (servers * ranks)
        numbers = [
            int(rows["replica"].max()) + 1
            for rows in (self.steps, self.changes)
            if rows is not None and "replica" in rows and len(rows)
        ]
        return found + [("", 1.0)] * (max(numbers, default=1) - len(found))

    def state_periods(self) -> list[dict[str, list[tuple[float, float]]]]:
        """Return for each engine core from when to when (s) it was in each state."""
        end = self.end
        if self.changes is None:
            return [{"up": [(0.0, end)]} for _ in self.cores]
        found: list[dict[str, list[tuple[float, float]]]] = [{} for _ in self.cores]
        for number, rows in self.changes.groupby("replica"):
            changes = [*zip(rows["time"], rows["state"], strict=True), (end, "off")]
            for (begin, state), (over, _) in pairwise(changes):
                if begin < min(over, end):
                    found[int(number)].setdefault(state, []).append((begin, min(over, end)))
        return found

    def serving(self, edges: Floats) -> list[Floats]:
        """Return for each engine core the share of each bin for which it serves."""
        return [
            share_of_bins([period for state in SERVING for period in periods.get(state, ())], edges)
            for periods in self.state_periods()
        ]

    @property
    def told_at_start(self) -> bool:
        """Whether steps tell how long the queue is as they start.

        Those of an asynchronous engine tell it as they are decided, those of a long run in parts
        have means over their time.
        """
        return self.each == 1 and not self.scenario["engine"].get("async_scheduling")

    @property
    def first_replica(self) -> "pd.Series[float]":
        """The replica in whose queue each request waited; no column tells of a decoder's apart."""
        return self.requests.get("prefill_replica", self.requests["replica"])

    def queues(self) -> "Iterator[tuple[int, pd.DataFrame, Floats]]":
        """Yield each replica's number, its steps and the times at which its queue was joined.

        No times where steps do not tell how long the queue is as they start (`told_at_start`).
        """
        entered = self.sent + (self.requests[RETRY].fillna(0.0) if RETRY in self.requests else 0.0)
        entered = entered[self.requests["finish_reason"].astype(object) != "rejected"].dropna()
        joined = dict(list(entered.groupby(self.first_replica))) if self.told_at_start else {}
        for number, steps in self.replicas():
            if len(steps):
                yield number, steps, np.sort(np.asarray(joined.get(number, ()), float))

    def queue_depth(
        self, number: int, levels: tuple[Floats, Floats], joined: Floats, edges: Floats
    ) -> Floats:
        """Average over bins a replica's queue: its `levels`, when and how deep, and who came since.

        Else the levels lack those who came within a step, and the requests' times those who
        waited once more after a preemption: the longer queue is taken.
        """
        depth = depth_in_bins(*levels, joined, edges)
        if self.told_at_start:
            return depth
        until = self.admitted[self.first_replica == number].dropna()
        left = np.asarray(until)
        came = left - np.asarray(self.requests["queue_time"][until.index])
        return np.maximum(depth, self.each * count_in_bins(came, left, edges))

    def blocks_used(self, steps: "pd.DataFrame") -> Floats:
        """Get the blocks in use, in the middle of each row: with paging they grow by the token."""
        known = self.each > 1  # they are so already
        return np.asarray(steps.kv_blocks_used if known else _blocks_used(self.scenario, steps))

    def over_time(self, levels: "pd.Series[float]", edges: Floats) -> Floats:
        """Average over each bin what each row of steps holds, added up over replicas."""
        total = np.zeros(len(edges) - 1)
        for _, steps in self.replicas():
            start = steps.start.to_numpy(float)
            end = start + steps.duration.to_numpy(float)
            total += mean_in_bins(start, end, levels[steps.index].to_numpy(), edges)
        return total


def _blocks_used(scenario: Mapping[str, Any], steps: "pd.DataFrame") -> Floats:
    used: Floats = steps["kv_blocks_used"].to_numpy(float)
    engine = scenario["engine"]
    if (
        engine.get("allocation") == "contiguous"
        or engine.get("reserve_output_tokens") is not None
        or policy_name_of(engine) in RESERVING
    ):
        return used
    sequences = (steps["decode_tokens"] + steps["wasted_tokens"]).to_numpy(float)
    later = steps["steps"].to_numpy(float) - 1
    grown = used + sequences * later / 2 / float(engine.get("block_size") or 1)
    most: Floats = np.minimum(grown, used + steps["kv_blocks_free"].to_numpy(float))
    return most


def _read_steps(
    folder: Path, summary: Mapping[str, Any], scenario: Mapping[str, Any], *, together: bool
) -> "pd.DataFrame":
    """Read the steps of a run, those of a long run in parts put `together`."""
    place = find_table(folder, "steps")
    if together:
        blocks, count = partial(_blocks_used, scenario), summary["headway"].get("replicas") or 1
        seconds = summary["duration"] or 1.0
        return read_together(place, STEPS, blocks, seconds=seconds, replicas=count)
    steps = read_table(folder, "steps", STEPS)
    check_values(steps, STEPS, place)
    return steps


def shown_until(runs: Sequence[Run]) -> tuple[float, str]:
    """Return the time (s) at which charts over time end, and what is to be told of runs that go on.

    A run that takes more than SLOW times as long as the shortest would squeeze the others: the
    charts end a little after the last of those that do not.
    """
    ends = [run.end for run in runs]
    others = [end for end in ends if end <= SLOW * min(ends)]
    if min(ends) <= 0 or len(others) == len(ends):
        return max(ends) or 1.0, ""
    until = 1.25 * max(others)
    slow = (f"{run.label} until {run.end:,.0f} s" for run in runs if run.end > until)
    return until, f"goes on: {', '.join(slow)}"


def share_of_bins(periods: Sequence[tuple[float, float]], edges: Floats) -> Floats:
    """Return the share of each bin that lies in stretches of time, from and to in s."""
    begin, end = np.array(sorted(periods), float).reshape(-1, 2).T
    return mean_in_bins(begin, end, np.ones(len(begin)), edges)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs in these folders; HeadwayError for what is missing or damaged.

    A folder of `headway compare`, or one of runs, stands for its runs.
    """
    return [Run.read(path, label) for path, label in run_folders(folders)]


def run_folders(folders: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return the folder of each run in these folders, and what it is called."""
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise HeadwayError(f"{folder}: no such folder; {WRITES}")
        inside = _compared(folder) or sorted(p.parent for p in folder.glob("*/summary.json"))
        if (folder / "summary.json").exists() or not inside:
            inside = [folder]
        found += inside
    return [*zip(found, _labels(found), strict=True)]


def _compared(folder: Path) -> list[Path]:
    """List the folders of a comparison's runs in its own order, if it says so."""
    path = folder / "comparison.csv"
    check_regular(path)
    if not path.exists():
        return []
    rows = read_table(folder, "comparison")
    need_columns(rows, ["run"], path)
    found = [folder / str(name) for name in dict.fromkeys(rows.run)]  # each metric has a row
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
