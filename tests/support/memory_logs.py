"""Public server logs (memory_logs.csv of HEADWAY_DATA) as scenarios, and how far off Headway is.

What a log leaves unsaid is taken by its engine's release: utilization, seats and tokens of a step.
"""

import csv
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from yaml import safe_load as number

from headway.cli.memory import read_budget
from simulator.models.gpus import GIB
from simulator.models.kv_budget import MemoryBudget
from simulator.util.errors import HeadwayError

MODELS = (  # in words that a row's model has, where they are no name of the hub
    (r"Lingshu-32B", "qwen2.5-vl-32b"),
    (r"granite-3.0 MoE \(E=40\)", "granite-3.0-3b-a800m"),
    (r"merged fine-tune", "llama-3.1-8b"),
    (r"Qwen3.8-27B", "qwen3.5-27b"),
    (r"Qwen3.6-35B-A3B NVFP4", "nvidia/Qwen3.6-35B-A3B-NVFP4"),
    (r"Meta-Llama-3.1-405B-Instruct-FP8", "llama-405b-fp8"),
)
GPUS = (
    (r"A6000", "A6000"),
    (r"RTX[- ]4090", "RTX-4090"),
    (r"RTX[- ]5090", "RTX-5090"),
    (r"RTX[- ]3090", "RTX-3090"),
    (r"RTX PRO 6000", "RTX-PRO-6000"),
    (r"79.14 GiB", "H100-PCIe"),
    (r"A100", "A100-80GB"),
    (r"H200", "H200"),
    (r"H100", "H100-80GB"),
    (r"MI300X", "MI300X"),
    (r"GB10", "GB10"),
    (r"APU", "MI300X"),  # of AMD's, with its GiB
    (r"L40S", "L40S"),
    (r"L4", "L4"),
    (r"15.99", "RTX-4080"),
)
KEYS = (
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "dtype",
    "kv_cache_dtype",
)
NAMES = {
    "mem_fraction_static": "gpu_memory_utilization",
    "max_batch_size": "max_num_seqs",
    "max_seq_len": "max_model_len",
    "mnbt": "max_num_batched_tokens",
    "chunked_prefill": "max_num_batched_tokens",
    "chunked_prefill_size": "max_num_batched_tokens",
    "seqs": "max_num_seqs",
}
SWITCHES = ("enforce_eager", "enable_expert_parallel")
LARGE = {"max_num_batched_tokens": 8192}  # from 70 to 160 GiB
RELEASES = {"2025-07": "0.10.0", "2025-11": "0.11.2", "0.6.4+": "0.6.4", "0.26dev": "0.25.1"}


class Row(NamedTuple):
    """One log, and what Headway says of the same server."""

    name: str
    engine: str
    kind: str
    logged: dict[str, float]
    found: dict[str, float]
    why: str = ""  # refused
    unread: str = ""  # what Headway says that it does not know

    def errors(self) -> dict[str, float]:
        """Relative errors of what the log has; of a cache below nothing its share of the GPU."""
        return {
            key: (self.found[key] - value) / (80 if value < 0 else value)
            for key, value in self.logged.items()
            if key in self.found
        }


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def scenario_of(row: dict[str, str]) -> dict[str, Any]:
    """Write a log's server as keys of a scenario."""
    model = next((name for words, name in MODELS if re.search(words, row["model"])), None)
    card = next((name for words, name in GPUS if re.search(words, row["gpu"])), "H200")
    gpu: dict[str, Any] = {"name": card, "count": int(row["tp"])}
    return {
        "model": model or re.split(r" [(+]", row["model"])[0],
        "gpu": gpu,
        "engine": _engine_of(row)
        | (LARGE if "APU" in row["gpu"] else {})
        | _flags_of(row["flags"]),
        "cost": {"kind": "roofline"},
    }


def _engine_of(row: dict[str, str]) -> dict[str, Any]:
    version, size = row["version"], {"tensor_parallel_size": int(row["tp"])}
    if row["engine"] != "vllm":
        return size | {"name": row["engine"]}
    told = RELEASES.get(version) or re.sub(r"rc\d+|dev|[^\d.]", "", version)
    if "V0" in version or version == "0.3" or told.startswith(("0.5", "0.6", "0.7")):
        return size | {"name": "vllm-v0"}
    return size | {"name": "vllm", "version": None if version == "2026" else told}


def _flags_of(flags: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for flag, value in re.findall(r"(\w+=|mnbt |seqs |chunked_prefill )([\w.]+)", flags):
        key = NAMES.get(flag[:-1], flag[:-1])
        if key in KEYS:
            found.setdefault(key, 1024 * int(value[:-1]) if value[-1] == "K" else number(value))
    if re.search(r"kv fp8|fp8_e4m3|fp8_ds", flags):
        found["kv_cache_dtype"] = "fp8"
    found |= {flag: True for flag in SWITCHES if flag in flags}
    if "language_model_only" in flags:
        found["multimodal_config"] = {"limit_mm_per_prompt": {"image": 0, "audio": 0, "video": 0}}
    if drafts := re.search(r"speculative (\w+).*k=(\d+)", flags):
        found["speculative_config"] = {
            "method": drafts[1],
            "num_speculative_tokens": int(drafts[2]),
            "acceptance": 0.5,
            "draft": {"fraction": 0.1},
        }
    return found


def compare(row: dict[str, str], folder: Path) -> Row:
    """Hold a log against Headway."""
    raw = scenario_of(row)
    if (local := folder / raw["model"]).is_dir():
        raw["model"] = str(local)
    logged = {
        key: float(row[name]) if row[name] else None
        for key, name in (("weights", "weights_gib"), ("kv", "kv_gib"), ("tokens", "kv_tokens"))
    }
    if row["max_concurrency"]:
        logged["concurrency"] = float(row["max_concurrency"].partition("x")[0])
    logged = {key: value for key, value in logged.items() if value is not None}
    try:
        size = re.match(r"([\d.]+) (?:GiB|GB AMD APU)", row["gpu"])
        budget, _ = read_budget(raw, [], float(size[1]) if size else None)
    except (HeadwayError, ValueError) as error:
        return Row(row["id"], row["engine"], row["quantization"], logged, {}, str(error))
    return Row(
        row["id"],
        row["engine"],
        row["quantization"],
        logged,
        figures(budget),
        unread=budget.unread,
    )


def figures(budget: MemoryBudget) -> dict[str, float]:
    """What a log would say."""
    return {
        "weights": budget.loaded / GIB,
        "kv": budget.kv_cache / GIB,
        "tokens": budget.tokens,
        "concurrency": budget.max_concurrency,
    }


CLASSES = (
    ("SGLang, TensorRT-LLM", lambda row: row["engine"] != "vllm"),
    ("drafts", lambda row: "speculative" in row["flags"]),
    ("linear attention", lambda row: bool(re.search(r"Next|Qwen3\.[5-9]", row["model"]))),
    ("windows: Gemma, gpt-oss", lambda row: bool(re.search("emma|gpt-oss", row["model"]))),
    ("images", lambda row: "VL" in row["model"]),
    (
        "int4: AWQ, GPTQ",
        lambda row: "int4" in row["quantization"] or "4-bit" in row["quantization"],
    ),
    ("fp8", lambda row: "fp8" in row["quantization"]),
    ("16 bits", lambda row: True),
)
"""Kinds of servers, of which the first that a row is counts."""


def table(path: Path, folder: Path, leave_out: Collection[str] = ()) -> Iterator[str]:
    """Write the median and largest error of each figure by class, %, in Markdown.

    Below it is how many figures keep the bound, of all logs and without those left out, and what
    is refused.
    """
    found: dict[str, dict[str, list[float]]] = {name: {} for name, _ in CLASSES}
    ids: dict[str, list[str]] = {name: [] for name, _ in CLASSES}
    all_rows = {row["id"]: compare(row, folder) for row in read_rows(path)}
    errors_of = {name: row.errors() for name, row in all_rows.items()}
    rows = [row for row in read_rows(path) if row["id"] not in leave_out]
    for row in rows:
        kind = next(name for name, holds in CLASSES if holds(row))
        if errors_of[row["id"]]:
            ids[kind].append(row["id"])
        for figure, error in errors_of[row["id"]].items():
            found[kind].setdefault(figure, []).append(abs(error))
    yield f"| {len(rows)} logs | {' | '.join(FIGURES)} | in sample |"
    yield f"|---|{'--:|' * len(FIGURES)}--:|"
    for kind, errors in found.items():
        cells = [_cell(errors.get(figure, [])) for figure in FIGURES]
        seen = f"{len(IN_SAMPLE & {*ids[kind]})} of {len(ids[kind])}"
        yield f"| {kind} | {' | '.join(cells)} | {seen} |"
    refused = [name for name, row in all_rows.items() if row.why]
    yield f"refused: {len(refused)} of {len(all_rows)}: {', '.join(refused)}"
    for out in ((), leave_out):
        kept = [errors for name, errors in errors_of.items() if name not in out]
        counts = [_kept(kept, figure, bound) for figure, bound in BOUNDS.items()]
        yield f"within the bounds, without {', '.join(out) or 'none'}: {', '.join(counts)}"


def _kept(rows: list[dict[str, float]], figure: str, bound: float) -> str:
    errors = [abs(one[figure]) for one in rows if figure in one]
    return f"{figure} {sum(error <= bound for error in errors)} of {len(errors)}"


IN_SAMPLE = {
    "m01",  # CUDA graphs of a dense layer
    "g01",  # CUDA graphs of a layer with experts
    "g02",
    "h06",  # memory of the RTX 4090
    "h10",  # of the RTX 3090
    "h20",  # an encoder's peak
    "h32",  # SGLang's tensors in multiples of 2 MiB
    "h33",  # TensorRT-LLM's process
    "r09",  # that a build before 0.26 estimates no graphs on AMD's GPUs
    "r01",  # RTX 5090, and what NVFP4 in a name leaves in 16 bits
    "r04",
    "r12",  # 14 bytes a logit, Gemma 4's encoder
}
"""Logs in view of which a constant, a rule or a card's memory was chosen."""
FIGURES = ("weights", "kv", "tokens")
BOUNDS = {"weights": 0.02, "kv": 0.05, "tokens": 0.05, "concurrency": 0.05}
"""Relative errors that nine logs of ten keep."""


def _cell(errors: list[float]) -> str:
    if not errors:
        return ""
    return f"{100 * median(errors):.1f}, {100 * max(errors):.1f} ({len(errors)})"


if __name__ == "__main__":
    print(*table(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]), sep="\n")
