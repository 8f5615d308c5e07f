"""One run of a plan: ended when a bound is broken for certain, measured once it is warm.

Beside the summary's numbers a run leaves, for each bound on requests, means over successive
batches of them: the runs of a place are judged by these.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from headway.planning.runs import MetricValues, read_metric_values
from headway.planning.verdict import CERTAIN, LEVELS, WARMING_UP
from simulator.core.log import UNFINISHED, Log
from simulator.costs.noise import Noise
from simulator.results.request_table import Flags, Floats, RequestTable, gather_requests, run_span
from simulator.results.service_levels import SHARES, Slo, goodput_of, keep_bounds, request_bounds
from simulator.results.steady_state import find_growth, find_warmup
from simulator.scenario.draw import make_workload
from simulator.scenario.scenario import Scenario
from simulator.simulation.result import Result
from simulator.simulation.run import run
from simulator.workload.workload import Workload

BATCHES = 10  # of a run


class Change(NamedTuple):
    """Something about a problem that may be otherwise than one thinks."""

    load: float = 1.0  # times as many requests/s
    answers: float = 1.0  # times as long
    steps: float = 0.0  # standard deviations of their error by which all steps take longer


AS_IT_IS = Change()


def measure_run(
    scenario: Scenario,
    slos: Sequence[Slo],
    *,
    steady: bool,
    warmup: float | None = None,
    window: float | None = None,
    change: Change = AS_IT_IS,
) -> MetricValues:
    """Make a run and return its numbers.

    `steady` says that its load stays the same: what comes before a steady state is then left out
    (`warmup`, else what the run finds, `found_warmup_s`), growth is looked for, and the run ends as
    soon as it has broken a bound for certain. That bound is `broken`, what grows `growing`; both
    are "" as a rule. Of a load that changes each bound gets the numbers of the `window` (s of
    arrivals) that comes off worst. `change` is of the answers and the steps: the scenario has the
    load.
    """
    workload = make_workload(scenario)
    if change.answers != 1.0:
        workload.output_tokens = np.ceil(change.answers * workload.output_tokens).astype(np.int64)
    noise = Noise(change.steps, change.steps).apply if change.steps else None
    stop = _Watch(workload, scenario, slos, window) if steady or window is not None else None
    result = run(scenario, workload=workload, stop=stop, noise=noise)
    broken = growing = ""
    more: dict[str, float] = {}
    if stop is not None and (result.interrupted or window is not None):
        broken = stop.told or stop.broken(result.request_table(), whole=True)
    if not broken:
        result.whole()  # who stopped it was the user
    if steady and not result.interrupted:
        found = find_warmup(result)
        span = float(np.nanmax(result.sent) - np.nanmin(result.sent))
        more["found_warmup_s"] = span / 2 if found is None else found
        result.warmup = min(more["found_warmup_s"] if warmup is None else warmup, span / 2)
        growing = WARMING_UP if found is None else find_growth(result)
    table = result.request_table()
    start, end = run_span(table, result.logs)
    if not broken and not table.completed.any():  # none was served: no latency is kept
        broken = next((slo.metric for slo in slos if slo.latency), "")
    values = {**read_metric_values(result, slos), "broken": broken, "growing": growing}
    values |= {"run_duration": end - start, **more}  # s, with the warm-up
    if broken:
        completed = float(table.completed.sum() / max(_over(table).sum(), 1))
        return {**values, "completion": completed}
    shares = _batches(result, slos)
    if not steady:  # a batch of a load that changes is no sample of it
        told = ("measured", "attainment")
        shares = {name: shares[name] for name in told if name in shares}
        if window is not None:  # within an hour it changes little
            shares |= _worst_windows(table, scenario, slos, window)
    return {**values, **shares}


def _parts(cost: Floats) -> list[float]:
    """Return the means of successive batches of what requests add to a bound."""
    parts = np.array_split(cost, min(BATCHES, len(cost)) or 1)
    return [float(part.mean()) if len(part) else 0.0 for part in parts]


def _quantiles(slo: Slo, table: RequestTable, counted: Flags) -> list[float]:
    """Return a bounded latency of these requests at all LEVELS, ms."""
    values = 1000.0 * getattr(table, slo.latency)[counted]
    return [float(f"{one:.6g}") for one in np.quantile(values, LEVELS)] if len(values) else []


def _windows(table: RequestTable, window: float | None) -> Iterator[Flags]:
    """Tell which requests were sent in each window: all in one, if there are none.

    What is left after the last whole window belongs to that one, if it is less than half of one.
    """
    since = table.sent - np.nanmin(table.sent)
    count = max(round(float(np.nanmax(since)) / window), 1) if window is not None else 1
    number = np.minimum(since // (window or np.inf), count - 1)
    for k in range(count):
        yield number == k


def _worst_windows(
    table: RequestTable, scenario: Scenario, slos: Sequence[Slo], window: float
) -> MetricValues:
    """Return, for each bound, its metric and batch means in the window where that is worst.

    `worst_window_METRIC` is the time at which it begins, s.
    """
    goodput = goodput_of(scenario.goodput, table.workload)
    windows = [*_windows(table, window)]
    found: dict[str, Any] = {"batches": {}, "quantiles": {}, "measured": len(table.sent)}
    for slo in (one for one in slos if one.of_requests):
        cost = slo.cost(table, goodput)
        told = ~np.isnan(cost)
        values = cost if slo.name in SHARES else 1000.0 * getattr(table, slo.latency)
        worst, there = 0.0, told
        for k, arrived in enumerate(windows):
            here = told & arrived
            if not here.any():
                continue
            share = slo.percentile
            got = values[here].mean() if share is None else np.percentile(values[here], share)
            if there is told or got > worst:
                worst, there = float(got), here
                found[f"worst_window_{slo.metric}"] = k * window
        found[slo.metric] = 1.0 - worst if slo.name in SHARES else worst
        found["batches"][slo.text] = _parts(cost[there])
        if slo.percentile is not None:
            found["quantiles"][slo.text] = _quantiles(slo, table, there)
        found["measured"] = min(found["measured"], int(there.sum()))
    return found


def _batches(result: Result, slos: Sequence[Slo]) -> MetricValues:
    """Return how many requests were measured, the batch means by bound, and shares of them.

    The attainment, where there are bounds on single requests, is that of `request_bounds`.
    """
    table = result.request_table()
    goodput = goodput_of(result.scenario.goodput, table.workload)
    kept = table.sent >= float(np.nanmin(result.sent)) + result.warmup
    batches, counts, quantiles = {}, {}, {}
    for slo in slos:
        if slo.of_requests:
            cost = slo.cost(table, goodput)
            counted = kept & ~np.isnan(cost)
            batches[slo.text] = _parts(cost[counted])
            if slo.percentile is not None:
                quantiles[slo.text] = _quantiles(slo, table, counted)
            if slo.part:
                counts[slo.text] = int((kept & slo.asked(table)).sum())
    shares = {
        "completion": table.completed,
        "goodput": keep_bounds(table, table.completed, goodput),
    }
    if bounds := request_bounds(goodput, slos):
        shares["attainment"] = keep_bounds(table, table.completed, bounds)
    found: dict[str, Any] = {name: float(flags[kept].mean()) for name, flags in shares.items()}
    found |= {"measured": int(kept.sum()), "batches": batches, "counts": counts}
    return found | {"quantiles": quantiles}


class _Watch:
    """Says whether a run has broken a bound so far that whatever follows cannot mend it.

    Of windows in one that is over. It looks whenever another hundredth of all requests is over.
    """

    def __init__(
        self, workload: Workload, scenario: Scenario, slos: Sequence[Slo], window: float | None
    ) -> None:
        self._workload, self._scenario, self._slos = workload, scenario, slos
        self._window = window
        self._next = 0
        self.told = ""  # the bound for which it has ended the run

    def __call__(self, sent: Floats, logs: Sequence[Log]) -> bool:
        over = sum(log.ended for log in logs)
        if over < self._next:
            return False
        self._next = over + max(len(self._workload) // 100, 1)
        self.told = self.broken(gather_requests(self._workload, sent, logs))
        return bool(self.told)

    def broken(self, table: RequestTable, *, whole: bool = False) -> str:
        """Name the bound that is broken; `whole`: no more requests come in the last window."""
        among = None
        if self._window is not None:
            windows = [*_windows(table, self._window)]
            among = windows if whole else windows[:-1]
        return broken_bound(table, self._scenario, self._slos, among)


def broken_bound(
    table: RequestTable,
    scenario: Scenario,
    slos: Sequence[Slo],
    among: Sequence[Flags] | None = None,
) -> str:
    """Name the bound that the requests over so far break for certain, the worst; "" if none.

    By themselves in each of the sets `among`, if these are given. What requests add to a bound is
    never less than 0: those to come cannot take it back.
    """
    goodput = goodput_of(scenario.goodput, table.workload)
    over = _over(table)
    worst, found = 1.0, ""
    for slo in slos:
        if slo.of_requests:
            cost = np.where(over, np.nan_to_num(slo.cost(table, goodput)), 0.0)
            most = (1.0 + slo.limit) / 2 if slo.is_share else np.inf  # of a share half way to all
            asked = slo.asked(table)
            for here in [asked & one for one in among] if among is not None else [asked]:
                spent = float(cost[here].sum())
                allowed = min(CERTAIN * slo.limit, most) * int(here.sum())
                exceeded = spent / allowed if allowed else spent * np.inf if spent else 0.0
                if exceeded > worst:
                    worst, found = exceeded, slo.metric
    return found


def _over(table: RequestTable) -> Flags:
    """Return which requests have come to an end, whichever."""
    ended: Flags = (table.reason >= 0) & (table.reason != UNFINISHED)
    return ended
