"""The verb `headway memory`: what fills a GPU's memory, and what fits into the rest."""

from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from headway.cli.options import Json, LaunchOption, SetKeys, print_json, silent, with_launch
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from simulator.models.kv_budget import MemoryBudget

SHORT = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}


def memory(
    scenario: Annotated[
        Path | None, Parameter(name="SCENARIO", help="scenario file (YAML), for the rest")
    ] = None,
    /,
    *,
    model: Annotated[str | None, silent("shipped model, or the path of a config.json")] = None,
    gpu: Annotated[str | None, silent("GPU, for example A100-80GB")] = None,
    gpu_memory_gib: Annotated[float | None, silent("GiB that its driver shows")] = None,
    engine: Annotated[str | None, silent("vllm (the default), sglang, tensorrt-llm, ...")] = None,
    enforce_eager: Annotated[bool, silent("no CUDA graphs")] = False,
    set_: SetKeys = None,
    json_: Json = False,
    command: LaunchOption = None,
    **keys: Annotated[
        str,
        silent(
            "any other key of a scenario's engine: --tensor-parallel-size (--tp) "
            "--pipeline-parallel-size (--pp) --quantization --kv-cache-dtype --max-model-len ..."
        ),
    ],
) -> int:
    """Print what fills a GPU's memory, and how many tokens and requests fit."""
    from headway.report.memory_report import memory_figures, memory_table

    given = {"model": '""' if model == "" else model, "gpu.name": gpu, "engine.name": engine}
    options = {"model": "model", "gpu.name": "gpu", "engine.name": "engine"}
    for option, value in [*keys.items(), *([("enforce-eager", "true")] if enforce_eager else [])]:
        key = f"engine.{SHORT.get(option, option.replace('-', '_'))}"
        given[key], options[key] = value, option
    if scenario is None and (gpu is None or model is command is None):
        raise HeadwayError(
            "headway memory: give --model and --gpu, --command and --gpu, or a scenario"
        )
    sets = {f"{key}={value}": key for key, value in given.items() if value is not None}
    source = scenario or {"cost": {"kind": "roofline"}}
    try:
        budget, change = read_budget(
            source, with_launch(command, [*sets, *(set_ or [])]), gpu_memory_gib
        )
    except HeadwayError as error:  # of what an option gave it is told by its name
        messages = list(error.messages)
        for text, key in sets.items():
            option = f"--{options[key]} {text.partition('=')[2]}"
            messages = [one.replace(f"--set {text}", option) for one in messages]
        raise HeadwayError(messages) from None
    if json_:
        print_json(memory_figures(budget))
    else:
        print(memory_table(budget))
    if why := budget.refusal:
        enough = f"; it starts with {change}" if change else ""
        where = f"{budget.model.name} on {budget.gpus} x {budget.gpu.name}"
        raise HeadwayError(f"{where} does not start: {why}{enough}")
    return 0


def read_budget(
    source: Path | Mapping[str, Any], overrides: Iterable[str], gib: float | None = None
) -> "tuple[MemoryBudget, str]":
    """Work out the memory of a scenario's engine on a GPU, of `gib` GiB where they are given.

    Beside it is the least change after which one that does not start would, "" if it does.
    """
    from simulator.models.gpus import GIB, find_gpu
    from simulator.models.kv_budget import estimate
    from simulator.models.load import load_model
    from simulator.scenario.kv_room import engine_sizes, least_change, settings
    from simulator.scenario.load import load_scenario

    scenario = load_scenario(source, overrides, fits=False)
    gpu, model = find_gpu(scenario.gpu.name), load_model(scenario.known_model, scenario.folder)
    if gib is not None:
        if not 0 < gib < inf:
            raise HeadwayError(f"--gpu-memory-gib {gib:g}: must be a positive number of GiB")
        gpu = gpu._replace(memory=int(gib * GIB))
    budget = estimate(model, gpu, engine_sizes(scenario.engine, model))
    if not budget.refusal:
        return budget, ""
    return budget, settings(least_change(scenario, model, gpu))
