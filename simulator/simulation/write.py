"""The files of a run: summary.json, requests.csv, steps.csv and scenario.yaml."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from simulator.costs.profile import shipped_profiles
from simulator.engine.drive import LONGEST
from simulator.models.load import shipped_models
from simulator.results.fairness import several_clients
from simulator.results.frames import (
    as_frame,
    client_tables,
    count_rows,
    replica_columns,
    request_frame,
    request_parts,
    step_columns,
    step_frame,
    with_copy_seconds,
)
from simulator.scenario.scenario import Scenario
from simulator.simulation.result import Result
from simulator.util.csv_text import Column, Numbers, encode_header, encode_rows
from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError
from simulator.util.files import Contents, resolve, write_together
from simulator.util.yaml_lines import dump_yaml

if TYPE_CHECKING:
    import pandas as pd

SLICE = 1 << 13  # rows encoded together: what they take stays in a core's cache
FORMATS = ("csv", "parquet")
TABLES = ("requests", "steps", "clients", "fairness", "replicas")


def check_folder(folder: Path, format: str = "csv", option: str = "--out") -> Path:
    """See beforehand whether files can be written to a folder; leave it as it is."""
    if format == "parquet":
        need_package("--format parquet" if option == "--out" else option, "parquet", "pyarrow")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise HeadwayError(f"{option} {folder}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise HeadwayError(f"{option} {folder}: no permission to write to {there}")
    return folder


def check_parts(folder: Path, option: str = "--out") -> None:
    """Raise HeadwayError where a folder has tables in parts: two runs' would be one table."""
    if any(True for name in TABLES[:2] for _ in (folder / name).glob("*.parquet")):
        raise HeadwayError(f"{option} {folder}: has tables of another run; give another folder")


def remove_tables(folder: Path, written: Iterable[Path]) -> None:
    """Take away the tables that a run before has left in a folder: they are of no summary there."""
    kept = {path.name for path in written}
    for name in {f"{table}.{format}" for table in TABLES for format in FORMATS} - kept:
        (folder / name).unlink(missing_ok=True)


def check_span(result: Result) -> None:
    """Raise HeadwayError where a run lasts so long that its times are not exact."""
    end = max((float(log.steps["end"][-1]) for log in result.logs if log.step_rows), default=0.0)
    if end > LONGEST:
        raise HeadwayError(f"the run lasts {end:.0e} s; times are exact up to {LONGEST:.0e} s")


def write_run(
    result: Result, out: Path, format: str = "csv", more: Mapping[str, Contents] | None = None
) -> list[Path]:
    """Write a run's files to the folder `out`, all of them or none; return their paths.

    `format` is that of the two tables, csv or parquet; `more` are further files by name.
    Raises HeadwayError where the folder cannot be written, for parquet without pyarrow, or
    where the run's numbers are too large.
    """
    if format not in FORMATS:
        raise HeadwayError(f"--format: {format!r} is none of {', '.join(FORMATS)}")
    check_span(result)
    writers: dict[str, Contents] = {"summary.json": partial(_write_summary, result)}
    if format == "csv":
        writers["requests.csv"] = partial(_write_requests, result)
        writers["steps.csv"] = partial(_write_steps, result)
    else:
        need_package("--format parquet", "parquet", "pyarrow")
        writers["requests.parquet"] = partial(_write_parquet, request_frame(result))
        writers["steps.parquet"] = partial(_write_parquet, step_frame(result))
    tables = client_tables(result) if several_clients(result.workload) else {}
    if result.cluster is not None and result.cluster.comes_and_goes:
        tables["replicas"] = replica_columns(result.cluster)
    for name, columns in tables.items():
        writers[f"{name}.{format}"] = (
            partial(_write_table, f"{name}.csv", columns)
            if format == "csv"
            else partial(_write_parquet, as_frame(columns))
        )
    writers["scenario.yaml"] = partial(write_scenario, result.scenario, given=result.given)
    return write_together(out, writers | dict(more or {}))


def _write_summary(result: Result, file: BinaryIO) -> None:
    summary = result.summary()
    if wrong := list(_not_finite(summary)):
        raise HeadwayError(f"summary.json: no finite number: {', '.join(wrong)}")
    text = json.dumps(summary, indent=2, allow_nan=False)
    file.write(text.encode() + b"\n")


def _not_finite(values: Mapping[str, object]) -> Iterator[str]:
    """Name the keys whose values JSON cannot hold."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{inner}" for inner in _not_finite(value))
        elif isinstance(value, float) and not isfinite(value):
            yield f"{key} is {value}"


def _write_requests(result: Result, file: BinaryIO) -> None:
    for number, columns in enumerate(request_parts(result, SLICE)):
        if not number:
            file.write(encode_header(list(columns)))
        file.write(_encode("requests.csv", [*columns.values()]))


def _write_table(name: str, columns: Mapping[str, Column], file: BinaryIO) -> None:
    file.write(encode_header(list(columns)))
    for part in _slices(count_rows(columns)):
        file.write(_encode(name, [column[part] for column in columns.values()]))


def _write_steps(result: Result, file: BinaryIO) -> None:
    """Write one row per logged row, of one replica after the other; short logs many at once."""
    several = len(result.logs) > 1
    log, seconds = next(with_copy_seconds(result))
    names = list(step_columns(log, slice(0), seconds))
    file.write(encode_header(["replica", *names] if several else names))
    held: list[list[Numbers]] = []
    rows = 0
    for number, (log, seconds) in enumerate(with_copy_seconds(result)):
        for part in _slices(len(log.steps)):
            columns = list(step_columns(log, part, seconds).values())
            if several:
                columns.insert(0, np.full(len(columns[0]), number))
            if rows and rows + len(columns[0]) > SLICE:
                file.write(_joined(held))
                held, rows = [], 0
            held.append(columns)
            rows += len(columns[0])
    if held:
        file.write(_joined(held))


def _joined(parts: Sequence[Sequence[Numbers]]) -> bytes:
    """Encode rows of steps.csv that come in parts."""
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return _encode("steps.csv", columns)


def _encode(name: str, columns: Sequence[Column]) -> bytes:
    """Encode rows of a table; what its cells cannot hold becomes a HeadwayError."""
    try:
        return encode_rows(columns)
    except ValueError as error:
        raise HeadwayError(f"{name}: {error}") from None


def _slices(rows: int) -> Iterator[slice]:
    for at in range(0, rows, SLICE):
        yield slice(at, at + SLICE)


def write_scenario(scenario: Scenario, file: BinaryIO, given: Sequence[str] = ()) -> None:
    """Write a scenario with every default filled in, so that it runs from any folder.

    A comment says which of its blocks were `given` in Python instead.
    """
    if given:
        told = f"{' and '.join(given)} given in Python: this file alone does not repeat the run"
        file.write(f"# {told}\n".encode())
    file.write(dump_yaml(in_full(scenario.resolved(), scenario.folder)).encode())


def in_full(values: Any, folder: Path, key: str = "") -> Any:
    """Return a scenario's values, files by full paths: traces, profiles, models' shapes."""
    if isinstance(values, dict):
        return {name: in_full(value, folder, name) for name, value in values.items()}
    if isinstance(values, list):
        return [in_full(value, folder) for value in values]
    if key in ("path", "profile", "model", "like") and isinstance(values, str):
        file = resolve(values, folder)
        there = file.is_file() or (file / "config.json").is_file()
        if there and values not in (*shipped_models(), *shipped_profiles()):
            return str(file.resolve())
    return values


def _write_parquet(frame: "pd.DataFrame", file: BinaryIO) -> None:
    frame.to_parquet(file, engine="pyarrow", index=False)
