"""The verb `headway report`: an HTML page of runs, of a sweep or of a plan."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

MOST = 8  # runs: colours that people can tell apart
LISTED = 5  # folders that are named
SUFFIXES = (".html", ".htm")


def report(
    folders: Annotated[
        tuple[Path, ...],
        Parameter(
            name="OUT_DIR",
            help="folders of `headway run` or `compare`; or the folder of a sweep or plan",
        ),
    ],
    /,
    *,
    out: Annotated[Path, Parameter(help="file to write")] = Path("report.html"),
) -> int:
    """Write one self-contained HTML page about runs side by side, or about a sweep or plan."""
    from headway.figures.data import read_runs, run_folders
    from headway.report.html.page import page
    from headway.report.html.table_page import is_table_folder, table_folders, table_page
    from headway.runs.read import refuse_unfinished
    from simulator.util.errors import HeadwayError
    from simulator.util.files import check_file

    if not folders:
        raise HeadwayError("OUT_DIR: is missing; for example headway report out/demo")
    check_file("--out", out)
    for folder in folders:
        refuse_unfinished(folder)
    if out.suffix.lower() not in SUFFIXES:
        raise HeadwayError(f"--out {out}: must end in .html or .htm")
    if any(is_table_folder(folder) for folder in folders):
        if len(folders) > 1:
            raise HeadwayError(f"{len(folders)} folders: a page has one sweep or plan")
        text, names = table_page(folders[0])
        return _write(out, text, names)
    inside = [table for folder in folders for table in table_folders(folder)]
    if inside and not any((path / "summary.json").exists() for path, _ in run_folders(folders)):
        if len(inside) > 1:
            raise HeadwayError(f"{_listed(inside)}: a page has one sweep or plan; name one")
        text, names = table_page(inside[0])
        return _write(out, text, f"{inside[0]}, {names}")
    runs = read_runs(folders)
    if len(runs) > MOST:
        raise HeadwayError(f"{len(runs)} runs are too many for one page, which has {MOST}")
    written = _write(out, page(runs), ", ".join(run.label for run in runs))
    if inside:
        print(f"left out: {_listed(inside)}: a sweep or plan has a page of its own")
    return written


def _listed(folders: list[Path]) -> str:
    more = f" and {len(folders) - LISTED} more" if len(folders) > LISTED else ""
    return ", ".join(map(str, folders[:LISTED])) + more


def _write(out: Path, page: str, names: str) -> int:
    from simulator.util.files import write_atomic

    text = page.encode()
    write_atomic(out, text)
    print(f"written to {out}: {names}; {len(text) / 1e6:.1f} MB, open it in a browser")
    return 0
