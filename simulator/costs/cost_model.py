"""Cost models: what a scenario's `cost` says, made into an executor.

A cost model is an executor that computes seconds instead of spending them.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from simulator.core.executor import CanLeap
from simulator.core.request import Step
from simulator.costs.noise import check_residuals
from simulator.costs.overhead import VLLM, Overhead, choose_overhead, find_overhead
from simulator.costs.piecewise import LinearCost, PiecewiseCost
from simulator.costs.profile import (
    FORMS,
    Precision,
    find_profile,
    make_form,
    read_profile,
    shipped_profile,
)
from simulator.costs.roofline import roofline
from simulator.models.gpus import HOST_SHARE, Gpu
from simulator.models.spec import ModelSpec
from simulator.util.errors import HeadwayWarning
from simulator.util.from_mapping import inside

__all__ = [
    "CostModel",
    "LinearCost",
    "PiecewiseCost",
    "load_cost",
    "roofline",
    "shipped_profile",
]


class CostModel(CanLeap, Protocol):
    """An executor that computes what a step takes, and knows how far it can be trusted."""

    @property
    def name(self) -> str:
        """What reports call it."""

    def decode_seconds(
        self, counts: npt.NDArray[np.int64], contexts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Give the seconds of steps of so many decodes each that read so many tokens in all."""

    def swap_seconds(self, step: Step) -> float:
        """Give the seconds of a step's copies of KV blocks to the host and back."""

    @property
    def residuals(self) -> Mapping[str, float] | None:
        """Standard deviations of its relative errors by regime of steps, see `noise`."""

    def with_copies(self, seconds: float, step: Step) -> float:
        """Give the time of a step whose compute takes so many seconds, with its copies."""

    def logged_swap_seconds(self, swaps: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
        """Give the seconds of logged copies of KV blocks (rows of dtype SWAP)."""

    def outside(self, steps: npt.NDArray[np.void]) -> list[str]:
        """Say, a line per quantity, which logged steps lie outside the fitted range."""


def load_cost(
    spec: Mapping[str, object] | str,
    base: Path | None = None,
    *,
    model: ModelSpec | None = None,
    gpu: Gpu | None = None,
    engine: Precision | None = None,
) -> CostModel:
    """Make the cost model of a scenario's `cost`.

    `spec` is the name of a shipped profile or the path of one, alone or as `{profile: ...}`, or a
    mapping with `kind` (linear, piecewise, roofline) and the form's terms in seconds. A relative
    path is looked up in `base`, then in the folder that HEADWAY_DATA names. `roofline` needs
    `model` and `gpu`; a profile that was fitted to others is taken, with a HeadwayWarning. What
    the engine adds to its kernels, by its `version`, comes on top of a roofline and of profiles
    that name an `overhead`; `overhead: vllm` beside one that names none adds it, too, and a mapping
    changes terms of it.
    `residuals`, beside either, are how far off its steps may be (`noise`), in place of the
    profile's own.
    Copies of KV blocks to the host cost what the form's swap terms say; where it has none, what
    the GPU's bus takes for the bytes. Raises ValueError, lines of `cost.key: what is wrong`, and
    HeadwayError about a profile's file.
    """
    if isinstance(spec, str):
        spec = {"profile": spec}
    try:
        terms = {key: value for key, value in spec.items() if key != "residuals"}
        cost = _load(terms, base, model, gpu, engine)
        if "residuals" in spec:
            cost = _with_residuals(cost, spec["residuals"])
    except ValueError as error:
        raise inside("cost", error) from None
    if engine is None or model is None or gpu is None:
        return cost
    cost = _with_swaps(cost, model, gpu, engine)
    load = cost.swap_in_per_block
    if engine.kv_offloading_bandwidth is not None:
        load = kv_block_bytes(model, engine) / (engine.kv_offloading_bandwidth * 1e9)
    return replace(
        cost,
        swap_overlap=engine.swap_overlap,
        load=engine.kv_offloading_latency / 1000.0,
        load_per_block=load,
    )


def _with_residuals(cost: LinearCost | PiecewiseCost, raw: object) -> LinearCost | PiecewiseCost:
    try:
        return replace(cost, residuals=check_residuals(raw))
    except ValueError as error:
        raise inside("residuals", error) from None


def _load(
    spec: Mapping[str, object],
    base: Path | None,
    model: ModelSpec | None,
    gpu: Gpu | None,
    engine: Precision | None,
) -> LinearCost | PiecewiseCost:
    """Make what the keys of `cost` say."""
    if "profile" in spec:
        return _load_profile(spec, base, model, gpu, engine)
    if spec.get("kind") == "roofline":
        return _make_roofline(spec, model, gpu, engine)
    if spec.get("kind") not in FORMS:
        known = ", ".join((*FORMS, "roofline"))
        given = f", not {spec['kind']!r}" if "kind" in spec else ""
        raise ValueError(f"kind: must be {known}{given}; or give `profile`: a name or a path")
    if spec["kind"] != "linear":
        spec = {"overlapped": _overlapped(engine), **spec}
    return make_form(spec, str(spec["kind"]))


def _with_swaps(
    cost: LinearCost | PiecewiseCost, model: ModelSpec, gpu: Gpu, engine: Precision
) -> LinearCost | PiecewiseCost:
    """Charge for copies to the host by the given bandwidth, else by the cost model's terms.

    Where it has none, by the bus.
    """
    given = engine.swap_bandwidth
    if given is None and (cost.swap_out_per_block or cost.swap_in_per_block):
        return cost
    bandwidth = gpu.host_bandwidth * HOST_SHARE if given is None else given * 1e9
    seconds = kv_block_bytes(model, engine) / bandwidth
    return replace(
        cost, swap_out=0.0, swap_out_per_block=seconds, swap_in=0.0, swap_in_per_block=seconds
    )


def kv_block_bytes(model: ModelSpec, engine: Precision) -> float:
    """Bytes of a KV block on each GPU."""
    dtype = engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    share = model.kv_share(engine.tensor_parallel_size)
    return engine.block_size * model.kv_bytes_per_token(dtype) * share


def _load_profile(
    spec: Mapping[str, object],
    base: Path | None,
    model: ModelSpec | None,
    gpu: Gpu | None,
    engine: Precision | None,
) -> LinearCost | PiecewiseCost:
    """Load what `{profile: name or path}` names, and warn where it is of something else."""
    if extra := [key for key in spec if key not in {"profile", "overhead"}]:
        raise ValueError("\n".join(f"{key}: cannot be given beside `profile`" for key in extra))
    named = spec["profile"]
    if not isinstance(named, str):
        raise ValueError(f"profile: must be a name or a path, not {named!r}")
    profile = read_profile(find_profile(named, base))
    overhead = choose_overhead(spec.get("overhead"), profile.overhead, _standard(gpu, engine))
    if differences := profile.differences(model, gpu, engine):
        warnings.warn(
            f"cost profile {profile.cost.name} was fitted to {'; '.join(differences)}",
            HeadwayWarning,
            stacklevel=3,
        )
    if overhead is None or not isinstance(profile.cost, PiecewiseCost):
        return profile.cost
    return _put(overhead, profile.cost, model, engine)


def with_overhead(
    kernels: PiecewiseCost, model: ModelSpec | None, gpu: Gpu | None, engine: Precision | None
) -> PiecewiseCost:
    """Put what the engine adds on a cost of kernels alone, by its version and its scheduling."""
    return _put(_standard(gpu, engine), kernels, model, engine)


def without_host(cost: CostModel) -> CostModel:
    """Give what the kernels of a step take, and the waits that nothing hides."""
    if not isinstance(cost, PiecewiseCost):
        return cost
    return replace(
        cost, host=0.0, host_per_sequence=0.0, host_per_prefill=0.0, host_per_prefill_token=0.0
    )


def _standard(gpu: Gpu | None, engine: Precision | None) -> Overhead:
    """Give what the engine's version adds to its kernels."""
    version = engine.version if engine is not None else None
    return find_overhead(version, asynchronous=_overlapped(engine), gpu=gpu)


def _put(
    overhead: Overhead, kernels: PiecewiseCost, model: ModelSpec | None, engine: Precision | None
) -> PiecewiseCost:
    return overhead.on(
        kernels,
        overlapped=_overlapped(engine),
        model=model,
        tensor_parallel_size=engine.tensor_parallel_size if engine is not None else 1,
    )


def _overlapped(engine: Precision | None) -> bool:
    """Say whether the host's work is hidden behind the kernels."""
    return engine is not None and engine.async_scheduling


def _make_roofline(
    spec: Mapping[str, object], model: ModelSpec | None, gpu: Gpu | None, engine: Precision | None
) -> PiecewiseCost:
    """Make a roofline of the scenario's model, GPU and precision.

    Experts that are spread over data-parallel ranks come on top (`expert_cost`).
    """
    if extra := [key for key in spec if key not in {"kind", "overhead"}]:
        raise ValueError("\n".join(f"{key}: roofline takes no terms" for key in extra))
    overhead = choose_overhead(spec.get("overhead"), VLLM, _standard(gpu, engine))
    assert overhead is not None  # there is a default
    if model is None or gpu is None:
        raise ValueError("kind: roofline needs to know the model and the GPU")
    if engine is None:
        return _put(overhead, roofline(model, gpu), model, None)
    cache = engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    kernels = roofline(
        model,
        gpu,
        tensor_parallel_size=engine.tensor_parallel_size,
        dtype=engine.quantization or engine.dtype,
        kv_cache_dtype=cache,
        routed=engine.data_parallel_size == 1,
    )
    return _put(overhead, kernels, model, engine)
