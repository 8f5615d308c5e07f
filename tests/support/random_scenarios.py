"""Scenarios drawn at random: engines, workloads, clusters, with anything that may stand together.

A draw that contradicts itself is refused by the scenario's own checks; draw again.
"""

from random import Random
from typing import Any

from simulator.cluster import routers

Values = dict[str, Any]
POLICIES: tuple[Any, ...] = (
    *("fcfs", "fcfs", "fcfs", "priority", "sjf", "hrrn", "mlfq", "boost", "preemptive"),
    *("static", "hf-static", "orca", "fcfs-v0", "sarathi", "sglang", "trtllm", "tgi", "fastgen"),
    {"policy": "static", "deliver": "batch"},
    *("fair", "wfq", "drr", {"policy": "fair", "weights": {"client-1": 2}}, "deadline"),
)
ROUTERS = tuple(routers.ROUTERS)


def draw_scenario(seed: int) -> Values:
    """Return the scenario of a seed, as its YAML file would have it."""
    rng = Random(f"scenario {seed}")
    found = {
        "name": f"drawn-{seed}",
        "model": rng.choice(["llama-3-8b", "llama-2-7b"]),
        "gpu": {"name": rng.choice(["A100-80GB", "H100-80GB", "L40S"])},
        "engine": {"name": "textbook" if seed % 3 else "vllm", **_engine(rng)},
        "workload": _workload(rng),
        "seed": seed,
    }
    cost = rng.choice([None, {"kind": "roofline"}, _linear(rng), _linear(rng)])
    optional = {
        "cost": cost,
        "goodput": rng.choice([None, {"ttft": 200.0}, {"tpot": 20.0, "e2el": 3000.0}]),
        "predictor": rng.choice([None, None, {"kind": "noisy", "sigma": 0.5}]),
        "cluster": _cluster(rng) if rng.random() < 0.4 else None,
        "slo": rng.choice([None, ["p99_ttft_ms<=150", "p90_e2el_ms<=900"], ["mean_tpot_ms<=20"]]),
    }
    found |= {key: value for key, value in optional.items() if value is not None}
    return _with_encoders(seed, found) if seed % 9 == 4 else found


def _with_encoders(seed: int, found: Values) -> Values:
    """Give prompts images, and encode them apart, or not."""
    rng = Random(f"encoders {seed}")
    kept = ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override")
    sizes = rng.choice([5, {"kind": "uniform", "low": 1, "high": 30}])
    images = {"tokens": sizes, "distinct": rng.choice([None, 3, 40]), "items": rng.choice([1, 2])}
    engine = {key: found["engine"][key] for key in kept} | {
        "name": "vllm",
        "max_model_len": 400,
        "scheduling_policy": rng.choice(["fcfs", "priority", "sjf"]),
        "async_scheduling": rng.random() < 0.5,
        "enable_prefix_caching": rng.random() < 0.5,
        "multimodal_config": {
            "encoder_seconds": [[1, 0.004], [30, rng.choice([0.01, 0.2])]],
            "encoder_cache_size": rng.choice([None, 40]),
        },
    }
    many = -(-400 // engine["block_size"]) * rng.choice([1, 3])
    engine["num_gpu_blocks_override"] = many + 2
    cluster: Values = {
        "router": rng.choice(ROUTERS),
        "ec_transfer": {"bandwidth": rng.choice([0.001, 50.0]), "router": rng.choice(ROUTERS)},
        "groups": {
            "language": {"replicas": rng.randint(1, 2), "ec_role": "ec_consumer"},
            "encode": {"replicas": rng.randint(1, 3), "ec_role": "ec_producer"},
        },
    }
    extras: tuple[Values, ...] = (
        {"client": {"timeout": 4.0, "max_retries": 1, "jitter": 0.1}},
        {"admission": {"max_outstanding": 6}},
    )
    if rng.random() < 0.4:
        cluster |= rng.choice(extras)
    workload = found["workload"] | {"multimodal": {"image": images}}
    kept_keys = {
        key: found[key]
        for key in ("name", "model", "gpu", "seed", "goodput", "slo", "cost")
        if key in found
    }
    return kept_keys | {"engine": engine, "workload": workload, "cluster": cluster}


def _linear(rng: Random) -> Values:
    return {
        "kind": "linear",
        "base": rng.choice([0.003, 0.01, 0.05]),
        "per_token": rng.choice([0.0, 2e-5, 1e-3]),
        "per_context": rng.choice([0.0, 1e-6]),
    }


def _engine(rng: Random) -> Values:
    size = rng.choice([1, 4, 16, 32])
    longest = rng.choice([200, 256, 400])
    seats = rng.randint(1, 12)
    policy = rng.choice(POLICIES)
    found = {
        "max_num_seqs": seats,
        "max_num_batched_tokens": rng.choice([16, 64, 256, 2048]),
        "block_size": size,
        "max_model_len": longest,
        "num_gpu_blocks_override": 2 + -(-longest // size) * rng.choice([1, 2, 4, 30]),
        "enable_prefix_caching": rng.random() < 0.5,
        "scheduling_policy": policy,
    }
    extras: tuple[Values, ...] = (
        {"async_scheduling": True},
        {
            "pipeline_parallel_size": rng.choice([2, 3]),
            "async_scheduling": rng.random() < 0.5,
            "scheduling_policy": rng.choice(["fcfs", "priority"]),
        },
        {"long_prefill_token_threshold": 32},
        {"prefill_schedule_interval": 3},
        {"reserve_output_tokens": rng.choice([20, "max_tokens", "max_model_len"])},
        {"preemption_mode": rng.choice(["swap", "auto"])},
        {"preemption_mode": "swap", "swap_overlap": True},
        {"allocation": "contiguous", "enable_prefix_caching": False},
        {"scheduler_reserve_full_isl": False},
        {"watermark": 0.1},
        {"min_decode_blocks": 2},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"prefix_cache": "radix", "enable_prefix_caching": True},
        {"kv_offloading_size": 1.0, "enable_prefix_caching": True},
        {"speculative_config": {"num_speculative_tokens": 3, "acceptance": 0.7}},
    )
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        found |= rng.choice(extras)
    return found


def _length(rng: Random, most: int) -> Any:
    low = rng.randint(1, most)
    return rng.choice(
        [
            low,
            {"kind": "uniform", "low": 1, "high": most},
            {"kind": "lognormal", "median": max(low // 2, 1), "sigma": 0.7, "high": most},
        ]
    )


def _workload(rng: Random) -> Values:
    found = {
        "num_prompts": rng.choice([1, 7, 40, 120, 120, 160]),
        "request_rate": rng.choice([0.5, 3.0, 10.0, 40.0, float("inf")]),
        "input_len": _length(rng, 150),
        "output_len": _length(rng, 60),
    }
    extras: tuple[Values, ...] = (
        {"burstiness": rng.choice([0.2, 3.0, float("inf")])},
        {"max_concurrency": rng.randint(1, 20)},
        {"clients": rng.randint(2, 4)},
        {"clients": [3, 1], "priorities": [0, 1]},
        {"prefix_groups": {"num_prefixes": 3, "prefix_len": 40}},
        {"prefix_len": 33},
        {"sessions": {"turns": 3, "think_time": rng.choice([0.0, 0.7])}},
        {"diurnal": {"period": 10, "amplitude": 0.8}},
        {"frontend": {"latency": 3.0, "per_request": 1.0, "per_token": 0.01}},
    )
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        found |= rng.choice(extras)
    return found


def _cluster(rng: Random) -> Values:
    found: Values = {"router": rng.choice(ROUTERS)}
    kind = rng.choice(["same", "same", "groups", "apart"])
    if kind == "same":
        found["replicas"] = rng.choice([1, 2, 3, 5])
    elif kind == "groups":
        fast = {"replicas": 2, "gpu": {"name": "H200"}, "engine": {"max_num_seqs": 6}}
        found["groups"] = {"slow": {"replicas": rng.randint(1, 2)}, "fast": fast}
    else:
        found["kv_transfer"] = {"bandwidth": rng.choice([0.1, 50.0]), "latency": 1.0}
        found["groups"] = {
            "prefill": {"replicas": rng.randint(1, 2), "kv_role": "kv_producer"},
            "decode": {"replicas": rng.randint(1, 2), "kv_role": "kv_consumer"},
        }
    extras: tuple[Values, ...] = (
        {"admission": {"max_outstanding": 6, "shed_from": 0.8}},
        {"client": {"timeout": 4.0, "max_retries": 1, "jitter": 0.1}},
        {"admission": {"max_outstanding": 8}, "client": {"max_retries": 2, "backoff": 0.5}},
        {"failures": {"outages": [{"replica": 0, "start": 1.0, "duration": 2.0}]}},
        {"autoscaling": {"target": 2, "max_replicas": 4, "interval": 1, "startup_delay": 1}},
    )
    if rng.random() < 0.5:
        found |= rng.choice(extras)
    return found
