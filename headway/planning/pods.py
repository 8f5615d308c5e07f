"""A plan for a fleet of pods simulates one of them, at its share of the load."""

import json
from math import isfinite

from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError
from simulator.util.from_mapping import as_plain


def one_pod(scenario: Scenario) -> list[str]:
    """Return the overrides that leave one pod of a cluster; none where it has no pods.

    Arrivals come at a pod at its share of the rate. A random or hashed choice thins them, so that
    their gaps are nearer to exponential; in turn, each gap is a sum of as many as there are pods.
    """
    cluster = scenario.cluster
    if cluster is None or cluster.pods is None:
        return []
    pods, generator = cluster.pods, scenario.workload.generator
    if scenario.workload.trace is not None:
        raise HeadwayError("cluster.pods: a plan simulates one pod, and a trace is not one pod's")
    if cluster.scalers or cluster.failures is not None:
        raise HeadwayError("cluster.pods: a plan simulates one pod, whose replicas are always up")
    given, turns = generator.burstiness, cluster.router_name == "round_robin"
    burstiness = given * pods if turns else 1 / (1 + (1 / given - 1) / pods)
    router = json.dumps(as_plain(cluster.pod_router or "least_outstanding"))
    counts = {f"groups.{name}.replicas": kind.replicas for name, kind in cluster.groups.items()}
    counts = counts or {"replicas": cluster.replicas or 1}
    changed = [f"cluster.{key}={count // pods}" for key, count in counts.items()]
    changed += ["cluster.pods=null", "cluster.pod_router=null", f"cluster.router={router}"]
    told = " of: ".join(filter(None, [f"one of {pods} pods", scenario.description]))
    count = max(generator.num_prompts // pods, 1)
    changed += [f"description={json.dumps(told)}", f"workload.num_prompts={count}"]
    if isfinite(generator.request_rate):
        changed.append(f"workload.request_rate={generator.request_rate / pods!r}")
        changed.append(f"workload.burstiness={burstiness!r}")
    return changed
