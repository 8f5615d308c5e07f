"""Fleets drawn at random: engines, routers, roles, and whatever reads an engine between events.

Times are multiples of an eighth of a second more often than not, so that arrivals, looks, deadlines
and the ends of steps fall together. A draw that contradicts itself is refused by the scenario's own
checks; draw again.
"""

from collections.abc import Callable, Sequence
from math import nan
from random import Random
from typing import Any
from zlib import crc32

import numpy as np

from simulator.cluster import routers
from simulator.cluster.routers import Target
from simulator.core.request import Media, Request, Segments
from simulator.workload.workload import Workload

Values = dict[str, Any]
LONGEST = 64  # tokens of prompt and answer
MODELS = ("tiny-test", "qwen3-4b", "qwen3-8b")
SEES_ALL = "tests.support.fleets:sees_all"
ROUTERS: tuple[Any, ...] = (
    *(SEES_ALL, SEES_ALL, SEES_ALL),
    *(name for name in routers.ROUTERS if name != "prefix_aware"),
    {"router": "prefix_aware", "chunk": 4, "balance_abs": 1},
)
KEYS = ("fcfs", "priority", "sjf")
"""Policies of a key alone."""
POLICIES = (
    *(*KEYS, "hrrn", "srpt", "mlfq", "boost", "preemptive"),
    *("fair", "wfq", "drr", "deadline", "virtual-finish-time"),
)
VLLMS = ("vllm", "textbook")
ENGINES = (
    *(*VLLMS * 3, "sglang", "sglang", "sglang", "tensorrt-llm", "vllm-v0"),
    *("tgi", "deepspeed-fastgen", "orca", "hf"),
)
EXTRAS: tuple[Values, ...] = (
    {"long_prefill_token_threshold": 7},
    {"prefill_schedule_interval": 3},
    {"reserve_output_tokens": 5},
    {"reserve_output_tokens": "max_tokens"},
    {"reserve_output_tokens": "max_model_len"},
    {"preemption_mode": "swap", "async_scheduling": False},
    {"preemption_mode": "auto", "async_scheduling": False},
    {"scheduler_reserve_full_isl": False},
    {"watermark": 0.1},
    {"min_decode_blocks": 2},
    {"prefix_cache": "radix", "enable_prefix_caching": True, "async_scheduling": False},
    {"kv_offloading_size": 1.0, "enable_prefix_caching": True},
    {
        "speculative_config": {"num_speculative_tokens": 3, "acceptance": 0.7},
        "async_scheduling": False,
        "scheduling_policy": "fcfs",
    },
    {"pipeline_parallel_size": 2, "scheduling_policy": "fcfs"},
)
SGLANGS: tuple[Values, ...] = (
    *({}, {}, {"kv_offloading_size": 1.0}),
    {"scheduling_policy": {"policy": "sglang", "enable_mixed_chunk": True}},
    {"scheduling_policy": {"policy": "sglang", "order": "lpm"}},
    {"scheduling_policy": {"policy": "sglang", "order": "hrrn", "schedule_conservativeness": 0.1}},
    {"scheduling_policy": {"policy": "sglang", "enable_priority_scheduling": True}},
    {"scheduling_policy": {"policy": "sglang", "max_new_tokens": 40, "ignore_eos": True}},
)
BATCHES: tuple[Values, ...] = (
    *({}, {"scheduling_policy": {"policy": "static", "deliver": "batch"}}),
    {"scheduling_policy": {"policy": "static", "timeout": 0.5}},
)


def sees_all(request: Request, targets: Sequence[Target]) -> int:
    """Choose by all that a router can read: any difference sends requests elsewhere."""
    seen = [
        (one.index, one.outstanding, one.tokens, one.used, sorted(one.models.items()))
        for one in targets
    ]
    return crc32(repr((request.id, seen)).encode()) % len(targets)


def moment(rng: Random) -> float:
    """Return a time in the first six seconds."""
    return rng.randint(0, 48) / 8 if rng.random() < 0.7 else round(rng.uniform(0, 6), 3)


def _cost(rng: Random) -> Values:
    """Return what a step takes, most often in binary fractions."""
    return {
        "kind": "linear",
        "base": rng.choice([0.125, 0.125, 0.0625, 0.25, 0.1]),
        "per_token": rng.choice([0.0, 0.0, 2**-10, 0.003]),
        "per_context": rng.choice([0.0, 0.0, 2**-12, 0.0007]),
    }


def _engine(rng: Random, names: Sequence[str] = ENGINES, *, extras: int = 2) -> Values:
    """Return an engine of little memory, or of plenty."""
    name, size = rng.choice(names), rng.choice([1, 4, 4, 16])
    whole = -(-LONGEST // size)
    found: Values = {
        "name": name,
        "max_num_seqs": rng.randint(1, 8),
        "max_num_batched_tokens": rng.choice([8, 16, 64]),
        "block_size": size,
        "max_model_len": LONGEST,
        "num_gpu_blocks_override": 2 + whole * rng.choice([1, 2, 2, 8]),
    }
    if rng.random() < 0.5:
        found["enable_prefix_caching"] = rng.random() < 0.5
    if name in ("hf", "orca", "tgi", "vllm-v0", "tensorrt-llm"):
        found["max_num_batched_tokens"] = LONGEST
    if name in ("sglang", "hf"):
        found |= rng.choice(SGLANGS if name == "sglang" else BATCHES)
    if name in (*VLLMS, "sglang") and rng.random() < 0.7:
        found["async_scheduling"] = rng.random() < 0.5
    if name in VLLMS:
        found["scheduling_policy"] = rng.choice([*POLICIES, "fcfs", "fcfs", "fcfs"])
        for _ in range(rng.randint(0, extras)):
            found |= rng.choice(EXTRAS)
    return found


def _scaling(rng: Random) -> Values:
    """Return something that looks at the replicas every so often."""
    metric = rng.choice(["queue_depth", "kv_usage", "slo_attainment"])
    return {
        "metric": metric,
        "target": rng.choice([1.0, 2.0] if metric == "queue_depth" else [0.1, 0.3, 0.9]),
        "max_replicas": rng.randint(4, 5),
        "interval": rng.choice([0.25, 0.5, 1.0, 0.3]),
        "cooldown": rng.choice([0.0, 0.5]),
        "startup_delay": rng.choice([0.0, 0.25, 0.7]),
    }


def _trouble(rng: Random) -> Values:
    """Return what befalls replicas and their clients."""
    found: Values = {}
    if rng.random() < 0.3:
        found["client"] = {
            "timeout": rng.choice([None, 1.0, 2.5, 0.7]),
            "ttft_timeout": rng.choice([0.25, 1.0, 0.6]),
        }
        if tries := rng.randint(0, 2):
            backoff = rng.choice([0.0, 0.25, 0.1])
            found["client"] |= {"max_retries": tries, "backoff": backoff}
    if rng.random() < 0.2:
        found["admission"] = {"max_outstanding": rng.randint(1, 6), "shed_from": 0.8}
    if rng.random() < 0.2:
        outage = {"replica": 0, "start": moment(rng), "duration": rng.choice([0.5, 1])}
        found["failures"] = {"outages": [outage]}
        if rng.random() < 0.5:
            found["failures"] |= {"mtbf": rng.choice([2.0, 5.0]), "mttr": 0.5}
    return found


def _cluster(rng: Random, found: Values) -> Values:
    """Return replicas alike, in pods, of two kinds, with roles, or of several models.

    It may give the scenario another engine.
    """
    kind = rng.choice(["same", "same", "ranks", "ranks", "pods", "groups", *APART, "pools"])
    router = rng.choice(ROUTERS)
    made: Values = {"router": router, **_trouble(rng)}
    if kind in ("same", "ranks", "pods"):
        made["replicas"] = rng.randint(1, 4)
    if kind == "pods":
        made |= {"router": rng.choice(routers.STATELESS_ROUTERS), "pods": 2, "pod_router": router}
        made["replicas"] = rng.choice([2, 4])
    if kind == "ranks" or (kind == "pods" and rng.random() < 0.5):
        found["engine"] = _engine(rng, VLLMS)
        found["engine"]["data_parallel_size"] = rng.randint(2, 3)
        if rng.random() < 0.5:
            found["engine"]["api_server_count"] = 1
        if rng.random() < 0.4:
            found["model"] = "qwen3-30b-a3b"
    if kind == "groups":
        other = {"replicas": 2, "engine": {"max_num_seqs": 3}, "cost": _cost(rng)}
        made["groups"] = {"one": {"replicas": rng.randint(1, 2)}, "other": other}
    if kind in APART:
        APART[kind](rng, found, made)
    if kind in ("same", "ranks") and rng.random() < 0.5:
        made["autoscaling"] = _scaling(rng)
    return made


def _pools(rng: Random, found: Values, made: Values) -> None:
    """Let some replicas prefill and others decode."""
    found["engine"] = _engine(rng, VLLMS, extras=0)
    found["engine"]["scheduling_policy"] = rng.choice(KEYS)
    made["kv_transfer"] = {
        "bandwidth": rng.choice([1e-4, 1e-3, 1e6]),
        "latency": rng.choice([0.0, 0.0, 125.0, 30.0]),
        "layerwise": rng.random() < 0.5,
        "max_local_prefill_length": rng.choice([0, 0, 8]),
        "router": rng.choice(ROUTERS),
    }
    groups: Values = {}
    for name in ("producer", "consumer"):
        groups[name] = {"replicas": rng.randint(1, 2), "kv_role": f"kv_{name}"}
        if rng.random() < 0.25:
            groups[name]["autoscaling"] = _scaling(rng)
    made["groups"] = groups


def _encoders(rng: Random, found: Values, made: Values) -> None:
    """Let some replicas encode the images of others."""
    made.pop("failures", None)
    found["engine"] = _engine(rng, ("vllm",), extras=0)
    found["engine"] |= {
        "scheduling_policy": rng.choice(KEYS),
        "multimodal_config": {
            "encoder_seconds": [[1, 0.125], [30, rng.choice([0.25, 0.2])]],
            "encoder_cache_size": rng.choice([None, 40]),
        },
    }
    made["ec_transfer"] = {
        "bandwidth": rng.choice([1e-4, 1e6]),
        "latency": rng.choice([0.0, 125.0]),
        "router": rng.choice(ROUTERS),
    }
    made["groups"] = {
        "language": {"replicas": rng.randint(1, 2), "ec_role": "ec_consumer"},
        "encode": {"replicas": rng.randint(1, 2), "ec_role": "ec_producer"},
    }


def _models(rng: Random, found: Values, made: Values) -> None:
    """Let each group serve a model of its own."""
    made.pop("failures", None)
    found["model"] = MODELS[0]
    made["groups"] = {"a": {"replicas": rng.randint(1, 2)}}
    for name, model in zip("bc", MODELS[1 : rng.randint(2, 3)], strict=False):
        made["groups"][name] = {"replicas": rng.randint(1, 2), "model": model, "cost": _cost(rng)}


APART: dict[str, Callable[[Random, Values, Values], None]] = {
    "pools": _pools,
    "encoders": _encoders,
    "models": _models,
}


def draw_fleet(rng: Random) -> tuple[Values, Workload]:
    """Return a scenario with a cluster, and what is asked of it."""
    found: Values = {
        "model": "tiny-test",
        "cost": _cost(rng),
        "engine": _engine(rng),
        "seed": rng.randint(0, 3),
        "goodput": {"ttft": 300.0, "tpot": 150.0},
        "predictor": {"kind": "noisy", "sigma": rng.choice([0.0, 0.5])},
    }
    found["cluster"] = _cluster(rng, found)
    free = not {"kv_transfer", "ec_transfer"} & {*found["cluster"]} and not _models_of(found)
    if free and found["model"] == "tiny-test" and rng.random() < 0.2:
        found["engine"] = _engine(rng, VLLMS, extras=0) | {"scheduling_policy": rng.choice(KEYS)}
        found["engine"] |= {"enable_lora": True, "max_loras": rng.randint(1, 2)}
    return found, _workload(rng, found)


def _models_of(found: Values) -> list[str]:
    """Return the models that a fleet serves, if they are several."""
    models = [
        group.get("model", MODELS[0]) for group in found["cluster"].get("groups", {}).values()
    ]
    return models if len({*models}) > 1 else []


def _workload(rng: Random, found: Values) -> Workload:
    """Return up to 30 requests, with all that a trace may say of them."""
    n = rng.randint(2, 30)
    ids = range(n)
    arrival = sorted(moment(rng) for _ in ids)
    prompts = [rng.randint(1, 40) for _ in ids]
    outputs = [rng.randint(1, 30) for _ in ids]
    load = Workload(np.array(arrival), np.array(prompts), np.array(outputs))
    images = "multimodal_config" in found["engine"]
    if rng.random() < 0.5:
        load.priority = np.array([rng.randint(0, 3) for _ in ids])
    if rng.random() < 0.5:
        load.client = [rng.choice("abc") for _ in ids]
    if rng.random() < 0.3:
        load.max_tokens = np.array([rng.randint(0, 40) for _ in ids])
    if rng.random() < 0.3:
        load.max_concurrency = rng.randint(1, 8)
    if images or rng.random() < 0.5:
        load.segments = [_contents(rng, load, i, images) for i in ids]
    if models := _models_of(found):
        load.model = [rng.choice(models) for _ in ids]
    elif "enable_lora" in found["engine"]:
        load.model = [rng.choice(["", "x", "y", "z"]) for _ in ids]
    if rng.random() < 0.25:
        patience = [nan, nan, 0.0, 0.25, 1.0, 0.33, 2.5]
        load.cancel_after = np.array([rng.choice(patience) for _ in ids])
    if rng.random() < 0.25:
        half = n // 2
        load.after, load.delay = np.full(n, -1), np.zeros(n)
        for i in range(n - half, n):
            load.arrival[i], load.after[i] = nan, i - (n - half)
            load.delay[i] = rng.choice([0.0, 0.125, 0.4])
    load.check()
    return load


def _contents(rng: Random, load: Workload, i: int, images: bool) -> Segments:
    """Return a prompt's contents: a beginning that others share, perhaps an image, and its own."""
    tokens = int(load.prompt_tokens[i])
    parts: list[tuple[Any, int]] = [(rng.choice("ab"), rng.randint(0, 20))]
    if images and rng.random() < 0.5:
        image = rng.randint(0, 6)
        parts.append((Media("image", image), 1 + 2 * image))  # the same contents, the same tokens
        load.prompt_tokens[i] = tokens = max(tokens, parts[0][1] + parts[1][1])
    cut = []
    for name, count in (*parts, (("in", i), tokens)):
        if take := min(count, tokens):
            cut.append((name, take))
        tokens -= take
    return tuple(cut)
