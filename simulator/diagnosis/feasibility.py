"""What can never hold, told before anything runs, with the least change that makes it fit.

That weights leave no room for a KV cache is told where a scenario is loaded (`scenario/checks.py`).
Three things more can be known without a run: whether the requests fit into the cache, and whether
the replicas keep up with the prompts and with the answers that come. The latter two are bounds:
prompts at the best rate at which the cost model computes any number of their tokens, answers at
the best rate of any batch that seats and KV cache hold. So what is told here never holds; what is
not told may still be too slow.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np

from simulator.build.engines import release_of
from simulator.build.kv_room import least_change, settings
from simulator.cluster.config import MOST_REPLICAS
from simulator.core.engine_config import EngineConfig
from simulator.core.request import Chunk, Request, Step
from simulator.costs.cost_model import CostModel
from simulator.diagnosis.evidence import known_share
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec
from simulator.results.steady_state import MIN_REQUESTS
from simulator.scenario.resolve import engine_specs
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayWarning
from simulator.workload.workload import Workload

LARGEST_PREFILL = 1 << 16  # tokens of a step, beyond which none is faster


class Obstacle(NamedTuple):
    """Something that can never hold."""

    text: str
    share: float  # of the requests that are lost by it, or of the load that is too much
    change: Mapping[str, Any]  # the least one that makes it fit, by dotted key; {}: none is known
    memory: bool  # it is memory that lacks, not speed
    without: str = "no key alone helps: it takes fewer or shorter requests, or other GPUs"

    def __str__(self) -> str:
        """Say it in a line, with the change."""
        told = settings(self.change)
        told = f"it fits with {told}" if self.memory else f"it takes {told} at least"
        return f"{self.text}; " + (told if self.change else self.without)


@dataclass(frozen=True)
class Traffic:
    """What of a workload memory and speed are held against; all in tokens."""

    workload: Workload
    rate: float  # requests/s; 0: all at once, or as fast as they are answered

    @classmethod
    def of(cls, scenario: Scenario, workload: Workload) -> "Traffic":
        """Take the rate that the scenario gives, else that at which its requests come."""
        block, sent = scenario.workload, workload.arrival[~np.isnan(workload.arrival)]
        if workload.max_concurrency is not None or not len(sent):
            return cls(workload, 0.0)
        each = len(workload) / len(sent)  # turns of a session
        span = float(sent.max() - sent.min())
        steady = block.trace is None and block.generator.ramp_up_strategy is None
        if steady and block.generator.diurnal is None:
            rate = block.generator.request_rate
            return cls(workload, 0.0 if rate == inf else rate * each)
        return cls(workload, len(workload) / span if span else 0.0)

    @cached_property
    def answer_context(self) -> float:
        """The mean tokens that a decode reads."""
        prompts, outputs = self.workload.prompt_tokens, self.workload.output_tokens
        return float((outputs * (prompts + outputs / 2)).sum() / max(outputs.sum(), 1))

    def known(self, engine: EngineConfig) -> float:
        """Return the share of the prompt tokens that a prefix cache may know."""
        if not engine.enable_prefix_caching:
            return 0.0
        return known_share(self.workload, engine.block_size)


class _Group(NamedTuple):
    """Replicas that are alike, as they may come to be many."""

    name: str
    scenario: Scenario
    replicas: int
    model: ModelSpec
    gpu: Gpu
    cost: CostModel
    blocks: int  # of KV cache, of each engine

    @classmethod
    def of(cls, scenario: Scenario, name: str, own: Scenario, replicas: int) -> "_Group":
        """Take what the scenario has settled of its engines."""
        spec = engine_specs(scenario)[name]
        cost, blocks = spec.cost, spec.num_gpu_blocks
        return cls(name, own, replicas, spec.model, spec.gpu, cost=cost, blocks=blocks)

    @property
    def engines(self) -> int:
        """Engines that each have a batch, or a stage, of their own."""
        engine = self.scenario.engine
        return self.replicas * engine.data_parallel_size * engine.pipeline_parallel_size

    def prompt_rate(self, traffic: Traffic) -> float:
        """Return the most prompt tokens/s that the group can compute.

        Many short prompts have fewer pairs to attend to than a long one of as many tokens, and
        prompts of one length fewer than those of several: the mean prompt counts.
        """
        mean = max(int(traffic.workload.prompt_tokens.mean()), 1)
        steps = [(1, 1 << k) for k in range(mean.bit_length())]
        steps += [(1 << k, mean) for k in range((LARGEST_PREFILL // mean).bit_length())]
        best = 0.0
        for count, size in steps:
            chunks = [Chunk(Request(-1, 0.0, size, 1), 0, size) for _ in range(count)]
            best = max(
                best, count * size / max(self.cost.execute(Step(chunks, 0, 0)).seconds, 1e-12)
            )
        return self.engines * best

    def answer_rate(self, traffic: Traffic, known: float) -> float:
        """Return the most output tokens/s that the group can decode."""
        engine, context = self.scenario.engine, traffic.answer_context
        seats = engine.max_num_seqs
        if not self.model.keeps_window and engine.speculative_config is None:
            held = max(context - known * float(traffic.workload.prompt_tokens.mean()), 1.0)
            seats = max(min(seats, int(self.blocks * engine.block_size / held)), 1)
        counts = np.array(sorted({int(count) for count in np.geomspace(1, seats, 40)}))
        seconds = self.cost.decode_seconds(counts, np.rint(counts * context).astype(np.int64))
        drafts = engine.speculative_config
        tokens = 1 if drafts is None else 1 + drafts.num_speculative_tokens
        return self.engines * tokens * float((counts / np.maximum(seconds, 1e-12)).max())


def obstacles(scenario: Scenario, workload: Workload) -> list[Obstacle]:
    """Return what of a scenario can never hold under its requests, memory first; [] if all may.

    Raises ValueError where the scenario is wrong in itself.
    """
    found: list[Obstacle] = []
    groups: list[_Group] = []
    for name, own in scenario.groups.items():
        cluster = scenario.cluster
        if replicas := 1 if cluster is None else cluster.max_replicas(name):
            groups.append(_Group.of(scenario, name, own, replicas))
            if (room := _room(scenario, groups[-1], workload)) is not None:
                found.append(room)
    if not groups or any(one.share == 1.0 for one in found):
        return found
    return [*found, *_too_fast(scenario, groups, Traffic.of(scenario, workload))]


def never_holds(
    scenario: Scenario, workload: Workload, *, lost: float = 0.0, steady: bool = True
) -> str:
    """Say why a scenario loses more than a share `lost`, or cannot keep up; "": it may hold.

    `steady` says that requests come for as long as one likes: else a queue may grow and be served.
    """
    for one in obstacles(scenario, workload):
        if min(lost, 1.0 - 1e-9) < one.share if one.memory else steady:  # all are too many
            return str(one)
    return ""


def warn_of_obstacles(scenario: Scenario, workload: Workload) -> None:
    """Warn of all that can never hold, before a run; a few requests are no endless stream."""
    for one in obstacles(scenario, workload):
        if one.memory or len(workload) >= MIN_REQUESTS:
            warnings.warn(str(one), HeadwayWarning, stacklevel=2)


def _room(scenario: Scenario, group: _Group, workload: Workload) -> Obstacle | None:
    """Say how many requests are longer than the model takes, or larger than the KV cache."""
    engine, model = group.scenario.engine, group.model
    if engine.speculative_config is not None or engine.name == "sglang":  # with rules of their own
        return None
    longest = engine_specs(scenario)[group.name].max_model_len
    prompts, outputs = workload.prompt_tokens, workload.output_tokens
    long = prompts >= longest
    total = np.minimum(prompts + outputs - 1, longest - 1)
    needed = -(-total // engine.block_size)
    large = (needed > group.blocks - 1) & ~long & (not model.keeps_window)
    count, whole = int((long | large).sum()), len(prompts)
    if not count:
        return None
    what = (
        "not one request fits" if count == whole else f"{count:,} of {whole:,} requests never fit"
    )
    most, change, key_of = model.longest(release_of(engine)), {}, scenario.servers.key_of
    if long.any():
        why = f"prompts of up to {prompts.max():,} tokens, max_model_len is {longest:,}"
        if int(prompts.max()) >= most:
            takes = (
                f"{model.name} takes {most:,} at most: shorten the prompts, or take another model"
            )
            return Obstacle(f"{what}: {why}", count / whole, {}, memory=True, without=takes)
        to = min(least_length(workload), most)
        change[key_of(group.name, "engine.max_model_len")] = to
        needed = -(-np.minimum(prompts + outputs - 1, most - 1) // engine.block_size)
    else:
        why = (
            f"the largest has {int(total.max()):,} tokens, {int(needed.max()):,} KV blocks; "
            f"there are {max(group.blocks - 1, 0):,}"
        )
    if needed.max() > group.blocks - 1 and not model.keeps_window:
        least = least_change(group.scenario, model, group.gpu, int(needed.max()) + 1)
        more = {key_of(group.name, key): to for key, to in least.items()}
        change = change | more if more else {}
    return Obstacle(f"{what}: {why}", count / whole, change, memory=True)


def busy_share(scenario: Scenario, workload: Workload) -> float:
    """Return by how much a load exceeds what replicas do that compute prompts or decode, in turn.

    0 where the rate is not known, or where groups differ.
    """
    traffic, kinds = Traffic.of(scenario, workload), scenario.groups
    if not traffic.rate or len(kinds) > 1:
        return 0.0
    ((name, own),) = kinds.items()
    replicas = 1 if scenario.cluster is None else scenario.cluster.max_replicas(name)
    group = _Group.of(scenario, name, own, replicas)
    known = traffic.known(own.engine)
    prompts = traffic.rate * float(workload.prompt_tokens.mean()) * (1.0 - known)
    answers = traffic.rate * float(np.maximum(workload.output_tokens - 1, 0).mean())
    return prompts / group.prompt_rate(traffic) + answers / group.answer_rate(traffic, known)


def least_length(workload: Workload) -> int:
    """Return the tokens that every request of a workload has room in, its answer included."""
    return int((workload.prompt_tokens + workload.output_tokens).max())


def _too_fast(scenario: Scenario, groups: Sequence[_Group], traffic: Traffic) -> Iterator[Obstacle]:
    """Say what of the load the replicas can never keep up with."""
    if not traffic.rate:
        return
    roles = [scenario.cluster and scenario.cluster.replica_groups[g.name].kv_role for g in groups]
    engine = groups[0].scenario.engine
    for what, excluded in (("prompts", "kv_consumer"), ("answers", "kv_producer")):
        able = [g for g, role in zip(groups, roles, strict=True) if role != excluded]
        tokens = traffic.workload.prompt_tokens
        if what == "answers":
            # The prompt's last step gives the first token.
            tokens = np.maximum(traffic.workload.output_tokens - 1, 0)
        wanted = traffic.rate * float(tokens.mean())
        known = 0.0
        for known in _knowledge(traffic, engine):
            asked, most = wanted, _most(able, what, traffic, known)
            asked *= 1.0 - known if what == "prompts" else 1.0
            if asked <= most:
                break
        else:
            yield _overload(scenario, able[0], what, asked, most)


def _knowledge(traffic: Traffic, engine: EngineConfig) -> Iterator[float]:
    """Yield the share of the prompts that caches know: none, and where that is too slow, the most.

    To find it out takes longer than all the rest.
    """
    yield 0.0
    if known := traffic.known(engine):
        yield known


def _most(groups: Sequence[_Group], what: str, traffic: Traffic, known: float) -> float:
    """Return the most tokens/s of prompts, or of answers."""
    if what == "prompts":
        return sum(group.prompt_rate(traffic) for group in groups)
    return sum(group.answer_rate(traffic, known) for group in groups)


def _overload(scenario: Scenario, group: _Group, what: str, asked: float, most: float) -> Obstacle:
    """Tell by how much a load is too fast, and how many replicas might keep up."""
    times = asked / max(most, 1e-12)
    cluster = scenario.servers
    key, now = cluster.replicas_of(group.name)
    if group.name in cluster.scalers:
        key, now = f"{cluster.scaler_key(group.name)}.max_replicas", group.replicas
    to = cluster.in_pods(now * times)
    change = {key: to} if to <= MOST_REPLICAS else {}
    grows = "a queue grows as long as requests come"
    if cluster.admission or cluster.client:
        grows = "the rest is refused or given up"
    verb = "compute" if what == "prompts" else "decode"
    text = (
        f"{what} of {asked:,.0f} tokens/s come, and {now:,} "
        f"{'replica' if now == 1 else 'replicas'} can {verb} {most:,.0f} at most: {grows}"
    )
    return Obstacle(text, 1.0 - 1.0 / times, change, memory=False)
