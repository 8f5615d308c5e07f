"""Which rules a measured engine followed: its flags where recorded, else its version's defaults.

The defaults are those of vLLM V1's EngineArgs for `vllm serve`, release by release.
"""

import re
import warnings
from math import prod
from pathlib import Path
from typing import Any

from calibration.measured.runs import BLANK, Run
from simulator.core.speculative_config import TYPICAL
from simulator.costs.overhead import NEWEST
from simulator.models.gpus import GIB, GPUS, find_gpu
from simulator.models.load import load_model, same_shape
from simulator.scenario.engine_defaults import (
    ASYNC_DRAFTS_SINCE,
    ASYNC_SINCE,
    version_defaults,
    with_defaults,
)
from simulator.schedulers.vllm import rules
from simulator.util.errors import HeadwayWarning

SUBSTITUTES = {"a100.*pcie": "A100-80GB-PCIe", "a100|a800": "A100-80GB"}
"""Names that say no memory, or are not in the table, and what is taken for them."""

FOUR_BITS = ("fp4", "int4", "awq", "gptq", "w4a16", "w4", "gpt-oss", "gptoss", "nf4", "bnb-4")
EIGHT_BITS = {
    "fp8": "fp8",
    "float8": "fp8",
    "e4m3": "fp8",
    "e5m2": "fp8",
    "int8": "int8",
    "w8a8": "int8",
    "w8a16": "int8",
}
SIXTEEN_BITS = ("bf16", "bfloat16", "fp16", "float16", "f16", "half", "16-bit", "16bit", "w16a16")
QUANTIZED_FORMATS = {"compressed-tensors", "modelopt", "quantized", "quark", "torchao"}
"""Ways of keeping weights that say nothing about their width: the model's name must."""

OFFLOAD = r"(?<!no )offload(?!\w*[ :=]*(off|disabled|none))"
OFFLOAD_SIZE = OFFLOAD + r"[^.;]*?(\d+(?:\.\d+)?) ?(gi?b)"
"""KV offload to the host, and how much, in a run's notes."""
GREEDY = r"\bgreedy\b|temperature ?[=:]? ?0(\.0*)?(?![.\d])|inferencemax"
"""Clients, in a run's notes, that ask for no top-p or top-k: InferenceMAX', a copy of vLLM's
benchmark of 2025, asks for temperature 0."""
EXPERT_KERNEL = r"moe[-_]backend[ =]+(marlin|triton)\b|vllm_mxfp4_use_marlin[ =]+(?:1|true)\b"
LARGEST_SERVER = 8  # GPUs
V1_SINCE = (0, 8)
"""vLLM's V1 engine is the default from 0.8 on."""
DEFAULTED_COLUMNS = (
    "engine_version",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_mem_util",
    "kv_capacity_tokens",
    "prefix_caching",
    "weight_dtype",
    "kv_dtype",
)
"""Columns that change a prediction and whose empty cells vLLM's defaults fill in."""
SPECULATIVE = (
    r"(?<!no )speculative(?! decod\w+ (off|disabled))|\beagle|\bmedusa|\bmtp\b|draft model"
)
METHODS = (
    (r"eagle-?3", "eagle3"),
    (r"eagle", "eagle"),
    (r"\bmtp\b", "mtp"),
    (r"draft model", "draft_model"),
)
"""How drafts are made, by words of a run's notes, the first that is there taken; else ngram."""
SPLIT = r"disaggregat|\bp/d\b|\bpd[- ]disagg"
"""Words of a run whose prompts and decodes were on different servers."""
STAGES = r"pipeline[- _]parallel|\bpp ?= ?[2-9]"
NOT_SIMULATED = (
    (r"\blora\b", "LoRA adapters"),
    (r"enforce[-_ ]eager|eager mode", "eager mode (no CUDA graphs)"),
)


def check_supported(run: Run) -> None:
    """Raise ValueError where a run's engine is another one, or did what is not simulated."""
    engine = run.word("engine").lower()
    if engine not in BLANK and "vllm" not in engine and not is_sglang(run):
        raise ValueError(f"engine: {run.word('engine')!r}: must be vLLM or SGLang")
    notes = run.word("notes").lower()
    drafts, share = run.count("num_speculative_tokens"), run.number("acceptance")
    if (drafts is None) != (share is None) or (drafts is None and re.search(SPECULATIVE, notes)):
        raise ValueError("num_speculative_tokens, acceptance: speculative decoding needs both")
    if drafts is not None and is_sglang(run) and _method(run) not in TYPICAL:
        raise ValueError("num_speculative_tokens: SGLang's drafts are simulated of EAGLE and MTP")
    if re.search(SPLIT, notes):
        raise ValueError("notes: prompts and decodes on different servers cannot be replayed")
    if re.search(STAGES, notes) and run.count("pp") is None:
        raise ValueError("pp: empty, though the notes name pipeline parallelism")
    gpus = run.count("n_gpus")
    each = gpus_per_replica(run) * prod(run.count(name) or 1 for name in ("pp", "dp", "replicas"))
    if gpus is not None and gpus < each:
        raise ValueError(f"n_gpus: {gpus} are fewer than tp x pp x dp x replicas, {each}")


def assumptions(run: Run) -> list[str]:
    """Tell what a prediction takes for granted: cells that are empty, notes that it ignores."""
    written = [name for name in _generated_sizes(run) if run.word(name).lower() in BLANK]
    empty = [name for name in DEFAULTED_COLUMNS if run.word(name).lower() in BLANK]
    empty = [name for name in empty if name not in written]
    whose = "SGLang" if is_sglang(run) else "vLLM"
    found = [f"not recorded, so {whose}'s defaults: {', '.join(empty)}"] if empty else []
    if is_sglang(run):
        found.append("SGLang's overheads were not measured, vLLM's are taken")
    if _method(run) != "ngram" and run.count("num_speculative_tokens"):
        found.append("what drafting itself takes is not recorded: nothing is taken for it")
    if written:
        found.append(f"not recorded, so by AIConfigurator's rules: {', '.join(written)}")
    told = run.word("engine_version")
    if told and rules.read_release(told) is None:
        found.append(f"engine_version: {told!r} names no version: the latest is taken")
    if _is_v0(run):
        found.append("vLLM's V0 engine: its overheads were not measured, V1's are taken")
    notes = run.word("notes").lower()
    ignored = (words for pattern, words in NOT_SIMULATED if re.search(pattern, notes))
    found += [f"notes: {words}: not simulated" for words in ignored]
    if re.search(OFFLOAD, notes) and not re.search(OFFLOAD_SIZE, notes):
        found.append("notes: KV offload of unknown size: not simulated")
    each = gpus_per_replica(run)
    if each > LARGEST_SERVER:
        found.append(f"tp: {each}: the network between servers is not modelled")
    if (replicas := run.count("dp") or 1) > 1:
        found.append(f"dp: {replicas} engine cores behind vLLM's internal load balancer")
    if not (run.number("timeout_s") or run.word("per_request_file")) and run.number("n_failed"):
        found.append("n_failed: timeout_s is empty, so that nobody gives up in simulation")
    gpus, used = run.count("n_gpus"), each * replicas * (run.count("replicas") or 1)
    if gpus is not None and gpus > used:
        found.append(f"n_gpus: {gpus} are more than tp x dp x replicas, {used}: the rest is idle")
    return found


def _is_v0(run: Run) -> bool:
    """Return whether the run's engine was vLLM's first one."""
    if is_sglang(run):
        return False
    words = " ".join(run.word(name).lower() for name in ("engine", "engine_version", "notes"))
    told = re.search(r"\bv([01])\b(?![.\d])|vllm_use_v1 ?= ?([01])", words)
    if told:
        return (told[1] or told[2]) == "0"
    return version(run.word("engine_version")) < V1_SINCE


def is_sglang(run: Run) -> bool:
    """Return whether the run's engine was SGLang."""
    return "sglang" in run.word("engine").lower()


def _method(run: Run) -> str:
    """Return how a run's drafts were made."""
    notes, own = run.word("notes").lower(), run.drafts.get("method", "ngram")
    return next((name for pattern, name in METHODS if re.search(pattern, notes)), own)


def version(text: str) -> rules.Release:
    """Read the release out of a version as people write it; `NEWEST` where there is none."""
    return rules.read_release(text) or NEWEST


def schedules_asynchronously(run: Run) -> bool:
    """Return whether a run's engine decided a step while the one before ran.

    Recorded in the notes, or the version's default. InferenceMAX started its servers of 2025 with
    --async-scheduling.
    """
    notes = run.word("notes").lower()
    if re.search(r"no[- ]async|async[-_ ]scheduling[ =:]*(off|false|disabled)", notes):
        return False
    told = re.search(r"async[-_ ]scheduling|inferencemax", notes) is not None
    since = ASYNC_SINCE
    if run.count("num_speculative_tokens"):
        since = ASYNC_DRAFTS_SINCE.get(_method(run), ASYNC_SINCE)
    return told or version(run.word("engine_version")) >= since


def expert_kernel(run: Run) -> str:
    """Return the kernel of experts that a run's notes or command tell of; "": none."""
    told = re.search(EXPERT_KERNEL, f"{run.word('notes')} {run.word('command')}".lower())
    return (told[1] or "marlin") if told else ""


def gpus_per_replica(run: Run) -> int:
    """Return the tensor parallelism: as recorded, else the GPUs of each stage of a replica."""
    stages = prod(run.count(name) or 1 for name in ("pp", "dp", "replicas"))
    return run.count("tp") or max(1, (run.count("n_gpus") or 1) // stages)


def engine_block(run: Run, gpu: str) -> dict[str, Any]:
    """Return the keys of a scenario's `engine` that say how a run was configured."""
    drafts = _drafts(run)
    if is_sglang(run):
        named = {"name": "sglang"} | drafts
        return _configured(run, named | _sizes(run, gpu, named))
    released = version(run.word("engine_version"))
    v0 = _is_v0(run) and not run.flag("chunked_prefill")
    block: dict[str, Any] = {"name": "vllm-v0" if v0 else "vllm"}
    if released[:2] <= rules.NEWEST:  # a newer one is taken for the newest known
        oldest = (*rules.OLDEST_ALIKE, 0)
        known = min(released, rules.V0_UNTIL) if v0 else rules.newest_up_to(max(released, oldest))
        block["version"] = rules.write_release(known)
    block |= _sizes(run, gpu, block)
    if not v0:
        block |= version_defaults(released)
    block["async_scheduling"] = schedules_asynchronously(run) and not v0
    return _configured(run, block | drafts)


def _drafts(run: Run) -> dict[str, Any]:
    """Return the keys of a run's drafts: of its command, with the cells of its own."""
    count, method = run.count("num_speculative_tokens"), _method(run)
    if not count:
        return {}
    given = run.drafts if run.drafts.get("num_speculative_tokens") == count else {}
    own = {
        "method": method,
        "num_speculative_tokens": count,
        "acceptance": run.number("acceptance"),
        "draft": None if method == "ngram" else {},
    }
    return {"speculative_config": {**given, **own}}


def _configured(run: Run, block: dict[str, Any]) -> dict[str, Any]:
    """Add the flags of a run that engines have alike."""
    if re.search(GREEDY, run.word("notes").lower()):
        block["generation_config"] = "vllm"
    if share := run.number("gpu_mem_util"):
        block["gpu_memory_utilization"] = share
    for column, key in (
        ("prefix_caching", "enable_prefix_caching"),
        ("chunked_prefill", "enable_chunked_prefill"),
    ):
        if (flag := run.flag(column)) is not None:
            block[key] = flag
    block["tensor_parallel_size"] = gpus_per_replica(run)
    block["pipeline_parallel_size"] = run.count("pp") or 1
    block["data_parallel_size"] = run.count("dp") or 1
    if quantized := quantization(run.word("weight_dtype"), run.word("model")):
        block["quantization"] = quantized
    if (cache := kv_dtype(run.word("kv_dtype"))) != "auto":
        block["kv_cache_dtype"] = cache
    if told := re.search(OFFLOAD_SIZE, run.word("notes").lower()):
        block["kv_offloading_size"] = float(told[2]) * (1.0 if told[3] == "gib" else 1e9 / GIB)
    if tokens := run.count("kv_capacity_tokens"):
        block["num_gpu_blocks_override"] = tokens // block["block_size"]
    return block


def cluster_block(run: Run) -> dict[str, Any]:
    """Return the keys of a scenario's `cluster`: replicas behind a router."""
    replicas = run.count("replicas") or 1
    if replicas == 1:
        return {}
    return {"replicas": replicas, "router": run.word("router") or "round_robin"}


def _sizes(run: Run, gpu: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a batch: as recorded, else vLLM's defaults for the GPU.

    Without chunked prefill a batch holds at least one prompt of any length.
    """
    longest = run.count("max_model_len")
    whole = run.flag("chunked_prefill") is False or engine["name"] == "vllm-v0"
    model = model_name(run.word("model")) if whole else None
    if model and longest is None:
        longest = load_model(model).max_position_embeddings
    defaults = with_defaults(engine, {"name": gpu}, model)
    assert isinstance(defaults, dict)
    if whole and longest is not None:
        defaults["max_num_batched_tokens"] = max(longest, defaults["max_num_batched_tokens"])
    defaults |= _generated_sizes(run)
    sizes = {
        key: run.count(key) or defaults[key]
        for key in ("max_num_seqs", "max_num_batched_tokens", "block_size")
    }
    if engine["name"] != "sglang":
        least = sizes["max_num_seqs"]
        sizes["max_num_batched_tokens"] = max(sizes["max_num_batched_tokens"], least)
    if longest := run.count("max_model_len"):
        sizes["max_model_len"] = longest
    return sizes


def _generated_sizes(run: Run) -> dict[str, int]:
    """Return the sizes of a batch that AIConfigurator's generator writes for a server of its own.

    Its rules of an aggregated vLLM (generator/rule_plugin/benchmark/vllm.rule): as many sequences
    as there are clients, and tokens for these, one prompt and 1,500 more.
    """
    if "aiconfigurator" not in run.source.lower():
        return {}
    clients, prompt = run.count("concurrency"), run.count("mean_input_tokens")
    if clients is None or prompt is None:
        return {}
    return {"max_num_seqs": clients, "max_num_batched_tokens": clients + prompt + 1500}


# Other people's names of GPUs, models and dtypes, in ours.


def gpu_name(name: str) -> str:
    """Return the table's name of a GPU, `8x` and a remark in brackets aside.

    ValueError where none is meant.
    """
    plain = re.sub(r"^\d+ ?x ?|\(.*\)|\bse\b", "", name.lower().replace("_", " ")).strip()
    try:
        return find_gpu(plain).name
    except ValueError:
        for pattern, known in SUBSTITUTES.items():
            if re.search(rf"\b({pattern})\b", plain):
                warnings.warn(f"gpu: {name!r} is taken as {known}", HeadwayWarning, stacklevel=2)
                return known
        raise ValueError(
            f"gpu: no GPU {name!r} in the table; there are {', '.join(GPUS)}"
        ) from None


def model_name(name: str, folder: Path = Path()) -> str:
    """Return the shipped model of a Hugging Face name, or the path of a config.json.

    A relative path is one from `folder`. ValueError where there is neither.
    """
    if (path := folder / name).is_file() or (path / "config.json").is_file():
        return str(path.resolve())
    found = same_shape(name)
    if found is None:
        raise ValueError(
            f"model: no shipped model has the shape of {name!r}, and it is no path of a "
            "config.json; `headway profile list` has all names"
        )
    return found


def quantization(dtype: str, model: str) -> str | None:
    """Return what `engine.quantization` should be for weights of a dtype; None: 16 bits.

    Where the dtype is not recorded, the model's name may tell. ValueError for an unknown one.
    """
    told, named = dtype.lower(), model.rsplit("/", 1)[-1].lower()
    half = any(word in told for word in SIXTEEN_BITS)
    word = named if half or told in BLANK | QUANTIZED_FORMATS else told
    found = _quantization_in(word)
    if half and found:
        what = f"weight_dtype: {dtype!r} is taken as that of activations: {model} has {found}"
        warnings.warn(what, HeadwayWarning, stacklevel=2)
    if found is None and not half and told not in BLANK:
        raise ValueError(f"weight_dtype: {dtype!r} is none of bf16, fp16, fp8, int8, int4, nvfp4")
    return found


def _quantization_in(word: str) -> str | None:
    """Return the quantization that a word tells of; None: none."""
    if any(four in word for four in FOUR_BITS):
        if "mxfp4" in word or "oss" in word:
            return "mxfp4"
        return "nvfp4" if "fp4" in word else "int4"
    return next((ours for theirs, ours in EIGHT_BITS.items() if theirs in word), None)


def kv_dtype(dtype: str) -> str:
    """Return `engine.kv_cache_dtype`; ValueError for a dtype that no cache has."""
    word = dtype.lower()
    if any(eight in word for eight in ("fp8", "float8", "e4m3", "e5m2")):
        return "fp8"
    if word in BLANK or any(half in word for half in SIXTEEN_BITS):
        return "auto"
    raise ValueError(f"kv_dtype: {dtype!r} is none of auto, bf16, fp16, fp8")
