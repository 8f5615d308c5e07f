"""One scenario or several, run K times with other requests and other errors of the cost model.

What comes of it as text, files and a picture: means with intervals, paired differences.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.planning.intervals import Difference, Estimate, columns, estimate, holm, paired
from headway.planning.runs import (
    MetricValues,
    encode_csv,
    metric_values,
    run_all,
    run_point,
    warn_once,
)
from headway.report.comparison import ALIKE
from headway.report.metric_rows import BY_KEY, DOLLARS, Metric, find_metric, part_values
from headway.report.text import align
from headway.report.winner import LEADS, apart, best_run, overload_lines, overloaded, prices_differ
from headway.report.winner import winner_lines as name_winner
from simulator.costs.noise import with_drawn_noise
from simulator.results.metrics import summarize_record
from simulator.results.steady_state import TREND
from simulator.results.token_times import lacks_gaps
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError, HeadwayWarning

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MAX_REPLICATIONS = 10_000
LOOKS = 5  # at ever more replications, of a comparison that is to be decided
SEED_STREAM = 0x4E9  # of the seeds of replications
LEVEL = "slo "  # before a service level, where its value is a number of a run


def seeds(seed: int, count: int) -> list[int]:
    """Draw the seeds of the replications: the k-th is the same however many there are."""
    return [
        int(np.random.SeedSequence([seed, SEED_STREAM, k]).generate_state(1, np.uint64)[0] >> 1)
        for k in range(count)
    ]


def replicate(
    scenarios: Sequence[Scenario],
    count: int,
    *,
    warmup: float = 0.0,
    cooldown: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
    have: Sequence[Sequence[MetricValues]] = (),
) -> list[list[MetricValues]]:
    """Run every scenario `count` times on all cores; return the numbers of its summaries.

    Of each those that it `have`s already are not run again.

    The k-th replication of each has the same seed: the same arrivals, lengths and, of the same
    cost model, errors, however the scenarios differ otherwise (common random numbers). Raises
    HeadwayError where so many give no interval, or a run fails; warns where none differs from
    another.
    """
    if not 2 <= count <= MAX_REPLICATIONS:
        raise HeadwayError(f"--replications {count}: must be 2 to {MAX_REPLICATIONS:,}")
    known = len(have[0]) if have else 0
    work = [
        scenario.model_copy(update={"seed": seed})
        for scenario in scenarios
        for seed in seeds(scenario.seed, count)[known:]
    ]
    found = run_all(partial(_measure, warmup, cooldown), work, None, progress, must=True)
    warn_once(sorted({text for outcome in found for text in outcome.warned}), set())
    values = [outcome.values for outcome in found]
    more = count - known
    runs = [values[at : at + more] for at in range(0, len(values), more)]
    runs = [[*old, *new] for old, new in zip(have or [[]] * len(runs), runs, strict=True)]
    if not any(e.sd for same in runs for e in estimates(same).values()):
        warnings.warn(CONSTANT, HeadwayWarning, stacklevel=2)
    return runs


def replicate_until_decided(
    scenarios: Sequence[Scenario],
    count: int,
    looks: int = LOOKS,
    *,
    warmup: float = 0.0,
    cooldown: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[MetricValues]]:
    """Replicate until what names a winner is no chance, or so alike that nobody minds.

    At most `looks` times, each time with twice as many: p values count as often (Bonferroni).
    """
    runs: list[list[MetricValues]] = []
    for _ in range(looks):
        runs = replicate(
            scenarios, count, warmup=warmup, cooldown=cooldown, progress=progress, have=runs
        )
        means, tests = _means(runs), _tests(runs, looks)
        place, _ = best_run(means)
        asked = [one for (*_, key), one in tests.items() if key in LEADS]
        if "slo_met" in means[0]:
            told = {} if place is None else _told(tests, place, apart(means, place))
            asked = [*told.values()]
        if not any(map(undecided, asked)):
            break
        count = min(2 * count, MAX_REPLICATIONS)
    return runs


def undecided(one: Difference) -> bool:
    """Say whether a difference is large enough to mind, and may be chance all the same."""
    apart = abs(one.difference.mean)
    return not one.significant and apart > ALIKE * max(abs(one.first.mean), abs(one.other.mean))


def _measure(warmup: float, cooldown: float, scenario: Scenario) -> MetricValues:
    """Make the run of a scenario that has the replication's seed, in a worker."""
    result = run_point(scenario, noise=partial(with_drawn_noise, scenario.seed)).whole()
    result.warmup, result.cooldown = warmup, cooldown
    summary: dict[str, Any] = summarize_record(result)
    found = metric_values(summary) | part_values(summary)
    found |= {f"{LEVEL}{one['bound']}": one["value"] for one in summary["headway"].get("slo") or ()}
    return {key: value for key, value in found.items() if not lacks_gaps(found, key)}


TESTED = tuple(
    key
    for key in BY_KEY
    if key not in ("completed", "failed", "duration") and not key.startswith("slo_attainment_")
)
"""What a comparison tests, beside the cost of a token where prices differ; the others are seen."""
DRAWN = (
    "output_throughput",
    "slo_attainment",  # where there are bounds; then one of the others is left out
    "mean_ttft_ms",
    "p99_ttft_ms",
    "p99_tpot_ms",
    "p99_e2el_ms",
    "mean_tpot_ms",
)
VERDICTS = {"+": "better", "-": "worse", "?": "may be chance", "=": "same"}
"""What the files have in place of a mark, which a spreadsheet takes for a formula."""
CONSTANT = (
    "no replication differs from another: nothing here is random; a trace is replayed as recorded, "
    "and the cost model has no residuals"
)


def estimates(runs: Sequence[MetricValues]) -> dict[str, Estimate]:
    """Estimate every metric of a comparison that all replications have.

    None can be below 0, and a share not above 1: their intervals end there. A replication in which
    no request completed has no latencies.
    """
    keys = _keys([*BY_KEY, DOLLARS.key], runs)
    if any(run.get("completed") == 0 for run in runs):
        keys = [key for key in keys if "_ms" not in key]
    found = columns(runs, keys)
    return {key: _within_limits(key, estimate(values)) for key, values in found.items()}


def _within_limits(key: str, found: Estimate, first: float = 0.0) -> Estimate:
    """End the intervals where the metric does, of its difference to a `first` one where that is."""
    most = 1.0 if key.startswith("slo_attainment") else inf
    return replace(found, least=0.0 - first, most=most - first)


def _keys(keys: Iterable[str], runs: Sequence[MetricValues]) -> list[str]:
    """Add those of clients and priorities, where the runs tell of several."""
    return [*keys, *(key for key in runs[0] if key.endswith("]"))]


def differences(runs: Sequence[Sequence[MetricValues]], looks: int = 1) -> list[list[Difference]]:
    """Compare every run but the first with the first; p values adjusted as in `_tests`."""
    tests, told = _tests(runs, looks), {*_keys(TESTED, runs[0]), *_leads(runs)}
    return [
        [test for (a, b, key), test in tests.items() if a == 0 and b == k and key in told]
        for k in range(1, len(runs))
    ]


def _tests(
    runs: Sequence[Sequence[MetricValues]], looks: int = 1
) -> dict[tuple[int, int, str], Difference]:
    """Compare pairs of runs by a metric: all that a comparison tells, adjusted as one family.

    Every run but the first with the first by each of TESTED, and all pairs by what names a winner:
    so the table and the winner cannot contradict each other.
    """
    leads = _leads(runs)
    keys = [*dict.fromkeys((*_keys(TESTED, runs[0]), *leads))]
    values = [columns(same, keys) for same in runs]
    tests = {
        (a, b, key): paired(key, values[a][key], values[b][key])
        for a in range(len(runs))
        for b in range(a + 1, len(runs))
        for key in (keys if a == 0 else leads)
        if key in values[a] and key in values[b]
    }
    adjusted = holm([test.p for test in tests.values()])
    return {
        pair: replace(test, adjusted=min(looks * p, 1.0), family=looks * len(tests))
        for (pair, test), p in zip(tests.items(), adjusted, strict=True)
    }


def _leads(runs: Sequence[Sequence[MetricValues]]) -> list[str]:
    """Name the metrics by which a winner may be named."""
    judged = ("request_goodput", "slo_attainment", "output_throughput", "mean_e2el_ms")
    asked = [*(judged if columns(runs[0], ["slo_attainment"]) else LEADS)]
    if prices_differ(_means(runs)):
        asked.append(DOLLARS.key)
    return asked


def _means(runs: Sequence[Sequence[MetricValues]]) -> list[dict[str, Any]]:
    """Return the mean of each run's replications as a summary: so one rule names the winner.

    A run keeps the service levels that most of its replications keep, and is overloaded where more
    than one in ten is (the test of each is at 1 %).
    """
    found = []
    for same in runs:
        values = columns(same, [*same[0]])
        means: dict[str, Any] = {key: sum(each) / len(each) for key, each in values.items()}
        if "slo_met" in means:
            means["slo_met"] = means["slo_met"] > 0.5
        levels = [key for key in means if key.startswith(LEVEL)]
        means["slo"] = [{"bound": key.removeprefix(LEVEL), "value": means[key]} for key in levels]
        worst = sorted(same, key=lambda run: overloaded({**run, "headway": {}}))[
            -1 - len(same) // 10
        ]
        trend = {key: worst[key] for key in TREND if key in worst}
        found.append({"completed": 1, "headway": {}, **means, **trend})
    return found


def _told(
    tests: Mapping[tuple[int, int, str], Difference], best: int, keys: Mapping[int, str]
) -> dict[int, Difference]:
    """Return the tests of other runs against the best, of each by its key."""
    pairs = {k: (min(k, best), max(k, best), key) for k, key in keys.items()}
    return {k: tests[pair] for k, pair in pairs.items() if pair in tests}


def verdict(one: Difference) -> str:
    """Return the mark of a difference."""
    if not one.difference.mean and not one.difference.sd:
        return "="
    if not one.significant:
        return "?"
    return "+" if one.difference.mean * find_metric(one.metric).better > 0 else "-"


def run_intervals(name: str, found: Mapping[str, Estimate]) -> str:
    """Tabulate the replications of one scenario."""
    count = next(iter(found.values())).count
    rows = [(f"{name}, {count} replications", "mean", "95 % of the mean", "95 % of one run")]
    for key, e in found.items():
        metric = find_metric(key)
        ends = _range(metric, e.interval), _range(metric, e.prediction_interval)
        rows.append((metric.label, f"{e.mean * metric.scale:,.2f}", *ends))
    return align(rows)


def compare_intervals(
    labels: Sequence[str], found: Sequence[Sequence[Difference]], *, everything: bool = False
) -> str:
    """Tabulate paired differences, a block for each run but the first.

    A difference that may be chance has a mark, and the pairs that would decide; one that is small,
    too, is left out, unless `everything` is asked for.
    """
    blocks = []
    hidden = 0
    for label, tested in zip(labels[1:], found, strict=True):
        same = [one for one in tested if everything or one.significant or undecided(one)]
        hidden += len(tested) - len(same)
        count = tested[0].difference.count if tested else 0
        rows = [(f"{count} pairs", labels[0], label, "difference", "95 % interval", "p (Holm)")]
        for one in same:
            metric = find_metric(one.metric)
            apart = _within_limits(one.metric, one.difference, one.first.mean)
            first, other = (f"{e.mean * metric.scale:,.2f}" for e in (one.first, one.other))
            p = "<0.001" if one.adjusted < 0.001 else f"{one.adjusted:.3f}"
            span = f"{apart.mean * metric.scale:+,.2f}", _range(metric, apart.interval, "+,.2f")
            told = f"{p} {verdict(one)}"
            if verdict(one) == "?" and one.needed is not None:
                told = f"({one.needed:,} pairs) {told}"
            rows.append((metric.label, first, other, *span, told))
        nothing = f"{label}: every difference to {labels[0]} is small, and may be chance."
        blocks.append(align(rows) if same else nothing)
    blocks.append(
        f"Differences are to {labels[0]}, pair by pair: same requests, same errors of the cost "
        "model.\n+ better, - worse, at 5 % over all lines and winners together (Holm); ? may be "
        "chance: the pairs in brackets would decide. --until-decided does so for a winner."
    )
    if hidden:
        blocks[-1] += f"\nLeft out: {hidden} of {ALIKE:.0%} at most that may be chance (--all)"
    return "\n\n".join(blocks)


def overloaded_lines(labels: Sequence[str], runs: Sequence[Sequence[MetricValues]]) -> list[str]:
    """Say which of several get more than they serve: those whose queues grow."""
    return overload_lines(labels, _means(runs))


def winner_lines(
    labels: Sequence[str], runs: Sequence[Sequence[MetricValues]], looks: int = 1
) -> list[str]:
    """Name the best run by the rule of single runs, as far as chance allows.

    The rule is applied to the means. The best wins where its difference to each other run, in the
    first metric that tells the two apart, is significant at 5 %, by Holm over the differences of
    all pairs of runs (it was not named beforehand) and those of the table.
    """
    tests = _tests(runs, looks)

    def chance(best: int, keys: Mapping[int, str]) -> tuple[bool, str]:
        found = _told(tests, best, keys)
        nearest = max(found, key=lambda k: found[k].adjusted, default=best)
        p = found[nearest].adjusted if found else 0.0
        if nearest == best or found[nearest].significant:
            return True, f"; significant, p <= {max(p, 0.001):.2g} by Holm" if found else ""
        return False, f"; {labels[nearest]} may be as good: p {p:.2g} by Holm"

    return name_winner(labels, _means(runs), chance)


def _range(metric: Metric, pair: tuple[float, float], form: str = ",.2f") -> str:
    low, high = (value * metric.scale for value in pair)
    return f"{low:{form}} to {high:{form}}"


def encode_intervals(found: Mapping[str, Estimate], about: Mapping[str, object]) -> bytes:
    """Return the estimates as JSON, after what they are `about`."""
    metrics = {
        key: {
            "mean": e.mean,
            "sd": e.sd,
            "mean_interval": [*e.interval],
            "one_run_interval": [*e.prediction_interval],
        }
        for key, e in found.items()
    }
    return json.dumps({**about, "metrics": metrics}, indent=2, allow_nan=False).encode() + b"\n"


def encode_replications(
    origins: Sequence[Mapping[str, object]], runs: Sequence[Sequence[MetricValues]]
) -> bytes:
    """Return a CSV row for each run: cells of its scenario, the run's name, its metrics.

    Without the name where there is a single scenario.
    """
    left_out = {"run"} if len(runs) == 1 else set()
    return encode_csv(
        [
            {key: v for key, v in origin.items() if key not in left_out}
            | {"replication": k, **numbers}
            for origin, same in zip(origins, runs, strict=True)
            for k, numbers in enumerate(same)
        ]
    )


def encode_differences(
    origins: Sequence[Mapping[str, object]],
    runs: Sequence[Sequence[MetricValues]],
    found: Sequence[Sequence[Difference]],
) -> bytes:
    """Return a row for each run and metric as CSV; the first run has no difference."""
    rows: list[dict[str, object]] = []
    for origin, same, tested in zip(origins, runs, [[], *found], strict=True):
        by_metric = {one.metric: one for one in tested}
        for key, e in estimates(same).items():
            low, high = e.interval
            row = {**origin, "metric": key, "replications": e.count, "mean": e.mean, "sd": e.sd}
            row |= {"low": low, "high": high}
            if key in by_metric:
                one = by_metric[key]
                low, high = _within_limits(key, one.difference, one.first.mean).interval
                row |= {"difference": one.difference.mean}
                row |= {"difference_low": low, "difference_high": high}
                row |= {"p_value": one.p, "p_holm": one.adjusted, "verdict": VERDICTS[verdict(one)]}
            rows.append(row)
    return encode_csv(rows)


def draw_intervals(labels: Sequence[str], runs: Sequence[Sequence[MetricValues]]) -> "Figure":
    """Draw the mean of each run with its interval, and that of one run thin."""
    from headway.figures.style import grid, sheet

    shown = [key for key in DRAWN if all(key in columns(same, [key]) for same in runs)]
    with sheet(2, 3, 3 + 0.5 * len(runs), sharey=True) as figure:
        panels = figure.axes
        for axes, key in zip(panels, shown, strict=False):
            scale = BY_KEY[key].scale
            for place, same in enumerate(runs):
                e = _within_limits(key, estimate(columns(same, [key])[key]))
                at = scale * e.mean
                prediction, mean = (
                    [[at - scale * low], [scale * high - at]]
                    for low, high in (e.prediction_interval, e.interval)
                )
                axes.errorbar(at, place, xerr=prediction, color="0.7", capsize=2, linewidth=1)
                axes.errorbar(at, place, xerr=mean, fmt="o", color="#0072B2", capsize=4)
            axes.set_title(BY_KEY[key].label)
            axes.set_yticks(range(len(labels)), labels)
            axes.set_ylim(len(labels) - 0.5, -0.5)
            grid(axes, "x")
            axes.locator_params(axis="x", nbins=4)
            axes.xaxis.set_major_formatter("{x:,g}")
        for axes in panels[len(shown) :]:
            axes.set_visible(False)
        figure.supxlabel("blue: mean and its 95 % interval; grey: 95 % of single runs", fontsize=11)
    return figure
