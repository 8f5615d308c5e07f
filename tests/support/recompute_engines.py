"""What engines did over time, and what a cluster cost, from the tables of a run."""

import json
from math import exp, inf
from pathlib import Path

import numpy as np
import pandas as pd

from simulator.models.gpus import find_gpu
from tests.support.run_files import COMPLETED, Run, Values, share

CONFIGS = Path(__file__).parents[2] / "simulator/models/configs"
BYTES = {"bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
GROUP_GAUGES = (
    *("steps", "gpu_busy_fraction", "mean_running", "max_running", "mean_waiting", "max_waiting"),
    *("kv_cache_usage_mean", "kv_cache_usage_max", "preemptions", "prefix_cache_hit_rate"),
    *("decode_seat_utilization", "host_share"),
    *("mfu", "bandwidth_utilization"),
)


def recompute_engines(
    run: Run, requests: pd.DataFrame, steps: pd.DataFrame, cores: list[Values]
) -> Values:
    """Get the gauges of some engine cores, whose rows these are; `cores` has each one's engine."""
    start, end = run.span
    whole = (end - start) * len(cores)
    busy = steps.duration.sum()
    tokens = {
        name: int((steps[name] * steps.steps).sum())
        for name in ("prefill_tokens", "decode_tokens", "wasted_tokens")
    }
    running = share((steps.running * steps.duration).sum(), busy)
    admitted = requests[requests.queue_time.notna()]
    accepted = (requests.replica >= 0) & (requests.finish_reason != "rejected")
    queries, hits = int(admitted.prompt_tokens.sum()), int(requests.cached_tokens.sum())
    used = steps.kv_blocks_used / (steps.kv_blocks_used + steps.kv_blocks_free)
    used = pd.Series(np.nan, steps.index) if run.leapt else used
    efficiency = _memory_efficiency(run, requests, steps, cores)
    found = {
        "steps": int(steps.steps.sum()),
        "gpu_busy_fraction": share(busy, whole),
        "mean_running": running,
        "max_running": int(steps.running.max()) if len(steps) else 0,
        **_seats(run, steps, cores),
        **dict.fromkeys(("host_share", "gpu_busy_without_host")),
        "mean_waiting": _mean_waiting(run, requests, whole),
        "max_waiting": _max_waiting(run, requests, steps),
        "kv_cache_usage_mean": share((used * steps.duration).sum(skipna=False), busy),
        "kv_cache_usage_max": used.max(skipna=False) if len(used) else 0.0,
        "memory_efficiency": efficiency,
        "internal_fragmentation": None if efficiency is None else 1 - efficiency,
        **tokens,
        "wasted_share": share(tokens["wasted_tokens"], sum(tokens.values())),
        "preemptions": int(requests.preemptions.sum()),
        "preemption_rate": share(requests.preemptions.sum(), accepted.sum()),
        "prefix_cache_queries": queries,
        "prefix_cache_hits": hits,
        "prefix_cache_hit_rate": share(hits, queries),
        "rejected": int((requests.finish_reason == "rejected").sum()),
        "unfinished": int((requests.finish_reason == "unfinished").sum()),
        "never_sent": int(requests.finish_reason.isna().sum()),
    }
    return found | _copies(steps, cores[0], run) | _utilizations(run, requests, steps, cores)


def _seats(run: Run, steps: pd.DataFrame, cores: list[Values]) -> Values:
    """Count seats, those taken, and those whose request has ended."""
    by_number = dict(_numbered(run, cores))
    rows = steps.assign(ended=0, seats=0, steps=steps.steps.astype(int))
    for number, engine in by_number.items():
        policy = engine["scheduling_policy"]
        name, given = (policy, {}) if isinstance(policy, str) else (policy["policy"], policy)
        mine = rows.replica == number
        default = min(8, engine["max_num_seqs"]) if name == "hf-static" else engine["max_num_seqs"]
        rows.loc[mine, "seats"] = given.get("batch_size") or default
        if name in ("static", "hf-static"):
            rows.loc[mine, "ended"] = rows.wasted_tokens[mine].where(
                rows.decode_tokens[mine] > 0, 0
            )
    live = rows.running - rows.ended
    decoding = rows.decode_tokens > 0
    live_steps = (live * rows.steps)[decoding].sum()
    wasted = int((rows.ended * rows.steps).sum())
    return {
        "batch_occupancy": share((live * rows.duration).sum(), (rows.seats * rows.duration).sum()),
        "decode_seat_utilization": share(live_steps, (rows.seats * rows.steps)[decoding].sum()),
        "wasted_seat_steps": wasted,
        "wasted_seat_share": share(wasted, wasted + live_steps),
    }


def _mean_waiting(run: Run, requests: pd.DataFrame, whole: float) -> float:
    """Add up how long each request waited, once and after each preemption."""
    waited = requests.queue_time.sum() + requests.preempted_time.sum()
    still = requests[requests.queue_time.isna() & (requests.finish_reason == "unfinished")]
    return share(waited + (run.span[1] - still.entered).sum(), whole)


def _max_waiting(run: Run, requests: pd.DataFrame, steps: pd.DataFrame) -> int:
    """Take those who wait as a step begins, and who joins until the next one."""
    most = 0
    joined = requests[requests.finish_reason != "rejected"]
    for number, rows in steps.groupby("replica"):
        times = np.sort(joined.entered[joined.replica == number])
        begins = [-inf, *rows.start, run.span[1]]
        waiting = [0, *rows.waiting]
        for level, begin, end in zip(waiting, begins, begins[1:], strict=False):
            since = (times > begin + 1e-12) & (times < end - 1e-12)
            most = max(most, level + int(since.sum()))
    return most


def _memory_efficiency(
    run: Run, requests: pd.DataFrame, steps: pd.DataFrame, cores: list[Values]
) -> float | None:
    """Follow the tokens stored: what steps compute, less what finished requests take with them.

    That is known where no request is preempted, none shares blocks and every step has a row.
    """
    engine = cores[0]
    if run.leapt or run.requests.preemptions.sum() or run.requests.cached_tokens.sum():
        return None  # see not_in_files
    stored_time = room_time = 0.0
    for number, rows in steps.groupby("replica"):
        mine = requests[(requests.replica == number) & requests.finish.notna()]
        # Where a static batch gives its answers at once, they are complete before they are given.
        mine = mine.assign(finish=mine.finish - mine.get("delivery_time", 0.0))
        mine = mine.sort_values("finish")
        finish = mine.finish.to_numpy()
        gone = np.cumsum([0, *(mine.prompt_tokens + mine.output_tokens - 1)])
        computed = (rows.prefill_tokens + rows.decode_tokens).cumsum()
        left = gone[np.searchsorted(finish, rows.start + 1e-12)]
        stored_time += ((computed - left) * rows.duration).sum()
        contiguous = engine["allocation"] == "contiguous"  # a block is a seat's whole memory
        size = engine["max_model_len"] if contiguous else engine["block_size"]
        room_time += (rows.kv_blocks_used * size * rows.duration).sum()
    return share(stored_time, room_time)


def _copies(steps: pd.DataFrame, engine: Values, run: Run) -> Values:
    found: Values = {"swapped_out_blocks": 0, "swapped_in_blocks": 0, "swap_time": 0.0}
    if "swap_time" in steps:
        found = {name: steps[name].sum().item() for name in found}
    moved = found["swapped_out_blocks"] + found["swapped_in_blocks"]
    found["swapped_bytes"] = moved * engine["block_size"] * _kv_bytes(run, engine)
    names = ("external_prefix_cache_hits", "external_prefix_cache_hit_rate", "offloaded_blocks")
    return found | dict.fromkeys((*names, "loaded_blocks", "offloading_bytes"), 0)


def _model(run: Run) -> Values:
    config = json.loads((CONFIGS / run.scenario["model"] / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    keys = config["num_key_value_heads"]
    attention = hidden * size * (2 * heads + 2 * keys)
    assert not config.get("attention_bias")
    layer = attention + 3 * hidden * config["intermediate_size"]
    layers = config["num_hidden_layers"]
    return {
        "weights": layers * layer,
        "head": config["vocab_size"] * hidden,
        "pair": 4 * layers * heads * size,
        "cache": 2 * layers * keys * size,
        "dtype": config["torch_dtype"],
    }


def _kv_bytes(run: Run, engine: Values) -> float:
    """Bytes of a token's keys and values on all GPUs (tensor parallel sizes that divide them)."""
    model = _model(run)
    kind = engine["kv_cache_dtype"]
    kind = engine["dtype"] if kind == "auto" else kind
    return model["cache"] * BYTES[model["dtype"] if kind == "auto" else kind]


def _work(run: Run, requests: pd.DataFrame, steps: pd.DataFrame, engine: Values) -> Values:
    """Return the FLOPs that the answers need, and the bytes that the steps read."""
    model = _model(run)
    flops = 0.0
    for row in requests[requests.output_tokens > 0].itertuples():
        met = row.prompt_tokens + row.output_tokens - 1
        seen = (met * (met + 1) - row.cached_tokens * (row.cached_tokens + 1)) / 2
        flops += 2 * model["weights"] * (met - row.cached_tokens) + model["pair"] * seen
        flops += 2 * model["head"] * row.output_tokens
    dtype = engine["quantization"] or engine["dtype"]
    width = BYTES[model["dtype"] if dtype == "auto" else dtype]
    grown = (steps.decode_tokens + steps.wasted_tokens) * steps.steps * (steps.steps - 1) // 2
    context = (steps.context * steps.steps + grown).sum()
    weights = width * model["weights"] + max(width, 2.0) * model["head"]
    read = weights * steps.steps.sum() + context * _kv_bytes(run, engine)
    return {"mfu": flops, "bandwidth_utilization": read}


def _peaks(engine: Values) -> Values:
    """What the GPUs of one engine core could do in a second."""
    gpu = find_gpu(engine["gpu"]["name"])
    fp8 = (engine["quantization"] or "").startswith("fp8") and gpu.fp8_flops
    size = engine["tensor_parallel_size"] * engine["pipeline_parallel_size"]
    flops = gpu.fp8_flops if fp8 else gpu.bf16_flops
    return {"mfu": size * flops, "bandwidth_utilization": size * gpu.bandwidth}


def _utilizations(
    run: Run, requests: pd.DataFrame, steps: pd.DataFrame, cores: list[Values]
) -> Values:
    """Divide the work of engines by what they could do; those of one group are alike."""
    duration = run.span[1] - run.span[0]
    found = {}
    for name in ("mfu", "bandwidth_utilization"):
        work = 0.0
        for group in {engine["group"] for engine in cores}:
            numbers = [k for k, engine in _numbered(run, cores) if engine["group"] == group]
            engine = next(engine for engine in cores if engine["group"] == group)
            mine = requests[requests.replica.isin(numbers)]
            work += _work(run, mine, steps[steps.replica.isin(numbers)], engine)[name]
        found[name] = share(work, duration * sum(_peaks(engine)[name] for engine in cores))
    return found


def _price(run: Run, duration: float, tokens: int) -> Values:
    """Return what a single server costs at list prices, and a million tokens of it."""
    hourly = find_gpu(run.scenario["gpu"]["name"]).dollars_per_hour
    hourly = None if hourly is None else hourly * run.scenario["gpu"]["count"]
    paid = None if hourly is None else hourly * duration / 3600
    return {
        "dollars_per_hour": hourly,
        "dollars": paid,
        "dollars_per_million_output_tokens": paid / tokens * 1e6 if paid and tokens else None,
    }


def recompute_energy(
    run: Run, requests: pd.DataFrame, steps: pd.DataFrame, cores: list[Values]
) -> Values:
    """Return what engines draw whose replicas are there all the time, by the readings' formula."""
    duration = run.span[1] - run.span[0]
    joules: float | None = 0.0
    kg_co2 = 0.0
    for group in dict.fromkeys(engine["group"] for engine in cores):
        numbers = [k for k, engine in _numbered(run, cores) if engine["group"] == group]
        engine, gpu = next((e, e["gpu"]) for e in cores if e["group"] == group)
        mine = steps[steps.replica.isin(numbers)]
        most = gpu["power"]["max"] or find_gpu(gpu["name"]).max_power
        if most is None:
            joules = None
            break
        idle = 0.17 * most if gpu["power"]["idle"] is None else gpu["power"]["idle"]
        busy = mine.duration.sum()
        size = engine["tensor_parallel_size"] * engine["pipeline_parallel_size"]
        work = _work(run, requests[requests.replica.isin(numbers)], mine, engine)
        peaks = _peaks(engine)
        used = {name: share(work[name], peaks[name] * busy) for name in work}
        load = 1 - exp(-5.6 * used["mfu"] - 1.6 * used["bandwidth_utilization"])
        taken = size * (len(numbers) * duration * idle + busy * (most - idle) * load)
        joules += taken
        kg_co2 += taken / 3.6e6 * gpu["carbon_intensity"] / 1000
    tokens = requests[requests.finish_reason.isin(COMPLETED)].output_tokens.sum()
    each = joules / tokens if tokens and joules is not None else None
    found = {} if "cluster" in run.summary["headway"] else _price(run, duration, tokens)
    return found | {
        "power_w": joules / duration if duration and joules is not None else None,
        "joules_per_output_token": each,
        "joules_per_output_token_low": each and 0.8 * each,
        "joules_per_output_token_high": each and 1.25 * each,
        "wh_per_million_output_tokens": each and each * 1e6 / 3600,
        "kg_co2_per_million_output_tokens": None if each is None else kg_co2 * 1e6 / tokens,
    }


def _numbered(run: Run, cores: list[Values]) -> list[tuple[int, Values]]:
    """Number engine cores as the files do: over all groups in their order."""
    every = [
        engine
        for engine, _ in list_servers(run.scenario)
        for _ in range(engine["data_parallel_size"])
    ]
    groups = {engine["group"] for engine in cores}
    return [(k, engine) for k, engine in enumerate(every) if engine["group"] in groups]


def list_servers(scenario: Values) -> list[tuple[Values, float | None]]:
    """Return each server's engine (with its gpu and group) and its price per hour."""
    cluster = scenario["cluster"] or {}
    groups = cluster.get("groups") or {"all": {"replicas": cluster.get("replicas") or 1}}
    servers = []
    for name, group in groups.items():
        gpu = scenario["gpu"] | (group.get("gpu") or {})
        engine = scenario["engine"] | (group.get("engine") or {}) | {"gpu": gpu, "group": name}
        price = group.get("dollars_per_hour")
        if price is None and (hourly := find_gpu(gpu["name"]).dollars_per_hour) is not None:
            price = hourly * gpu["count"]
        servers += [(engine, price)] * group["replicas"]
    return servers


def recompute_cluster(run: Run, servers: list[tuple[Values, float | None]]) -> Values:
    """Return the block of a cluster whose replicas are there, and paid, all the time."""
    duration = run.span[1] - run.span[0]
    router = (run.scenario["cluster"] or {}).get("router", "round_robin")
    cores = [engine for engine, _ in servers for _ in range(engine["data_parallel_size"])]
    ended = [int((run.requests.replica == k).sum()) for k in range(len(cores))]
    busy = [run.steps.duration[run.steps.replica == k].sum() for k in range(len(cores))]
    prices = [price for _, price in servers]
    hourly = None if None in prices else sum(prices)
    dollars = None if hourly is None else hourly * duration / 3600
    tokens = run.completed.output_tokens.sum()
    groups = {}
    for name in dict.fromkeys(engine["group"] for engine in cores):
        numbers = [k for k, engine in enumerate(cores) if engine["group"] == name]
        mine = [engine for engine in cores if engine["group"] == name]
        groups[name] = _group(run, servers, numbers, mine)
    return {
        "router": router if isinstance(router, str) else router["router"],
        "gpus": sum(engine["gpu"]["count"] for engine, _ in servers),
        "dollars_per_hour": hourly,
        "replica_hours": len(servers) * duration / 3600,
        "gpu_hours": sum(engine["gpu"]["count"] for engine, _ in servers) * duration / 3600,
        "dollars": dollars,
        "dollars_per_million_output_tokens": dollars * 1e6 / tokens if dollars and tokens else None,
        "requests_per_replica_min": min(ended),
        "requests_per_replica_max": max(ended),
        "requests_imbalance": share(max(ended), sum(ended) / len(ended)),
        "busy_time_imbalance": share(max(busy), sum(busy) / len(busy)),
        "shed": int((run.requests.finish_reason == "shed").sum()),
        "timed_out": int((run.requests.finish_reason == "timeout").sum()),
        "groups": groups,
    }


def _group(
    run: Run,
    servers: list[tuple[Values, float | None]],
    numbers: list[int],
    cores: list[Values],
) -> Values:
    name, duration = cores[0]["group"], run.span[1] - run.span[0]
    prices = [price for engine, price in servers if engine["group"] == name]
    requests = run.requests[run.requests.replica.isin(numbers)]
    gauges = recompute_engines(run, requests, run.steps[run.steps.replica.isin(numbers)], cores)
    done = requests[requests.finish_reason.isin(COMPLETED)]
    hourly = None if None in prices else sum(prices)
    tokens = int(done.output_tokens.sum())
    return {
        "replicas": len(prices),
        "data_parallel_size": cores[0]["data_parallel_size"],
        "replica_hours": len(prices) * duration / 3600,
        "gpu": cores[0]["gpu"]["name"],
        "gpus": cores[0]["gpu"]["count"] * len(prices),
        "dollars_per_hour": hourly,
        "dollars": None if hourly is None else hourly * duration / 3600,
        "completed": len(done),
        "output_tokens": tokens,
        "output_throughput": share(tokens, duration),
        **{key: gauges[key] for key in GROUP_GAUGES},
    }
