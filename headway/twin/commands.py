"""The verbs of servers, simulated and real: serve, tokenizer, replay, shadow."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headway.cli.options import (
    DEFAULT_SETTINGS,
    Json,
    LaunchOption,
    Quiet,
    ScenarioOrName,
    SetKeys,
    Settings,
    between,
    print_json,
    silent,
    whole,
    with_launch,
)
from headway.twin.options import (
    DEFAULT_SERVE_OPTIONS,
    DEFAULT_WATCHED,
    OBEYED,
    ServeOptions,
    Watched,
)
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from headway.twin.server import Server


def serve(
    scenario: ScenarioOrName,
    /,
    *,
    options: ServeOptions = DEFAULT_SERVE_OPTIONS,
    tokenizer: Annotated[
        Path | None,
        silent("folder with tokenizer.json, to count tokens as the client does [default: words]"),
    ] = None,
    chat_template: Annotated[
        str | None,
        silent("Jinja, or its file, to make prompts of chats [default: the tokenizer's, or none]"),
    ] = None,
    replica_ports: Annotated[
        bool, silent("a port for each replica of the cluster, for a gateway of your own")
    ] = False,
    out: Annotated[Path | None, silent("folder for the files of the run, at its end")] = None,
    set_: SetKeys = None,
    seed: Annotated[int | None, silent("seed, in place of the scenario's"), whole(0)] = None,
    own_code: Annotated[
        bool, silent("allow a scenario that names code of its own", "--own-code")
    ] = False,
    command: LaunchOption = None,
) -> int:
    """Answer as the scenario's vLLM server would, without a GPU, until Ctrl-C."""
    from headway.twin.live_engine import replica_scenarios
    from headway.twin.server import Server, token_counter
    from headway.twin.server import serve as listen
    from simulator.scenario.load import load_scenario
    from simulator.simulation.write import check_folder

    options.check()
    if command is not None:
        options = options.with_command(command)
    keys = with_launch(command, set_ or [], OBEYED)
    loaded = load_scenario(scenario, keys, seed, own_code=own_code)
    counter = token_counter(tokenizer, chat_template)
    served = replica_scenarios(loaded) if replica_ports else [loaded]
    if (port := options.port) and port + len(served) > 65536:
        raise HeadwayError(f"--port: {port} and {len(served) - 1} more go beyond 65535")
    if out is not None:  # a server that has run for hours is not to end with this
        check_folder(out)
        if [*out.glob("summary.json"), *out.glob("replica-*/summary.json")]:
            print(f"warning: --out {out}: the run that it has will be replaced", file=sys.stderr)
        out.mkdir(parents=True, exist_ok=True)
    servers: list[Server] = []
    for number, one in enumerate(served):
        cores = sum(len(server.engine.cores) for server in servers)
        place = replace(options, port=port and port + number)
        servers.append(Server(one, place, counter, first_core=cores))

    def ready(server: "Server", address: str) -> None:
        at = "" if options.speed == 1 else f", {options.speed:g} times as fast as real time"
        print(f"{server.names[0]} at {address}/v1{at}; report: {address}/report", flush=True)

    listen(servers, ready)
    if out is not None and not any(server.engine.next_id for server in servers):
        print(f"nothing written to {out}: no request has come")
        out = None
    for number, server in enumerate(servers):
        folder = out / f"replica-{number}" if out is not None and replica_ports else out
        _tell_end(server, folder)
    return 0


def _tell_end(server: "Server", out: Path | None) -> None:
    """Say what was served and whether it came on time; write the files."""
    result = server.engine.result()
    served = server.served()
    late, first = (served[f"{name}late_ms"]["p99"] for name in ("", "first_token_"))
    whole, count = int(result.request_table().completed.sum()), len(result.workload)
    print(f"{whole:,} of {count:,} requests served; answers late by {late:.1f} ms, ", end="")
    print(f"first tokens by {first:.1f} ms (P99)")
    if count and not served["on_time"]:
        print("warning: answers later than 5 ms: lower the load or --speed", file=sys.stderr)
    if out is not None:
        print(f"written to {out}: {', '.join(path.name for path in server.write(out))}")


def tokenizer(
    folder: Annotated[Path, Parameter(name="DIR", help="folder to write")],
    /,
    *,
    vocab_size: Annotated[int, Parameter(help="most tokens in it"), whole(300, 100_000)] = 4000,
) -> int:
    """Write a byte-level BPE that `headway serve` and its clients can both count with."""
    from headway.twin.api.tokenizers import train

    count, files = train(folder, vocab_size)
    print(f"written to {folder}: {', '.join(files)}; {count:,} tokens")
    return 0


def replay(
    scenario: Annotated[
        Path,
        Parameter(name="SCENARIO|TRACE", help="scenario (YAML), a shipped one's name, or a trace"),
    ],
    /,
    *,
    url: Annotated[str, Parameter(help="address of an OpenAI-compatible server")],
    model: Annotated[str | None, silent("model's name [default: the server's first]")] = None,
    timeout: Annotated[
        float, Parameter(help="seconds until a request is given up"), between(0.001, 1_000_000)
    ] = 600.0,
    prompt_seed: Annotated[
        int | None,
        silent("seed of the prompts [default: new prompts in each replay]"),
        whole(0, 2**63 - 1),
    ] = None,
    out: Annotated[Path | None, silent("folder for the files [default: out/replay-NAME]")] = None,
    settings: Settings = DEFAULT_SETTINGS,
    quiet: Quiet = False,
    json_: Json = False,
) -> int:
    """Send the requests of a scenario or trace to a real server, and measure the answers.

    The exit code is 1 where requests failed, and 130 after Ctrl-C; the others are written.
    """
    from headway.twin.measured_run import Draft, table, write_measured
    from headway.twin.replay import LAST_TOKEN
    from headway.twin.replay import replay as send
    from simulator.scenario.draw import make_workload
    from simulator.scenario.load import load_scenario
    from simulator.scenario.resolve import resolve
    from simulator.simulation.write import check_folder

    engine = None
    if scenario.is_file() and scenario.suffix not in {".yaml", ".yml"}:
        from simulator.workload.traces import read_trace

        if settings.overrides or settings.seed is not None:
            raise HeadwayError("--set, --seed: need a scenario, not a trace")
        workload, name = read_trace(scenario), scenario.name.partition(".")[0]
    else:
        loaded = load_scenario(scenario, settings.overrides, settings.seed)
        workload, name = make_workload(loaded), loaded.name or "scenario"
        engine = loaded, resolve(loaded)
    folder = check_folder(out or Path("out") / f"replay-{name}")
    with Draft(folder, workload) as draft:
        for path in draft.earlier:
            print(f"{path}: the answers of a replay that did not end", file=sys.stderr)
        found = send(
            workload,
            url,
            model,
            timeout=timeout,
            prompt_seed=prompt_seed,
            vocab_size=LAST_TOKEN if engine is None else engine[1].model.vocab_size,
            ended=draft.add,
        )
        paths = write_measured(found, workload, folder, engine)
    if json_:
        print_json(folder / "summary.json")
    elif not quiet:
        print(table(found, workload))
        print(f"written to {folder}: {', '.join(path.name for path in paths)}")
    return 130 if found.stopped else 1 if found.failed else 0


def shadow(
    *,
    url: Annotated[str, Parameter(help="address of a vLLM server, or of its /metrics")],
    scenario: Annotated[
        Path, Parameter(help="scenario file (YAML) of that server, or a shipped one's name")
    ],
    watched: Watched = DEFAULT_WATCHED,
    settings: Settings = DEFAULT_SETTINGS,
    json_: Json = False,
) -> int:
    """Compare a live server with the simulation of its own traffic.

    The exit code is 1 where they differ, and 2 where there was nothing to compare.
    """
    from headway.twin.shadow import as_json, conclusion
    from headway.twin.shadow import shadow as watch
    from simulator.scenario.load import load_scenario

    loaded = load_scenario(scenario, settings.overrides, settings.seed)
    verdict = watch(loaded, url, watched, lambda told: json_ or print(told, flush=True))
    if json_:
        print_json(as_json(verdict))
    else:
        print(conclusion(verdict))
    return (1 if verdict.parted else 0) if verdict.windows else 2
