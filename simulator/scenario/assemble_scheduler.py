"""From what an engine is to its scheduler, with its policy, its options and its blocks."""

import warnings
from functools import cache
from typing import Any

from simulator.core.request import Chunk, Copies, Load, Request, Step, Swap
from simulator.features import features_of
from simulator.kv_cache.host_memory import Prices
from simulator.scenario.assemble_blocks import make_blocks, store_time
from simulator.scenario.choose_scheduler import choose_scheduler
from simulator.scenario.engine_spec import EngineSpec
from simulator.scenario.policy_table import (
    ADMISSION_RULES,
    ORDER,
    VLLM_OPTIONS,
    accepts,
    check_arguments,
    check_rules,
    construct,
    is_own,
    make_policy,
    policy_name,
)
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.door import Door
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayWarning, ScenarioError


def make_scheduler(
    spec: EngineSpec, shares_prefixes: bool, *, named: bool = False
) -> SchedulerBase:
    """Build the scheduler with its blocks.

    `shares_prefixes` says that the workload's prompts have contents to share; where they have
    none a prefix cache could only serve requests that come back after a preemption or in a client's
    next try, which finds what the one before had computed. `named` gives every block a number, also
    where counting them would do: a live engine reads block tables. Raises ValueError, by its field,
    for what the scheduler does not do, and HeadwayError where one of the user's own cannot be made.
    """
    scheduler = _make(spec, shares_prefixes, named=named)
    assert scheduler is not None
    requests, tokens = spec.engine.max_num_queued_reqs, spec.engine.max_num_queued_tokens
    if requests is not None or tokens is not None:
        scheduler.door = Door(requests, tokens)
    return scheduler


def check_scheduler(spec: EngineSpec) -> None:
    """Raise ValueError for what `make_scheduler` refuses; nothing of the user's own is made."""
    try:
        _make(spec, False, check_only=True)
    except TypeError as error:  # an argument of the wrong type is the user's mistake, too
        raise ValueError(str(error)) from error


def _make(
    spec: EngineSpec, shares_prefixes: bool, *, named: bool = False, check_only: bool = False
) -> SchedulerBase | None:
    """Build the scheduler; None where it is, or has, the user's own and shall only be checked."""
    engine, policy_class = spec.engine, spec.policy
    scheduler_class = choose_scheduler(spec)
    if scheduler_class is None:
        from simulator.scenario.assemble_installed import make_installed

        return make_installed(spec, vllm_options(spec))
    if named and engine.speculative_config is not None:
        raise ScenarioError("engine.speculative_config", "a live engine verifies no drafts")
    if named and (feature := next(features_of(engine), None)):
        raise ScenarioError(f"engine.{feature.key}", f"a live engine {feature.live}")
    name = policy_name(scheduler_class)
    caching = engine.enable_prefix_caching and scheduler_class.traits.caches_prefixes
    if shares_prefixes and engine.enable_prefix_caching and not caching:
        what = "has no prefix cache: engine.enable_prefix_caching has no effect"
        warnings.warn(f"{name} {what}", HeadwayWarning, stacklevel=2)
    options = _options(spec, scheduler_class)
    check_rules(engine, name, options)
    sglang, arguments = policy_name(policy_class) == "sglang", spec.arguments
    if spec.order is not None:
        order, given = spec.order
        unmade = check_only and is_own(order)
        options["policy"] = None if unmade else make_policy(spec, order, given, ORDER)
    traits = scheduler_class.traits
    own = issubclass(scheduler_class, Scheduler) and scheduler_class.admit is not Scheduler.admit
    tiers = traits.has_host_tier and (traits.loads_beside or not own)
    if engine.kv_offloading_size and not tiers:
        told = policy_name(policy_class) if sglang else name
        raise ScenarioError("engine.kv_offloading_size", f"{told} has no host tier")
    check_arguments(policy_class, arguments, taken=options)
    blocks = make_blocks(
        spec,
        caching=caching,
        shares=shares_prefixes or spec.retries,
        named=named,
        tree=engine.prefix_cache == "radix" or (scheduler_class.traits.prefix_tree and not named),
        counts=sglang and policy_class.serves_unshared(**arguments),  # type: ignore[attr-defined]
    )
    if is_own(policy_class) and check_only:
        return None
    if not issubclass(policy_class, SchedulerBase):
        policy = make_policy(spec, policy_class, arguments)
        options["policy"] = policy
        return scheduler_class(blocks, **options)
    scheduler: SchedulerBase = construct(spec, scheduler_class, blocks, **options, **arguments)
    if not hasattr(scheduler, "swap_space"):
        wrong = f"{policy_class.__name__}.__init__ must call super().__init__(blocks, **options)"
        raise spec.blame("engine.scheduling_policy", ValueError(wrong))
    return scheduler


def _options(spec: EngineSpec, scheduler_class: type[SchedulerBase]) -> dict[str, Any]:
    """Return the arguments that a scheduler takes of those that an engine has for it."""
    engine = spec.engine
    options = vllm_options(spec) | engine.values_of(ADMISSION_RULES) | {"rules": spec.rules}
    options["features"] = [one.of(engine, spec.model) for one in features_of(engine)]
    if engine.preemption_mode != "recompute":
        options["swap_blocks"] = spec.swap_blocks
    if engine.preemption_mode == "auto":
        options["swap_prices"] = swap_prices(spec)
    if scheduler_class.traits.loads_beside:
        options |= _offloading_times(spec)
    if engine.pipeline_parallel_size > 1:
        options |= engine.values_of(["pipeline_parallel_size", "async_scheduling"])
    if engine.speculative_config is not None:
        drafts = engine.speculative_config.on(spec.model.name)
        options |= {"speculation": drafts, "seed": spec.seed}
    return {name: value for name, value in options.items() if accepts(scheduler_class, name)}


def vllm_options(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments that vLLM's scheduler takes, too."""
    names = ("max_num_seqs", "max_num_batched_tokens", *VLLM_OPTIONS)
    return spec.engine.values_of(names) | {"max_model_len": spec.max_model_len}


def _offloading_times(spec: EngineSpec) -> dict[str, Any]:
    """Say how long blocks take from host memory, and to it, beside the steps."""
    nobody, cost = Request(-1, 0.0, 1, 1), spec.cost
    return {
        "load_time": lambda blocks: cost.with_copies(
            0.0, Step([], copies=Copies(loads=[Load(nobody, blocks, fresh=True)]))
        )[0],
        "store_time": store_time(spec),
    }


def swap_prices(spec: EngineSpec) -> Prices:
    """Say what a preempted request costs by the cost model.

    Computing it again takes steps of its own, of `max_num_batched_tokens` at most.
    """
    nobody = Request(-1, 0.0, 1, 1)
    cost, most = spec.cost, spec.engine.max_num_batched_tokens

    @cache
    def recompute(tokens: int) -> float:
        return sum(
            cost.execute(Step([Chunk(nobody, start, min(most, tokens - start))])).seconds
            for start in range(0, tokens, most)
        )

    return Prices(
        recompute,
        lambda blocks: cost.swap_seconds(Step([], copies=Copies([Swap(nobody, blocks)]))),
        lambda blocks: cost.swap_seconds(Step([], copies=Copies(incoming=[Swap(nobody, blocks)]))),
    )
