"""Every metric of a run, each defined once, all derived from the log after the run.

Words and definitions are those of `vllm bench serve` (vllm/benchmarks/serve.py), so the summary
has the keys of its result file; what vLLM does not report stands in a block of its own.
"""

from collections.abc import Mapping, Sequence
from math import ceil, inf
from typing import TYPE_CHECKING

import numpy as np

from simulator.core.log import Log
from simulator.costs.cost_model import kv_block_bytes
from simulator.results.client_service import Clients, several_clients, summarize_clients
from simulator.results.gauges import StepSums, copied, gauge, host_tier, share
from simulator.results.itl import GapPool, TokenTimes
from simulator.results.steady_state import Window, steady_state, window
from simulator.results.tables import (
    RETRY,
    TRANSFER_PARTS,
    Flags,
    Floats,
    RequestTable,
    Tries,
    gather_requests,
    run_span,
)
from simulator.results.utilization import Served, utilization
from simulator.util.version import __version__
from simulator.workload.workload import Workload

if TYPE_CHECKING:
    from simulator.results.record import Record

PERCENTILES = (90.0, 95.0, 99.0, 99.9)
SCHEMA = 1  # of the summary's `headway` block; grows when a key changes its meaning

FURTHER = (RETRY, *TRANSFER_PARTS)  # parts of the requests' time that some clusters have
DRAFTED = ("decodes", "drafts", "accepted")  # columns of log.DRAFT

Summary = dict[str, object]


def summarize(
    workload: Workload,
    sent: Floats,
    logs: Sequence[Log],
    *,
    goodput: Mapping[str, float] | None = None,
    served: Served | None = None,
    max_num_seqs: int | None = None,
    contiguous: bool = False,
    kv_block_bytes: float | None = None,
    swap_time: float | None = None,
    percentiles: Sequence[float] = PERCENTILES,
    info: Mapping[str, object] | None = None,
    within: Window | None = None,
    tries: Tries | None = None,
) -> Summary:
    """Give the keys of vLLM bench's result file and our own under `headway`.

    `sent` is the time (s) at which each request was sent, NaN if never; `logs` has one log per
    replica. `goodput` holds upper bounds in ms for any of ttft, tpot and e2el. `served` is needed
    for the utilizations, `max_num_seqs` for the occupancy; without them these are null.
    `contiguous` says that blocks were set aside on admission; `kv_block_bytes` is the size of one
    on all GPUs together, `swap_time` the s that copies of them took. `info` (version, seed,
    scenario, ...) opens our block; `tries` says what a cluster's clients did.
    `within` (s) bounds what is measured: latencies of the requests sent in it, throughput of those
    that ended in it; the gauges stay those of the whole run. Latencies are those of completed
    requests; where there is none they are 0, as in vLLM.
    """
    table = gather_requests(workload, sent, logs, tries)
    completed = table.completed
    sums = StepSums()
    for log in logs:
        sums.add(log, contiguous)
    start, end = run_span(table, logs)
    times = [TokenTimes(log, completed) for log in logs if log.run_rows]
    peaks = _peaks(table, completed, times)
    use: Summary = {"mfu": None, "bandwidth_utilization": None}
    if served is not None:
        use = utilization(served, table, logs, sums, end - start)
    ended, failed, duration = completed, (table.reason >= 0) & ~completed, end - start
    if within is not None:
        ended, failed = completed & _inside(table.finish, within), failed & _inside(sent, within)
        completed, duration = completed & _inside(sent, within), within[1] - within[0]
        times = [TokenTimes(log, completed) for log in logs if log.run_rows]
    return (
        head(workload, served)
        | _throughput(table, ended, int(failed.sum()), duration, goodput)
        | peaks
        | _latencies(table, completed, times, percentiles)
        | _drafted(logs)
        | {
            "headway": {"schema": SCHEMA, **(info or {})}
            | gauge(table, logs, sums, (start, end), max_num_seqs)
            | copied(logs, kv_block_bytes, swap_time)
            | host_tier(table, logs, kv_block_bytes)
            | use
            | steady_state(table, within)
        }
    )


def summarize_result(result: "Record", percentiles: Sequence[float] = PERCENTILES) -> Summary:
    """Give the summary of a run of a scenario."""
    scenario = result.scenario
    engine = scenario.engine
    dtype = engine.quantization or engine.dtype
    kv_cache_dtype = engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    bounds = scenario.goodput.model_dump(exclude_none=True)
    summary = summarize(
        result.workload,
        result.sent,
        result.logs,
        goodput=bounds or None,
        served=Served(result.model, result.gpu, engine.tensor_parallel_size, dtype, kv_cache_dtype),
        max_num_seqs=engine.max_num_seqs,
        contiguous=engine.reserves,
        swap_time=sum(
            (
                float(cost.logged_swap_seconds(log.swaps).sum())
                for log, cost in zip(result.logs, result.costs, strict=True)
                if log.swap_rows
            ),
            0.0,
        ),
        kv_block_bytes=kv_block_bytes(result.model, engine) * engine.tensor_parallel_size,
        percentiles=percentiles,
        within=window(result),
        tries=result.tries,
        info={
            "version": __version__,
            "seed": scenario.seed,
            "scenario": scenario.name,
            "profile": result.parts.cost.name,
            "interrupted": result.interrupted,
            "warnings": [*result.warnings],
            "warmup_s": result.warmup,
            "cooldown_s": result.cooldown,
        },
    )
    own = summary.pop("headway")
    summary |= _further(result, percentiles) | {"headway": own}
    assert isinstance(own, dict)
    if result.cluster is not None:
        from simulator.results.cluster_metrics import cluster_summary

        own |= cluster_summary(result)
    if several_clients(result.workload):
        clients = Clients.of(result)
        own |= summarize_clients(clients, run_span(clients.table, result.logs))
    return summary


def _further(result: "Record", percentiles: Sequence[float]) -> Summary:
    """Describe the parts of the completed requests' time that only some clusters have."""
    cluster = result.scenario.cluster
    if cluster is None or (result.transfers is None and not cluster.tries_again):
        return {}
    within, found, parts = window(result), Summary(), result.time_parts()
    for name in FURTHER:
        if name in parts:
            known = ~np.isnan(parts[name])
            if within is not None:
                known &= _inside(result.sent, within)
            found |= describe(name, parts[name][known], percentiles)
    return found


def head(workload: Workload, served: Served | None) -> Summary:
    """Say what was run. `date` is null: the same seed gives the same bytes."""
    return {
        "date": None,
        "backend": "headway",
        "model_id": None if served is None else served.model.name,
        "num_prompts": len(workload),
        "request_rate": _or_inf(workload.request_rate),
        "burstiness": _or_inf(workload.burstiness),
        "max_concurrency": workload.max_concurrency,
    }


def _or_inf(value: float) -> float | str:
    """Give a setting as JSON can hold it: without limit it is a word, as in vLLM."""
    return "inf" if value == inf else float(value)


def _inside(times: Floats, within: Window) -> Flags:
    return (times >= within[0]) & (times <= within[1])


def _throughput(
    table: RequestTable,
    completed: Flags,
    failed: int,
    duration: float,
    goodput: Mapping[str, float] | None,
) -> Summary:
    done = int(completed.sum())
    total_input = int(table.workload.prompt_tokens[completed].sum())
    total_output = int(table.generated[completed].sum())
    return {
        "duration": duration,
        "completed": done,
        "failed": failed,
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": share(done, duration),
        "request_goodput": share(good(table, completed, goodput), duration) if goodput else None,
        "output_throughput": share(total_output, duration),
        "total_token_throughput": share(total_input + total_output, duration),
    }


def good(table: RequestTable, completed: Flags, goodput: Mapping[str, float]) -> int:
    """Count the completed requests that keep every bound (ms, inclusive)."""
    good = completed.copy()
    for name, bound in goodput.items():
        values: Floats = getattr(table, name)
        if name == "tpot":
            values = np.where(table.generated > 1, values, 0.0)  # a single token keeps any bound
        good &= values <= bound / 1000.0  # NaN: not completed
    return int(good.sum())


def _peaks(table: RequestTable, completed: Flags, times: Sequence[TokenTimes]) -> Summary:
    """Find the fullest one-second bucket of tokens and the most requests at any one time."""
    if not completed.any():
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    sent = np.sort(table.sent[completed])
    finish = np.sort(table.finish[completed])
    seconds = ceil(finish[-1] - sent[0]) + 1
    tokens = np.zeros(seconds, np.int64)
    for time in times:
        tokens += time.per_second(float(sent[0]), seconds)
    here = np.arange(1, len(sent) + 1) - np.searchsorted(finish, sent, side="right")
    return {
        "max_output_tokens_per_s": float(np.max(tokens)),
        "max_concurrent_requests": int(here.max()),
    }


def _latencies(
    table: RequestTable,
    completed: Flags,
    times: Sequence[TokenTimes],
    percentiles: Sequence[float],
) -> Summary:
    """Give mean, median, std and percentiles of each latency, in ms under vLLM's names."""
    several = completed & (table.generated > 1)
    out = describe("ttft", table.ttft[completed], percentiles)
    out |= describe("tpot", table.tpot[several], percentiles)
    pool = GapPool(times)
    quantiles = pool.percentiles([50.0, *percentiles])
    out |= named("itl", pool.mean, pool.std, quantiles, percentiles)
    e2el = table.e2el[completed]
    out |= describe("e2el", e2el, percentiles)
    out |= describe("queue_time", table.queue_time[completed], percentiles)
    if table.workload.max_concurrency is not None:
        waited = table.client_queue_time[completed]
        out |= describe("client_queue_time", waited, percentiles)
        if table.workload.request_rate != inf:
            out |= describe("e2el_including_client_queue", e2el + waited, percentiles)
    return out


def _drafted(logs: Sequence[Log]) -> Summary:
    """Give what speculative decoding brought."""
    logs = [log for log in logs if log.draft_rows]
    return acceptance({name: sum(int(log.drafts[name].sum()) for log in logs) for name in DRAFTED})


def acceptance(sums: Mapping[str, int]) -> Summary:
    """Give the same by the sums of the columns of log.DRAFT, under vLLM's names.

    Nothing where there were no steps with decodes. The rate is in per cent; the length counts the
    token that comes out beside the drafts. As in vLLM, drafts are counted as accepted though they
    lie beyond the end of their request.
    """
    decodes, drafts, accepted = (sums[name] for name in DRAFTED)
    if not decodes:
        return {}
    return {
        "spec_decode_acceptance_rate": 100.0 * share(accepted, drafts),
        "spec_decode_acceptance_length": 1.0 + share(accepted, decodes),
        "spec_decode_num_drafts": decodes,
        "spec_decode_draft_tokens": drafts,
        "spec_decode_accepted_tokens": accepted,
    }


def describe(name: str, values: Floats, percentiles: Sequence[float]) -> Summary:
    if not len(values):
        values = np.zeros(1)
    quantiles = np.percentile(values, [50.0, *percentiles]).tolist()
    return named(name, float(values.mean()), float(values.std()), quantiles, percentiles)


def named(
    name: str, mean: float, std: float, quantiles: Sequence[float], percentiles: Sequence[float]
) -> Summary:
    """Name statistics given in seconds as vLLM does: p99_ttft_ms, p99.9_ttft_ms.

    `quantiles` has the median before those of `percentiles`.
    """
    words = [f"p{int(p) if int(p) == p else p}" for p in percentiles]
    values = dict(zip(["mean", "std", "median", *words], [mean, std, *quantiles], strict=True))
    return {f"{word}_{name}_ms": value * 1000.0 for word, value in values.items()}
