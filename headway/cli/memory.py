"""The verb `headway memory`: what fills a GPU's memory, and what fits into the rest."""

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from headway.cli.options import (
    Json,
    LaunchOption,
    NoOwnCode,
    SetKeys,
    print_json,
    refuse_own_code,
    silent,
    with_launch,
)
from simulator.util.errors import HeadwayError, HeadwayWarning, NoAnswerError

if TYPE_CHECKING:
    from simulator.models.kv_budget import MemoryBudget

LENGTHS = ("engine.max_model_len", "engine.max_num_batched_tokens")
NAMES = {"model": "model", "gpu": "gpu.name", "engine": "engine.name"}
TEXTS = ("gpu.name", "engine.name", "engine.version")  # 4090 is a name, too, and 0.10 no number
KV_BYTES = "--kv-cache-memory-bytes"
MOST_GIB = 1024  # of a GPU


def flag(help: str) -> Parameter:
    """Describe an option without a value, which has a `--no-` form."""
    return Parameter(show_default=False, help=help)


def memory(
    scenario: Annotated[
        Path | None, Parameter(name="SCENARIO", help="scenario file (YAML), for all other keys")
    ] = None,
    /,
    *,
    model: Annotated[str | None, silent("shipped model, or the path of a config.json")] = None,
    gpu: Annotated[str | None, silent("GPU, for example A100-80GB")] = None,
    gpu_memory_gib: Annotated[float | None, silent("GiB of the GPU [default: the table's]")] = None,
    engine: Annotated[str | None, silent("vllm (the default), sglang, tensorrt-llm, ...")] = None,
    enforce_eager: Annotated[bool | None, flag("run without CUDA graphs")] = None,
    enable_lora: Annotated[bool | None, flag("reserve slots for adapters (LoRA)")] = None,
    enable_expert_parallel: Annotated[bool | None, flag("put whole experts on each GPU")] = None,
    enable_prefix_caching: Annotated[bool | None, flag("keep a prefix cache")] = None,
    language_model_only: Annotated[bool, silent("serve text alone, without encoders")] = False,
    set_: SetKeys = None,
    json_: Json = False,
    command: LaunchOption = None,
    no_own_code: NoOwnCode = False,
    **keys: Annotated[
        str,
        silent(
            "any other key of a scenario's engine: --tensor-parallel-size (--tp) "
            "--pipeline-parallel-size (--pp) --quantization --kv-cache-dtype ...; "
            "vLLM's --kv-cache-memory-bytes; also by SGLang's and TensorRT-LLM's names, as "
            "--mem-fraction-static"
        ),
    ],
) -> int:
    """Print what fills a GPU's memory, and how many tokens and requests fit."""
    from headway.report.memory_report import memory_figures, memory_table
    from simulator.models.vision import TEXT_ALONE

    refuse_own_code(no_own_code)
    flags = {
        "enforce-eager": enforce_eager,
        "enable-lora": enable_lora,
        "enable-expert-parallel": enable_expert_parallel,
        "enable-prefix-caching": enable_prefix_caching,
    }
    if str(scenario) in ("true", "false"):
        told = " or ".join(f"--{name}" for name, flag in flags.items() if flag is not None)
        raise HeadwayError(f"{scenario}: {told} takes no value; its opposite has --no- before it")
    keys |= {name: str(flag).lower() for name, flag in flags.items() if flag is not None}
    if scenario is None and (gpu is None or model is command is None):
        raise HeadwayError("headway memory: give a scenario, or --gpu with --model or --command")
    if model is not None and command is not None:
        raise HeadwayError(f"--model {model}: --command names a model, too: give one of them")
    size = keys.pop(KV_BYTES[2:], "") if model or command else ""
    if size:  # of a command, which makes blocks of them
        command = f"{command or f'vllm serve {quote(str(model))}'} {KV_BYTES} {size}"
    named = {"model": model, "gpu": gpu, "engine": engine}
    sets = _settings({key: value for key, value in named.items() if value is not None} | keys)
    sets |= {TEXT_ALONE: "--language-model-only"} if language_model_only else {}
    source = scenario or {"cost": {"kind": "roofline"}}
    overrides = with_launch(command, [*sets, *(set_ or [])], ("--kv-transfer-config",))
    try:
        budget, change = read_budget(source, overrides, gpu_memory_gib)
    except HeadwayError as error:
        raise HeadwayError(name_options(error.messages, sets, scenario)) from None
    why = _why_not(budget, change, command, scenario is None)
    if json_:
        print_json(memory_figures(budget) | {"fits": not why})
    else:
        print(memory_table(budget))
    if why:
        raise NoAnswerError(why)
    return 0


def _why_not(budget: "MemoryBudget", change: str, command: str | None, by_options: bool) -> str:
    """Say why a server would not start, and what starts it; "": it starts."""
    from simulator.build.settle import beyond_positions
    from simulator.launch.words import find_command
    from simulator.models.engine_sizes import LONGER

    if budget.refusal:
        change = _as_options(change, command) if by_options else change
        if budget.sizes.kv_cache_memory:
            change = change.replace("--num-gpu-blocks-override", KV_BYTES)
        return does_not_start(budget, change)
    variable, longest = LONGER.get(budget.sizes.name), budget.max_model_len
    most = beyond_positions(budget.model, budget.sizes, longest)
    given = find_command(command).environment if command else {}
    if not most or not variable or given.get(variable, "").lower() in ("1", "true"):
        return ""
    return (
        f"{budget.model.name} does not start: max_model_len {longest:,} is beyond its {most:,} "
        f"positions; it starts with {variable}=1, or a max_model_len of {most}"
    )


def does_not_start(budget: "MemoryBudget", change: str) -> str:
    """Say what the engine's log says first, and the least change, if there is one."""
    where = f"{budget.model.name} on {budget.sizes.gpus} x {budget.gpu.name}"
    first = budget.refusal.split(". ")[0].rstrip(".")
    return f"{where} does not start: {first}{f'; it starts with {change}' if change else ''}"


def _settings(options: Mapping[str, str]) -> dict[str, str]:
    """Return what sets each key of a scenario, and the option that says it."""
    from simulator.launch import fields
    from simulator.util.files import read_table

    rows = read_table(fields.__file__, "names.csv")
    others = {row["name"]: f"engine.{row['key']}" for row in rows} | NAMES
    sets = {}
    for option, value in options.items():
        name = option.replace("-", "_")
        key = others.get(name, f"engine.{name}")
        plain = _formats(value, options) if name == "quantization" else _plain(key, value)
        sets[f"{key}={plain}"] = " ".join([f"--{option}", value or '""'])
    return sets


def name_options(told: Iterable[str], sets: Mapping[str, str], scenario: object) -> list[str]:
    """Name what an option gave by the option, and no scenario where there is none."""
    found = [*told] if scenario else [one.removeprefix("scenario: ") for one in told]
    for text, option in sets.items():
        found = [one.replace(f"--set {text}", option) for one in found]
    return found


def _as_options(change: str, command: str | None) -> str:
    """Write what starts an engine as options: of the command, else of this verb."""
    from simulator.launch.fields import option_of
    from simulator.launch.words import find_command

    engine = find_command(command).engine if command else ""
    found = []
    for word in change.split():
        name, _, value = word.partition("=")
        key = name.removeprefix("engine.")
        option = (engine and option_of(engine, key)) or f"--{key.replace('_', '-')}"
        if name != "gpu.count":  # the other sizes say it
            what = f"no {option}" if value == "null" else f"{option} {value}"
            found.append(what if key != name else word)
    return " ".join(found)


def _plain(key: str, value: str) -> str:
    """Write an option's value as the scenario's key has it: 32k is 32000, as in vLLM's command."""
    from simulator.launch.fields import read_size

    if key == "engine.speculative_config":
        return _with_worth(value)
    if key in TEXTS or (key == "model" and not value):
        return json.dumps(value, ensure_ascii=False)
    sized = key in LENGTHS and re.fullmatch(r"\d+[kmKM]", value)
    return str(read_size(value)) if sized else value


def _formats(asked: str, options: Mapping[str, str]) -> str:
    """Write a loader of weights as the scenario's key has it: null for a checkpoint's own."""
    from simulator.launch.formats import LOADERS, loaded_as
    from simulator.schedulers.vllm.rules import NEWEST_RELEASE, read_release

    model, engine = options.get("model"), options.get("engine", "vllm")
    if model is None or asked not in LOADERS or asked in ("fp8", "mxfp4"):  # a scenario's, too
        return asked
    release = read_release(options.get("version", "")) or NEWEST_RELEASE
    return loaded_as(f"--quantization {asked}", model, release, engine) or "null"


def _with_worth(drafts: str) -> str:
    """Complete a speculative_config by what drafts are worth and cost, which takes no memory."""
    from yaml import YAMLError, safe_load

    try:
        given = safe_load(drafts)
    except YAMLError:  # told where it is read
        return drafts
    worth = {"acceptance": 0.0, "draft": {"seconds": 0.0}}
    return json.dumps(worth | given) if isinstance(given, dict) else drafts


def read_budget(
    source: Path | Mapping[str, Any], overrides: Iterable[str], gib: float | None = None
) -> "tuple[MemoryBudget, str]":
    """Work out the memory of a scenario's engine on a GPU, of `gib` GiB where they are given.

    Beside it are the changes after which one that does not start would, "" if it does.
    """
    from simulator.build.kv_room import engine_sizes, remedies
    from simulator.build.settle import not_started, resolve_model
    from simulator.models.gpus import GIB, find_gpu
    from simulator.models.kv_budget import estimate
    from simulator.scenario.engine_defaults import not_simulated
    from simulator.scenario.load import load_scenario

    scenario = load_scenario(source, overrides, fits=False)
    gpu, model = find_gpu(scenario.gpu.name), resolve_model(scenario)
    if gib is not None:
        if not 0 < gib <= MOST_GIB:
            what = f"must be positive and at most {MOST_GIB:,}: GiB, not MiB"
            raise HeadwayError(f"--gpu-memory-gib {gib:g}: {what}")
        gpu = gpu._replace(memory=int(gib * GIB))
    missing = not_simulated(scenario.engine, scenario.known_model)  # that the server has
    own = {key: to for key, to in missing.items() if not scenario.says(f"engine.{key}")}
    sizes = engine_sizes(scenario.engine.model_copy(update=own), model)
    in_bytes = KV_BYTES in scenario.place("engine.num_gpu_blocks_override").replace("_", "-")
    budget = estimate(model, gpu, sizes.model_copy(update={"kv_cache_memory": in_bytes}))
    for what in not_started(model, scenario.engine, budget.max_model_len):
        warnings.warn(what, HeadwayWarning, stacklevel=2)
    return budget, remedies(scenario, budget) if budget.refusal else ""
