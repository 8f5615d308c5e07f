"""The files of a run: summary.json, requests.csv, steps.csv and scenario.yaml."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from simulator.core.log import Log
from simulator.results.client_service import Clients, client_columns, several_clients, share_columns
from simulator.results.tables import Floats, expand_steps, request_columns, run_span, step_columns
from simulator.util.csv_text import Column, Numbers, Words, encode_header, encode_rows
from simulator.util.errors import HeadwayError
from simulator.util.files import Writer, write_together

if TYPE_CHECKING:
    import pandas as pd

    from simulator.scenario.scenario import Scenario
    from simulator.simulation.run import Result

SLICE = 1 << 15  # rows encoded together: bounds the memory
FORMATS = ("csv", "parquet")
LONGEST = 1e8  # s, of a run: its tokens are counted by the second


def check_folder(folder: Path, format: str = "csv") -> Path:
    """See beforehand whether the files of a run can be written; leave the folder as it is."""
    if format == "parquet":
        need_pyarrow()
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise HeadwayError(f"--out {folder}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise HeadwayError(f"--out {folder}: no permission to write to {there}")
    return folder


def write_run(result: "Result", out: Path, format: str = "csv") -> list[Path]:
    """Write a run's files to the folder `out`, all of them or none; return their paths.

    `format` is that of the two tables, csv or parquet. Raises HeadwayError where the folder
    cannot be written, for parquet without pyarrow, or where the run's numbers are too large.
    """
    if format not in FORMATS:
        raise HeadwayError(f"--format: {format!r} is none of {', '.join(FORMATS)}")
    end = max((float(log.steps["end"][-1]) for log in result.logs if log.step_rows), default=0.0)
    if end > LONGEST:
        raise HeadwayError(f"the run lasts {end:.0e} s, and can be told up to {LONGEST:.0e} s")
    writers: dict[str, Writer] = {"summary.json": partial(_write_summary, result)}
    if format == "csv":
        writers["requests.csv"] = partial(_write_requests, result)
        writers["steps.csv"] = partial(_write_steps, result)
    else:
        need_pyarrow()
        writers["requests.parquet"] = partial(_write_parquet, request_frame(result))
        writers["steps.parquet"] = partial(_write_parquet, step_frame(result))
    if several_clients(result.workload):
        for name, columns in client_tables(result).items():
            writers[f"{name}.{format}"] = (
                partial(_write_table, f"{name}.csv", columns)
                if format == "csv"
                else partial(_write_parquet, _frame(columns))
            )
    writers["scenario.yaml"] = partial(write_scenario, result.scenario)
    return write_together(out, writers)


def request_frame(result: "Result") -> "pd.DataFrame":
    """Give the columns of requests.csv as a DataFrame, a row for each request, by id."""
    return _frame(_request_columns(result))


def _request_columns(result: "Result") -> dict[str, Column]:
    apart = result.transfers
    return request_columns(
        result.workload,
        result.sent,
        result.logs,
        result.time_parts(),
        result.hints,
        tries=result.tries,
        prefilled=None if apart is None else apart.producer_of(len(result.workload)),
    )


def step_frame(result: "Result", *, expanded: bool = False) -> "pd.DataFrame":
    """Give the columns of steps.csv as a DataFrame; `expanded`: one row for each single step.

    As in the file, `replica` is there only where there are several.
    """
    import pandas as pd

    frames = []
    for number, (log, seconds) in enumerate(_with_copy_seconds(result)):
        columns = step_columns(log, copy_seconds=seconds)
        if expanded:
            contiguous = result.scenario.engine.reserves
            columns = expand_steps(log, contiguous=contiguous, copy_seconds=seconds)
        if len(result.logs) > 1:
            columns = {"replica": np.full(_rows(columns), number), **columns}
        frames.append(_frame(columns))
    return pd.concat(frames, ignore_index=True)


def _with_copy_seconds(result: "Result") -> Iterator[tuple[Log, Floats | None]]:
    """Give each log with the time of each of its swaps, if there are any, be it in another."""
    if not any(log.swap_rows for log in result.logs):
        yield from ((log, None) for log in result.logs)
        return
    for log, cost in zip(result.logs, result.costs, strict=True):
        yield log, cost.logged_swap_seconds(log.swaps)


def client_tables(result: "Result") -> dict[str, dict[str, Column]]:
    """Give the columns of clients.csv and fairness.csv, by name."""
    clients = Clients.of(result)
    span = run_span(clients.table, result.logs)
    return {"clients": client_columns(clients), "fairness": share_columns(clients, span)}


def _frame(columns: Mapping[str, Column]) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame(
        {
            name: pd.Categorical.from_codes(column.codes, column.names)
            if isinstance(column, Words)
            else column
            for name, column in columns.items()
        }
    )


def _rows(columns: Mapping[str, Column]) -> int:
    first = next(iter(columns.values()))
    return len(first.codes if isinstance(first, Words) else first)


def _write_summary(result: "Result", file: BinaryIO) -> None:
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


def _write_requests(result: "Result", file: BinaryIO) -> None:
    columns = _request_columns(result)
    _write_table("requests.csv", columns, file)


def _write_table(name: str, columns: Mapping[str, Column], file: BinaryIO) -> None:
    file.write(encode_header(list(columns)))
    for part in _slices(_rows(columns)):
        file.write(_encode(name, [column[part] for column in columns.values()]))


def _write_steps(result: "Result", file: BinaryIO) -> None:
    """Write one row per logged row, of one replica after the other; short logs many at once."""
    several = len(result.logs) > 1
    log, seconds = next(_with_copy_seconds(result))
    names = list(step_columns(log, slice(0), seconds))
    file.write(encode_header(["replica", *names] if several else names))
    held: list[list[Numbers]] = []
    rows = 0
    for number, (log, seconds) in enumerate(_with_copy_seconds(result)):
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


def write_scenario(scenario: "Scenario", file: BinaryIO) -> None:
    """Write a scenario with every default filled in."""
    import yaml

    text = yaml.safe_dump(scenario.resolved(), sort_keys=False, allow_unicode=True)
    file.write(text.encode())


def _write_parquet(frame: "pd.DataFrame", file: BinaryIO) -> None:
    frame.to_parquet(file, engine="pyarrow", index=False)


def need_pyarrow() -> None:
    """Raise HeadwayError where pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise HeadwayError(
            "--format parquet: needs pyarrow; pip install headway[parquet]"
        ) from None
