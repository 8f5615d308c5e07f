"""What can be bought for a model and its traffic: each candidate, and what theory says of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf
from typing import Any

from headway.planning.candidate import Candidate
from headway.planning.design import DesignPoint, load_point
from headway.planning.measure import AS_IT_IS, Change
from headway.planning.plan import Runs, search_all
from headway.planning.problem import PlanProblem
from headway.planning.runs import requests_of
from headway.planning.theory import MARGIN, Replica, best_sizes, rates_apart, too_slow
from headway.planning.verdict import Trial
from simulator.build.settle import resolve_model
from simulator.cluster.config import MOST_REPLICAS
from simulator.costs.profile import shipped_profile
from simulator.diagnosis.evidence import known_share
from simulator.diagnosis.feasibility import Traffic, never_holds
from simulator.models.gpus import Gpu, find_gpu
from simulator.models.spec import ModelSpec
from simulator.results.service_levels import Slo
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario

SIZES = (1, 2, 4, 8)  # tensor parallelism
ALIASES = {"bf16": "bfloat16", "fp16": "float16"}  # as users write them
PRECISIONS = ((None, "auto"), ("fp8", "auto"), ("fp8", "fp8"))  # of weights and KV cache
LOOK = 4000  # requests of a first look, about
SHORTEST, LONGEST = 60.0, 300.0  # s of load in it
DECODES, PREFILLS = "cluster.groups.decode.replicas", "cluster.groups.prefill.replicas"
SIZED = ("engine.max_num_batched_tokens", "engine.max_num_seqs")
APART = {
    "cluster.replicas": "null",
    "cluster.groups.prefill.kv_role": "kv_producer",
    "cluster.groups.decode.kv_role": "kv_consumer",
}
FEW = "it needs two replicas, so it saves none of the {} that are enough"
KNOWN = 0.1  # share of the prompt tokens from which on a router that keeps prefixes is tried


@dataclass(slots=True)
class Offer(Candidate):
    """A candidate, with what theory says of it."""

    gpu: str = ""
    size: int = 1  # GPUs of a replica
    price: float | None = None  # $/h of a replica
    widest: int = 0  # replicas that are tried at most, whatever they cost
    prefill: int = 0  # replicas that only prefill; those that decode are searched for
    slos: Sequence[Slo] = ()

    @property
    def weight(self) -> float:
        """What a replica costs: dollars an hour, or GPUs where one has no price."""
        return self.size if self.price is None else self.price

    def spent_at(self, trial: Trial) -> float:
        """Return what as many replicas cost as were tried."""
        return (self.prefill + trial.at) * self.weight

    @property
    def replicas(self) -> int:
        """Replicas that hold the load."""
        return self.prefill + self.searched

    @property
    def searched(self) -> int:
        """Those of them whose number was searched for."""
        return int(self.best.at)

    @property
    def cost(self) -> float:
        """What it takes to hold the load; inf where nothing was found that does."""
        return inf if self.result.best is None else self.replicas * self.weight

    @property
    def nearness(self) -> float:
        """The worst metric by its bound where it holds the load: the less, the more headroom."""
        return max(self.best.ratios(self.slos).values(), default=0.0)

    @property
    def order(self) -> tuple[str, int]:
        """The GPU, and how many: what one pays for, however it is set."""
        return self.gpu, self.replicas * self.size

    @property
    def reduced(self) -> bool:
        """Whether weights or KV cache have fewer bits than the model is published with."""
        keys = (("quantization", "null"), ("kv_cache_dtype", "auto"))
        return any(self.varied.get(f"engine.{key}", own) != own for key, own in keys)

    @property
    def given(self) -> dict[str, Any]:
        """What one of other settings has, too."""
        return {"gpu": self.gpu, "size": self.size, "price": self.price}

    @property
    def label(self) -> str:
        """Name what a replica is."""
        return f"{self.gpu} ({self.settings})"

    @property
    def settings(self) -> str:
        """Say how a replica is set."""
        keys = {key.rpartition(".")[2]: value for key, value in self.varied.items()}
        parts = [f"TP {self.size}"]
        if (weights := keys.get("quantization", "null")) != "null":
            parts.append(f"{weights} weights")
        if (cache := keys.get("kv_cache_dtype", "auto")) != "auto":
            parts.append(f"{cache} KV cache")
        for key in ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "router"):
            parts += [f"{key} {keys[key]}"] if key in keys else []
        parts += ["prefill + decode"] if self.prefill else []
        return ", ".join(parts)


def money(offer: Offer, amount: float) -> str:
    """Write what it costs: dollars an hour, or GPUs where not each has a price."""
    many = "s" if amount > 1 else ""
    return f"{amount:.0f} GPU{many}" if offer.price is None else f"${amount:,.2f}/h"


NEAR = 1.02
"""Times the least price: what costs no more is ordered by headroom."""


def ranked_offers(offers: Sequence[Offer]) -> list[Offer]:
    """Return those that hold the load, the cheapest first, then those with most room."""
    held = [offer for offer in offers if offer.result.best is not None]
    return sorted(held, key=lambda one: (round(one.cost, 6), one.nearness, one.label))


def by_headroom(ranked: Sequence[Offer]) -> list[Offer]:
    """Put the orders that cost at most `NEAR` times the cheapest by headroom, the most first.

    `ranked` are the cheapest first. An order is judged by its first offer; the others follow it.
    """
    near = [one for one in ranked if one.cost <= NEAR * ranked[0].cost]
    first = {one.order: one.nearness for one in reversed(near)}
    return [*sorted(near, key=lambda one: first[one.order]), *ranked[len(near) :]]


@dataclass
class Market:
    """All that could be bought for one problem."""

    problem: PlanProblem
    gpus: Sequence[Gpu]
    precision: str | None

    @cached_property
    def base(self) -> Scenario:
        """The scenario as it is given."""
        return load_scenario(self.problem.path, self.problem.overrides)

    @cached_property
    def traffic(self) -> Traffic:
        """Its requests."""
        return Traffic.of(self.base, requests_of(self.base))

    @property
    def most(self) -> int:
        """The most replicas that can matter: one for each request; 0 where theory knows a bound."""
        return 0 if self.traffic.rate else len(self.traffic.workload)

    @cached_property
    def known(self) -> float:
        """The share of the prompt tokens that a prefix cache could know."""
        return known_share(self.traffic.workload, self.base.engine.block_size)

    @cached_property
    def cache_off(self) -> str:
        """Say that the cache is off, though prompts repeat enough to try it; "" if not so."""
        if self.base.engine.enable_prefix_caching or self.known < KNOWN:
            return ""
        return f"enable_prefix_caching is off; {100 * self.known:.0f} % of the prompt tokens repeat"

    @property
    def priced(self) -> bool:
        """Whether each GPU has a price."""
        return all(gpu.dollars_per_hour is not None for gpu in self.gpus)

    def left_out(self, offers: "Sequence[Offer]") -> Iterator[str]:
        """Say of each GPU that is no candidate why."""
        for gpu in self.gpus:
            if gpu.name not in {one.gpu for one in offers}:
                yield f"{gpu.name}: no profile of the model has {self.precision}"

    def offers(self) -> list[Offer]:
        """Make every candidate, and drop by theory what cannot be best; the cheapest first."""
        model = resolve_model(self.base)
        found = [
            self._bounded(gpu, size, pair)
            for gpu in self.gpus
            for size in SIZES
            for pair in self._precisions(model, gpu, size)
        ]
        return sorted(found, key=lambda one: (one.fewest * one.weight or inf, one.size, one.label))

    def _precisions(
        self, model: ModelSpec, gpu: Gpu, size: int
    ) -> Iterator[tuple[str | None, str]]:
        """Yield the dtypes that have a profile; the model's own in any case.

        Where that has none, its steps are estimated: then those of fp8 are, too.
        """
        own, estimated = model.weight_dtype(), False
        for weights, cache in PRECISIONS:
            name = weights or own
            asked = ALIASES.get(self.precision or name, self.precision or name)
            if not name.startswith(asked):
                continue
            if weights is not None and (weights == own or model.checkpoint is not None):
                continue  # it is published so, or in formats that vLLM does not replace
            engine = self.base.engine.model_copy(
                update={
                    "tensor_parallel_size": size,
                    "quantization": weights,
                    "kv_cache_dtype": cache,
                }
            )
            profile = shipped_profile(model, find_gpu(gpu.name), engine)
            if weights is None and cache == "auto":  # as it is published
                estimated = profile is None and bool(gpu.fp8_flops)
                yield weights, cache
            elif profile is not None or estimated:
                yield weights, cache

    def _keys(self, gpu: Gpu, size: int, pair: tuple[str | None, str]) -> dict[str, str]:
        keys = {"gpu.name": gpu.name, "gpu.count": str(size)}
        if gpu.dollars_per_hour != find_gpu(gpu.name).dollars_per_hour:
            keys["gpu.dollars_per_hour"] = str(gpu.dollars_per_hour)
        keys["engine.tensor_parallel_size"] = str(size)
        weights, cache = pair
        return keys | {"engine.quantization": weights or "null", "engine.kv_cache_dtype": cache}

    def _bounded(self, gpu: Gpu, size: int, pair: tuple[str | None, str]) -> Offer:
        """Make a candidate and say what it takes at least."""
        keys, price = self._keys(gpu, size, pair), gpu.dollars_per_hour if self.priced else None
        given = {"gpu": gpu.name, "size": size, "price": None if price is None else size * price}
        offer = self._load(keys, given)
        if offer.scenario is None:
            offer.never = offer.error.rpartition("gpu: ")[2]  # the GPU before it stands for all
            offer.errors = [offer.never]
            return offer
        slos = self.problem.criteria.slos
        lost = max(slo.limit for slo in slos if slo.metric == "completion")
        never = never_holds(offer.scenario, self.traffic.workload, lost=lost, steady=False)
        parts = resolve(offer.scenario)
        replica = Replica(offer.scenario.engine, parts.model, parts.gpu, parts.cost)
        known = self.known if replica.engine.enable_prefix_caching else 0.0
        slow = too_slow(replica, self.traffic, slos, known, self.base.goodput)
        offer.never = never or str(next(iter(slow), ""))
        if offer.never:
            return offer
        sizes = best_sizes(replica, self.traffic, slos, known)
        if not sizes.rate:
            offer.never = "no batch keeps the bounds on times between tokens"
            return offer
        engine = replica.engine
        for name, now, to in (
            ("max_num_batched_tokens", engine.max_num_batched_tokens, sizes.tokens),
            ("max_num_seqs", engine.max_num_seqs, sizes.seats),
        ):
            if now != to:
                keys = keys | {f"engine.{name}": str(to)}
        offer = self._load(keys, given)
        offer.fewest = max(ceil(self.traffic.rate / (MARGIN * sizes.rate)), 1)
        if offer.fewest > MOST_REPLICAS:
            offer.never = f"it takes {offer.fewest:,} replicas at least"
        return offer

    def _load(self, keys: dict[str, str], given: Mapping[str, Any]) -> Offer:
        problem = self.problem
        point = load_point(problem.path, keys, problem.overrides, problem.seed, DesignPoint)
        slos = problem.criteria.slos
        return Offer(point.varied, point.scenario, point.errors, slos=slos, **given)

    def quick(self, change: Change = AS_IT_IS) -> PlanProblem:
        """Return the problem as it is looked at first: by one short run of each place."""
        criteria, rate = self.problem.criteria, self.traffic.rate or 1.0
        seconds = min(max(LOOK / rate, SHORTEST), LONGEST, criteria.max_seconds)
        quick = replace(
            criteria,
            replications=1,
            most_replications=1,
            min_seconds=None if criteria.min_seconds is None else 2 * seconds,
            max_seconds=seconds,
        )
        return replace(self.problem, criteria=quick, change=change)

    def with_variants(self, ranked: list[Offer], runs: Runs) -> tuple[list[Offer], list[str]]:
        """Try on the best what the traffic may gain from, with fewer replicas than it takes.

        Return all that hold the load, and what is to be said of what was tried in vain or not.
        """
        best = ranked[0]
        told = [self.cache_off] if self.cache_off else []
        router = "a prefix-aware router" + (" with the prefix cache on" if self.cache_off else "")
        for name, (why, offers) in (
            (router, self._by_prefix(best)),
            ("prefill and decode apart", self._apart(best)),
        ):
            if why:
                told.append(f"{name}: not tried: {why}")
                continue
            search_all(self.quick(), offers, runs)
            ranked = [*ranked, *(held := ranked_offers(offers)[:1])]
            last = offers[-1]
            reason = last.error or (last.result.trials[-1].reason if last.result.trials else "")
            if not held:
                told.append(f"{name}: fewer replicas than {best.replicas} are not enough: {reason}")
        return ranked_offers(ranked), told

    def routed(self, offers: Sequence[Offer]) -> list[Offer]:
        """Return offers with a router that keeps prefixes together; [] if prompts share little."""
        if self.known < KNOWN:
            return []
        keys = {"engine.enable_prefix_caching": "true"} if self.cache_off else {}
        keys["cluster.router"] = "prefix_aware"
        found = [self._load(one.varied | keys, one.given) for one in offers]
        return [
            replace(new, fewest=max(one.fewest, 2)) for new, one in zip(found, offers, strict=True)
        ]

    def _by_prefix(self, best: Offer) -> tuple[str, list[Offer]]:
        """Return why a router that keeps prefixes together is not tried, or the offer with one."""
        if best.replicas < 3:
            return FEW.format(best.replicas), []
        if self.known < KNOWN:
            share = f"{100 * self.known:.0f} %"
            return f"{share} of the prompt tokens begin like an earlier prompt", []
        (offer,) = self.routed([best])
        offer.within = max(best.replicas // 2, 1), best.replicas - 1
        return "", [offer]

    def _apart(self, best: Offer) -> tuple[str, list[Offer]]:
        """Likewise of a split of prefill and decode: in three ratios about that of theory."""
        total = best.replicas - 1
        if total < 2:
            return FEW.format(best.replicas), []
        # Budget and seats were chosen for prompts beside decodes: here the engine has its own.
        keys = {key: value for key, value in best.varied.items() if key not in SIZED}
        plain = self._load(keys, best.given).scenario
        links = None if self.base.cluster is None else self.base.cluster.kv_transfer
        keys |= APART | ({"cluster.kv_transfer": "{}"} if links is None else {})
        assert plain is not None
        parts = resolve(plain)
        replica = Replica(plain.engine, parts.model, parts.gpu, parts.cost)
        known = self.known if replica.engine.enable_prefix_caching else 0.0
        rates = rates_apart(replica, self.traffic, self.problem.criteria.slos, known)
        if not rates[1]:
            return "no batch of decodes keeps the bounds", []
        prefill, decode = (max(ceil(self.traffic.rate / (MARGIN * r)), 1) for r in rates)
        if prefill + decode > total:
            least = f"{prefill} + {decode}"
            return f"it takes {least} replicas at least, {best.replicas} are enough as they are", []
        share = rates[1] / sum(rates)
        offers = []
        for count in {round(total * share) + more for more in (-1, 0, 1)}:
            if prefill <= count <= total - decode:
                more = {"prefill": count, "key": DECODES}
                offer = self._load(keys | {PREFILLS: str(count)}, best.given | more)
                offer.within = decode, total - count
                offers.append(offer)
        return ("" if offers else "no ratio near that of theory fits", offers)
