"""What the advice of a diagnosis brings: each is simulated on the same workload, and ranked."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import ceil, inf
from pathlib import Path
from typing import Any

from headway.planning.candidate import Candidate, resources
from headway.planning.plan import Runs, search_all
from headway.planning.problem import PlanOptions, make_problem, rate_key
from headway.planning.runs import MetricValues, metric_values, run_all, warn_once
from headway.planning.verdict import BEYOND
from headway.report.metric_rows import BY_KEY
from headway.report.text import align, served_of
from simulator.diagnosis.finding import follow, words
from simulator.diagnosis.rules import NOTHING
from simulator.results.metrics import summarize_record
from simulator.results.service_levels import FINISH, Judged, Slo, asks, given_levels, parse_slo
from simulator.results.steady_state import overload, trend_warning
from simulator.results.token_times import lacks_gaps
from simulator.scenario.load import load_scenario, loads
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError, HeadwayWarning

SHOWN = ("p99_ttft_ms", "p99_tpot_ms", "p99_itl_ms", "request_goodput", "output_throughput")
"""What is told of every advice, beside the metrics that it is for."""
LESS = ("preemptions", "service_difference_max", "gpu_hours")
"""Metrics beside those of a comparison of which less is better."""
NONE_WAITS = {"service_difference_max": 0.0}
"""What a metric is where the summary has null: no two clients wait at the same time."""
GOODPUT = "request_goodput"
BY_LEVELS = "service levels kept, then (of runs that keep all) price, then "
ENOUGH = (
    "None of them is enough to keep all service levels: `headway plan --buy` tries other GPUs, "
    "sizes and precisions."
)
UNKEPT = "Where more requests are lost than completion allows, no level counts as kept."
NARROWER = "Answers of narrower weights or KV cache may differ in quality, which is not simulated."
PAIRS = 3  # of the best advice with others that are tried
ALIKE = 0.01  # of the greater value: less is no fall
COSTLY = 0.2  # likewise: as much is told


@dataclass(frozen=True, slots=True)
class Trial:
    """A piece of advice that was simulated."""

    rule: str  # whose finding gives it
    metric: str  # of the summary: what it is to improve
    advice: Mapping[str, Any]  # as in summary.json
    values: MetricValues  # of the run that follows it; empty: it failed
    error: str = ""  # why
    before: float | None = None  # the metric as it is
    gpus: float = 0  # that the run has, on average
    price: float | None = None  # of these, $/h; None: not known
    trade: Sequence[str] = ()  # metrics that lose more than is won
    missed: int = 0  # service levels that this run breaks, of those that the user gave

    @property
    def after(self) -> float | None:
        """The metric of the run that follows the advice."""
        return value_of(self.values, self.metric)

    @property
    def grows(self) -> bool:
        """Whether its queue grows in this run: a longer one may break more."""
        return overload(self.values) is not None

    @property
    def gain(self) -> float:
        """By what share of its greater value the metric improves; below 0: it gets worse."""
        return gain(self.metric, self.before, self.after)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        names = ("rule", "metric", "advice", "before", "after", "gpus", "price", "missed")
        found = {name.replace("price", "dollars_per_hour"): getattr(self, name) for name in names}
        more = {"error": self.error or None, "trade": [*self.trade], "metrics": self.values}
        return found | more


@dataclass(frozen=True, slots=True)
class Held:
    """The largest load that keeps the service levels, and the one that comes."""

    key: str  # workload.request_rate (req/s) or workload.trace.rate_scale
    offered: float
    capacity: float
    interval: tuple[float, float] | None  # 95 %; None: not random, or beyond what was looked at
    slo: Sequence[str]
    unit: str = "req/s"  # of offered and capacity

    @property
    def exceeded(self) -> bool:
        """Whether more comes than long runs carry."""
        return self.offered > self.capacity

    def __str__(self) -> str:
        """Write it as one line."""
        ends = " (95 %: {:.4g} to {:.4g})".format(*self.interval) if self.interval else ""
        return (
            f"The load is {self.offered / self.capacity:.0%} of the {self.capacity:.4g} {self.unit}"
            f"{ends} that this carries with {' and '.join(self.slo)}"
            f"{'; longer runs break them.' if self.exceeded else '.'}"
        )


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """What stands out in a run, and what each advice would bring."""

    findings: Sequence[Mapping[str, Any]]
    as_it_is: Trial  # the run, without advice
    trials: Sequence[Trial]  # the best first, bad trades last
    ranked_by: Sequence[str] = ()  # metrics: goodput where it has bounds, the first finding's
    held: Held | None = None  # where it was asked for
    verdicts: Sequence[str] = ()  # on the service levels of the run as it is
    wanted: int = 0  # requests of all classes that decide the strictest of them

    @property
    def values(self) -> MetricValues:
        """The metrics of the run as it is."""
        return self.as_it_is.values

    def __repr__(self) -> str:
        """Name it in a line: all that it holds fills a screen."""
        return f"<Diagnosis: {len(self.findings)} findings, {len(self.trials)} trials>"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        own = self.as_it_is.as_dict()
        found = {name: own[name] for name in ("gpus", "dollars_per_hour", "metrics")}
        found |= {name: getattr(self, name) for name in ("findings", "ranked_by", "verdicts")}
        found["trials"] = [trial.as_dict() for trial in self.trials]
        return found | {"held": None if self.held is None else asdict(self.held)}


def better(metric: str) -> int:
    """Say whether more of a metric is better (1), or less (-1)."""
    if metric in BY_KEY:
        return BY_KEY[metric].better
    return -1 if metric in LESS or metric.endswith(("_ms", FINISH)) else 1


def gain(metric: str, before: float | None, after: float | None) -> float:
    """Return by what share of its greater value a metric improves; -inf where one is not known."""
    if before is None or after is None:
        return -inf
    whole = max(abs(after), abs(before)) or 1.0
    return better(metric) * float(after - before) / whole


def value_of(values: MetricValues, metric: str) -> float | None:
    """Return a metric of a run; None: it has none."""
    if metric in values or not values:
        return values.get(metric)
    return NONE_WAITS.get(metric)


@loads
def diagnose(
    scenario: Scenario,
    *,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Diagnosis:
    """Run a scenario, and once more for each advice of its findings, on `jobs` workers.

    All runs have the same requests at the same times, lengths and errors of the cost model (common
    random numbers). An advice that several findings give is tried for the first. They are ranked
    by the service levels that they break, those that keep all by their price; then by goodput,
    where the scenario has bounds for it, and by the metric of the first finding. Who loses more
    than it wins comes last. The best is tried together with each of the next three, and listed
    where that is better: where one keeps all levels, those that cost less. Raises HeadwayError
    where the scenario cannot be run; advice that cannot be followed says why.
    """
    warned: set[str] = set()
    with warnings.catch_warnings(record=True, action="always", category=HeadwayWarning) as caught:
        result = run(scenario).whole()
        summary = result.summary()
    warn_once((str(one.message) for one in caught), warned)
    findings = summary["headway"]["diagnosis"] or []
    advised: list[tuple[str, str, Mapping[str, Any]]] = []
    for finding in findings:
        for advice in finding["advice"]:
            if all(advice != known for *_, known in advised):
                advised.append((finding["rule"], finding["metric"], advice))
    values = _known(summary)
    judged = [Judged.of(one) for one in summary["headway"].get("slo") or ()]
    verdicts = [f"{one.slo.text} {one}{served_of(summary, one.slo)}" for one in judged]
    slos = [one.slo for one in judged]
    shares = [(one.limit, one.part) for one in slos if one.is_share and one.limit]
    many = (BEYOND / limit / asks(result.workload, part).mean() for limit, part in shares)
    wanted = ceil(max(many, default=0))
    try_all = partial(_try_all, scenario, values, slos=slos, warned=warned, jobs=jobs)
    trials = try_all(advised, progress=progress)
    gpus, price = resources(scenario, [values])
    as_it_is = Trial("", "", {}, values, gpus=gpus, price=price, missed=_missed(values, slos))
    metrics = [GOODPUT] if GOODPUT in values else []
    ranked_by = [*dict.fromkeys(metrics + [one.metric for one in trials[:1]])]

    def rank(trial: Trial) -> tuple[bool | float, ...]:
        return _rank(trial, ranked_by, by_price=bool(slos))

    trials.sort(key=rank)
    good = [trial for trial in trials if rank(trial) < rank(as_it_is)]
    some = good
    if slos and good and not good[0].missed:  # two may cost less than one that is enough
        some = [one for one in good[1:] if _price(one) < _price(good[0])]
    both = try_all([*_pairs(some)], progress=None)
    trials[:0] = sorted((one for one in both if rank(one) < rank(good[0])), key=rank)
    return Diagnosis(findings, as_it_is, trials, ranked_by, verdicts=verdicts, wanted=wanted)


def find_held(
    path: Path, overrides: Sequence[str] = (), seed: int | None = None, jobs: int | None = None
) -> Held | None:
    """Search the largest load that keeps the scenario's service levels, as `headway plan` does.

    None where it has none, where there is no rate to search for (all at once, clients that wait
    for answers, a ramp), or where not even the least load keeps them.
    """
    try:
        problem = make_problem(path, PlanOptions(vary=[], cheapest=True), overrides, seed)
        scenario = load_scenario(path, overrides, seed)
        key, offered = rate_key(scenario)
    except HeadwayError:  # no service level, or no rate
        return None
    if scenario.workload.trace is None and scenario.workload.generator.request_rate == inf:
        return None
    candidate = Candidate({}, scenario)
    search_all(replace(problem, key=key, low=0, high=0), [candidate], Runs(jobs))
    if candidate.result.best is None:
        return None
    low, high = candidate.capacity_interval
    ends = (low, high) if low is not None and high is not None and low < high else None
    bounds = [f"{name} {bound:g} ms" for name, bound in scenario.goodput.bounds.items()]
    slos = [
        f"{slo.text} ({', '.join(bounds)})" if slo.metric == "goodput" else slo.text
        for slo in problem.criteria.slos
        if slo.metric != "completion"
    ]
    return Held(key, offered, candidate.capacity, ends, slos, unit=candidate.rate_unit)


def _try_all(
    scenario: Scenario,
    values: MetricValues,
    advised: Sequence[tuple[str, str, Mapping[str, Any]]],
    *,
    slos: Sequence[Slo],
    warned: set[str],
    jobs: int | None,
    progress: Callable[[int, int], None] | None,
) -> list[Trial]:
    """Follow each advice, given with its rule and metric.

    `values` are of the run as it is, `slos` its service levels, `warned` what has been warned of.
    """
    followed = []
    for one in advised:
        with suppress(HeadwayError):  # two that exclude each other
            followed.append((one, follow(scenario, one[-1])))
    outcomes = run_all(_measure, [task for _, task in followed], jobs, progress)
    trials = []
    for ((rule, metric, advice), task), outcome in zip(followed, outcomes, strict=True):
        gpus, price = resources(task, [outcome.values]) if outcome.values else (0.0, None)
        warn_once(outcome.warned, warned, words(advice))
        trials.append(
            Trial(
                rule,
                metric,
                advice,
                outcome.values,
                error=outcome.error,
                before=value_of(values, metric),
                gpus=gpus,
                price=price,
                trade=traded(metric, values, outcome.values, slos),
                missed=_missed(outcome.values, slos),
            )
        )
    return trials


def _keeps(slo: Slo, values: MetricValues, slos: Sequence[Slo]) -> bool:
    """Say whether a run keeps a level; none is kept where too many requests were lost."""
    lost = any(not s.met(values.get(s.metric, s.bound)) for s in slos if s.metric == "completion")
    return not lost and slo.met(values.get(slo.metric, slo.bound))


def _missed(values: MetricValues, slos: Sequence[Slo]) -> int:
    """Count the levels that a run breaks, of those that the user gave."""
    given = given_levels(one.text for one in slos)
    return sum(not _keeps(one, values, slos) for one in slos if one.text in given)


def traded(
    metric: str,
    before: MetricValues,
    after: MetricValues,
    slos: Sequence[Slo] = (),
) -> list[str]:
    """Name what gets worse and makes an advice for `metric` a bad trade.

    That is goodput that falls, where it has bounds; a service level of `slos` that was kept and
    is broken; what loses a greater share than is won, unless requests are to be saved: of levels
    that were broken, of all that is SHOWN where there are none.
    """
    won = gain(metric, value_of(before, metric), value_of(after, metric))
    kept = [one for one in slos if _keeps(one, before, slos)]
    keys = [one.metric for one in slos if one not in kept] if slos else SHOWN
    limits = dict.fromkeys(() if metric == "completed" else keys, won)
    if GOODPUT in before:
        limits = {key: limits[key] for key in limits if slos} | {GOODPUT: 0.0}
    both = before.keys() & after.keys()
    lost = [
        key
        for key, most in limits.items()
        if key in both and -gain(key, before[key], after[key]) > max(most, ALIKE)
    ]
    broken = [one.metric for one in kept if one.metric in both and not _keeps(one, after, slos)]
    return [*dict.fromkeys([*lost, *broken])]


def _rank(trial: Trial, metrics: Sequence[str], *, by_price: bool) -> tuple[bool | float, ...]:
    """Return a key that puts the best first, by the digits that the table shows.

    `by_price`: of those that break no level the cheapest; last those that do as their queue grows.
    """
    found = [value_of(trial.values, metric) for metric in metrics]
    digits = [
        inf if value is None else -better(metric) * float(f"{value:.3g}")
        for metric, value in zip(metrics, found, strict=True)
    ]
    enough = _price(trial) if by_price and not trial.missed else 0.0
    first = bool(trial.error), bool(trial.trade), by_price and trial.missed > 0 and trial.grows
    return *first, trial.missed, enough, *digits


def _price(trial: Trial) -> float:
    """Return what a run costs, $/h; GPUs where there is no price."""
    return trial.gpus if trial.price is None else trial.price


def _pairs(good: Sequence[Trial]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the best advice with each of the next that turn other keys, as one.

    It may take fewer replicas beside the other advice than alone: half are tried, and half of them.
    """
    others = [one for one in good[1:] if not _keys(one.advice) & _keys(good[0].advice)]
    for other in others[:PAIRS]:
        for own, more in product(_fewer(good[0].advice), _fewer(other.advice)):
            also = {more["key"]: more["to"], **more.get("also", {})}
            yield good[0].rule, good[0].metric, {**own, "also": {**own.get("also", {}), **also}}


def _fewer(advice: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield an advice; where it adds replicas, also half as many, as long as that is more."""
    yield advice
    if advice["key"].endswith(".replicas") and advice["to"] // 2 > advice["from"]:
        yield from _fewer({**advice, "to": advice["to"] // 2})


def _keys(advice: Mapping[str, Any]) -> set[str]:
    """Return the keys that an advice turns."""
    return {advice["key"], *advice.get("also", {})} if advice else set()


def _measure(scenario: Scenario) -> MetricValues:
    """Make one run, in a worker."""
    return _known(summarize_record(run(scenario)))


def _known(summary: Mapping[str, Any]) -> MetricValues:
    """Return the numbers of a summary that mean something."""
    found = metric_values(summary)
    found |= {parse_slo(s["bound"]).metric: s["value"] for s in summary["headway"].get("slo") or ()}
    found = {key: value for key, value in found.items() if not lacks_gaps(found, key)}
    return found if summary["completed"] else {k: v for k, v in found.items() if k[-3:] != "_ms"}


def table(found: Diagnosis) -> str:
    """Write what stands out, and a row for each advice, the best first."""
    given = given_levels(found.verdicts)
    lost = any(bound.startswith("completion") and " broken" in bound for bound in found.verdicts)
    shown = found.verdicts if lost else given  # the table counts those given
    told = [f"Service levels: {'; '.join(shown)}."] if shown else []
    told += filter(None, [trend_warning(found.values)])
    lines = [*told, *(line for finding in found.findings for line in _finding(found, finding))]
    if not found.trials:
        more = found.held is not None and found.held.exceeded
        nothing = [] if found.findings or more else [NOTHING]
        return "\n".join([*nothing, *lines, *([str(found.held)] if found.held else [])])
    metrics = [finding["metric"] for finding in found.findings]
    runs = [found.as_it_is, *(trial for trial in found.trials if not trial.error)]
    known = {key for trial in runs for key in trial.values}
    bounded = [bound.partition("<")[0] for bound in found.verdicts if "_ms<" in bound]
    columns = [key for key in dict.fromkeys((*metrics, *bounded, *SHOWN)) if key in known]
    lead = ", then ".join(_label(key).partition(" (")[0] for key in found.ranked_by)
    levels = ["levels kept"] if given else []
    order = f"{BY_LEVELS}{lead}" if given else lead
    rows = [("advice", *levels, *map(_label, columns), "GPUs", "$/h")]
    for trial in runs:
        kept = [f"{len(given) - trial.missed} of {len(given)}"] if levels else []
        cells = [_number(trial.values, key) for key in columns]
        price = "" if trial.price is None else f"{trial.price:,.2f}"
        what = words(trial.advice) if trial.advice else "as it is"
        rows.append((what, *kept, *cells, f"{trial.gpus:.3g}", price))
    notes = [
        f"{words(trial.advice)}: {text}"
        for trial in found.trials
        for text in _costs(found, trial, columns)
    ]
    if all(trial.trade or trial.error for trial in found.trials):
        notes.append("No advice makes it better: leave the keys as they are.")
    elif levels and not found.as_it_is.missed:
        notes.append("All service levels are kept as it is: nothing needs turning.")
    elif levels and all(trial.missed for trial in runs):
        notes.append(ENOUGH)
    if lost and any(" kept" in bound for bound in found.verdicts):
        notes.append(UNKEPT)
    if (requests := found.values["num_prompts"]) < found.wanted:
        many = f"set workload.num_prompts to {found.wanted:,}"
        notes.append(f"{requests:,} requests may keep a level by chance: {many}.")
    if any(_narrows(trial.advice) for trial in runs):
        notes.append(NARROWER)
    return "\n".join(
        [*lines, "", f"What each advice brings, sorted by {order}:", align(rows), *notes]
    )


def _finding(found: Diagnosis, finding: Mapping[str, Any]) -> list[str]:
    """Say what happens, and which of the advice that was tried for it is best."""
    advice, rule = finding["advice"], finding["rule"]
    tried = [one for one in found.trials if one.advice in advice or one.rule == rule]
    good = [one for one in tried if not one.trade and not one.error]
    knob = "none that helps" if tried else "none beside the knobs of other findings"
    if found.verdicts and not found.as_it_is.missed and rule != "low_load":
        knob = "none is needed while all service levels are kept"
    elif good:
        among = f"the best of {len(tried)} tried" if len(tried) > 1 else "tried"
        knob = f"{words(good[0].advice)} ({among})"
    return [f"- {finding['text']}", f"  Knob: {knob}."]


def _costs(found: Diagnosis, trial: Trial, columns: Sequence[str]) -> Iterator[str]:
    """Say whether a trial's queue grows, and which metrics it makes worse."""
    if found.verdicts and trial.grows:
        yield "its queue grows: a longer run may break more"
    pairs = {key: (found.values.get(key), trial.values.get(key)) for key in columns}
    costs = [key for key, pair in pairs.items() if -inf < gain(key, *pair) < -COSTLY]
    if keys := trial.trade or costs:
        both = found.values, trial.values
        told = (f"{_label(key)} {' -> '.join(_number(one, key) for one in both)}" for key in keys)
        yield f"{'a bad trade' if trial.trade else 'costs'}: {', '.join(told)}"


def _narrows(advice: Mapping[str, Any]) -> bool:
    """Say whether an advice takes bits from weights or KV cache."""
    return any(key.endswith((".quantization", ".kv_cache_dtype")) for key in _keys(advice))


def _label(metric: str) -> str:
    if metric in BY_KEY:
        return BY_KEY[metric].label
    part, _, own = metric.removesuffix("_ms").rpartition(":")  # client a:p90_tpot_ms
    first, _, name = own.partition("_")
    label = f"{first.capitalize()} {name.upper()}{f' of {part}' if part else ''} (ms)"
    return label if metric.endswith("_ms") else metric


def _number(values: MetricValues, key: str) -> str:
    value = values.get(key)
    return "n/a" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
