"""What to buy, in words: one line first, then what else there is and what was dropped, and why."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from headway.planning.buy import TOLD, Answer, buy, line, orders
from headway.planning.candidate import PlanAnswer, looked_at, verdicts
from headway.planning.market import SIZES, Offer
from headway.planning.plan import Runs
from headway.planning.problem import REPLICAS, PlanOptions, PlanProblem, make_problem
from headway.planning.runs import scenario_cost_lines
from headway.planning.verdict import interval
from simulator.cluster.config import MOST_REPLICAS
from simulator.costs.roofline import efficiency_of
from simulator.models.gpus import GPUS, Gpu, find_gpu
from simulator.results.service_levels import SHARES, Judged, short
from simulator.scenario.load import Source, load_scenario
from simulator.util.errors import HeadwayError, HeadwayWarning, NoAnswerError

Settings = tuple[Sequence[str], int | None]
"""Overrides of the scenario, and its seed."""
GUESSED = "has no measured kernels (95 % of its steps within -44 to +80 %): give --by-data-sheet"
REDUCED = "answers of fp8 may differ in quality; the best at the model's own precision"


def buying_problem(
    path: Source, options: PlanOptions, settings: Settings, gpus: Sequence[Gpu]
) -> PlanProblem:
    """State the problem that `--buy` poses: the fewest replicas, on whatever GPUs.

    Step times are by the profile of each, whatever the scenario's `cost` says of its own. Until a
    GPU is chosen one stands for all on which the model fits.
    """
    overrides, seed = settings
    largest = max(gpus, key=lambda gpu: gpu.memory).name
    why: HeadwayError | None = None
    for weights, size in product(("null", "fp8"), (1, SIZES[-1])):
        base = [f"gpu={{name: {largest}, count: {size}}}", f"engine.quantization={weights}"]
        keys = [*overrides, "cost=null", *base, f"engine.tensor_parallel_size={size}"]
        try:
            cluster = load_scenario(path, keys, seed).cluster
        except HeadwayError as error:
            for fault in error.faults:
                if (
                    fault.key == ("gpu",) and fault.kind == "memory"
                ):  # the widest replica: nobody gave its keys
                    why = NoAnswerError(f"--buy: nothing can carry it: {fault.what}")
            why = why or error
            continue
        if cluster is not None and (cluster.groups or cluster.autoscaling):
            what = "groups" if cluster.groups else "autoscaling"
            raise HeadwayError(f"--buy: cannot be used with cluster.{what}, as it chooses replicas")
        count = f"{REPLICAS}=1..{MOST_REPLICAS}"
        return make_problem(
            path, replace(options, vary=[], cheapest=False, fewest=count), keys, seed
        )
    assert why is not None
    raise why


def wanted_gpus(text: str | None, *, by_data_sheet: bool = False) -> list[Gpu]:
    """Read `H100,L40S=1.20`, GPUs and maybe dollars an hour of one; None: all that have a price.

    Where some have a price, a warning names those that have none, and they are left out. Where none
    has, GPUs are counted. Without `by_data_sheet`, None leaves out GPUs of which there are no
    kernel times, of a like one neither. Raises HeadwayError for what is no GPU, or no price, and
    for such a GPU where it is named.
    """
    found: dict[str, Gpu] = {}
    for part in [*GPUS] if text is None else text.split(","):
        name, equals, price = (word.strip() for word in part.partition("="))
        try:
            dollars = float(price) if equals else None
        except ValueError:
            dollars = -1.0
        if dollars is not None and not 0 < dollars < inf:
            raise HeadwayError(
                f"--gpus {part.strip()}: must be {name}=PRICE, $/h and more than 0, as {name}=2.49"
            )
        try:
            gpu = find_gpu(name, dollars)
        except ValueError as error:
            raise HeadwayError(f"--gpus: {error}") from None
        if not (by_data_sheet or efficiency_of(gpu).measured):
            if text is None:
                continue
            raise HeadwayError(f"--gpus: {gpu.name} {GUESSED}")
        known = found.setdefault(gpu.name, gpu)
        if known != gpu and dollars is not None:
            raise HeadwayError(f"--gpus: {gpu.name} is named twice, with unlike prices")
    priced = [gpu for gpu in found.values() if gpu.dollars_per_hour is not None]
    free = [gpu.name for gpu in found.values() if gpu.dollars_per_hour is None]
    if text is not None and priced and free:
        names = ", ".join(free)
        told = f"--gpus: left out, for want of a price: {names}; give one, as {free[0]}=2.50"
        warnings.warn(told, HeadwayWarning, stacklevel=2)
    return priced or [*found.values()]


def find_offers(
    problem: PlanProblem, gpus: Sequence[Gpu], precision: str | None, runs: Runs
) -> PlanAnswer:
    """Return all candidates, and of these what to buy."""
    answer = buy(problem, gpus, precision, runs)
    ranked = {one.label for one in answer.ranked}
    others = [one for one in answer.offers if one.label not in ranked]
    return PlanAnswer([*answer.ranked, *others], answer.ranked[0], buy_lines(problem, answer))


def buy_lines(problem: PlanProblem, answer: Answer) -> list[str]:
    """Return the answer, a line each."""
    best, *others = orders(answer.ranked)
    assert best.scenario is not None
    unsure = ", if it is enough: that is too close to tell" if _close(problem, best) else ""
    lines = [*problem.of_pods, f"Buy {line(best)}{unsure}", f"  {problem.under}"]
    lines += [f"  {one.slo.text}: {_value(one)}{one}" for one in verdicts(problem, best, best.best)]
    lines += [_speeds(problem, best), f"  looked at {looked_at(best.best)} of load"]
    lines += [f"  {text}" for text in scenario_cost_lines([""], [best.scenario])]
    same = [one for one in answer.ranked if one is not best and one.order == best.order]
    for close, words in ((False, "are enough, too"), (True, "are too close to tell")):
        if alike := [line(one) for one in same if _close(problem, one) == close]:
            lines.append(f"  by short runs these {words}: {'; '.join(alike)}")
    if best.reduced:
        plain = next((one for one in answer.ranked if not one.reduced), None)
        lines.append(
            f"  {REDUCED}: {line(plain) if plain else 'none that was simulated is enough'}"
        )
    if others:
        lines.append(f"Second best: {line(others[0])}{_more(best, others[0])}")
        told = verdicts(problem, others[0], others[0].best)
        lines += [f"  {one.slo.text}: {_value(one)}{one}" for one in told]
        lines.append(_speeds(problem, others[0]))
    for one in others[1 : TOLD - 1]:
        lines += [f"Then {line(one)}{_more(best, one)}, by short runs", _speeds(problem, one)]
    if not answer.priced:
        lines.append("GPUs are counted: not each of them has a price.")
    lines += ["The best order with:", *(f"  {text}" for text in answer.changes)]
    tried = [one for one in answer.offers if one.result.trials]
    lines.append(f"Candidates simulated: {len(tried)} of {len(answer.offers)}.")
    lines += [f"  {text}" for text in answer.variants]
    return [*lines, *_dropped(answer.offers), *_failed(tried)]


def _close(problem: PlanProblem, offer: Offer) -> bool:
    """Say whether a bound is within the error of the step times."""
    return any(one.close for one in verdicts(problem, offer, offer.best))


def _value(judged: Judged) -> str:
    """Write what was measured, where the verdict does not say it."""
    if judged.slo.name in SHARES or judged.close:
        return ""
    return f"{judged.value:,.4g}{' ms' * judged.slo.metric.endswith('_ms')}, "


def _more(best: Offer, other: Offer) -> str:
    if not best.cost:
        return ""
    share = 100 * (other.cost / best.cost - 1)
    if abs(share) < 0.05:
        return ", the same price"
    return f", {abs(share):.{1 if abs(share) < 2 else 0}f} % {'more' if share > 0 else 'less'}"


def _speeds(problem: PlanProblem, offer: Offer) -> str:
    """Write what an order does, whatever is bounded, and how near it comes to a bound."""
    runs, ratios = offer.best.runs, offer.best.ratios(problem.criteria.slos)
    means = [
        f"{word.upper()} {short(interval(runs, f'mean_{word}_ms').mean)} ms"
        for word in ("ttft", "tpot", "e2el")
    ]
    told = f"  means: {', '.join(means)}"
    if not ratios:
        return told
    metric = max(ratios, key=lambda name: ratios[name])
    used = f"{100 * ratios[metric]:.3g} %"
    share = metric.rpartition(":")[2] in SHARES
    near = f"with at most {used} of the misses it allows" if share else f"at {used} of it"
    return f"{told}; nearest to its bound: {metric}, {near}"


def _dropped(offers: Sequence[Offer]) -> Iterator[str]:
    """Say which were dropped without a run; those of one GPU for a like reason share a line."""
    alike: dict[tuple[str, str], list[Offer]] = {}
    for offer in offers:
        if (offer.never or offer.not_tried) and not offer.result.trials:
            kind = "dearer" if offer.not_tried else offer.never.split(" ", 2)[0]
            alike.setdefault((offer.gpu, kind), []).append(offer)
    for first, *rest in alike.values():
        likewise = f" (likewise {len(rest)} more settings of it)" if rest else ""
        why = (first.not_tried or first.never).partition("; its log would say")[0]
        yield f"  not run: {first.label}: {why}{likewise}"


def _failed(tried: Sequence[Offer]) -> Iterator[str]:
    """Say of those that were run and do not hold what breaks with the most replicas."""
    for offer in tried:
        if offer.result.best is None:
            last = max(offer.result.trials, key=lambda trial: trial.at)
            many = "s" if last.at > 1 else ""
            dearer = offer.within is not None and offer.within[1] < offer.widest
            more = f"; more cost more than {TOLD} that are enough" if dearer else ""
            of = f"{last.at:.0f} replica{many} of {offer.label}"
            yield f"  not enough: {of}: {last.reason}{more}"
