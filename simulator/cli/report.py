"""The verb `headway report`: an HTML page of runs."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

MOST = 8  # runs: colours that people can tell apart


def report(
    folders: Annotated[
        tuple[Path, ...],
        Parameter(name="OUT_DIR", help="folder that `headway run` or `compare` wrote; several"),
    ],
    /,
    *,
    out: Annotated[Path, Parameter(help="file to write")] = Path("report.html"),
) -> int:
    """Write one self-contained HTML page about a run, or about several side by side."""
    from simulator.figures.data import read_runs
    from simulator.util.errors import HeadwayError
    from simulator.util.files import check_file, write_atomic
    from simulator.views.html.page import page

    if not folders:
        raise HeadwayError("OUT_DIR: is missing; for example headway report out/demo")
    check_file("--out", out)
    runs = read_runs(folders)
    if len(runs) > MOST:
        raise HeadwayError(f"{len(runs)} runs are too many for one page, which holds {MOST}")
    text = page(runs).encode()
    write_atomic(out, text)
    names = ", ".join(run.label for run in runs)
    print(f"written to {out}: {names}; {len(text) / 1e6:.1f} MB, open it in a browser")
    return 0
