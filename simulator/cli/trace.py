"""headway trace: describe a workload, write it as Mooncake JSONL, read that of a server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from simulator.cli.options import CharsPerToken, NoOwnCode, refuse_own_code
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from simulator.workload.workload import Workload

Format = Annotated[str | None, Parameter(help="of the trace [default: as its beginning tells]")]
Columns = Annotated[
    str | None,
    Parameter(help="which column holds what, as arrival=start_ms,prompt=prompt_tokens,output=.."),
]

trace = App(
    name="trace", help="Describe a workload, write it as Mooncake JSONL, or read a server's."
)


@trace.command
def describe(
    file: Annotated[Path, Parameter(name="FILE", help="trace, or scenario (.yaml)")],
    /,
    *,
    format: Format = None,
    columns: Columns = None,
    chars_per_token: CharsPerToken = None,
    no_own_code: NoOwnCode = False,
) -> int:
    """Tell how many requests, how fast, how bursty, how long."""
    refuse_own_code(no_own_code)
    from simulator.workload.describe import describe_text
    from simulator.workload.traces import detect_format

    workload = _read(file, format, columns, chars_per_token)
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
    chars_per_token: CharsPerToken = None,
    no_own_code: NoOwnCode = False,
) -> int:
    """Write a workload as Mooncake JSONL, which other tools read too; the folder must be there."""
    refuse_own_code(no_own_code)
    from simulator.util.files import check_target
    from simulator.workload.traces import write_mooncake

    check_target(source, target)
    workload = _read(source, format, columns, chars_per_token)
    write_mooncake(workload, target)
    print(f"written to {target}: {len(workload):,} requests")
    return 0


def _read(
    path: Path, format: str | None, columns: str | None, chars_per_token: float | None
) -> "Workload":
    """Read a trace, or make the workload of a scenario."""
    if path.suffix in {".yaml", ".yml"}:
        given = {"--format": format, "--columns": columns, "--chars-per-token": chars_per_token}
        if of_traces := [option for option, value in given.items() if value is not None]:
            raise HeadwayError(f"{of_traces[0]}: goes with a trace; {path} is a scenario")
        from simulator.scenario.load import load_scenario

        return load_scenario(path).make_workload()
    from simulator.workload.traces import read_trace

    return read_trace(path, format, columns=columns, chars_per_token=chars_per_token)


@trace.command(name="from-metrics")
def from_metrics(
    first: Annotated[
        Path, Parameter(name="FILE", help="scrape of vLLM's /metrics, or JSON of a range query")
    ],
    later: Annotated[
        Path | None, Parameter(name="LATER", help="a later scrape of the same server")
    ] = None,
    /,
    *,
    seconds: Annotated[
        float | None, Parameter(help="between the scrapes, or that the one covers")
    ] = None,
    model_name: Annotated[str | None, Parameter(help="which, where there are several")] = None,
    out: Annotated[Path | None, Parameter(help="scenario to write [default: print it]")] = None,
) -> int:
    """Read a running server's load from its metrics: rate, lengths, concurrency, KV cache."""
    from simulator.models.load import shipped_models, shipped_shape
    from simulator.util.files import check_file, write_atomic
    from simulator.workload.server_metrics import (
        infer_load,
        load_text,
        read_metrics,
        scenario_text,
    )

    if out is not None:
        check_file("--out", out)
    paths = [str(path) for path in (first, later) if path is not None]
    load = infer_load(read_metrics(first, later, seconds, model_name), paths[-1])
    shape = shipped_shape(load.model, shipped_models()) if load.model else None
    text = scenario_text(load, shape, paths)
    print(load_text(load))
    if out is None:
        print(f"\n{text}", end="")
    else:
        write_atomic(out, text.encode())
        print(f"written to {out}")
    return 0
