"""From what a scenario's `cost`, `host` and `engine` say to what an engine's steps cost.

Here alone what they leave open is settled: by a shipped profile or a roofline, by the engine's
version, by what a GPU's links reach. Rooflines and pipelines are imported by those alone who ask
for them.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simulator.build.engine_spec import EngineBlocks
from simulator.build.kv_room import engine_sizes
from simulator.core.engine_config import AUTO, UNIFORM, EngineConfig, HostConfig
from simulator.costs.cost_model import CostModel
from simulator.costs.linear import Fitted
from simulator.costs.noise import check_residuals
from simulator.costs.overhead import (
    NEWEST,
    Overhead,
    find_overhead,
    read_version,
    samples_truncated,
    unknown_overhead,
)
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.profile import (
    EXPERT_KERNELS,
    FORMS,
    find_profile,
    make_form,
    nearest_profile,
    read_profile,
    settings_of,
    shipped_profiles,
)
from simulator.features import features_of
from simulator.models.gpus import GPUS, HOST_SHARE, Gpu
from simulator.models.kv_budget import kv_block_bytes
from simulator.models.spec import ModelSpec
from simulator.util.errors import (
    HeadwayWarning,
    MappingError,
    ScenarioError,
    at_key,
    unknown_key,
)
from simulator.util.from_mapping import from_mapping, raise_if, short_repr

if TYPE_CHECKING:
    from simulator.costs.pipeline import Stage

HOST_KEYS = {
    "per_step": "host",
    "per_sequence": "host_per_sequence",
    "launch_gap": "step",
    "per_step_interval": "host_interval",
}
"""What the keys of a scenario's `host` are called among the terms of an overhead."""


def make_cost(own: EngineBlocks, model: ModelSpec, gpu: Gpu) -> CostModel:
    """Make what an engine's steps cost: as their `cost` says, else by a profile or the roofline.

    Profiles know of no experts that are spread over data-parallel ranks.
    """
    engine = own.engine
    if own.role == "ec_producer" and engine.multimodal_config is not None:
        from simulator.features.images import FEATURE
        from simulator.features.images.cost import NothingElse

        return FEATURE.cost(NothingElse(), engine, model, gpu)
    if not model.num_experts:
        given = engine.expert_routing not in (AUTO, UNIFORM), engine.enable_expert_parallel
        for key, wrong in zip(("expert_routing", "enable_expert_parallel"), given, strict=True):
            if wrong:
                raise ScenarioError(f"engine.{key}", f"{model.name} has no experts")
    parallel = engine.data_parallel_size > 1 and model.num_experts > 0
    if parallel and engine.pipeline_parallel_size > 1:
        what = "must be 1 where data-parallel ranks share experts"
        raise ScenarioError("engine.pipeline_parallel_size", what)
    shipped = None if parallel or own.cost else nearest_profile(model, gpu, engine)
    if engine.expert_routing not in (AUTO, UNIFORM) and own.cost is None and shipped is None:
        what = _why_uniform(model, gpu, engine, parallel=parallel)
        raise ScenarioError("engine.expert_routing", what)
    spec = own.cost or ({"profile": shipped} if shipped else {"kind": "roofline"})
    cost = load_cost(spec, own.folder, model=model, gpu=gpu, engine=engine, host=own.host)
    for feature in features_of(engine):
        cost = feature.cost(cost, engine_sizes(engine, model), model, gpu)
    if not parallel:
        return cost
    from simulator.costs.data_parallel import DataParallelCost, Experts

    experts = None
    if spec.get("kind") == "roofline":
        sizes = engine.tensor_parallel_size, engine.data_parallel_size
        experts = Experts(model, gpu, engine.weight_dtype, *sizes)
    kernels = cost.without_host() if engine.async_scheduling else None
    return DataParallelCost(cost, engine.data_parallel_size, experts, kernels)


def _why_uniform(model: ModelSpec, gpu: Gpu, engine: EngineConfig, *, parallel: bool) -> str:
    """Say why experts can only be chosen evenly where no profile is taken."""
    if parallel:
        return (
            "experts that data-parallel ranks share are by roofline, which "
            f"knows {UNIFORM} routing alone"
        )
    others = any(name.startswith(f"{model.name}.") for name in shipped_profiles())
    there = "; `headway profile list` has profiles of other layouts" if others else ""
    words = [f"{key} {value}" for key, value in settings_of(model, engine).items()]
    return (
        f"no profile is shipped of {model.name} on {gpu.name} with "
        f"{', '.join(words)}, and the roofline in its place knows {UNIFORM} alone{there}"
    )


def load_cost(
    spec: Mapping[str, Any] | str,
    base: Path | None = None,
    *,
    model: ModelSpec,
    gpu: Gpu,
    engine: EngineConfig,
    host: HostConfig | None = None,
) -> CostModel:
    """Make the cost model of a scenario's `cost`.

    `spec` is the name of a shipped profile or the path of one, alone or as `{profile: ...}`, or a
    mapping with `kind` (linear, piecewise, roofline) and the form's terms in seconds. A relative
    path is looked up in `base`, then in the folder that HEADWAY_DATA names. A profile that was
    fitted to another `model` is taken, with a HeadwayWarning; kernels of another `gpu` are scaled
    by the two data sheets. What the engine adds to its kernels, by its `version`, comes on top of
    a roofline and of profiles that name an `overhead`;
    `overhead: vllm` beside one that names none adds it, too, and a mapping changes terms of it.
    `host` puts a server's own host in place of the version's, or of a profile's.
    `residuals`, beside either, are how far off its steps may be (`noise`), in place of the
    profile's own.
    Copies of KV blocks to the host cost what the form's swap terms say; where it has none, what
    the GPU's bus takes for the bytes. Raises ValueError, lines of `cost.key: what is wrong`, and
    HeadwayError about a profile's file.
    """
    if isinstance(spec, str):
        spec = {"profile": spec}
    target = _Target(model, gpu, engine, _host_terms(host))
    with at_key("cost", ScenarioError):
        kernels, overhead = _read_cost(spec, base, target)
        whole = target.put(overhead, kernels)
    if engine.pipeline_parallel_size == 1:
        return _with_copies(whole, model, gpu, engine)
    from simulator.costs.pipeline import link_of, make_pipeline, stages_of

    stages = stages_of(model, engine.pipeline_parallel_size)
    link, given = link_of(gpu), engine.pipeline_parallel_bandwidth
    if given is not None:
        link = link._replace(bandwidth=given * 1e9)
    parts = [target.put(overhead, kernels, stage) for stage in stages]
    return make_pipeline(whole, parts, model, link)


class _Target(NamedTuple):
    """What a cost is put together for."""

    model: ModelSpec
    gpu: Gpu
    engine: EngineConfig
    host: Mapping[str, Any]  # terms of a server's own host; {}: as its engine's version has it

    def put(
        self, overhead: Overhead | None, kernels: Fitted, stage: "Stage | None" = None
    ) -> Fitted:
        """Put an overhead on kernels, or the host into a cost that has its engine's within.

        That is for all layers, or those of a pipeline's stage.
        """
        engine = self.engine
        part = kernels if stage is None else stage.part(kernels)
        if overhead is None:
            return _with_host(part, self.host)
        if self.host:
            known = overhead if engine.async_scheduling else overhead.as_host_work()
            overhead = replace(known, **self.host)
        servers = (engine.api_server_count or engine.data_parallel_size) / engine.data_parallel_size
        ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
        overhead = overhead.of_server(ranks=ranks, api_servers=servers)
        sampled = samples_truncated(self.model, engine.generation_config)
        return overhead.add_to(
            part,
            overlapped=engine.async_scheduling,
            model=self.model,
            gpu=self.gpu,
            sampled=sampled and (stage is None or stage.last),
            tensor_parallel_size=engine.tensor_parallel_size,
            layers=self.model.num_hidden_layers if stage is None else stage.layers,
        )


def with_overhead(kernels: Fitted, model: ModelSpec, gpu: Gpu, engine: EngineConfig) -> Fitted:
    """Put what the engine adds on a cost of kernels alone, by its version and its scheduling."""
    return _Target(model, gpu, engine, {}).put(version_overhead(engine, gpu), kernels)


def version_overhead(engine: EngineConfig, gpu: Gpu) -> Overhead:
    """Return what an engine's version of vLLM, or the newest known, adds to its kernels."""
    version = read_version(engine.version or "") or NEWEST
    return find_overhead(version, gpu, engine.cache_dtype, overlapped=engine.async_scheduling)


def _host_terms(host: HostConfig | None) -> dict[str, Any]:
    """Return the terms of an overhead that a scenario's `host` sets."""
    terms = {HOST_KEYS[key]: value for key, value in host or () if value is not None}
    known: dict[str, Any] = {"host_interval": (), "host_ranks": 0.0} if "host" in terms else {}
    return known | ({"step_interval": ()} if "step" in terms else {}) | terms


def _with_host(cost: Fitted, host: Mapping[str, Any]) -> Fitted:
    """Put a server's own host into a cost that has its engine's overhead within."""
    if not host:
        return cost
    within = ("step", "host_ranks")  # of its terms, and of its host
    changed = cost.with_host(**{key: value for key, value in host.items() if key not in within})
    if "step" in host:
        raise ScenarioError("host.launch_gap", f"{cost.name} has it within its terms")
    return changed


def _read_cost(
    spec: Mapping[str, Any], base: Path | None, target: _Target
) -> tuple[Fitted, Overhead | None]:
    """Read a scenario's `cost`; give its kernels, and what comes on top of them.

    None: nothing, as their engine's overhead is within.
    """
    terms = {key: value for key, value in spec.items() if key != "residuals"}
    if "profile" in terms:
        kernels, overhead = _load_profile(terms, base, target)
    elif terms.get("kind") == "roofline":
        kernels, overhead = _make_roofline(terms, target)
    else:
        kernels, overhead = _make_form(terms, target), None
    if "residuals" in spec:
        with at_key("residuals"):
            kernels = replace(kernels, residuals=check_residuals(spec["residuals"]))
    return kernels, overhead


def _read_overhead(given: object, target: _Target) -> tuple[Overhead, Overhead | None]:
    """Return what `cost.overhead` puts on kernels alone, and on those with an engine's within.

    None: nothing. It is a name, a mapping of terms that replace those of the engine's version (of
    those with an engine's within: those left out are 0), or None: the version's, on kernels alone.
    ValueError says which term is wrong.
    """
    standard = version_overhead(target.engine, target.gpu)
    if given is None:
        return standard, None
    if isinstance(given, str):
        raise_if((bool(wrong := unknown_overhead(given)), "overhead", wrong))
        return standard, standard
    with at_key("overhead"):
        read = from_mapping(Overhead, given)
        read.check()
    assert isinstance(given, Mapping)  # else `from_mapping` has refused it
    for key, term in HOST_KEYS.items():
        if term in given and term in target.host:
            raise ScenarioError(f"host.{key}", f"cost.overhead.{term} says it, too")
    terms = {key: getattr(read, key) for key in given}
    if "host" in terms:  # the whole of it
        terms = {"host_ranks": 0.0} | terms
    return replace(standard, **terms), replace(Overhead(), **terms)


def _load_profile(
    spec: Mapping[str, Any], base: Path | None, target: _Target
) -> tuple[Fitted, Overhead | None]:
    """Load what `{profile: name or path}` names, and warn where it is of something else."""
    if extra := [key for key in spec if key not in {"profile", "overhead", "experts"}]:
        raise MappingError.of({k: f"{spec[k]!r} cannot be given beside `profile`" for k in extra})
    named = spec["profile"]
    if not isinstance(named, str):
        raise MappingError("profile", f"must be a name or a path, not {short_repr(named)}")
    profile = read_profile(find_profile(named, base))
    alone, within = _read_overhead(spec.get("overhead"), target)
    kernel = spec.get("experts", "")
    if kernel and (kernel not in EXPERT_KERNELS or not profile.marlin):
        known = " or ".join(EXPERT_KERNELS) if profile.marlin else "no choice of kernels"
        raise MappingError("experts", f"must be {known}, not {short_repr(kernel)}")
    cost, gpu = profile.routed(target.engine, target.model, kernel), target.gpu
    measured = GPUS.get(str(profile.hardware.get("gpu")), gpu)
    if profile.overhead and measured is not gpu and isinstance(cost, PiecewiseCost):
        from simulator.costs.data_sheet import scale_cost

        cost, gpu = scale_cost(cost, target.model, target.engine, measured, gpu), measured
    if differences := profile.differences(target.model, gpu, target.engine):
        warnings.warn(
            f"cost profile {profile.cost.name} was fitted to {'; '.join(differences)}",
            HeadwayWarning,
            stacklevel=2,
        )
    return cost, within if profile.overhead is None else alone


def _make_roofline(spec: Mapping[str, Any], target: _Target) -> tuple[Fitted, Overhead]:
    """Make a roofline of the scenario's model, GPU and precision.

    Experts that are spread over data-parallel ranks come on top (`data_parallel.py`).
    """
    from simulator.costs.roofline import roofline

    known = ("kind", "overhead", "residuals")
    if extra := {key: unknown_key(key, known) for key in spec if key not in known}:
        raise MappingError.of(extra, "key")
    overhead, _ = _read_overhead(spec.get("overhead"), target)
    engine = target.engine
    if engine.expert_routing not in (AUTO, UNIFORM):
        raise ScenarioError("engine.expert_routing", "a roofline knows uniform routing alone")
    kernels = roofline(
        target.model,
        target.gpu,
        tensor_parallel_size=engine.tensor_parallel_size,
        dtype=engine.weight_dtype,
        kv_cache_dtype=engine.cache_dtype,
        routed=engine.data_parallel_size == 1,
    )
    return kernels, overhead


def _make_form(spec: Mapping[str, Any], target: _Target) -> Fitted:
    """Make a form whose terms are all given."""
    kind = spec.get("kind")
    if kind not in FORMS:
        known = ", ".join((*FORMS, "roofline"))
        given = f", not {short_repr(kind)}" if "kind" in spec else ""
        raise MappingError("kind", f"must be {known}{given}; or give `profile`: a name or a path")
    if kind != "linear":
        spec = {"overlapped": target.engine.async_scheduling, **spec}
    return make_form(spec, str(kind))


def _with_copies(cost: Fitted, model: ModelSpec, gpu: Gpu, engine: EngineConfig) -> Fitted:
    """Charge for copies to the host by the given bandwidth, else by the cost model's terms.

    Where it has none, by the bus. Loads from the host tier take what swaps back do, unless told.
    """
    size, given = kv_block_bytes(model, engine), engine.swap_bandwidth
    load, swaps = cost.swap_in_per_block, dict[str, Any]()
    if given is not None or not (cost.swap_out_per_block or load):
        load = size / (gpu.host_bandwidth * HOST_SHARE if given is None else given * 1e9)
        swaps = {"swap_out": 0.0, "swap_in": 0.0}
        swaps |= dict.fromkeys(("swap_out_per_block", "swap_in_per_block"), load)
    if engine.kv_offloading_bandwidth is not None:
        load = size / (engine.kv_offloading_bandwidth * 1e9)
    return replace(
        cost,
        swap_overlap=engine.swap_overlap,
        load=engine.kv_offloading_latency / 1000.0,
        load_per_block=load,
        **swaps,
    )
