"""What models that share GPUs by sleep mode do to requests: they wait for theirs to wake up."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from simulator.results.engine_metrics import share
from simulator.results.record import ClusterRecord
from simulator.results.request_table import Floats, RequestTable


@dataclass(slots=True)
class WakeWaits:
    """For how long requests waited for their model, added up over the parts of a run; s."""

    requests: int = 0  # that waited
    seconds: float = 0.0
    switching: float = 0.0  # of these, while servers fell asleep and woke up: the rest is for GPUs
    ttft: float = 0.0  # of all requests that got a token

    def __add__(self, other: "WakeWaits") -> "WakeWaits":
        """Add those of another part."""
        return WakeWaits(
            self.requests + other.requests,
            self.seconds + other.seconds,
            self.switching + other.switching,
            self.ttft + other.ttft,
        )

    def summary(self) -> dict[str, float | int | None]:
        """Return what the summary says."""
        waited = self.requests
        return {
            "requests_that_waited": waited,
            "mean_wait_ms": 1000.0 * self.seconds / waited if waited else None,
            "share_of_ttft": share(self.seconds, self.ttft),
            "share_switching": share(self.switching, self.seconds),
        }


def wake_waits(record: ClusterRecord, groups: Sequence[str], table: RequestTable) -> WakeWaits:
    """Find them by when the servers of these groups were up: one server of each has GPUs at most.

    A request that came while none was up waited until the next was.
    """
    got = table.ttft
    found = WakeWaits(ttft=float(got[~np.isnan(got)].sum()))
    for group in groups:
        numbers = [number for number, name in enumerate(record.groups) if name == group]
        closed, begun, up = _asleep(record, {record.servers[number] for number in numbers})
        mine = np.isin(table.replica, numbers) & ~np.isnan(table.queue_time)
        came = table.entered[mine]
        at = np.searchsorted(closed, came) - 1
        waits = np.clip(up[at] - came, 0.0, table.queue_time[mine])
        held = waits > 0.0
        switching = np.minimum(waits, (up - begun)[at])[held]
        found += WakeWaits(int(held.sum()), float(waits[held].sum()), float(switching.sum()))
    return found


def _asleep(record: ClusterRecord, servers: Collection[int]) -> tuple[Floats, Floats, Floats]:
    """Return since when a group took no requests, when it began to wake up, and when it was up."""
    rows, closed, begun = [], -np.inf, -np.inf
    for at, server, state in record.changes:
        if server in servers:
            if state == "draining":
                closed = at
            elif state == "starting":
                begun = at
            elif state == "up":
                rows.append((closed, begun, at))
    closing, beginning, up = np.array(rows).reshape(-1, 3).T
    return closing, beginning, up
