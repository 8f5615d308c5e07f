"""What a scenario's keys must be to one another, to the model, to the hardware and to the disk."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from simulator.build.choose_scheduler import REQUIRED, differing_keys, with_scheduler
from simulator.build.engine_spec import EngineSpec
from simulator.build.engines import ENGINES, release_of
from simulator.build.policy_table import FIELD
from simulator.build.settle import try_to_settle
from simulator.cluster.cluster_config import ClusterConfig
from simulator.core.engine_config import EngineConfig
from simulator.features import all_features
from simulator.models.spec import ModelSpec
from simulator.scenario.encoder_checks import check_encoders, check_roles
from simulator.scenario.scenario import Scenario
from simulator.schedulers.feature import Conflict
from simulator.schedulers.vllm.rules import (
    LOCK_STEP_INTERVAL_SINCE,
    OPTIONS_SINCE,
    V0_UNTIL,
    check_known,
    newest_up_to,
    options_without_effect,
    read_release,
    write_release,
)
from simulator.util.errors import FieldError, HeadwayError, Key, field_errors, split_key
from simulator.util.files import resolve, why_not_regular
from simulator.workload.generate import Generator, shortest_prompt

if TYPE_CHECKING:
    from simulator.build.assemble_fleet import FleetSpec

DEPENDENT_KEYS = (
    ("admission", "shed_from", "max_outstanding"),
    ("admission", "burst", "rate"),
    ("client", "backoff", "max_retries"),
    ("client", "backoff_factor", "max_retries"),
    ("client", "jitter", "max_retries"),
    ("failures", "mttr", "mtbf"),
)
"""Blocks of a cluster, keys of them, and the other key without which these have no effect."""

OF_HOST_TIER = (
    "kv_offloading_bandwidth",
    "kv_offloading_latency",
    "store_threshold",
    "secondary_tiers",
)


class Checked(NamedTuple):
    """What is wrong with a scenario, beside its engines and its fleet, whole if nothing is."""

    found: list[FieldError]  # by the scenario's keys
    elsewhere: list[str]  # in the files that it names
    specs: dict[str, EngineSpec]  # by group
    fleet: "FleetSpec | None"


def find_conflicts(scenario: Scenario, wrong: set[Key], *, runs: bool = True) -> Checked:
    """Find what is wrong in the scenario, and what in the files that it names.

    What depends on a key that is wrong already is left out, and where it never `runs`, what its
    steps cost and who schedules them.
    """
    found: list[FieldError] = []
    elsewhere = []
    seen: set[str] = set()
    conflicts, alone = _check(scenario, runs=runs)
    specs: dict[str, EngineSpec | None] = {"": alone}
    fleet = None
    if (cluster := scenario.cluster) is not None:
        from simulator.build.assemble_fleet import settle_fleet

        specs = dict.fromkeys(cluster.replica_groups, alone)
        fleet = settle_fleet(scenario, cluster, scenario.models, partial(_attempt, conflicts))
        conflicts += _check_cluster(scenario, cluster, specs)
    if runs and scenario.workload.trace is None:
        conflicts += _check_prompts(scenario.workload.generator, [*filter(None, specs.values())])
    for blamed, others, what, kind in conflicts:
        keys = [tuple(name.split(".")) for name in (blamed, *others.split()) if name]
        if what in seen or any(_overlap(key, bad) for key in keys for bad in wrong):
            continue
        seen.add(what)  # memory and cost model may both complain of the same thing
        if blamed:
            found.append(FieldError(keys[0], what, kind))
        else:
            elsewhere.append(what)
    whole = {name: spec for name, spec in specs.items() if spec is not None}
    return Checked(found, elsewhere, whole, fleet)


def _overlap(mine: Key, bad: Key) -> bool:
    length = min(len(mine), len(bad))
    return mine[:length] == bad[:length]


@contextmanager
def _attempt(found: list[Conflict], block: str, others: str) -> Iterator[None]:
    """Note why what is attempted with the value at `block` cannot be done."""
    try:
        yield
    except HeadwayError as error:
        found += [Conflict("", others, line) for line in error.messages]
    except ValueError as error:
        wrong = field_errors(split_key(block), error)
        found += [Conflict(".".join(key), others, what, kind) for key, what, kind in wrong]


def _check(scenario: Scenario, *, runs: bool = True) -> tuple[list[Conflict], EngineSpec | None]:
    """Check one engine, its hardware and its workload; return what the engine is, or None."""
    of_engine = list(_check_engine(scenario.engine, scenario.gpu.count))
    found = [*of_engine]
    if scenario.engine.scheduler_cls and scenario.engine.scheduler != "vllm":
        what = "needs scheduler: vllm"
        found.append(Conflict("engine.scheduler_cls", "engine.scheduler", what))
    found += _check_trace(scenario)
    asked = scenario.workload.generator.multimodal
    if asked is not None and scenario.engine.multimodal_config is None:
        what = "needs engine.multimodal_config, which says what the encoder has"
        found.append(Conflict("workload.multimodal", "engine.multimodal_config", what))
    spec = try_to_settle(scenario, partial(_attempt, found), runs=runs)
    if spec is not None and not of_engine:
        found += _check_admission(spec.engine, spec.num_gpu_blocks - 1)
        from simulator.build.assemble_scheduler import check_scheduler

        with _attempt(found, FIELD, "engine predictor"):
            spec = with_scheduler(spec)
            check_scheduler(spec)
    return found, spec


def _check_admission(engine: EngineConfig, usable: int) -> Iterator[Conflict]:
    """See whether a second request can ever be admitted: both need a block."""
    many = 2 if engine.min_decode_blocks_scope == "running" else 1
    watermark = int(engine.watermark * (usable + 1))
    most = max(usable - 2 - watermark, 0) // many
    if engine.min_decode_blocks > most and engine.max_num_seqs > 1:
        what = f"must be at most {most}, not {engine.min_decode_blocks}: of {usable} KV blocks "
        what += "that leaves none for a second request, so nobody would run beside another"
        others = "model gpu engine.watermark engine.num_gpu_blocks_override"
        yield Conflict("engine.min_decode_blocks", others, what)


def _check_prompts(workload: Generator, specs: list[EngineSpec]) -> Iterator[Conflict]:
    """See whether any prompt that may be drawn is short enough for a model, whatever its engine."""
    if not specs or workload.input_len is None:  # of a trace, or of no run: as `serve` without load
        return
    most = max(max(one.max_model_len, one.model.longest(release_of(one.engine))) for one in specs)
    if (least := shortest_prompt(workload)) >= most:
        name = " and ".join(dict.fromkeys(one.model.name for one in specs))
        what = f"must be less than {most:,} (tokens that {name} takes, prompt and answer), "
        what += f"for example {most // 2}; the shortest prompt has {least:,} tokens"
        yield Conflict("workload.input_len", "model engine", what, "model")


def _check_engine(engine: EngineConfig, gpus: int) -> Iterator[Conflict]:
    """Check the keys of `engine` against one another, and against the number of GPUs."""
    tokens, seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    decodes_count = engine.policy_name != "sglang"
    if tokens < seqs and decodes_count:
        what = f"must be at least max_num_seqs ({seqs}), not {tokens}"
        what += ": every running request wants a token of each step"
        yield Conflict("engine.max_num_batched_tokens", "engine.max_num_seqs", what)
    yield from _check_limits(engine)
    yield from _check_version(engine)
    mode = engine.preemption_mode
    if mode != "recompute" and engine.allocation != "paged":
        what = f"{mode} needs paged allocation, not {engine.allocation}"
        yield Conflict("engine.preemption_mode", "engine.allocation", what)
    if mode == "recompute" and not (engine.swap_overlap and engine.kv_offloading_size):
        for key in ("swap_bandwidth", "swap_space", "swap_overlap"):
            if engine.is_given(key):
                what = "needs preemption_mode swap or auto, not recompute"
                yield Conflict(f"engine.{key}", "engine.preemption_mode", what)
    yield from _check_prefix_cache(engine)
    if engine.is_given("min_decode_blocks_scope") and not engine.min_decode_blocks:
        what = "needs min_decode_blocks, which is 0"
        yield Conflict("engine.min_decode_blocks_scope", "engine.min_decode_blocks", what)
    if engine.reserve_output_tokens is not None and engine.allocation != "paged":
        what = f"{engine.allocation} allocation reserves max_model_len for everybody anyway"
        yield Conflict("engine.reserve_output_tokens", "engine.allocation", what)
    for feature in all_features():
        yield from feature.conflicts(engine)
    yield from _check_parallel(engine, gpus)


def _check_version(engine: EngineConfig) -> Iterator[Conflict]:
    """See whether the version is known, and has the options that are given."""
    if engine.version is None:
        return
    if engine.name == "vllm-v0":  # it only says what that adds to its kernels
        release = read_release(engine.version)
        if release is None or release > V0_UNTIL:
            what = "must be a version of vLLM that had the V0 engine, up to "
            what += f"{write_release(V0_UNTIL)}, not {engine.version!r}"
            yield Conflict("engine.version", "engine.name", what)
        elif release != newest_up_to(release):
            last = write_release(newest_up_to(release))
            what = f"must be a release of vLLM: {engine.version} is not known, of "
            what += f"{write_release(release[:2])} the last is {last}"
            yield Conflict("engine.version", "engine.name", what)
        return
    if not engine.follows_vllm:
        followed = ENGINES[engine.name].follows.partition(":")[0]
        what = f"names a vLLM, and {engine.name} is one system alone ({followed}): leave it out"
        yield Conflict("engine.version", "engine.name", what)
        return
    try:
        check_known(engine.version)
    except ValueError as error:
        yield Conflict("engine.version", "", str(error))
        return
    for key, off in options_without_effect(release_of(engine)).items():
        since = OPTIONS_SINCE[key][0]
        if key == "prefill_schedule_interval" and engine.data_parallel_size > 1:
            since = LOCK_STEP_INTERVAL_SINCE  # choose_scheduler sees whether ranks go in lock-step
        if getattr(engine, key) != off and release_of(engine) < since:
            what = f"vLLM {engine.version} has no such rule, which came with "
            what += f"{write_release(since)}: leave it out"
            yield Conflict(f"engine.{key}", "engine.version", what)


QUEUE_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
SINCE = {**dict.fromkeys(QUEUE_LIMITS, (0, 29, 0)), "prefix_match_unit": (0, 26, 0)}
"""The first release of vLLM with each of these keys, which no other engine has."""


def _check_limits(engine: EngineConfig) -> Iterator[Conflict]:
    """Check what schedules fewer requests and tokens than the model runner has room for."""
    tokens, seqs = engine.max_num_scheduled_tokens, engine.max_num_active_seqs
    if seqs is not None and seqs > engine.max_num_seqs:
        what = f"must be at most max_num_seqs ({engine.max_num_seqs}), not {seqs}"
        yield Conflict("engine.max_num_active_seqs", "engine.max_num_seqs", what)
    for key, since in SINCE.items():
        if getattr(engine, key) is not None and not engine.follows_vllm:
            yield Conflict(f"engine.{key}", "engine.name", "is vLLM's alone")
        elif getattr(engine, key) is not None and release_of(engine) < since:
            what = f"vLLM {engine.version} has no such rule, which came with {write_release(since)}"
            yield Conflict(f"engine.{key}", "engine.version", f"{what}: leave it out")
    fronts = engine.api_server_count or engine.data_parallel_size
    if engine.max_num_queued_tokens is not None and fronts > 1:
        what = f"each of {fronts} API servers counts its own: needs api_server_count: 1"
        yield Conflict("engine.max_num_queued_tokens", "engine.api_server_count", what)
    if tokens is None:
        return
    key, seqs = "engine.max_num_scheduled_tokens", seqs or engine.max_num_seqs
    if tokens > engine.max_num_batched_tokens:
        most = engine.max_num_batched_tokens
        what = f"must be at most max_num_batched_tokens ({most}), not {tokens}"
        yield Conflict(key, "engine.max_num_batched_tokens", what)
    if tokens < seqs:
        what = f"fewer than the requests that may run ({seqs}) are not simulated: {tokens}"
        yield Conflict(key, "engine.max_num_seqs", what)
    if not engine.enable_chunked_prefill:
        what = "is not simulated without chunked prefill"
        yield Conflict(key, "engine.enable_chunked_prefill", what)
    if engine.speculative_config is not None:
        yield Conflict(key, "engine.speculative_config", "is not simulated with drafts")
    if engine.multimodal_config is not None:
        yield Conflict(key, "engine.multimodal_config", "is not simulated with images")


def _check_parallel(engine: EngineConfig, gpus: int) -> Iterator[Conflict]:
    """See whether the GPUs are those that the engine shares out."""
    ranks, stages = engine.data_parallel_size, engine.pipeline_parallel_size
    if gpus != engine.gpus:
        sizes = {"tensor": engine.tensor_parallel_size, "pipeline": stages, "data": ranks}
        used = {kind: n for kind, n in sizes.items() if n > 1 or kind == "tensor"}
        words = " x ".join(f"{kind}_parallel_size" for kind in used)
        words += f" ({' x '.join(map(str, used.values()))})"
        what = f"must equal engine.{words}, not {gpus}: "
        what += "these are of one engine; left out, it follows them (cluster.replicas has more)"
        others = " ".join(f"engine.{kind}_parallel_size" for kind in sizes)
        yield Conflict("gpu.count", others, what)
    if stages == 1 and engine.pipeline_parallel_bandwidth is not None:
        what = "needs a pipeline_parallel_size of 2 and more"
        yield Conflict("engine.pipeline_parallel_bandwidth", "engine.pipeline_parallel_size", what)
    if stages > 1 and not engine.follows_vllm:
        what = f"the batch queue is vLLM's; {engine.name} is simulated with one stage"
        yield Conflict("engine.pipeline_parallel_size", "engine.name", what)
    if engine.api_server_count is not None and not engine.follows_vllm:
        what = f"is vLLM's; {engine.name} is simulated with one front end"
        yield Conflict("engine.api_server_count", "engine.name", what)
    if ranks > 1 and not engine.follows_vllm:
        what = f"the internal load balancer is vLLM's; for {engine.name} use cluster.replicas"
        yield Conflict("engine.data_parallel_size", "engine.name", what)


def _check_host_tier(engine: EngineConfig, sglang: bool) -> Iterator[Conflict]:
    """See whether there is a host tier, and whether the engine has what it wants."""
    size, policy = "engine.kv_offloading_size", "engine.hicache_write_policy"
    if engine.kv_offloading_size is None:
        keys = OF_HOST_TIER if engine.name == "sglang" else (*OF_HOST_TIER, "hicache_write_policy")
        for key in keys:
            if engine.is_given(key):
                yield Conflict(f"engine.{key}", size, "needs kv_offloading_size")
        return
    for key, word in differing_keys(engine, REQUIRED["host tier"]):
        if key != "prefix_cache" or not sglang:
            yield Conflict(size, f"engine.{key}", f"needs {key}: {word}")
    for key in ("store_threshold", "secondary_tiers"):
        if getattr(engine, key) and sglang:
            what = "cannot be used with the policy sglang"
            yield Conflict(f"engine.{key}", "engine.scheduling_policy", what)
        elif getattr(engine, key) and engine.hicache_write_policy != "write_through":
            yield Conflict(f"engine.{key}", policy, "needs hicache_write_policy: write_through")
    if engine.hicache_write_policy == "write_through_selective" and not sglang:
        what = "write_through_selective needs the policy sglang; store_threshold: 2 is like it"
        yield Conflict(policy, "engine.scheduling_policy", what)


def _check_prefix_cache(engine: EngineConfig) -> Iterator[Conflict]:
    """See whether a radix tree and a host tier go with what else the engine is to do."""
    yield from _check_host_tier(engine, sglang := engine.policy_name == "sglang")
    if engine.secondary_tiers and (engine.enable_lora or not engine.enable_chunked_prefill):
        what = "needs enable_chunked_prefill, without enable_lora"
        others = "engine.enable_lora engine.enable_chunked_prefill"
        yield Conflict("engine.secondary_tiers", others, what)
    if (engine.prefix_cache_retention_interval or 0) % engine.block_size:
        what = f"must be a multiple of engine.block_size ({engine.block_size})"
        yield Conflict("engine.prefix_cache_retention_interval", "engine.block_size", what)
    names = [tier.type for tier in engine.secondary_tiers]
    if len(set(names)) < len(names):
        what = f"two have the type {names[0]}: tell them apart"
        yield Conflict("engine.secondary_tiers", "", what)
    if engine.prefix_cache == "hash":
        return
    overlaps = engine.async_scheduling and sglang
    for key, good, why in (
        ("enable_prefix_caching", True, "needs enable_prefix_caching: true"),
        ("async_scheduling", overlaps, "radix cannot be used with async_scheduling, but in sglang"),
        ("allocation", "paged", "needs allocation: paged"),
        ("scheduler", "headway", "vLLM's scheduler has the hash chain alone"),
    ):
        if getattr(engine, key) != good:
            yield Conflict("engine.prefix_cache", f"engine.{key}", why)


def _check_trace(scenario: Scenario) -> Iterator[Conflict]:
    """See whether the trace is there and its options go with its format."""
    trace = scenario.workload.trace
    if trace is None:
        return
    from simulator.workload.traces import OPTIONS, formats_with, missing_trace

    path = resolve(trace.path, scenario.folder)
    if not path.exists():
        for message in missing_trace(path).messages:
            yield Conflict("workload.trace.path", "", message)
    elif wrong := why_not_regular(path):
        yield Conflict("workload.trace.path", "", wrong)
    for option in OPTIONS:
        if trace.format is None or getattr(trace, option, None) is None:
            continue
        if trace.format not in (forms := formats_with(option)):
            what = f"needs format {' or '.join(forms)}, not {trace.format}"
            yield Conflict(f"workload.trace.{option}", "workload.trace.format", what)


def _check_cluster(
    scenario: Scenario, cluster: ClusterConfig, specs: dict[str, EngineSpec | None]
) -> Iterator[Conflict]:
    """Check what the groups are to one another, and each as a scenario of its own.

    `specs` gets what each group is; it has what the scenario's own engine is, which all replicas
    have where there are no groups.
    """
    # A data-parallel server by itself has a cluster of one that says no more.
    asked = any(map(cluster.is_given, cluster.model_fields.keys() - {"replicas"}))
    alone = cluster.most_replicas == 1 and not asked
    for name in cluster.replica_groups:
        engine = scenario.of_group(name).engine
        for key in QUEUE_LIMITS:
            if getattr(engine, key) is not None and not alone:
                block = f"cluster.groups.{name}.engine" if name in cluster.groups else "engine"
                what = "is not simulated with a cluster: see cluster.admission"
                yield Conflict(f"{block}.{key}", "cluster", what)
    roles = [*check_roles(cluster, "kv"), *check_encoders(scenario, cluster)][:1]
    yield from roles
    # What the scenario itself gets wrong is told already.
    for name, group in cluster.groups.items():
        own = scenario.of_group(name)
        conflicts, specs[name] = _check(own)
        for found in conflicts:
            of_group = {"gpu", "engine", "cost", "host", *(["model"] if group.model else [])}
            in_group = found.blamed.partition(".")[0] in of_group
            blamed = f"cluster.groups.{name}.{found.blamed}" if in_group else found.blamed
            yield found._replace(blamed=blamed)
    if not roles and cluster.kv_transfer is not None:
        model = next((spec.model for spec in specs.values() if spec is not None), None)
        yield from _check_transfers(scenario, cluster, model)
    yield from _check_keys(cluster)
    yield from _check_resilience(scenario, cluster, specs.values())


def _check_keys(cluster: ClusterConfig) -> Iterator[Conflict]:
    """Find keys that were given without the one that they say more about."""
    for block, key, other in DEPENDENT_KEYS:
        values = getattr(cluster, block)
        if values is not None and not getattr(values, other) and values.is_given(key):
            what = f"needs {other}; {key} alone has no effect"
            yield Conflict(f"cluster.{block}.{key}", f"cluster.{block}.{other}", what)
    client, admission = cluster.client, cluster.admission
    if client is None or not client.max_retries:
        return
    refuses = admission is not None and (admission.max_outstanding or admission.rate)
    if not (client.timeout or client.ttft_timeout or refuses):
        what = "needs timeout, ttft_timeout or admission: else no try comes to nothing"
        yield Conflict("cluster.client.max_retries", "cluster.client cluster.admission", what)


def _check_resilience(
    scenario: Scenario, cluster: ClusterConfig, specs: Iterable[EngineSpec | None]
) -> Iterator[Conflict]:
    """See whether scaling, failures and timeouts go with the rest."""
    failures, client = cluster.failures, cluster.client
    bounds = scenario.goodput.bounds or scenario.goodput.classes
    for name, scaling in cluster.scalers.items():
        if scaling.metric == "slo_attainment" and not bounds:
            key = f"{cluster.scaler_key(name)}.metric"
            yield Conflict(key, "goodput", "slo_attainment needs bounds in goodput")
    budget = cluster.max_gpu_budget
    first = sum(
        group.replicas * scenario.of_group(name).engine.gpus
        for name, group in cluster.replica_groups.items()
    )
    if budget is not None and first > budget:
        what = f"the groups begin with {first} GPUs"
        yield Conflict("cluster.max_gpu_budget", "cluster.groups", what)
    count = cluster.most_replicas
    for at, outage in enumerate(failures.outages if failures is not None else ()):
        if outage.replica >= count:
            key = f"cluster.failures.outages.{at}.replica"
            what = f"there is no replica {outage.replica}; the last is {count - 1}"
            yield Conflict(key, "cluster", what)
    if client is None or (client.timeout is None and client.ttft_timeout is None):
        return
    for spec in filter(None, specs):
        if spec.scheduler is None or not spec.scheduler.traits.cancels:
            what = "timeouts: the scheduler cannot let a request go before its end"
            yield Conflict("cluster.client", "engine", what)
            return


def _check_transfers(
    scenario: Scenario, cluster: ClusterConfig, model: ModelSpec | None
) -> Iterator[Conflict]:
    """Yield the keys in which engines differ and must not: a KV block goes over as it is."""
    first = next(iter(cluster.groups))
    one = scenario.of_group(first).engine
    for name in cluster.groups:
        other = scenario.of_group(name).engine
        for key, mine, its in (
            ("block_size", one.block_size, other.block_size),
            ("kv_cache_dtype", _kv_dtype(one, model), _kv_dtype(other, model)),
        ):
            if mine != its:
                what = f"must be that of {first} ({mine}), not {its}"
                yield Conflict(f"cluster.groups.{name}.engine.{key}", "engine", what)
        sizes = [one.tensor_parallel_size, other.tensor_parallel_size]
        if max(sizes) % min(sizes):
            what = f"{sizes[1]} and that of {first} ({sizes[0]}): one must divide the other, or no "
            what += "GPU has the heads that another wants"
            yield Conflict(f"cluster.groups.{name}.engine.tensor_parallel_size", "engine", what)


def _kv_dtype(engine: EngineConfig, model: ModelSpec | None) -> str:
    """Name the numbers of a KV cache; auto where the model is at fault, which is told elsewhere."""
    kind = engine.cache_dtype
    if model is not None:
        with suppress(HeadwayError, ValueError):
            kind = model.resolve_dtype(kind)
    return "fp8_e4m3" if kind == "fp8" else kind
