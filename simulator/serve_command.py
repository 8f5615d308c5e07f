"""A scenario's engine as the `vllm serve` command line that starts the like."""

import json
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.scenario import Scenario

PLAIN = (
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
    "data_parallel_size",
    "api_server_count",
    "long_prefill_token_threshold",
)
SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling")
VLLM_POLICIES = ("fcfs", "priority")


def serve_command(scenario: "Scenario") -> str:
    """Write the command (vLLM 0.33's options); what vLLM cannot do stands before it as comments."""
    engine = scenario.engine
    lines = []
    kinds = {} if scenario.cluster is None else scenario.cluster.kinds
    if sum(kind.replicas for kind in kinds.values()) > 1:
        groups = [f"{kind.replicas} {name}" for name, kind in kinds.items()]
        lines.append(f"# one replica as the scenario's engine; the cluster has {', '.join(groups)}")
        for name, kind in kinds.items():
            if kind.kv_role is not None:
                config = json.dumps({"kv_connector": "NixlConnector", "kv_role": kind.kv_role})
                lines.append(f"# and for {name} --kv-transfer-config {shlex.quote(config)}")
    if "/" not in scenario.model:
        lines.append(f"# {scenario.model}: put its name on Hugging Face here, or its folder")
    policy = engine.scheduling_policy
    name = policy if isinstance(policy, str) else policy["policy"]
    words = ["vllm", "serve", scenario.model]
    if name in VLLM_POLICIES:
        words += ["--scheduling-policy", name]
    else:
        lines.append(f"# vLLM has no scheduling policy {name}: this is its fcfs")
    if engine.allocation != "paged":
        lines.append(f"# vLLM pages its KV cache: there is no {engine.allocation} allocation")
    if engine.preemption_mode != "recompute":
        lines.append(f"# vLLM V1 preempts by recomputation, not by {engine.preemption_mode}")
    for key in PLAIN:
        value = getattr(engine, key)
        default = type(engine).model_fields[key].default
        if value is not None and (value != default or key in PLAIN[:2]):
            words += [f"--{key.replace('_', '-')}", f"{value}"]
    for key in SWITCHES:
        words.append(f"--{'' if getattr(engine, key) else 'no-'}{key.replace('_', '-')}")
    return "\n".join([*lines, shlex.join(words), ""])
