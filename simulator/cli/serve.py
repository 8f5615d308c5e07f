"""The verb `headway serve`: a scenario behind the HTTP interface of a vLLM server."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from simulator.cli.options import ScenarioOrName, SetKeys, silent

if TYPE_CHECKING:
    from simulator.views.http.server import Server


def serve(
    scenario: ScenarioOrName,
    /,
    *,
    host: Annotated[str, Parameter(help="address to listen at")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="port to listen at; 0: one that is free")] = 8000,
    speed: Annotated[float, Parameter(help="simulated seconds in a second")] = 1.0,
    tokenizer: Annotated[
        Path | None,
        silent("folder with tokenizer.json, to count as the client does [default: words]"),
    ] = None,
    served_model_name: Annotated[
        str | None, silent("the model's name to clients [default: the scenario's]")
    ] = None,
    replica_ports: Annotated[
        bool, silent("a port for each replica of the cluster, for a gateway of your own")
    ] = False,
    startup_delay: Annotated[
        float, Parameter(help="simulated s until replicas are up; /health says 503")
    ] = 0.0,
    admin: Annotated[
        bool, silent("POST /admin/...: replicas that are slow, hang, are killed; failures")
    ] = False,
    kv_events_config: Annotated[
        str | None,
        silent("vLLM's JSON: tell over ZMQ what the prefix cache holds [default: do not]"),
    ] = None,
    out: Annotated[Path | None, silent("folder for the files of the run, at its end")] = None,
    set_: SetKeys = None,
    seed: Annotated[int | None, silent("seed, in place of the scenario's")] = None,
    own_code: Annotated[
        bool, silent("allow a scenario that names code of its own", "--own-code")
    ] = False,
) -> int:
    """Answer as the scenario's vLLM server would, without a GPU, until Ctrl-C."""
    from simulator.scenario.load import load_scenario
    from simulator.simulation.write import check_folder
    from simulator.util.errors import HeadwayError
    from simulator.views.http.kv_events import read_config
    from simulator.views.http.live_engine import replica_scenarios
    from simulator.views.http.server import ServeOptions, Server, token_counter
    from simulator.views.http.server import serve as listen

    if not 0 <= port < 65536:
        raise HeadwayError(f"--port: {port} is not between 0 and 65535")
    if not 0.001 <= speed <= 1000:
        raise HeadwayError(f"--speed: {speed} is not between 0.001 and 1000")
    if not 0 <= startup_delay <= 1e6:
        raise HeadwayError(f"--startup-delay: {startup_delay} is not between 0 and 1,000,000")
    if served_model_name is not None and not served_model_name.strip():
        raise HeadwayError("--served-model-name: is empty")
    if out is not None:  # a server that has run for hours is not to end with this
        check_folder(out)
    loaded = load_scenario(scenario, set_ or [], seed, own_code=own_code)
    counter = token_counter(tokenizer)
    served = replica_scenarios(loaded) if replica_ports else [loaded]
    if port and port + len(served) > 65536:
        raise HeadwayError(f"--port: {port} and {len(served) - 1} more go beyond 65535")
    events = None if kv_events_config is None else read_config(kv_events_config)
    if events is not None and not events.enable_kv_cache_events:
        events = None
    servers: list[Server] = []
    for number, one in enumerate(served):
        cores = sum(len(server.engine.cores) for server in servers)
        place = host, port and port + number, speed, served_model_name or "", admin, startup_delay
        servers.append(Server(one, ServeOptions(*place, events, cores), counter))

    def ready(server: "Server", address: str) -> None:
        at = "" if speed == 1 else f", {speed:g} times as fast as real time"
        print(f"{server.model} at {address}/v1{at}; report: {address}/report", flush=True)

    listen(servers, ready)
    for number, server in enumerate(servers):
        folder = out / f"replica-{number}" if out is not None and replica_ports else out
        _tell_end(server, folder)
    return 0


def _tell_end(server: "Server", out: Path | None) -> None:
    """Say what was served and whether it came on time; write the files."""
    result = server.result()
    served = server.served()
    count = len(result.workload)
    print(f"{count:,} requests served; answers late by {served['late_ms']['p99']:.1f} ms (P99)")
    if count and not served["on_time"]:
        print("warning: this machine was too slow: what clients measured is off", file=sys.stderr)
    if out is not None:
        names = [path.name for path in server.write(out)]
        print(f"written to {out}: {', '.join(names)}")
