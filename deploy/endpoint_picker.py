"""A scenario's router as the configuration of llm-d's endpoint picker (EPP).

Kind EndpointPickerConfig, inference.networking.x-k8s.io/v1alpha1, of the Gateway API Inference
Extension; plugins as in docs/architecture.md of llm-d-inference-scheduler, read in 2026.
"""

from typing import Any

from simulator.scenario.scenario import Scenario

SCORERS = {
    "round_robin": None,
    "random": None,
    "least_outstanding": "active-request-scorer",
    "least_kv": "kv-cache-utilization-scorer",
    "prefix_aware": "prefix-cache-scorer",
    "session_affinity": "session-affinity-scorer",
    "lora_affinity": "lora-affinity-scorer",
}
"""What gives pods their marks; None: nothing does, and one is picked at random."""
LIKE_ANY_OTHER = "queue-scorer"
BESIDE_ADAPTERS = ("queue-scorer", "kv-cache-utilization-scorer")
"""What counts as much as adapters do, where these count."""
PREFIX = "prefix-cache-scorer"

Manifest = dict[str, Any]


def endpoint_picker(scenario: Scenario) -> tuple[Manifest, list[str]]:
    """Return the configuration, and what differs from what was simulated; of clusters only."""
    cluster = scenario.cluster
    assert cluster is not None
    router = cluster.router_name
    scorer = SCORERS.get(router, LIKE_ANY_OTHER)
    notes = []
    if router == "round_robin":
        notes.append("llm-d has no round_robin: pods are picked at random")
    elif router not in SCORERS:
        notes.append(f"llm-d has no {router}: this is {LIKE_ANY_OTHER}, the shortest queue")
    picker = "random-picker" if scorer is None else "max-score-picker"
    weights: list[Manifest] = [{"pluginRef": scorer, "weight": 1}] if scorer else []
    if router == "lora_affinity":
        weights += [{"pluginRef": name, "weight": 1} for name in BESIDE_ADAPTERS]
    if cluster.kv_transfer is not None and scorer != PREFIX:
        # Without marks for prefixes the handler cannot tell which prompts are worth a prefill.
        picker, weights = "max-score-picker", [*weights, {"pluginRef": PREFIX, "weight": 1}]
        notes.append(f"pd-profile-handler needs {PREFIX}, which was not simulated")
    chosen = [{"pluginRef": picker}, *weights]
    handlers, profiles = ["single-profile-handler"], {"default": chosen}
    if cluster.kv_transfer is not None:
        roles = "prefill", "decode"
        profiles = {role: [{"pluginRef": f"{role}-filter"}, *chosen] for role in roles}
        handlers = ["prefill-header-handler", "pd-profile-handler"]
    used = [ref["pluginRef"] for plugins in profiles.values() for ref in plugins]
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [{"type": name} for name in dict.fromkeys([*handlers, *used])],
        "schedulingProfiles": [
            {"name": name, "plugins": plugins} for name, plugins in profiles.items()
        ],
    }, notes
