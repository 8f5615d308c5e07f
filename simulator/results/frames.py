"""The tables of a run, as columns and as DataFrames."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from simulator.core.log import Log
from simulator.results.client_service import Clients, client_columns, share_columns
from simulator.results.record import Record
from simulator.results.tables import Floats, expand_steps, request_columns, run_span, step_columns
from simulator.util.csv_text import Column, Words

if TYPE_CHECKING:
    import pandas as pd


def request_frame(result: Record) -> "pd.DataFrame":
    """Give the columns of requests.csv as a DataFrame, a row for each request, by id."""
    return as_frame(request_cells(result))


def request_cells(result: Record) -> dict[str, Column]:
    """Give the columns of requests.csv."""
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


def step_frame(result: Record, *, expanded: bool = False) -> "pd.DataFrame":
    """Give the columns of steps.csv as a DataFrame; `expanded`: one row for each single step.

    As in the file, `replica` is there only where there are several.
    """
    import pandas as pd

    frames = []
    for number, (log, seconds) in enumerate(with_copy_seconds(result)):
        columns = step_columns(log, copy_seconds=seconds)
        if expanded:
            contiguous = result.scenario.engine.reserves
            columns = expand_steps(log, contiguous=contiguous, copy_seconds=seconds)
        if len(result.logs) > 1:
            columns = {"replica": np.full(count_rows(columns), number), **columns}
        frames.append(as_frame(columns))
    return pd.concat(frames, ignore_index=True)


def with_copy_seconds(result: Record) -> Iterator[tuple[Log, Floats | None]]:
    """Give each log with the time of each of its swaps, if there are any, be it in another."""
    if not any(log.swap_rows for log in result.logs):
        yield from ((log, None) for log in result.logs)
        return
    for log, cost in zip(result.logs, result.costs, strict=True):
        yield log, cost.logged_swap_seconds(log.swaps)


def client_tables(result: Record) -> dict[str, dict[str, Column]]:
    """Give the columns of clients.csv and fairness.csv, by name."""
    clients = Clients.of(result)
    span = run_span(clients.table, result.logs)
    return {"clients": client_columns(clients), "fairness": share_columns(clients, span)}


def as_frame(columns: Mapping[str, Column]) -> "pd.DataFrame":
    """Make a DataFrame of columns."""
    import pandas as pd

    return pd.DataFrame(
        {
            name: pd.Categorical.from_codes(column.codes, column.names)
            if isinstance(column, Words)
            else column
            for name, column in columns.items()
        }
    )


def count_rows(columns: Mapping[str, Column]) -> int:
    """Count the rows of columns of one length."""
    first = next(iter(columns.values()))
    return len(first.codes if isinstance(first, Words) else first)
