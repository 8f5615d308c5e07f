"""What the summary says of a cluster: by group, how evenly the work fell, and what it cost."""

from typing import TYPE_CHECKING

import numpy as np

from simulator.cluster import replicas_in
from simulator.gauges import StepSums, gauge, share
from simulator.hardware import find_gpu
from simulator.tables import gather_requests, run_span
from simulator.utilization import Served, utilization

if TYPE_CHECKING:
    from simulator.scenario import Scenario
    from simulator.simulation import Result

GAUGES = (
    "steps",
    "gpu_busy_fraction",
    "mean_running",
    "max_running",
    "mean_waiting",
    "max_waiting",
    "kv_cache_usage_mean",
    "kv_cache_usage_max",
    "preemptions",
    "prefix_cache_hit_rate",
)
"""Of those of the whole run, the ones that each group gets, too."""

Values = dict[str, object]


def price_of_group(scenario: "Scenario", name: str) -> float | None:
    """Give the dollars per hour of one replica of a group; None where the price is unknown."""
    assert scenario.cluster is not None
    given = scenario.cluster.kinds[name].dollars_per_hour
    if given is not None:
        return given
    gpu = scenario.of_group(name).gpu
    price = find_gpu(gpu.name).dollars_per_hour
    return None if price is None else price * gpu.count


def price_of_cluster(scenario: "Scenario") -> float | None:
    """Give the dollars per hour of all replicas; None where the price of one is unknown."""
    assert scenario.cluster is not None
    total = 0.0
    for name, kind in scenario.cluster.kinds.items():
        price = price_of_group(scenario, name)
        if price is None and kind.replicas:
            return None
        total += kind.replicas * (price or 0.0)
    return total


def cluster_summary(result: "Result") -> Values:
    """Give the block `cluster` of the summary, and the utilizations of all groups together."""
    table = gather_requests(result.workload, result.sent, result.logs)
    start, end = span = run_span(table, result.logs)
    hours = (end - start) / 3600.0
    groups: dict[str, Values] = {}
    used = {"mfu": 0.0, "bandwidth_utilization": 0.0}
    peaks = dict.fromkeys(used, 0.0)
    for name, numbers in replicas_in(result.groups).items():
        groups[name], served = _group(result, name, numbers, span)
        count = served.tensor_parallel_size * len(numbers)
        flops = served.gpu.flops(served.model.resolve_dtype(served.dtype))
        weights = {"mfu": flops, "bandwidth_utilization": served.gpu.bandwidth}
        for key, peak in weights.items():
            used[key] += float(groups[name][key]) * peak * count  # type: ignore[arg-type]
            peaks[key] += peak * count
    prices = [group["dollars_per_hour"] for group in groups.values()]
    price = None if None in prices else sum(prices)  # type: ignore[arg-type]
    tokens = sum(int(group["output_tokens"]) for group in groups.values())  # type: ignore[call-overload]
    return {
        **{key: share(used[key], peaks[key]) for key in used},
        "cluster": {
            "router": _router(result.scenario),
            "gpus": sum(int(group["gpus"]) for group in groups.values()),  # type: ignore[call-overload]
            "dollars_per_hour": price,
            "dollars": None if price is None else price * hours,
            "dollars_per_million_output_tokens": (
                None if price is None else share(price * hours * 1e6, tokens)
            ),
            **_evenness(result),
            "groups": groups,
        },
    }


def _router(scenario: "Scenario") -> str:
    assert scenario.cluster is not None
    spec = scenario.cluster.router
    return spec if isinstance(spec, str) else str(spec["router"])


def _group(
    result: "Result", name: str, numbers: list[int], span: tuple[float, float]
) -> tuple[Values, Served]:
    """Give the figures of one group, and what it serves on."""
    scenario = result.scenario.of_group(name)
    engine, parts = scenario.engine, result.parts_of[numbers[0]]
    logs = [result.logs[number] for number in numbers]
    table = gather_requests(result.workload, result.sent, logs)
    sums = StepSums()
    for log in logs:
        sums.add(log, engine.reserves)
    gauges = gauge(table, logs, sums, span, engine.max_num_seqs)
    cache = engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    dtype = engine.quantization or engine.dtype
    served = Served(parts.model, parts.gpu, engine.tensor_parallel_size, dtype, cache)
    done = table.completed
    tokens = int(table.generated[done].sum())
    price = price_of_group(result.scenario, name)
    values: Values = {
        "replicas": len(numbers),
        "gpu": parts.gpu.name,
        "gpus": scenario.gpu.count * len(numbers),
        "dollars_per_hour": None if price is None else price * len(numbers),
        "profile": parts.cost.name,
        "completed": int(done.sum()),
        "output_tokens": tokens,
        "output_throughput": share(tokens, span[1] - span[0]),
        **{key: gauges[key] for key in GAUGES},
        **utilization(served, table, logs, sums, span[1] - span[0]),
    }
    return values, served


def _evenness(result: "Result") -> Values:
    """Say how the requests were spread: the most that a replica ended, over the mean."""
    ended = np.array([len(log.requests) for log in result.logs])
    busy = np.array([float((log.steps["end"] - log.steps["start"]).sum()) for log in result.logs])
    return {
        "requests_per_replica_min": int(ended.min()),
        "requests_per_replica_max": int(ended.max()),
        "requests_imbalance": share(float(ended.max()), float(ended.mean())),
        "busy_time_imbalance": share(float(busy.max()), float(busy.mean())),
    }
