"""From what a scenario's `cost` says to a cost model: profiles, forms, rooflines, overheads.

Rooflines and pipelines are imported by those alone who ask for them.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from simulator.core.engine_config import UNIFORM, EngineConfig, HostConfig
from simulator.costs.cost_model import CostModel
from simulator.costs.linear import Fitted
from simulator.costs.noise import check_residuals
from simulator.costs.overhead import (
    HOST_KEYS,
    VLLM,
    Overhead,
    choose_overhead,
    find_overhead,
    host_terms,
    samples_truncated,
)
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.profile import FORMS, find_profile, make_form, read_profile
from simulator.models.gpus import GPUS, HOST_SHARE, Gpu
from simulator.models.kv_budget import kv_block_bytes
from simulator.models.spec import ModelSpec
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.from_mapping import prefix_keys, short_repr

if TYPE_CHECKING:
    from simulator.costs.pipeline import PipelineCost, Stage

SAME_HOST = HostConfig()
"""The host by which an engine's overhead, or a profile, was measured."""


def load_cost(
    spec: Mapping[str, object] | str,
    base: Path | None = None,
    *,
    model: ModelSpec,
    gpu: Gpu,
    engine: EngineConfig,
    host: HostConfig = SAME_HOST,
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
    target = _Target(model, gpu, engine, host)
    try:
        _refuse_two_hosts(spec, host)
        cost = _load(spec, base, target)
    except HeadwayError:
        raise
    except ValueError as error:
        if str(error).startswith(("engine.", "host")):
            raise
        raise prefix_keys("cost", error) from None
    if engine.pipeline_parallel_size > 1:
        return _make_pipeline(cost, spec, base, target)
    return _with_copies(cost, model, gpu, engine)


def _load(spec: Mapping[str, object], base: Path | None, target: "_Target") -> Fitted:
    """Make what a mapping says, for all layers or those of the target's stage."""
    terms = {key: value for key, value in spec.items() if key != "residuals"}
    if "profile" in terms:
        cost = _load_profile(terms, base, target)
    elif terms.get("kind") == "roofline":
        cost = _make_roofline(terms, target)
    else:
        cost = _make_form(terms, target)
    return _with_residuals(cost, spec["residuals"]) if "residuals" in spec else cost


def _make_pipeline(
    whole: Fitted,
    spec: Mapping[str, object],
    base: Path | None,
    target: "_Target",
) -> "PipelineCost":
    """Split a cost of all layers into stages."""
    from simulator.costs.pipeline import link_of, make_pipeline, stages_of

    model, engine, link = target.model, target.engine, link_of(target.gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadwayWarning)  # `whole` has told them
        stages = [
            _load(spec, base, target._replace(stage=stage))
            for stage in stages_of(model, engine.pipeline_parallel_size)
        ]
    if engine.pipeline_parallel_bandwidth is not None:
        link = link._replace(bandwidth=engine.pipeline_parallel_bandwidth * 1e9)
    return make_pipeline(whole, stages, model, link)


class _Target(NamedTuple):
    """What a cost is loaded for."""

    model: ModelSpec
    gpu: Gpu
    engine: EngineConfig
    host: HostConfig = SAME_HOST
    stage: "Stage | None" = None  # of a pipeline; None: all layers

    @property
    def overlapped(self) -> bool:
        """Whether the host's work is hidden behind the kernels."""
        return self.engine.async_scheduling

    @property
    def overhead(self) -> Overhead:
        """What the engine's version adds to its kernels."""
        return find_overhead(self.engine, self.gpu)

    def add_overhead(self, overhead: Overhead, kernels: Fitted) -> Fitted:
        """Put an overhead on a cost of kernels alone."""
        engine, stage = self.engine, self.stage
        sampled = samples_truncated(self.model, engine.generation_config)
        if self.host != SAME_HOST:
            overhead = overhead.with_host(self.host, overlapped=self.overlapped)
        return overhead.add_to(
            self.part(kernels),
            overlapped=self.overlapped,
            model=self.model,
            gpu=self.gpu,
            sampled=sampled and (stage is None or stage.last),
            tensor_parallel_size=engine.tensor_parallel_size,
            layers=self.model.num_hidden_layers if stage is None else stage.layers,
        )

    def part(self, cost: Fitted) -> Fitted:
        """Return the share of a stage of a cost of all layers."""
        return cost if self.stage is None else self.stage.part(cost)


def with_overhead(kernels: Fitted, model: ModelSpec, gpu: Gpu, engine: EngineConfig) -> Fitted:
    """Put what the engine adds on a cost of kernels alone, by its version and its scheduling."""
    target = _Target(model, gpu, engine)
    return target.add_overhead(target.overhead, kernels)


def _load_profile(spec: Mapping[str, object], base: Path | None, target: _Target) -> Fitted:
    """Load what `{profile: name or path}` names, and warn where it is of something else."""
    if extra := [key for key in spec if key not in {"profile", "overhead"}]:
        raise ValueError("\n".join(f"{key}: cannot be given beside `profile`" for key in extra))
    named = spec["profile"]
    if not isinstance(named, str):
        raise ValueError(f"profile: must be a name or a path, not {short_repr(named)}")
    profile = read_profile(find_profile(named, base))
    overhead = choose_overhead(spec.get("overhead"), profile.overhead, target.overhead)
    cost, gpu = profile.routed(target.engine), target.gpu
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
    if overhead is None:
        return _with_host(target.part(cost), target.host)
    return target.add_overhead(overhead, cost)


def _with_host(cost: Fitted, host: HostConfig) -> Fitted:
    """Put a server's own host into a cost that has its engine's overhead within."""
    if host == SAME_HOST:
        return cost
    told = {key: value for key, value in host_terms(host).items() if key != "step"}
    changed = cost.with_host(**told)
    if host.launch_gap is not None:
        raise ValueError(f"host.launch_gap: {cost.name} has it within its terms")
    return changed


def _make_roofline(spec: Mapping[str, object], target: _Target) -> Fitted:
    """Make a roofline of the scenario's model, GPU and precision.

    Experts that are spread over data-parallel ranks come on top (`data_parallel.py`).
    """
    from simulator.costs.roofline import roofline

    if extra := [key for key in spec if key not in {"kind", "overhead"}]:
        raise ValueError("\n".join(f"{key}: roofline takes no terms" for key in extra))
    overhead = choose_overhead(spec.get("overhead"), VLLM, target.overhead)
    assert overhead is not None  # there is a default
    engine = target.engine
    if engine.expert_routing != UNIFORM:
        raise ValueError("engine.expert_routing: a roofline knows uniform routing alone")
    kernels = roofline(
        target.model,
        target.gpu,
        tensor_parallel_size=engine.tensor_parallel_size,
        dtype=engine.weight_dtype,
        kv_cache_dtype=engine.cache_dtype,
        routed=engine.data_parallel_size == 1,
    )
    return target.add_overhead(overhead, kernels)


def _make_form(spec: Mapping[str, object], target: _Target) -> Fitted:
    """Make a form whose terms are all given."""
    kind = spec.get("kind")
    if kind not in FORMS:
        known = ", ".join((*FORMS, "roofline"))
        given = f", not {short_repr(kind)}" if "kind" in spec else ""
        raise ValueError(f"kind: must be {known}{given}; or give `profile`: a name or a path")
    if kind != "linear":
        spec = {"overlapped": target.overlapped, **spec}
    return _with_host(target.part(make_form(spec, str(kind))), target.host)


def _refuse_two_hosts(spec: Mapping[str, object], host: HostConfig) -> None:
    """Refuse a host that is told twice; ValueError by key."""
    told = spec.get("overhead")
    if not isinstance(told, Mapping):
        return
    for key, value in host:
        if value is not None and HOST_KEYS[key] in told:
            raise ValueError(f"host.{key}: cost.overhead.{HOST_KEYS[key]} says it, too")


def _with_residuals(cost: Fitted, raw: object) -> Fitted:
    try:
        return replace(cost, residuals=check_residuals(raw))
    except ValueError as error:
        raise prefix_keys("residuals", error) from None


def _with_copies(cost: Fitted, model: ModelSpec, gpu: Gpu, engine: EngineConfig) -> Fitted:
    """Charge for copies to the host by the given bandwidth, else by the cost model's terms.

    Where it has none, by the bus. Loads from the host tier take what swaps back do, unless told.
    """
    size, given = kv_block_bytes(model, engine), engine.swap_bandwidth
    if given is not None or not (cost.swap_out_per_block or cost.swap_in_per_block):
        each = size / (gpu.host_bandwidth * HOST_SHARE if given is None else given * 1e9)
        cost = replace(
            cost, swap_out=0.0, swap_out_per_block=each, swap_in=0.0, swap_in_per_block=each
        )
    load = cost.swap_in_per_block
    if engine.kv_offloading_bandwidth is not None:
        load = size / (engine.kv_offloading_bandwidth * 1e9)
    return replace(
        cost,
        swap_overlap=engine.swap_overlap,
        load=engine.kv_offloading_latency / 1000.0,
        load_per_block=load,
    )
