"""From a scenario to a result: the main verb of the package."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from simulator.core.alarm import FastEnvironment
from simulator.core.log import REJECTED, Log
from simulator.costs.cost_model import CostModel
from simulator.costs.noise import Errors
from simulator.engine.client import Client
from simulator.engine.drive import drive
from simulator.engine.pipeline import make_replica
from simulator.engine.replica import Replica
from simulator.results.service_levels import need_parts, service_levels
from simulator.scenario.assemble_scheduler import make_scheduler
from simulator.scenario.engine_spec import EngineSpec
from simulator.scenario.load import Source, as_scenario
from simulator.scenario.policy_table import missing_inputs
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.simulation.result import Result
from simulator.util.errors import HeadwayWarning
from simulator.util.user_code import user_error
from simulator.workload.workload import Floats, Workload

Stop = Callable[[Floats, Sequence[Log]], bool]
"""Told when each request was sent (s; NaN: not yet) and the logs so far: is the run to end now?"""


def run(
    scenario: Scenario | Source,
    *,
    stepwise: bool = False,
    progress: Callable[[float, int, int], None] | None = None,
    workload: Workload | None = None,
    cost: CostModel | None = None,
    noise: Errors | None = None,
    stop: Stop | None = None,
) -> Result:
    """Simulate a scenario, or what `load_scenario` makes one of: a file, a name, a dict.

    `stepwise` executes every step by itself, for the same result. `workload` and `cost` take the
    place of the scenario's; `noise` makes of a cost model one that is off in this run.
    `progress(simulated seconds, requests done, requests in all)` is called now and then, and so is
    `stop`. Where that says so, and at an interrupt (Ctrl-C), the run ends early: the result then
    holds what was done until then. Raises ValueError, `field: what is wrong`, where the scenario
    contradicts itself, and HeadwayError where a file is at fault.
    """
    scenario = as_scenario(scenario)
    if workload is None:
        workload = scenario.make_workload()
    else:
        workload.check()
    need_parts(service_levels(scenario), scenario, workload)
    if scenario.cluster is not None:
        from simulator.simulation.cluster import run_cluster

        return run_cluster(
            scenario,
            stepwise=stepwise,
            progress=progress,
            workload=workload,
            cost=cost,
            noise=noise,
            stop=stop,
        )
    spec = resolve(scenario).with_cost(cost, noise)
    scheduler = make_scheduler(spec, workload.segments is not None)
    replica = make_replica(FastEnvironment(), scheduler, spec.cost, leap=not stepwise)
    try:
        return play(scenario, spec, workload, replica, progress, stop=stop)
    except Exception as error:
        told = user_error(spec.policy, error)
        if told is None:
            raise
        raise told from error


def play(
    scenario: Scenario,
    spec: EngineSpec,
    workload: Workload,
    replica: Replica,
    progress: Callable[[float, int, int], None] | None = None,
    *,
    stop: Stop | None = None,
) -> Result:
    """Send a workload to a replica, whatever its clock and its executor, until all is done."""
    env = replica.env
    predictor = None
    if scenario.predictor is not None:
        from simulator.policies.predictor import make_predictor

        predictor = make_predictor(scenario.predictor, workload, scenario.seed)
    cancel = replica.cancel if replica.scheduler.traits.cancels else None
    client = Client(env, workload, replica.submit, predictor, cancel)
    replica.on_finish = client.finished
    ends = None if stop is None else partial(stop, np.frombuffer(client.sent), [replica.log])
    interrupted = drive(env, client, progress, ends, [replica.log])
    if interrupted:
        replica.abandon()
    replica.log.record_hung_up(client.hung_up)
    sent, logs = np.frombuffer(client.sent), [replica.final_log()]
    result = Result(scenario, workload, sent, logs, {"": spec}, interrupted)
    if client.hints is not None:
        result.hints = np.frombuffer(client.hints, np.int64)
    for message in (
        *missing_inputs([spec], workload),
        *_all_rejected(result, replica),
        *spec.cost.range_warnings(replica.log.steps),
    ):
        result.warnings.append(message)
        warnings.warn(message, HeadwayWarning, stacklevel=2)
    return result


def _all_rejected(result: Result, replica: Replica) -> list[str]:
    """Say why, where not one request could be served."""
    ended, load = replica.log.requests, result.workload
    if not len(ended) or not (ended["reason"] == REJECTED).all():
        return []
    if (door := replica.door) is not None and sum(door.refusals.values()) == len(ended):
        return [f"all {len(ended):,} requests were rejected: {replica.limits}"]
    longest, room = replica.scheduler.max_model_len, replica.scheduler.room
    long = int((load.prompt_tokens[ended["id"]] >= longest).sum())
    large = len(ended) - long
    reasons = [
        f"{long:,} with prompts of max_model_len ({longest:,}) tokens or more" if long else "",
        f"{large:,} too large for {room}" if large else "",
    ]
    return [f"all {len(ended):,} requests were rejected: {', '.join(filter(None, reasons))}"]
