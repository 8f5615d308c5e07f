"""What a plan has found, as text and as files: plan.json, .csv and .png, runs.csv, best.yaml."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from simulator.planning.plan import Candidate, result_row
from simulator.planning.problem import PlanProblem
from simulator.planning.runs import encode_csv
from simulator.planning.search import Trial, interval, not_monotone
from simulator.planning.service_levels import SHARES
from simulator.planning.vllm_serve import serve_command
from simulator.scenario.load import load_scenario
from simulator.simulation.write import write_scenario
from simulator.util.files import write_together
from simulator.util.pareto import pareto_front
from simulator.views.report import align

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COST_COLUMNS = {
    "tokens_per_s_per_gpu": "tok/s/GPU",
    "tokens_per_s_per_user": "tok/s/user",
    "dollars_per_hour": "$/h",
    "dollars_per_million_output_tokens": "$/Mtok",
}
GREY = "0.6"
MIN_MISSED = 1e-3  # of a share that is missed: a plot over logarithms has no 0


def plan_table(problem: PlanProblem, candidates: Sequence[Candidate], best: Candidate) -> str:
    """Give the table of candidates, and what it cannot tell."""
    bounds = problem.criteria.slos
    metrics = [*dict.fromkeys(slo.metric for slo in bounds if slo.metric != "completion")]
    searched = {"workload.request_rate": "req/s"}.get(problem.key, problem.key or "holds")
    place = [searched, "surely"] if problem.key else [searched]
    lines = [["candidate", *place, *metrics, *COST_COLUMNS.values()]]
    for candidate in candidates:
        row = result_row(problem, candidate)
        cells = ["cannot run" if candidate.errors else "never"]
        cells += [""] * (len(lines[0]) - 2)
        if row["holds"]:
            cells = [*_cells(row, [*metrics, *COST_COLUMNS], searched=bool(problem.key))]
        lines.append([("* " if candidate is best else "  ") + candidate.label, *cells])
    notes = [f"{c.label}: {c.error}" for c in candidates if c.errors]
    for candidate in candidates:
        for a, b in not_monotone(candidate.result.trials, rising=bool(problem.high)):
            notes.append(f"{candidate.label}: not monotone: {a.at:g} and {b.at:g} contradict")
    text = ["under " + ", ".join(slo.text for slo in bounds), "", align(lines, heads=0), ""]
    return "\n".join([*text, *notes, "* the best"])


def _cells(row: Mapping[str, Any], names: Sequence[str], searched: bool) -> Iterator[str]:
    """Write the cells of a candidate that holds."""
    yield f"{row['at']:.4g}" if searched else "yes"
    if searched:
        ends = [row["surely_holds"], row["surely_fails"]]
        if row["surely_fails"] is not None and row["surely_fails"] < row["at"]:
            ends.reverse()
        yield "..".join("" if end is None else f"{end:.4g}" for end in ends)
    for name in names:
        yield "-" if row[name] is None else f"{row[name]:,.4g}"


def write_plan(
    problem: PlanProblem, candidates: Sequence[Candidate], best: Candidate, out: Path
) -> list[Path]:
    """Write the answer; all files or none."""
    rows = [result_row(problem, candidate) for candidate in candidates]
    report = {
        "slo": [slo.text for slo in problem.criteria.slos],
        "searched": problem.key or None,
        "best": candidates.index(best),
        "candidates": rows,
    }
    settings = problem.settings(best.varied, (best.best.at, 0))
    chosen = load_scenario(problem.path, problem.overrides, vary=settings)

    return write_together(
        out,
        {
            "plan.json": json.dumps(report, indent=2).encode() + b"\n",
            "plan.csv": encode_csv(rows),
            "runs.csv": encode_csv([*_runs(problem, candidates)]),
            "plan.png": partial(_draw, problem, candidates, best),
            "best.yaml": partial(write_scenario, chosen),
            "vllm_serve.sh": serve_command(chosen).encode(),
        },
    )


def _runs(problem: PlanProblem, candidates: Sequence[Candidate]) -> Iterator[dict[str, Any]]:
    """Give a row for every run that was made."""
    for candidate in candidates:
        for trial in [*candidate.result.trials, *candidate.lower_loads]:
            for replication, run in enumerate(trial.runs):
                place = {**candidate.varied, problem.key or "at": trial.at}
                yield {**place, "seed": problem.seed + replication, **run}


Colored = Sequence[tuple[Candidate, str]]
"""Candidates and their colours."""


def _draw(
    problem: PlanProblem, candidates: Sequence[Candidate], best: Candidate, file: BinaryIO
) -> None:
    """Draw how close every run came to the bounds, and speed against throughput."""
    from simulator.figures.style import COLORS, encode, grid, legend_below, sheet

    ran = [candidate for candidate in candidates if candidate.result.trials]
    several = len(ran) > len(COLORS)  # then only the best has a colour, and stands above the others
    ran.sort(key=lambda candidate: several and candidate is best)
    colors = [GREY] * (len(ran) - 1) + [COLORS[0]] if several else COLORS
    colored = [*zip(ran, colors, strict=False)]
    speed = sum(1 for candidate in ran for _ in candidate.speeds()) > 1
    height = 3.9 if several else 3.7 + 0.15 * len(ran)
    with sheet(1, 2 if speed else 1, height) as figure:
        _draw_bounds(figure.axes[0], problem, colored, best)
        if speed:
            _draw_front(figure.axes[1], colored)
        if several:
            figure.legend(loc="outside lower center", frameon=False)
        else:
            legend_below(figure, figure.axes[0])
        for axes in figure.axes:
            grid(axes)
    encode(figure, file)


def _draw_bounds(axes: "Axes", problem: PlanProblem, colored: Colored, best: Candidate) -> None:
    """Draw the metric that is worst beside its bound: above 1 it is broken."""
    from simulator.figures.style import log_scale

    label, place = _abscissa(problem, [candidate for candidate, _ in colored])
    seen = [1.0]
    for candidate, color in colored:
        points = sorted(
            (place(candidate, trial), bound_ratio(trial, problem))
            for trial in (*candidate.result.trials, *candidate.lower_loads)
        )
        seen += [ratio for _, ratio in points]
        mark = "the best: " if candidate is best else "_" if color == GREY else ""  # _: unnamed
        name = mark + candidate.label
        axes.plot(*zip(*points, strict=True), color=color, marker="o", label=name)
    axes.axhline(1.0, color="0.3", linestyle="--", linewidth=1)
    if max(seen) > 3 * min(seen):
        log_scale(axes, "y")
    bounds = [slo.text for slo in problem.criteria.slos if slo.metric != "completion"]
    axes.set_title(
        f"How near to {', '.join(bounds)}" if len(bounds) == 1 else "How near to the bounds"
    )
    if len(bounds) > 1:
        axes.text(0.02, 0.98, "\n".join(bounds), transform=axes.transAxes, va="top", fontsize=10)
    axes.set_xlabel(label)
    if problem.high:
        axes.locator_params(axis="x", integer=True)
    axes.set_ylabel("worst metric / its bound")


def _abscissa(
    problem: PlanProblem, candidates: Sequence[Candidate]
) -> tuple[str, Callable[[Candidate, Trial], float]]:
    """Say what trials are drawn over: what was searched, else what they cost."""
    if problem.key:
        rate = problem.key == "workload.request_rate"
        return "requests/s" if rate else problem.key, lambda _, trial: trial.at
    prices = [c.resources_at(trial)[1] for c in candidates for trial in c.result.trials]
    if None in prices:
        return "GPUs", lambda candidate, trial: candidate.resources_at(trial)[0]
    return "$/h", lambda candidate, trial: candidate.resources_at(trial)[1] or 0.0


def bound_ratio(trial: Trial, problem: PlanProblem) -> float:
    """Divide the metric that is worst by its bound.

    Of a share it is what is missed by what may be: 2 where goodput is 0.98 and 0.99 is wanted.
    """
    ratios = []
    for slo in problem.criteria.slos:
        value = interval(trial.runs, slo.metric).mean
        if slo.metric == "completion" and slo.met(value):
            continue  # as a rule all are served, and the others tell more
        if slo.metric in SHARES:
            ratios.append(max(1.0 - value, MIN_MISSED) / max(1.0 - slo.bound, MIN_MISSED))
        else:
            over, under = (value, slo.bound) if slo.at_most else (slo.bound, value)
            ratios.append(max(over, 1e-9) / max(under, 1e-9))
    return max(ratios, default=1.0)


def _draw_front(axes: "Axes", colored: Colored) -> None:
    """Draw what users get against what a GPU gives, and the front that nothing beats."""
    from simulator.figures.style import from_zero

    points = []
    for candidate, color in colored:
        for trial, user, gpu in candidate.speeds():
            points.append((user, gpu))
            face = color if trial.ok or trial in candidate.lower_loads else "none"
            axes.plot(user, gpu, "o", color=color, markerfacecolor=face, markersize=5)
    best = [points[k] for k in pareto_front(points)]
    if best:
        axes.step(*zip(*best, strict=True), where="pre", color="0.4", linewidth=1)
    axes.set_title("Speed against throughput")
    axes.set_xlabel("tokens/s per user (hollow: breaks a bound)")
    axes.set_ylabel("tokens/s per GPU")
    from_zero(axes)
