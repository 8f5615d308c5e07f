"""A scenario's fleet as files that deploy the like: `vllm serve`, Kubernetes, llm-d's Helm values.

The manifests are Kubernetes' own (apps/v1, v1, autoscaling/v2). The values are those of the chart
llm-d-modelservice 0.4.0 (`values.yaml`), read in 2026. Metrics have vLLM's names.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from headway.report.vllm_serve import (
    comment,
    environment,
    model_argument,
    remarks,
    serve_command,
    serve_options,
    warn_of_lost_policies,
)
from simulator.build.engines import release_of
from simulator.build.settle import resolve_model
from simulator.cluster.config import AutoscalingConfig
from simulator.models.gpus import GIB, find_gpu
from simulator.scenario.scenario import Scenario
from simulator.schedulers.vllm.rules import write_release
from simulator.util.errors import HeadwayError
from simulator.util.files import write_together

IMAGE, ROCM_IMAGE = "vllm/vllm-openai", "vllm/vllm-openai-rocm"
PORT = 8000
BEHIND_PROXY = 8200  # port of a server of llm-d's behind its proxy
NIXL_PORT = 5600  # VLLM_NIXL_SIDE_CHANNEL_PORT
PROBE_PERIOD = 10  # s
LONGEST_PERIOD, LONGEST_STABILIZATION = 1800, 3600  # s, that a HorizontalPodAutoscaler takes
LEAST_STARTUP = 600  # s that a server may take until it is healthy
SHM = {"name": "shm", "emptyDir": {"medium": "Memory"}}  # for NCCL between the GPUs of a server
METRICS = {"queue_depth": "vllm:num_requests_waiting", "kv_usage": "vllm:kv_cache_usage_perc"}
"""What vLLM V1 exports of that by which a fleet is scaled."""
Manifest = dict[str, Any]


@dataclass(slots=True, frozen=True)
class Group:
    """Replicas that are alike."""

    name: str  # of its Deployment and Service
    scenario: Scenario
    replicas: int
    kv_role: str | None
    scaling: AutoscalingConfig | None

    @property
    def options(self) -> list[str]:
        """What follows `vllm serve MODEL`."""
        return serve_options(self.scenario, self.kv_role)

    @property
    def gpus(self) -> Manifest:
        """What a container asks for."""
        resource = "amd.com/gpu" if self.is_amd else "nvidia.com/gpu"
        count = str(self.scenario.gpu.count)
        return {"limits": {resource: count}, "requests": {resource: count}}

    @property
    def is_amd(self) -> bool:
        return find_gpu(self.scenario.gpu.name).name.startswith("MI")

    @property
    def image(self) -> str:
        return ROCM_IMAGE if self.is_amd else IMAGE

    @property
    def tag(self) -> str:
        """Of the image: the release whose rules were simulated."""
        return f"v{write_release(release_of(self.scenario.engine))}"

    @property
    def product(self) -> str | None:
        """Value of the label of its nodes; None: nobody knows."""
        return find_gpu(self.scenario.gpu.name).product or None


def groups_of(scenario: Scenario) -> list[Group]:
    """Return the groups that have replicas, or may have them."""
    base, cluster = _plain_name(scenario.name), scenario.cluster
    if cluster is None:
        return [Group(base, scenario, 1, None, None)]
    kinds = cluster.replica_groups
    found = []
    for name, kind in kinds.items():
        if not cluster.max_replicas(name):
            continue
        mine = cluster.scalers.get(name)
        label = base if len(kinds) == 1 else f"{base}-{_plain_name(name)}"
        count = kind.replicas if mine is None else max(kind.replicas, mine.min_replicas)
        found.append(Group(label, scenario.of_group(name), count, kind.kv_role, mine))
    return found


def _plain_name(name: str) -> str:
    """Make a name one that Kubernetes takes (RFC 1123), short enough for what charts add."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24].strip("-") or "vllm"


def write_deployment(scenario: Scenario, folder: Path) -> list[Path]:
    """Write all files that a scenario gives rise to; all or none.

    Warns of an engine that is not vLLM, and of a policy that vLLM cannot have.
    """
    warn_of_lost_policies(scenario)
    return write_together(folder, deployment(scenario))


def deployment(scenario: Scenario) -> Mapping[str, bytes]:
    """Return the files, by name; HeadwayError for several models: each wants a pool of its own."""
    if scenario.models:
        raise HeadwayError("--deploy: needs one model: each of several wants a pool of its own")
    groups = groups_of(scenario)
    texts = {
        "vllm_serve.sh": serve_command(scenario),
        "kubernetes.yaml": _routing(scenario) + _kubernetes(groups),
        **_llm_d(groups),
        **_scaling(groups),
    }
    return {name: text.encode() for name, text in texts.items()}


def _routing(scenario: Scenario) -> str:
    """Say what no file sets up: by which rule requests were spread."""
    if scenario.cluster is None:
        return ""
    router = scenario.cluster.router_name
    return f"{comment(f'simulated with the router {router}: set up one like it')}\n"


class _Dumper(yaml.SafeDumper):
    """Writes what is there twice twice: Helm and people read no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _document(value: Manifest, *remarks: str) -> str:
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100)
    return "".join(f"{comment(line)}\n" for line in remarks) + text


def _manifest(api: str, kind: str, about: Manifest, spec: Manifest) -> Manifest:
    return {"apiVersion": api, "kind": kind, "metadata": about, "spec": spec}


def _remarks(group: Group) -> list[str]:
    """Say what must be seen to, and what vLLM cannot have as simulated."""
    lines = [*filter(None, [group.scenario.description])]
    if "/" not in str(group.scenario.model):
        lines.append(f"{group.scenario.model}: put its name on Hugging Face here, or its folder")
    lines += remarks(group.scenario)
    if group.product is None:
        lines.append(f"{group.scenario.gpu.name}: add a nodeSelector for it")
    return lines


# Kubernetes


def _kubernetes(groups: list[Group]) -> str:
    """Write a Deployment and a Service for each group."""
    parts = []
    for group in groups:
        labels = {"app.kubernetes.io/name": "vllm", "app.kubernetes.io/instance": group.name}
        about = {"name": group.name, "labels": labels}
        spec: Manifest = {"selector": {"matchLabels": labels}}
        if group.scaling is None:  # else the autoscaler decides
            spec = {"replicas": group.replicas, **spec}
        spec["template"] = {"metadata": {"labels": labels}, "spec": _pod(group)}
        ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
        server = _manifest("apps/v1", "Deployment", about, spec)
        service = _manifest("v1", "Service", about, {"selector": labels, "ports": ports})
        parts += [_document(server, *_remarks(group)), _document(service)]
    return "---\n".join(parts)


def _pod(group: Group) -> Manifest:
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": PROBE_PERIOD}
    longest = max(LEAST_STARTUP, 2 * group.scaling.startup_delay if group.scaling else 0)
    container: Manifest = {
        "name": "vllm",
        "image": f"{group.image}:{group.tag}",
        "args": _unexpanded([model_argument(group.scenario), *group.options]),
        "ports": [{"name": "http", "containerPort": PORT}],
        "env": _environment(group),
        "resources": group.gpus,
        "startupProbe": health | {"failureThreshold": ceil(longest / PROBE_PERIOD)},
        "readinessProbe": health,
        "volumeMounts": [{"name": SHM["name"], "mountPath": "/dev/shm"}],
    }
    pod: Manifest = {"containers": [container], "volumes": [SHM]}
    if group.product is not None:
        pod["nodeSelector"] = {"nvidia.com/gpu.product": group.product}
    return pod


def _unexpanded(words: Iterable[str]) -> list[str]:
    """Write commands, arguments and variables so that Kubernetes, which expands `$(VAR)`, does not.

    It reads `$$` as `$` everywhere.
    """
    return [word.replace("$", "$$") for word in words]


def _environment(group: Group) -> list[Manifest]:
    """Get the token for models not for everybody, the policy, and where KV caches are fetched."""
    token = {"name": "hf-token", "key": "token", "optional": True}
    found: list[Manifest] = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}}]
    words = environment(group.scenario)
    found += [
        {"name": name, "value": value}
        for name, value in zip(words, _unexpanded(words.values()), strict=True)
    ]
    if group.kv_role is not None:
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        found += [
            {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address},
            {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(NIXL_PORT)},
        ]
    return found


# Scaling


def _scaling(groups: list[Group]) -> dict[str, str]:
    """Write a HorizontalPodAutoscaler where a group scales."""
    found = next(((group, group.scaling) for group in groups if group.scaling is not None), None)
    if found is None:
        return {}
    group, scaling = found
    metric = METRICS.get(scaling.metric)
    if metric is None:
        what = f"# {scaling.metric}: vLLM exports no such metric; scale by another\n"
        return {"hpa.yaml": what}
    # Kubernetes' own rule for growth, which is simulated, and the pause before shrinking.
    interval = max(1, round(scaling.interval))
    period = {"periodSeconds": min(interval, LONGEST_PERIOD)}
    grow = [{"type": "Percent", "value": 100, **period}, {"type": "Pods", "value": 4, **period}]
    pause = min(round(scaling.cooldown), LONGEST_STABILIZATION)
    behavior = {
        "scaleUp": {"stabilizationWindowSeconds": 0, "selectPolicy": "Max", "policies": grow},
        "scaleDown": {"stabilizationWindowSeconds": pause},
    }
    about = {"name": group.name}
    server = {"apiVersion": "apps/v1", "kind": "Deployment", "name": group.name}
    value = f"{max(1, round(1000 * scaling.target))}m"
    pods = {"metric": {"name": metric}, "target": {"type": "AverageValue", "averageValue": value}}
    autoscaler: Manifest = {
        "scaleTargetRef": server,
        "minReplicas": scaling.min_replicas,
        "maxReplicas": scaling.max_replicas,
        "metrics": [{"type": "Pods", "pods": pods}],
        "behavior": behavior,
    }
    hpa = _document(
        _manifest("autoscaling/v2", "HorizontalPodAutoscaler", about, autoscaler),
        "It wants an adapter that serves vLLM's metrics by pod (prometheus-adapter).",
        f"Simulated: a look every {scaling.interval:g} s.",
    )
    return {"hpa.yaml": hpa}


# llm-d


def _llm_d(groups: list[Group]) -> dict[str, str]:
    """Write values for llm-d's chart: a prefill and a decode group together, others one by one."""
    producers = [group for group in groups if group.kv_role == "kv_producer"]
    consumers = [group for group in groups if group.kv_role == "kv_consumer"]
    if not producers:
        names = [f"-{group.name}" if len(groups) > 1 else "" for group in groups]
        values = [_llm_d_values(group, None, []) for group in groups]
        return {f"llm-d-values{name}.yaml": text for name, text in zip(names, values, strict=True)}
    others = [group.name for group in (*producers[1:], *consumers[1:])]
    notes = [f"the chart has one prefill and one decode group: {', '.join(others)} left out"]
    pair = _llm_d_values(consumers[0], producers[0], notes if others else [])
    return {"llm-d-values.yaml": pair}


def _llm_d_values(decode: Group, prefill: Group | None, notes: list[str]) -> str:
    model = str(decode.scenario.model)  # no argument: the command is written out
    weights = resolve_model(decode.scenario).weight_bytes(decode.scenario.engine.weight_dtype)
    proxy = {"enabled": True, "targetPort": BEHIND_PROXY} if prefill else {"enabled": False}
    values: Manifest = {
        "modelArtifacts": {
            "name": model,
            "uri": f"hf://{model}",
            "size": f"{ceil(1.25 * weights / GIB)}Gi",
            "labels": {"llm-d.ai/inferenceServing": "true", "llm-d.ai/model": decode.name},
        },
        "routing": {"servicePort": PORT, "proxy": proxy},
        "decode": _llm_d_part(decode, BEHIND_PROXY if prefill else PORT),
        "prefill": _llm_d_part(prefill, PORT) if prefill else {"create": False},
    }
    lines = [f"helm install {decode.name} llm-d-modelservice/llm-d-modelservice -f THIS"]
    lines += dict.fromkeys([*_remarks(decode), *(_remarks(prefill) if prefill else [])])
    return _document(values, *lines, *notes)


def _llm_d_part(group: Group, port: int) -> Manifest:
    """Write a group's values; the chart's own command reads the model as a template of Helm's."""
    engine = group.scenario.engine
    words = [model_argument(group.scenario), "--port", f"{port}", *group.options]
    part: Manifest = {
        "create": True,
        "replicas": group.replicas,
        # The chart asks for tensor x dataLocal GPUs.
        "parallelism": {
            "tensor": engine.tensor_parallel_size,
            "data": engine.data_parallel_size,
            "dataLocal": engine.data_parallel_size,
        },
        "containers": [
            {
                "name": "vllm",
                "image": f"{group.image}:{group.tag}",
                "modelCommand": "custom",
                "command": ["vllm", "serve"],
                "args": _unexpanded(words),
                "env": [{k: _literal(v) for k, v in one.items()} for one in _environment(group)],
                "mountModelVolume": True,
            }
        ],
    }
    if group.product is not None:
        part["acceleratorTypes"] = {
            "labelKey": "nvidia.com/gpu.product",
            "labelValues": [group.product],
        }
    return part


def _literal(value: Any) -> Any:
    """Write a text so that Helm, which reads llm-d's variables as templates, leaves it alone."""
    return value.replace("{{", "{{`{{`}}") if isinstance(value, str) else value
