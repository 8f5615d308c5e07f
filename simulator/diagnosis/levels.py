"""Service levels that a run breaks: by how much, and what would keep them."""

from collections.abc import Iterator
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from simulator.build.kv_room import kv_blocks
from simulator.core.request import Chunk, Request, Step
from simulator.diagnosis.advice import AdvisedEvidence
from simulator.diagnosis.evidence import CAUSES
from simulator.diagnosis.finding import Advice, Finding, turn
from simulator.models.gpus import GPUS
from simulator.results.request_table import Flags
from simulator.results.service_levels import (
    FINISH,
    RATES,
    REQUEST_BOUNDS,
    Judged,
    short,
    three_digits,
)

BROKEN = "Service level missed: "
WIDEST = 8  # GPUs of one replica that is advised
WAITING = 0.05  # share of the requests' time
HOST = 0.25  # share of the steps' time that the GPU spends waiting for the host
WORTH = 1.1  # times as fast must another GPU be
FEWER = 0.9  # of the bound: what fewer seats, and more replicas, aim at


class Broken(NamedTuple):
    """A latency that is too long, of a level that is broken."""

    latency: str  # ttft, tpot, itl, e2el
    bound: float  # ms
    value: float  # ms
    percentile: float

    @property
    def times(self) -> float:
        """How many times as fast it would have to be."""
        return self.value / self.bound

    def __str__(self) -> str:
        """Say it: `P99 TPOT is 1.89 times its bound (22.7 ms; the bound is 12 ms)`."""
        name = f"P{self.percentile:.5g} {self.latency.upper()}"
        told = f"{short(self.value)} ms; the bound is {short(self.bound)} ms"
        return f"{name} is {three_digits(self.times)} times its bound ({told})"


def levels(run: AdvisedEvidence) -> Finding | None:
    """Service levels are broken, whether requests wait or each of them is too slow.

    The weight is the share of the distance that no queue and no transfer of KV explains, so that
    causes of waiting, where there are any, are named before it.
    """
    judged = [Judged.of(one) for one in run.gauges.get("slo") or () if not one["met"]]
    if not judged:
        return None
    late, texts = list[tuple[Broken, float]](), list[str]()
    for level in judged:
        # The report has the clock's error beside the bound.
        said = f"{level.slo.text} is {level._replace(ends=None)}"
        for one in _latencies(run, level):
            alone = _alone(run, one, level.slo.asked(run.table))
            late.append((one, alone))
            if level.slo.name == "goodput":
                said += f"; {one}"
            if alone > one.bound:
                said += f"; alone on a replica a request has {short(alone)} ms"
        texts.append(said)
    # What mends a queue alone keeps no level that a request by itself breaks.
    alone_late = [(one, alone) for one, alone in late if alone > one.bound]
    advice = [cure for pair in alone_late or late for cure in _cures(run, *pair)]
    if sum(run.wait_shares.values()) >= WAITING:
        if any(level.slo.name in (*RATES, FINISH) for level in judged):
            advice += run.advisor.replicas()
        if any(level.slo.part for level in judged):
            advice += run.advisor.one_class_first()
    slowest = max((one for one, _ in late), key=lambda one: one.times, default=None)
    worst = slowest.times if slowest else inf
    waited = min(sum(run.wait_shares.values()) + run.share("transfer_time"), 1.0)
    metric = judged[0].slo.metric
    if metric not in run.summary and not judged[0].slo.part:  # goodput may be 0 before and after
        metric = f"p99_{slowest.latency}_ms" if slowest else "completed"
    return Finding(
        (1.0 - 1.0 / worst if late else 1.0) * (1.0 - waited),
        f"{BROKEN}{'. '.join(texts)}.",
        metric,
        list(dict.fromkeys(advice)),
        {"broken": len(judged), **({"times_the_bound": worst} if late else {})},
    )


def _latencies(run: AdvisedEvidence, level: Judged) -> Iterator[Broken]:
    """Yield the latencies of a level that are over their bound; of goodput all that are.

    Where each by itself is kept by enough requests, but not all by the same, one of `k` is missed
    by a `k`-th of what may miss them.
    """
    slo, table = level.slo, run.table
    if slo.metric.endswith("_ms"):
        latency = slo.latency or slo.name.split("_")[1]
        if level.value > slo.bound:
            share = 50.0 if slo.percentile is None else slo.percentile
            yield Broken(latency, slo.bound, level.value, share)
    elif slo.name == "goodput":
        for parts in (1, len(REQUEST_BOUNDS)):
            share = 1.0 - slo.limit / parts
            found = []
            for latency in REQUEST_BOUNDS:
                for bound, here in run.bounds(latency, slo.asked(table)):
                    values = 1e3 * getattr(table, latency)[here]
                    least = float(np.quantile(values, share, method="inverted_cdf"))
                    if least > bound:  # the report's lies between two requests, and may keep it
                        value = float(np.quantile(values, share))
                        value = value if value > bound else least
                        found.append(Broken(latency, bound, value, 100.0 * share))
            if found:
                yield from found
                return


def _alone(run: AdvisedEvidence, one: Broken, asked: Flags) -> float:
    """Return what a request of `asked`, alone on a replica, has of a latency, in ms."""
    advisor, table, done = run.advisor, run.table, run.done & asked
    if one.latency == "queue_time" or not done.any():
        return 0.0
    cost, budget = advisor.costs[0], advisor.engine.max_num_batched_tokens
    prompts, answers = table.workload.prompt_tokens[done], table.generated[done]
    context = round(float(prompts.mean() + answers.mean() / 2))
    token = 1e3 * float(cost.decode_seconds(np.array([1]), np.array([context]))[0])
    if one.latency in ("tpot", "itl"):
        return token
    if run.engine.enable_prefix_caching and run.record.workload.segments is not None:
        return 0.0  # how much of a prompt is computed is not known beforehand
    prompt = int(np.percentile(prompts, one.percentile, method="lower"))
    request = Request(-1, 0.0, prompt, 1)
    chunks = (Chunk(request, at, min(budget, prompt - at)) for at in range(0, prompt, budget))
    steps = [Step([chunk], 0, 0) for chunk in chunks]
    first: float = 1e3 * sum(cost.execute(step).seconds for step in steps)
    if one.latency == "ttft":
        return first
    later = float(np.percentile(answers, one.percentile, method="lower")) - 1.0
    return first + token * later


def _cures(run: AdvisedEvidence, one: Broken, alone: float) -> Iterator[Advice]:
    """Yield what may keep a bound: smaller steps and replicas, unless one request is too slow.

    Steps that are too long are the shorter for a faster GPU, and less so for fewer requests each:
    more replicas come last.
    """
    if (run.gauges.get("host_share") or 0.0) >= HOST:
        yield from run.advisor.host()
    if alone > one.bound:
        yield from _faster(run, one.times)
        return
    replicas, times = run.advisor.replicas(), one.times
    if one.latency in ("tpot", "itl"):
        yield from run.advisor.smaller_chunks() if one.latency == "itl" else ()
        yield from _faster(run, times)
        yield from run.advisor.seats_within(FEWER * one.bound)
        for more in replicas:
            enough = run.advisor.replicas_within(more.value, FEWER * one.bound)
            yield turn(more.key, more.value, max(enough, more.to))
        return
    cause = max(CAUSES, key=run.wait_shares.__getitem__)
    waits = run.wait_shares[cause] >= WAITING
    yield from run.advisor.cure(cause) if waits else replicas
    if waits and replicas:  # a queue takes no more than these at once
        times = min(times, replicas[0].to / replicas[0].value)
    yield from _faster(run, times)


def _faster(run: AdvisedEvidence, times: float) -> Iterator[Advice]:
    """Yield narrower weights, more GPUs for a replica, and the cheapest GPU that is fast enough.

    `times` as fast as this one it must be, with prompts and with decodes.
    """
    advisor = run.advisor
    yield from advisor.quantization()
    scenario, engine, gpu = advisor.scenario, advisor.engine, advisor.spec.gpu
    if scenario.cost and scenario.cost.get("kind") != "roofline":  # it is of this GPU
        return
    size, count = engine.tensor_parallel_size, scenario.gpu.count
    to = min(size << max(ceil(np.log2(times)), 1), WIDEST)
    if to > size and not advisor.spec.model.num_attention_heads % to:
        also = {advisor.key("count", "gpu"): count * to // size}
        yield turn(advisor.key("tensor_parallel_size"), size, to, also)
    gains = {
        other: min(other.bandwidth / gpu.bandwidth, other.bf16_flops / gpu.bf16_flops)
        for other in GPUS.values()
        if other.dollars_per_hour and kv_blocks(engine, advisor.spec.model, other) > 1
    }
    faster = [other for other, gain in gains.items() if gain >= WORTH]
    enough = [other for other in faster if gains[other] >= times]
    if faster:
        best = min(enough, key=lambda g: g.dollars_per_hour or inf) if enough else None
        best = best or max(faster, key=lambda g: (gains[g], -(g.dollars_per_hour or inf)))
        yield turn(advisor.key("name", "gpu"), gpu.name, best.name)
