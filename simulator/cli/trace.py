"""headway trace: describe a workload, or write it as Mooncake JSONL."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from simulator.cli.options import NoOwnCode, refuse_own_code

if TYPE_CHECKING:
    from simulator.workload.workload import Workload

Format = Annotated[str | None, Parameter(help="of the trace [default: as its first line tells]")]

trace = App(name="trace", help="Describe a workload, or write it as Mooncake JSONL.")


@trace.command
def describe(
    file: Annotated[Path, Parameter(name="FILE", help="trace, or scenario (.yaml)")],
    /,
    *,
    format: Format = None,
    no_own_code: NoOwnCode = False,
) -> int:
    """Tell how many requests, how fast, how bursty, how long."""
    refuse_own_code(no_own_code)
    from simulator.workload.describe import describe_text
    from simulator.workload.traces import detect_format

    workload = _read(file, format)
    scenario = file.suffix in {".yaml", ".yml"}
    print(describe_text(workload, format or ("scenario" if scenario else detect_format(file))))
    return 0


@trace.command
def convert(
    source: Annotated[Path, Parameter(name="IN", help="trace, or scenario (.yaml)")],
    target: Annotated[Path, Parameter(name="OUT", help="Mooncake JSONL, packed if it ends in .gz")],
    /,
    *,
    format: Format = None,
    no_own_code: NoOwnCode = False,
) -> int:
    """Write a workload as Mooncake JSONL, which other tools read too; the folder must be there."""
    refuse_own_code(no_own_code)
    from simulator.util.files import check_target
    from simulator.workload.traces import write_mooncake

    check_target(source, target)
    workload = _read(source, format)
    write_mooncake(workload, target)
    print(f"written to {target}: {len(workload):,} requests")
    return 0


def _read(path: Path, format: str | None) -> "Workload":
    """Read a trace, or make the workload of a scenario."""
    if path.suffix in {".yaml", ".yml"}:
        from simulator.scenario.load import load_scenario

        return load_scenario(path).make_workload()
    from simulator.workload.traces import read_trace

    return read_trace(path, format)
