"""What a scenario's keys must be to one another, to the model, to the hardware and to the disk."""

from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from simulator.models.gpus import find_gpu
from simulator.models.kv_budget import kv_budget
from simulator.models.load import load_model
from simulator.scenario.assemble import cancels, make_cost, make_scheduler
from simulator.scenario.cluster_config import ClusterConfig
from simulator.scenario.engine_config import EngineConfig
from simulator.scenario.engines import fraction_of
from simulator.scenario.parts import Parts
from simulator.scenario.policy_table import find_policy
from simulator.scenario.scenario import Scenario
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError
from simulator.util.files import resolve
from simulator.util.yaml_lines import Fault, Key

T = TypeVar("T")

SIZES = {
    "tensor_parallel_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "block_size",
    "max_num_batched_tokens",
    "max_num_seqs",
}
"""Keys of the engine on which the memory left for the KV cache depends."""

POLICY = "engine.scheduling_policy"

TOGETHER = (
    ("admission", "shed_from", "max_outstanding"),
    ("admission", "burst", "rate"),
    ("client", "backoff", "max_retries"),
    ("client", "backoff_factor", "max_retries"),
    ("client", "jitter", "max_retries"),
    ("failures", "mttr", "mtbf"),
)
"""Blocks of a cluster, keys of them, and the other key without which these have no effect."""

Contradiction = tuple[str, str, str]
"""The key to blame ("" where the message names its own place), others that have a part in it,
and what is wrong."""


def contradictions(scenario: Scenario, wrong: set[Key]) -> tuple[list[Fault], list[str]]:
    """Find what is wrong in the scenario, and what in the files that it names.

    What depends on a key that is wrong already is left out.
    """
    found: list[Fault] = []
    elsewhere = []
    told: set[str] = set()
    for blamed, others, what in (*_find(scenario), *_groups(scenario)):
        keys = [tuple(name.split(".")) for name in (blamed, *others.split()) if name]
        if what in told or any(_touches(key, bad) for key in keys for bad in wrong):
            continue
        told.add(what)  # memory and cost model may both complain of the same thing
        if blamed:
            found.append((keys[0], what))
        else:
            elsewhere.append(what)
    return found, elsewhere


def _groups(scenario: Scenario) -> Iterator[Contradiction]:
    """Look at each group of a cluster as at a scenario of its own, and at the router."""
    if scenario.cluster is None:
        return
    from simulator.scenario.checks_apart import apart
    from simulator.scenario.cluster_parts import make_decode_router, make_router

    yield from _try("cluster.router", "", lambda: make_router(scenario))
    if scenario.cluster.kv_transfer is not None:
        yield from _try("cluster.kv_transfer.router", "", lambda: make_decode_router(scenario))
    yield from apart(scenario, scenario.cluster)
    yield from _cluster(scenario, scenario.cluster)
    for name in scenario.cluster.groups:  # what the scenario itself gets wrong is told already
        for blamed, others, what in _find(scenario.of_group(name)):
            if blamed.partition(".")[0] in {"gpu", "engine", "cost"}:
                yield f"cluster.groups.{name}.{blamed}", others, what
            else:
                yield blamed, others, what


def _cluster(scenario: Scenario, cluster: ClusterConfig) -> Iterator[Contradiction]:
    """See what the keys of a cluster ask of others."""
    yield from _alone(cluster)
    scaling, failures, client = cluster.autoscaling, cluster.failures, cluster.client
    bounds = scenario.goodput.model_dump(exclude_none=True)
    if scaling is not None and scaling.metric == "slo_attainment" and not bounds:
        yield "cluster.autoscaling.metric", "goodput", "slo_attainment needs bounds in goodput"
    count = sum(cluster.most(name) for name in cluster.kinds)
    for at, outage in enumerate(failures.outages if failures is not None else ()):
        if outage.replica >= count:
            key = f"cluster.failures.outages.{at}.replica"
            yield key, "cluster", f"there is no replica {outage.replica}; the last is {count - 1}"
    if failures is not None and any(
        scenario.of_group(name).engine.async_scheduling for name in cluster.kinds
    ):
        what = "an engine with two batches in flight does not fail; set async_scheduling to false"
        yield "cluster.failures", "engine", what
    if client is None or (client.timeout is None and client.ttft_timeout is None):
        return
    for name in cluster.kinds:
        own = scenario.of_group(name)
        found = yield from _try(POLICY, "", lambda own=own: cancels(own))  # type: ignore[misc]
        if found is False:
            what = "the scheduler cannot let a request go before its end"
            if own.engine.async_scheduling:
                what += "; set engine.async_scheduling to false"
            yield "cluster.client", "engine", f"timeouts: {what}"
            return


def _alone(cluster: ClusterConfig) -> Iterator[Contradiction]:
    """Find keys that were given without the one that they say more about."""
    for block, key, other in TOGETHER:
        values = getattr(cluster, block)
        if values is None or getattr(values, other):
            continue
        if getattr(values, key) != type(values).model_fields[key].default:
            what = f"goes with {other}; {key} alone has no effect"
            yield f"cluster.{block}.{key}", f"cluster.{block}.{other}", what
    client, door = cluster.client, cluster.admission
    if client is None or not client.max_retries:
        return
    patience = client.timeout or client.ttft_timeout
    refusals = door is not None and (door.max_outstanding or door.rate)
    if not patience and not refusals:
        what = "goes with timeout, ttft_timeout or admission: else no try comes to nothing"
        yield "cluster.client.max_retries", "cluster.client cluster.admission", what


def _touches(mine: Key, bad: Key) -> bool:
    length = min(len(mine), len(bad))
    return mine[:length] == bad[:length]


def _find(scenario: Scenario) -> Iterator[Contradiction]:
    numbers = list(_numbers(scenario))
    yield from numbers
    if scenario.engine.scheduler_cls and scenario.engine.scheduler != "vllm":
        yield "engine.scheduler_cls", "engine.scheduler", "goes with scheduler: vllm"
    yield from _trace(scenario)
    parts = yield from _parts(scenario)
    if parts and not numbers:
        yield from _try(POLICY, "engine predictor", lambda: _schedule(scenario, parts))


def _try(
    block: str, others: str, make: Callable[[], T]
) -> Generator[Contradiction, None, T | None]:
    """Make something; where it cannot be made, yield why and return None.

    A message begins with a key of the scenario, with one of its engine, or with a file; failing
    these it is about the value at `block`, or a key of it.
    """
    try:
        return make()
    except HeadwayError as error:
        lines, told = error.messages, True
    except ValueError as error:
        lines, told = str(error).split("\n"), False
    for line in lines:
        name, _, what = line.partition(": ")
        if name in EngineConfig.model_fields:
            yield f"engine.{name}", others, what
        elif name.split(".")[0] in Scenario.model_fields:
            yield name, others, what
        elif told:
            yield "", others, line
        elif name.isidentifier() and what:
            yield f"{block}.{name}", others, what
        else:
            yield block, others, line
    return None


def _schedule(scenario: Scenario, parts: Parts) -> Scheduler:
    """Make the scheduler; an argument of the wrong type is the user's mistake, too."""
    try:
        return make_scheduler(scenario, parts, False)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _numbers(scenario: Scenario) -> Iterator[Contradiction]:
    engine, gpus = scenario.engine, scenario.gpu.count
    tokens, seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    if tokens < seqs:
        yield (
            "engine.max_num_batched_tokens",
            "engine.max_num_seqs",
            f"must be at least max_num_seqs ({seqs}), not {tokens}: every running request wants a "
            "token of each step",
        )
    if engine.preemption_mode != "recompute" and engine.allocation != "paged":
        yield (
            "engine.preemption_mode",
            "engine.allocation",
            f"{engine.preemption_mode} goes with paged allocation, not with {engine.allocation}",
        )
    if engine.preemption_mode == "recompute" and not (
        engine.swap_overlap and engine.kv_offloading_size
    ):
        for key in ("swap_bandwidth", "swap_space", "swap_overlap"):
            if getattr(engine, key) != EngineConfig.model_fields[key].default:
                yield (
                    f"engine.{key}",
                    "engine.preemption_mode",
                    "goes with preemption_mode swap or auto, not with recompute",
                )
    yield from _prefix_cache(engine)
    if engine.reserve_output_tokens is not None and engine.allocation != "paged":
        yield (
            "engine.reserve_output_tokens",
            "engine.allocation",
            f"{engine.allocation} allocation reserves max_model_len for everybody anyway",
        )
    yield from _parallel(engine, gpus)


def _parallel(engine: EngineConfig, gpus: int) -> Iterator[Contradiction]:
    """See whether the GPUs are those that the engine shares out."""
    size, ranks = engine.tensor_parallel_size, engine.data_parallel_size
    if gpus != engine.gpus:
        words = f"({size})" if ranks == 1 else f"x data_parallel_size ({size} x {ranks})"
        yield (
            "gpu.count",
            "engine.tensor_parallel_size engine.data_parallel_size",
            f"must equal engine.tensor_parallel_size {words}, not {gpus}: "
            "one engine is simulated, which uses just these GPUs",
        )
    if ranks == 1 and engine.api_server_count is not None:
        what = "goes with a data_parallel_size of 2 and more: others have one engine to send to"
        yield "engine.api_server_count", "engine.data_parallel_size", what
    if ranks > 1 and engine.name not in (None, "vllm"):
        what = f"the internal load balancer is vLLM's; for {engine.name} use cluster.replicas"
        yield "engine.data_parallel_size", "engine.name", what


def _prefix_cache(engine: EngineConfig) -> Iterator[Contradiction]:
    """See whether a radix tree and a host tier go with what else the engine is to do."""
    if engine.kv_offloading_size is None:
        for key in ("kv_offloading_bandwidth", "kv_offloading_latency"):
            if getattr(engine, key):
                yield f"engine.{key}", "engine.kv_offloading_size", "goes with kv_offloading_size"
    else:
        for key, wanted in (
            ("enable_prefix_caching", True),
            ("prefix_cache", "hash"),
            ("allocation", "paged"),
            ("scheduler", "headway"),
        ):
            if getattr(engine, key) != wanted:
                word = str(wanted).lower()
                yield "engine.kv_offloading_size", f"engine.{key}", f"goes with {key}: {word}"
    if engine.prefix_cache == "hash":
        return
    for key, good, why in (
        ("enable_prefix_caching", True, "goes with enable_prefix_caching: true"),
        ("async_scheduling", False, "radix does not go with async_scheduling"),
        ("allocation", "paged", "goes with allocation: paged"),
        ("scheduler", "headway", "vLLM's scheduler has the hash chain alone"),
    ):
        if getattr(engine, key) != good:
            yield "engine.prefix_cache", f"engine.{key}", why


def _trace(scenario: Scenario) -> Iterator[Contradiction]:
    """See whether the trace is there and its options go with its format."""
    trace = scenario.workload.trace
    if trace is None:
        return
    from simulator.workload.traces import OPTIONS, missing_trace

    path = resolve(trace.path, scenario.folder)
    if not path.exists():
        for message in missing_trace(path).messages:
            yield "workload.trace.path", "", message
    for option, forms in OPTIONS.items():
        if getattr(trace, option) is not None and trace.format not in (None, *forms):
            yield (
                f"workload.trace.{option}",
                "workload.trace.format",
                f"goes with format {' or '.join(forms)}, not with {trace.format}",
            )


def _parts(scenario: Scenario) -> Generator[Contradiction, None, Parts | None]:
    """Try what a run is made of, piece by piece."""
    engine, folder = scenario.engine, scenario.folder
    found = yield from _try(POLICY, "", lambda: find_policy(scenario))
    gpu = yield from _try("gpu", "gpu.name", lambda: find_gpu(scenario.gpu.name))
    model = yield from _try("model", "model", lambda: load_model(scenario.model, folder))
    if model is None:
        return None
    longest = engine.max_model_len or model.max_position_embeddings
    too_small = not engine.enable_chunked_prefill and engine.max_num_batched_tokens < longest
    if too_small:
        yield (
            "engine.max_num_batched_tokens",
            "engine.enable_chunked_prefill engine.max_model_len model",
            f"without chunked prefill must be at least max_model_len ({longest}), not "
            f"{engine.max_num_batched_tokens}: the longest prompt must fit into one step",
        )
    if gpu is None:
        return None
    sizes = engine.model_dump(include=SIZES)
    if engine.num_gpu_blocks_override is not None:  # then it has no meaning, as in vLLM
        sizes["gpu_memory_utilization"] = 1.0
    sizes["fraction_of"] = fraction_of(engine.name)
    sizes["hybrid"] = not engine.disable_hybrid_kv_cache_manager
    others = " ".join(["gpu model", *(f"engine.{name}" for name in SIZES)])
    budget = yield from _try("gpu", others, lambda: kv_budget(model, gpu, **sizes))
    what = "cost model gpu engine"
    cost = yield from _try("cost", what, lambda: make_cost(scenario, model, gpu))
    if too_small or not (found and cost and budget):
        return None
    return Parts(model, gpu, cost, engine.num_gpu_blocks_override or budget.num_gpu_blocks, longest)
