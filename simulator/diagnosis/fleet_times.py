"""When a fleet had too few replicas, by failures or by its autoscaler, and what that cost."""

from dataclasses import dataclass

import numpy as np

from simulator.diagnosis.evidence import Evidence, count_at
from simulator.results.request_table import Flags, Floats

LOOKS = 10_000  # moments of the run that are looked at
SETTLED = 1  # requests that wait at least before a queue counts as one
STARTUP, COOLDOWN, INTERVAL, TARGET = "startup_delay", "cooldown", "interval", "target"
"""Why an autoscaled fleet has too few replicas, by the key of the scenario."""


@dataclass(frozen=True, slots=True)
class Outage:
    """One failure of one replica."""

    replica: int  # a server, by its number
    start: float  # s
    end: float | None  # s; None: it did not come back


@dataclass(frozen=True, slots=True)
class Outages:
    """All failures, and what they cost the requests.

    Affected is who was sent from a failure on until as few waited as before it, or lost its
    replica.
    """

    each: list[Outage]
    most_down: int  # replicas at once
    mean_affected: float  # s, e2el
    mean_others: float  # s
    excess: float  # s by which all affected together take longer than as many others


@dataclass(frozen=True, slots=True)
class AutoscalerWaits:
    """For how long requests waited while an autoscaled fleet was smaller than it may be."""

    seconds: dict[str, float]  # requests x s, by cause
    gap: float  # s, the longest from a drain to the next order that counts as `cooldown`
    most_up: int  # replicas


def find_outages(run: Evidence) -> Outages | None:
    """Find what failures cost; None where there are none, or none is unaffected."""
    cluster, table = run.record.cluster, run.table
    if cluster is None or not cluster.counters.get("failures"):
        return None
    each, open_ones = [], {}
    for time, replica, state in cluster.changes:
        if state == "down":
            open_ones[replica] = time
        elif replica in open_ones:
            each.append(Outage(replica, open_ones.pop(replica), time))
    each += [Outage(replica, start, None) for replica, start in open_ones.items()]
    each.sort(key=lambda one: one.start)
    times = _moments(run)
    level = _waiting(run, times)
    disturbed = np.zeros(len(times), bool)
    down = np.zeros(len(times), np.int64)
    for one in each:
        begin, end = np.searchsorted(times, [one.start, one.end or times[-1]])
        before = max(int(level[max(begin - 1, 0)]), SETTLED)
        calm = np.flatnonzero(level[end:] <= before)
        disturbed[begin : end + int(calm[0]) if len(calm) else None] = True
        down[begin : max(end, begin + 1)] += 1
    place = np.searchsorted(times, table.sent[run.done], "right") - 1
    again = table.entered[run.done] > table.sent[run.done]
    affected: Flags = disturbed[np.clip(place, 0, len(times) - 1)] | again
    e2el = table.e2el[run.done]
    if not affected.any() or affected.all():
        return None
    inside, outside = float(e2el[affected].mean()), float(e2el[~affected].mean())
    excess = max(inside - outside, 0.0) * int(affected.sum())
    return Outages(each, int(down.max(initial=1)), inside, outside, excess)


def autoscaler_waits(run: Evidence) -> AutoscalerWaits | None:
    """Share out the time for which requests wait by why there are no more replicas.

    While some start, that is `startup_delay`; it is `cooldown` if one of them was taken away no
    longer ago than twice what a replica needs to come back. Else, if the autoscaler orders some
    within an interval from then, it is `interval`, and otherwise `target`. At `max_replicas` it is
    none of these. None without an autoscaler.
    """
    cluster, scenario = run.record.cluster, run.record.scenario.cluster
    if cluster is None or scenario is None or scenario.autoscaling is None:
        return None
    block = scenario.autoscaling
    names = dict(zip(cluster.servers, cluster.groups, strict=True))
    group = block.group or next(iter(names.values()))
    times = _moments(run)
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
    waiting = _waiting(run, times) * steps
    short = there < block.max_replicas
    causes = {
        COOLDOWN: returning,
        STARTUP: (starting > 0) & ~returning,
        INTERVAL: short & (starting == 0) & soon,
        TARGET: short & (starting == 0) & ~soon,
    }
    found = {name: float(waiting[there].sum()) for name, there in causes.items()}
    return AutoscalerWaits(found, gap, int(there.max(initial=0)))


def _moments(run: Evidence) -> Floats:
    """Give moments (s) from the start to the last end, evenly."""
    return np.linspace(0.0, float(run.table.finish[run.done].max()), LOOKS)


def _waiting(run: Evidence, times: Floats) -> Floats:
    """Count the requests at these times that were sent, and whose last try has not boarded."""
    table, done = run.table, run.done
    return count_at(table.sent[done], table.first_scheduled[done], times).astype(float)
