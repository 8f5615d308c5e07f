"""The files and the picture of a comparison."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.planning.points import Point
    from simulator.simulation.result import Result


def write_comparison(
    points: "list[Point]", results: "list[Result]", folder: Path, format: str, quiet: bool
) -> None:
    """Write every run, the table and the plot; print the table."""
    from simulator.planning.points import encode_comparison
    from simulator.simulation.write import write_run
    from simulator.util.files import write_atomic
    from simulator.views.side_by_side import compare_table

    for point, result in zip(points, results, strict=True):
        write_run(result, folder / point.folder, format)
    table = encode_comparison(points, results)
    write_atomic(folder / "comparison.csv", lambda file: file.write(table))
    labels = [point.label for point in points]
    drawn = _draw(labels, results, folder / "comparison.png")
    if not quiet:
        print(compare_table(labels, [result.summary() for result in results]))
        print(f"written to {folder}: comparison.csv{drawn}, each run's folder", flush=True)


def _draw(labels: list[str], results: "list[Result]", path: Path) -> str:
    """Draw the comparison; return what to add to the list of files."""
    from simulator.figures.compare import plot_compare
    from simulator.figures.compare_many import plot_many
    from simulator.figures.style import COLORS

    plot = plot_many if len(results) > len(COLORS) else plot_compare
    return f", {plot(labels, results, path).name}"
