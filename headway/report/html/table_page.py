"""The page of a sweep or a plan: what is best, pictures over the keys, a table that sorts."""

import io
import json
import re
from collections.abc import Callable, Iterator
from html import escape
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

from headway.figures.data import Run
from headway.figures.grids import draw_costs, draw_grid, draw_room
from headway.figures.style import encode
from headway.figures.tables import draw_pareto, varied_keys
from headway.report.html.page import page
from headway.report.html.tables import number
from headway.report.metric_rows import COLUMNS
from headway.report.winner import best_run
from headway.runs.read import load_mapping, read_table
from simulator.scenario.draw import make_workload
from simulator.util.errors import HeadwayError
from simulator.util.json_text import parse_json

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

PLAN_COLUMNS = {
    "holds": "keeps the bounds",
    "at": "at",
    "reason": "breaks",
    "headroom": "headroom, %",
    "attainment": "SLO attainment, %",
    "gpus": "GPUs",
    "dollars_per_hour": "$/h",
    "dollars_per_million_output_tokens": "$ per M tokens",
    "cut_short": "cut short",
    "never_holds": "why never",
    "error": "error",
}
BESIDE = {
    "capacity": "capacity",
    "power_w": "W",
    "joules_per_output_token": "J per token",
    "kg_co2_per_million_output_tokens": "kg CO2e per M tokens",
    "tokens_per_s_per_gpu": "tok/s/GPU",
    "tokens_per_s_per_user": "tok/s/user",
    "looked_at": "looked at",
}
"""What the page alone shows: with these a plan's table is twice as wide as the studio."""
LEADING = ("holds", "at", "dollars_per_hour", "reason", "headroom")
"""What the table of a plan begins with, before the bounded metrics and the rest."""
REASONS = (*LEADING[1:], "never_holds", "error")
NOT_TRIED, NEVER = "not tried", "never"
TABLES = ("plan.csv", "results.csv")
MAX_ROWS = 2_000  # of the table: what a browser sorts at once
MAX_REQUESTS = 200_000  # of the best point, to run it again for its charts


def is_table_folder(folder: Path) -> bool:
    """Return whether a folder is one of a sweep or a plan."""
    return any((folder / name).is_file() for name in TABLES)


def table_folders(parent: Path) -> list[Path]:
    """List the folders of sweeps and plans in a folder."""
    return sorted({path.parent for name in TABLES for path in parent.glob(f"*/{name}")})


def table_page(folder: Path) -> tuple[str, str]:
    """Return the page of a sweep's or plan's folder, and what it shows in a few words.

    The best point is run again, from best.yaml, for its charts. Raises HeadwayError where the
    table is missing or damaged.
    """
    planned = (folder / "plan.csv").is_file()
    rows = _candidates(folder, "plan" if planned else "results")
    best, slo, count, searched = _plan_best(folder) if planned else (_sweep_best(rows), None, 1, "")
    rows.attrs["slo"] = slo or []
    columns = plan_columns(rows, searched) if planned else _sweep_columns(rows)
    kind = "candidates" if planned else "points"
    runs, note = _best(folder, slo)
    if runs and count > 1:
        note += f" Its figures are of this one run; the table's are means of {count} runs."
    above = (
        ("The best", f"{answer_html(best)}<p class=note>{note}</p>"),
        ("Over the keys", "".join(_pictures(rows, planned=planned))),
        (kind.capitalize(), _table(rows, columns)),
    )
    words = f"{len(rows):,} {kind}" if len(rows) > 1 else f"1 {kind[:-1]}"
    return page(runs, name=folder.resolve().name, above=above), words


def answer_of(folder: Path) -> dict[str, str]:
    """Return a plan's answer in a line, and its candidates as a table, as HTML."""
    rows = _candidates(folder, "plan")
    best, slo, _, searched = _plan_best(folder)
    rows.attrs["slo"] = slo
    columns = plan_columns(rows, searched)
    shown = {key: one for key, one in columns.items() if key not in BESIDE}
    return {"answer": answer_html(best), "table": _folded(rows, shown)}


def _candidates(folder: Path, name: str) -> "pd.DataFrame":
    """Read a table of candidates or points; what was not tried neither holds nor does not."""
    rows = read_table(folder, name)
    if not len(rows):
        raise HeadwayError(f"{folder}: its table has no row")
    if "not_tried" in rows:
        rows["holds"] = rows.holds.where(rows.not_tried.isna(), NOT_TRIED)
    if "never_holds" in rows:
        never = rows.never_holds.isna() | rows.not_tried.notna()
        rows["holds"] = rows.holds.where(never, NEVER)
    return rows


def answer_html(answer: str) -> str:
    """Show an answer: its first line as a headline, what is indented below a later one folded."""
    whole = re.sub(r"\n {4,}", " ", escape(answer))  # lines of a terminal's width
    parts = [part.split("\n  ") for part in re.split(r"\n(?! )", whole)]
    texts: list[str] = []
    for head, *more in parts:
        lines = "<p class=lines>{}</p>".format("\n".join(more))
        if not texts:
            texts.append(f"<p class=headline>{head}</p>{lines}")
        else:
            folded = f"<details><summary>{head}</summary>{lines}</details>"
            texts.append(folded if more else f"<p>{head}</p>")
    return "".join(texts)


def _sweep_columns(rows: "pd.DataFrame") -> dict[str, tuple[str, float]]:
    """Return the columns that the table shows: what they are called and multiplied by."""
    shown = {key: (key, 1.0) for key in varied_keys(rows, "")}
    for metric in COLUMNS:
        if metric.key in rows and rows[metric.key].notna().any():
            shown[metric.key] = (metric.label.replace("/", " ", 1), metric.scale)
    if "error" in rows and rows["error"].notna().any():
        shown["error"] = ("error", 1.0)
    return shown


def plan_columns(rows: "pd.DataFrame", searched: str) -> dict[str, tuple[str, float]]:
    """Likewise of a plan; `searched` is the key that it searched a value of, if there is one.

    Candidates of unlike keys, as with and without autoscaling, have their names in one column.
    """
    first = [*rows.columns[: rows.columns.get_loc("holds")]] if "holds" in rows else []
    if "candidate" in rows and rows[first].isna().any(axis=None):
        first = ["candidate"]
    bounded = [key for key in rows if key.endswith("_ms")]
    shown = {str(key): (str(key), 1.0) for key in first}
    named = PLAN_COLUMNS | BESIDE | {"at": searched}
    for key in (*LEADING, *bounded, *named):
        if key in rows:
            label = named.get(key, str(key))
            shown[str(key)] = (label, 100.0 if label.endswith("%") else 1.0)
    if "cut_short" in rows and not rows.cut_short.any():
        del shown["cut_short"]
    if "at" in rows and not searched:
        del shown["at"]
    return {key: value for key, value in shown.items() if rows[key].notna().any()}


def _folded(rows: "pd.DataFrame", columns: dict[str, tuple[str, float]]) -> str:
    """Make the table of what was tried; below it, folded, what was not, and why."""
    left = rows[rows.holds.isin([NOT_TRIED, NEVER])] if "holds" in rows else rows[:0]
    if not len(left):
        return _grid(rows, columns)
    why = left.reindex(columns=["never_holds", "not_tried"]).bfill(axis=1).never_holds
    known = {key: one for key, one in columns.items() if key not in REASONS and left[key].any()}
    fold = f"<details><summary>{len(left):,} of the candidates not run</summary>{{}}</details>"
    table = _grid(left.assign(why=why), known | {"why": ("why", 1.0)})
    rest = rows.drop(left.index)
    shown = {key: one for key, one in columns.items() if rest[key].notna().any()}
    return _grid(rest, shown) + fold.format(table)


def _grid(rows: "pd.DataFrame", columns: dict[str, tuple[str, float]]) -> str:
    """Make the table alone."""
    words = {key: " class=word" * (rows[key].dtype.kind == "O") for key in columns}
    heads = {key: re.sub(r"([._:])", r"\1<wbr>", escape(of[0])) for key, of in columns.items()}
    head = "".join(f"<th{words[key]}>{text}</th>" for key, text in heads.items())
    lines = []
    for row in rows.head(MAX_ROWS).to_dict("records"):
        cells = []
        for key, (_, scale) in columns.items():
            value = row[key]
            if isinstance(value, bool):  # of a key as a scenario spells it
                value = str(value).lower() if "." in key else "yes" if value else "no"
            plain = isinstance(value, int | float)
            scaled = value * scale if plain else value
            missing = value is None or (isinstance(value, float) and isnan(value))
            order = "" if missing else f' data-sort="{scaled}"' if plain else words[key]
            cells.append(f"<td{order}>{'' if missing else number(scaled)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        '<div class="scroll" tabindex="0"><table class="numbers sorts">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _table(rows: "pd.DataFrame", columns: dict[str, tuple[str, float]]) -> str:
    """Make the table with what there is to know about it; a click on a head sorts by it."""
    more = len(rows) - MAX_ROWS
    note = f" The first {MAX_ROWS:,}; {more:,} more are in the folder." if more > 0 else ""
    return (
        f"<p class=note>Click on a head to sort.</p>{_folded(rows, columns)}"
        f"<p class=note>All metrics are in the folder's table.{note}</p>"
    )


def _pictures(rows: "pd.DataFrame", *, planned: bool) -> Iterator[str]:
    """Draw what can be drawn of the table, of a plan first what its candidates cost."""
    # A place of a grid has one candidate only if no more than two keys are varied.
    grid = () if planned and len(varied_keys(rows, "")) > 2 else (draw_grid,)
    draws: tuple[Callable[[pd.DataFrame], Figure], ...] = (*grid, draw_pareto)
    draws = (draw_costs, draw_room, *draws) if planned else draws
    for draw in draws:
        try:
            figure = draw(rows[rows.error.isna()] if "error" in rows else rows)
        except HeadwayError:
            continue  # one key only, failed points only: the table says it
        file = io.BytesIO()
        encode(figure, file, "svg")
        text = file.getvalue().decode()
        yield f'<figure class="drawn">{text[text.index("<svg") :]}</figure>'


def _sweep_best(rows: "pd.DataFrame") -> str:
    summaries = [
        {"completed": 0, "headway": {}} | row.dropna().to_dict() for _, row in rows.iterrows()
    ]
    place, why = best_run(summaries)
    if place is None:
        return f"No best point: {why}."
    point = ", ".join(f"{key}={rows[key].iloc[place]}" for key in varied_keys(rows, ""))
    return f"{point or 'the point'}: {why}."


def _plan_best(folder: Path) -> tuple[str, list[str], int, str]:
    """Return the best candidate in words, the plan's service levels, how often it was run, and the
    key that was searched.
    """
    plan = load_mapping(folder / "plan.json", parse_json)
    candidates, best = plan.get("candidates"), plan.get("best")
    if not isinstance(candidates, list) or type(best) is not int or best >= len(candidates):
        raise HeadwayError(f"{folder / 'plan.json'}: damaged: it names no best candidate")
    slo = [str(text) for text in plan.get("slo") or ()]
    row = candidates[best]
    said = "\n".join(map(str, plan.get("answer") or [row.get("candidate", "the best candidate")]))
    return said, slo, row.get("replications") or 1, str(plan.get("searched") or "")


def _best(folder: Path, slo: list[str] | None) -> tuple[list[Run], str]:
    """Run the best point again for its charts; without them say why there are none."""
    from simulator.scenario.load import load_scenario
    from simulator.simulation.run import run

    path = folder / "best.yaml"
    if not path.is_file():
        return [], "No point is best, so no run is shown."
    try:
        scenario = load_scenario(path, [] if slo is None else [f"slo={json.dumps(slo)}"])
        load = make_workload(scenario)
        if len(load) > MAX_REQUESTS:
            return [], f"Its {len(load):,} requests are too many to be run again here."
        result = run(scenario, workload=load).whole()
    except HeadwayError as error:
        return [], f"It cannot be run again: {escape('; '.join(error.messages))}"
    return [Run.of("best", result)], "Below is its run, made again from best.yaml."
