"""headway trace: describe a workload, write it as Mooncake JSONL, read that of a server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from headway.cli.options import (
    DEFAULT_READING,
    Json,
    NoOwnCode,
    Reading,
    named_by_option,
    print_json,
    refuse_own_code,
    silent,
)
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from simulator.workload.traces.format import Table
    from simulator.workload.workload import Workload

Format = Annotated[str | None, Parameter(help="format of the trace [default: by how it begins]")]

trace = App(
    name="trace", help="Describe a workload, write it as Mooncake JSONL, or read a server's."
)


@trace.command
def describe(
    file: Annotated[Path, Parameter(name="FILE", help="trace, or scenario (.yaml)")],
    /,
    *,
    format: Format = None,
    reading: Reading = DEFAULT_READING,
    no_own_code: NoOwnCode = False,
    json_: Json = False,
) -> int:
    """Print how many requests a workload has, their rate, burstiness and lengths."""
    refuse_own_code(no_own_code)
    from headway.traffic.describe import describe as figures
    from headway.traffic.describe import describe_text

    workload, table = _read(file, format, reading.given)
    known = "scenario" if table is None else table.format
    ledger = None if table is None else table.ledger
    if json_:
        print_json(figures(workload, known) | ({} if ledger is None else ledger.figures()))
        return 0
    measured = None if table is None else table.measured
    names = () if measured is None else ("ttft", "tpot", "e2el")
    rows = [] if ledger is None else ledger.rows()
    print(describe_text(workload, known, {n.upper(): getattr(measured, n) for n in names}, rows))
    return 0


@trace.command
def convert(
    source: Annotated[Path, Parameter(name="IN", help="trace, or scenario (.yaml)")],
    target: Annotated[Path, Parameter(name="OUT", help="Mooncake JSONL, packed if it ends in .gz")],
    /,
    *,
    format: Format = None,
    reading: Reading = DEFAULT_READING,
    spread_seconds: Annotated[
        bool, silent("spread requests with the same whole second evenly over it")
    ] = False,
    no_own_code: NoOwnCode = False,
) -> int:
    """Write a workload as Mooncake JSONL, which other tools read too."""
    refuse_own_code(no_own_code)
    from simulator.util.files import check_target, check_unread
    from simulator.workload.traces import write_mooncake

    check_target(source, target)
    workload, _ = _read(source, format, reading.given)
    check_unread("OUT", target)  # what a scenario reads
    if spread_seconds:
        from headway.traffic.describe import spread_seconds as spread

        try:
            spread(workload)
        except ValueError as error:
            raise HeadwayError(f"--spread-seconds: {source}: {error}") from None
    write_mooncake(workload, target)
    print(f"written to {target}: {len(workload):,} requests")
    return 0


def _read(path: Path, format: str | None, given: dict[str, Any]) -> "tuple[Workload, Table | None]":
    """Read a trace, with its table, or make the workload of a scenario."""
    if path.suffix in {".yaml", ".yml"}:
        from simulator.scenario.draw import make_workload
        from simulator.scenario.load import load_scenario

        for name in ["format"] * (format is not None) + [*given]:
            option = name.replace("_", "-")
            raise HeadwayError(f"--{option}: needs a trace; {path} is a scenario")
        return make_workload(load_scenario(path)), None
    from simulator.workload.traces.read import read_measured

    with named_by_option(given | {"format": format}):
        return read_measured(path, format, given)


@trace.command(name="from-metrics")
def from_metrics(
    first: Annotated[
        Path,
        Parameter(name="FILE", help="scrape of /metrics (vLLM, SGLang), or JSON of a range query"),
    ],
    later: Annotated[
        Path | None, Parameter(name="LATER", help="a later scrape of the same server")
    ] = None,
    /,
    *,
    seconds: Annotated[
        float | None, Parameter(help="seconds between both scrapes, or that a single one counts")
    ] = None,
    model_name: Annotated[
        str | None, Parameter(help="model to read, if the metrics have several")
    ] = None,
    out: Annotated[Path | None, Parameter(help="scenario to write [default: print it]")] = None,
    json_: Json = False,
) -> int:
    """Read a running server's load from its metrics: rate, lengths, concurrency, KV cache."""
    from headway.traffic.scrapes import read_metrics
    from headway.traffic.server_metrics import infer_load, load_figures, load_text, scenario_text
    from simulator.models.load import shipped_name
    from simulator.util.files import check_new, write_atomic

    if out is not None:
        check_new("--out", out)
    paths = [str(path) for path in (first, later) if path is not None]
    load = infer_load(read_metrics(first, later, seconds, model_name), paths[-1])
    text = scenario_text(load, shipped_name(load.model or ""), paths)
    if out is not None:
        write_atomic(out, text.encode())
    if json_:
        print_json(load_figures(load) | {"scenario": text})
    else:
        print(load_text(load))
        print(f"\n{text}" if out is None else f"written to {out}\n", end="")
    return 0
