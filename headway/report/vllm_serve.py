"""A scenario's engines as the `vllm serve` command lines that start the like."""

import json
import os
import shlex
import warnings

from simulator.build.engines import ENGINES, release_of
from simulator.build.kv_room import memory_budget
from simulator.build.policy_table import (
    PLUGIN,
    POLICY_VARIABLE,
    VLLM_POLICIES,
    find_policy,
    plugin_spec,
    takes_variable,
)
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.vllm.rules import options_without_effect, write_release
from simulator.util.config import Config
from simulator.util.errors import HeadwayWarning, printable

VALUES = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "max_num_active_seqs",
    "max_num_scheduled_tokens",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "max_model_len",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "mamba_ssm_cache_dtype",
    "prefix_match_unit",
    "hf_overrides",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "api_server_count",
    "long_prefill_token_threshold",
    "max_loras",
    "max_cpu_loras",
    "max_lora_rank",
    "prefill_schedule_interval",
    "watermark",
    "generation_config",
    "kv_offloading_size",
)
SIZES = (*VALUES[:5], "api_server_count", "long_prefill_token_threshold", "kv_offloading_size")
"""Of these what an engine that is not vLLM chose for itself: vLLM's own are as good for vLLM."""
FLAGS = ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling")
ENABLED = ("enable_lora", "enable_expert_parallel", "enforce_eager")
SWITCHES = ("long_prefill_token_threshold_adaptive", "scheduler_reserve_full_isl")
"""Flags that are written where they are not as by default."""
PLUGIN_RELEASES = ((0, 33),)
"""Releases of vLLM that headway.vllm fits."""
NOT_VLLMS = {"acceptance", "draft", "speculative_eagle_topk", "speculative_num_draft_tokens"}
"""Keys of `speculative_config` that vLLM refuses."""
COVERED = (
    *VALUES,
    *FLAGS,
    *SWITCHES,
    *ENABLED,
    "name",
    "version",
    "scheduling_policy",
    "scheduler",
    "scheduler_cls",
    "allocation",
    "preemption_mode",
    "speculative_config",
    "lora_load_bandwidth",  # the disk's
    "disable_hybrid_kv_cache_manager",  # vLLM's default is as good
    "hicache_write_policy",  # write_through is vLLM's
    "expert_routing",  # the model's
    "prefix_cache_retention_interval",
    "pipeline_parallel_bandwidth",  # the network's
)
"""Keys that the command has, or a comment of its own; others are told to be missing."""


def serve_command(scenario: Scenario) -> str:
    """Write the command (vLLM 0.33's options), in a cluster one for the replicas of each group.

    What vLLM cannot do stands before it as comments.
    """
    lines = [comment(scenario.description)] if scenario.description else []
    if "/" not in str(scenario.model):
        lines.append(comment(f"{scenario.model}: put its name on Hugging Face here, or its folder"))
    cluster = scenario.cluster
    if cluster is None:
        return "\n".join([*lines, *_command(scenario), ""])
    for name, kind in cluster.replica_groups.items():
        group, most = scenario.of_group(name), cluster.max_replicas(name)
        if not most:
            continue
        if most > 1 or len(cluster.replica_groups) > 1:
            count = f"{kind.replicas}" if most == kind.replicas else f"up to {most}"
            lines.append(comment(f"{name}: {count}, each on {group.gpu.count} {group.gpu.name}"))
        lines += _command(group, kind.kv_role)
        if kind.ec_role is not None:
            config = {"ec_connector": "ECExampleConnector", "ec_role": kind.ec_role}
            lines[-1] += f" --ec-transfer-config {quote(json.dumps(config))}"
    return "\n".join([*lines, ""])


def comment(text: str) -> str:
    """Write a comment of one line: what would end it, and all that does not print, is escaped."""
    return f"# {printable(text)}"


def quote(word: str) -> str:
    """Quote a word for bash; what does not print is written as its bytes, so that all is seen."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = (
        one
        if one.isprintable() and one not in "'\\"
        else "".join(f"\\x{byte:02x}" for byte in one.encode())
        for one in word
    )
    return f"$'{''.join(escaped)}'"


def model_argument(scenario: Scenario) -> str:
    """Return what follows `vllm serve`: a folder whose name begins with `-` is no option."""
    name = str(scenario.model)
    return f"./{name}" if name.startswith("-") else name


def _command(scenario: Scenario, kv_role: str | None = None) -> list[str]:
    """Write the command of one engine after comments on what it cannot have."""
    words = ["vllm", "serve", model_argument(scenario), *serve_options(scenario, kv_role)]
    policy = [f"{name}={quote(value)}" for name, value in environment(scenario).items()]
    return [*map(comment, remarks(scenario)), " ".join([*policy, *map(quote, words)])]


def environment(scenario: Scenario) -> dict[str, str]:
    """Return the environment variables that the server wants: its policy, where that is Headway's.

    Where a run's policy came by such a variable, it is that.
    """
    if _has_plugin(scenario):
        policy = scenario.engine.scheduling_policy
        return {POLICY_VARIABLE: plugin_spec(policy.name, policy.arguments)}
    told = os.environ.get(POLICY_VARIABLE, "")
    return {POLICY_VARIABLE: told} if told and takes_variable(scenario.engine) else {}


def _has_plugin(scenario: Scenario) -> bool:
    """Say whether `headway.vllm` brings the policy to vLLM."""
    return scenario.engine.policy_name not in VLLM_POLICIES and not _loses_policy(scenario)


def _loses_policy(scenario: Scenario) -> str:
    """Say why the command starts vLLM without the engine's policy; "" where it has it."""
    engine = scenario.engine
    name, release = engine.policy_name, release_of(engine)
    if name in VLLM_POLICIES:
        return ""
    if name == "sglang":
        return (
            "SGLang's scheduler was simulated, which vLLM cannot have (docs/sglang-policies.md has "
            "the command that starts SGLang with a policy): this is vLLM's fcfs"
        )
    if issubclass(find_policy(engine, scenario.folder)[0], SchedulerBase):
        return f"{name} is a scheduler of its own, which vLLM cannot have: this is vLLM's fcfs"
    if release[:2] not in PLUGIN_RELEASES:
        fitting = ", ".join(map(write_release, PLUGIN_RELEASES))
        return (
            f"{name} comes to vLLM by headway.vllm, which fits vLLM {fitting} and not "
            f"{engine.version}: this is vLLM's fcfs"
        )
    return ""


def _loses_engine(scenario: Scenario) -> str:
    """Say that another engine than vLLM was simulated; "" where it was vLLM, or a textbook's."""
    engine = scenario.engine
    if engine.follows_vllm:
        return ""
    return (
        f"engine {engine.name} was simulated, and this starts vLLM: expect other figures; the "
        "sizes of its batches and its cache are left out, vLLM chooses its own"
    )


def warn_of_lost_policies(scenario: Scenario) -> None:
    """Warn of each group whose engine or policy the command cannot have."""
    engines = scenario.groups.values()
    told = [lost for one in engines for lost in (_loses_engine(one), _loses_policy(one)) if lost]
    for lost in dict.fromkeys(told):
        warnings.warn(f"vllm_serve.sh: {lost}", HeadwayWarning, stacklevel=3)


def remarks(scenario: Scenario) -> list[str]:
    """Say what of an engine vLLM cannot have, or this command does not set."""
    engine = scenario.engine
    name, own = engine.policy_name, ":" in engine.policy_name
    lines = [lost for lost in (_loses_engine(scenario), _loses_policy(scenario)) if lost]
    if _has_plugin(scenario):
        brought = "is your own; headway, which runs it, is" if own else "comes with headway,"
        lines.append(f"{name} {brought} to be installed beside vLLM; clients, and lengths")
        lines.append("that are predicted, come in the requests' vllm_xargs (docs/vllm-policies.md)")
        if own:
            lines.append(f"{name.partition(':')[0]} must be on the server's Python path")
    if longest := longest_that_fits(scenario):
        most = resolve(scenario).max_model_len
        lines.append(f"--max-model-len {longest}: the model's {most:,} do not fit in the KV cache")
    if engine.allocation != "paged":
        lines.append(f"vLLM pages its KV cache: there is no {engine.allocation} allocation")
    if engine.preemption_mode != "recompute":
        lines.append(f"vLLM V1 preempts by recomputation, not by {engine.preemption_mode}")
    drafts = engine.speculative_config
    if drafts is not None and drafts.speculative_eagle_topk > 1:
        lines.append("vLLM drafts a chain of tokens, no tree: speculative_eagle_topk is left out")
    known = {*COVERED, *options_without_effect(release_of(engine))}
    for key, field in type(engine).model_fields.items():
        if key not in known and (value := getattr(engine, key)) != field.default:
            plain = value.model_dump(exclude_unset=True) if isinstance(value, Config) else value
            lines.append(f"not in this command: {key} {plain}")
    return lines


def longest_that_fits(scenario: Scenario) -> int | None:
    """Return the longest request, in tokens, that the KV cache of an engine holds for sure.

    None where it holds the model's own context, or where `max_model_len` is given: without it vLLM
    starts with that context, or not at all ("To serve at least one request ...", 0.11 to 0.33).
    """
    engine = scenario.engine
    if engine.max_model_len is not None or engine.allocation != "paged":
        return None
    spec = resolve(scenario)
    fits = memory_budget(engine, spec.model, spec.gpu).safe_length
    return fits if fits < spec.max_model_len else None


def serve_options(scenario: Scenario, kv_role: str | None = None) -> list[str]:
    """Return what follows `vllm serve MODEL`; `kv_role` where prefill and decode are apart."""
    words = []
    engine = scenario.engine
    if engine.policy_name in VLLM_POLICIES:
        words += ["--scheduling-policy", engine.policy_name]
    if engine.scheduler_cls is not None or _has_plugin(scenario):
        words += _option("--scheduler-cls", engine.scheduler_cls or PLUGIN)
    for key in (key for key in VALUES if engine.follows_vllm or key not in SIZES):
        value = getattr(engine, key)
        if value is not None and (engine.is_given(key) or key in VALUES[:2]):
            text = json.dumps(value) if isinstance(value, dict) else f"{value}"
            words += _option(f"--{key.replace('_', '-')}", text)
    if longest := longest_that_fits(scenario):
        words += ["--max-model-len", f"{longest}"]
    absent = options_without_effect(release_of(engine))
    kept = engine.prefix_cache_retention_interval
    if kept != 0 and "prefix_cache_retention_interval" not in absent:
        words += ["--prefix-cache-retention-interval", f"{kept}"]
    words += [_flag(key, True) for key in ENABLED if getattr(engine, key)]
    own = ENGINES[engine.name].defaults  # what another engine never has is no choice
    flags = [key for key in FLAGS[:2] if own.get(key, True) and not getattr(engine, key)]
    if engine.follows_vllm:
        flags = [*FLAGS, *(key for key in SWITCHES if key not in absent and engine.is_given(key))]
    words += [_flag(key, getattr(engine, key)) for key in flags]
    if (drafts := engine.speculative_config) is not None:
        asked = drafts.model_dump(exclude_unset=True, exclude=NOT_VLLMS)
        words += ["--speculative-config", json.dumps(asked)]
    if kv_role is not None:
        config = {"kv_connector": "NixlConnector", "kv_role": kv_role}
        words += ["--kv-transfer-config", json.dumps(config)]
    return words


def _option(name: str, value: str) -> list[str]:
    """Write an option so that its value, whatever it begins with, is no option."""
    return [f"{name}={value}"] if value.startswith("-") else [name, value]


def _flag(key: str, value: bool) -> str:
    """Write a flag as vLLM has it."""
    return f"--{'' if value else 'no-'}{key.replace('_', '-')}"
