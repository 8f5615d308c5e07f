"""What the rules of the diagnosis look at: where time went, and why requests were not admitted."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.core.engine_config import EngineConfig
from simulator.core.log import Log
from simulator.costs.cost_model import CostModel
from simulator.results.breakdown import prompt_stalls
from simulator.results.record import ClusterRecord, Record, replicas_in
from simulator.results.request_table import Flags, Floats, Ints, Rows
from simulator.results.service_levels import Judged, goodput_of
from simulator.results.time_series import SLICE, Leaps, arrivals, decisions
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload

CAUSES = ("seats", "token budget", "blocks", "policy")
MAX_NUM_SEQS, TOKEN_BUDGET, KV_BLOCKS, POLICY = CAUSES
"""All max_num_seqs taken; all max_num_batched_tokens given away; too few KV blocks; its rules."""
ADAPTERS = "adapters"
"""A further cause: all `max_loras` taken by others."""
SPARE = 0.25
"""Of the blocks: more than any head of a queue should need."""
LOOKS = 1000  # moments at which replicas are compared
PROMPTS = 100_000  # whose beginnings are compared, at most


class Evidence:
    """What the rules look at."""

    def __init__(self, record: Record, summary: Mapping[str, Any]) -> None:
        self.record = record
        self.engine = record.scenario.engine
        self.summary = summary
        self.gauges: Mapping[str, Any] = summary["headway"]
        parts = record.time_parts()  # first: it takes a table of its own
        self.table = record.request_table()
        done = self.done = self.table.completed
        self.time = {name: float(part[done].sum()) for name, part in parts.items()}
        self.time["queue_time"] = float(self.table.queue_time[done].sum())
        self.total = float(self.table.e2el[done].sum()) or 1.0  # s
        self.policy = self.engine.policy_name
        self._stalls: dict[int, Floats] = {}

    def share(self, *parts: str) -> float:
        """Return the share of the requests' e2el that these parts of it are together."""
        return sum(self.time.get(name, 0.0) for name in parts) / self.total

    def prompt_stalls(self, log: Log, cost: CostModel) -> Floats:
        """Return the `prompt_stalls` of one of the run's logs; computed once."""
        if id(log) not in self._stalls:
            self._stalls[id(log)] = prompt_stalls(log, cost)
        return self._stalls[id(log)]

    @cached_property
    def engines(self) -> list[EngineConfig]:
        """The engine of each replica: those of a cluster's groups may differ."""
        cluster, scenario = self.record.cluster, self.record.scenario
        if cluster is None:
            return [self.engine] * len(self.record.logs)
        kinds = {name: scenario.of_group(name).engine for name in set(cluster.groups)}
        return [kinds[name] for name in cluster.groups]

    def serves(self, number: int) -> bool:
        """Say whether a replica has requests of its own; one that encodes for others has none."""
        return self.record.cores[number].role != "ec_producer"

    def limit(self, key: str) -> str:
        """Return a number of the engines in words: one, or from the least to the most."""
        values = [getattr(engine, key) for engine in self.engines]
        least, most = min(values), max(values)
        return f"{least}" if least == most else f"{least} to {most}"

    @cached_property
    def own_scheduler(self) -> type[SchedulerBase] | None:
        """The scheduler that admits by rules of its own; None: by those of vLLM."""
        named = self.record.spec.policy
        return named if issubclass(named, SchedulerBase) and named is not Scheduler else None

    @cached_property
    def wait_shares(self) -> dict[str, float]:
        """The share of the requests' time that they wait for each cause."""
        waited = self.share("queue_time", "preempted_time", "decode_queue_time")
        areas = self._blocked[0]
        whole = sum(areas.values()) or 1.0
        return {cause: area / whole * waited for cause, area in areas.items()}

    @cached_property
    def memory_time(self) -> float:
        """The share of the busy time in which requests wait for blocks."""
        busy = sum(float((log.steps["end"] - log.steps["start"]).sum()) for log in self.record.logs)
        return self._blocked[1] / busy if busy else 0.0

    @cached_property
    def waited(self) -> list[float]:
        """Requests x s that each replica's queue waited."""
        return [sum(areas.values()) for areas, _ in self._blocked_each]

    @cached_property
    def _blocked(self) -> tuple[dict[str, float], float]:
        """The `blocked_time` of all replicas together."""
        causes = (*CAUSES, ADAPTERS)
        areas = {cause: sum(each[cause] for each, _ in self._blocked_each) for cause in causes}
        return areas, sum(held for _, held in self._blocked_each)

    @cached_property
    def _blocked_each(self) -> list[tuple[dict[str, float], float]]:
        """The `blocked_time` of each replica."""
        from simulator.schedulers.static import Static

        nothing = dict.fromkeys((*CAUSES, ADAPTERS), 0.0)
        spare = inf if self.own_scheduler is None else SPARE
        if issubclass(self.record.spec.policy, Static):
            spare = 0.0
        return [
            blocked_time(log, self.engines[number], spare)
            if log.step_rows and self.serves(number)
            else (nothing, 0.0)
            for number, log in enumerate(self.record.logs)
        ]

    @cached_property
    def misrouted(self) -> float:
        """The share of the waiting at a replica while another of its group has free seats.

        Looked at are `LOOKS` moments of the run. Who is free serves, has nobody waiting, and half
        of its seats are free.
        """
        cluster, table = self.record.cluster, self.table
        if cluster is None or len(cluster.groups) < 2 or cluster.transfers is not None:
            return 0.0
        admitted = np.where(np.isnan(table.queue_time), table.left, table.first_scheduled)
        looks = np.linspace(0.0, float(table.finish[self.done].max()), LOOKS)
        entered = table.entered + table.encoding
        missed = total = 0.0
        order, left = np.argsort(table.replica, kind="stable"), table.left
        bounds = np.searchsorted(table.replica[order], np.arange(len(cluster.groups) + 1))
        for numbers in replicas_in(cluster.groups).values():
            here = [order[bounds[number] : bounds[number + 1]] for number in numbers]
            waiting = np.array([count_at(entered[one], admitted[one], looks) for one in here])
            running = np.array([count_at(admitted[one], left[one], looks) for one in here])
            free = (waiting == 0) & (running <= self.engines[numbers[0]].max_num_seqs / 2)
            free &= np.array(
                [_is_up(cluster, cluster.servers[number], looks) for number in numbers]
            )
            queue = waiting.sum(axis=0)
            missed += float(queue[free.any(axis=0)].sum())
            total += float(queue.sum())
        return missed / total if total else 0.0

    def would_break(self, latency: str, times: float) -> bool:
        """Say whether a bound on a latency is broken where that is so many times as long."""
        judged = [Judged.of(one) for one in self.gauges.get("slo") or ()]
        bounds = [(one.slo.bound, one.value) for one in judged if f"_{latency}_" in one.slo.metric]
        for bound, here in self.bounds(latency):
            bounds.append((bound, 1e3 * float(getattr(self.table, latency)[here].mean())))
        return any(bound < times * value for bound, value in bounds)

    def bounds(self, latency: str, among: Flags | bool = True) -> Iterator[tuple[float, Flags]]:
        """Yield the bounds of goodput on a latency, ms, and which served requests have each.

        Of a TPOT those of several tokens. `among` are those that count.
        """
        done = self.done & among & ((self.table.generated > 1) | (latency != "tpot"))
        bound = goodput_of(self.record.scenario.goodput, self.table.workload).get(latency, inf)
        # `np.unique` would import numpy.ma, for 1 % of a run.
        for one in sorted({*np.atleast_1d(bound).tolist()}):
            here = done & (bound == one)
            if one < inf and here.any():
                yield float(one), here

    def ms(self, key: str) -> float:
        """Return a statistic of the summary in ms."""
        return float(self.summary[f"{key}_ms"])


def known_share(workload: Workload, block_size: int) -> float:
    """Return the share of the prompt tokens that begin as those of an earlier prompt do.

    A prefix cache that never forgets would know them. A segment counts as known where an earlier
    prompt has the same one after the same beginning; whole blocks of `block_size` tokens count, and
    never a prompt's last token (vLLM computes it).
    """
    if workload.segments is None:
        return 0.0
    known = total = 0
    numbers: dict[tuple[int, object], int] = {}  # of a beginning: by that before it and a segment
    for segments, tokens in zip(
        workload.segments[:PROMPTS], workload.prompt_tokens[:PROMPTS].tolist(), strict=True
    ):
        total += tokens
        beginning, alike, new = 0, 0, False
        for segment in segments or ():
            key = (beginning, segment)
            new = new or key not in numbers
            alike += 0 if new else segment[1]
            beginning = numbers.setdefault(key, len(numbers) + 1)
        known += min(alike, tokens - 1) // block_size * block_size
    return known / total if total else 0.0


def _is_up(cluster: ClusterRecord, server: int, looks: Floats) -> npt.NDArray[np.bool_]:
    """Tell at which times (s) a server takes requests."""
    if not cluster.comes_and_goes:
        return np.ones(len(looks), bool)
    changes = [(time, state == "up") for time, one, state in cluster.changes if one == server]
    at = np.searchsorted([time for time, _ in changes], looks, "right")
    found: npt.NDArray[np.bool_] = np.array([False, *(up for _, up in changes)])[at]
    return found


def count_at(begin: Floats, end: Floats, looks: Floats) -> Ints:
    """Count what has begun at some times and has not ended, all in s; NaN: it never does."""
    begun, ended = (np.searchsorted(np.sort(times), looks, "right") for times in (begin, end))
    count: Ints = begun - ended
    return count


def blocked_time(log: Log, engine: EngineConfig, spare: float) -> tuple[dict[str, float], float]:
    """Return seconds x requests that one replica's queue waited, by cause; and the s for blocks.

    A request counts if it is left waiting once a step is decided; waiting for an end counts not.
    Of several causes the one that is earlier in CAUSES counts. What is neither seats nor budget is
    the scheduler's policy where a share of `spare` of the blocks is free, else it is the blocks: so
    with inf for vLLM's rules, of which none is left (but held prompts, prefill_schedule_interval:
    they are policy too). With 0, for static batching, all is policy.
    """
    rows, within = log.steps, _waited_within_rows(log)
    # Where `spare` is 0 or inf the blocks in use tell nothing.
    leaps = None if spare in (0.0, inf) else Leaps(log)
    added = None if leaps is None else leaps.added_blocks
    areas, blocked, found = np.zeros(len(CAUSES)), 0.0, list[Ints]()
    for at in range(0, len(rows), SLICE):
        some = rows[at : at + SLICE]
        time, waiting = some["end"] - some["start"], some["waiting"]
        used = some["blocks_used"].astype(np.int64)
        cause = _causes(log, engine, spare, some, used)
        areas += np.bincount(cause, waiting * time + within[at : at + SLICE], len(CAUSES))
        blocked += float(time[(cause == CAUSES.index(KV_BLOCKS)) & (waiting > 0)].sum())
        if leaps is not None and added is not None:
            low, high = np.searchsorted(leaps.leapt, (at, at + SLICE))
            used[leaps.leapt[low:high] - at] += added[low:high]
            found.append(at + np.flatnonzero(_causes(log, engine, spare, some, used) != cause))
    changing = np.concatenate([np.empty(0, np.int64), *found])
    if len(changing):  # in these leaps blocks begin to lack
        since = _when_blocks_lack(log, changing, spare)
        later = rows["end"][changing] - since
        begins = rows["end"].copy()
        begins[changing] = since
        waiting = rows["waiting"][changing]
        more = _waited_within_rows(log, begins)[changing] + waiting * later
        areas[CAUSES.index(POLICY)] -= more.sum()
        areas[CAUSES.index(KV_BLOCKS)] += more.sum()
        blocked += float(later[waiting > 0].sum())
    areas_of = dict(zip(CAUSES, areas.tolist(), strict=True))
    areas_of[ADAPTERS] = min(log.amounts.get("adapter_waiting_time", 0.0), areas_of[KV_BLOCKS])
    areas_of[KV_BLOCKS] -= areas_of[ADAPTERS]
    return areas_of, blocked


def _when_blocks_lack(log: Log, rows: Ints, spare: float) -> Floats:
    """Return the time (s) at which the first step of each leapt row begins that lacks blocks."""
    steps = Leaps(log).later_steps(rows)
    added = np.cumsum(steps.blocks)
    added -= np.repeat(added[steps.first] - steps.blocks[steps.first], steps.counts)
    used = np.repeat(log.steps["blocks_used"][rows], steps.counts) + added
    enough = np.add.reduceat(_has_spare(log, used, spare).astype(np.int64), steps.first)
    begins: Floats = steps.begins[steps.first + enough]
    return begins


def _waited_within_rows(log: Log, begins: Floats | None = None) -> Floats:
    """Return for each row the time waited by those who came after its first step was decided.

    They wait from the begin of the step on that is decided next. Only a row of several steps has
    one: each of them ends with a tick. What is before `begins` (s, one time for each row) does not
    count.
    """
    rows, waited = log.steps, np.zeros(len(log.steps))
    every, decided = arrivals(log), decisions(log)
    for at in range(0, len(every), SLICE):
        queue = every[at : at + SLICE]
        row = np.maximum(np.searchsorted(decided, queue, side="left") - 1, 0)
        some = rows[row]
        leapt = (some["steps"] > 1) & (decided[row] < queue)
        if not leapt.any():
            continue
        queue, row, some = queue[leapt], row[leapt], some[leapt]
        starts, ends = some["start"], some["end"]
        ticks = log.ticks_between(starts[0], ends[-1])
        next_begin = np.searchsorted(ticks, queue, side="left")
        if log.decided:  # as a step begins, the one after it is decided
            second = np.searchsorted(ticks, starts, side="right")
            next_begin = np.where(queue <= starts, second, next_begin + 1)
        boundary = np.full(len(queue), np.inf)
        known = next_begin < len(ticks)
        boundary[known] = ticks[next_begin[known]]
        if begins is not None:
            boundary = np.maximum(boundary, begins[row])
        boundary = np.minimum(boundary, ends)
        waited[row[0] : row[-1] + 1] += np.bincount(row - row[0], ends - boundary)
    return waited


def _has_spare(log: Log, used: Ints, spare: float) -> npt.NDArray[np.bool_]:
    """Say whether a share of `spare` of the blocks is free where so many are in use."""
    free: npt.NDArray[np.bool_] = (log.num_blocks - used) >= spare * log.num_blocks
    return free


def _causes(log: Log, engine: EngineConfig, spare: float, rows: Rows, used: Ints) -> Ints:
    """Return for each row of steps the place in CAUSES of what holds its waiting requests back.

    `used` are the blocks in use then.
    """
    policy = _has_spare(log, used, spare)
    if engine.prefill_schedule_interval > 1:
        policy |= (rows["prefill_context"] == 0) & (rows["preempted"] == 0)
    cause = np.where(policy, CAUSES.index(POLICY), CAUSES.index(KV_BLOCKS))
    if not spare:
        return cause
    tokens = rows["prefill_tokens"].astype(np.int64) + rows["decodes"] + rows["wasted"]
    cause = np.where(tokens >= engine.max_num_batched_tokens, CAUSES.index(TOKEN_BUDGET), cause)
    return np.where(rows["running"] >= engine.max_num_seqs, CAUSES.index(MAX_NUM_SEQS), cause)
