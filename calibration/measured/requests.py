"""Requests of measured runs: when each came, how long it was, and how long it took.

Their files are read as every other trace is (`simulator/workload/traces/`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from simulator.util.errors import HeadwayError
from simulator.workload.traces.format import Measured
from simulator.workload.traces.read import read_table, warn_of_failed

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Requests:
    """What a run's requests were and how long they took; seconds and tokens, by arrival.

    NaN: not recorded, or a single token's tpot.
    """

    arrival: Floats
    prompt: Ints
    output: Ints
    ttft: Floats
    tpot: Floats
    e2el: Floats
    client: list[str] | None = None  # who sent it
    conversation: list[str] | None = None  # whose next turn it is
    turn: Ints | None = None
    prompt_id: list[str] | None = None  # requests of one id have the same prompt

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def timed(self) -> bool:
        """Whether any time of a request was taken."""
        return not all(np.isnan(column).all() for column in (self.ttft, self.tpot, self.e2el))


def read_requests(path: Path, columns: str | Mapping[str, str] | None = None) -> Requests:
    """Read a file of any format of traces; HeadwayError names it, the line and what is wrong."""
    table, _ = read_table(path, None, {} if columns is None else {"columns": columns})
    warn_of_failed(table, path)
    if not len(table.time):
        raise HeadwayError(f"{path}: has no requests")
    arrival = table.time / table.per_second
    if np.isnan(arrival).any():
        raise HeadwayError(f"{path}: some requests wait for others, so it is no record of a run")
    order = np.argsort(arrival, kind="stable")
    nothing = np.full(len(arrival), np.nan)
    measured = table.measured or Measured(nothing, nothing, nothing)

    def sort(column: list[str] | None) -> list[str] | None:
        return None if column is None else [column[k] for k in order.tolist()]

    return Requests(
        arrival=arrival[order] - arrival.min(),
        prompt=table.prompt[order],
        output=table.output[order],
        ttft=measured.ttft[order],
        tpot=measured.tpot[order],
        e2el=measured.e2el[order],
        client=sort(table.client),
        conversation=sort(measured.conversation),
        turn=None if measured.turn is None else measured.turn[order],
        prompt_id=sort(measured.prompt_id),
    )
