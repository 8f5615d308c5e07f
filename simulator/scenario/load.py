"""From a scenario file and its overrides to a scenario, or to a list of all that is wrong.

Three rounds, so that one call tells as much as possible: what YAML says, what each key says by
itself (`validate.py`), and what keys say together (`checks.py`). The last round leaves out keys
that the second found wrong.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from simulator.build.choose_scheduler import can_overlap
from simulator.build.policy_table import find_policy
from simulator.core.engine_config import EngineConfig
from simulator.launch.keys import Launch, LaunchCommand, read_launch
from simulator.models.gpus import find_gpu
from simulator.scenario.checks import find_conflicts
from simulator.scenario.engine_defaults import fit_to_gpu, look_up_models, open_named_blocks
from simulator.scenario.planning_config import SweepConfig
from simulator.scenario.resolve import keep_specs
from simulator.scenario.scenario import Scenario
from simulator.scenario.validate import SECTIONS, validate
from simulator.util.errors import FieldError, HeadwayError, HeadwayWarning, Key, did_you_mean
from simulator.util.from_mapping import short_repr
from simulator.util.user_code import NOT_ALLOWED, REFUSED, own_code_refused
from simulator.util.yaml_lines import Block, SourceMap, block_in, parse, read_text

PACKAGE = Path(__file__).parent.parent
FOLDERS = (PACKAGE / "scenarios", PACKAGE.parent / "scenarios")
"""Of the shipped scenarios: in an installed package, and in a checkout."""

Source = str | Path | Mapping[str, Any]
"""What a scenario is loaded from: a file, the name of a shipped one, or what a file would hold."""
P = ParamSpec("P")
R = TypeVar("R")


def load_scenario(
    path: Source,
    overrides: Iterable[str] = (),
    seed: int | None = None,
    *,
    vary: Iterable[tuple[str, str]] = (),
    vary_option: str = "--vary",
    own_code: bool = True,
    fits: bool = True,
) -> Scenario:
    """Read a scenario file, put the overrides `dotted.key=value` over it, and check it all.

    An override that is a `LaunchCommand` puts its model and engine in the place of the file's.
    `path` may be the name of a shipped scenario, without an ending: `demo`. Or it is what the file
    would hold, a dict: files that it names are then looked up in the current folder. `seed`
    overrides the scenario's, `vary` the rest with pairs of dotted key and value, which messages
    call by `vary_option`. `own_code=False` refuses a scenario that names code,
    `package.module:Class`, before any of it is imported; so does the environment variable
    HEADWAY_NO_OWN_CODE. `fits=False` takes a scenario whose GPUs have too little memory, too, and
    looks at no cost and no scheduler; it has no specs then. Raises HeadwayError, a ValueError,
    with everything that is wrong.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    folder, raw, source_map, messages = _read(path, overrides, seed, vary, vary_option)
    try:
        scenario = check_scenario(raw, source_map, folder, own_code=own_code, fits=fits)
    except HeadwayError as error:
        raise HeadwayError([*messages, *error.messages], error.faults) from None
    if messages:
        raise HeadwayError(messages)
    return scenario


def loads(
    use: Callable[Concatenate[Scenario, P], R],
) -> Callable[Concatenate[Scenario | Source, P], R]:
    """Let a function that takes a scenario load one from a file, a shipped name or a dict, too."""

    @wraps(use)
    def load(scenario: Scenario | Source, /, *args: P.args, **options: P.kwargs) -> R:
        loaded = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
        return use(loaded, *args, **options)

    return load


def source_name(path: Source) -> str:
    """Name what a scenario is loaded from, for messages."""
    return "scenario" if isinstance(path, Mapping) else str(path)


def load_sweep(
    path: Source, overrides: Iterable[str] = (), seed: int | None = None
) -> tuple[SweepConfig | None, int]:
    """Read the block `sweep` of a scenario, and the seed, whatever is wrong with the rest.

    What is varied may put that right. Raises HeadwayError for what is wrong with these two.
    """
    folder, raw, source_map, messages = _read(path, overrides, seed, ())
    if messages:
        raise HeadwayError(messages)
    alone: Block = {key: raw[key] for key in ("sweep", "seed") if key in raw}
    scenario = check_scenario(alone, source_map, folder)
    return scenario.sweep, scenario.seed


def check_scenario(
    raw: Block,
    source_map: SourceMap,
    folder: Path = Path(),
    *,
    own_code: bool = True,
    fits: bool = True,
) -> Scenario:
    """Make a scenario of plain values, or raise HeadwayError with everything that is wrong."""
    scenario, wrong = validate(raw)
    others: list[str] = []  # about other files
    if scenario is not None:
        scenario = scenario.with_source(folder, source_map)
        refused = [] if own_code and not own_code_refused() else list(named_code(scenario))
        why = REFUSED if own_code_refused() else NOT_ALLOWED
        wrong += [FieldError(key, f"{name} {why}", "own code") for key, name in refused]
        if not refused:
            scenario = _wait_for_own_policies(scenario, raw)
            keys = {fault.key for fault in wrong}
            contradicting, others, specs, fleet = find_conflicts(scenario, keys, runs=fits)
            wrong += contradicting
    if scenario is None or wrong or others:
        wrong.sort(key=lambda fault: source_map.line(fault.key))
        raise HeadwayError(dict.fromkeys([*map(source_map.message, wrong), *others]), wrong)
    if fits:
        keep_specs(scenario, specs, fleet)
    return scenario


def _wait_for_own_policies(scenario: Scenario, raw: Mapping[str, Any]) -> Scenario:
    """Turn off asynchronous scheduling, unless it is asked for, for the user's own schedulers.

    They need to know the step before.
    """

    def settle(engine: EngineConfig, *blocks: Block) -> EngineConfig:
        given = any("async_scheduling" in block for block in blocks)
        named = engine.policy_name
        if given or not engine.async_scheduling or ":" not in str(named):
            return engine
        with suppress(ValueError, HeadwayError):  # told with all else that is wrong
            if not can_overlap(find_policy(engine, scenario.folder)[0]):
                return engine.model_copy(update={"async_scheduling": False})
        return engine

    base = block_in(raw, "engine")
    changed: dict[str, object] = {"engine": settle(scenario.engine, base)}
    if (cluster := scenario.cluster) is not None:
        blocks, groups = block_in(raw, "cluster", "groups"), {}
        for name, group in cluster.groups.items():
            block = block_in(blocks, name, "engine")
            own = settle(group.engine, base, block) if group.engine else None
            groups[name] = group.model_copy(update={"engine": own})
        changed["cluster"] = cluster.model_copy(update={"groups": groups})
    return scenario.model_copy(update=changed)


def with_keys(scenario: Scenario, keys: Mapping[str, Any]) -> Scenario:
    """Return a scenario with values put in at dotted keys; HeadwayError where they do not fit."""
    raw = deepcopy(scenario.resolved())
    source_map = SourceMap(scenario.name, {})
    for name, value in keys.items():
        *above, last = name.split(".")
        block = raw
        for part in above:
            if block.get(part) is None:
                block[part] = {}
            block = block[part]
        block[last] = value
        source_map.override((*above, last), f"{name}={value}")
    return check_scenario(raw, source_map, scenario.folder)


def named_code(scenario: Scenario) -> Iterator[tuple[Key, str]]:
    """Yield the keys of a scenario that name code of its own, and what they name."""
    engines: list[tuple[Key, EngineConfig]] = [(("engine",), scenario.engine)]
    cluster = scenario.cluster
    if cluster is not None:
        engines += [
            (("cluster", "groups", name, "engine"), group.engine)
            for name, group in cluster.groups.items()
            if group.engine is not None
        ]
    named: list[tuple[Key, object]] = []
    for block, engine in engines:
        policy = engine.scheduling_policy
        named.append(((*block, "scheduling_policy"), policy.name))
        if isinstance(order := policy.arguments.get("order"), dict):  # under sglang
            named.append(((*block, "scheduling_policy", "order"), order.get("policy")))
        if engine.scheduler_cls:
            yield (*block, "scheduler_cls"), engine.scheduler_cls
    if cluster is not None:
        for key, spec in cluster.routers.items():
            named.append(((*key.split("."),), spec.name))
    yield from ((key, name) for key, name in named if isinstance(name, str) and ":" in name)


OWN = "scenario.yaml"  # of a run, in its folder


def find_scenario(path: Path) -> Path:
    """Return a scenario's file: the path itself, or what is shipped under a name without an ending.

    `demo` and `examples/load` are names. A file of that name goes first; a folder does not, so that
    `run demo --out demo` can be repeated. A folder of a run stands for the scenario in it. Raises
    HeadwayError, with the names there are, where there is neither.
    """
    if path.suffix or path.is_absolute() or (path.exists() and not path.is_dir()):
        return path / OWN if (path / OWN).is_file() else path
    for folder in FOLDERS:
        if (found := folder / f"{path}.yaml").is_file():
            return found
    if path.is_dir():
        return path / OWN if (path / OWN).is_file() else path
    names = shipped_scenarios()
    near = did_you_mean(str(path), names) or f": {', '.join(names)}"
    raise HeadwayError(f"{path}: no such file, and not one of the shipped scenarios{near}")


def shipped_scenarios() -> list[str]:
    """List the names."""
    for folder in FOLDERS:
        if found := sorted(folder.glob("**/*.yaml")):
            return [file.relative_to(folder).with_suffix("").as_posix() for file in found]
    return []


def _read(
    path: Source,
    overrides: Iterable[str],
    seed: int | None,
    vary: Iterable[tuple[str, str]],
    option: str = "--vary",
) -> tuple[Path, Block, SourceMap, list[str]]:
    """Read a source and put the overrides over it; give its folder, and what is wrong with them."""
    raw: Any
    if isinstance(path, Mapping):
        folder, raw, source_map = Path(), _plain(path), SourceMap(source_name(path), {})
    elif isinstance(path, str | Path) and path != "":
        file = find_scenario(Path(path))
        # What `--set` adds to a shipped scenario names files of whoever calls.
        folder = file.parent if file == Path(path) else Path()
        raw, lines = parse(read_text(file), str(file))
        source_map = SourceMap(str(file), lines)
    else:
        kind = "a Scenario, loaded already" if isinstance(path, Scenario) else repr(path)
        way = ": give what it was loaded from" if isinstance(path, Scenario) else ""
        raise HeadwayError(
            f"scenario: must be a file, the name of a shipped one, or a dict, not {kind}{way}"
        )
    varied = [(f"{option} {key}={value}", key, value) for key, value in vary]
    raw, messages = _settle(raw, source_map, overrides, seed, varied)
    look_up_models(raw, folder)
    return folder, raw, source_map, messages


def _plain(values: Mapping[Any, Any]) -> Block:
    """Copy a mapping as a YAML file would hold it."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _plain(value)
        return [plain(one) for one in value] if isinstance(value, list | tuple) else value

    return {str(key): plain(value) for key, value in values.items()}


def _settle(
    raw: Any,
    source_map: SourceMap,
    overrides: Iterable[str],
    seed: int | None,
    varied: Iterable[tuple[str, str, str]],
) -> tuple[Block, list[str]]:
    """Put overrides over what a file holds; give what is wrong with them, too.

    `varied` has a place, a dotted key and its value each.
    """
    path = Path(source_map.file)
    if not raw and not isinstance(raw, list | str | bool | int | float):
        raise HeadwayError(f"{path}: is empty; `model: llama-3-8b` alone would do")
    if not isinstance(raw, dict):
        raise HeadwayError(f"{path}:1: must be a mapping of keys, not {short_repr(raw)}")
    _open_blocks(raw)
    settings: list[tuple[str, str, str | None]] = []  # place, dotted key, value
    launch: Launch | None = None
    overrides, groups = [*overrides], [*block_in(raw, "cluster", "groups")]
    for override in overrides:
        if isinstance(override, LaunchCommand):
            launch = _launch(raw, source_map, override, overrides)
            continue
        if not isinstance(override, str):
            raise HeadwayError(f"overrides: must be texts dotted.key=value, not {override!r}")
        name, equals, value = override.partition("=")
        settings.append((f"--set {override}", name, value if equals else None))
    settings += varied
    settings += [] if seed is None else [(f"--seed {seed}", "seed", str(seed))]
    messages = []
    for place, name, text in settings:
        messages += _check_group(groups, place, name)
        messages += _override(raw, source_map, place, name, text)
    if launch is not None:
        raw["engine"] = fit_to_gpu(raw, launch.pool, offline=launch.offline)
    _follow_hardware(raw, {tuple(name.strip().split(".")) for _, name, _ in settings})
    raw.setdefault("name", _default_name(path))
    return raw, messages


def _launch(
    raw: Block, source_map: SourceMap, command: LaunchCommand, overrides: Iterable[str]
) -> Launch:
    """Put the model and engine of a launch command in the place of a scenario's.

    What no command says is kept. It is read as its release does, which an override may give.
    """
    from simulator.costs.profile import shipped_profiles

    before = block_in(raw, "engine")
    given = (one.partition("=")[2] for one in overrides if one.startswith("engine.version="))
    version = next(given, "").strip("\"'") or before.get("version")
    launch = read_launch(command, str(version) if version else None, command.obeyed)
    if block_in(raw, "model").get("name") != launch.model:
        raw["model"] = launch.model
        source_map.override(("model",), "--command")
    raw["engine"] = launch.over(before)
    source_map.override(("engine",), "--command")
    for key, words in launch.words.items():
        source_map.override(key, f"--command {words}")
    block_in(raw, "gpu").pop("count", None)
    if (copies := launch.pool.get("dp_size")) and isinstance(raw.get("cluster") or {}, dict):
        raw["cluster"] = (raw.get("cluster") or {}) | {"replicas": copies}
    if block_in(raw, "cost").get("profile") in shipped_profiles():
        del raw["cost"]  # of this model and its GPUs
    for line in launch.lines():
        warnings.warn(line, HeadwayWarning, stacklevel=2)
    return launch


def _follow_hardware(raw: Block, overridden: set[Key]) -> None:
    """Drop a shipped profile that the file names, where an override asks for other hardware.

    The hardware's own is then found as where no cost is given.
    """
    hardware = {("gpu",), ("gpu", "name"), ("engine", "tensor_parallel_size")}
    cost, gpu, engine = (block_in(raw, name) for name in ("cost", "gpu", "engine"))
    if not overridden & hardware or any(key[0] == "cost" for key in overridden):
        return
    if [*cost] != ["profile"]:
        return
    from simulator.costs.profile import named_hardware, shipped_profiles

    if cost["profile"] not in shipped_profiles() or not isinstance(raw.get("gpu"), dict):
        return
    fitted = named_hardware(cost["profile"])
    size = engine.get("tensor_parallel_size", 1)
    try:
        name = find_gpu(str(gpu.get("name", fitted["gpu"]))).name
    except ValueError:  # told where all values are checked
        return
    if (name, size) != (fitted["gpu"], fitted["tensor_parallel_size"]):
        del raw["cost"]


def _default_name(path: Path) -> str:
    """Name a scenario after its file, less what a name cannot hold."""
    stem = path.name.removeprefix(".").partition(".")[0]
    return re.sub(r"[^\w ,+=-]+", "-", stem).lstrip(" ,+=-") or "scenario"


def _check_group(groups: list[str], place: str, name: str) -> list[str]:
    """Refuse to set a key of a group that the file does not name: it would be one more group."""
    key = name.strip().split(".")
    if not groups or key[:2] != ["cluster", "groups"] or len(key) < 4 or key[2] in groups:
        return []
    there = f"there is no group {key[2]!r}; there is {', '.join(groups)}"
    return [f"{place}: {'.'.join(key[:3])}: {there}"]


def _override(
    raw: Block, source_map: SourceMap, place: str, name: str, text: str | None
) -> list[str]:
    """Set one dotted key; return what is wrong with the override."""
    key = tuple(name.strip().split("."))
    if text is None or not text.strip() or not all(key):  # `null` asks for a default
        return [f"{place}: must be dotted.key=value, as engine.max_num_seqs=64"]
    try:
        value, _ = parse(text, place)
    except HeadwayError as error:
        return [message.replace(f"{place}:1:", f"{place}:") for message in error.messages]
    block: Any = raw
    for depth, part in enumerate(key[:-1], 1):
        if block.get(part) is None:
            block[part] = {}
            if key[:depth] not in SECTIONS:  # else others may fill the block, too
                source_map.override(key[:depth], place)
        block = block[part]
        if not isinstance(block, dict):
            return [f"{place}: {'.'.join(key[:depth])} is {short_repr(block)} and has no keys"]
    block[key[-1]] = value
    _open_blocks(raw)
    source_map.override(key, place)
    return []


def _open_blocks(raw: Block) -> None:
    """Write out `engine: NAME` and `gpu: NAME`, so that overrides find a block."""
    raw |= open_named_blocks(raw)
    for group in block_in(raw, "cluster", "groups").values():
        if isinstance(group, dict):
            group.update(open_named_blocks(group))
