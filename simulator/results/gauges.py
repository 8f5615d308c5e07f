"""How full the engine was: batch, queue and KV cache over time, and what became of the work."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.core.log import Log
from simulator.results.tables import (
    REJECTED,
    UNFINISHED,
    RequestTable,
    arrivals,
    block_growth,
    queue_levels,
)

SLICE = 1 << 17  # rows looked at together: bounds the temporaries

Rows = npt.NDArray[np.void]


def share(part: float, whole: float) -> float:
    """Divide, and call a part of nothing 0."""
    return float(part) / float(whole) if whole else 0.0


@dataclass(slots=True)
class StepSums:
    """Sums over the steps of all replicas; a name ending in `_time` is an integral over time."""

    steps: int = 0
    busy_time: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    wasted_tokens: int = 0
    context: int = 0  # KV entries read by decodes
    running_time: float = 0.0
    used_time: float = 0.0  # blocks x s, each replica's as a share of its cache
    stored_time: float = 0.0  # tokens x s that are in the blocks in use
    reserved_time: float = 0.0  # tokens x s that these blocks have room for
    max_running: int = 0
    max_used: float = 0.0  # share of one replica's cache

    def add(self, log: Log, contiguous: bool) -> None:
        """Add one replica's steps."""
        for rows in _slices(log.steps):
            steps = rows["steps"].astype(np.int64)
            later = steps - 1
            time = rows["end"] - rows["start"]
            self.steps += int(steps.sum())
            self.busy_time += float(time.sum())
            self.running_time += float((rows["running"] * time).sum())
            self.max_running = max(self.max_running, int(rows["running"].max()))
            self._add_tokens(rows, steps)
            growth = np.zeros(len(rows)) if contiguous else block_growth(log, rows)
            used = rows["blocks_used"] + growth * (later / 2)
            most = rows["blocks_used"] + growth * later
            used_time = float((np.minimum(used, log.num_blocks) * time).sum())
            stored = rows["kv_tokens"] + rows["decodes"] * (later / 2)
            self.used_time += share(used_time, log.num_blocks)
            self.reserved_time += used_time * log.block_size
            self.stored_time += float((stored * time).sum())
            self.max_used = max(self.max_used, min(share(most.max(), log.num_blocks), 1.0))

    def merge(self, other: "StepSums") -> None:
        """Add the sums of other steps."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            most = name in ("max_running", "max_used")
            setattr(self, name, max(mine, theirs) if most else mine + theirs)

    def _add_tokens(self, rows: Rows, steps: npt.NDArray[np.int64]) -> None:
        seats = rows["decodes"] + rows["wasted"]  # of a leapt row, which has no prefills
        self.prefill_tokens += int((rows["prefill_tokens"] * steps).sum())
        self.decode_tokens += int((rows["decodes"] * steps).sum())
        self.wasted_tokens += int((rows["wasted"] * steps).sum())
        self.context += int((rows["context"] * steps + seats * (steps * (steps - 1) // 2)).sum())

    @property
    def slots(self) -> int:
        """Count the token slots that went through the model, needed or not."""
        return self.prefill_tokens + self.decode_tokens + self.wasted_tokens


def _slices(rows: Rows) -> Iterator[Rows]:
    for at in range(0, len(rows), SLICE):
        yield rows[at : at + SLICE]


def queue_depth(log: Log, end: float) -> tuple[float, int]:
    """Integrate the waiting requests over time up to `end`; give that (in s) and the maximum.

    A row tells how many waited as it was decided; each request that comes before the next row is
    decided adds to it. Only levels that last count for the maximum.
    """
    if not (log.step_rows or log.joined):  # of a large fleet perhaps most
        return 0.0, 0
    starts, waiting = queue_levels(log)
    starts = np.append(starts, end)
    queue = arrivals(log)
    queue = queue[queue <= end]
    after = np.searchsorted(starts, queue, side="left")  # the row that begins next
    wait = starts[after] - queue
    area = float((waiting * np.diff(starts)).sum()) + float(wait.sum())
    joined = np.bincount(after[wait > 0.0], minlength=len(starts))
    most = max(int(joined[0]), int((waiting + joined[1:]).max(initial=0)))
    return area, most


def gauge(
    table: RequestTable,
    logs: Sequence[Log],
    sums: StepSums,
    span: tuple[float, float],
    max_num_seqs: int | None,
) -> dict[str, object]:
    """Give the gauges; means are over time and over replicas, `span` is the run's (s)."""
    depths = [queue_depth(log, span[1]) for log in logs]
    waited = sum(area for area, _ in depths), max((most for _, most in depths), default=0)
    requests = RequestSums()
    requests.add(table, logs)
    return gauges(
        *(sums, requests, waited),
        replicas=len(logs),
        duration=span[1] - span[0],
        max_num_seqs=max_num_seqs,
    )


def gauges(
    sums: StepSums,
    requests: "RequestSums",
    waited: tuple[float, int],
    *,
    replicas: int,
    duration: float,
    max_num_seqs: int | None,
) -> dict[str, object]:
    """Give the gauges by sums; `waited` are waiting requests over time, and their maximum."""
    whole = duration * replicas
    mean_running = share(sums.running_time, sums.busy_time)
    efficiency = share(sums.stored_time, sums.reserved_time)
    return {
        "replicas": replicas,
        "steps": sums.steps,
        "gpu_busy_fraction": share(sums.busy_time, whole),
        "mean_running": mean_running,
        "max_running": sums.max_running,
        "batch_occupancy": mean_running / max_num_seqs if max_num_seqs else None,
        "mean_waiting": share(waited[0], whole),
        "max_waiting": waited[1],
        "kv_cache_usage_mean": share(sums.used_time, sums.busy_time),
        "kv_cache_usage_max": sums.max_used,
        "memory_efficiency": efficiency,
        "internal_fragmentation": 1.0 - efficiency if sums.reserved_time else 0.0,
        "prefill_tokens": sums.prefill_tokens,
        "decode_tokens": sums.decode_tokens,
        "wasted_tokens": sums.wasted_tokens,
        "wasted_share": share(sums.wasted_tokens, sums.slots),
        **requests.gauges(),
    }


def copied(
    logs: Sequence[Log], block_bytes: float | None, seconds: float | None
) -> dict[str, object]:
    """Give what swap moved between GPU and host; bytes are those of all GPUs, None: not known."""
    logs = [log for log in logs if log.swap_rows]
    out, back = (
        sum(int(log.swaps[name].sum()) for log in logs) for name in ("blocks_out", "blocks_in")
    )
    return {
        "swapped_out_blocks": out,
        "swapped_in_blocks": back,
        "swapped_bytes": None if block_bytes is None else (out + back) * block_bytes,
        "swap_time": seconds,
    }


def host_tier(
    table: RequestTable, logs: Sequence[Log], block_bytes: float | None
) -> dict[str, object]:
    """Give the hits of the host tier, at first admissions, and what moved to and from it.

    Its queries are the tokens that the GPU's prefix cache did not have.
    """
    size = logs[0].block_size if logs else 0
    loads = [log.loads for log in logs if log.load_rows]
    hits = size * sum(int(rows["blocks"][rows["fresh"] == 1].sum()) for rows in loads)
    loaded = sum(int(rows["blocks"].sum()) for rows in loads)
    offloaded = sum(log.offloaded for log in logs)
    scheduled = ~np.isnan(table.first_scheduled)
    prompts = int(table.workload.prompt_tokens[scheduled].sum())
    queries = prompts - int(table.cached.sum()) + hits
    return {
        "external_prefix_cache_hits": hits,
        "external_prefix_cache_hit_rate": share(hits, queries),
        "offloaded_blocks": offloaded,
        "loaded_blocks": loaded,
        "offloading_bytes": None if block_bytes is None else (offloaded + loaded) * block_bytes,
    }


@dataclass(slots=True)
class RequestSums:
    """Counts over requests; those of tokens are of prompts."""

    accepted: int = 0
    preemptions: int = 0
    queries: int = 0
    cached: int = 0
    loaded: int = 0  # from the host tier, at first admissions
    rejected: int = 0
    unfinished: int = 0
    never_sent: int = 0

    def add(self, table: RequestTable, logs: Sequence[Log]) -> None:
        """Add a table, and what the logs of its requests say."""
        scheduled = ~np.isnan(table.first_scheduled)
        self.accepted += int(((table.replica >= 0) & (table.reason != REJECTED)).sum())
        self.preemptions += int(table.preemptions.sum())
        self.queries += int(table.workload.prompt_tokens[scheduled].sum())
        self.cached += int(table.cached.sum())
        self.loaded += sum(
            log.block_size * int(log.loads["blocks"][log.loads["fresh"] == 1].sum())
            for log in logs
            if log.load_rows
        )
        self.rejected += int((table.reason == REJECTED).sum())
        self.unfinished += int((table.reason == UNFINISHED).sum())
        self.never_sent += int((table.reason < 0).sum())

    def gauges(self) -> dict[str, object]:
        """Give the gauges that follow from these alone."""
        hits = self.cached - self.loaded
        return {
            "preemptions": self.preemptions,
            "preemption_rate": share(self.preemptions, self.accepted),
            "prefix_cache_queries": self.queries,
            "prefix_cache_hits": hits,
            "prefix_cache_hit_rate": share(hits, self.queries),
            "rejected": self.rejected,
            "unfinished": self.unfinished,
            "never_sent": self.never_sent,
        }
