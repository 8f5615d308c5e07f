"""The verb `headway init`: a first scenario, from answers or options."""

import os
import shlex
import sys
import warnings
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from headway.cli.options import DEFAULT_READING, Reading, named_by_option, silent, whole
from simulator.util.errors import HeadwayError, HeadwayWarning, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from simulator.launch.keys import Launch
    from simulator.scenario.scenario import Scenario
    from simulator.workload.workload import Workload

MODEL, GPU, RATE, SLO = "llama-3-8b", "H100-80GB", "4", "p99_ttft_ms<=1000"
INPUT_LEN, OUTPUT_LEN, RANGE_RATIO = 1024, 128, 0.5  # tokens
"""What is taken where nobody says."""


def init(
    file: Annotated[Path, Parameter(name="FILE", help="scenario to write")] = Path("scenario.yaml"),
    /,
    *,
    command: Annotated[
        str | None,
        silent("a command that starts a server, or a file with one: its model and its options"),
    ] = None,
    model: Annotated[
        str | None, silent(f"a shipped model, or the path of a config.json [default: {MODEL}]")
    ] = None,
    gpu: Annotated[str | None, silent(f"GPU [default: {GPU}]")] = None,
    tensor_parallel_size: Annotated[
        int | None,
        silent("GPUs that share each layer [default: as few as have room for the model]"),
        whole(),
    ] = None,
    traffic: Annotated[
        Path | None, silent("file of requests to replay: a trace, a log, a benchmark's results")
    ] = None,
    reading: Reading = DEFAULT_READING,
    rate: Annotated[
        float | None, silent(f"requests per second, in place of a file [default: {RATE}]")
    ] = None,
    slo: Annotated[
        list[str] | None, silent(f"service level (repeatable) [default: '{SLO}']")
    ] = None,
    yes: Annotated[bool, silent("ask nothing; options left out have their defaults")] = False,
) -> int:
    """Write a commented scenario that runs; ask for what no option gives."""
    from simulator.models.gpus import find_gpu
    from simulator.models.load import load_model
    from simulator.results.service_levels import read_slo
    from simulator.util.files import check_new, write_atomic

    check_new("FILE", file)
    if traffic is not None and rate is not None:
        raise HeadwayError("--rate: cannot be used with --traffic, which has its own")
    for option in reading.given if traffic is None else ():
        raise HeadwayError(f"--{option.replace('_', '-')}: needs --traffic")
    launch = None
    if command is not None:
        launch, model, tensor_parallel_size = _launch(command, model, tensor_parallel_size)
    ask = partial(_ask, asks=not yes)
    model = ask("Model", MODEL, load_model, "--model", model)
    gpu = ask("GPU", GPU, find_gpu, "--gpu", gpu)
    model = _from_folder(model, file.parent)
    read: dict[Path, Workload] = {}

    def check_traffic(text: str) -> None:
        _check_traffic(text)
        if not _is_rate(text):  # what is wrong in it is told at once
            read[Path(text)] = _read(Path(text), reading)

    if traffic is None:
        given = None if rate is None else f"{rate:g}"
        told = ask("Requests per second, or a file of them", RATE, check_traffic, "--rate", given)
        traffic = None if _is_rate(told) else Path(told)
        rate = float(told) if _is_rate(told) else None
    given_levels: list[str | None] = [*slo] if slo else [None]
    levels = [ask("Service level", SLO, read_slo, "--slo", one) for one in given_levels]
    if traffic is not None and traffic not in read:
        read[traffic] = _read(traffic, reading)
    workload = None if traffic is None else read[traffic]
    replicas = launch.pool.get("dp_size", 1) if launch else 1
    chosen = _Choices(
        model, gpu, traffic, reading, rate, slo=levels, replicas=replicas, launch=launch
    )
    chosen, cost, hopeless = _sized(chosen, workload, file, tensor_parallel_size)
    place = traffic and _from_folder(str(traffic), file.parent)
    write_atomic(file, _scenario(file, chosen, workload, str(place)).encode())
    words = ["headway", "run", str(file)]
    print(
        f"written to {file}: {_order(chosen)}; steps are timed by {cost}; try {shlex.join(words)}"
    )
    if (chosen.replicas > 1 and launch is None) or hopeless:
        buy = shlex.join(["headway", "plan", str(file), "--buy"])
        what = "These replicas are the fewest, and may not be" if not hopeless else "Not"
        print(f"{what} enough; {buy} tries other GPUs, sizes and precisions")
    return 0


def _launch(command: str, model: str | None, size: int | None) -> "tuple[Launch, str, int]":
    """Read a launch command; return it, its model and its tensor parallelism."""
    from headway.cli.options import with_launch
    from simulator.launch.keys import read_launch

    for option, value in (("--model", model), ("--tensor-parallel-size", size)):
        if value is not None:
            raise HeadwayError(f"{option}: cannot be used with --command, which has it")
    launch = read_launch(with_launch(command, [])[0])
    _warn(launch.lines())
    return launch, launch.model, launch.engine.get("tensor_parallel_size", 1)


def _order(chosen: "_Choices") -> str:
    """Say which GPUs it takes, and what they cost."""
    from simulator.models.gpus import find_gpu

    gpu, size = find_gpu(chosen.gpu), chosen.tensor_parallel_size
    if chosen.launch is not None:
        size *= chosen.launch.engine.get("pipeline_parallel_size", 1)
        size *= chosen.launch.engine.get("data_parallel_size", 1)
    count = chosen.replicas * size
    price = "" if gpu.dollars_per_hour is None else f", ${count * gpu.dollars_per_hour:,.2f}/h"
    parts = f" ({chosen.replicas} replicas of TP {size})" if chosen.replicas > 1 else ""
    longest = f", max_model_len {chosen.max_model_len:,}" if chosen.max_model_len else ""
    return f"{count} x {gpu.name}{parts}{price}{longest}"


def _ask(
    what: str,
    default: str,
    check: "Callable[[str], object]",
    option: str,
    given: str | None,
    *,
    asks: bool,
) -> str:
    """Return an answer that holds, asked for on the terminal where it `asks` and none is given.

    A wrong answer is told, and asked for again. HeadwayError where the one given does not hold,
    or nobody is there.
    """
    if given is not None or not asks:
        answer = default if given is None else given
        try:
            check(answer)
        except (ValueError, HeadwayError) as error:
            raise HeadwayError(f"{option} {answer}: {error}") from None
        return answer
    if not sys.stdin.isatty():
        raise HeadwayError(f"{option}: is missing; without a terminal, give it or --yes")
    while True:
        try:
            answer = input(f"{what} [{default}]: ").strip() or default
        except EOFError:
            raise HeadwayError(f"{option}: no answer; nothing was written") from None
        try:
            check(answer)
        except (ValueError, HeadwayError) as error:
            print(f"  {error}")
        else:
            return answer


def _from_folder(path: str, folder: Path) -> str:
    """Return a relative path that is there as from another folder; no path as it is."""
    if not path or Path(path).is_absolute() or not Path(path).exists():
        return path
    found = Path(os.path.relpath(path, folder)).as_posix()
    return found if found == path or found[0] == "." else f"./{found}"


def _is_rate(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_traffic(text: str) -> None:
    if _is_rate(text):
        if not 0 < float(text) < 1e6:
            raise ValueError("must be requests per second, more than 0 and below 1,000,000")
    elif not Path(text).is_file():
        raise ValueError("is neither a number of requests per second nor a file")


def _read(path: Path, reading: Reading) -> "Workload":
    from simulator.workload.traces.read import read_measured
    from simulator.workload.unused import warn_of_images, warn_of_models

    with named_by_option(reading.given):
        workload = read_measured(path, None, reading.given)[0]
    warn_of_images(workload.source, workload.images)
    warn_of_models(workload.source, workload.model or ())
    return workload


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the scenario is to say."""

    model: str
    gpu: str
    traffic: Path | None
    reading: Reading
    rate: float | None
    slo: list[str]
    replicas: int
    tensor_parallel_size: int = 1
    launch: "Launch | None" = None
    max_model_len: int | None = None  # where that of the model has no room


def _sized(
    chosen: _Choices, workload: "Workload | None", file: Path, size: int | None
) -> tuple[_Choices, str, bool]:
    """Take the least tensor parallelism, a power of two, under which all may hold that must.

    Where eight GPUs cannot keep up with the load, the least that holds each request, and replicas.
    Return the choices, the name of what times the steps, and whether a given size cannot hold.
    """
    from simulator.diagnosis.advice import HEADROOM
    from simulator.diagnosis.feasibility import busy_share, obstacles
    from simulator.scenario.draw import make_workload

    enough: tuple[_Choices, str, list[str]] | None = None  # for each request, not for the load
    why: list[str] = []
    for tried in (1, 2, 4, 8) if size is None else (size,):
        one = replace(chosen, tensor_parallel_size=tried)
        with warnings.catch_warnings(record=True, action="always") as caught:
            try:
                one, scenario, cost = _try(file, one, workload)
            except HeadwayError as error:
                why += error.messages
                continue
        notes = [str(note.message) for note in caught]
        load = make_workload(scenario) if workload is None else workload
        found = obstacles(scenario, load)
        why += [str(obstacle) for obstacle in found]
        if size is not None or not found:
            _warn([*notes, *map(str, found)])
            return one, cost, bool(found)
        if enough is None and not any(obstacle.memory for obstacle in found):
            replicas = ceil(HEADROOM * busy_share(scenario, load))
            enough = replace(one, replicas=replicas), cost, notes
    if enough is None:
        many = "" if chosen.launch else f"--tensor-parallel-size {size}: "
        if size is None:
            alike = why.count(why[0]) > 1  # more GPUs change nothing
            many = "" if alike else f"--gpu {chosen.gpu}: eight have no room for {chosen.model}: "
        raise HeadwayError(f"{many}{why[0]}")
    one, cost, notes = enough
    _warn(notes)
    return one, cost, False


def _warn(lines: "Iterable[str]") -> None:
    for line in lines:
        warnings.warn(line, HeadwayWarning, stacklevel=2)


def _scenario(file: Path, chosen: _Choices, workload: "Workload | None", trace: str) -> str:
    """Write the scenario, each choice with a comment; `trace` is the path of its traffic."""
    from headway.planning.design import as_yaml

    lines = [
        f"# `headway run {shlex.quote(str(file))}` simulates this.",
        "# docs/scenario.md explains each key;",
        "# what is left out is as `vllm serve` has it on this GPU.",
        f"model: {as_yaml(chosen.model)}  # a shipped one's name, or the path of a config.json",
        f"gpu: {{name: {as_yaml(chosen.gpu)}}}",
        "engine:",
        *_engine_lines(chosen),
    ]
    if chosen.replicas > 1:
        why = "--dp-size" if chosen.launch else "at least: one cannot keep up"
        lines += ["cluster:", f"  replicas: {chosen.replicas}  # {why}"]
    lines.append("workload:")
    if workload is not None:
        beside = {k: value for k, value in chosen.reading.given.items() if k != "columns"}
        more = "".join(f", {key}: {as_yaml(value)}" for key, value in beside.items())
        lines += [
            f"  # {len(workload):,} requests, {_lengths(workload)}",
            f"  trace: {{path: {as_yaml(trace)}{more}}}  # limit: 500 reads the first 500 only",
        ]
        columns = chosen.reading.columns
        lines += [f"  columns: {as_yaml(columns)}"] if columns else []
    else:
        lines += [
            "  num_prompts: 1000",
            f"  request_rate: {chosen.rate:g}  # per second; headway plan finds the largest",
            f"  input_len: {INPUT_LEN}  # tokens; docs/scenario.md has distributions",
            f"  output_len: {OUTPUT_LEN}",
            f"  range_ratio: {RANGE_RATIO}  # lengths are drawn within 50 % of these",
        ]
    lines += ["slo:  # what runs are judged by, and headway plan keeps"]
    lines += [f"  - {as_yaml(level)}" for level in chosen.slo]
    return "\n".join([*lines, "seed: 0", ""])


def _engine_lines(chosen: _Choices) -> list[str]:
    """Write the keys of the engine: those of a launch command, or vLLM's own as comments."""
    from headway.planning.design import as_yaml
    from simulator.scenario.engine_defaults import fit_to_gpu, with_defaults

    size, gpu = chosen.tensor_parallel_size, chosen.gpu
    if (launch := chosen.launch) is not None:
        raw = {"model": chosen.model, "gpu": {"name": gpu}, "engine": launch.engine}
        keys = fit_to_gpu(raw, launch.pool, offline=launch.offline)
        notes = (f"  # {printable(line)}" for line in launch.lines())
        return [*notes, *(f"  {key}: {as_yaml(value)}" for key, value in keys.items())]
    shorter = []
    if chosen.max_model_len is not None:
        why = "there is no memory for a request as long as the model may have"
        shorter = [f"  max_model_len: {chosen.max_model_len}  # {why}"]
    engine: Any = with_defaults({"tensor_parallel_size": size}, {"name": gpu}, chosen.model)
    return [
        "  name: vllm  # `headway engines` lists others",
        "  # version: 0.19.1  # rules and defaults of that release; left out, the newest known",
        f"  tensor_parallel_size: {size}",
        f"  # max_num_seqs: {engine['max_num_seqs']}  # vLLM's default here, as the next ones",
        f"  # max_num_batched_tokens: {engine['max_num_batched_tokens']}",
        f"  # gpu_memory_utilization: {engine['gpu_memory_utilization']}",
        *shorter,
        "  # enable_prefix_caching: true",
        "  # scheduling_policy: fcfs  # docs/schedulers.md has others",
    ]


def _lengths(workload: "Workload") -> str:
    prompts, answers = workload.prompt_tokens.mean(), workload.output_tokens.mean()
    return f"prompts of {prompts:,.0f} tokens on average, answers of {answers:,.0f}"


def _try(
    file: Path, chosen: _Choices, workload: "Workload | None"
) -> "tuple[_Choices, Scenario, str]":
    """Check the scenario as if it were in its file; return it, and what its steps are timed by.

    Where the server would not start for want of room for its model's longest requests, and nobody
    gave its command, the choice is of shorter ones.
    """
    from simulator.scenario.resolve import resolve

    text = _scenario(file, chosen, workload, str(chosen.traffic and chosen.traffic.absolute()))
    scenario = _checked(text, file)
    if chosen.launch is None and chosen.max_model_len is None and (most := _longest(scenario)):
        return _try(file, replace(chosen, max_model_len=most), workload)
    name = resolve(scenario).cost.name
    unmeasured = f"a {name}: no profile of these was measured"
    return chosen, scenario, f"the profile {name}" if "." in name else unmeasured


def _checked(text: str, file: Path) -> "Scenario":
    from simulator.scenario.load import check_scenario
    from simulator.util.yaml_lines import SourceMap, parse

    raw, lines = parse(text, str(file))
    assert isinstance(raw, dict)
    try:
        return check_scenario(raw, SourceMap(str(file), lines), file.parent)
    except HeadwayError as error:  # by its keys: the file is not there
        raise HeadwayError(f"{'.'.join(key)}: {what}" for key, what, _ in error.faults) from None


def _longest(scenario: "Scenario") -> int | None:
    """Return the most tokens of a request with which a server starts that else would not."""
    from simulator.build.kv_room import memory_budget
    from simulator.build.settle import resolve_model
    from simulator.models.gpus import find_gpu

    budget = memory_budget(scenario.engine, resolve_model(scenario), find_gpu(scenario.gpu.name))
    return budget.safe_length if budget.refusal else None
