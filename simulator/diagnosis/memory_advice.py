"""Advice on memory: more KV blocks, or fewer for each request; what all advice knows of a group."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from simulator.build.engine_spec import EngineSpec
from simulator.build.kv_room import EIGHT_BITS, UTILIZATION, kv_blocks, least_change
from simulator.cluster.cluster_config import ClusterConfig
from simulator.core.engine_config import EngineConfig
from simulator.core.log import Log
from simulator.diagnosis.evidence import Evidence
from simulator.diagnosis.feasibility import least_length
from simulator.diagnosis.finding import Advice, turn
from simulator.results.record import replicas_in
from simulator.results.sample import percentiles
from simulator.scenario.scenario import Scenario

MOST = 4  # times a number is raised at once
WORTH = 1.1  # times as many blocks, seats or tokens a second: less is no advice
KEPT_FREE = 0.1  # share of the blocks that admission keeps free: less is hardly a cause


class MemoryAdvisor:
    """Advice for one group of replicas: that whose requests wait the most.

    `trouble` has another measure of it for each replica than the time waited.
    """

    def __init__(self, run: Evidence, trouble: Sequence[float] | None = None) -> None:
        self.run = run
        scenario, cluster = run.record.scenario, run.record.cluster
        groups = {"all": [*range(len(run.record.logs))]}
        if cluster is not None:
            groups = replicas_in(cluster.groups)
        each = run.waited if trouble is None else trouble
        waited = {k: sum(each[i] for i in n) for k, n in groups.items() if run.serves(n[0])}
        self.group = max(waited, key=waited.__getitem__)
        numbers = groups[self.group]
        self.servers: ClusterConfig = scenario.servers
        self.scenario: Scenario = scenario.of_group(self.group)
        self.engine: EngineConfig = self.scenario.engine
        self.spec: EngineSpec = run.record.cores[numbers[0]]
        logs = run.record.logs if cluster is None else cluster.engine_logs(run.record)
        worked = [n for n in numbers if logs[n].step_rows] or numbers  # a replica may get none
        self.logs: list[Log] = [logs[number] for number in worked]
        self.costs = [run.record.costs[number] for number in worked]

    def key(self, name: str, block: str = "engine") -> str:
        """Return the dotted key of this group's engine or GPU."""
        return self.servers.key_of(self.group, f"{block}.{name}")

    def changed(self, name: str, to: int, **also: int | str) -> Advice:
        """Advise another number for a key of this group's engine, and what must go with it."""
        keys = {self.key(key): value for key, value in also.items()}
        now = getattr(self.engine, name)
        return turn(self.key(name), now, to, keys)

    @property
    def _gauges(self) -> Mapping[str, Any]:
        """The gauges of the group."""
        cluster = self.run.gauges.get("cluster", {"groups": {}})
        found: Mapping[str, Any] = cluster["groups"].get(self.group, self.run.gauges)
        return found

    @property
    def most_present(self) -> int:
        """Requests at once, running and waiting, at most."""
        return int(self._gauges["max_running"] + self._gauges["max_waiting"])

    @property
    def seats_in_memory(self) -> int:
        """Requests whose KV blocks fit at once, by the blocks that those who ran had on average."""
        usage = self._gauges["kv_cache_usage_mean"]
        return int(round(self._gauges["mean_running"] / usage, 6)) if usage else self.most_present

    def _mean_decodes(self) -> tuple[int, int]:
        """Return the mean decodes of a step while it computes, at least 1, and their context."""
        table, done = self.run.table, self.run.done
        tokens = table.workload.prompt_tokens[done] + table.generated[done] / 2
        running = max(round(self._gauges["mean_running"], 6), 1.0)
        return round(running), round(running * float(tokens.mean()))

    def _takes(self, name: str) -> bool:
        """Say whether the scheduler knows a key; vLLM's, which policies order, knows all."""
        own = self.run.own_scheduler
        return own is None or name in own.traits.obeys

    def quantization(self) -> list[Advice]:
        """Narrower weights: less to read in each step; a fitted profile of others says nothing."""
        cost = self.scenario.cost
        if self.engine.quantization is not None or (cost and cost.get("kind") != "roofline"):
            return []
        to = "fp8" if self.spec.gpu.fp8_flops else "int8"
        return [turn(self.key("quantization"), None, to)]

    def _blocks(self, **keys: Any) -> int:
        """Count the KV blocks that an engine with these keys has; 0: it does not fit."""
        return kv_blocks(self.engine, self.spec.model, self.spec.gpu, **keys)

    def memory(self) -> list[Advice]:
        """More KV blocks, or fewer for each request; first what costs no GPU."""
        return [*self._reservations(), *self._override(), *self._more_blocks()]

    def room(self, prompt: int, total: int) -> list[Advice]:
        """Make room for a request of so many tokens, of its prompt and in all; [] if none does."""
        engine, longest = self.engine, self.spec.max_model_len
        if prompt >= longest:
            most = self.spec.model.longest(self.spec.release)
            to, key = min(least_length(self.run.record.workload), most), self.key("max_model_len")
            return [turn(key, longest, to)] if prompt < most else []
        needed = -(-total // engine.block_size) + 1
        enough = [
            one
            for one in self._more_blocks()
            if self._blocks(**{one.key.rpartition(".")[2]: one.to}) >= needed
        ]
        offers = [*self._reservations(), *(one for one in self._override() if one.to >= needed)]
        now = engine.num_gpu_blocks_override
        if now is not None and not offers and self._blocks(num_gpu_blocks_override=None) >= needed:
            offers = [turn(self.key("num_gpu_blocks_override"), now, None)]
        if enough or offers or self.scenario.cost or engine.num_gpu_blocks_override is not None:
            return [*offers, *enough]
        least = least_change(self.scenario, self.spec.model, self.spec.gpu, needed)
        parted = ((key.split("."), to) for key, to in least.items())
        keys = {self.key(name, block): to for (block, name), to in parted}
        if not keys:
            return []
        (first, to), *others = keys.items()
        return [turn(first, getattr(engine, first.rpartition(".")[2]), to, dict(others))]

    @property
    def kept_free(self) -> dict[str, float]:
        """The rules, by key, for which admission keeps many blocks free."""
        engine, usable = self.engine, self.spec.num_gpu_blocks - 1
        each = self._gauges["mean_running"] if engine.min_decode_blocks_scope == "running" else 0
        free = {
            "min_decode_blocks": engine.min_decode_blocks * max(each, 1.0),
            "watermark": engine.watermark * usable,
        }
        rules = {name: getattr(engine, name) for name in free if self._takes(name)}
        return {name: rules[name] for name in rules if free[name] >= KEPT_FREE * usable}

    def _reservations(self) -> Iterator[Advice]:
        """Reserve less for each request."""
        engine, table = self.engine, self.run.table
        if engine.allocation == "contiguous":
            yield turn(self.key("allocation"), "contiguous", "paged")
        reserve = engine.reserve_output_tokens
        if engine.allocation == "contiguous" or reserve == "max_model_len":
            longest = int((table.workload.prompt_tokens + table.generated)[self.run.done].max())
            to = -(-longest // engine.block_size) * engine.block_size
            now = self.spec.max_model_len
            if to * WORTH < now and engine.enable_chunked_prefill:
                yield turn(self.key("max_model_len"), now, to)
        if reserve is not None:
            yield turn(self.key("reserve_output_tokens"), reserve, None)
        if self.reserves_all:
            longest = int(self.run.record.workload.output_tokens.max())
            yield turn("workload.max_tokens", None, longest)

    @property
    def reserves_all(self) -> bool:
        """Whether room is reserved for far longer answers, as no request has `max_tokens`."""
        asked, engine = self.run.record.workload, self.engine
        given = {"max_new_tokens", "capacity_scheduler_policy"} & {
            *engine.scheduling_policy.arguments
        }
        if asked.max_tokens is not None or given:
            return False
        longest = int((asked.prompt_tokens + asked.output_tokens).max())
        own = self.run.own_scheduler
        kept = own is not None and own.traits.sets_aside
        return kept and longest * WORTH < self.spec.max_model_len

    def _override(self) -> Iterator[Advice]:
        """As many blocks as are wanted and as the GPU has."""
        now = self.engine.num_gpu_blocks_override
        if now is None:
            return
        fit = self._blocks(num_gpu_blocks_override=None)
        wanted = now * self.most_present / max(self.seats_in_memory, 1)
        to = min(fit, int(np.ceil(min(max(wanted, 2 * now), MOST * now))))
        if to >= WORTH * now:
            yield turn(self.key("num_gpu_blocks_override"), now, to)

    def _more_blocks(self) -> list[Advice]:
        """Narrower numbers and more of the memory, as blocks count; last more GPUs."""
        engine, spec = self.engine, self.spec
        if engine.num_gpu_blocks_override is not None:
            return []
        offers = [*self.quantization()]
        if engine.cache_dtype not in EIGHT_BITS:
            offers.append(turn(self.key("kv_cache_dtype"), engine.kv_cache_dtype, "fp8"))
        if (share := engine.gpu_memory_utilization) < UTILIZATION:
            offers.append(turn(self.key("gpu_memory_utilization"), share, UTILIZATION))
        size, count = engine.tensor_parallel_size, self.scenario.gpu.count
        also = {self.key("count", "gpu"): 2 * count}
        wider = turn(self.key("tensor_parallel_size"), size, 2 * size, also)
        blocks = {one: self._blocks(**{one.key.rpartition(".")[2]: one.to}) for one in offers}
        blocks[wider] = 0 if self.scenario.cost else self._blocks(tensor_parallel_size=2 * size)
        useful = [one for one in blocks if blocks[one] >= WORTH * spec.num_gpu_blocks]
        return sorted(useful, key=lambda one: (one is wider, -blocks[one]))

    def fewer_seats(self) -> list[Advice]:
        """So few that all who run keep their blocks to the end."""
        table, now = self.run.table, self.engine.max_num_seqs
        total = (table.workload.prompt_tokens + table.generated)[self.run.done]
        each = -(-percentiles(total, [75.0])[0] // self.engine.block_size)
        to = max(int((self.spec.num_gpu_blocks - 1) // each), 1)
        to = min(to, int(self._gauges["max_running"]) - 1)
        return [turn(self.key("max_num_seqs"), now, to)] if 1 <= to < now else []
