"""What a replica can do at best, by theory: bounds that spare simulations, and where they begin.

A replica in balance holds `d` decodes. Of each request it computes `o / d` of the steps in which it
decodes (o tokens are shared by d seats), and its prompt in as many chunks as the token budget asks
for, beside the decodes. With t the time of a decode step and m that of one with a chunk, a request
takes (o / d) t + c (m - t) of the replica's time. The most requests/s is over all d that seats, KV
cache and the bounds on TPOT and ITL allow. Queues and the spread of lengths only make it less; what
prefix caches know is left out of the prompts. A candidate is dropped only if this most, and a tenth
more, is too little.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from simulator.build.kv_room import kv_blocks
from simulator.core.engine_config import EngineConfig
from simulator.core.request import Chunk, Request, Step
from simulator.costs.cost_model import CostModel
from simulator.diagnosis.feasibility import Traffic
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec
from simulator.results.service_levels import FINISH, Slo, asks
from simulator.scenario.scenario import Bounds, GoodputConfig

MARGIN = (
    1.1  # times the most that theory says: so much may a replica do, for all that it leaves out
)
RARE = 0.01  # share of the steps that have prompts, below which no P99 of ITL sees them
BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)  # tokens of a step
SEATS = (64, 128, 256, 512, 1024)
GAIN = 1.1  # times as many requests/s: less is no reason to leave the engine's defaults


class Replica(NamedTuple):
    """One engine, as far as theory looks at it."""

    engine: EngineConfig
    model: ModelSpec
    gpu: Gpu
    cost: CostModel


class Sizes(NamedTuple):
    """How an engine is set, and the most requests/s that it then serves within the bounds."""

    tokens: int  # max_num_batched_tokens
    seats: int  # max_num_seqs
    rate: float


def _mixed(cost: CostModel, chunk: int, count: int, decodes: int, context: int) -> float:
    """Return the seconds of a step with so many chunks of as many tokens, beside decodes."""
    chunks = [Chunk(Request(-1, 0.0, chunk, 1), 0, chunk)] * count
    return cost.execute(Step(chunks, decodes, context)).seconds


def _seats(replica: Replica, traffic: Traffic, known: float, tokens: int, seats: int) -> int:
    """Return how many requests a replica of these sizes decodes at once, by its KV cache."""
    if replica.model.keeps_window:
        return seats
    keys = {"max_num_batched_tokens": tokens, "max_num_seqs": seats}
    blocks = kv_blocks(replica.engine, replica.model, replica.gpu, **keys)
    held = max(traffic.answer_context - known * traffic.workload.prompt_tokens.mean(), 1.0)
    return min(seats, int(blocks * replica.engine.block_size / held))


def batch_sizes(most: int, count: int = 30) -> list[int]:
    """Return `count` numbers up to `most`, evenly by their logarithm, each once.

    Not by np.unique: it loads numpy.ma, a twentieth of a small run.
    """
    return sorted({*np.geomspace(1, most, count).astype(int).tolist()})


def rates_apart(
    replica: Replica, traffic: Traffic, slos: Sequence[Slo], known: float
) -> tuple[float, float]:
    """Return the most requests/s of a replica that only prefills, and of one that only decodes."""
    engine, cost, load = replica.engine, replica.cost, traffic.workload
    tokens = engine.most_tokens
    prompt = max(round(float(load.prompt_tokens.mean()) * (1.0 - known)), 1)
    count = min(max(tokens // prompt, 1), engine.most_running)  # prompts in a step
    chunks = ceil(prompt / tokens)
    prefill = chunks * _mixed(cost, ceil(prompt / chunks), count, 0, 0) / count
    answer = max(float(load.output_tokens.mean()) - 1.0, 1e-9)
    seats = _seats(replica, traffic, known, tokens, engine.most_running)
    batches = np.array(batch_sizes(max(seats, 1)))
    steps = cost.decode_seconds(batches, np.rint(batches * traffic.answer_context).astype(int))
    decode = [
        size / (answer * step)
        for size, step in zip(batches.tolist(), steps.tolist(), strict=True)
        if _within(slos, 1e3 * step, 1e3 * step)
    ]
    return 1.0 / max(prefill, 1e-12), max(decode, default=0.0) if seats else 0.0


def most_requests(
    replica: Replica, traffic: Traffic, slos: Sequence[Slo], known: float, *, sizes: tuple[int, int]
) -> float:
    """Return the most requests/s of a replica; 0: none. `sizes` are its token budget and seats."""
    tokens = sizes[0]
    load, cost = traffic.workload, replica.cost
    prompt = max(float(load.prompt_tokens.mean()) * (1.0 - known), 1.0)
    answer = max(float(load.output_tokens.mean()) - 1.0, 0.0)
    context = traffic.answer_context
    seats = _seats(replica, traffic, known, *sizes)
    if seats < 1 or tokens < 2:
        return 0.0
    best = 0.0
    batches = [size for size in batch_sizes(seats) if size < tokens]
    read = [round(size * context) for size in batches]
    times = cost.decode_seconds(np.array(batches, np.int64), np.array(read, np.int64)).tolist()
    for decodes, reads, alone in zip(batches, read, times, strict=True):
        room = tokens - decodes
        chunks = ceil(prompt / room)
        chunk = max(round(prompt / chunks), 1)
        mixed = _mixed(cost, chunk, 1, decodes, reads)
        together = max(room // chunk, 1) if chunks == 1 else 1  # short prompts share a step
        shared = (_mixed(cost, chunk, together, decodes, reads) - alone) / together
        each = answer / decodes * alone + chunks * max(min(mixed - alone, shared), 0.0)
        steps = answer / decodes + chunks
        tpot = 1e3 * each * decodes / answer if answer else 0.0
        itl = 1e3 * (mixed if chunks / steps > RARE else alone)
        if _within(slos, tpot, itl) and each > 0:
            best = max(best, 1.0 / each)
    return best


def _within(slos: Sequence[Slo], tpot: float, itl: float) -> bool:
    """Say whether a mean time between tokens, and that of a step with prompts, may keep bounds."""
    for slo in slos:
        if slo.metric.endswith("tpot_ms") and tpot > MARGIN * slo.bound:
            return False
        strict = slo.percentile is None or slo.percentile < 90
        if slo.metric.endswith("itl_ms") and (tpot if strict else itl) > MARGIN * slo.bound:
            return False
    return True


def best_sizes(replica: Replica, traffic: Traffic, slos: Sequence[Slo], known: float) -> Sizes:
    """Return the budget and seats of the most requests/s: the engine's own unless others gain."""
    engine = replica.engine
    tokens, seats = engine.most_tokens, engine.most_running
    own = Sizes(tokens, seats, most_requests(replica, traffic, slos, known, sizes=(tokens, seats)))
    others = [
        Sizes(n, k, most_requests(replica, traffic, slos, known, sizes=(n, k)))
        for n in BUDGETS
        for k in SEATS
        if k <= n and (n, k) != (tokens, seats)
    ]
    best = max(others, key=lambda sizes: sizes.rate)
    return best if best.rate > GAIN * own.rate else own


def per_request(slos: Sequence[Slo], goodput: GoodputConfig) -> list[Slo]:
    """Return the bounds with those of each request that a share of them must keep, `goodput`.

    Where classes have bounds of their own, those of one class by itself.
    """
    shares = [slo for slo in slos if slo.name == "goodput"]
    found = [slo for slo in slos if slo not in shares]
    for slo in shares:
        own = goodput.classes.get(slo.part, Bounds() if goodput.classes else goodput)
        found += [
            Slo(f"goodput.{name}", True, bound, 100.0 * slo.bound, latency=name, part=slo.part)
            for name, bound in own.bounds.items()
        ]
    return found


class TooSlow(NamedTuple):
    """A bound that a request alone on a replica breaks."""

    slo: Slo
    value: float  # ms, that it takes at least
    what: str  # takes that long

    def __str__(self) -> str:
        """Say it: `a token alone takes 11.9 ms, goodput.tpot<=10`."""
        took = f"{self.value:,.0f}" if self.value >= 100 else f"{self.value:.3g}"
        return f"{self.what} alone takes {took} ms, {self.slo.text}"


def too_slow(
    replica: Replica,
    traffic: Traffic,
    slos: Sequence[Slo],
    known: float,
    goodput: GoodputConfig | None = None,
) -> list[TooSlow]:
    """Return the bounds that a request alone on a replica breaks already.

    A prompt alone takes its chunks one after another; a token alone a decode step.
    """
    found = []
    load, cost, tokens = traffic.workload, replica.cost, replica.engine.most_tokens
    for slo in per_request(slos, goodput or GoodputConfig()):
        name = slo.latency or slo.metric.partition("_")[2].removesuffix("_ms")
        asked = asks(load, slo.part)
        if not slo.at_most or slo.name == FINISH or not asked.any():
            continue
        share = slo.percentile if slo.percentile is not None else 0.0
        prompt = int(np.percentile(load.prompt_tokens[asked], share, method="lower"))
        reads = round(traffic.answer_context) if slo.percentile is None else prompt
        token = 1e3 * float(cost.decode_seconds(np.array([1]), np.array([reads]))[0])
        answer = int(np.percentile(load.output_tokens[asked], share, method="lower")) - 1
        if name in ("tpot", "itl") and answer > 0 and token > slo.bound:
            found.append(TooSlow(slo, token, "a token"))
        if name == "e2el" and (whole := answer * token) > slo.bound:
            found.append(TooSlow(slo, whole, f"an answer of {answer + 1:,} tokens"))
        if name == "ttft" and not known:
            sizes = [min(tokens, prompt - k) for k in range(0, prompt, tokens)]
            first = 1e3 * sum(_mixed(cost, size, 1, 0, 0) for size in sizes)
            if first > slo.bound:
                found.append(TooSlow(slo, first, f"a prompt of {prompt:,} tokens"))
    return found
