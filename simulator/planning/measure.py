"""One run of a plan: ended when a bound is broken for certain, measured once it is warm.

Beside the summary's numbers a run leaves, for each bound on requests, means over successive
batches of them: the runs of a place are judged by these.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from simulator.core.log import REQUEST, UNFINISHED, Log
from simulator.costs.noise import Noise
from simulator.planning.runs import MetricValues, read_metric_values
from simulator.planning.search import CERTAIN, WARMING_UP
from simulator.results.request_table import (
    Flags,
    Floats,
    RequestTable,
    gather_requests,
    run_span,
)
from simulator.results.service_levels import Slo, keep_bounds, request_bounds
from simulator.results.steady_state import find_growth, find_warmup
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
    change: Change = AS_IT_IS,
) -> MetricValues:
    """Make a run and return its numbers.

    `steady` says that its load stays the same: what comes before a steady state is then left out
    (`warmup`, else what the run finds, `found_warmup_s`), growth is looked for, and the run ends as
    soon as it has broken a bound for certain. That bound is `broken`, what grows `growing`; both
    are "" as a rule. `change` is of the answers and the steps: the scenario has the load.
    """
    workload = scenario.make_workload()
    if change.answers != 1.0:
        workload.output_tokens = np.ceil(change.answers * workload.output_tokens).astype(np.int64)
    noise = Noise(change.steps, change.steps).apply if change.steps else None
    stop = _Watch(workload, scenario, slos) if steady else None
    result = run(scenario, workload=workload, stop=stop, noise=noise)
    broken = growing = ""
    more: dict[str, float] = {}
    if result.interrupted:
        broken = broken_bound(result.request_table(), scenario, slos) if steady else ""
        if not broken:
            raise KeyboardInterrupt("the user broke it off")
    elif steady:
        found = find_warmup(result)
        span = float(np.nanmax(result.sent) - np.nanmin(result.sent))
        more["found_warmup_s"] = span / 2 if found is None else found
        result.warmup = min(more["found_warmup_s"] if warmup is None else warmup, span / 2)
        growing = WARMING_UP if found is None else find_growth(result)
    table = result.request_table()
    start, end = run_span(table, result.logs)
    values = {**read_metric_values(result, slos), "broken": broken, "growing": growing}
    values |= {"run_duration": end - start, **more}  # s, with the warm-up
    if broken:
        completed = float(table.completed.sum() / max(_over(table).sum(), 1))
        return {**values, "completion": completed}
    shares = _batches(result, slos)
    if not steady:  # a batch of a load that changes is no sample of it
        told = ("measured", "attainment")
        return {**values, **{name: shares[name] for name in told if name in shares}}
    return {**values, **shares}


def _batches(result: Result, slos: Sequence[Slo]) -> dict[str, Any]:
    """Return how many requests were measured, the batch means by bound, and shares of them.

    The attainment, where there are bounds on single requests, is that of `request_bounds`.
    """
    table = result.request_table()
    goodput = result.scenario.goodput.bounds
    since = float(np.nanmin(result.sent)) + result.warmup
    kept = table.sent >= since
    batches = {}
    for slo in slos:
        if slo.of_requests:
            cost = slo.cost(table, goodput)
            cost = cost[kept & ~np.isnan(cost)]
            parts = np.array_split(cost, min(BATCHES, len(cost)) or 1)
            batches[slo.text] = [float(part.mean()) if len(part) else 0.0 for part in parts]
    shares = {
        "completion": table.completed,
        "goodput": keep_bounds(table, table.completed, goodput),
    }
    if bounds := request_bounds(goodput, slos):
        shares["attainment"] = keep_bounds(table, table.completed, bounds)
    found = {name: float(flags[kept].mean()) for name, flags in shares.items()}
    return {"measured": int(kept.sum()), "batches": batches, **found}


class _Watch:
    """Says whether a run has broken a bound so far that whatever follows cannot mend it.

    It looks whenever another hundredth of all requests is over.
    """

    def __init__(self, workload: Workload, scenario: Scenario, slos: Sequence[Slo]) -> None:
        self._workload, self._scenario, self._slos = workload, scenario, slos
        self._next = 0

    def __call__(self, sent: Floats, logs: Sequence[Log]) -> bool:
        over = sum(len(log.request_rows) for log in logs) // REQUEST.itemsize
        if over < self._next:
            return False
        self._next = over + max(len(self._workload) // 100, 1)
        table = gather_requests(self._workload, sent, logs)
        return bool(broken_bound(table, self._scenario, self._slos))


def broken_bound(table: RequestTable, scenario: Scenario, slos: Sequence[Slo]) -> str:
    """Name the bound that the requests over so far break for certain, the worst; "" if none.

    What requests add to a bound is never less than 0: those to come cannot take it back.
    """
    goodput = scenario.goodput.bounds
    over = _over(table)
    worst, found = 1.0, ""
    for slo in slos:
        if slo.of_requests:
            spent = float(np.nansum(slo.cost(table, goodput)[over]))
            most = (1.0 + slo.limit) / 2 if slo.is_share else np.inf  # of a share half way to all
            allowed = min(CERTAIN * slo.limit, most) * len(table.sent)
            exceeded = spent / allowed if allowed else spent * np.inf if spent else 0.0
            if exceeded > worst:
                worst, found = exceeded, slo.metric
    return found


def _over(table: RequestTable) -> Flags:
    """Return which requests have come to an end, whichever."""
    ended: Flags = (table.reason >= 0) & (table.reason != UNFINISHED)
    return ended
