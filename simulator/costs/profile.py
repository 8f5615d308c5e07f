"""Cost profiles: a fitted cost model in YAML, with its hardware, range, errors and sources."""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache, lru_cache
from numbers import Real
from pathlib import Path
from typing import NamedTuple, TypeVar

from simulator.core.engine_config import AUTO, UNIFORM, EngineConfig
from simulator.costs.linear import COPY_TERMS, QUANTITIES, Fitted, Limits
from simulator.costs.noise import check_residuals
from simulator.costs.overhead import NEWEST, read_version, unknown_overhead
from simulator.costs.tables import Table, check_table
from simulator.models.dtypes import HALF, bytes_of
from simulator.models.gpus import GPUS, Gpu
from simulator.models.load import load_model, shipped_models
from simulator.models.spec import ModelSpec
from simulator.util.errors import (
    FieldError,
    HeadwayError,
    MappingError,
    ScenarioError,
    field_errors,
    unknown_key,
)
from simulator.util.files import resolve, why_not_regular
from simulator.util.from_mapping import from_kind, raise_if, short_repr
from simulator.util.imported import Imported
from simulator.util.yaml_lines import SourceMap, parse, read_text

T = TypeVar("T")

PROFILES = Path(__file__).parent / "profiles"
GPU_KEYS = {
    "a100": "A100-80GB",
    "h100": "H100-80GB",
    "h200": "H200",
    "b200": "B200",
    "b300": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
    "l40s": "L40S",
    "rtx-4090": "RTX-4090",
    "rtx-pro-6000": "RTX-PRO-6000",
    "cpu": "CPU",
}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""What the words in a shipped profile's name stand for: MODEL.GPU[-tpN].WEIGHTS[-kvCACHE]."""

FINE_EXPERTS = 32
"""Experts of a layer, fewer than which count as few."""
POWER_LAWS = ("power_law_1.01", "power_law_1.2")
MARLIN = "marlin"
EXPERT_KERNELS = (MARLIN, "triton")
TRITON_SINCE = (0, 12, 0)
"""vLLM that carries OpenAI's Triton kernels in its wheel (pull request 28788): before, and beside
LoRA or with VLLM_MXFP4_USE_MARLIN, gpt-oss runs Marlin's on Hopper. GPUStack's performance lab
shows it: under 0.10.2 and 0.11.0 a step of 8,192 tokens of gpt-oss-120b takes 350 ms on one H100
and 210 on two, of gpt-oss-20b 226."""
FP8_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")

FORMS: Imported[type[Fitted]] = Imported(
    {
        "linear": "simulator.costs.linear:LinearCost",
        "piecewise": "simulator.costs.piecewise:PiecewiseCost",
        "piecewise-split": "simulator.costs.split:SplitCost",
    }
)
PROFILE_KEYS = (
    "model",
    "hardware",
    "engine",
    "overhead",
    "cost",
    "experts",
    "expert_parallel",
    "experts_marlin",
    "range",
    "residuals",
    "fit",
    "fallback",
    "assumptions",
    "sources",
    "notes",
)
RESERVED_FIELDS = (
    *(one.name for one in fields(Fitted) if one.name not in COPY_TERMS),
    "engine_overhead",
    "engine_prefill",
)
"""Fields of a form that are no terms of its own."""


class Profile(NamedTuple):
    """A fitted cost model, and what it was fitted to."""

    cost: Fitted
    model: str | None
    hardware: Mapping[str, object]  # gpu, tensor_parallel_size, dtype, kv_cache_dtype
    overhead: str | None  # the engine whose overhead comes on top; None: it is inside
    bare: Fitted | None  # without experts, where these have tables; `cost` has even ones
    experts: Mapping[str, Table]  # by routing, slices on each GPU
    expert_parallel: Mapping[str, Table]  # whole ones
    marlin: Mapping[str, Table]  # slices, by the kernel of vLLM before TRITON_SINCE

    def routed(self, engine: EngineConfig, model: ModelSpec, kernel: str = "") -> Fitted:
        """Return the cost with experts as an engine has and chooses them; ValueError by key.

        Their `kernel` is one of EXPERT_KERNELS; "": that of the engine's version.
        """
        whole = engine.enable_expert_parallel and engine.tensor_parallel_size > 1
        old = engine.follows_vllm and (read_version(engine.version or "") or NEWEST) < TRITON_SINCE
        marlin = kernel == MARLIN or (not kernel and (old or engine.enable_lora))
        tables = (marlin and self.marlin) or self.experts
        tables = self.expert_parallel if whole else tables
        routing: str = engine.expert_routing
        if routing == AUTO:
            routing = published_routing(model)
            routing = routing if routing in tables else UNIFORM
        if routing == UNIFORM and tables is self.experts:
            return self.cost
        if routing not in tables:
            key = "enable_expert_parallel" if whole and not tables else "expert_routing"
            raise ScenarioError(f"engine.{key}", f"{self.cost.name} has no times of such experts")
        assert self.bare is not None
        return self.bare.with_experts(tables[routing])

    def differences(self, model: ModelSpec, gpu: Gpu, engine: EngineConfig) -> list[str]:
        """Tell in what a run differs from the measurements, in the words `this, not that`."""
        wanted: dict[str, object] = {"gpu": gpu.name, **settings_of(model, engine)}
        found = [
            f"{key} {self.hardware[key]}, not {value}"
            for key, value in wanted.items()
            if key in self.hardware and not _cost_alike(self.hardware[key], value)
        ]
        if self.model is not None and not _same_shape(self.model, model):
            found.insert(0, f"{self.model}, not {model.name}")
        return found


def published_routing(model: ModelSpec) -> str:
    """Return how tokens choose a model's experts where nobody says.

    AIConfigurator (NVIDIA, Apache-2.0) gives the loads of experts by family of models: a power law
    of 1.01 for DeepSeek's, 1.2 for others. Models of few experts meet all of them in nearly every
    step and were trained to balance them: even.
    """
    if model.num_experts < FINE_EXPERTS or model.num_experts_per_tok < 2:
        return UNIFORM
    return POWER_LAWS[0] if model.latent is not None else POWER_LAWS[1]


def settings_of(model: ModelSpec, engine: EngineConfig) -> dict[str, object]:
    """Put an engine's settings into a profile's words."""
    return {
        "tensor_parallel_size": engine.tensor_parallel_size,
        "dtype": model.weight_dtype(engine.weight_dtype),
        "kv_cache_dtype": model.resolve_dtype(engine.cache_dtype),
    }


def _cost_alike(one: object, two: object) -> bool:
    """Compare two settings; dtypes of the same kind and width take the same time."""
    one, two = ("fp8" if word in FP8_DTYPES else word for word in (one, two))
    return one == two or all(isinstance(word, str) and _is_half(word) for word in (one, two))


@cache
def _is_half(word: str) -> bool:
    try:
        return bytes_of(word) == HALF
    except ValueError:
        return False


@cache
def _same_shape(name: str, model: ModelSpec) -> bool:
    """Return whether a model is the named one, or of the same shape as a shipped one so named."""
    return name == model.name or (
        name in shipped_models() and load_model(name).shape == model.shape
    )


@cache
def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    files = os.listdir(PROFILES)
    return sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))


def nearest_profile(model: ModelSpec, gpu: Gpu, engine: EngineConfig) -> str | None:
    """Find the name of the profile on this GPU, else on the likest one that was measured."""
    found = shipped_profile(model, gpu, engine)
    if found is None and gpu.similar:
        found = shipped_profile(model, GPUS[gpu.similar], engine)
    return found


def shipped_profile(model: ModelSpec, gpu: Gpu, engine: EngineConfig) -> str | None:
    """Find the name of the shipped profile of this model on this GPU.

    Models of the same shape share a profile: Llama-3.1-8B runs like Llama-3-8B.
    """
    wanted = {"gpu": gpu.name} | settings_of(model, engine)
    for name in shipped_profiles():
        hardware = named_hardware(name)
        # The files need not be parsed for this, and few models' shapes be compared.
        alike = all(_cost_alike(hardware[key], value) for key, value in wanted.items())
        if alike and _same_shape(name.rsplit(".", 2)[0], model):
            return name
    return None


@cache
def named_hardware(name: str) -> Mapping[str, object]:
    """Say what a shipped profile's name stands for."""
    _, key, dtypes = name.rsplit(".", 2)
    gpu, _, gpus = key.partition("-tp")
    weights, _, kv_cache = dtypes.partition("-kv")
    dtype = DTYPES.get(weights, weights)
    half = "bfloat16" if weights not in DTYPES else dtype  # of a cache beside quantized weights
    return {
        "gpu": GPU_KEYS[gpu],
        "tensor_parallel_size": int(gpus or 1),
        "dtype": dtype,
        "kv_cache_dtype": kv_cache or half,
    }


def find_profile(name_or_path: str, base: Path | None = None) -> Path:
    """Find a shipped profile by its name, or a file; ValueError where there is neither."""
    names = shipped_profiles()
    if name_or_path in names:
        return PROFILES / f"{name_or_path}.yaml"
    path = resolve(name_or_path, base or Path())
    if path.is_file():
        return path
    if wrong := why_not_regular(path):
        raise MappingError("profile", wrong)
    from difflib import get_close_matches

    near = ", ".join(get_close_matches(name_or_path.lower(), names, n=8, cutoff=0.4))
    what = f"no file {path} and no shipped profile {name_or_path!r}"
    what += f"; near are {near}" if near else ""
    what += f"; `headway profile list` has all {len(names)}"
    raise MappingError("profile", what, "value")


def read_profile(path: Path) -> Profile:
    """Read a profile; HeadwayError tells everything that is wrong with it, by line."""
    return _parse_profile(path, read_text(path))


@lru_cache(maxsize=16)  # many scenarios of a plan or sweep name the same
def _parse_profile(path: Path, text: str) -> Profile:
    raw, lines = parse(text, str(path))
    source_map = SourceMap(str(path), lines)
    if not isinstance(raw, dict):
        raise HeadwayError(f"{path}:1: must be a mapping with a key `cost`")
    unknown = {key: unknown_key(key, PROFILE_KEYS) for key in raw if key not in PROFILE_KEYS}
    wrong = MappingError.of(unknown, "key").faults

    def section(key: str, check: Callable[[object], T], default: object = None) -> T | None:
        try:
            return check(raw.get(key, default))
        except HeadwayError:
            raise
        except ValueError as error:
            wrong.extend(field_errors((key,), error))
            return None

    if not isinstance(raw.get("hardware", {}), Mapping):
        wrong.append(FieldError(("hardware",), "must be a mapping"))
    wrong += [
        FieldError((key,), "must be a name")
        for key in ("model", "overhead")
        if not isinstance(raw.get(key, ""), str)
    ]
    if raw.get("overhead") and (not_there := unknown_overhead(str(raw["overhead"]))):
        wrong.append(FieldError(("overhead",), not_there))
    limits = section("range", _limits, {})
    residuals = section("residuals", check_residuals, {})
    cost = section("cost", lambda spec: make_form(spec, _name(path, raw)))
    experts = section("experts", _expert_tables, {})
    whole = section("expert_parallel", _expert_tables, {})
    marlin = section("experts_marlin", _expert_tables, {})
    bare = even = None if cost is None else replace(cost, limits=limits, residuals=residuals)
    if bare is not None and experts:
        even = section("experts", lambda _: bare.with_experts(experts[UNIFORM]))
    if wrong or even is None:
        raise HeadwayError(map(source_map.message, wrong))
    named = raw.get("model"), raw.get("hardware", {}), raw.get("overhead")
    tables = experts or {}, whole or {}, marlin or {}
    return Profile(even, *named, bare, *tables)


def _expert_tables(raw: object) -> Mapping[str, Table]:
    """Check the times of experts: tables by routing, even routing among them."""
    if not isinstance(raw, Mapping):
        raise MappingError("", "must be a mapping of routings to rows [tokens, seconds]")
    if raw and UNIFORM not in raw:
        raise MappingError(UNIFORM, "is missing")
    raise_if(*(one for routing, rows in raw.items() for one in check_table(rows, str(routing))))
    return raw


def _name(path: Path, raw: Mapping[object, object]) -> str:
    """Return the name that reports call a profile; it says where not all was measured, or well."""
    name, fit = path.name.removesuffix(".yaml"), raw.get("fit")
    if isinstance(fit, Mapping) and (faults := fit.get("do_not_trust")):
        return f"{name} (do not trust its times: {faults})"
    return f"{name} (in part scaled roofline)" if raw.get("fallback") else name


def make_form(spec: object, name: str) -> Fitted:
    """Make a cost model of a mapping with `kind` and the form's terms; ValueError by key."""
    if isinstance(spec, Mapping):
        if reserved := [key for key in RESERVED_FIELDS if key in spec]:
            raise MappingError.of(dict.fromkeys(reserved, "unknown key"), "key")
        spec = {**spec, "name": name}
    return from_kind(FORMS, spec)


def _limits(raw: object) -> Limits:
    """Check the fitted range: two ascending numbers for each quantity."""
    if not isinstance(raw, Mapping):
        raise MappingError("", "must be a mapping of [lowest, highest]")
    wrong: dict[str, str] = {}
    for key, pair in raw.items():
        numbers = isinstance(pair, list) and all(isinstance(x, Real) for x in pair)
        if key not in QUANTITIES:
            wrong[str(key)] = f"unknown; there are {', '.join(QUANTITIES)}"
        elif not numbers or len(pair) != 2 or not pair[0] <= pair[1]:
            wrong[str(key)] = f"must be [lowest, highest], not {short_repr(pair)}"
    if wrong:
        raise MappingError.of(wrong)
    return {key: (pair[0], pair[1]) for key, pair in raw.items()}
