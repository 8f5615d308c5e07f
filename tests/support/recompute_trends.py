"""What the summary says of steady states and of clients, from the files alone."""

from itertools import pairwise
from math import ceil, sqrt
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtr

from tests.support.run_files import Run, Values

KEYS = ("stationary", "trend_per_s", "trend_p_value", "served_by_last_arrival")


def recompute_trend(run: Run) -> Values:
    """Test the number of requests in the system, as each that comes finds it, for a trend."""
    rows = run.requests[run.requests.sent.notna()]
    rated = run.scenario["workload"]["request_rate"] != float("inf")
    rows = rows.assign(due=rows.arrival if rated else rows.sent).sort_values("due", kind="stable")
    come = rows.due.to_numpy()
    left = rows.finish.fillna(rows.sent.where(rows.finish_reason == "rejected")).to_numpy()
    left = left.round(9)  # finish is a sum: rounded
    stay = ~(left <= come.round(9))
    gone = np.searchsorted(np.sort(left[stay & ~np.isnan(left)]), come.round(9), side="right")
    level = np.cumsum(stay) - gone
    cut = _mser5(level.tolist())
    warmup = None if cut is None else come[cut] - come[0]
    if run.warmup or run.cooldown:
        first, last = rows.sent.min() + run.warmup, rows.sent.max() - run.cooldown
        kept = (come >= first) & (come <= last)
        come, level = come[kept], level[kept]
    known: Values = dict.fromkeys(KEYS) | {"suggested_warmup_s": warmup}
    if len(come) < 100 or come[-1] <= come[0]:
        return known
    means = np.array([part.mean() for part in np.array_split(level, 20)])
    at = np.arange(20.0)
    slope, intercept = np.polyfit(at, means, 1)
    change, residual = 20 * slope, means - intercept - slope * at
    power = (residual**2).sum()
    p = 1.0 if abs(change) < 1e-9 else 0.0
    if power > 1e-20 * (means**2).sum():
        lag = min(max((residual[1:] * residual[:-1]).sum() / power, 0.0), 0.8)
        fewer = (1 - lag) / (1 + lag)
        error = sqrt(power / 18 / ((at - at.mean()) ** 2).sum() / fewer)
        p = 2 * stdtr(max(20 * fewer, 4.0) - 2, -abs(slope) / error)
    steady = not (p < 0.01 and abs(change) / max(level.mean(), 1.0) > 0.2)
    trend = change / (come[-1] - come[0])
    known |= {"stationary": steady, "trend_per_s": trend, "trend_p_value": p}
    return known | {"served_by_last_arrival": max(1 - level[-1] / len(level), 0.0)}


def _mser5(level: list[int]) -> int | None:
    """Leave out the batches of five without which the mean's standard error is least."""
    batches = [sum(level[k : k + 5]) / 5 for k in range(0, len(level) - 4, 5)]
    if len(batches) < 8:
        return None
    errors = []
    for cut in range(len(batches) // 2 + 1):
        rest = np.array(batches[cut:])
        errors.append(((rest - rest.mean()) ** 2).sum() / len(rest) ** 2)
    best = int(np.argmin(errors))
    return None if best >= len(batches) // 2 else 5 * best


def recompute_clients(run: Run, times: dict[int, np.ndarray] | None) -> Values:
    """Compare, in each window, those clients that have a request waiting in all of it."""
    start, end = run.span
    count = max(10, ceil((end - start) / 60))
    edges = start + (end - start) * np.arange(count + 1) / count
    policy = run.scenario["engine"]["scheduling_policy"]
    weights = (policy.get("weights") or {}) if isinstance(policy, dict) else {}
    owners = dict(tuple(run.requests.groupby("client", observed=True)))
    contended, jain, differences = 0, [], []
    for low, high in pairwise(edges):
        waiting = [name for name, rows in owners.items() if _waits(rows, low, high, end)]
        if len(waiting) < 2:
            continue
        contended += 1
        if times is None:
            continue
        last = high >= edges[-1]
        shares = {}
        for begin in (low, start):
            shares[begin] = [
                _service(owners[name], times, begin, high, last) / weights.get(name, 1.0)
                for name in waiting
            ]
        got, since = np.array(shares[low]), np.array(shares[start])
        squares = len(got) * (got**2).sum()
        jain.append(got.sum() ** 2 / squares if squares else 1.0)
        differences.append(since.max() - since.min())
    known: Values = {"clients": len(owners), "contended_share": contended / count}
    known["fairness_windows"] = count
    pools = {"jain_index": jain, "service_difference": differences}
    for name, pool in pools.items():
        word = {"jain_index": "", "service_difference": "_mean"}[name]
        other = {"jain_index": "_min", "service_difference": "_max"}[name]
        known[name + word] = float(np.mean(pool)) if pool else None
        extreme = min if other == "_min" else max
        known[name + other] = float(extreme(pool)) if pool else None
    return known


def _waits(rows: pd.DataFrame, low: float, high: float, end: float) -> bool:
    """Tell whether one of these requests waits for its admission at every moment of a window."""
    rows = rows[(rows.replica >= 0) & (rows.finish_reason != "rejected")]
    reached = low
    for begin, stop in sorted(zip(rows.entered, rows.scheduled.fillna(end), strict=True)):
        if begin > reached:
            break
        reached = max(reached, stop)
    return reached >= high


def _service(
    rows: pd.DataFrame, times: dict[int, np.ndarray], low: float, high: float, last: bool
) -> float:
    """Count 1 for each prompt token as it is admitted and 2 for each token that comes out."""

    def inside(at: Any) -> Any:
        return (at >= low) & ((at < high) | (last & (at <= high)))

    total = rows.prompt_tokens[inside(rows.scheduled)].sum()
    return float(total + sum(2 * inside(times[id]).sum() for id in rows.id if id in times))
