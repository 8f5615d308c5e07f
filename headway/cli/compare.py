"""The verb `headway compare`: a scenario with keys varied, side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headway.cli.console import print_interrupted_run, warnings_of
from headway.cli.options import (
    DEFAULT_RUN,
    DEFAULT_SETTINGS,
    RunOptions,
    ScenarioOrName,
    Settings,
    Vary,
    print_json,
    silent,
    with_slo,
)
from headway.cli.progress import run_progress, runs_progress

FIRST = 5  # replications, where they are added until a comparison is decided

if TYPE_CHECKING:
    from headway.planning.design import Alternative
    from simulator.simulation.result import Result


def compare(
    scenario: ScenarioOrName,
    /,
    *,
    vary: Vary = None,
    variant: Annotated[
        list[str] | None,
        silent("a named run, as 'many: engine.max_num_seqs=256' (repeatable, in place of --vary)"),
    ] = None,
    all_: Annotated[
        bool, silent("show rows that hardly differ or may differ by chance, too", "--all")
    ] = False,
    until_decided: Annotated[
        bool,
        silent("add replications, up to 16 times as many, until the winner is sure at 95 %"),
    ] = False,
    settings: Settings = DEFAULT_SETTINGS,
    out: Annotated[Path | None, silent("folder for the files [default: out/NAME-compare]")] = None,
    options: RunOptions = DEFAULT_RUN,
) -> int:
    """Simulate a scenario with some keys varied, side by side."""
    from headway.planning.design import expand
    from headway.planning.runs import run_point
    from simulator.simulation.write import check_folder

    overrides = with_slo(settings.overrides, options.slo)
    alternatives = expand(scenario, vary or (), overrides, settings.seed, variants=variant or ())
    name = alternatives[0].scenario.name
    folder = check_folder(out or Path("out") / f"{name}-compare", options.format)
    if options.replications is not None or until_decided:
        return _compare_replications(alternatives, folder, all_, options, until_decided)
    results = []
    for k, alternative in enumerate(alternatives, 1):
        label = f"{k}/{len(alternatives)} {alternative.label}"
        named = ", ".join(map("=".join, alternative.varied.items())) or alternative.label
        with run_progress(label, options.quiet) as progress, warnings_of(named):
            result = run_point(alternative.scenario, stepwise=options.stepwise, progress=progress)
        result.warmup, result.cooldown = options.warmup, options.cooldown
        if result.interrupted:
            return print_interrupted_run(result)
        results.append(result)
    _write_runs(alternatives, results, folder, all_, options)
    return int(not any(result.summary()["completed"] for result in results))


def _write_runs(
    alternatives: "Sequence[Alternative]",
    results: "Sequence[Result]",
    folder: Path,
    everything: bool,
    options: RunOptions,
) -> None:
    """Write every run, the table and the plot; print the table."""
    from headway.figures.compare import draw_compare, draw_many
    from headway.figures.style import COLORS, save
    from headway.planning.knee import add_load
    from headway.planning.runs import encode_csv, metric_values
    from headway.report.comparison import compare_table
    from headway.report.metric_rows import part_values
    from headway.report.winner import winner_lines
    from simulator.simulation.write import write_run
    from simulator.util.files import write_atomic

    rows = []
    for alternative, result in zip(alternatives, results, strict=True):
        add_load(result)
        write_run(result, folder / alternative.folder, options.format)
        summary = result.summary()
        rows.append({**_origin(alternative), **metric_values(summary), **part_values(summary)})
    write_atomic(folder / "comparison.csv", encode_csv(rows))
    labels = [alternative.label for alternative in alternatives]
    draw = draw_many if len(results) > len(COLORS) else draw_compare
    by = ", ".join(key for key, value in alternatives[0].varied.items() if value == labels[0])
    save(draw(labels, results, by), folder / "comparison.png")
    if options.json_:
        print_json(folder / "comparison.csv")
    elif not options.quiet:
        summaries = [result.summary() for result in results]
        print(compare_table(labels, summaries, everything=everything))
        print(*winner_lines(labels, summaries), sep="\n")
        print(f"written to {folder}: comparison.csv, comparison.png, each run's folder", flush=True)


def _compare_replications(
    alternatives: "Sequence[Alternative]",
    folder: Path,
    everything: bool,
    options: RunOptions,
    until_decided: bool,
) -> int:
    """Run every alternative so many times under common random numbers; print their differences."""
    from headway.figures.style import save
    from headway.planning import replications
    from headway.planning.runs import scenario_cost_lines
    from simulator.util.errors import HeadwayError
    from simulator.util.files import write_together

    if "seed" in alternatives[0].varied:
        raise HeadwayError("--vary seed: replications draw their seeds themselves; vary other keys")
    scenarios = [alternative.scenario for alternative in alternatives]
    looks = replications.LOOKS if until_decided else 1
    count = FIRST if options.replications is None else options.replications
    with runs_progress("runs", options.quiet) as progress:
        runs = replications.replicate_until_decided(
            scenarios,
            count,
            looks,
            warmup=options.warmup,
            cooldown=options.cooldown,
            progress=progress,
        )
    found = replications.differences(runs, looks)
    origins = [_origin(alternative) for alternative in alternatives]
    write_together(
        folder,
        {
            "comparison.csv": replications.encode_differences(origins, runs, found),
            "replications.csv": replications.encode_replications(origins, runs),
        },
    )
    labels = [alternative.label for alternative in alternatives]
    save(replications.draw_intervals(labels, runs), folder / "comparison.png")
    if options.json_:
        print_json(folder / "comparison.csv")
    elif not options.quiet:
        print_differences(replications.compare_intervals(labels, found, everything=everything))
        print(*scenario_cost_lines(labels, scenarios), sep="\n")
        print(*replications.winner_lines(labels, runs, looks), sep="\n")
        print(f"written to {folder}: comparison.csv, replications.csv, comparison.png", flush=True)
    return int(not any(run["completed"] for same in runs for run in same))


def print_differences(text: str) -> None:
    """Print a table of differences; on a terminal, what is significant stands in colour."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    table, _, notes = text.rpartition("\n\n")
    for line in table.splitlines():
        console.print(line, style={" +": "green", " -": "red"}.get(line[-2:]))
    print("", notes, sep="\n")


def _origin(alternative: "Alternative") -> dict[str, object]:
    """Return the first cells of an alternative's rows."""
    return {"run": alternative.folder, **alternative.varied}
