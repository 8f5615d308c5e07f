"""How full engines were: batch, queue and KV cache over time, and what became of the work.

All of it follows from sums over the steps (`StepSums`) and over the requests (`RequestSums`), so a
run may come in parts. `mfu` and its like come first: what the run asked of the GPUs' arithmetic and
memory bandwidth.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.build.engine_spec import EngineSpec
from simulator.core.log import REJECTED, UNFINISHED, Log
from simulator.costs.cost_model import CostModel
from simulator.models.power import HIGH, LOW
from simulator.results.needed_work import needed_flops, peak_flops, read_bytes
from simulator.results.request_table import RequestTable, Rows, find_rows
from simulator.results.time_series import Leaps, queue_depth
from simulator.util.sums import add_sums, take_sums

JOULES_PER_KWH = 3.6e6

Values = dict[str, Any]


@dataclass(frozen=True)
class Energy:
    """What some GPUs took while they were paid for; of several groups the sum."""

    joules: float
    kg_co2: float

    def __add__(self, other: "Energy") -> "Energy":
        return Energy(self.joules + other.joules, self.kg_co2 + other.kg_co2)


def energy_summary(energy: Energy | None, duration: float, tokens: float) -> Values:
    """Return the keys of a run of so many s that brought out so many tokens; null: not known."""
    joules = energy.joules / tokens if energy and tokens else None
    return {
        "power_w": energy.joules / duration if energy and duration else None,
        "joules_per_output_token": joules,
        "joules_per_output_token_low": None if joules is None else LOW * joules,
        "joules_per_output_token_high": None if joules is None else HIGH * joules,
        "wh_per_million_output_tokens": None if joules is None else joules * 1e6 / 3600.0,
        "kg_co2_per_million_output_tokens": (
            energy.kg_co2 * 1e6 / tokens if energy and tokens else None
        ),
    }


SLICE = 1 << 17  # rows looked at together: bounds the temporaries


def share(part: float, whole: float) -> float:
    """Divide, and call a part of nothing 0."""
    return float(part) / float(whole) if whole else 0.0


@dataclass(slots=True, eq=False)
class StepSums:
    """Sums over the steps of all replicas; a name ending in `_time` is an integral over time."""

    steps: int = 0
    busy_time: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    wasted_tokens: int = 0
    context: int = 0  # KV entries read by decodes
    running_time: float = 0.0
    live_time: float = 0.0  # as running_time, without those that have ended
    seat_time: float = 0.0  # seats x s
    decode_seat_steps: int = 0  # seats of steps that decode
    live_seat_steps: int = 0  # of these, taken by requests that have not ended
    wasted_seat_steps: int = 0  # of these, taken by requests that have
    used_time: float = 0.0  # blocks x s, each replica's as a share of its cache
    stored_time: float = 0.0  # tokens x s that are in the blocks in use
    reserved_time: float = 0.0  # tokens x s that these blocks have room for
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    offloaded_blocks: int = 0
    amounts: dict[str, float] = field(default_factory=lambda: defaultdict(int))  # of features
    loaded_blocks: int = 0
    loaded_tokens: int = 0  # hits of the host tier, at first admissions
    first_tokens: int = 0  # of these, hits of the first tier behind it
    second_tokens: int = 0  # and of the second
    max_running: int = 0
    max_used: float = 0.0  # share of one replica's cache

    def add(self, log: Log) -> None:
        """Add one replica's steps."""
        for rows in _slices(log.steps):
            steps = rows["steps"].astype(np.int64)
            time = rows["end"] - rows["start"]
            self.steps += int(steps.sum())
            self.busy_time += float(time.sum())
            self.running_time += float((rows["running"] * time).sum())
            self.max_running = max(self.max_running, int(rows["running"].max()))
            self._add_seats(log, rows, steps)
            self._add_tokens(rows, steps)
            used_time = float((rows["blocks_used"] * time).sum())
            stored_time = float((rows["kv_tokens"] * time).sum())
            self._add_blocks(log, used_time, stored_time, int(rows["blocks_used"].max()))
        for rows, token_time, block_time, blocks in Leaps(log).sums():
            stored_time = float((rows["decodes"] * token_time).sum())
            most = int((rows["blocks_used"] + blocks).max())
            self._add_blocks(log, float(block_time.sum()), stored_time, most)
        self._add_copies(log)

    def _add_seats(self, log: Log, rows: Rows, steps: npt.NDArray[np.int64]) -> None:
        ended = ended_requests(log, rows)
        live, decoding = rows["running"] - ended, rows["decodes"] > 0
        time = rows["end"] - rows["start"]
        self.live_time += float((live * time).sum())
        self.seat_time += log.num_seats * float(time.sum())
        self.decode_seat_steps += log.num_seats * int(steps[decoding].sum())
        self.live_seat_steps += int((live * steps)[decoding].sum())
        self.wasted_seat_steps += int((ended * steps).sum())

    def _add_blocks(self, log: Log, used_time: float, stored_time: float, most: int) -> None:
        """Add blocks x s in use, tokens x s stored in them, and a number of blocks in use."""
        self.used_time += share(used_time, log.num_blocks)
        self.reserved_time += used_time * log.block_size
        self.stored_time += stored_time
        self.max_used = max(self.max_used, share(most, log.num_blocks))

    def _add_tokens(self, rows: Rows, steps: npt.NDArray[np.int64]) -> None:
        sequences = rows["decodes"] + rows["wasted"]  # of a leapt row, which has no prefills
        self.prefill_tokens += int((rows["prefill_tokens"] * steps).sum())
        self.decode_tokens += int((rows["decodes"] * steps).sum())
        self.wasted_tokens += int((rows["wasted"] * steps).sum())
        context = rows["context"] * steps + sequences * (steps * (steps - 1) // 2)
        self.context += int(context.sum())

    def _add_copies(self, log: Log) -> None:
        """Add what went between GPU and host."""
        self.offloaded_blocks += log.offloaded
        for key, amount in log.amounts.items():
            self.amounts[key] += amount
        if log.swap_rows:
            self.swapped_out_blocks += int(log.swaps["blocks_out"].sum())
            self.swapped_in_blocks += int(log.swaps["blocks_in"].sum())
        if log.load_rows:
            self.loaded_blocks += int(log.loads["blocks"].sum())
            fresh = log.loads[log.loads["fresh"] == 1]
            self.loaded_tokens += log.block_size * int(fresh["blocks"].sum())
            self.first_tokens += log.block_size * int(fresh["first"].sum())
            self.second_tokens += log.block_size * int(fresh["second"].sum())


def ended_requests(log: Log, rows: Rows) -> npt.NDArray[np.int64]:
    """Count the requests that have ended and keep their seats, in each row that decodes.

    Where a batch still computes prompts nobody can tell, and they count as live.
    """
    keeps = log.seat_rows is not None  # else what is wasted are rejected drafts
    return np.where(keeps & (rows["decodes"] > 0), rows["wasted"], 0).astype(np.int64)


def host_time(log: Log, cost: CostModel) -> float:
    """Add up the s of steps in which the GPU waits for the engine; NaN: nobody can tell."""
    total = log.host_waits
    for rows in _slices(log.steps) if len(log.steps) else [log.steps]:
        decoding = rows["decodes"] > 0
        decodes = rows["decodes"] + ended_requests(log, rows)
        if log.draft_rows:  # there, decodes are tokens
            here, at = find_rows(log.drafts["start"], rows["start"])
            decodes[here] = log.drafts["decodes"][at]
        prompts = rows["prefills"].astype(np.int64)
        padded = rows["prefill_tokens"] + np.where(decoding, 0, rows["wasted"])
        found = cost.host_seconds(prompts, decodes + prompts, padded)
        total += nan if found is None else float((found * rows["steps"]).sum())
    return total


def _slices(rows: Rows) -> Iterator[Rows]:
    for at in range(0, len(rows), SLICE):
        yield rows[at : at + SLICE]


@dataclass(slots=True, eq=False)
class RequestSums:
    """Counts over requests; those of tokens are of prompts."""

    accepted: int = 0
    preemptions: int = 0
    queries: int = 0  # tokens looked up in the prefix caches
    cached: int = 0  # tokens found there, the host tier's included
    rejected: int = 0
    unfinished: int = 0
    never_sent: int = 0
    completed: int = 0
    generated: int = 0  # tokens of the completed ones

    def add(self, table: RequestTable) -> None:
        """Add the requests of a table."""
        scheduled, done = ~np.isnan(table.first_scheduled), table.completed
        self.accepted += int(((table.replica >= 0) & (table.reason != REJECTED)).sum())
        self.preemptions += int(table.preemptions.sum())
        self.queries += int(table.workload.prompt_tokens[scheduled].sum())
        self.cached += int(table.cached.sum())
        self.rejected += int((table.reason == REJECTED).sum())
        self.unfinished += int((table.reason == UNFINISHED).sum())
        self.never_sent += int((table.reason < 0).sum())
        self.completed += int(done.sum())
        self.generated += int(table.generated[done].sum())


class EngineMetrics:
    """What some replicas did, all alike: gauges and utilizations, of parts of a run."""

    SUMS = ("steps", "requests", "_waiting_time", "_flops", "_read", "_max_waiting", "_host_time")

    def __init__(self, spec: EngineSpec, replicas: int, kv_role: str | None = None) -> None:
        self.spec, self.replicas, self.kv_role = spec, replicas, kv_role
        self.steps, self.requests = StepSums(), RequestSums()
        self._waiting_time = self._flops = self._read = 0.0
        self._max_waiting = 0
        self._host_time = 0.0  # s; NaN: nobody can tell

    def add(
        self,
        table: RequestTable,
        logs: Sequence[Log],
        costs: Sequence[CostModel],
        until: Sequence[float],
    ) -> None:
        """Add the table of these logs' requests.

        `costs` is what the steps of each log cost; `until` (s) each log tells who waits.
        """
        sums = StepSums()
        for log in logs:
            sums.add(log)
        depths = [queue_depth(log, end) for log, end in zip(logs, until, strict=True)]
        self._waiting_time += sum(area for area, _ in depths)
        self._max_waiting = max([self._max_waiting, *(most for _, most in depths)])
        add_sums(self.steps, dict(take_sums(sums)))
        self._host_time += sum(map(host_time, logs, costs))
        self.requests.add(table)
        if self.kv_role == "kv_consumer":  # it computes what comes after the prompt's last token
            done = table.completed
            table.cached[done] = table.workload.prompt_tokens[done] - 1
        if self.kv_role != "ec_producer":  # no language model runs there
            self._flops += needed_flops(self.spec.model, table)
            self._read += read_bytes(self.spec, logs, sums.steps, sums.context)

    def gauges(self, duration: float) -> Values:
        """Return the gauges of a run of so many s; means are over time and over replicas."""
        steps, requests, whole = self.steps, self.requests, duration * self.replicas
        mean_running = share(steps.running_time, steps.busy_time)
        efficiency = share(steps.stored_time, steps.reserved_time)
        slots = steps.prefill_tokens + steps.decode_tokens + steps.wasted_tokens
        hits = requests.cached - steps.loaded_tokens
        host = None if isnan(self._host_time) else share(self._host_time, steps.busy_time)
        busy = share(steps.busy_time, whole)
        taken = steps.live_seat_steps + steps.wasted_seat_steps
        return {
            "replicas": self.replicas,
            "steps": steps.steps,
            "gpu_busy_fraction": busy,
            "host_share": host,
            "gpu_busy_without_host": None if host is None else busy * (1.0 - host),
            "mean_running": mean_running,
            "max_running": steps.max_running,
            "batch_occupancy": share(steps.live_time, steps.seat_time),
            "decode_seat_utilization": share(steps.live_seat_steps, steps.decode_seat_steps),
            "wasted_seat_steps": steps.wasted_seat_steps,
            "wasted_seat_share": share(steps.wasted_seat_steps, taken),
            "mean_waiting": share(self._waiting_time, whole),
            "max_waiting": self._max_waiting,
            "kv_cache_usage_mean": share(steps.used_time, steps.busy_time),
            "kv_cache_usage_max": steps.max_used,
            "memory_efficiency": efficiency,
            "internal_fragmentation": 1.0 - efficiency if steps.reserved_time else 0.0,
            "prefill_tokens": steps.prefill_tokens,
            "decode_tokens": steps.decode_tokens,
            "wasted_tokens": steps.wasted_tokens,
            "wasted_share": share(steps.wasted_tokens, slots),
            "preemptions": requests.preemptions,
            "preemption_rate": share(requests.preemptions, requests.accepted),
            "prefix_cache_queries": requests.queries,
            "prefix_cache_hits": hits,
            "prefix_cache_hit_rate": share(hits, requests.queries),
            "rejected": requests.rejected,
            "unfinished": requests.unfinished,
            "never_sent": requests.never_sent,
        }

    def copies(self, swap_time: float) -> Values:
        """Return what went between GPU and host: by swap, and to and from the host tier.

        `swap_time` are the s that swaps took. The host tier is asked for what the GPU's prefix
        cache lacks.
        """
        block_bytes = self.spec.block_bytes * self.spec.engine.tensor_parallel_size  # of all GPUs
        steps, requests = self.steps, self.requests
        swapped = steps.swapped_out_blocks + steps.swapped_in_blocks
        offloading = steps.offloaded_blocks + steps.loaded_blocks
        hits = steps.loaded_tokens
        tiers = self.spec.engine.secondary_tiers
        behind = zip(tiers, (steps.first_tokens, steps.second_tokens), strict=False)
        return {
            "swapped_out_blocks": steps.swapped_out_blocks,
            "swapped_in_blocks": steps.swapped_in_blocks,
            "swapped_bytes": swapped * block_bytes,
            "swap_time": swap_time,
            "external_prefix_cache_hits": hits,
            "external_prefix_cache_hit_rate": share(
                hits, requests.queries - requests.cached + hits
            ),
            **{f"{tier.type}_prefix_cache_hits": tokens for tier, tokens in behind},
            "offloaded_blocks": steps.offloaded_blocks,
            "loaded_blocks": steps.loaded_blocks,
            "offloading_bytes": offloading * block_bytes,
        }

    def utilizations(self, duration: float) -> Values:
        """Return the FLOPs needed and the bytes read as shares of the peaks."""
        gpus = self.spec.engine.gpus_per_rank * self.replicas
        bandwidth = self.spec.gpu.bandwidth
        return {
            "mfu": share(self._flops, peak_flops(self.spec) * gpus * duration),
            "bandwidth_utilization": share(self._read, bandwidth * gpus * duration),
        }

    def energy(self, paid: float) -> Energy | None:
        """Return what the GPUs took in so many s, added up over the engine cores; None: not known.

        While steps run they draw by the FLOPs and the bandwidth that these need on the mean, else
        what they draw idle.
        """
        spec, busy = self.spec, self.steps.busy_time
        if spec.power is None:
            return None
        gpu_seconds = spec.engine.gpus_per_rank * busy
        watts = spec.power.busy(
            share(self._flops, peak_flops(spec) * gpu_seconds),
            share(self._read, spec.gpu.bandwidth * gpu_seconds),
        )
        idle = spec.engine.gpus_per_rank * max(paid - busy, 0.0)
        joules = watts * gpu_seconds + spec.power.idle * idle
        return Energy(joules, joules / JOULES_PER_KWH * spec.carbon_intensity / 1000.0)
