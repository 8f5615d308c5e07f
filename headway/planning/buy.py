"""What to buy: from a model, its traffic and service levels to GPUs, how many and how set.

What a buyer varies is varied without being told: the GPU, tensor parallelism, the precision of
weights and KV cache, seats and token budget, and how many replicas. Theory (`theory.py`) drops what
cannot be best, with a reason. The rest is simulated, the cheapest first, each from as many replicas
as theory says it takes at least; it ends when nothing that is left can be among the five cheapest.
The best and the second are then judged as any plan judges. Last it is seen what would change the
answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf

from headway.planning.market import NEAR, Market, Offer, by_headroom, money, ranked_offers
from headway.planning.measure import Change
from headway.planning.plan import Runs, none_holds, search_all
from headway.planning.problem import PlanProblem
from simulator.cluster.config import MOST_REPLICAS
from simulator.costs.noise import QUANTILE
from simulator.models.gpus import Gpu, find_gpu
from simulator.results.service_levels import step_span
from simulator.scenario.resolve import resolve_groups
from simulator.util.errors import HeadwayError, NoAnswerError

TOLD = 5  # candidates that the answer has: the best, the second, and what three more cost
AT_ONCE = 2  # candidates that are searched at a time
WIDEST = 8  # times as many replicas, and one, as theory says at least: then it is given up
AGAIN = 2  # likewise under a change, of those that held without it
CHANGED = 3  # candidates that are looked at again under a change
DEARER = 1.2


@dataclass(slots=True)
class Answer:
    """What to buy, and what else was looked at."""

    ranked: list[Offer]  # that hold the load: near the least price the most headroom first
    offers: list[Offer]  # all, in order of what they cost at least
    priced: bool  # dollars are counted, not GPUs
    variants: Sequence[str] = ()  # tried on the best in vain, or left out, and why
    changes: list[str] = field(default_factory=list)  # what would change it, a line each


def buy(problem: PlanProblem, gpus: Sequence[Gpu], precision: str | None, runs: Runs) -> Answer:
    """Find what to buy; HeadwayError where nothing carries the load."""
    market = Market(problem, gpus, precision)
    offers = market.offers()
    if not offers:
        names = ", ".join(gpu.name for gpu in gpus)
        raise HeadwayError(
            f"--precision {precision}: take bf16, fp8 or none: no profile on {names} has it"
        )
    live = [offer for offer in offers if not offer.never]
    if not live:
        fitting = [offer for offer in offers if offer.scenario is not None] or offers
        best = max(fitting, key=lambda one: one.size * find_gpu(one.gpu).bandwidth)
        raise NoAnswerError(f"--buy: nothing can carry it, not even {best.label}: {best.never}")
    runs.enter(f"First look, short runs, the cheapest first; candidates: {len(live)}")
    _search(market.quick(), live, runs, market.most)
    ranked = ranked_offers(live)
    if not ranked and (routed := market.routed(live[:TOLD])):
        runs.enter("A router that keeps prefixes together, on the cheapest")
        _search(market.quick(), routed, runs, market.most)
        live, offers = [*live, *routed], [*offers, *routed]
        ranked = ranked_offers(routed)
    if not ranked:
        raise NoAnswerError(f"--buy: {none_holds(problem, live)}; {_widest(live)}")
    runs.enter("Router, and prefill and decode apart, on the best")
    ranked, variants = market.with_variants(by_headroom(ranked), runs)
    runs.enter("The best two, in longer runs")
    ranked = _confirm(_no_shorter(problem, market.quick()), ranked, runs)
    answer = Answer(ranked, offers, market.priced, [*variants, *market.left_out(offers)])
    cheap = [one for one in live if _broke_below(one, ranked[0].cost)]
    changes = _changes(problem, market, ranked, runs, cheap)
    answer.changes = [*changes, *_dearer(ranked, market.priced)]
    return answer


def orders(ranked: Sequence[Offer]) -> list[Offer]:
    """Return the first of those that are one order, each."""
    first = {one.order: one for one in reversed(ranked)}
    return [one for one in ranked if first[one.order] is one]


def _widest(offers: Sequence[Offer]) -> str:
    """Say how far it was looked."""
    tried = [one for one in offers if one.result.trials]
    most = max(tried, key=lambda one: max(trial.at for trial in one.result.trials), default=None)
    if most is None:
        return "none could be run"
    at = max(trial.at for trial in most.result.trials)
    return f"candidates tried: {len(tried)}, with up to {at:,.0f} replicas ({most.label})"


def _search(quick: PlanProblem, offers: Sequence[Offer], runs: Runs, unbounded: int) -> None:
    """Simulate offers in order until what is left costs more than the fifth that holds.

    `unbounded` is the most replicas where theory says nothing of how many it takes.
    """
    for begin in range(0, len(offers), AT_ONCE):
        found = orders(ranked_offers(offers))
        limit = found[TOLD - 1].cost if len(found) >= TOLD else inf
        part = []
        for offer in offers[begin : begin + AT_ONCE]:
            least = offer.fewest * offer.weight
            if least > limit:
                cost = money(offer, least)
                offer.not_tried = f"costs {cost} at least; {TOLD} cheaper orders keep the bounds"
            else:
                offer.widest = min(unbounded or WIDEST * (offer.fewest + 1), MOST_REPLICAS)
                most = int(min(offer.widest, limit / offer.weight))
                offer.within = offer.fewest, max(most, offer.fewest)
                part.append(offer)
        search_all(quick, part, runs, offers)


def _no_shorter(problem: PlanProblem, quick: PlanProblem) -> PlanProblem:
    """Return the problem with runs that decide of at least the length of a first look."""
    criteria, least = problem.criteria, quick.criteria.max_seconds
    if criteria.min_seconds is None or criteria.min_seconds >= least:
        return problem
    return replace(problem, criteria=replace(criteria, min_seconds=least))


def _confirm(problem: PlanProblem, ranked: list[Offer], runs: Runs) -> list[Offer]:
    """Judge the first two orders as a plan judges, with all its runs, and rank again.

    Within 2 % of the least price the order is by headroom. One that took another number of replicas
    than at first sight may not be the first any more. What was judged stands before what costs the
    same: nothing else was looked at for so long.
    """
    judged: list[Offer] = []
    left = list(ranked)
    while True:
        found = by_headroom(
            sorted([*ranked_offers(judged), *left], key=lambda one: round(one.cost, 6))
        )
        known = {id(one) for one in judged}
        one = next((one for one in orders(found)[:2] if id(one) not in known), None)
        if one is None:
            return found
        left = [other for other in left if other is not one]
        again = _afresh(one, max(one.searched - 1, 1), one.searched + 2)
        search_all(problem, [again], runs)
        one.result = again.result  # what short runs said stands no more
        if again.result.best is not None:
            judged.append(again)


def _afresh(one: Offer, least: int, most: int) -> Offer:
    """Return an offer to search again, from as many replicas as it had."""
    again = replace(one, result=type(one.result)(None, []), done=False)
    again.within, again.start = (least, most), least if one.result.best is None else one.searched
    return again


def _broke_below(one: Offer, cost: float) -> bool:
    """Say whether an offer was tried, is not enough, and may cost less."""
    return bool(one.result.trials) and one.result.best is None and one.fewest * one.weight < cost


def _changes(
    problem: PlanProblem,
    market: Market,
    ranked: Sequence[Offer],
    runs: Runs,
    cheap: Sequence[Offer] = (),
) -> Iterator[str]:
    """Say what is best under more load, longer answers, and steps at both ends of their error.

    `cheap` was not enough, and may be where steps are faster. Of the ends faster steps are rounded
    up and slower ones down: what is enough by the run is enough by the sentence.
    """
    assert ranked[0].scenario is not None
    span = step_span(spec.cost for spec in resolve_groups(ranked[0].scenario).values())
    asked = [("10 % more load", Change(load=1.1)), ("20 % longer answers", Change(answers=1.2))]
    if span is not None:
        low, high = ceil(100 * (1 - span[0])), floor(100 * (span[1] - 1))
        asked += [
            (f"steps {low} % faster, the lower end of their 95 %", Change(steps=-QUANTILE)),
            (f"steps {high} % slower, the upper end", Change(steps=QUANTILE)),
        ]
    for words, change in asked:
        runs.enter(f"What {words} would change")
        again = []
        for one in cheap[-CHANGED:] if change.steps < 0 else ():
            most = max(int(ranked[0].cost / one.weight), one.fewest)
            again.append(_afresh(one, one.fewest, most))
        for one in ranked[:CHANGED]:
            # Only faster steps want fewer.
            least = max(one.searched // 2, 1) if change.steps < 0 else one.searched
            again.append(_afresh(one, least, AGAIN * one.searched + 2))
        search_all(market.quick(change), again, runs)
        longer = replace(_no_shorter(problem, market.quick()), change=change)
        found = _confirm(longer, ranked_offers(again), runs)
        if not found:
            yield f"{words}: none of the first {len(again)} is enough with twice as many"
            continue
        same = line(ranked[0]) in {line(one) for one in found if one.cost <= NEAR * found[0].cost}
        yield f"{words}: {'the same' if same else line(found[0])}"
    if span is None:
        yield "step times at both ends: the error of this cost model is not known"


def _dearer(ranked: Sequence[Offer], priced: bool) -> Iterator[str]:
    """Say whether a price that is a fifth higher changes the answer."""
    best = ranked[0]
    if not priced:
        return
    others = [one for one in ranked if one.gpu != best.gpu]
    if others and others[0].cost < DEARER * best.cost:
        yield f"{best.gpu} 20 % dearer: {line(others[0])}"
    else:
        yield "any GPU 20 % dearer: the same"


def line(offer: Offer) -> str:
    """Write what to order in one line."""
    gpu, count = offer.order
    each = f"{offer.prefill} + {offer.searched}" if offer.prefill else str(offer.replicas)
    replicas = f"{each} replica{'s' if offer.replicas > 1 else ''} of {offer.settings}"
    return f"{count} x {gpu} ({replicas}): {money(offer, offer.cost)}"
