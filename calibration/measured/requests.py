"""Requests of measured runs: when each came, how long it was, and how long it took.

Their files are read as every other trace is (`simulator/workload/traces/`).
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.select import renumbered
from simulator.workload.traces.format import Measured, Table, no_times
from simulator.workload.traces.read import read_table, warn_of_losses

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ASKED = ("segments", "priority", "max_tokens", "hint", "model", "images", "cancel_after")
MEASURED = tuple(each.name for each in fields(Measured))


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
    patience: Floats | None = None  # s after which its client let go of it; NaN: it was answered
    asked: Mapping[str, Any] = field(default_factory=dict)  # columns of a workload besides
    unended: int = 0  # failed ones that are left out, or given up at a time that nothing tells

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def answered(self) -> int:
        """How many its client did not let go of."""
        return len(self) if self.patience is None else int(np.isnan(self.patience).sum())

    @property
    def timed(self) -> bool:
        """Whether any time of a request was taken."""
        return not all(np.isnan(column).all() for column in (self.ttft, self.tpot, self.e2el))

    @property
    def ends(self) -> Floats:
        """When each was over for its client."""
        lasted = self.e2el if self.patience is None else np.fmax(self.e2el, self.patience)
        return self.arrival + lasted


def read_requests(
    path: Path, *, failed: bool = False, timeout: float | None = None, **reading: Any
) -> Requests:
    """Read a file of any format of traces; HeadwayError names it, the line and what is wrong.

    With `failed` those that failed are there, too, where it is told when they were sent and when
    they failed, else after `timeout` s. `reading`: columns and the like, as in `read_trace`.
    """
    table = read_table(path, None, {k: v for k, v in reading.items() if v is not None})
    parts, patience = [table], np.full(len(table.time), np.nan)
    if failed and table.lost is not None and len(table.time):
        parts.append(_asked(table.lost, table))
        patience = np.append(patience, _waited(table.lost, timeout))
    answered = len(table.time)
    kept = np.flatnonzero((np.arange(len(patience)) < answered) | ~np.isnan(patience))
    replayed = len(kept) - answered
    warn_of_losses(path, table.failed - replayed, table.ledger)
    if not answered:
        raise HeadwayError(f"{path}: has no requests")
    if np.isnan(table.time).any():
        raise HeadwayError(f"{path}: some requests wait for others, so it is no record of a run")
    if replayed:
        text = f"{path}: failed requests that are replayed until their clients let go: {replayed}"
        warnings.warn(text, HeadwayWarning, stacklevel=2)
    arrival = np.concatenate([part.time / part.per_second for part in parts])
    order = kept[np.argsort(arrival[kept], kind="stable")]

    def column(name: str, of: Sequence[Any]) -> Any:
        found = [values for part in of if (values := getattr(part, name)) is not None]
        if len(found) < len(of):
            return None
        if isinstance(found[0], list):
            whole = [value for values in found for value in values]
            return [whole[k] for k in order.tolist()]
        return np.concatenate(found)[order]

    asked = {name: column(name, parts) for name in ASKED}
    if asked["segments"] is not None:
        place = np.full(len(arrival) + 1, -1)
        place[order] = np.arange(len(order))
        asked["segments"] = renumbered(asked["segments"], place)
    measured = [part.measured or no_times(len(part.time)) for part in parts]
    return Requests(
        arrival=arrival[order] - arrival[kept].min(),
        **{name: column(name, parts) for name in ("prompt", "output", "client")},
        **{name: column(name, measured) for name in MEASURED},
        patience=patience[order] if replayed else None,
        asked=asked,
        unended=table.failed - replayed + (0 if timeout else table.timed_out),
    )


def _asked(lost: Table, table: Table) -> Table:
    """Say how long failed requests were: what is not told is the mean of those answered.

    An answer that broke off would have been longer by a token at least.
    """
    asked = np.zeros(len(lost.time)) if lost.max_tokens is None else lost.max_tokens
    asked = np.where(asked < 1, round(float(table.output.mean())), asked)
    prompt = np.where(lost.prompt < 1, round(float(table.prompt.mean())), lost.prompt)
    return replace(lost, prompt=prompt, output=np.maximum(asked, lost.output + 1).astype(np.int64))


def _waited(lost: Table, timeout: float | None) -> Floats:
    """Return after how many s the clients of failed requests let go; NaN: nobody knows."""
    assert lost.cancel_after is not None
    waited = np.maximum(lost.cancel_after, 0.0)
    return waited if timeout is None else np.where(np.isnan(waited), timeout, waited)
