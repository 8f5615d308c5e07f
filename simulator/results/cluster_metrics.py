"""What the summary says of a cluster: by group, how evenly the work fell, and what it cost."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulator.build.engine_spec import EngineSpec
from simulator.core.log import SHED, TIMEOUT
from simulator.costs.noise import describe_cost
from simulator.models.gpus import find_gpu
from simulator.results.engine_metrics import (
    Energy,
    EngineMetrics,
    Values,
    energy_summary,
    share,
)
from simulator.results.kv_transfers import link_summary
from simulator.results.needed_work import peak_flops
from simulator.results.record import ClusterRecord, PartialRecord, replicas_in
from simulator.results.request_table import RequestTable, gather_requests
from simulator.scenario.scenario import Scenario

GAUGES = (
    "steps",
    "gpu_busy_fraction",
    "host_share",
    "mean_running",
    "max_running",
    "decode_seat_utilization",
    "mean_waiting",
    "max_waiting",
    "kv_cache_usage_mean",
    "kv_cache_usage_max",
    "preemptions",
    "prefix_cache_hit_rate",
)
"""Of those of the whole run, the ones that each group gets, too."""


def price_of_group(scenario: Scenario, name: str) -> float | None:
    """Return the dollars per hour of one replica of a group; None where the price is unknown."""
    given = scenario.servers.replica_groups[name].dollars_per_hour
    if given is not None:
        return given
    gpu = scenario.of_group(name).gpu
    price = find_gpu(gpu.name, gpu.dollars_per_hour).dollars_per_hour
    return None if price is None else price * gpu.count


def price_of_cluster(scenario: Scenario) -> float | None:
    """Return the dollars per hour of all replicas; None where the price of one is unknown."""
    total = 0.0
    for name, kind in scenario.servers.replica_groups.items():
        price = price_of_group(scenario, name)
        if price is None and kind.replicas:
            return None
        total += kind.replicas * (price or 0.0)
    return total


class ClusterMetrics:
    """What the block `cluster` of the summary is made of, added up over the parts of a run."""

    def __init__(
        self,
        scenario: Scenario,
        record: ClusterRecord,
        cores: Sequence[EngineSpec],
        whole: EngineMetrics,
    ) -> None:
        """`whole` has the sums over all replicas: those of a cluster without groups."""
        self._scenario, self._record, self._whole = scenario, record, whole
        self._cluster = scenario.servers
        self._cores = cores
        self._router = self._cluster.router_name
        self._replicas = replicas_in(record.groups)  # numbers of engine cores, by group
        self._groups = {
            name: EngineMetrics(cores[numbers[0]], len(numbers), cores[numbers[0]].role)
            if scenario.servers.groups
            else whole
            for name, numbers in self._replicas.items()
        }
        self._ended = np.zeros(len(record.groups), np.int64)  # requests, by engine core
        self._busy_time = np.zeros(len(record.groups))  # s
        self._shed = self._timed_out = 0
        self.SUMS: tuple[str, ...] = ("_ended", "_busy_time", "_shed", "_timed_out")
        if scenario.servers.groups:
            self.SUMS += ("_groups",)

    def add(self, part: PartialRecord, table: RequestTable, until: Sequence[float]) -> None:
        """Add a part of the run, whose requests are those of the table."""
        logs = part.logs if part.engine_logs is None else part.engine_logs
        for name, group in self._groups.items():
            if group is not self._whole:
                these = [logs[number] for number in self._replicas[name]]
                costs = [self._cores[number].cost for number in self._replicas[name]]
                ends = [until[number] for number in self._replicas[name]]
                group.add(gather_requests(part.workload, part.sent, these), these, costs, ends)
        for number, log in enumerate(logs):
            self._ended[number] += len(log.requests)
            self._busy_time[number] += float((log.steps["end"] - log.steps["start"]).sum())
        self._shed += int((table.reason == SHED).sum())
        self._timed_out += int((table.reason == TIMEOUT).sum())

    def summary(self, span: tuple[float, float]) -> Values:
        """Return the block, and the utilizations of all groups together; `span` is the run's, s."""
        groups: dict[str, Values] = {}
        used = {"mfu": 0.0, "bandwidth_utilization": 0.0, "gpu_busy_fraction": 0.0}
        peaks = dict.fromkeys(used, 0.0)
        gpu_hours = 0.0
        energy: Energy | None = Energy(0.0, 0.0)
        for name, metrics in self._groups.items():
            engine = metrics.spec.engine
            taken = metrics.energy(self._paid(name, span) * engine.data_parallel_size)
            energy = None if energy is None or taken is None else energy + taken
            groups[name] = self._group(name, metrics, span)
            count = engine.gpus * groups[name]["replica_hours"]
            gpu_hours += count
            weights = {
                "mfu": peak_flops(metrics.spec),
                "bandwidth_utilization": metrics.spec.gpu.bandwidth,
                "gpu_busy_fraction": 1.0 / engine.gpus_per_rank,  # by engine core
            }
            for key, peak in weights.items():
                used[key] += groups[name][key] * peak * count
                peaks[key] += peak * count
        links, transfers = None, self._record.transfers
        if transfers is not None:
            paid = sum(self._record.paid_seconds(number, *span) for number in transfers.producers)
            links = link_summary(transfers, paid)
        encodings = self._record.encodings
        if encodings is not None:
            paid = sum(self._record.paid_seconds(number, *span) for number in encodings.links)
            size = self._cores[0].model.output_bytes
        price, dollars, hours, gpus, tokens = (
            _total([group[key] for group in groups.values()])
            for key in ("dollars_per_hour", "dollars", "replica_hours", "gpus", "output_tokens")
        )
        return {
            **{key: share(used[key], peaks[key]) for key in used},
            **energy_summary(energy, span[1] - span[0], tokens or 0.0),
            "cluster": {
                "router": self._router,
                "gpus": int(gpus or 0),
                "dollars_per_hour": price,
                "replica_hours": hours,
                "gpu_hours": gpu_hours,
                "dollars": dollars,
                "dollars_per_million_output_tokens": (
                    None if dollars is None or not tokens else dollars * 1e6 / tokens
                ),
                **self._balance(),
                "shed": self._shed,
                "timed_out": self._timed_out,
                **self._record.counters,
                **self._paid_times(),
                **({} if links is None else {"kv_transfer": links}),
                **({} if encodings is None else {"ec_transfer": encodings.summary(size, paid)}),
                "groups": groups,
            },
        }

    def _group(self, name: str, metrics: EngineMetrics, span: tuple[float, float]) -> Values:
        """Return the keys of one group."""
        spec, numbers, duration = metrics.spec, self._replicas[name], span[1] - span[0]
        price = price_of_group(self._scenario, name)
        servers = sorted({self._record.servers[number] for number in numbers})
        paid = self._paid(name, span)
        gauges = metrics.gauges(duration) | metrics.utilizations(duration)
        # A replica that is off at times is idle only while it is paid for.
        for key in ("gpu_busy_fraction", "mfu", "bandwidth_utilization"):
            gauges[key] = share(gauges[key] * duration * len(servers), paid)
        role, tokens = metrics.kv_role, metrics.requests.generated
        if role == "kv_producer":
            tokens = 0  # the token of a prompt goes to nobody
        return {
            "replicas": len(servers),
            "data_parallel_size": spec.engine.data_parallel_size,
            "replica_hours": paid / 3600.0,
            "gpu": spec.gpu.name,
            "gpus": spec.engine.gpus * len(servers),
            "dollars_per_hour": None if price is None else price * len(servers),
            "dollars": None if price is None else price * paid / 3600.0,
            **describe_cost(spec.cost),
            **({} if role is None else {f"{role[:2]}_role": role}),
            "completed": metrics.requests.completed,
            "output_tokens": tokens,
            "output_throughput": share(tokens, duration),
            **{key: gauges[key] for key in (*GAUGES, "mfu", "bandwidth_utilization")},
        }

    def _paid(self, name: str, span: tuple[float, float]) -> float:
        """Add up the s for which the servers of a group are paid."""
        servers = {self._record.servers[number] for number in self._replicas[name]}
        return sum(self._record.paid_seconds(server, *span) for server in sorted(servers))

    def _balance(self) -> Values:
        """Say how evenly the work fell, by the requests and the busy s of each replica.

        Of the requests, the most that a replica ended, over the mean. Replicas that never were on,
        as an autoscaler may leave some, do not count. Where prefill and decode are apart, the less
        even of the two counts. Encoders for others have no requests, and do not count.
        """
        record, ended = self._record, self._ended
        on = np.array([bool(record.paid[server]) for server in record.servers])
        if record.encodings is not None:
            on &= ~np.isin(np.arange(len(ended)), [*record.encodings.links])
        stages = [on]
        if record.transfers is not None:
            prompts = np.isin(np.arange(len(ended)), [*record.transfers.producers])
            stages = [on & prompts, on & ~prompts]
        return {
            "requests_per_replica_min": int(ended[on].min()),
            "requests_per_replica_max": int(ended[on].max()),
            **{
                f"{name}_imbalance": max(
                    share(float(of[stage].max()), float(of[stage].mean())) for stage in stages
                )
                for name, of in (("requests", ended), ("busy_time", self._busy_time))
            },
        }

    def _paid_times(self) -> Values:
        """Say from when to when each engine was paid for, if any was not from the start on."""
        paid = [[*map(float, self._record.paid[server])] for server in self._record.servers]
        if all(times == [0.0] for times in paid):
            return {}
        ends = ([*times[1::2], None][: (len(times) + 1) // 2] for times in paid)
        return {
            "paid_times": [
                [[start, end] for start, end in zip(times[::2], over, strict=True)]
                for times, over in zip(paid, ends, strict=True)
            ]
        }


def _total(values: Sequence[Any]) -> float | None:
    """Add up, unless one is unknown."""
    return None if None in values else float(sum(values))
