"""Runs of any length on many workers: each simulates some of a fleet's pods and sends sums back.

What a worker has sent stands in a file beside the run's until that is over, so that a run that was
stopped goes on where it was. Every worker makes the whole workload, a part of it at a time, and
keeps what its pods get. What depends on the order of all requests, as how many there are at once,
is counted when all are done, from when each came and left.
"""

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, BinaryIO, cast
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from simulator.build.policy_table import missing_inputs
from simulator.results.metrics import RunMetrics
from simulator.scenario.resolve import resolve_groups
from simulator.scenario.scenario import Scenario
from simulator.simulation import stream
from simulator.simulation.independent import (
    attempt,
    cut,
    need_no_coupling,
    part_failed,
    pod_members,
    standing_record,
)
from simulator.simulation.setup import Progress
from simulator.simulation.stream import first_chunk
from simulator.util.errors import HeadwayError
from simulator.util.files import READ_FILES, write_atomic
from simulator.util.sums import add_sums, take_sums
from simulator.util.version import __version__
from simulator.util.workers import WorkerDied, parallel_map
from simulator.workload.workload import Workload

FOLDER = "partitions"
"""Of the files of parts that are done, in the folder of a run that is not."""
MOST_PARTS = 16  # for which a chunk is made longer, so that each has many requests of it

Sums = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Partition:
    """Some pods of a cluster; without pods each replica is one."""

    scenario: Scenario
    pods: range
    size: int  # requests of the whole run in a chunk
    total: int  # requests of the whole run
    leap: bool
    tables: Path | None  # a folder for its requests and steps
    inputs: tuple[tuple[str, int, int], ...] = ()  # files that were read, their size, their time

    @property
    def key(self) -> str:
        """A short name: by version, whole scenario with its files, and which part of it this is."""
        what = [str(self.scenario.folder.resolve()), self.scenario.resolved()]
        cut = [self.pods.start, self.pods.stop, self.size, self.leap, str(self.tables), self.inputs]
        text = json.dumps([__version__, *what, cut], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def run_partitions(
    scenario: Scenario,
    folder: Path,
    *,
    stepwise: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    tables: Path | None = None,
) -> dict[str, Any]:
    """Simulate a cluster of any number of requests on joblib's active backend; see `run_streamed`.

    Percentiles are as far off as there, all else is as from one process. What is done is kept in
    `folder`, for the same call to go on from, until `forget_partitions`. Raises HeadwayError where
    pods are tied together, or a part of them could not be simulated; the others are kept.
    """
    stream.refuse(scenario)
    first, load = first_chunk(scenario, stream.CHUNK)
    total = load.total
    need_no_coupling(scenario, first)
    cuts = cut(len(set(scenario.servers.pod_numbers)), jobs)
    size = stream.CHUNK * min(len(cuts), MOST_PARTS)
    parts = [
        Partition(scenario, pods, size, total, not stepwise, tables=tables, inputs=_inputs())
        for pods in cuts
    ]
    paths = [folder / FOLDER / f"{part.key}.npz" for part in parts]
    if {*(folder / FOLDER).glob("*.npz")} - {*paths}:
        raise HeadwayError(
            f"{folder / FOLDER}: has parts of another command, of more or fewer workers (now "
            f"{jobs}), or of files that have changed since; take it away, or give another --out"
        )
    _run_missing(parts, paths, jobs, total, progress)
    return _summarize(scenario, first, total, paths)


def _inputs() -> tuple[tuple[str, int, int], ...]:
    """Return the user's files that a run reads, each with its size and when it was changed, ns."""
    own = Path(stream.__file__).parents[1]
    read = sorted(path for path in READ_FILES if not path.is_relative_to(own) and path.exists())
    found = [(path, path.stat()) for path in read]
    return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found)


def forget_partitions(folder: Path) -> None:
    """Take away what `run_partitions` has kept for a run that is over."""
    rmtree(folder / FOLDER, ignore_errors=True)


def _run_missing(
    parts: Sequence[Partition],
    paths: Sequence[Path],
    jobs: int | None,
    total: int,
    progress: Progress | None,
) -> None:
    """Run the parts that have no file yet; one that fails stops no other."""
    left = [index for index, path in enumerate(paths) if not path.exists()]
    now, failed = 0.0, dict[str, list[range]]()
    done = len(parts) - len(left)
    missing = [parts[index] for index in left]
    for at, outcome in parallel_map(partial(attempt, run_partition), missing, jobs):
        part, path = parts[left[at]], paths[left[at]]
        if isinstance(outcome, WorkerDied):
            failed.setdefault(outcome.reason, []).append(part.pods)
            continue
        try:
            write_atomic(path, partial(_write, outcome))
        except HeadwayError as error:
            raise HeadwayError(f"{error}{_kept(done, parts)}") from error
        done, now = done + 1, max(now, float(outcome["/_end"]))
        if progress is not None:
            progress(now, total * done // len(parts), total)
    if failed:
        lines = [
            f"{part_failed(parts[0].scenario, pods[0], why)}"
            + f" (and {len(pods) - 1} other parts)" * (len(pods) > 1)
            for why, pods in failed.items()
        ]
        raise HeadwayError([*lines[:-1], lines[-1] + _kept(done, parts)])


def _kept(done: int, parts: Sequence[Partition]) -> str:
    kept = f"; {done} of {len(parts)} parts are kept, and the same command goes on from there"
    return kept * bool(done)


def _write(sums: Sums, file: BinaryIO) -> None:
    np.savez(file, allow_pickle=False, **cast(Any, sums))


def run_partition(part: Partition) -> Sums:
    """Run some pods in a worker; return their sums."""
    with warnings.catch_warnings(record=True):  # what there is to warn of is said once
        first, load = first_chunk(part.scenario, part.size, part.total)
        specs = resolve_groups(part.scenario)
        streamed = stream.stream_pods(
            part.scenario, specs, first, load, part.size, pods=part.pods, leap=part.leap
        )
        members = pod_members(part.scenario)
        numbers = sorted(number for pod in part.pods for number in members[pod])
        if part.tables is not None:
            streamed.write_tables(part.tables, part.pods.start, numbers)
        stream.drive_stream(streamed)
    sums = dict(take_sums(streamed.metrics))
    for name in ("/cluster/_ended", "/cluster/_busy_time"):
        whole = np.zeros(len(part.scenario.servers.pod_numbers), sums[name].dtype)
        whole[numbers] = sums[name]
        sums[name] = whole
    for number, stays in enumerate(streamed.metrics.stays or ()):
        sums[f"stays/{number}"] = stays
    sums["limits"] = np.array(streamed.engines[0].limits)
    return sums | {"warned": np.array([*streamed.warned.values()], np.str_)}


def _summarize(
    scenario: Scenario,
    first: Workload,
    total: int,
    paths: Sequence[Path],
) -> dict[str, Any]:
    """Put the sums of all parts together."""
    specs, record = resolve_groups(scenario), standing_record(scenario)
    cores = [specs[group] for group in record.groups]
    metrics = RunMetrics(scenario, first, cores, cluster=record, total=total)
    messages = dict.fromkeys(missing_inputs(specs.values(), first, None))
    files = [_read(path) for path in paths]
    for found in files:
        add_sums(metrics, found)
        messages |= dict.fromkeys(found["warned"].tolist())
    number = 0
    while (name := f"stays/{number}") in files[0]:
        metrics.add_stays(np.concatenate([found[name] for found in files]))
        number += 1
    limits = str(files[0]["limits"])
    for found in files:
        found.close()
    return stream.summarize(scenario, metrics, cores[0], specs, [*messages], limits=limits)


def _read(path: Path) -> Any:
    """Open the file of a part; its arrays are read as they are asked for."""
    try:
        found = np.load(path, allow_pickle=False)
        found["limits"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise HeadwayError(f"{path}: is no part of a run; take it out") from error
    return found
