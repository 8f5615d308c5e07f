"""headway trace: describe a workload, or write it as Mooncake JSONL."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from simulator.cli.options import NoOwnCode, refuse_own_code

if TYPE_CHECKING:
    from simulator.workload.workload import Workload

Format = Annotated[str | None, Parameter(help="of the trace [default: as its beginning tells]")]
Columns = Annotated[
    str | None,
    Parameter(help="which column holds what, as arrival=start_ms,prompt=prompt_tokens,output=.."),
]

trace = App(name="trace", help="Describe a workload, or write it as Mooncake JSONL.")


@trace.command
def describe(
    file: Annotated[Path, Parameter(name="FILE", help="trace, or scenario (.yaml)")],
    /,
    *,
    format: Format = None,
    columns: Columns = None,
    no_own_code: NoOwnCode = False,
) -> int:
    """Tell how many requests, how fast, how bursty, how long."""
    refuse_own_code(no_own_code)
    from simulator.workload.describe import describe_text
    from simulator.workload.traces import detect_format

    workload = _read(file, format, columns)
    scenario = file.suffix in {".yaml", ".yml"}
    known = format or (columns and "columns") or ("scenario" if scenario else detect_format(file))
    print(describe_text(workload, known))
    return 0


@trace.command
def convert(
    source: Annotated[Path, Parameter(name="IN", help="trace, or scenario (.yaml)")],
    target: Annotated[Path, Parameter(name="OUT", help="Mooncake JSONL, packed if it ends in .gz")],
    /,
    *,
    format: Format = None,
    columns: Columns = None,
    no_own_code: NoOwnCode = False,
) -> int:
    """Write a workload as Mooncake JSONL, which other tools read too; the folder must be there."""
    refuse_own_code(no_own_code)
    from simulator.util.files import check_target
    from simulator.workload.traces import write_mooncake

    check_target(source, target)
    workload = _read(source, format, columns)
    write_mooncake(workload, target)
    print(f"written to {target}: {len(workload):,} requests")
    return 0


def _read(path: Path, format: str | None, columns: str | None) -> "Workload":
    """Read a trace, or make the workload of a scenario."""
    if path.suffix in {".yaml", ".yml"}:
        from simulator.scenario.load import load_scenario

        return load_scenario(path).make_workload()
    from simulator.workload.traces import read_trace

    return read_trace(path, format, columns=columns)
