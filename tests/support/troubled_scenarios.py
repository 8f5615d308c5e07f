"""Scenarios in trouble, drawn at random: one thing or another is too little, too much or wrong."""

from collections.abc import Callable
from random import Random
from typing import Any

from tests.support.random_scenarios import Values


def draw_troubled(seed: int) -> tuple[str, Values]:
    """Return a trouble, and a scenario that has it, as its YAML file would have it."""
    rng = Random(f"trouble {seed}")
    name = rng.choice([*TROUBLES])
    gpu = rng.choice(["A100-80GB", "H100-80GB", "L40S"])
    found: Values = {
        "name": f"troubled-{seed}",
        "model": "llama-3-8b",
        "gpu": {"name": gpu},
        "engine": {
            "max_num_seqs": rng.choice([64, 128, 256]),
            "max_num_batched_tokens": rng.choice([512, 1024, 2048]),
            "max_model_len": 8192,
            "enable_prefix_caching": False,
        },
        "workload": {
            "num_prompts": rng.randint(100, 160),
            "request_rate": round(rng.uniform(2, 6), 2),
            "input_len": _spread(rng, rng.randint(200, 1200)),
            "output_len": _spread(rng, rng.randint(60, 250)),
        },
        "seed": seed,
    }
    if rng.random() < 0.3:
        found["goodput"] = {"ttft": rng.choice([300, 1000]), "tpot": rng.choice([50, 100])}
    TROUBLES[name](rng, found)
    return name, found


def _spread(rng: Random, median: int) -> Any:
    """Draw a length, or a distribution of them."""
    return rng.choice(
        [
            median,
            {"kind": "uniform", "low": max(median // 4, 1), "high": 2 * median},
            {"kind": "lognormal", "median": median, "sigma": 0.8, "high": 4 * median},
        ]
    )


def _overload(rng: Random, found: Values) -> None:
    found["workload"] |= {"request_rate": rng.randint(25, 80), "input_len": rng.randint(800, 2500)}


def _kv_starved(rng: Random, found: Values) -> None:
    found["engine"] |= {"num_gpu_blocks_override": rng.randint(550, 1200)}
    found["workload"] |= {"request_rate": rng.randint(6, 20)}


def _large_model(rng: Random, found: Values) -> None:
    """The weights leave little of the memory."""
    found |= {"model": rng.choice(["llama-3-8b", "llama-2-13b"]), "gpu": {"name": "L4"}}
    if found["model"] == "llama-2-13b":
        found |= {"gpu": {"name": "A100-40GB"}}
        found["engine"]["max_model_len"] = 4096
    found["workload"] |= {"request_rate": rng.randint(6, 20), "output_len": rng.randint(200, 500)}
    found["workload"] |= {"input_len": rng.randint(500, 2000)}


def _few_seats(rng: Random, found: Values) -> None:
    found["engine"] |= {"max_num_seqs": rng.choice([2, 4, 8, 16])}
    found["workload"] |= {"request_rate": rng.randint(8, 25)}


def _small_chunks(rng: Random, found: Values) -> None:
    tokens = rng.choice([32, 64, 128])
    found["engine"] |= {"max_num_batched_tokens": tokens, "max_num_seqs": min(tokens, 64)}
    found["workload"] |= {"request_rate": rng.randint(5, 20)}


def _large_chunks(rng: Random, found: Values) -> None:
    found["engine"] |= {"max_num_batched_tokens": rng.choice([4096, 8192, 16384])}
    found["engine"] |= {"max_num_seqs": rng.choice([32, 64, 128])}
    found["workload"] |= {"input_len": rng.randint(1500, 6000)}


def _long_prompts(rng: Random, found: Values) -> None:
    found["workload"] |= {"input_len": rng.randint(4000, 7500), "output_len": rng.randint(20, 300)}


def _burst(rng: Random, found: Values) -> None:
    found["workload"] |= {"burstiness": rng.choice([0.02, 0.05])}
    if rng.random() < 0.5:
        found["workload"] |= {"request_rate": float("inf")}


def _poor_router(rng: Random, found: Values) -> None:
    found["cluster"] = {"replicas": rng.randint(2, 5), "router": rng.choice(["random"])}
    found["engine"] |= {"max_num_seqs": rng.choice([4, 8, 16])}
    found["workload"] |= {
        "request_rate": rng.randint(6, 20),
        "output_len": {"kind": "lognormal", "median": 120, "sigma": 1.2, "high": 2000},
    }


def _sticky_sessions(rng: Random, found: Values) -> None:
    """One replica has the sessions of a client who never stops."""
    found["cluster"] = {"replicas": rng.randint(2, 4), "router": "session_affinity"}
    found["engine"] |= {"max_num_seqs": rng.choice([4, 8])}
    found["workload"] |= {"request_rate": rng.randint(8, 20), "clients": [8, 1, 1]}


def _no_prefix_cache(rng: Random, found: Values) -> None:
    found["workload"] |= {
        "prefix_groups": {"num_prefixes": rng.randint(1, 5), "prefix_len": rng.randint(800, 3000)},
        "request_rate": rng.randint(5, 20),
        "input_len": rng.randint(20, 300),
    }


def _static(rng: Random, found: Values) -> None:
    policy = rng.choice(["static", "hf-static"])
    found["engine"] |= {"scheduling_policy": policy, "max_num_seqs": rng.choice([4, 8, 16])}


def _contiguous(rng: Random, found: Values) -> None:
    found["engine"] |= {"allocation": "contiguous"}
    found["gpu"] = {"name": "L40S"}
    found["workload"] |= {"request_rate": rng.randint(8, 25), "output_len": rng.randint(150, 400)}


def _held_prompts(rng: Random, found: Values) -> None:
    found["engine"] |= {"prefill_schedule_interval": rng.choice([20, 50, 100])}


def _other_engine(rng: Random, found: Values) -> None:
    found["engine"] |= {"scheduling_policy": rng.choice(["orca", "fcfs-v0", "trtllm", "tgi"])}
    found["engine"] |= {"max_num_batched_tokens": 8192}
    found["workload"] |= {"request_rate": rng.randint(8, 25), "input_len": rng.randint(300, 3000)}


def _preempting(rng: Random, found: Values) -> None:
    """Short prompts and long answers outgrow the blocks."""
    found["engine"] |= {"num_gpu_blocks_override": rng.randint(550, 900)}
    found["workload"] |= {"input_len": rng.randint(30, 150), "output_len": rng.randint(300, 900)}
    found["workload"] |= {"request_rate": rng.randint(8, 25)}


def _impatient(rng: Random, found: Values) -> None:
    """Clients give up, or try again."""
    client = {"ttft_timeout": rng.choice([0.5, 1.0, 3.0]), "max_retries": rng.choice([0, 2])}
    found["cluster"] = {"replicas": rng.choice([1, 2]), "client": client}
    found["workload"] |= {"request_rate": rng.randint(30, 80), "input_len": rng.randint(1000, 2500)}


def _heavy_client(rng: Random, found: Values) -> None:
    """One of the clients asks for most of what there is."""
    found["engine"] |= {"max_num_seqs": rng.choice([4, 8, 16])}
    found["workload"] |= {"request_rate": rng.randint(8, 25), "clients": [8, 1, 1]}


def _never_fitting(rng: Random, found: Values) -> None:
    """Some requests, or all, are larger than the cache or longer than the model's limit."""
    found["workload"] |= {"input_len": rng.randint(1500, 4000)}
    if rng.random() < 0.5:
        found["engine"] |= {"num_gpu_blocks_override": rng.randint(90, 250)}
    else:
        found["engine"] |= {"max_model_len": rng.choice([1024, 2048])}


def _crowded_weights(rng: Random, found: Values) -> None:
    """Weights leave less room than the longest request wants; there are many idle replicas."""
    found |= {"model": "llama-3.3-70b", "gpu": {"name": "H100-80GB"}}
    found["engine"] |= {"tensor_parallel_size": 2, "max_num_seqs": 256}
    found["engine"] |= {"max_num_batched_tokens": rng.choice([4096, 8192])}
    found["cluster"] = {"replicas": rng.choice([1, 4, 32])}
    found["workload"] |= {"input_len": rng.randint(500, 3000)}
    found["slo"] = ["p99_ttft_ms<=2000"]


TROUBLES: dict[str, Callable[[Random, Values], None]] = {
    "overload": _overload,
    "kv starved": _kv_starved,
    "large model": _large_model,
    "few seats": _few_seats,
    "small chunks": _small_chunks,
    "large chunks": _large_chunks,
    "long prompts": _long_prompts,
    "burst": _burst,
    "poor router": _poor_router,
    "sticky sessions": _sticky_sessions,
    "no prefix cache": _no_prefix_cache,
    "static batches": _static,
    "contiguous": _contiguous,
    "held prompts": _held_prompts,
    "other engine": _other_engine,
    "preempting": _preempting,
    "impatient clients": _impatient,
    "heavy client": _heavy_client,
    "never fitting": _never_fitting,
    "crowded weights": _crowded_weights,
}
"""What makes a scenario troubled, by the name of the trouble."""
