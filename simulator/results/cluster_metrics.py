"""What the summary says of a cluster: by group, how evenly the work fell, and what it cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simulator.core.log import SHED, TIMEOUT
from simulator.models.gpus import find_gpu
from simulator.results.gauges import StepSums, gauge, share
from simulator.results.kv_transfers import link_summary
from simulator.results.record import replicas_in
from simulator.results.tables import gather_requests, run_span
from simulator.results.utilization import Served, utilization

if TYPE_CHECKING:
    from simulator.results.record import ClusterRecord, Record
    from simulator.scenario.parts import Parts
    from simulator.scenario.scenario import Scenario

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


def cluster_summary(result: "Record") -> Values:
    """Give the block `cluster` of the summary, and the utilizations of all groups together."""
    story = result.cluster
    assert story is not None
    table = gather_requests(result.workload, result.sent, result.logs, result.tries)
    span = run_span(table, result.logs)
    found = {
        name: _figures(result, name, numbers, span)
        for name, numbers in replicas_in(story.groups).items()
    }
    logs = story.engine_logs(result)
    ended = np.array([len(log.requests) for log in logs])
    busy = np.array([float((log.steps["end"] - log.steps["start"]).sum()) for log in logs])
    return tell(
        *(result.scenario, story, span, found),
        given_up=(int((table.reason == SHED).sum()), int((table.reason == TIMEOUT).sum())),
        even=evenness(story, ended, busy),
    )


def tell(
    scenario: "Scenario",
    story: "ClusterRecord",
    span: tuple[float, float],
    found: Mapping[str, "Figures"],
    *,
    given_up: tuple[int, int],
    even: Values,
) -> Values:
    """Put together the figures of the groups; `given_up` are requests shed and timed out."""
    groups: dict[str, Values] = {}
    used = {"mfu": 0.0, "bandwidth_utilization": 0.0, "gpu_busy_fraction": 0.0}
    peaks = dict.fromkeys(used, 0.0)
    gpu_hours = 0.0
    for name, numbers in replicas_in(story.groups).items():
        groups[name], served = _group(scenario, story, name, numbers, span, found=found[name])
        engine = scenario.of_group(name).engine
        count = engine.gpus * float(groups[name]["replica_hours"])  # type: ignore[arg-type]
        gpu_hours += count
        flops = served.gpu.flops(served.model.resolve_dtype(served.dtype))
        weights = {"mfu": flops, "bandwidth_utilization": served.gpu.bandwidth}
        weights["gpu_busy_fraction"] = 1.0 / engine.tensor_parallel_size  # by engine core
        for key, peak in weights.items():
            used[key] += float(groups[name][key]) * peak * count  # type: ignore[arg-type]
            peaks[key] += peak * count
    price, dollars = (
        _total([group[key] for group in groups.values()]) for key in ("dollars_per_hour", "dollars")
    )
    hours = _total([group["replica_hours"] for group in groups.values()])
    tokens = sum(int(group["output_tokens"]) for group in groups.values())  # type: ignore[call-overload]
    return {
        **{key: share(used[key], peaks[key]) for key in used},
        "cluster": {
            "router": _router(scenario),
            "gpus": sum(int(group["gpus"]) for group in groups.values()),  # type: ignore[call-overload]
            "dollars_per_hour": price,
            "replica_hours": hours,
            "gpu_hours": gpu_hours,
            "dollars": dollars,
            "dollars_per_million_output_tokens": (
                None if dollars is None or not tokens else dollars * 1e6 / tokens
            ),
            **even,
            **_troubles(story, given_up),
            **_kv_transfer(story, span),
            "groups": groups,
        },
    }


def _total(values: list[object]) -> float | None:
    """Add up, unless one is unknown."""
    return None if None in values else float(sum(values))  # type: ignore[arg-type]


def _troubles(story: "ClusterRecord", given_up: tuple[int, int]) -> Values:
    """Count what came to nothing, and what was done about it."""
    return {"shed": given_up[0], "timed_out": given_up[1], **story.counters}


def _router(scenario: "Scenario") -> str:
    assert scenario.cluster is not None
    spec = scenario.cluster.router
    return spec if isinstance(spec, str) else str(spec["router"])


@dataclass(slots=True)
class Figures:
    """What is measured of a group: gauges and utilizations, its requests and their tokens."""

    gauges: Values
    completed: int
    tokens: int


def served_by(scenario: "Scenario", parts: "Parts") -> Served:
    """Say what an engine serves on."""
    engine = scenario.engine
    cache = engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    sizes = engine.tensor_parallel_size, engine.quantization or engine.dtype, cache
    return Served(parts.model, parts.gpu, *sizes, engine.data_parallel_size)


def _role(scenario: "Scenario", name: str) -> str | None:
    return scenario.cluster.kinds[name].kv_role if scenario.cluster else None


def _figures(result: "Record", name: str, numbers: list[int], span: tuple[float, float]) -> Figures:
    """Measure one group."""
    scenario, story = result.scenario.of_group(name), result.cluster
    assert story is not None
    engine = scenario.engine
    logs = [story.engine_logs(result)[number] for number in numbers]
    table = gather_requests(result.workload, result.sent, logs)
    sums = StepSums()
    for log in logs:
        sums.add(log, engine.reserves)
    served = served_by(scenario, story.parts[numbers[0]])
    gauges = gauge(table, logs, sums, span, engine.max_num_seqs)
    done = table.completed
    tokens = int(table.generated[done].sum())
    role = _role(result.scenario, name)
    if role == "kv_producer":
        tokens = 0  # the token of a prompt goes to nobody
    elif role == "kv_consumer":  # it computes what comes after the prompt, and its last token
        table.cached[done] = table.workload.prompt_tokens[done] - 1
    gauges |= utilization(served, table, logs, sums, span[1] - span[0])
    return Figures(gauges, int(done.sum()), tokens)


def _group(
    whole: "Scenario",
    story: "ClusterRecord",
    name: str,
    numbers: list[int],
    span: tuple[float, float],
    *,
    found: Figures,
) -> tuple[Values, Served]:
    """Give the keys of one group, and what it serves on."""
    scenario, parts = whole.of_group(name), story.parts[numbers[0]]
    served, role = served_by(scenario, parts), _role(whole, name)
    price = price_of_group(whole, name)
    servers = {story.servers[number] for number in numbers}
    paid = sum(story.paid_seconds(server, *span) for server in sorted(servers))
    # A replica that is off at times is idle only while it is paid for.
    shares = {**found.gauges}
    for key in ("gpu_busy_fraction", "mfu", "bandwidth_utilization"):
        values_per_paid = float(shares[key]) * (span[1] - span[0]) * len(servers)  # type: ignore[arg-type]
        shares[key] = share(values_per_paid, paid)
    values: Values = {
        "replicas": len(servers),
        "data_parallel_size": scenario.engine.data_parallel_size,
        "replica_hours": paid / 3600.0,
        "gpu": parts.gpu.name,
        "gpus": scenario.gpu.count * len(servers),
        "dollars_per_hour": None if price is None else price * len(servers),
        "dollars": None if price is None else price * paid / 3600.0,
        "profile": parts.cost.name,
        **({} if role is None else {"kv_role": role}),
        "completed": found.completed,
        "output_tokens": found.tokens,
        "output_throughput": share(found.tokens, span[1] - span[0]),
        **{key: shares[key] for key in GAUGES},
        "mfu": shares["mfu"],
        "bandwidth_utilization": shares["bandwidth_utilization"],
    }
    return values, served


def _kv_transfer(story: "ClusterRecord", span: tuple[float, float]) -> Values:
    """Say what went over the links, where prefill and decode are apart."""
    if story.transfers is None:
        return {}
    producers = story.transfers.producers
    paid = {number: story.paid_seconds(number, *span) for number in producers}
    return {"kv_transfer": link_summary(story.transfers, paid)}


def evenness(
    story: "ClusterRecord", ended: npt.NDArray[np.int64], busy: npt.NDArray[np.float64]
) -> Values:
    """Say how evenly the work fell, by the requests and the busy s of each replica.

    Of the requests, the most that a replica ended, over the mean. Replicas that never were on, as
    an autoscaler may leave some, do not count. Where prefill and decode are apart, the less even of
    the two halves counts.
    """
    on = np.array([bool(story.paid[server]) for server in story.servers])
    halves = [on]
    if story.transfers is not None:
        prompts = np.isin(np.arange(len(ended)), [*story.transfers.producers])
        halves = [on & prompts, on & ~prompts]
    return {
        "requests_per_replica_min": int(ended[on].min()),
        "requests_per_replica_max": int(ended[on].max()),
        **{
            f"{name}_imbalance": max(
                share(float(of[half].max()), float(of[half].mean())) for half in halves
            )
            for name, of in (("requests", ended), ("busy_time", busy))
        },
    }
