"""From what an engine is to its scheduler, with its policy, its options and its blocks."""

import warnings
from collections.abc import Callable
from functools import cache

from simulator.core.request import Chunk, Copies, Load, Request, Step, Swap
from simulator.features import features_of
from simulator.kv_cache.host_memory import Prices
from simulator.scenario.assemble_blocks import make_blocks, store_time
from simulator.scenario.choose_scheduler import choose_scheduler
from simulator.scenario.engine_spec import EngineSpec
from simulator.scenario.policy_table import (
    LIMIT_KEYS,
    ORDER,
    check_arguments,
    check_rules,
    construct,
    is_own,
    make_policy,
    policy_name,
)
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.door import Door
from simulator.schedulers.limits import Limits
from simulator.schedulers.vllm.scheduler import Options, Scheduler
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

        return make_installed(spec, make_limits(spec))
    if named and (feature := next(features_of(engine), None)):
        raise ScenarioError(f"engine.{feature.key}", f"a live engine {feature.live}")
    name = policy_name(scheduler_class)
    caching = engine.enable_prefix_caching and scheduler_class.traits.caches_prefixes
    if shares_prefixes and engine.enable_prefix_caching and not caching:
        what = "has no prefix cache: engine.enable_prefix_caching has no effect"
        warnings.warn(f"{name} {what}", HeadwayWarning, stacklevel=2)
    traits, parts = scheduler_class.traits, _parts(spec, scheduler_class)
    check_rules(engine, name, traits.obeys)
    sglang, arguments = policy_name(policy_class) == "sglang", spec.arguments
    if spec.order is not None:
        order, given = spec.order
        unmade = check_only and is_own(order)
        parts["policy"] = None if unmade else make_policy(spec, order, given, ORDER)
    own = issubclass(scheduler_class, Scheduler) and scheduler_class.admit is not Scheduler.admit
    tiers = traits.has_host_tier and (traits.loads_beside or not own)
    if engine.kv_offloading_size and not tiers:
        told = policy_name(policy_class) if sglang else name
        raise ScenarioError("engine.kv_offloading_size", f"{told} has no host tier")
    check_arguments(policy_class, arguments, taken={*(LIMIT_KEYS & traits.obeys), *parts})
    if scheduler_class.options_type is not None:
        arguments = {"options": scheduler_class.options_type(**arguments)}
    blocks = make_blocks(
        spec,
        caching=caching,
        shares=shares_prefixes or spec.retries,
        named=named,
        tree=engine.prefix_cache == "radix" or (scheduler_class.traits.prefix_tree and not named),
        counts=sglang and arguments["options"].serves_unshared,
    )
    if is_own(policy_class) and check_only:
        return None
    if not issubclass(policy_class, SchedulerBase):
        assert issubclass(scheduler_class, Scheduler)
        parts["policy"] = make_policy(spec, policy_class, arguments)
        return scheduler_class(blocks, **parts)
    scheduler: SchedulerBase = construct(spec, scheduler_class, blocks, **parts, **arguments)
    if not hasattr(scheduler, "swap_space"):
        wrong = f"{policy_class.__name__}.__init__ must call super().__init__(blocks, **options)"
        raise spec.blame("engine.scheduling_policy", ValueError(wrong))
    return scheduler


def _parts(spec: EngineSpec, scheduler_class: type[SchedulerBase]) -> Options:
    """Return what a scheduler is made of beside its blocks and its policy."""
    traits = scheduler_class.traits
    limits = make_limits(spec, beside=traits.loads_beside).only(traits.obeys)
    if not issubclass(scheduler_class, Scheduler):
        return {"limits": limits}
    made = (one.of(spec.engine, spec.model) for one in features_of(spec.engine))
    features = [one for one in made if one is not None]
    return {"limits": limits, "features": features, "rules": spec.rules}


def make_limits(spec: EngineSpec, *, beside: bool = False) -> Limits:
    """Return the knobs of a scheduler; `beside`: blocks come from host memory beside the steps."""
    engine, drafts = spec.engine, spec.engine.speculative_config
    return Limits(
        **{key: getattr(engine, key) for key in LIMIT_KEYS - {"max_model_len"}},
        max_model_len=spec.max_model_len,
        speculation=None if drafts is None else drafts.on(spec.model.name),
        draft_seed=spec.seed,
        swap_blocks=0 if engine.preemption_mode == "recompute" else spec.swap_blocks,
        swap_prices=swap_prices(spec) if engine.preemption_mode == "auto" else None,
        load_time=load_time(spec) if beside else None,
        store_time=store_time(spec) if beside else None,
    )


def load_time(spec: EngineSpec) -> Callable[[int], float]:
    """Say how long so many blocks take from host memory, beside the steps."""
    nobody, cost = Request(-1, 0.0, 1, 1), spec.cost
    return lambda blocks: cost.with_copies(
        0.0, Step([], copies=Copies(loads=[Load(nobody, blocks, fresh=True)]))
    )[0]


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
