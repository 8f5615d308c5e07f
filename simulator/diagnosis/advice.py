"""Advice on a run: which keys of its scenario to raise, lower or set, and by how much."""

import warnings
from bisect import bisect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from simulator.cluster.config import MOST_REPLICAS
from simulator.core.request import Chunk, Request, Step
from simulator.diagnosis.autoscaler_waits import waits_of
from simulator.diagnosis.evidence import Evidence
from simulator.diagnosis.feasibility import Traffic, busy_share
from simulator.diagnosis.finding import Advice, follow, turn
from simulator.diagnosis.memory_advice import MOST, WORTH, MemoryAdvisor
from simulator.results.breakdown import prompt_rows
from simulator.results.fairness import several_clients
from simulator.results.request_table import Ints
from simulator.results.sample import percentiles
from simulator.results.steady_state import overload
from simulator.util.errors import HeadwayError

SPAN = 0.25  # of the run: in a shorter time all requests come at once
SMALLEST = 8  # th part of the tokens of a step, at least
HEADROOM = 1.2  # replicas beyond those that the load would keep busy all the time
FASTER = 1.5  # times as fast must prompts be in larger chunks, as decodes beside them get slower
KEEPING_UP = 1.5  # times as fast as prompts come must smaller chunks be: many come at once
PROMPTS_FIRST = ("fcfs-v0", "sglang", "tgi")
"""Policies that let prompts go before decodes: none lets them begin sooner."""
WAIT_AT_MOST = 0.1  # share of the waiting that comes while an autoscaler has ordered all


class Advisor(MemoryAdvisor):
    """Advice of all kinds for one group of replicas."""

    # ---------------------------------------------------------------- more of all

    def replicas(self) -> list[Advice]:
        """More replicas: as many as end the work while it comes; twice as many after a burst."""
        cluster = self.servers
        if (budget := cluster.max_gpu_budget) is not None:
            return [turn("cluster.max_gpu_budget", budget, self._enough(budget))]
        if self.group in cluster.scalers:
            block, key = cluster.scalers[self.group], cluster.scaler_key(self.group)
            waits, most = waits_of(self.run, self.group, block), block.max_replicas
            if waits.at_most < WAIT_AT_MOST * waits.whole or waits.most_up < most:
                to = max(min(self._enough(waits.most_up), most), block.min_replicas)
                return [turn(f"{key}.min_replicas", block.min_replicas, to)]
            return [turn(f"{key}.max_replicas", most, self._enough(most))]
        key, now = cluster.replicas_of(self.group)
        return [turn(key, now, self._enough(now))] if now < MOST_REPLICAS else []

    @property
    def _spans(self) -> tuple[float, float]:
        """For how long requests came, and until all were served, s."""
        finish, sent = self.run.table.finish, self.run.table.sent
        sent = sent[~np.isnan(sent)]
        end = np.nanmax(finish, initial=sent.min())  # the former where nobody was served
        return float(np.ptp(sent)), float(end - sent.min())

    @cached_property
    def _rate(self) -> float:
        """Requests that come a second; 0: all at once, or as fast as they are answered."""
        return Traffic.of(self.run.record.scenario, self.run.record.workload).rate

    def _enough(self, now: int) -> int:
        """Say how many replicas keep up with the arrivals; the clients' load stays as it is."""
        load, scenario = self.run.record.workload, self.run.record.scenario
        arriving, whole = self._spans
        times = 2.0 if arriving <= SPAN * whole else HEADROOM * whole / arriving
        if self._rate:
            alone = float(self.run.table.e2el[self.run.done].min(initial=whole))
            times = HEADROOM * self._rate * (whole - alone) / len(load)
        if self.servers.client or self.servers.admission:  # no queue tells of those refused
            times = max(times, HEADROOM * busy_share(scenario, load))
        return min(self.servers.in_pods(max(now * times, now + 1)), MOST_REPLICAS)

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
        longer = ("itl", "tpot") if self._overloaded else ("itl",)
        rates = {
            n: r
            for n, r in rates.items()
            if not any(self.run.would_break(one, n / r) for one in longer)
        }
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
        per_token = stall / prompts
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
            return self.policy(also={key: to} if to < now else {})
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
        impatient = self.servers.client is not None  # who waits longer gives up
        first = [] if enough[:1] == [to] and not impatient else self.replicas()
        return [*first, *(turn(key, now, size) for size in enough[:1])]

    @property
    def _overloaded(self) -> bool:
        """Whether a queue grows, so that prompts fill all steps, however many tokens these have."""
        return overload(self.run.gauges) is not None

    def cost_of_budget(self, advice: Sequence[Advice]) -> str:
        """Say what the first other token budget of `advice` costs; "" where there is none."""
        key = self.key("max_num_batched_tokens")
        for one in (one for one in advice if one.key == key):
            slower, with_it = self.prompts_slower(one.to), f" With max_num_batched_tokens={one.to} "
            if one.direction == "lower":
                return (
                    f"{with_it}a prompt takes {slower:.2f} times as long: TTFT grows by that, and "
                    "more where requests queue."
                )
            tpot = " and TPOT are" if self._overloaded else " is"
            times = f"{one.to / one.value * slower:.2f} times as long"
            return f"{with_it}a step full of prompts takes {times}: ITL{tpot} up to {times}."
        return ""

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
        """Say how many replicas share the requests so that tokens come within `bound` (ms).

        Each decodes the largest batch within it. By Little's law a rate brings as many requests
        as it asks for tokens in that time, at times the root of that more (Poisson), but no more
        than there are; without a rate, or behind `max_concurrency`, no more than were in this run.
        """
        load, time = self.run.record.workload, self._token_time
        batch = max(bisect(range(1, self.engine.max_num_seqs + 1), bound / 1e3, key=time), 1)
        tokens = (self._rate or load.request_rate) * self.run.table.generated[self.run.done].mean()
        most, mean = len(load) if self._rate else now * self.most_present, tokens * time(batch)
        count = self.servers.in_pods(max(min(mean + mean**0.5, most) / batch, now + 1))
        return min(count, MOST_REPLICAS)

    # ---------------------------------------------------------------- rules of the scheduler

    def policy(self, to: str = "fcfs", also: Mapping[str, Any] | None = None) -> list[Advice]:
        """Another policy; where SGLang's tree would have to go as well, none."""
        now, tree = self.engine.policy_name, self.engine.prefix_cache == "radix"
        kept = now == to or (tree and now == "sglang")
        return [] if kept else [turn(self.key("scheduling_policy"), now, to, also)]

    def one_class_first(self) -> list[Advice]:
        """A policy that parts classes: by their priorities, else by the service they get."""
        priority = self.run.record.workload.priority
        if priority is None or (priority == priority[0]).all():
            return self.policy("fair") if several_clients(self.run.record.workload) else []
        to = {"fcfs": "priority", "priority": "preemptive"}.get(self.run.policy)
        if to is None:
            return []
        also = {self.key("async_scheduling"): False}
        alone = to == "preemptive" and self.engine.async_scheduling
        return self.policy(to, also if alone else {})

    def interval(self) -> list[Advice]:
        """Prompts in every step."""
        name, now = "prefill_schedule_interval", self.engine.prefill_schedule_interval
        return [turn(self.key(name), now, 1)] if now > 1 and self._takes(name) else []

    def prefix_caching(self) -> list[Advice]:
        """Keep the blocks of prompts, where the scheduler can find them."""
        own = self.run.own_scheduler
        caches = own is None or own.traits.caches_prefixes
        states = {"mamba_cache_mode": "align"} if self.spec.model.linear else {}
        return [self.changed("enable_prefix_caching", True, **states)] if caches else []

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
            # Where a queue grows all the same, every step takes longer.
            free, first = [*held, *free], bool(held) or (faster >= FASTER and not self._overloaded)
        elif cause == "policy":
            free = [*self.interval(), *self.policy()]
            first = self.run.policy not in PROMPTS_FIRST
        more = self.replicas()
        narrower = self.quantization() if cause in ("seats", "token budget") else []
        return [*free, *more, *narrower] if first else [*more, *free, *narrower]


class AdvisedEvidence(Evidence):
    """The evidence in a run, and what to do about it."""

    def takes(self, advice: Advice) -> bool:
        """Say whether the scenario can follow it: some engines and fleets refuse some keys."""
        with warnings.catch_warnings(), suppress(HeadwayError):
            warnings.simplefilter("ignore")
            return bool(follow(self.record.scenario, advice.as_dict()))
        return False

    @cached_property
    def advisor(self) -> Advisor:
        """What knows the keys to turn."""
        return Advisor(self)
