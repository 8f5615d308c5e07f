"""What a plan has found, as a table, as text and as files: plan.json, plan.csv, best.yaml, ..."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from headway.common.pareto import pareto_front
from headway.planning.candidate import Candidate, looked_at, result_row
from headway.planning.design import axes_of, fold_errors
from headway.planning.journal import open_journal
from headway.planning.market import NEAR
from headway.planning.plan import JOURNAL, Runs, choose_best, find_best, ranks
from headway.planning.plan_folder import choose_folder, question_key
from headway.planning.problem import REPLICAS, PlanOptions, PlanProblem, make_problem, scales
from headway.planning.runs import encode_csv, scenario_cost_lines
from headway.planning.search import PlannedRun, not_monotone
from headway.planning.verdict import Trial, interval
from headway.report.text import align
from headway.report.vllm_serve import serve_command, warn_of_lost_policies
from simulator.results.service_levels import short
from simulator.scenario.load import Source, load_scenario
from simulator.simulation.write import write_scenario
from simulator.util.errors import HeadwayError
from simulator.util.files import write_together
from simulator.util.workers import use_backend

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

COLUMNS = {
    "gpus": "GPUs",
    "dollars_per_hour": "$/h",
    "dollars_per_million_output_tokens": "$/Mtok",
    "power_w": "W",
    "joules_per_output_token": "J/tok",
}
BY_DAY = {"dollars_per_day": "$/day"} | COLUMNS


def plan_table(problem: PlanProblem, candidates: Sequence[Candidate], best: Candidate) -> str:
    """Return the table of candidates, what cannot be told, and the best in words."""
    bounds = problem.criteria.slos
    metrics = [*dict.fromkeys(slo.metric for slo in bounds if slo.metric != "completion")]
    rate = problem.key == "workload.request_rate"
    searched = [best.rate_unit if rate else problem.key or "kept"]
    if problem.searches_rate:
        searched.append(f"{100 * problem.criteria.confidence:g} %")
    heads = ["candidate", *searched, *metrics, "SLO %", "breaks", "headroom %"]
    heads += [*_columns(problem).values(), "looked at"]
    lines = [heads]
    for candidate in candidates:
        row = result_row(problem, candidate)
        said = "cannot run" if candidate.errors else "not tried" if candidate.not_tried else "no"
        said = "never" if candidate.never else said
        cells = [said, *[""] * (len(heads) - 2)]
        if "gpus" in row:
            at = candidate.cut_short
            basis = row["looked_at"] + (", cut short" if at and row.get("at", at[0]) in at else "")
            cells = [*_cells(problem, candidate, row, metrics), basis]
        elif candidate.result.trials:
            cells[heads.index("breaks") - 1] = row["reason"] or ""
            cells[-1] = row["looked_at"]
        lines.append([("* " if candidate is best else "  ") + candidate.label, *cells])
    notes = [": ".join(pair) for pair in fold_errors(candidates)]
    notes += [f"{c.label}: fails: {c.never}" for c in candidates if c.never]
    notes += [f"{c.label}: not tried: {c.not_tried}" for c in candidates if c.not_tried]
    if problem.key and any(candidate.result.best for candidate in candidates):
        notes.insert(0, "breaks: the bound that breaks at the next load or value tried")
    for candidate in candidates:
        for a, b in not_monotone(candidate.result.trials, rising=bool(problem.high)):
            notes.append(f"{candidate.label}: not monotone: {a.at:g} and {b.at:g} contradict")
    unpriced = [c.label for c in candidates if c.result.best is not None and c.resources[1] is None]
    if unpriced and not problem.by_energy:
        notes.append(f"no price is known of {', '.join(unpriced)}: GPUs are counted, not dollars")
    held = [(c.label, c.scenario) for c in candidates if c.result.best and c.scenario]
    notes += scenario_cost_lines([label for label, _ in held], [scenario for _, scenario in held])
    text = [*problem.of_pods, problem.under, "", align(lines, heads=0), ""]
    return "\n".join([*text, *notes, *_words(problem, candidates, best)])


def _cells(
    problem: PlanProblem, candidate: Candidate, row: Mapping[str, Any], metrics: Sequence[str]
) -> Iterator[str]:
    """Write the cells of a candidate that has figures."""
    if not row["holds"]:
        yield "no"
    elif problem.searches_rate:
        yield f"{row['capacity']:.4g}"
        yield _range(candidate)
    else:
        begins = "from " if problem.key == REPLICAS and scales(candidate.scenario) else ""
        yield f"{begins}{row['at']:g}" if problem.key else "yes"
    for name in metrics:
        yield "-" if row[name] is None else short(row[name])
    yield "-" if row["attainment"] is None else f"{100 * row['attainment']:.2f}"
    yield row["reason"] or "-"
    yield "-" if row["headroom"] is None else f"{100 * row['headroom']:.0f}"
    for name in _columns(problem):
        yield "-" if row[name] is None else short(row[name])


def _columns(problem: PlanProblem) -> dict[str, str]:
    """Return the columns of what a candidate takes: of a load that changes with $/day."""
    return COLUMNS if problem.criteria.window is None else BY_DAY


def _range(candidate: Candidate) -> str:
    """Write the interval of a capacity; an end that is not known lies beyond all that was tried."""
    low, high = candidate.capacity_interval
    places = [trial.at for trial in candidate.result.trials]
    least = f"<{min(places):.4g}" if low is None else f"{low:.4g}"
    most = f">{max(places):.4g}" if high is None else f"{high:.4g}"
    return f"{least} to {most}"


def _words(problem: PlanProblem, candidates: Sequence[Candidate], best: Candidate) -> Iterator[str]:
    """Say what is best, what it takes and how far it goes."""
    row = result_row(problem, best)
    place = f"{problem.key}={row['at']:g} " if problem.key and not scales(best.scenario) else ""
    parts = [f"{place}carries the load"]
    if problem.searches_rate:
        sure = f"{100 * problem.criteria.confidence:g} %: {_range(best)}"
        parts = [f"capacity {row['capacity']:.4g} {best.rate_unit} ({sure})"]
    if row["attainment"] is not None:
        parts.append(f"SLO attainment {100 * row['attainment']:.2f} %")
    if row["reason"]:
        where = "above it" if problem.searches_rate else "below it"
        why = f" {row['broke']} breaks" if row["broke"] else f": {row['reason']}"
        parts.append(where + why)
    if row["headroom"] is not None:
        share = f"{100 * abs(row['headroom']):.0f} %"
        less = row["headroom"] < 0
        parts.append(f"{share} below the offered load" if less else f"headroom {share}")
    price = f", ${row['dollars_per_hour']:,.2f}/h" if row["dollars_per_hour"] else ""
    parts.append(f"{row['gpus']:.4g} GPU{'s' if row['gpus'] != 1 else ''}{price}")
    if problem.by_energy:
        parts.append(f"{row['power_w']:,.4g} W, {row['joules_per_output_token']:.3g} J/token")
    if row["dollars_per_million_output_tokens"] is not None:
        parts.append(f"${row['dollars_per_million_output_tokens']:.3g}/M output tokens")
    yield f"* {best.label}: {'; '.join(parts)}"
    if wrong := sum(bool(one.errors) for one in candidates):
        yield f"  {wrong} of {len(candidates)} candidates cannot run, so another may be better"
    yield f"  looked at {row['looked_at']} of load"
    told = [text for text in row["verdicts"] if not text.startswith("completion")]
    if told and not problem.searches_rate:  # a largest rate is where a bound is just kept
        yield f"  {'; '.join(told)}"
    yield from _caveats(problem, best, row)
    yield from _ties(problem, candidates, best)
    yield from _by_need(problem, candidates)


def _by_need(problem: PlanProblem, candidates: Sequence[Candidate]) -> Iterator[str]:
    """Say what replicas that come and go cost beside a fixed number of them."""
    kinds = {"with autoscaling": True, "fixed": False}
    if problem.key != REPLICAS or not any(scales(one.scenario) for one in candidates):
        return
    dollars: list[float | None] = []
    for words, scaled in kinds.items():
        those = [one for one in candidates if scales(one.scenario) == scaled]
        held = [one for one in those if one.result.best is not None]
        rows = [(result_row(problem, one), one) for one in held or those]
        known = [pair for pair in rows if pair[0].get("gpus")]
        if not held and not known:
            yield f"  {words}: none keeps the levels"
            continue
        best = choose_best(problem, held) if held else min(known, key=lambda p: p[0]["gpus"])[1]
        row = result_row(problem, best)
        worst = {
            name.removeprefix("worst_window_"): f"from {value / 3600:.3g} h on"
            for name, value in row.items()
            if name.startswith("worst_window_") and "completion" not in name
        }
        told = f"{row['gpus']:.3g} GPU{'s' if row['gpus'] != 1 else ''}"
        if row["dollars_per_day"] is not None:
            told = f"${row['dollars_per_day']:,.2f}/day, {told}"
        told += "" if not scaled else " on average"
        told += f"; worst {', '.join(map(' '.join, worst.items()))}" if worst else ""
        dollars += [row["dollars_per_day"]] if held else []
        tried = f" of {len(those)} targets" if len(those) > 1 and scaled else ""
        none = f": none{tried} keeps the levels ({row['reason']}); the smallest"
        yield f"  {words}{', the cheapest' if held else none}: {told} ({best.label})"
    if len(dollars) == len(kinds) and None not in dollars:
        less = 1.0 - (dollars[0] or 0.0) / (dollars[1] or 1.0)
        much = f"{abs(less):.0%}" if abs(less) >= 0.005 else "nothing"
        yield f"  autoscaling {'costs' if less <= -0.005 else 'saves'} {much}"


def _ties(problem: PlanProblem, candidates: Sequence[Candidate], best: Candidate) -> Iterator[str]:
    """Name those that serve as much for their price as the best, or do what it does as cheaply.

    Within the tolerance of a rate, or `NEAR` of a price.
    """
    held = [one for one in candidates if one.result.best is not None]
    gains = [rank[0] for rank in ranks(problem, held)]
    told, within = f"the same {'power' if problem.by_energy else 'cost'}", NEAR - 1.0
    if problem.searches_rate:
        told, within = "too close to tell", problem.criteria.tolerance
    for one, gain in zip(held, gains, strict=True):
        if one is not best and gain - min(gains) <= within * abs(min(gains)):
            yield f"  {told}: {one.label}, within {100 * within:g} %"


WIDE = 2.0  # times the tolerance: an interval of a capacity that is said to be wide


def _caveats(problem: PlanProblem, best: Candidate, row: Mapping[str, Any]) -> Iterator[str]:
    """Say what the answer lacks for want of time or runs."""
    criteria = problem.criteria
    for at in best.cut_short:
        place = f" at {problem.key}={at:g}" if problem.key else ""
        longest = f"{criteria.max_seconds:g} s (--max-duration)"
        yield f"  cut short: the verdict{place} needs runs longer than {longest}"
    beyond = best.result.beyond
    if beyond is not None and not beyond.sure and not problem.searches_rate:
        yield f"  too close to tell at {beyond.at:g}, in {looked_at(beyond)}: it may be enough, too"
    if not problem.searches_rate:
        return
    low, high = row["capacity_low"], row["capacity_high"]
    more = f"--replications {4 * criteria.replications}"
    if best.best.seconds is not None and criteria.min_seconds is not None:
        more = f"--min-duration {4 * criteria.min_seconds:g} (s)"
    if low is None or high is None:
        yield f"  the interval ends beyond the loads that were tried: {more} tells where"
    elif high - low > WIDE * criteria.tolerance * row["capacity"]:
        wide = (high - low) / row["capacity"]
        yield f"  the interval is {wide:.0%} of the capacity wide; {more} narrows it"


def plan(
    scenario: Source,
    slo: Sequence[str] = (),
    vary: Mapping[str, Sequence[object]] | None = None,
    *,
    fewest: str | None = None,
    cheapest: bool = False,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    backend: str | None = None,
    address: str | None = None,
) -> "pd.DataFrame":
    """Find what `headway plan` finds; return a row per candidate, the best first.

    `sweep` takes the same arguments by name, but for two. HeadwayError, a ValueError, where no
    candidate keeps the bounds.

    Args:
        scenario: the file, a shipped one's name, or what a file would hold, a dict.
        slo: bounds, as `p99_ttft_ms<=1000`; none: the scenario's `plan` or `goodput`.
        vary: values of dotted keys; each combination is a candidate.
        fewest: `dotted.key=LOW..HIGH`: the least that carries the load, not the largest rate.
        cheapest: the cheapest that carries the load, not the largest rate.
        overrides: `dotted.key=value`, put over the file.
        seed: in place of the scenario's.
        out: folder for the files of `headway plan`; runs that it has are not made again. None: no
            files.
        jobs: workers.
        backend: loky, dask or ray; None: joblib's active one.
        address: of a Dask scheduler or Ray cluster.
    """
    import pandas as pd

    slo = [slo] if isinstance(slo, str) else slo
    if isinstance(slo, Mapping):
        raise HeadwayError("slo: is a list of bounds; what is varied goes to vary=")
    items = [f"{key}={','.join(values)}" for key, values in axes_of(vary)]
    options = PlanOptions([*slo] or None, items or None, fewest, cheapest)
    problem = make_problem(scenario, options, overrides, seed)
    question = question_key(problem)
    folder = None if out is None else choose_folder(Path(out), problem.name, question)
    kept = nullcontext(None) if folder is None else open_journal(folder / JOURNAL)
    with kept as journal, use_backend(backend, jobs, address):
        candidates, best, _ = find_best(problem, None, Runs(jobs, journal=journal))
    if folder is not None:
        write_plan(problem, candidates, best, folder, question=question)
    ordered = [best, *(c for c in candidates if c is not best)]
    return pd.DataFrame([result_row(problem, candidate) for candidate in ordered])


def write_plan(
    problem: PlanProblem,
    candidates: Sequence[Candidate],
    best: Candidate,
    out: Path,
    answer: Sequence[str] = (),
    *,
    question: str | None = None,
) -> list[Path]:
    """Write the answer, and what is to be said of it beside the table; all files or none.

    `question` is that of `question_key`: who asks another one later does not write over it.
    """
    rows = [result_row(problem, candidate) for candidate in candidates]
    keys = dict.fromkeys(key for candidate in candidates for key in candidate.varied)
    flat = [keys | {key: one for key, one in row.items() if key != "verdicts"} for row in rows]
    report = {
        "question": question,
        "slo": [slo.text for slo in problem.criteria.slos],
        "searched": problem.key or None,
        **({"pods": problem.pods} if problem.pods > 1 else {}),
        "best": candidates.index(best),
        "candidates": rows,
    }
    if not answer:
        first, *others = _words(problem, candidates, best)
        answer = [first.removeprefix("* "), f"  {problem.under}", *others]
    report["answer"] = [*answer]
    settings = problem.settings(best, PlannedRun(best.best.at, seconds=best.best.seconds))
    settings.append(("slo", json.dumps(report["slo"])))
    chosen = load_scenario(problem.path, problem.overrides, vary=settings)
    warn_of_lost_policies(chosen)
    return write_together(
        out,
        {
            "plan.json": json.dumps(report, indent=2).encode() + b"\n",
            "plan.csv": encode_csv(flat),
            "runs.csv": encode_csv([*_runs(problem, candidates)]),
            "plan.png": partial(_draw, problem, candidates, best),
            "best.yaml": partial(write_scenario, chosen),
            "vllm_serve.sh": serve_command(chosen).encode(),
        },
    )


def _runs(problem: PlanProblem, candidates: Sequence[Candidate]) -> Iterator[dict[str, Any]]:
    """Yield a row for every run that was made."""
    for candidate in candidates:
        for trial in candidate.result.trials:
            for replication, run in enumerate(trial.runs):
                place = {**candidate.varied, candidate.key or problem.key or "at": trial.at}
                numbers = {key: value for key, value in run.items() if not isinstance(value, dict)}
                yield {**place, "seed": problem.seed + replication, **numbers}


Colored = Sequence[tuple[Candidate, str, str]]
"""Candidates, their colours and what these are called."""


def _draw(
    problem: PlanProblem, candidates: Sequence[Candidate], best: Candidate, file: BinaryIO
) -> None:
    """Draw how close every run came to the bounds, and speed against throughput."""
    from headway.figures.style import COLORS, FAINT, encode, grid, legend_below, sheet

    ran = [candidate for candidate in candidates if candidate.result.trials]
    several = len(ran) > len(COLORS)  # then only the best has a colour, and stands above the others
    ran.sort(key=lambda candidate: several and candidate is best)
    colored = [*zip(ran, COLORS, [one.label for one in ran], strict=False)]
    if several:
        kinds = [*dict.fromkeys(one.varied.get("gpu.name", "") for one in ran)]
        alike = not 1 < len(kinds) < len(COLORS)  # else a colour for each GPU
        shades = {kind: FAINT if alike else COLORS[k + 1] for k, kind in enumerate(kinds)}
        names = {kind: "others" if alike else _sized(kind, ran[:-1]) for kind in kinds}
        gpus = [one.varied.get("gpu.name", "") for one in ran[:-1]]
        colored = [(one, shades[g], names[g]) for one, g in zip(ran, gpus, strict=False)]
        colored.append((ran[-1], COLORS[0], ran[-1].label))
    speed = sum(1 for candidate in ran for _ in candidate.speeds(of_best=_sizes_fleet(problem))) > 1
    with sheet(1, 2 if speed else 1, 4.2) as figure:
        _draw_bounds(figure.axes[0], problem, colored, best)
        if speed:
            _draw_front(figure.axes[1], problem, colored)
        legend_below(figure, figure.axes[0])
        for axes in figure.axes:
            grid(axes)
        if problem.pods > 1:
            figure.suptitle(f"One of {problem.pods} pods")
    encode(figure, file)


def _sized(gpu: str, ran: Sequence[Candidate]) -> str:
    """Name a GPU with the tensor-parallel sizes that ran on it."""
    own = [one.scenario for one in ran if one.varied.get("gpu.name") == gpu]
    sizes = sorted({one.engine.tensor_parallel_size for one in own if one is not None})
    return f"{gpu} (TP {', '.join(map(str, sizes))})"


def _sizes_fleet(problem: PlanProblem) -> bool:
    """Say whether the size of a fleet was searched for."""
    return bool(problem.high) and problem.key.startswith("cluster.")


def _draw_bounds(axes: "Axes", problem: PlanProblem, colored: Colored, best: Candidate) -> None:
    """Draw the metric that is worst beside its bound: above 1 it is broken."""
    from headway.figures.style import log_scale

    slos = problem.criteria.slos
    label, place = _abscissa(problem, [candidate for candidate, *_ in colored])
    seen = [1.0]
    for candidate, color, named in colored:
        points = sorted(
            (place(candidate, trial), max(trial.ratios(slos).values(), default=1.0))
            for trial in candidate.result.trials
            if not trial.superseded
        )
        seen += [ratio for _, ratio in points]
        name = ("the best: " if candidate is best else "") + named
        if name in axes.get_legend_handles_labels()[1]:
            name = "_"  # those of a colour share one entry; matplotlib leaves names with _ out
        axes.plot(*zip(*points, strict=True), color=color, marker="o", label=name)
    axes.axhline(1.0, color="0.3", linestyle="--", linewidth=1)
    if max(seen) > 3 * min(seen):
        log_scale(axes, "y")
    bounds = [slo.text for slo in slos if slo.metric != "completion"]
    axes.set_title("How near to the bounds")
    axes.set_xlabel("\n".join([label, *bounds]))
    if problem.high:
        axes.locator_params(axis="x", integer=True)
    axes.set_ylabel("worst metric / its bound")


def _abscissa(
    problem: PlanProblem, candidates: Sequence[Candidate]
) -> tuple[str, Callable[[Candidate, Trial], float]]:
    """Say what trials are drawn over: what was searched, else what they draw or cost."""
    spent = [c.spent_at(trial) for c in candidates for trial in c.result.trials]
    if problem.high and None not in spent:
        priced = all(c.resources[1] is not None for c in candidates if c.result.best is not None)
        return "$/h" if priced else "GPUs", lambda candidate, trial: candidate.spent_at(trial) or 0
    if problem.key:
        scaled = any(scales(one.scenario) for one in candidates)
        label = f"{problem.key}{' (autoscaled: at the start)' if scaled else ''}"
        if problem.key == "workload.request_rate":
            label = candidates[0].rate_unit.replace("req/s", "requests/s")
        return label, lambda _, trial: trial.at
    if problem.by_energy:
        return "W", lambda _, trial: interval(trial.runs, "power_w").mean
    prices = [c.resources_at(trial)[1] for c in candidates for trial in c.result.trials]
    if None in prices:
        return "GPUs", lambda candidate, trial: candidate.resources_at(trial)[0]
    return "$/h", lambda candidate, trial: candidate.resources_at(trial)[1] or 0.0


def _draw_front(axes: "Axes", problem: PlanProblem, colored: Colored) -> None:
    """Draw what users get against what a dollar buys, and the front that nothing beats.

    A GPU counts in place of a dollar where not each has a price, or where watts decide.
    """
    from headway.figures.style import from_zero

    points = []
    found = [one.resources_at(trial)[1] for one, *_ in colored for trial in one.result.trials]
    by_price = not problem.by_energy and all(found)
    for candidate, color, _ in colored:
        for trial, user, tokens in candidate.speeds(of_best=_sizes_fleet(problem)):
            gpus, price = candidate.resources_at(trial)
            gain = 3.6e-3 * tokens / price if by_price and price else tokens / gpus
            points += [(user, gain)] if trial.ok else []
            face = color if trial.ok else "none"
            axes.plot(user, gain, "o", color=color, markerfacecolor=face, markersize=5)
    best = [points[k] for k in pareto_front(points)]
    if best:
        axes.step(*zip(*best, strict=True), where="pre", color="0.4", linewidth=1)
    axes.set_title("Speed against cost" if by_price else "Speed against throughput")
    axes.set_xlabel("tokens/s per user (hollow: breaks a bound)")
    axes.set_ylabel("million output tokens per $" if by_price else "tokens/s per GPU")
    from_zero(axes)
