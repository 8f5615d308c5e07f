"""Which of several runs is best: by the service levels where there are any, and why."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headway.report.comparison import ALIKE
from headway.report.metric_rows import BY_KEY, DOLLARS, find_metric, metric_value
from simulator.results.service_levels import Judged, given_levels, short, three_digits
from simulator.results.steady_state import ASK, TREND, overload
from simulator.util.errors import printable

LEADS = ("output_throughput", "p99_ttft_ms", "mean_e2el_ms")
"""What runs without service levels are looked at by."""
JUDGED = (DOLLARS.key, "request_goodput", "slo_attainment", "output_throughput", "mean_e2el_ms")
"""What decides between runs that keep their service levels, the first that differs."""
NONE_KEEPS = "none keeps the service levels"
Summary = Mapping[str, Any]
Chance = Callable[[int, Mapping[int, str]], tuple[bool, str]]


def best_run(summaries: Sequence[Summary]) -> tuple[int | None, str]:
    """Return the number of the best run and what makes it that; None where there is none.

    Of those that keep all service levels the cheapest by the token, where what is paid differs;
    else the one with the highest goodput, SLO attainment or output throughput, or, where the load
    sets these, the least mean E2EL. Where none keeps them there is no best. Without service levels
    it is the cheapest by the token, where what is paid differs, else the output throughput. Of
    runs that are ALIKE by a key the next key decides, at last their order. A run whose queue grows
    keeps no level for long, and latencies of such runs decide nothing.
    """
    done = [k for k, summary in enumerate(summaries) if summary.get("completed")]
    if not done:
        return None, "no run completed a request"
    judged = [k for k in done if metric_value(summaries[k], "slo_met") is not None]
    if not judged:
        usual = JUDGED[3 : 4 if any(overloaded(summaries[k]) for k in done) else 5]
        return _first(summaries, done, (*_dollars(summaries, done), *usual))
    kept = [k for k in judged if metric_value(summaries[k], "slo_met")]
    held = [k for k in kept if not overloaded(summaries[k])]
    if len(held) == 1:
        return held[0], "the only one that keeps the service levels"
    if not held:
        return None, f"{NONE_KEEPS}{' for long: queues grow' if kept else ''}"
    place, why = _first(summaries, held, (*_dollars(summaries, held), *JUDGED[1:]))
    of = "between" if place is None else "of"
    return place, f"{why} {of} the {len(held)} that keep the service levels"


def apart(summaries: Sequence[Summary], best: int) -> dict[int, str]:
    """Return, of each run that is not ALIKE the best, the first metric that tells it.

    Of a run that keeps no service level, or not for long, that is the SLO attainment.
    """
    found = {}
    for k, other in enumerate(summaries):
        pair = [summaries[best], other]
        keys = [*_dollars(pair, (0, 1)), *JUDGED[1:]]
        if not metric_value(other, "slo_met") or overloaded(other):
            keys = ["slo_attainment"]
        for key in reversed(keys):
            a, b = (metric_value(one, key) for one in pair)
            if k != best and a is not None and b is not None and abs(a - b) > ALIKE * abs(b):
                found[k] = key
    return found


def prices_differ(summaries: Sequence[Summary]) -> bool:
    """Say whether what runs pay in a second differs; False where a price is not known."""
    keys = DOLLARS.key, "output_throughput"
    told = [[metric_value(one, key) for key in keys] for one in summaries]
    paid = [cost * speed for cost, speed in told if cost is not None and speed is not None]
    if len(paid) < max(len(told), 2):
        return False
    return bool(max(paid) - min(paid) > ALIKE * max(paid))


def _dollars(summaries: Sequence[Summary], among: Sequence[int]) -> list[str]:
    """Name the cost of a token, where what is paid differs."""
    return [DOLLARS.key] if prices_differ([summaries[k] for k in among]) else []


def _first(
    summaries: Sequence[Summary], among: Sequence[int], keys: Sequence[str]
) -> tuple[int | None, str]:
    """Return the best of some runs by the keys that tell them apart, in turn."""
    left, why = [*among], ""
    for key in keys:
        values = {k: metric_value(summaries[k], key) for k in left}
        known = {k: value for k, value in values.items() if isinstance(value, int | float)}
        if not known or len(known) < len(values):
            continue
        more = find_metric(key).better > 0
        best = (max if more else min)(known, key=known.__getitem__)
        alike = [k for k, v in known.items() if abs(v - known[best]) <= ALIKE * abs(v)]
        if len(known) > 1 and len(alike) == len(known):  # they follow from the same load
            continue
        left, why = alike, why or _in_words(key, known[best])
        if len(left) == 1:
            return best, _in_words(key, known[best])
    if not why:
        return None, "no difference to speak of"
    alike_ = "another is" if len(left) == 2 else f"{len(left) - 1} others are"
    return left[0], f"{why}, to which {alike_} within {ALIKE:.0%}"


def overloaded(summary: Summary) -> bool:
    """Say whether a run got more requests than it served, so that its queue grew."""
    return overload({key: metric_value(summary, key) for key in TREND}) is not None


def overload_lines(labels: Sequence[str], summaries: Sequence[Summary]) -> list[str]:
    """Say which of several runs get more than they serve, and which question has an answer."""
    behind = [
        f"{printable(label)} served {metric_value(one, 'served_by_last_arrival'):.0%}"
        for label, one in zip(labels, summaries, strict=True)
        if one.get("completed") and overloaded(one)
    ]
    if not behind:
        return []
    return [
        f"Overloaded: by the last arrival {', '.join(behind)} of its requests. "
        "Latencies of such runs, and ratios to these, grow with the run's length; throughput "
        f"compares. {ASK}; a lower load compares latencies."
    ]


def _in_words(key: str, value: float) -> str:
    """Say of the best value of a metric that it is that: `the lowest mean TTFT (45.3 ms)`."""
    if key == DOLLARS.key:
        return f"the lowest cost of a token (${value:.3g} for 1M)"
    metric = BY_KEY[key]
    label, _, unit = metric.label.removesuffix(")").partition(" (")
    if label[1].islower():  # not P99 TTFT, nor SLO attainment
        label = label[0].lower() + label[1:]
    amount = three_digits(value * metric.scale)
    return f"the {'highest' if metric.better > 0 else 'lowest'} {label} ({amount} {unit})"


def part_lines(labels: Sequence[str], summaries: Sequence[Summary]) -> Iterator[str]:
    """Say of each service level of some requests alone which runs keep it."""
    found: dict[str, list[str]] = {}
    for label, summary in zip(labels, summaries, strict=True):
        for one in map(Judged.of, metric_value(summary, "slo") or ()):
            if one.slo.part:
                told = f"{printable(label)} {one.slo.words(one.value, short)}, {one}"
                found.setdefault(one.slo.text, []).append(told)
    for bound, texts in found.items():
        yield f"{bound}: {'; '.join(texts)}."


def _excesses(summary: Summary) -> list[float]:
    """Return by how much each given service level is exceeded, relative to it; 0: it is kept.

    None is where too many requests were lost.
    """
    found = [*map(Judged.of, metric_value(summary, "slo") or ())]
    told = {one.slo.text: one.slo.violation(one.value) for one in found}
    lost = max((told[one.slo.text] for one in found if one.slo.metric == "completion"), default=0.0)
    return [max(told[text], lost) for text in given_levels(told)]


def winner_lines(
    labels: Sequence[str], summaries: Sequence[Summary], chance: Chance | None = None
) -> list[str]:
    """Name the best of several runs, or say why there is none.

    `chance` says whether a run differs from others by more than chance, each in its metric, and
    that in words; None: each run was made once.
    """
    test: Chance = chance or (lambda *_: (True, ""))
    judged = any(metric_value(summary, "slo_met") is not None for summary in summaries)
    place, why = best_run(summaries)
    done = [k for k, summary in enumerate(summaries) if summary.get("completed")]
    if judged:
        lines = [*part_lines(labels, summaries)]
        full = [metric_value(summary, "batch_occupancy") or 0.0 for summary in summaries]
        share = [round(metric_value(s, "slo_attainment") or 0.0, 3) for s in summaries]
        broken = [_excesses(summary) for summary in summaries]

        def nearness(k: int) -> tuple[float, ...]:
            return broken[k].count(0.0), -max(broken[k], default=0.0), share[k], full[k], -k

        most = max(done, key=nearness, default=0)
        sure, words = test(place, apart(summaries, place)) if place is not None else (False, "")
        of = f"{labels[place]}{'' if sure else ' leads'}: " if place is not None else ""
        lines.append(f"{'Winner' if sure else 'No winner'}: {of}{why}{words}.")
        if why == NONE_KEEPS:
            kept, levels = broken[most].count(0.0), len(broken[most])
            told = [f"{kept} of {levels} service levels kept"] if levels > 1 else []
            told += [f"{share[most]:.1%} of its requests keep them"] if share[most] else []
            lines.append(f"Nearest: {', '.join([labels[most], *told])}.")
        elif why.startswith("no difference") and full[most] > (1 + ALIKE) * min(full):
            seats = f"{full[most]:.1%} are taken on average"
            lines.append(f"{labels[most]} has the fewest seats for it: {seats}.")
    else:
        no_level = "no service level is given (--slo, or goodput in the scenario)"
        lines = [f"No winner: {no_level if done else why}."]
        if place is not None and prices_differ([summaries[k] for k in done]):
            sure, words = test(place, dict.fromkeys(done, DOLLARS.key))
            by = "Winner by price" if sure else "No winner by price"
            lines = [f"{by}: {labels[place]}: {why}{words}; no service level is given (--slo)."]
        grow = any(overloaded(summaries[k]) for k in done)
        for key in LEADS[: 1 if grow else None] if len(done) > 1 else ():
            leader, what = _first(summaries, done, (key,))
            if leader is not None:
                words = test(leader, dict.fromkeys(done, key))[1]
                lines.append(f"{what[0].upper()}{what[1:]}: {labels[leader]}{words}.")
    costs = [summary.get("headway", {}) for summary in summaries]
    guessed = [
        label
        for label, cost in zip(labels, costs, strict=True)
        if (cost.get("step_times") or {}).get("unmeasured")
    ]
    if guessed and len({cost.get("profile") for cost in costs}) > 1:
        lines.append(
            f"Step times without measurements: {', '.join(guessed)}. A difference that is "
            "smaller than their error (see Step times) says nothing."
        )
    lines = [*overload_lines(labels, summaries), *lines]
    once = "One run of each: --replications 5 tells differences from chance."
    return lines if chance else [*lines, once]
