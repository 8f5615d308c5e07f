"""Plans that one request alone breaks: no number of replicas holds them, and what would do."""

import warnings
from collections.abc import Iterator, Mapping

from headway.planning.problem import PlanProblem
from headway.planning.runs import requests_of
from headway.planning.theory import Replica, TooSlow, too_slow
from simulator.diagnosis.evidence import known_share
from simulator.diagnosis.feasibility import Traffic
from simulator.models.gpus import GPUS
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError, HeadwayWarning

WIDEST = 8  # GPUs of a replica that is offered


def broken_alone(problem: PlanProblem, scenario: Scenario, keys: Mapping[str, str]) -> str:
    """Say which bound a request alone breaks, and the least change that keeps it; "" if none.

    `keys` are those that the scenario was loaded with, over the problem's. Of groups that share the
    work, pipelines and drafts theory says nothing.
    """
    slow = _alone(problem, scenario)
    if not slow:
        return ""
    least = " and ".join(one.slo.loosened(one.value) for one in slow)
    why = f"{slow[0]}, however many the replicas: alone it needs {least}, under load more"
    for change, words in _changes(scenario):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HeadwayWarning)
                other = load_scenario(
                    problem.path, problem.overrides, vary=({**keys, **change}).items()
                )
                slow = _alone(problem, other)
        except HeadwayError:
            continue
        if not slow:
            return f"{why}; it would do with {words}"
    return why


def _alone(problem: PlanProblem, scenario: Scenario) -> list[TooSlow]:
    """Return what theory says of one request on a replica."""
    cluster, engine = scenario.cluster, scenario.engine
    if cluster is not None and cluster.groups:
        return []
    if engine.pipeline_parallel_size > 1 or engine.speculative_config is not None:
        return []
    parts, traffic = resolve(scenario), Traffic.of(scenario, requests_of(scenario))
    known = 0.0
    if engine.enable_prefix_caching:
        known = known_share(traffic.workload, engine.block_size)
    replica = Replica(engine, parts.model, parts.gpu, parts.cost)
    return too_slow(replica, traffic, problem.criteria.slos, known, scenario.goodput)


def _changes(scenario: Scenario) -> Iterator[tuple[dict[str, str], str]]:
    """Yield keys to try, and their words: more GPUs for a replica, then others, the cheapest first.

    None where the scenario's cost is of the GPU that it has.
    """
    if scenario.cost and scenario.cost.get("kind") != "roofline":
        return
    size, count = scenario.engine.tensor_parallel_size, scenario.gpu.count
    for times in (2, 4, 8):
        if size * times <= WIDEST:
            keys = {
                "engine.tensor_parallel_size": f"{size * times}",
                "gpu.count": f"{count * times}",
            }
            yield keys, f"engine.tensor_parallel_size={size * times}"
    priced = [gpu for gpu in GPUS.values() if gpu.dollars_per_hour]
    for gpu in sorted(priced, key=lambda gpu: gpu.dollars_per_hour or 0.0):
        if gpu.name != scenario.gpu.name:
            yield {"gpu.name": gpu.name}, f"gpu.name={gpu.name}"
