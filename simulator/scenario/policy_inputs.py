"""What policies read of a workload, and which of it is not there."""

from collections.abc import Iterator

import numpy as np

from simulator.policies.fair import DRR, WFQ, Fair
from simulator.policies.orders import HRRN, SJF, Boost, Priority
from simulator.policies.preemptive import Deadline, Preemptive
from simulator.policies.virtual_finish_time import VirtualFinishTime
from simulator.scenario.policy_table import find_policy, policy_name
from simulator.scenario.scenario import Scenario
from simulator.workload.workload import Workload


def missing_inputs(scenario: Scenario, workload: Workload) -> list[str]:
    """Say, in a line each, what the scenario's policies and admission rules would read in vain.

    A policy without its input serves in order of arrival, or all by the same defaults; the result
    is right, but tells nothing of the policy.
    """
    cluster = scenario.cluster
    found = [line for own in scenario.groups.values() for line in _missing(own, workload)]
    if cluster is not None and cluster.admission is not None:
        urgent = workload.priority is None or not (workload.priority >= 1).any()
        if cluster.admission.shed_from < 1 and urgent:
            found.append(
                "cluster.admission.shed_from: no request has a priority of 1 or more, so none is "
                "refused before max_outstanding"
            )
    return [*dict.fromkeys(found)]


def _missing(scenario: Scenario, workload: Workload) -> Iterator[str]:
    """Look at one engine's policy."""
    cls, arguments = find_policy(scenario)
    name = f"engine.scheduling_policy: {policy_name(cls)}"
    clients = {*(workload.client or ())}
    if issubclass(cls, Priority | Preemptive) and _all_equal(workload):
        yield (
            f"{name}: all requests have the same priority, so they are served in order of "
            "arrival; a trace may have a column `priority`, a generator has `priorities`"
        )
    if issubclass(cls, Fair | WFQ | DRR) and len(clients) < 2:
        yield (
            f"{name}: all requests are of one client, so they are served in order of arrival; a "
            "trace may have a column `client`, and workload.clients draws some"
        )
    if issubclass(cls, Deadline) and not {"ttft", "tpot", "clients"} & {*arguments}:
        yield (
            f"{name}: has no deadlines, neither ttft and tpot nor clients; its defaults hold for "
            "all, 1000 ms to the first token and 50 ms for each further one"
        )
    if (
        issubclass(cls, VirtualFinishTime)
        and scenario.predictor is None
        and workload.max_tokens is None
    ):
        yield (
            f"{name}: knows nothing of the lengths of answers, so prompts alone count; the "
            "scenario may have a `predictor`, requests may have `max_tokens`"
        )
    by_prompt = issubclass(cls, SJF | HRRN | Boost) and arguments.get("by", "prompt") == "prompt"
    if by_prompt and scenario.predictor is not None:
        yield f"predictor: {policy_name(cls)} ranks by the prompt alone; by: hint or total reads it"
    named = arguments.get("weights") or arguments.get("clients")
    if issubclass(cls, Fair | WFQ | DRR | Deadline | VirtualFinishTime) and isinstance(named, dict):
        for client in sorted({str(one) for one in named} - clients):
            yield f"{name}: no request is of client {client!r}"


def _all_equal(workload: Workload) -> bool:
    return workload.priority is None or bool(np.ptp(workload.priority) == 0)
