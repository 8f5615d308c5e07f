"""How near a load is to the most that an engine serves, and what an error of step times does there.

By theory, without another simulation. A replica in balance that holds d decodes serves as many
requests/s as `theory.most_requests` says of d seats; the load decides d, and by Little's law a
request takes d / rate. If every step takes 1 % longer, the same load needs the d of a rate 1 %
higher: the time moves by d ln d / d ln rate percent. That is 1 where a step's time does not depend
on the batch, and grows without bound towards saturation.

What requests have waited for a seat, or its blocks, moves further. By Sakasegawa ("An approximation
formula Lq = alpha rho^beta / (1 - rho)", 1977) the queue before c seats grows with the load rho as
rho ** sqrt(2 (c + 1)) / (1 - rho), so the wait by sqrt(2 (c + 1)) + rho / (1 - rho) percent.
"""

from bisect import bisect_left
from collections.abc import Callable
from math import inf, log, sqrt
from typing import NamedTuple

import numpy as np

from headway.planning.theory import Replica, batch_sizes, most_requests
from simulator.diagnosis.evidence import KV_BLOCKS, MAX_NUM_SEQS, Evidence
from simulator.diagnosis.feasibility import Traffic
from simulator.results.request_table import COMPLETED
from simulator.results.service_levels import moved
from simulator.results.steady_state import MIN_REQUESTS
from simulator.scenario.scenario import Scenario
from simulator.schedulers.continuous_batching import ContinuousBatching
from simulator.schedulers.static import Static
from simulator.schedulers.trtllm import MAX_UTILIZATION
from simulator.simulation.result import Result
from simulator.simulation.write import check_span
from simulator.workload.workload import Workload

POINTS = 24  # numbers of decodes at which the rate is looked up
CALM = 0.5  # share of saturation up to which nobody waits for seats
FULL = 0.999  # of the most requests/s: so many seats are those that bound it


class Knee(NamedTuple):
    """Where a load sits."""

    saturation_throughput: float  # the most requests/s of all replicas
    share: float  # of it that comes
    e2el_elasticity: float  # % of mean E2EL for 1 % of step time; inf: beyond saturation

    def as_summary(self) -> dict[str, float | None]:
        """Return what `summary.json` has of it."""
        return {key: value if value < inf else None for key, value in self._asdict().items()}


class _Load(NamedTuple):
    """A load on replicas that are all alike, each with the same share of it."""

    replica: Replica
    traffic: Traffic
    replicas: int
    known: float  # share of the prompt tokens that prefix caches knew

    def rate(self, seats: int) -> float:
        """Return the most requests/s of a replica that decodes so many at once."""
        tokens = self.replica.engine.most_tokens
        return most_requests(self.replica, self.traffic, (), self.known, sizes=(tokens, seats))

    def find(self, waited: Callable[[], float]) -> Knee | None:
        """Return where it sits; None where theory has no rate.

        `waited` tells what share of their time requests waited for seats and blocks.
        """
        sizes = batch_sizes(self.replica.engine.most_running, POINTS)
        most, asked = self.rate(sizes[-1]), self.traffic.rate / self.replicas
        if not most:
            return None
        share = asked / most
        if share >= 1:
            return Knee(most * self.replicas, share, inf)
        above = bisect_left(sizes, asked, key=self.rate)  # which grows with the seats
        low, high = sizes[max(above - 1, 0)], sizes[min(max(above, 1), len(sizes) - 1)]
        moved = log(self.rate(high) / few) if (few := self.rate(low)) else 0.0
        elasticity = max(log(high / low) / moved, 1.0) if moved > 0 else 1.0
        if share > CALM:
            bound = sizes[bisect_left(sizes, FULL * most, key=self.rate)]
            of_waits = sqrt(2 * (bound + 1)) + share / (1 - share)
            elasticity += waited() * max(of_waits - elasticity, 0.0)
        return Knee(most * self.replicas, share, elasticity)


def add_load(result: Result) -> None:
    """Put into a run's summary how near its load is to saturation, and what levels do there."""
    check_span(result)
    if result.summary()["completed"] and (knee := find_knee(result)) is not None:
        own = result.summary()["headway"]
        own["load"] = knee.as_summary()
        for one in own.get("slo") or ():
            one.update(moved(one, knee.e2el_elasticity))


def find_knee(result: Result, *, recorded: bool = False) -> Knee | None:
    """Return where a run's load sits; that of a `recorded` load by its arrivals.

    None where no one rate is given (closed loops, days, few requests), or where theory says
    nothing: replicas of several kinds, or whose number changes; pipelines, ranks that share
    experts, speculative decoding, static batches.
    """
    scenario, spec = result.scenario, result.spec
    if len(result.workload) < MIN_REQUESTS or issubclass(spec.policy, Static):
        return None
    traffic = Traffic.of(scenario, result.workload)
    if recorded:
        traffic = Traffic(result.workload, _arrival_rate(result.workload))
    changes = scenario.workload.generator.diurnal is not None and not recorded
    if not _is_plain(scenario) or changes or spec.cost.joint is not None or not traffic.rate:
        return None
    replicas = (scenario.cluster.replicas if scenario.cluster else None) or 1
    known = _known_share(result)
    # Whatever seats are asked for, the KV cache stays as it is.
    engine = spec.engine.model_copy(update={"num_gpu_blocks_override": spec.num_gpu_blocks})
    if kept := _reserved(result):
        fit = int(spec.num_gpu_blocks * engine.block_size / kept)
        engine = engine.model_copy(update={"max_num_seqs": max(min(engine.max_num_seqs, fit), 1)})
    replica = Replica(engine, spec.model, spec.gpu, spec.cost)
    load = _Load(replica, traffic, replicas * spec.engine.data_parallel_size, known)
    return load.find(lambda: _waited(result))


def _reserved(result: Result) -> float:
    """Return the tokens for which a request keeps room, on average; 0 where it takes no more."""
    spec, load = result.spec, result.workload
    policy, given = spec.policy, spec.engine.scheduling_policy.arguments
    evicts = given.get("capacity_scheduler_policy") == MAX_UTILIZATION
    if not issubclass(policy, ContinuousBatching) or not policy.reserves or evicts:
        return 0.0
    most = given.get("max_new_tokens") or spec.max_model_len
    if most == "exact":
        most = load.output_tokens
    elif load.max_tokens is not None:
        most = np.where(load.max_tokens > 0, load.max_tokens, most)
    return float(np.minimum(load.prompt_tokens + most, spec.max_model_len).mean())


def _waited(result: Result) -> float:
    """Return the share of their time that requests waited for seats and blocks."""
    shares = Evidence(result, result.summary()).wait_shares
    return shares[MAX_NUM_SEQS] + shares[KV_BLOCKS]


def _is_plain(scenario: Scenario) -> bool:
    """Return whether all replicas are alike and there from first to last."""
    cluster, engine = scenario.cluster, next(iter(scenario.groups.values())).engine
    if cluster is not None and (cluster.groups or cluster.autoscaling):
        return False
    return engine.pipeline_parallel_size == 1 and engine.speculative_config is None


def _arrival_rate(workload: Workload) -> float:
    """Return the requests/s that come; 0 where some wait for others, or all come at once."""
    arrival = workload.arrival
    if workload.max_concurrency is not None or np.isnan(arrival).any():
        return 0.0
    span = float(arrival.max() - arrival.min())
    return len(arrival) / span if span else 0.0


def _known_share(result: Result) -> float:
    """Return the share of the prompt tokens that were found in prefix caches."""
    cached = prompts = 0
    for rows in (each.requests for each in result.logs):
        done = np.isin(rows["reason"], COMPLETED)
        cached += int(rows["cached"][done].sum())
        prompts += int(result.workload.prompt_tokens[rows["id"][done]].sum())
    return cached / prompts if prompts else 0.0
