"""A scenario's engines as the `vllm serve` command lines that start the like."""

import json
import shlex

from simulator.core.engine_config import EngineConfig
from simulator.scenario.engines import release_of
from simulator.scenario.scenario import Scenario
from simulator.schedulers.vllm.rules import options_without_effect
from simulator.util.config import Config

VALUES = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "max_model_len",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "api_server_count",
    "long_prefill_token_threshold",
)
FLAGS = ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling")
VLLM_POLICIES = ("fcfs", "priority")
COVERED = (
    *(*VALUES, *FLAGS, "name", "version", "scheduling_policy", "allocation", "preemption_mode"),
    "disable_hybrid_kv_cache_manager",  # vLLM's default is as good
    "enable_expert_parallel",
    "expert_routing",  # the model's
    "pipeline_parallel_bandwidth",  # the network's
)
"""Keys that the command has, or a comment of its own; others are told to be missing."""


def serve_command(scenario: Scenario) -> str:
    """Write the command (vLLM 0.33's options), in a cluster one for the replicas of each group.

    What vLLM cannot do stands before it as comments.
    """
    lines = []
    if "/" not in scenario.model:
        lines.append(f"# {scenario.model}: put its name on Hugging Face here, or its folder")
    cluster = scenario.cluster
    if cluster is None:
        return "\n".join([*lines, *_command(scenario.model, scenario.engine), ""])
    for name, kind in cluster.replica_groups.items():
        group, most = scenario.of_group(name), cluster.max_replicas(name)
        if not most:
            continue
        if most > 1 or len(cluster.replica_groups) > 1:
            count = f"{kind.replicas}" if most == kind.replicas else f"up to {most}"
            lines.append(f"# {name}: {count}, each on {group.gpu.count} {group.gpu.name}")
        more = []
        if kind.kv_role is not None:
            config = {"kv_connector": "NixlConnector", "kv_role": kind.kv_role}
            more = ["--kv-transfer-config", json.dumps(config)]
        lines += _command(scenario.model, group.engine, *more)
    return "\n".join([*lines, ""])


def _command(model: str, engine: EngineConfig, *more: str) -> list[str]:
    """Write the command of one engine after comments on what it cannot have."""
    words = ["vllm", "serve", model, *serve_options(engine, *more)]
    return [*(f"# {line}" for line in remarks(engine)), shlex.join(words)]


def _policy_name(engine: EngineConfig) -> str:
    policy = engine.scheduling_policy
    return policy if isinstance(policy, str) else policy["policy"]


def remarks(engine: EngineConfig) -> list[str]:
    """Say what of an engine vLLM cannot have, or this command does not set."""
    lines = []
    name = _policy_name(engine)
    if name not in VLLM_POLICIES:
        lines.append(f"vLLM has no scheduling policy {name}: this is its fcfs")
    if engine.allocation != "paged":
        lines.append(f"vLLM pages its KV cache: there is no {engine.allocation} allocation")
    if engine.preemption_mode != "recompute":
        lines.append(f"vLLM V1 preempts by recomputation, not by {engine.preemption_mode}")
    known = {*COVERED, *options_without_effect(release_of(engine))}
    for key, field in type(engine).model_fields.items():
        if key not in known and (value := getattr(engine, key)) != field.default:
            plain = value.model_dump(exclude_defaults=True) if isinstance(value, Config) else value
            lines.append(f"not in this command: {key} {plain}")
    return lines


def serve_options(engine: EngineConfig, *more: str) -> list[str]:
    """Give what follows `vllm serve MODEL`, `more` at the end."""
    words = []
    if (name := _policy_name(engine)) in VLLM_POLICIES:
        words += ["--scheduling-policy", name]
    for key in VALUES:
        value = getattr(engine, key)
        default = type(engine).model_fields[key].default
        if value is not None and (value != default or key in VALUES[:2]):
            words += [f"--{key.replace('_', '-')}", f"{value}"]
    if engine.enable_expert_parallel:
        words.append("--enable-expert-parallel")
    for key in FLAGS:
        words.append(f"--{'' if getattr(engine, key) else 'no-'}{key.replace('_', '-')}")
    return [*words, *more]
