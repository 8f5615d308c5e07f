"""The knobs of the studio's page: what each sets in the scenario, and which values it may have.

What a page sends is checked against this table; nothing else reaches a scenario.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isinf
from typing import Any

from simulator.build.policy_table import POLICIES
from simulator.cluster.cluster_config import ClusterConfig
from simulator.cluster.routers import ROUTERS
from simulator.models.gpus import GPUS, find_gpu
from simulator.models.load import shipped_models
from simulator.results.service_levels import Slo, parse_slo
from simulator.scenario.draw import make_workload
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError
from simulator.workload.workload import Workload

Value = float | int | str

RATES = (0.1, 0.2, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 50)
SCALES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 10)
POWERS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SEATS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
MEMORY = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.98)
PREFIXES = (0, 64, 128, 256, 512, 1024, 2048, 4096)
AT_ONCE, NO_BOUND, ALL = "all at once", "none", "all requests"
"""What a slider says where the scenario has no number."""
BOUNDS = (20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 700, 1000, 1500, 2000, 3000, 5000, 10000)


HARDWARE = ("model", "gpu", "gpus")
KEYS = {
    "rate_scale": "workload.trace.rate_scale",
    "rate": "workload.request_rate",
    "prefix": "workload.prefix_len",
    "model": "model",
    "gpu": "gpu.name",
    "gpus": "engine.tensor_parallel_size",
    "tokens": "engine.max_num_batched_tokens",
    "seats": "engine.max_num_seqs",
    "policy": "engine.scheduling_policy",
    "memory": "engine.gpu_memory_utilization",
    "replicas": "cluster.replicas",
    "router": "cluster.router",
    "ttft": "goodput.ttft",
    "tpot": "goodput.tpot",
    "whose": "slo",
}
"""What each knob sets."""
SIZES = ("tokens", "seats")
"""Knobs that are the engine's defaults again where the model or the GPU is another."""
MOST_PARTS = 8  # clients, and priorities, in the menu


@dataclass(frozen=True, slots=True)
class Knob:
    """One control: a slider over numbers, and maybe a word at an end, or a menu of words."""

    name: str
    label: str
    value: Value  # of the scenario
    values: Sequence[Value]
    menu: bool = False
    notes: Sequence[str] = ()  # what a menu says behind each value
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By key the scenario's service levels, where it bounds one of these, not each request."""

    def takes(self, value: object) -> bool:
        """Say whether it may be set to a value: of a slider to any between its ends, too."""
        numbers = [one for one in self.values if not isinstance(one, str)]
        whole = all(isinstance(one, int) for one in numbers)
        if self.menu or isinstance(value, bool | str) or not isinstance(value, int | float):
            return not isinstance(value, bool) and value in self.values
        return min(numbers) <= value <= max(numbers) and (isinstance(value, int) or not whole)


def knobs_of(scenario: Scenario, requests: Workload | None = None) -> list[Knob]:
    """Return the knobs of a scenario, each at what it says; None: its requests are read here."""
    engine, gpu = scenario.engine, scenario.gpu
    cluster = scenario.cluster
    router = (cluster or ClusterConfig()).router_name
    load = scenario.workload
    found: list[Knob] = []
    if load.trace is not None:
        scale = load.trace.rate_scale
        found.append(_slider("rate_scale", "Traffic, times the trace's", scale, SCALES))
    else:
        rate = float(getattr(load.generator, "request_rate", 1.0))
        if isinf(rate):
            found.append(Knob("rate", "Requests/s", AT_ONCE, (*RATES, AT_ONCE)))
        else:
            found.append(_slider("rate", "Requests/s", rate, RATES))
        prefix = int(getattr(load.generator, "prefix_len", 0))
        found.append(_slider("prefix", "Prefix that all prompts share, tokens", prefix, PREFIXES))
    replicas = 1 if cluster is None else cluster.replicas
    found += [
        _menu("model", "Model", str(scenario.model), shipped_models()),
        _gpus(gpu.name),
        _slider("gpus", "GPUs of a replica", engine.tensor_parallel_size, (1, 2, 4, 8)),
        _slider("tokens", "max_num_batched_tokens", engine.max_num_batched_tokens or 2048, POWERS),
        _slider("seats", "max_num_seqs", engine.max_num_seqs or 256, SEATS),
        _menu("policy", "Scheduling policy", engine.policy_name, list(POLICIES)),
        _slider("memory", "gpu_memory_utilization", engine.gpu_memory_utilization, MEMORY),
        _slider("replicas", "Replicas", replicas or 1, (1, 2, 3, 4, 6, 8, 12, 16)),
        _menu("router", "Router", router, list(ROUTERS)),
        _bound("ttft", scenario),
        _bound("tpot", scenario),
    ]
    if len(parts := _parts(requests or make_workload(scenario))) > 1:
        found.append(_menu("whose", "Whose SLO: 99 % of", ALL, [ALL, *parts]))
    return found


def _parts(load: Workload) -> list[str]:
    """Name the clients and priorities of the requests, those with the most requests first."""
    found = []
    for kind, values in (("client", load.client), ("priority", load.priority)):
        counted = Counter(map(str, () if values is None else values)).most_common(MOST_PARTS)
        names = [name for name, _ in counted if name and not re.search(r"[\s:<>=]", name)]
        found += [f"{kind} {name}" for name in names] if len(names) > 1 else []
    return found


def own_sizes(scenario: Scenario) -> dict[str, int]:
    """Return what the SIZES are in a scenario: the engine's defaults where none is given."""
    engine = scenario.engine
    return {"tokens": engine.most_tokens, "seats": engine.most_running}


def _gpus(name: str) -> Knob:
    """Make the menu of GPUs, each with its list price."""
    knob = _menu("gpu", "GPU", name, list(GPUS))
    prices = (find_gpu(str(value)).dollars_per_hour for value in knob.values)
    notes = ["no list price" if price is None else f"${price:.2f}/h" for price in prices]
    return replace(knob, notes=notes)


def _bound(latency: str, scenario: Scenario) -> Knob:
    """Make the slider of a service level, which a scenario may be without.

    Where it has levels, and none of them is on goodput, it is the first on this latency.
    """
    block = scenario.plan.slo or scenario.slo
    slos = [parse_slo(text) for text in block]
    if not block or any(slo.name == "goodput" for slo in slos):
        value, statistic, levels = getattr(scenario.goodput, latency), "", {}
    else:
        level = next((slo for slo in slos if _turns(slo, latency)), None)
        value, statistic = None if level is None else level.bound, _statistic(level)
        levels = {"slo": block} | ({"plan.slo": block} if scenario.plan.slo else {})
    own = BOUNDS if value is None else sorted({*BOUNDS, value})
    label = f"SLO: {statistic}{latency.upper()}, ms"
    return Knob(
        latency, label, NO_BOUND if value is None else value, (NO_BOUND, *own), levels=levels
    )


def _turns(slo: Slo, latency: str) -> bool:
    return slo.latency == latency and not slo.part


def _statistic(level: Slo | None) -> str:
    """Name the statistic that a knob bounds, the P99 where there is no level yet."""
    return f"{'p99' if level is None else level.metric.partition('_')[0]} ".capitalize()


def _slider(name: str, label: str, value: float, values: Sequence[float]) -> Knob:
    return Knob(name, label, value, sorted({*values, value}))


def _menu(name: str, label: str, value: str, values: Sequence[str]) -> Knob:
    return Knob(name, label, value, list(dict.fromkeys([value, *values])), menu=True)


def _relevelled(levels: Sequence[str], bounds: Mapping[str, Value]) -> list[str]:
    """Return service levels with the bounds of some latencies, ms, in place of their own."""
    found, left = [], dict(bounds)
    for text in levels:
        slo = parse_slo(text)
        latency = next((name for name in left if _turns(slo, name)), None)
        bound = None if latency is None else left.pop(latency)
        if bound is None or bound != NO_BOUND:
            found.append(text if bound is None else slo._replace(bound=float(bound)).text)
    return found + [f"p99_{name}_ms<={bound}" for name, bound in left.items() if bound != NO_BOUND]


def overrides(knobs: Sequence[Knob], given: object) -> list[str]:
    """Return the settings, `dotted.key=value`, for the knobs that a page has turned.

    `given` is from outside: raises HeadwayError for what is no knob, or a value that it lacks.
    """
    if not isinstance(given, Mapping):
        raise HeadwayError("knobs: is no mapping of names to values")
    known = {knob.name: knob for knob in knobs}
    turned: dict[str, Value] = {}
    for name, value in given.items():
        knob = known.get(name)
        if knob is None:
            raise HeadwayError(f"knobs: there is no {str(name)[:40]!r}")
        if not knob.takes(value):
            numbers = [one for one in knob.values if not isinstance(one, str)]
            ends = f"from {min(numbers)} to {max(numbers)}" if numbers else "one of its values"
            raise HeadwayError(f"knobs.{name}: {str(value)[:40]!r} is not {ends}")
        turned[name] = value
    other = any(turned[name] != known[name].value for name in HARDWARE if name in turned)
    turned = {k: v for k, v in turned.items() if v != known[k].value or (other and k in SIZES)}
    whose = turned.pop("whose", ALL)
    bounds = {k: turned.get(k, known[k].value) for k in ("ttft", "tpot")}
    levels = known["ttft"].levels
    turned_levels = {k: turned.pop(k) for k in bounds if k in turned and levels}
    found: list[tuple[str, Any]] = [
        (KEYS[name], None if value == NO_BOUND else value) for name, value in turned.items()
    ]
    if whose != ALL:
        slo = [f"{whose}: p99_{k}_ms<={v}" for k, v in bounds.items() if v != NO_BOUND]
        found += [(key, slo) for key in levels or ("slo",) if slo]
    elif turned_levels:
        found += [(key, _relevelled(own, turned_levels)) for key, own in levels.items()]
    if other:
        found += [(KEYS[name], None) for name in SIZES if name not in turned]
    if "gpus" in turned:
        found.append(("gpu.count", turned["gpus"]))
    if "prefix" in turned:
        found.append(("engine.enable_prefix_caching", True))
    if other:  # the profile is of other hardware
        found.append(("cost", None))
    return [f"{key}={json.dumps(value)}" for key, value in found]
