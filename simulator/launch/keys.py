"""The keys of a scenario that a command gives: its model and its engine.

What the scenario cannot have is refused by name; what would change the time of steps alone is told,
and what changes neither time nor decisions is listed.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod

from simulator.core.speculative_config import TYPICAL, VLLM_DRAFTS
from simulator.launch.fields import fields, of_config, option_of, read_since
from simulator.launch.formats import LOADERS, loaded_as
from simulator.launch.options import Option, read_options
from simulator.launch.words import Command, find_command
from simulator.models.engine_sizes import KEEPS_WINDOWS_SINCE, LONGER
from simulator.models.load import load_model
from simulator.models.loaded import draft_method_of
from simulator.schedulers.vllm.rules import (
    NEWEST_RELEASE,
    Release,
    check_known,
    read_release,
    write_release,
)
from simulator.util.errors import HeadwayError
from simulator.util.files import read_table
from simulator.util.yaml_lines import Block

ACCEPTANCE, DRAFT_FRACTION = 0.7, 0.1
"""What n-grams' drafts and a draft model's are worth, and the latter cost: no command says it."""
POLICIES = {"sglang": "sglang", "tensorrt-llm": "trtllm"}
"""What schedules under an engine whose commands have options of it."""
SUPPOSED = "engine.speculative_config: {}: supposed, no command says it"
SPECULATES = "--speculative-algorithm"
EAGLE_SIZES = ["num_speculative_tokens", "speculative_eagle_topk", "speculative_num_draft_tokens"]
CHAIN, TREE = (3, 1, 4), (5, 4, 8)
"""These sizes where a command of SGLang gives none; the tree under Llama."""
HICACHE_RATIO = 2.0  # tokens of HiCache for one of the GPU's
DRAFT_METHODS = ("ngram", "eagle", "eagle3", "mtp", "draft_model")
OTHERS = {"dflash": "dflash", "medusa": "medusa", "accelerator": "mlp_speculator"}
"""Methods that vLLM finds in a draft's config.json, by a word in the names of such models."""
KEEP_ALL = ("LMCacheConnectorV1", "FlexKVConnectorV1", "ExampleConnector", "P2pNcclConnector")
"""Connectors under which vLLM turns its hybrid KV cache manager off: no `SupportsHMA`."""


NO_MODEL = "names no model; for example 'vllm serve meta-llama/Llama-3.1-8B-Instruct'"


class LaunchCommand(str):
    """A command, or the file that has it, among a scenario's overrides."""

    obeyed: tuple[str, ...] = ()


@dataclass(slots=True)
class Launch:
    """What a command says."""

    engine: Block
    release: Release  # of vLLM
    obeyed: tuple[str, ...]  # options that the caller itself obeys, or can do without
    offline: bool  # `LLM(...)` in the place of a server
    model: str = ""
    words: dict[tuple[str, ...], str] = field(default_factory=dict)  # the option of each key
    told: list[str] = field(default_factory=list)  # what is not simulated, and what is supposed
    without_effect: list[str] = field(default_factory=list)  # options
    supposed: list[str] = field(default_factory=list)  # what no command says
    pool: Block = field(default_factory=dict)  # what sizes caches where the GPU is known

    def over(self, before: Block) -> Block:
        """Return the engine, with what no command says from the one before it."""
        said = {row.effect.split(".")[1] for row in fields() if row.effect.startswith("engine.")}
        said |= {"name"} | ({"version"} if self.engine["name"] != "vllm" else set())
        kept = {key: value for key, value in before.items() if key not in said}
        engine, drafts = kept | self.engine, before.get("speculative_config")
        if isinstance(drafts, dict) and "speculative_config" in engine:
            worth = {key: drafts[key] for key in ("acceptance", "draft") if key in drafts}
            engine["speculative_config"] = engine["speculative_config"] | worth
            self.supposed.clear()
        return engine

    def lines(self) -> list[str]:
        """Say in a line each what is not simulated, what is supposed and what has no effect."""
        lines = [f"--command: {what}" for what in (*self.told, *self.supposed)]
        if options := [one for one in dict.fromkeys(self.without_effect) if one not in self.obeyed]:
            lines.append(f"--command: without effect on time and decisions: {', '.join(options)}")
        return lines


class _UnsimulatedError(ValueError):
    """What a scenario cannot have."""


def read_launch(given: str, version: str | None = None, obeyed: tuple[str, ...] = ()) -> Launch:
    """Read a command, or the file that has it; `version`: the release of vLLM that it starts.

    `obeyed` are options that the caller itself obeys, or can do without. HeadwayError has a line
    for each thing that is wrong or that cannot be simulated.
    """
    command = find_command(given)
    models, options = read_options(command)
    version = (version or command.release) if command.engine == "vllm" else None
    engine: Block = {"name": command.engine} | ({"version": version} if version else {})
    release = _release(version)
    wrong: list[str] = []
    launch = Launch(engine, release, obeyed, command.offline and command.engine == "vllm")
    for option in sorted(options, key=lambda one: one.row.effect.count(".")):  # blocks, then keys
        row = option.row
        if row.effect == "model":
            models.append(option.value)
        elif option.text.startswith("-O.") and release >= NO_DOTS_SINCE:
            wrong.append(f"{option.text}: went after 0.12: write -cc{option.text[2:]}")
        elif row.engine == "vllm" and not option.is_in(release):
            wrong.append(f"{option.text.split()[0]}: {option.written.why_not_in(release)}")
        elif not option.is_default or row.effect.startswith("engine."):
            try:
                _take(launch, option)
            except _UnsimulatedError as error:
                wrong.append(f"{option.text}: {error}")
    models = [*dict.fromkeys(models)]
    if len(models) != 1:
        what = f"names {len(models)} models: {', '.join(models)}" if models else NO_MODEL
        wrong.append(what)
    if wrong:
        raise HeadwayError([f"--command: {what}" for what in wrong])
    launch.model = models[0]
    nodes = next((one.value for one in options if one.row.field == "nnodes"), 1)
    _finish(launch, command, nodes)
    _keep_formats(launch)
    return launch


def _keep_formats(launch: Launch) -> None:
    """Leave a quantized checkpoint in its formats, of which `--quantization` is only the loader."""
    option = launch.words.get(("engine", "quantization"))
    if option is None:
        return
    dtype = loaded_as(f"--command: {option}", launch.model, launch.release, launch.engine["name"])
    launch.engine.pop("quantization", None)
    if dtype:
        launch.engine["quantization"] = dtype


def _release(version: str | None) -> Release:
    if version is None:
        return NEWEST_RELEASE
    try:
        check_known(version)
    except ValueError as error:
        raise HeadwayError(f"--command: its release: {error}") from None
    return read_release(version) or NEWEST_RELEASE


def _take(launch: Launch, option: Option) -> None:
    """Put an option where it belongs; _UnsimulatedError where it cannot be simulated."""
    row = option.row
    if row.field in POOLED:
        launch.pool[row.field] = option.value
        launch.words["engine", row.effect.removeprefix("engine.")] = option.text
    elif (row.engine, row.field) in OWN:
        OWN[row.engine, row.field](launch, option)
    elif row.effect == "none":
        launch.without_effect.append(option.text.split()[0])
    elif row.effect == "told":
        launch.told.append(f"{option.text} is not simulated: {row.note}")
        launch.pool[row.field] = option.value  # what it takes may be told, too
    elif row.effect == "refused":
        raise _UnsimulatedError(f"is not simulated: {row.note}")
    else:
        key, _, name = row.effect.removeprefix("engine.").partition(".")
        if name:
            first = {"policy": POLICIES[row.engine]} if key == "scheduling_policy" else {}
            if not isinstance(launch.engine.setdefault(key, first), dict):
                raise _UnsimulatedError("is a key of what is no mapping")
            launch.engine[key][name] = option.value
        _set(launch, key, launch.engine[key] if name else option.value, option)


def _set(launch: Launch, key: str, value: object, option: Option) -> None:
    if value is not None or option.row.default:  # None is no default there
        launch.engine[key] = value
    launch.words["engine", key] = option.text


def _read_block(launch: Launch, option: Option, config: str) -> Block:
    """Return the values of JSON by field, and tell or list what is not simulated of them.

    _UnsimulatedError for what is refused.
    """
    rows = of_config("vllm", config)
    if not isinstance(option.value, dict):
        raise _UnsimulatedError(f"must be a mapping, not {json.dumps(option.value)}")
    found = {}
    for name, value in option.value.items():
        row = rows.get(str(name).replace("-", "_"))
        if row is None or not row.is_in(launch.release):
            raise _UnsimulatedError(f"{name}: is no key of it in {write_release(launch.release)}")
        default = json.loads(row.default) if row.default else None
        if row.effect == "refused" and value != default:
            raise _UnsimulatedError(f"{name}: is not simulated: {row.note}")
        if row.effect == "told" and value != default:
            launch.told.append(f"{row.field} {json.dumps(value)} is not simulated: {row.note}")
        elif row.effect == "none":
            launch.without_effect.append(f"{option.text.split()[0].partition('.')[0]}.{row.field}")
        found[row.field] = value
    return found


def _compilation(launch: Launch, option: Option) -> None:
    found = _read_block(launch, option, "CompilationConfig")
    if str(found.get("cudagraph_mode", "")).upper() in ("0", "NONE"):
        _set(launch, "enforce_eager", True, option)


def _level(launch: Launch, option: Option) -> None:
    """Take -O0, which has no CUDA graphs; other levels change no time here."""
    if str(option.value) == "0":
        _set(launch, "enforce_eager", True, option)
    else:
        launch.told.append(f"{option.text} is not simulated: {option.row.note}")


def _speculative(launch: Launch, option: Option) -> None:
    """Write drafts as the scenario has them; a command does not say what they are worth."""
    given = _read_block(launch, option, "SpeculativeConfig")
    model = str(given.get("model") or "")
    method = draft_method_of(given)
    method = "ngram" if method == "[ngram]" else "mtp" if method.endswith("_mtp") else method
    if method == "draft_model":
        method = next((OTHERS[word] for word in OTHERS if word in model.lower()), method)
    if method not in DRAFT_METHODS:
        raise _UnsimulatedError(f"method {method} is not simulated: {', '.join(DRAFT_METHODS)} are")
    drafts = given.get("num_speculative_tokens") or (1 if method == "mtp" and model else None)
    if drafts is None:
        raise _UnsimulatedError("num_speculative_tokens: is missing")
    if not model and (method not in ("ngram", "mtp") or "method" not in given):
        raise _UnsimulatedError("model: is missing: methods ngram and mtp alone take none")
    least, most = (given.get(f"prompt_lookup_{end}") or 0 for end in ("min", "max"))
    if not type(least) is type(most) is int or 0 < most < least:
        what = f"prompt_lookup_min={least!r} must be <= prompt_lookup_max={most!r}"
        raise _UnsimulatedError(f"{what}, both whole numbers")
    launch.pool["parts"] = given.get("draft_tensor_parallel_size") or 1
    rates = given.get("synthetic_acceptance_rates") or given.get("synthetic_acceptance_rate")
    usual = "typical" if method in TYPICAL else ACCEPTANCE
    block = {"method": method, "num_speculative_tokens": drafts}
    block["acceptance"] = usual if rates is None else rates
    block |= {name: given[name] for name in VLLM_DRAFTS if given.get(name)}
    supposed = [] if rates is not None else [f"acceptance: {usual}"]
    if model and method != "ngram":
        block["model"] = model
    if method == "draft_model":
        block["draft"] = {"fraction": DRAFT_FRACTION}
        supposed.append(f"draft: {{fraction: {DRAFT_FRACTION}}}")
    if supposed:
        launch.supposed.append(SUPPOSED.format(" and ".join(supposed)))
    _set(launch, "speculative_config", block, option)


def _transfer(launch: Launch, option: Option) -> None:
    """Take vLLM's connector to the host's memory; others are groups of a cluster."""
    match option.value:
        case {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": int() | float() as size, **others},
        }:
            if others:
                raise _UnsimulatedError(f"{', '.join(map(str, others))}: is not simulated")
            _offload(launch, option._replace(value=size / 2**30))
        case {"kv_connector": str() as name} if option.row.options in launch.obeyed:
            launch.told.append(f"{name} is not simulated: memory lacks what it takes of the GPU")
            if launch.release < KEEPS_WINDOWS_SINCE or any(one in option.text for one in KEEP_ALL):
                _set(launch, "disable_hybrid_kv_cache_manager", True, option)
        case _:
            _read_block(launch, option, "KVTransferConfig")


def _offload(launch: Launch, option: Option) -> None:
    _set(launch, "kv_offloading_size", option.value, option)
    launch.engine["hicache_write_policy"] = "write_through"


def _quantization(launch: Launch, option: Option) -> None:
    name = str(option.value)
    if name not in LOADERS:
        raise _UnsimulatedError("is not simulated: write its dtype as engine.quantization")
    _set(launch, "quantization", LOADERS[name]["dtype"] or None, option)


def _scheduler_class(launch: Launch, option: Option) -> None:
    if option.value != PLUGIN:
        raise _UnsimulatedError("is not simulated: your own is engine.scheduling_policy")


NO_DOTS_SINCE = (0, 13, 0)  # no -O.KEY any more (pull request 29991)


def _cache_dtype(launch: Launch, option: Option) -> None:
    """Take a precision of the KV cache that the engine has.

    `cache_dtypes.csv` has them, with the first release that may have each; no dtype: not simulated.
    """
    engine, release = option.row.engine, launch.release
    known = {
        row["value"]: row["dtype"]
        for row in read_table(__file__, "cache_dtypes.csv")
        if row["engine"] == engine and read_since(row["since"]) <= release
    }
    if option.value not in known:
        simulated = [name for name, dtype in known.items() if dtype]
        named = f"vLLM {write_release(release)}" if engine == "vllm" else "SGLang"
        raise _UnsimulatedError(f"{named} has none of that name: {', '.join(simulated)}")
    if not known[option.value]:
        raise _UnsimulatedError("is not simulated")
    _set(launch, "kv_cache_dtype", known[option.value], option)


def _block_size(launch: Launch, option: Option) -> None:
    """Take a page that vLLM has kernels for: ROCm's MLA has 1, old releases 8."""
    if option.value is not None and option.value % 16 and option.value not in (1, 8):
        raise _UnsimulatedError("vLLM has no attention backend for it: they take multiples of 16")
    _set(launch, "block_size", option.value, option)


def _text_alone(launch: Launch, option: Option) -> None:
    """Leave out the encoder where nothing but text may come; other limits change no time."""
    if "=" in option.text and launch.release >= (0, 10):
        raise _UnsimulatedError(f"vLLM {write_release(launch.release)} takes JSON alone")
    limits = {"image": 0, "video": 0, "audio": 0} if option.value is True else option.value
    if isinstance(limits, dict) and not any(({"image": 1} | limits).values()):
        _set(launch, "multimodal_config", {"limit_mm_per_prompt": limits}, option)
    elif limits:
        launch.told.append(f"{option.text} is not simulated: {option.row.note}")


def _chunk(launch: Launch, option: Option) -> None:
    """Take SGLang's chunk; -1: prompts whole."""
    if option.value is not None and option.value <= 0:
        _set(launch, "enable_chunked_prefill", False, option)
    else:
        _set(launch, "max_num_batched_tokens", option.value, option)


def _negated(key: str) -> Callable[[Launch, Option], None]:
    return lambda launch, option: _set(launch, key, not option.value, option)


PLUGIN = "headway.vllm.HeadwayScheduler"
"""`simulator.build.policy_table.PLUGIN`, which is above."""
POLICY_VARIABLE = "HEADWAY_POLICY"
VARIABLES = ("VLLM_", "SGLANG_", "TRTLLM_", "TLLM_")  # how those of engines begin
POOLED = {"ep_size", "dp_size", "max_total_tokens", "kv_cache_memory_bytes"}
POOLED |= {"enable_hierarchical_cache", "hicache_size", "hicache_ratio"}
"""What sizes caches by the memory of a GPU or by other options."""
OWN = {
    ("vllm", "speculative_config"): _speculative,
    ("vllm", "kv_transfer_config"): _transfer,
    ("vllm", "compilation_config"): _compilation,
    ("vllm", "optimization_level"): _level,
    ("vllm", "quantization"): _quantization,
    ("vllm", "kv_offloading_size"): _offload,
    ("vllm", "scheduler_cls"): _scheduler_class,
    ("vllm", "block_size"): _block_size,
    ("vllm", "cache_dtype"): _cache_dtype,
    ("sglang", "kv_cache_dtype"): _cache_dtype,
    ("vllm", "limit_per_prompt"): _text_alone,
    ("vllm", "language_model_only"): _text_alone,
    ("sglang", "quantization"): _quantization,
    ("sglang", "chunked_prefill_size"): _chunk,
    ("sglang", "disable_radix_cache"): _negated("enable_prefix_caching"),
    ("tensorrt-llm", "disable_kv_cache_reuse"): _negated("enable_prefix_caching"),
    ("sglang", "disable_overlap_schedule"): _negated("async_scheduling"),
}
"""Options whose value in a scenario is another."""


def _finish(launch: Launch, command: Command, nodes: int) -> None:
    """Settle what several options say together, and the environment."""
    engine = launch.engine
    experts, gpus = launch.pool.pop("ep_size", 1), engine.get("tensor_parallel_size", 1)
    if experts not in (1, gpus):
        what = f"is not simulated: experts in {experts} parts on {gpus} GPUs"
        raise HeadwayError(f"--command: {launch.words['engine', 'enable_expert_parallel']}: {what}")
    if experts > 1:
        engine["enable_expert_parallel"] = True
    _tell_copies(launch)
    if command.engine == "sglang":
        _finish_host(launch)
        _finish_drafts(launch)
    elif drafts := engine.get("speculative_config"):
        _check_drafts(launch, **drafts)
    if command.release and command.engine == "sglang" and not command.release.startswith("0.5.23"):
        launch.told.append(f"SGLang {command.release} is simulated as 0.5.23")
    if (copies := command.replicas // max(nodes, 1)) > 1:
        launch.told.append(f"1 of the manifest's {copies} replicas is simulated: cluster.replicas")
    variables = [name for name in command.environment if name.startswith(VARIABLES)]
    if unread := [name for name in variables if name not in LONGER.values()]:
        launch.told.append(f"variables are not read: {', '.join(unread)}")
    if policy := command.environment.get(POLICY_VARIABLE):
        engine["scheduling_policy"] = policy
        with suppress(ValueError):
            engine["scheduling_policy"] = json.loads(policy)


def _tell_copies(launch: Launch) -> None:
    """Say what copies of experts take of each GPU, which `memory` does not count."""
    block = launch.pool.get("eplb_config")
    given = block if isinstance(block, dict) else launch.pool
    copies = given.get("num_redundant_experts") or launch.pool.get("ep_num_redundant_experts")
    if not isinstance(copies, int):
        return
    gpus = (launch.engine.get(f"{how}_parallel_size", 1) for how in ("tensor", "data"))
    with suppress(ValueError, ZeroDivisionError):  # what is wrong is said where it is checked
        each, model = copies / prod(gpus), load_model(launch.model)
        if size := model.matrix_bytes(each) - model.matrix_bytes(0):
            what = f"take {size / 2**30:.1f} GiB, which is not counted"
            launch.told.append(f"{each:g} more experts on each GPU {what}")


def _check_drafts(launch: Launch, method: str, model: str = "", **_: object) -> None:
    """Refuse a draft that vLLM does not start beside the target."""
    parts, size = launch.pool.pop("parts"), launch.engine.get("tensor_parallel_size", 1)
    if parts not in (1, size):
        raise HeadwayError(f"--command: draft_tensor_parallel_size: {parts} is not 1 or {size}")
    tokens: list[int] = []
    with suppress(ValueError):  # what is wrong with a model is said where it is loaded
        tokens += [load_model(name).vocab_size for name in (launch.model, model)]
    if method == "draft_model" and len({*tokens}) > 1:
        what = "{1:,} tokens of its vocabulary are not the {0:,} of the target".format(*tokens)
        raise HeadwayError(f"--command: speculative_config: {model}: {what}")


def _finish_host(launch: Launch) -> None:
    """Give HiCache its memory of the host: 10^9 bytes on each GPU, else a ratio."""
    engine, pool = launch.engine, launch.pool
    size, ratio = pool.pop("hicache_size", 0), pool.pop("hicache_ratio", None)
    if not pool.pop("enable_hierarchical_cache", False):
        engine.pop("hicache_write_policy", None)
    elif size:
        engine["kv_offloading_size"] = size * engine.get("tensor_parallel_size", 1) * 1e9 / 2**30
    else:
        pool["hicache_ratio"] = ratio or HICACHE_RATIO
        if ratio is None:
            launch.supposed.append(f"--hicache-ratio {HICACHE_RATIO}: supposed: the host has room")


def _finish_drafts(launch: Launch) -> None:
    """Complete drafts as SGLang does: `_handle_eagle_family`, `_auto_choose_speculative_params`.

    A model's own layers draft where no other model is named. HeadwayError for what starts no
    server, and for drafts that are not simulated.
    """
    given = launch.engine.pop("speculative_config", {})
    sizes = tuple(map(given.get, EAGLE_SIZES))
    algorithm, draft = str(given.get("method") or "").upper(), str(given.get("model") or "")
    if not algorithm:
        launch.without_effect.extend(f"sizes without {SPECULATES}" for _ in given)
        return
    wrong, own = "", not draft or draft == launch.model or "nextn" in draft.lower()
    if algorithm not in ("EAGLE", "EAGLE3", "NEXTN"):
        wrong = f"{algorithm} is not simulated: EAGLE, EAGLE3 and NEXTN are"
    elif algorithm == "EAGLE3" and not draft:
        wrong = "EAGLE3 needs --speculative-draft-model-path"
    elif any(sizes) and not all(sizes[:2] if sizes[1] == 1 else sizes):
        names = (option_of("sglang", f"speculative_config.{size}") for size in EAGLE_SIZES)
        wrong = f"SGLang needs all of {', '.join(names)}, or none"
    if wrong:
        raise HeadwayError(f"--command: {SPECULATES}: {wrong}")
    if not any(sizes):
        sizes = CHAIN
        with suppress(ValueError):  # what is wrong with the model is said where it is loaded
            sizes = TREE if load_model(launch.model).family == "llama" else CHAIN
    block = dict(zip(EAGLE_SIZES, sizes, strict=True)) | {"acceptance": "typical"}
    if sizes[1] == 1:
        block["speculative_num_draft_tokens"] = sizes[0] + 1
    block |= {} if own else {"model": draft}
    block["method"] = "mtp" if own else "eagle3" if algorithm == "EAGLE3" else "eagle"
    launch.engine["speculative_config"] = block
    launch.words["engine", "speculative_config"] = f"{SPECULATES} {given['method']}"
    launch.supposed.append(SUPPOSED.format("acceptance: typical"))
