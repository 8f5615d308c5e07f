"""From a scenario to a result: the main verb of the package."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from simulator.build.assemble_scheduler import make_scheduler
from simulator.build.engine_spec import EngineSpec
from simulator.build.policy_table import missing_inputs
from simulator.core.alarm import FastEnvironment
from simulator.core.executor import CanLeap
from simulator.core.log import REJECTED, UNFINISHED, Log
from simulator.costs.cost_model import CostModel
from simulator.costs.noise import Errors
from simulator.engine.client import Client, Turns
from simulator.engine.core import EngineCore
from simulator.engine.replica import Replica, make_replica
from simulator.results.record import replicas_in
from simulator.results.service_levels import need_parts, service_levels
from simulator.scenario.draw import make_workload
from simulator.scenario.resolve import resolve_groups
from simulator.scenario.scenario import Scenario
from simulator.simulation.result import Result
from simulator.simulation.setup import AnyClient, MakeClient, Progress, Setup, before
from simulator.util.errors import HeadwayError, HeadwayWarning, MappingError
from simulator.util.user_code import blaming
from simulator.workload.unused import over_limits
from simulator.workload.workload import Floats, Workload

if TYPE_CHECKING:
    from simulator.cluster.fleet import Sessions

Stop = Callable[[Floats, Sequence[Log]], bool]
"""Told when each request was sent (s; NaN: not yet) and the logs so far: is the run to end now?"""


def run(
    scenario: Scenario,
    *,
    stepwise: bool = False,
    progress: Progress | None = None,
    workload: Workload | None = None,
    cost: CostModel | None = None,
    noise: Errors | None = None,
    stop: Stop | None = None,
) -> Result:
    """Simulate a scenario, or what `load_scenario` makes one of: a file, a name, a dict.

    `stepwise` executes every step by itself, for the same result. `workload` and `cost` take the
    place of the scenario's, `cost` for all replicas; `noise` makes of a cost model one that is off
    in this run. `progress(simulated seconds, requests done, requests in all)` is called now and
    then, and so is `stop`, but where prefill and decode are apart. Where that says so, and at an
    interrupt (Ctrl-C), the run ends early: the result then holds what was done until then. Raises
    ValueError, `field: what is wrong`, where the scenario contradicts itself, and HeadwayError
    where a file is at fault.
    """
    given = [key for key, own in (("cost", cost), ("workload", workload)) if own is not None]
    workload = make_workload(scenario) if workload is None else _checked(workload)
    need_parts(service_levels(scenario), scenario, workload)
    specs = {name: spec.with_cost(cost, noise) for name, spec in resolve_groups(scenario).items()}
    leap = not stepwise and (cost is None or type(cost).leap is not CanLeap.leap)
    if scenario.cluster is not None:
        from simulator.simulation.independent import find_coupling, run_independent

        if find_coupling(scenario, workload) is None:
            what = scenario, specs, workload, leap
            with blaming(spec.policy for spec in specs.values()):
                result = warn(run_independent(*what, progress=progress, stop=stop))
            result.given = given
            return result
    turns = None if workload.after is None else Turns(workload)
    shares, make = workload.segments is not None, _client(scenario, workload, turns)
    setup = set_up(scenario, specs, shares, make, turns, leap=leap)
    result = _finish(scenario, workload, setup, progress, stop)
    result.given = given
    return result


def _checked(workload: Workload) -> Workload:
    """Return a workload that was given; HeadwayError where it is none that can be run."""
    if not isinstance(workload, Workload):
        raise HeadwayError(f"workload: must be a Workload, not a {type(workload).__name__}")
    try:
        workload.check()
    except MappingError as error:
        raise HeadwayError(f"workload.{error}") from None
    return workload


def set_up(
    scenario: Scenario,
    specs: Mapping[str, EngineSpec],
    shares: bool,
    make: MakeClient[AnyClient],
    sessions: "Sessions | None" = None,
    *,
    leap: bool,
) -> Setup[AnyClient]:
    """Put a client before the engine of a scenario, or before its cluster.

    `shares` says that prompts have contents.
    """
    if scenario.cluster is not None:
        from simulator.simulation.cluster import set_up_cluster

        return set_up_cluster(scenario, specs, shares, make, sessions, leap=leap)
    spec = specs[""]
    scheduler = make_scheduler(spec, shares)
    replica = make_replica(FastEnvironment(), scheduler, spec.cost, leap=leap)
    return before(replica, spec, make)


def spread_cluster(
    scenario: Scenario,
    *,
    stepwise: bool = False,
    progress: Progress | None = None,
    workload: Workload | None = None,
    jobs: int | None = None,
) -> Result:
    """Simulate a cluster by replica on joblib's active backend, with `jobs` workers.

    The result is that of `run`. Raises HeadwayError where the replicas are tied together.
    """
    from simulator.simulation.independent import need_no_coupling, run_independent

    workload = make_workload(scenario) if workload is None else workload
    need_parts(service_levels(scenario), scenario, workload)
    need_no_coupling(scenario, workload)
    what = scenario, resolve_groups(scenario), workload, not stepwise
    return warn(run_independent(*what, progress=progress, spread=True, jobs=jobs))


def play(
    scenario: Scenario,
    spec: EngineSpec,
    workload: Workload,
    replica: Replica,
    progress: Progress | None = None,
) -> Result:
    """Send a workload to a replica, whatever its clock and its executor, until all is done."""
    setup = before(replica, spec, _client(scenario, workload))
    return _finish(scenario, workload, setup, progress)


def _client(
    scenario: Scenario, workload: Workload, turns: Turns | None = None
) -> MakeClient[Client]:
    """Return what makes the client of a workload."""
    predictor = None
    if scenario.predictor is not None:
        from simulator.policies.predictor import make_predictor

        predictor = make_predictor(scenario.predictor, workload, scenario.seed)
    return lambda env, submit, cancel: Client(env, workload, submit, predictor, cancel, turns=turns)


def _finish(
    scenario: Scenario,
    workload: Workload,
    setup: Setup[Client],
    progress: Progress | None,
    stop: Stop | None = None,
) -> Result:
    """Let all requests be served, and put down what happened."""
    client, cores = setup.client, setup.cores
    result = Result(scenario, workload, np.frombuffer(client.sent), setup.logs, setup.specs)
    ends = None if stop is None or setup.apart else partial(stop, result.sent, result.logs)
    with blaming(spec.policy for spec in result.specs.values()):
        result.interrupted = setup.drive(progress, ends, [] if setup.rewrites else result.logs)
    if result.interrupted:
        setup.abandon()
    for sent in client.hung_up:
        request = sent
        while request.again is not None:
            request = request.again
        cores[0].log.record(request, UNFINISHED, request.received, request.first_token)
    for core in cores:
        core.final_log()
    if client.hints is not None:
        result.hints = np.frombuffer(client.hints, np.int64)
    if setup.fleet is not None:
        from simulator.simulation.cluster import add_record

        add_record(result, setup)
    return warn(result, setup.missed, cores)


def warn(result: Result, missed: Sequence[str] = (), cores: Sequence[EngineCore] = ()) -> Result:
    """Say, once for each kind of replica, what cannot be trusted, and which outages it `missed`."""
    for message in dict.fromkeys([*missed, *_warnings(result, cores)]):
        result.warnings.append(message)
        warnings.warn(message, HeadwayWarning, stacklevel=4)
    return result


def _warnings(result: Result, cores: Sequence[EngineCore]) -> Iterator[str]:
    record, admission = result.cluster, result.scenario.servers.admission
    yield from missing_inputs(result.specs.values(), result.workload, admission)
    yield from _all_rejected(result, cores)
    for name, numbers in ({"": [0]} if record is None else replicas_in(record.groups)).items():
        yield from result.specs[name].cost.range_warnings(*(result.logs[k].steps for k in numbers))


def _all_rejected(result: Result, cores: Sequence[EngineCore]) -> Iterator[str]:
    """Say why, where not one request could be served."""
    rejected = [log.requests[log.requests["reason"] == REJECTED] for log in result.logs]
    count, load = sum(map(len, rejected)), result.workload
    if not count or count < len(load):
        return
    why = "no replica has room for them"
    doors = [core.door for core in cores[:1] if core.door is not None]
    if any(any(door.refusals.values()) for door in doors):
        why = cores[0].limits
    elif len(cores) == 1:
        core = cores[0]
        longest, room = core.scheduler.max_model_len, core.scheduler.room
        long = int((load.prompt_tokens[rejected[0]["id"]] >= longest).sum())
        over, said = over_limits(load, result.scenario.engine)
        left = max(count - long - over, 0)
        reasons = {
            f"{long:,} with prompts of max_model_len ({longest:,}) tokens or more": long,
            said: over,
            f"{left:,} too large for {room}": left,
        }
        why = ", ".join(reason for reason, requests in reasons.items() if requests)
    yield f"all {count:,} requests were rejected: {why}"
