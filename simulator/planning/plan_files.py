"""What `headway plan` writes: plan.json, plan.csv, runs.csv, plan.png, best.yaml, vllm_serve.sh."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from simulator.planning.plan import Candidate, Question, speeds
from simulator.planning.search import Trial, interval
from simulator.planning.service_levels import SHARES
from simulator.planning.vllm_serve import serve_command
from simulator.scenario.load import load_scenario
from simulator.util.files import Writer, write_together
from simulator.util.pareto import front

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
GREY = "0.6"
LEAST = 1e-3  # of a share that is missed: a plot over logarithms has no 0


def write_plan(
    question: Question, candidates: Sequence[Candidate], best: Candidate, out: Path
) -> list[Path]:
    """Write the answer; all files or none."""
    rows = [row_of(question, candidate) for candidate in candidates]
    report = {
        "slo": [slo.text for slo in question.rules.slos],
        "searched": question.key or None,
        "best": candidates.index(best),
        "candidates": rows,
    }
    settings = question.settings(best.varied, (best.answer.best.at if best.answer.best else 1.0, 0))
    chosen = load_scenario(question.path, question.overrides, vary=settings)
    writers: dict[str, Writer] = {
        "plan.json": _text(json.dumps(report, indent=2) + "\n"),
        "plan.csv": _text(_table(rows)),
        "runs.csv": _text(_table([*_runs(question, candidates)])),
        "plan.png": partial(_draw, question, candidates, best),
        "best.yaml": _text(_yaml(chosen.resolved())),
        "vllm_serve.sh": _text(serve_command(chosen)),
    }
    return write_together(out, writers)


def _text(text: str) -> Callable[[BinaryIO], object]:
    return lambda file: file.write(text.encode())


def _yaml(values: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def row_of(question: Question, candidate: Candidate) -> Row:
    """Tell one candidate's answer: where it just holds, and what it does there."""
    row: Row = {**candidate.varied, "holds": candidate.answer.best is not None}
    row |= {"at": None, "surely_holds": None, "surely_fails": None}
    row["error"] = candidate.error or None
    if candidate.answer.best is None:
        return row
    best = candidate.answer.best
    rules = question.rules
    surely, surely_not = candidate.answer.between
    row |= {"at": best.at, "surely_holds": surely, "surely_fails": surely_not}
    row["replications"] = len(best.runs)
    metrics = dict.fromkeys([slo.metric for slo in rules.slos])
    for metric in (*metrics, "request_throughput", "output_throughput"):
        found = candidate.read(metric, rules.confidence)
        row[metric] = found.mean
        row[f"{metric}_half_width"] = found.half if found.count > 1 else None
    tokens = row["output_throughput"]
    price = candidate.dollars_per_hour
    tpot = candidate.read("mean_tpot_ms").mean
    row["gpus"] = candidate.gpus
    row["tokens_per_s_per_gpu"] = tokens / candidate.gpus
    row["tokens_per_s_per_user"] = 1000.0 / tpot if tpot else None
    row["dollars_per_hour"] = price
    row["dollars_per_million_output_tokens"] = (
        price / 3600.0 / tokens * 1e6 if price is not None and tokens else None
    )
    return row


def _runs(question: Question, candidates: Sequence[Candidate]) -> Iterator[Row]:
    """Give a row for every run that was made."""
    for candidate in candidates:
        for trial in [*candidate.answer.trials, *candidate.ladder]:
            for replication, run in enumerate(trial.runs):
                place = {**candidate.varied, question.key or "at": trial.at}
                yield {**place, "seed": question.seed + replication, **run}


def _table(rows: Sequence[Row]) -> str:
    columns = dict.fromkeys(key for row in rows for key in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


Shades = Sequence[tuple[Candidate, str]]
"""Candidates and their colours."""


def _draw(
    question: Question, candidates: Sequence[Candidate], best: Candidate, file: BinaryIO
) -> None:
    """Draw how close every run came to the bounds, and speed against throughput."""
    from simulator.figures.style import COLORS, encode, grid, legend_below, sheet

    ran = [candidate for candidate in candidates if candidate.answer.trials]
    several = len(ran) > len(COLORS)  # then only the best has a colour, and stands above the others
    ran.sort(key=lambda candidate: several and candidate is best)
    colors = [GREY] * (len(ran) - 1) + [COLORS[0]] if several else COLORS
    shades = [*zip(ran, colors, strict=False)]
    speed = sum(1 for candidate in ran for _ in speeds(candidate)) > 1
    height = 3.9 if several else 3.7 + 0.15 * len(ran)
    with sheet(1, 2 if speed else 1, height) as figure:
        _draw_bounds(figure.axes[0], question, shades, best)
        if speed:
            _draw_front(figure.axes[1], shades)
        if several:
            figure.legend(loc="outside lower center", frameon=False)
        else:
            legend_below(figure, figure.axes[0])
        for axes in figure.axes:
            grid(axes)
    encode(figure, file)


def _draw_bounds(axes: "Axes", question: Question, shades: Shades, best: Candidate) -> None:
    """Draw the metric that is worst beside its bound: above 1 it is broken."""
    from simulator.figures.style import log_scale

    where = _searched(question, [candidate for candidate, _ in shades])
    seen = [1.0]
    for candidate, color in shades:
        places = [
            (where[1](candidate, trial), _strain(trial, question))
            for trial in (*candidate.answer.trials, *candidate.ladder)
        ]
        places.sort()
        seen += [strain for _, strain in places]
        mark = "the best: " if candidate is best else "_" if color == GREY else ""  # _: unnamed
        label = mark + candidate.label
        axes.plot(*zip(*places, strict=True), color=color, marker="o", label=label)
    axes.axhline(1.0, color="0.3", linestyle="--", linewidth=1)
    if max(seen) > 3 * min(seen):
        log_scale(axes, "y")
    bounds = [slo.text for slo in question.rules.slos if slo.metric != "completion"]
    axes.set_title(
        f"How near to {', '.join(bounds)}" if len(bounds) == 1 else "How near to the bounds"
    )
    if len(bounds) > 1:
        axes.text(0.02, 0.98, "\n".join(bounds), transform=axes.transAxes, va="top", fontsize=10)
    axes.set_xlabel(where[0])
    if question.high:
        axes.locator_params(axis="x", integer=True)
    axes.set_ylabel("worst metric / its bound")


def _searched(
    question: Question, candidates: Sequence[Candidate]
) -> tuple[str, Callable[[Candidate, Trial], float]]:
    """Say what trials are drawn over: what was searched, else what they cost."""
    if question.key:
        rate = question.key == "workload.request_rate"
        return "requests/s" if rate else question.key, lambda _, trial: trial.at
    prices = [c.dollars_at(trial) for c in candidates for trial in c.answer.trials]
    if None in prices:
        return "GPUs", Candidate.gpus_at
    return "$/h", lambda candidate, trial: candidate.dollars_at(trial) or 0.0


def _strain(trial: Trial, question: Question) -> float:
    """Divide the metric that is worst by its bound.

    Of a share it is what is missed by what may be: 2 where goodput is 0.98 and 0.99 is wanted.
    """
    shares = []
    for slo in question.rules.slos:
        value = interval(trial.runs, slo.metric).mean
        if slo.metric == "completion" and slo.met(value):
            continue  # as a rule all are served, and the others tell more
        if slo.metric in SHARES:
            shares.append(max(1.0 - value, LEAST) / max(1.0 - slo.bound, LEAST))
        else:
            pair = (value, slo.bound) if slo.at_most else (slo.bound, value)
            shares.append(max(pair[0], 1e-9) / max(pair[1], 1e-9))
    return max(shares, default=1.0)


def _draw_front(axes: "Axes", shades: Shades) -> None:
    """Draw what users get against what a GPU gives, and the front that nothing beats."""
    from simulator.figures.style import from_zero

    points = []
    for candidate, color in shades:
        for trial, user, gpu in speeds(candidate):
            points.append((user, gpu))
            face = color if trial.ok or trial in candidate.ladder else "none"
            axes.plot(user, gpu, "o", color=color, markerfacecolor=face, markersize=5)
    best = [points[k] for k in front(points)]
    if best:
        axes.step(*zip(*best, strict=True), where="pre", color="0.4", linewidth=1)
    axes.set_title("Speed against throughput")
    axes.set_xlabel("tokens/s per user (hollow: breaks a bound)")
    axes.set_ylabel("tokens/s per GPU")
    from_zero(axes)
