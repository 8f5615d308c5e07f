"""For how long requests waited while an autoscaled group was smaller than it may be, and why."""

from typing import NamedTuple

import numpy as np

from simulator.cluster.config import AutoscalingConfig
from simulator.diagnosis.evidence import Evidence, count_at
from simulator.results.request_table import Floats

LOOKS = 10_000  # moments of the run that are looked at
CONSUMER = "kv_consumer"
STARTUP, COOLDOWN, INTERVAL, TARGET = "startup_delay", "cooldown", "interval", "target"
"""Why an autoscaled fleet has too few replicas, by the key of the scenario."""


class AutoscalerWaits(NamedTuple):
    """For how long requests waited while an autoscaled group was smaller than it may be."""

    group: str
    seconds: dict[str, float]  # requests x s, by cause
    gap: float  # s, the longest from a drain to the next order that counts as `cooldown`
    most_up: int  # replicas
    at_most: float  # requests x s while all that there may be were up
    whole: float  # requests x s in all


def autoscaler_waits(run: Evidence) -> AutoscalerWaits | None:
    """Return the waits of the autoscaled group in which they are longest; None without one."""
    scenario = run.record.scenario.cluster
    if run.record.cluster is None or scenario is None:
        return None
    each = [waits_of(run, name, block) for name, block in scenario.scalers.items()]
    return max(each, key=lambda waits: sum(waits.seconds.values()), default=None)


def waits_of(run: Evidence, group: str, block: AutoscalingConfig) -> AutoscalerWaits:
    """Share out the time for which requests wait by why there are no more replicas.

    While some start, that is `startup_delay`; it is `cooldown` if one of them was taken away no
    longer ago than twice what a replica needs to come back. Else, if the autoscaler orders some
    within an interval from then, it is `interval`, and otherwise `target`. At `max_replicas` it is
    none of these.
    """
    cluster = run.record.cluster
    assert cluster is not None
    names = dict(zip(cluster.servers, cluster.groups, strict=True))
    times = moments(run)
    steps = np.diff(times, append=times[-1])
    starting, there = np.zeros((2, len(times)), np.int64)
    returning = np.zeros(len(times), bool)
    orders: list[float] = []
    state: dict[int, tuple[float, str]] = {}
    taken: dict[int, float] = {}
    back, gap = 2 * (block.startup_delay + block.interval), 0.0
    changes = [one for one in cluster.changes if names[one[1]] == group]
    ends = [(float(times[-1]) + 1.0, replica, "off") for replica in {one[1] for one in changes}]
    for time, replica, new in [*changes, *ends]:
        since, old = state.get(replica, (0.0, "off"))
        span = slice(*np.searchsorted(times, [since, time]))
        if old in ("starting", "up"):
            there[span] += 1
        if old == "starting":
            starting[span] += 1
            if since - taken.get(replica, -np.inf) <= back:
                returning[span] = True
                gap = max(gap, since - taken[replica])
        if new == "starting" or (old, new) in (("off", "up"), ("draining", "up")):
            orders.append(time)
        if new == "draining":
            taken[replica] = time
        state[replica] = time, new
    coming = np.searchsorted(orders, times + block.interval, "right")
    soon = coming > np.searchsorted(orders, times, "right")
    waiting = waiting_at(run, times, group) * steps
    short = there < block.max_replicas
    causes = {
        COOLDOWN: returning,
        STARTUP: (starting > 0) & ~returning,
        INTERVAL: short & (starting == 0) & soon,
        TARGET: short & (starting == 0) & ~soon,
    }
    found = {name: float(waiting[there].sum()) for name, there in causes.items()}
    at_most = float(waiting[~short & (starting == 0)].sum())
    most_up = int(there.max(initial=0))
    whole = float(waiting.sum())
    return AutoscalerWaits(group, found, gap, most_up, at_most=at_most, whole=whole)


def moments(run: Evidence) -> Floats:
    """Return moments (s) from the start to the last end, evenly."""
    return np.linspace(0.0, float(run.table.finish[run.done].max(initial=0.0)), LOOKS)


def waiting_at(run: Evidence, times: Floats, group: str | None = None) -> Floats:
    """Count the requests at these times that were sent, and whose last try has not boarded.

    Of a group that decodes what others prefilled, those that it has no blocks for.
    """
    table, done = run.table, run.done
    transfers = None if run.record.cluster is None else run.record.transfers
    if transfers is not None and group is not None and run.record.specs[group].role == CONSUMER:
        return count_at(transfers.rows["ready"], transfers.rows["asked"], times).astype(float)
    return count_at(table.sent[done], table.first_scheduled[done], times).astype(float)
