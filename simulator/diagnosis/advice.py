"""Advice on a run: which keys of its scenario to raise, lower or set, and by how much."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from simulator.cluster.config import MOST_REPLICAS
from simulator.core.engine_config import EngineConfig
from simulator.core.log import Log
from simulator.core.request import Chunk, Request, Step
from simulator.diagnosis.autoscaler_waits import waits_of
from simulator.diagnosis.evidence import Evidence
from simulator.diagnosis.feasibility import busy_share, least_length, obstacles
from simulator.diagnosis.finding import Advice, turn
from simulator.results.breakdown import prompt_rows
from simulator.results.record import replicas_in
from simulator.results.request_table import Ints
from simulator.results.sample import percentiles
from simulator.scenario.choose_scheduler import choose_scheduler
from simulator.scenario.engine_spec import EngineSpec
from simulator.scenario.kv_room import EIGHT_BITS, UTILIZATION, kv_blocks, least_change
from simulator.scenario.scenario import Scenario

MOST = 4  # times a number is raised at once
SPAN = 0.25  # of the run: in a shorter time all requests come at once
SMALLEST = 8  # th part of the tokens of a step, at least
HOST = 0.25  # share of the steps' time that the GPU spends waiting for the host
HEADROOM = 1.2  # replicas beyond those that the load would keep busy all the time
WORTH = 1.1  # times as many blocks, seats or tokens a second: less is no advice
FASTER = 1.5  # times as fast must prompts be in larger chunks, as decodes beside them get slower
KEEPING_UP = 1.5  # times as fast as prompts come must smaller chunks be: many come at once
PROMPTS_FIRST = ("fcfs-v0", "sglang", "tgi")
"""Policies that let prompts go before decodes: none lets them begin sooner."""
SETTLED = 8  # times that Little's law is put into itself
WAIT_AT_MOST = 0.1  # share of the waiting that comes while an autoscaler has ordered all
KEPT_FREE = 0.1  # share of the blocks that admission keeps free: less is hardly a cause


class Advisor:
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
        self.scenario: Scenario = scenario.of_group(self.group)
        self.engine: EngineConfig = self.scenario.engine
        self.spec: EngineSpec = run.record.cores[numbers[0]]
        logs = run.record.logs if cluster is None else cluster.engine_logs(run.record)
        worked = [n for n in numbers if logs[n].step_rows] or numbers  # a model may sleep on
        self.logs: list[Log] = [logs[number] for number in worked]
        self.costs = [run.record.costs[number] for number in worked]

    def key(self, name: str, block: str = "engine") -> str:
        """Return the dotted key of this group's engine or GPU."""
        cluster = self.run.record.scenario.cluster
        if cluster is not None and getattr(cluster.replica_groups[self.group], block) is not None:
            return f"cluster.groups.{self.group}.{block}.{name}"
        return f"{block}.{name}"

    def changed(self, name: str, to: int, **also: int) -> Advice:
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

    # ---------------------------------------------------------------- more of all

    def replicas(self) -> list[Advice]:
        """More replicas: as many as end the work while it comes; twice as many after a burst."""
        cluster = self.run.record.scenario.cluster
        if cluster is not None and (budget := cluster.max_gpu_budget) is not None:
            return [turn("cluster.max_gpu_budget", budget, self._enough(budget))]
        if cluster is not None and self.group in cluster.scalers:
            block, key = cluster.scalers[self.group], cluster.scaler_key(self.group)
            waits, most = waits_of(self.run, self.group, block), block.max_replicas
            if waits.at_most < WAIT_AT_MOST * waits.whole or waits.most_up < most:
                to = max(min(self._enough(waits.most_up), most), block.min_replicas)
                return [turn(f"{key}.min_replicas", block.min_replicas, to)]
            return [turn(f"{key}.max_replicas", most, self._enough(most))]
        key, now = self.replicas_key()
        return [turn(key, now, self._enough(now))] if now < MOST_REPLICAS else []

    def replicas_key(self) -> tuple[str, int]:
        """Return the key of the group's replicas, and how many they are."""
        cluster = self.run.record.scenario.cluster
        return ("cluster.replicas", 1) if cluster is None else cluster.replicas_of(self.group)

    @property
    def _spans(self) -> tuple[float, float]:
        """For how long requests came, and until all were served, s."""
        finish, sent = self.run.table.finish, self.run.table.sent
        sent = sent[~np.isnan(sent)]
        end = np.nanmax(finish, initial=sent.min())  # the former where nobody was served
        return float(np.ptp(sent)), float(end - sent.min())

    def _enough(self, now: int) -> int:
        """Say how many replicas keep up with the arrivals; the clients' load stays as it is."""
        arriving, whole = self._spans
        times = 2.0 if arriving <= SPAN * whole else HEADROOM * whole / arriving
        return min(max(int(np.ceil(now * times)), now + 1, self._least()), MOST_REPLICAS)

    def _least(self) -> int:
        """Say how many the warning before the run asks for, which sees all of the load."""
        record = self.run.record
        found, cluster = obstacles(record.scenario, record.workload), record.scenario.cluster
        if cluster is not None and (cluster.client or cluster.admission):  # no queue tells of it
            now = self.replicas_key()[1]
            return int(np.ceil(HEADROOM * now * busy_share(record.scenario, record.workload)))
        return max((n for one in found if not one.memory for n in one.change.values()), default=0)

    def quantization(self) -> list[Advice]:
        """Narrower weights: less to read in each step; a fitted profile of others says nothing."""
        cost = self.scenario.cost
        if self.engine.quantization is not None or (cost and cost.get("kind") != "roofline"):
            return []
        to = "fp8" if self.spec.gpu.fp8_flops else "int8"
        return [turn(self.key("quantization"), None, to)]

    def host(self) -> list[Advice]:
        """Let the host work beside the GPU, and a front end of each rank stream its tokens."""
        engine, servers = self.engine, self.engine.api_server_count
        found = []
        if engine.follows_vllm and not engine.async_scheduling and self.run.own_scheduler is None:
            found.append(turn(self.key("async_scheduling"), False, True))
        if servers is not None and servers < engine.data_parallel_size:
            found.append(self.changed("api_server_count", engine.data_parallel_size))
        return found

    # ---------------------------------------------------------------- seats and tokens

    def seats(self) -> list[Advice]:
        """More seats, where they give more tokens/s and bounds on TPOT are kept.

        As far as there are requests and KV memory.
        """
        now, tokens = self.engine.max_num_seqs, self.engine.max_num_batched_tokens
        wanted = min(self.most_present, self.seats_in_memory, MOST * now)
        to = min(1 << max(wanted - 1, 1).bit_length(), MOST * now, max(self.seats_in_memory, 1))
        while to >= WORTH * now:
            key = self.key("max_num_batched_tokens")
            slower = self._token_time(to) / self._token_time(now)
            pays = to >= WORTH * now * slower and not self.run.would_break("tpot", slower)
            blocks = self._blocks(max_num_seqs=to, max_num_batched_tokens=max(tokens, to))
            if pays and blocks >= self.spec.num_gpu_blocks / WORTH:
                return [turn(self.key("max_num_seqs"), now, to, {key: to} if to > tokens else {})]
            to //= 2
        return []

    def _token_time(self, decodes: int) -> float:
        """Return the seconds between tokens with so many decodes, and their prompts beside them."""
        table, done = self.run.table, self.run.done
        known = self.run.gauges["prefix_cache_hit_rate"] or 0.0
        prompt = max(float(table.workload.prompt_tokens[done].mean()), 1.0)
        answer = max(float(table.generated[done].mean()), 1.0)
        context = round(decodes * (prompt + answer / 2))
        alone: float = self.costs[0].decode_seconds(np.array([decodes]), np.array([context])).item()
        prompt = max((1.0 - known) * prompt, 1.0)  # that is computed
        chunk = round(min(prompt, max(self.engine.max_num_batched_tokens - decodes, 1)))
        step = Step([Chunk(Request(-1, 0.0, chunk, 1), 0, chunk)], decodes, context)
        stall = max(self.costs[0].execute(step).seconds - alone, 0.0)
        return float(alone + decodes / answer * prompt / chunk * stall)

    def _prompt_rate(self, tokens: int) -> float:
        """Return the prompt tokens a second of full steps beside the mean decodes."""
        decodes, context = self._mean_decodes()
        chunk = max(tokens - decodes, 1)
        step = Step([Chunk(Request(-1, 0.0, chunk, 1), 0, chunk)], decodes, context)
        seconds: float = self.costs[0].execute(step).seconds
        return chunk / max(seconds, 1e-12)

    def token_budget(self) -> tuple[list[Advice], float]:
        """More tokens a step, and how many times as fast prompts are then."""
        now, rate = self.engine.max_num_batched_tokens, self._prompt_rate
        rates = {times: rate(times * now) / rate(now) for times in (2, 4, 8)}
        rates = {n: r for n, r in rates.items() if not self.run.would_break("itl", n / r)}
        best = max(rates.values(), default=0.0)
        times = next((times for times, gain in rates.items() if gain >= 0.95 * best), 1)
        blocks = self._blocks(max_num_batched_tokens=times * now)
        takes, room = self._takes("max_num_batched_tokens"), WORTH * blocks
        if not takes or best < WORTH or room < self.spec.num_gpu_blocks:
            return [], 1.0
        return [turn(self.key("max_num_batched_tokens"), now, times * now)], best

    def smaller_chunks(self) -> list[Advice]:
        """Half the tokens a step; where a bound on ITL is broken, prompts that take as decodes do.

        No prompt alone breaks a bound on TTFT by it. Where such steps do not keep up with the
        prompts, or clients give up that wait for them, more replicas come first, then a budget that
        keeps up. Behind a scheduler that does not split prompts, vLLM's does so.
        """
        now, seats = self.engine.max_num_batched_tokens, self.engine.max_num_seqs
        sizes: list[Ints] = []  # tokens of each step with prompts and decodes
        time = stall = 0.0  # s of all of them
        prompts = decodes = 0  # tokens
        for log, cost in zip(self.logs, self.costs, strict=True):
            rows, at = log.steps, prompt_rows(log)
            beside = rows["decodes"][at]
            mixed = beside > 0
            stall += float(self.run.prompt_stalls(log, cost)[mixed].sum())
            at, beside = at[mixed], beside[mixed]
            time += float((rows["end"][at] - rows["start"][at]).sum())
            chunks = rows["prefill_tokens"][at]
            prompts, decodes = prompts + int(chunks.sum()), decodes + int(beside.sum())
            sizes.append(chunks + beside)
        tokens = np.concatenate([np.empty(0, np.int64), *sizes])
        if not len(tokens):
            return []
        per_token = stall / max(prompts, 1)
        fair = (decodes + (time - stall) / max(per_token, 1e-12)) / len(tokens)
        used = percentiles(tokens, [99.0])[0]
        least = max(seats, now // SMALLEST)
        most = min(now, used) / 2
        if most < least or not self.engine.enable_chunked_prefill:
            return []
        size = max(fair, least) if self.run.would_break("itl", 1.0) else most
        to = max(1 << (int(min(size, most)).bit_length() - 1), least)
        key = self.key("max_num_batched_tokens")
        if self.run.own_scheduler is not None:
            return [replace(one, also={key: to} if to < now else {}) for one in self.policy()]
        steps = [to << k for k in range(now.bit_length()) if to << k <= most]
        whole = float(np.nanmax(self.run.table.finish) - np.nanmin(self.run.table.sent))
        computed = sum(int(log.steps["prefill_tokens"].sum()) for log in self.logs)
        wanted = KEEPING_UP * computed / max(whole, 1e-12) / len(self.logs)
        enough = [
            size
            for size in steps
            if self._prompt_rate(size) >= wanted
            and not self.run.would_break("ttft", self.prompts_slower(size))
        ]
        cluster = self.run.record.scenario.cluster
        impatient = cluster is not None and cluster.client is not None  # who waits longer gives up
        first = [] if enough[:1] == [to] and not impatient else self.replicas()
        return [*first, *(turn(key, now, size) for size in enough[:1])]

    def prompts_slower(self, tokens: int) -> float:
        """Say how many times as long prompts take in steps of so many tokens."""
        return self._prompt_rate(self.engine.max_num_batched_tokens) / self._prompt_rate(tokens)

    def seats_within(self, bound: float) -> list[Advice]:
        """Fewer seats, where the time between tokens of all that run exceeds `bound` (ms).

        At least as many as give the tokens a second that are asked for, unless all came at once.
        """
        seats = min(int(self._gauges["max_running"]), self.engine.max_num_seqs)
        times = {1 << k: self._token_time(1 << k) for k in range(seats.bit_length())}
        mean, (arriving, whole) = self._mean_decodes()[0], self._spans
        wanted = mean / self._token_time(mean) if arriving > SPAN * whole else 0.0
        kept = [n for n, time in times.items() if 1e3 * time <= bound and n / time >= wanted]
        return [self.changed("max_num_seqs", kept[-1])] if kept and kept[-1] < seats else []

    def replicas_within(self, now: int, bound: float) -> int:
        """Say how many replicas share the requests so that the time between tokens is in `bound`.

        In ms. Each has its share of them, and by Little's law fewer at once where they stay for
        less: not of those that come all at once.
        """
        most, (arriving, whole) = float(self._gauges["max_running"]), self._spans
        alone = self._token_time(round(most))
        for count in range(now + 1, MOST_REPLICAS):
            share = running = most * now / count
            for _ in range(SETTLED if arriving > SPAN * whole else 0):
                running = share * self._token_time(max(round(running), 1)) / alone
            if running < 1 or 1e3 * self._token_time(round(running)) <= bound:
                return count
        return MOST_REPLICAS

    # ---------------------------------------------------------------- memory

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

    # ---------------------------------------------------------------- rules of the scheduler

    def policy(self, to: str = "fcfs") -> list[Advice]:
        """Another policy; where SGLang's tree would have to go as well, none."""
        now, tree = self.engine.policy_name, self.engine.prefix_cache == "radix"
        kept = now == to or (tree and now == "sglang")
        return [] if kept else [turn(self.key("scheduling_policy"), now, to)]

    def interval(self) -> list[Advice]:
        """Prompts in every step."""
        name, now = "prefill_schedule_interval", self.engine.prefill_schedule_interval
        return [turn(self.key(name), now, 1)] if now > 1 and self._takes(name) else []

    def _takes(self, name: str) -> bool:
        """Say whether the scheduler knows a key; vLLM's, which policies order, knows all."""
        own = self.run.own_scheduler
        return own is None or name in own.traits.obeys

    def prefix_caching(self) -> list[Advice]:
        """Keep the blocks of prompts, where the scheduler can find them."""
        states = {"mamba_cache_mode": "align"} if self.spec.model.linear else {}
        changed = self.engine.model_copy(update={"enable_prefix_caching": True} | states)
        try:
            chosen = choose_scheduler(replace(self.spec, engine=changed))
        except ValueError:  # no such cache of states, or of windows with drafts, is simulated
            return []
        # None is the installed vLLM's, which caches.
        caches = chosen is None or chosen.traits.caches_prefixes
        useful = caches and self.engine.allocation == "paged"
        return [self.changed("enable_prefix_caching", True)] if useful else []

    def cure(self, cause: str) -> list[Advice]:
        """Say what to do about a cause of waiting, the best first; see `CAUSES`.

        What costs no GPU comes before more replicas where it makes the work itself faster.
        """
        less_kept_free = [turn(self.key(name), now, 0) for name, now in self.kept_free.items()]
        free, first = [*less_kept_free, *self.memory()], True
        if cause == "seats":
            free = self.seats()
        elif cause == "token budget":
            free, faster = self.token_budget()
            held = self.interval()  # prompts that were held together fill a step
            free, first = [*held, *free], bool(held) or faster >= FASTER
        elif cause == "policy":
            free = [*self.interval(), *self.policy()]
            first = self.run.policy not in PROMPTS_FIRST
        more = self.replicas()
        narrower = self.quantization() if cause in ("seats", "token budget") else []
        return [*free, *more, *narrower] if first else [*more, *free, *narrower]


class AdvisedEvidence(Evidence):
    """The evidence in a run, and what to do about it."""

    @cached_property
    def advisor(self) -> Advisor:
        """What knows the keys to turn."""
        return Advisor(self)
