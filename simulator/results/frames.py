"""The tables of a run as users get them, as columns and as DataFrames.

One row per request (requests.csv), one per logged row of steps (steps.csv), one per client
(clients.csv), one per window of time (fairness.csv), one per change of a replica's state
(replicas.csv).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from simulator.core.engine_config import EngineConfig
from simulator.core.log import REASONS, STOP, Log
from simulator.results.fairness import Clients, client_columns, fairness_columns
from simulator.results.record import ClusterRecord, Record
from simulator.results.request_table import (
    Floats,
    Ints,
    RequestTable,
    Rows,
    client_column,
    find_rows,
    model_column,
    numbered,
)
from simulator.util.csv_text import Column, Numbers, Signed, Words
from simulator.workload.prefixes import MEDIA, prefix_columns

if TYPE_CHECKING:
    import pandas as pd

NO_COLUMNS: Mapping[str, Column] = MappingProxyType({})


def request_frame(record: Record) -> "pd.DataFrame":
    """Return the columns of requests.csv as a DataFrame, a row for each request, by id.

    The models or adapters, the priorities, the `max_tokens`, the predicted output tokens, the seats
    kept beyond the end, the replicas that computed the prompts, and what else it takes to play the
    file again are there only where the run has them.
    """
    return as_frame(next(request_parts(record, len(record.workload))))


def request_parts(record: Record, size: int) -> Iterator[dict[str, Column]]:
    """Yield the same columns, of `size` requests at a time."""
    table, count, hints = record.request_table(), len(record.workload), record.hints
    predicted: dict[str, Column] = {} if hints is None else {"predicted_output_tokens": hints}
    producers: dict[str, Column] = {}
    if record.transfers is not None:
        producers["prefill_replica"] = record.transfers.producer_of(count)
    engines = [spec.engine for spec in record.specs.values()]
    producers |= tier_columns(engines, record.logs, count)
    producers |= _load_columns(table)
    parts = {**record.time_parts(), **seat_columns(record.logs, count)}
    for at in range(0, max(count, 1), max(size, 1)):
        rows = slice(at, min(at + size, count))
        some = [{k: v[rows] for k, v in each.items()} for each in (predicted, parts, producers)]
        here = table if size >= count else table.part(rows)
        ids = np.arange(rows.start, rows.stop)
        yield columns_of(here, ids, predicted=some[0], parts=some[1], producers=some[2])


def columns_of(
    table: RequestTable,
    ids: Ints,
    *,
    predicted: Mapping[str, Column] = NO_COLUMNS,
    parts: Mapping[str, Column] = NO_COLUMNS,
    producers: Mapping[str, Column] = NO_COLUMNS,
) -> dict[str, Column]:
    """Return the columns of requests whose numbers are `ids`; others go in where they belong."""
    workload = table.workload
    declared: dict[str, Column] = {}
    if workload.max_tokens is not None:
        declared["max_tokens"] = np.where(workload.max_tokens > 0, workload.max_tokens, -1)
    models: dict[str, Column] = {}
    if workload.model is not None:
        models["model"] = model_column(workload)
    if workload.prompt is not None:
        models["prompt"] = workload.prompt
    urgent = workload.priority
    priorities: dict[str, Column] = {} if urgent is None else {"priority": Signed(urgent)}
    return {
        "id": ids,
        "client": client_column(workload),
        **models,
        **priorities,
        "arrival": table.arrival,
        "client_queue_time": table.client_queue_time,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": table.generated,
        **declared,
        **predicted,
        "queue_time": table.queue_time,
        "ttft": table.ttft,
        "tpot": table.tpot,
        "e2el": table.e2el,
        **parts,
        "preemptions": table.preemptions.astype(np.int64),
        "cached_tokens": table.cached,
        "replica": table.replica.astype(np.int64),
        **producers,
        "finish_reason": Words(table.reason, REASONS),
    }


def _load_columns(table: RequestTable) -> dict[str, Column]:
    """Return what the load was, beyond what a run shows: of prompts, hang-ups and cut answers.

    With these columns a trace reader finds the same load; an answer that did not end by itself was
    to have `asked_output_tokens`.
    """
    workload, broken = table.workload, table.reason != STOP
    columns: dict[str, Column] = {}
    if broken.any():
        columns["asked_output_tokens"] = np.where(broken, workload.output_tokens, -1)
    if workload.cancel_after is not None:
        columns["cancel_after"] = workload.cancel_after
    outputs = workload.output_tokens.tolist()
    for name, values in prefix_columns(workload.segments or (), outputs).items():
        words = name == MEDIA
        columns[name] = numbered(values) if words else np.array(values, np.int64)
    return columns


def tier_columns(
    engines: Iterable[EngineConfig], logs: Sequence[Log], size: int
) -> dict[str, Column]:
    """Return of each request's `cached_tokens` those that host memory had, and each tier behind.

    The others were in the GPU's prefix cache. Nothing where no engine has a host tier.
    """
    with_host = [engine for engine in engines if engine.kv_offloading_size]
    if not with_host:
        return {}
    behind = next((one.secondary_tiers for one in with_host if one.secondary_tiers), [])
    names = [f"cached_tokens_{name}" for name in ("host", *(tier.type for tier in behind))]
    columns: dict[str, Column] = {name: np.zeros(size, np.int64) for name in names}
    for log in logs:
        loads = log.loads[log.loads["fresh"] == 1]
        parts = loads["blocks"] - loads["first"] - loads["second"], loads["first"], loads["second"]
        for name, blocks in zip(names, parts, strict=False):
            columns[name][loads["id"]] = blocks * log.block_size  # type: ignore[index]
        # Where all of a prompt is there its last token is computed all the same.
        here, host = log.requests["id"], np.asarray(columns[names[0]])
        host[here] = np.minimum(host[here], log.requests["cached"])
    return columns


def seat_columns(logs: Sequence[Log], size: int) -> dict[str, Column]:
    """Return for how long each request's seat was kept beyond its last token, in s and in steps.

    `batch_steps` are those of its batch until the seat was free. NaN and 0: it never was.
    """
    if all(log.seat_rows is None for log in logs):
        return {}
    time, idle, steps = np.full(size, np.nan), np.zeros(size, np.int64), np.zeros(size, np.int64)
    for log in logs:
        seats = log.seats
        time[seats["id"]] = seats["freed"] - seats["end"]
        idle[seats["id"]], steps[seats["id"]] = seats["idle_steps"], seats["steps"]
    return {"seat_idle_time": time, "seat_idle_steps": idle, "batch_steps": steps}


def client_tables(record: Record) -> dict[str, dict[str, Column]]:
    """Return the columns of clients.csv and fairness.csv, by name."""
    clients = Clients.of(record)
    return {"clients": client_columns(clients), "fairness": {**fairness_columns(clients)}}


def replica_columns(cluster: ClusterRecord) -> dict[str, Column]:
    """Return the columns of replicas.csv: a row for each time (s) at which a replica changed."""
    from simulator.cluster.lifecycle import STATES

    names = list(dict.fromkeys(cluster.groups))
    ranks: dict[int, list[int]] = {}
    for replica, server in enumerate(cluster.servers):
        ranks.setdefault(server, []).append(replica)
    rows = [
        (time, replica, names.index(cluster.groups[replica]), STATES.index(state))
        for time, server, state in cluster.changes
        for replica in ranks[server]
    ]
    times, numbers, groups, states = (np.array(column) for column in zip(*rows, strict=True))
    return {
        "time": times,
        "replica": numbers,
        "group": Words(groups, names),
        "state": Words(states, list(STATES)),
    }


def step_frame(record: Record) -> "pd.DataFrame":
    """Return the columns of steps.csv as a DataFrame.

    As in the file, `replica` is there only where there are several.
    """
    import pandas as pd

    frames = []
    for number, (log, seconds) in enumerate(with_copy_seconds(record)):
        columns = step_columns(log, copy_seconds=seconds)
        if len(record.logs) > 1:
            columns = {"replica": np.full(count_rows(columns), number), **columns}
        frames.append(as_frame(columns))
    return pd.concat(frames, ignore_index=True)


def with_copy_seconds(record: Record) -> Iterator[tuple[Log, Floats | None]]:
    """Yield each log with the time of each of its swaps, if there are any, be it in another."""
    if not any(log.swap_rows for log in record.logs):
        yield from ((log, None) for log in record.logs)
        return
    for log, cost in zip(record.logs, record.costs, strict=True):
        yield log, cost.logged_swap_seconds(log.swaps)


def step_columns(
    log: Log, rows: slice = slice(None), copy_seconds: Floats | None = None
) -> dict[str, Numbers]:
    """Return the columns of steps.csv but `replica`: a row for each logged row, in order of time.

    A row stands for `steps` successive steps; `duration` is that of all of them, the token
    counts are those of each, `context` and the blocks are those of the first. The columns of
    `copy_columns` follow.
    """
    part = log.steps[rows]
    return _columns(part, log.num_blocks) | copy_columns(log, part["start"], copy_seconds)


def _columns(rows: Rows, num_blocks: int) -> dict[str, Numbers]:
    used = rows["blocks_used"].astype(np.int64)
    return {
        "start": rows["start"],
        "duration": rows["end"] - rows["start"],
        "steps": rows["steps"],
        "running": rows["running"],
        "waiting": rows["waiting"],
        "prefill_tokens": rows["prefill_tokens"],
        "decode_tokens": rows["decodes"],
        "wasted_tokens": rows["wasted"],
        "context": rows["context"],
        "kv_blocks_used": used,
        "kv_blocks_free": num_blocks - used,
        "preempted": rows["preempted"],
    }


def copy_columns(log: Log, starts: Floats, seconds: Floats | None) -> dict[str, Numbers]:
    """Return the blocks that went to the host and back in steps that start then, and their time.

    `seconds` is the time of each of `log.swaps`; None where nobody in the whole run swaps: then
    there are no columns.
    """
    if seconds is None:
        return {}
    swaps = log.swaps
    moved, at = find_rows(swaps["start"], starts)
    columns: dict[str, Numbers] = {}
    for name, values in (
        ("swapped_out_blocks", swaps["blocks_out"]),
        ("swapped_in_blocks", swaps["blocks_in"]),
        ("swap_time", seconds),
    ):
        columns[name] = np.zeros(len(starts), values.dtype)
        columns[name][moved] = values[at]
    return columns


def as_frame(columns: Mapping[str, Column]) -> "pd.DataFrame":
    """Make a DataFrame of columns."""
    import pandas as pd

    frame: dict[str, object] = {}
    for name, column in columns.items():
        if isinstance(column, Words):
            frame[name] = pd.Categorical.from_codes(column.codes, column.names)
        else:
            frame[name] = column.values if isinstance(column, Signed) else column
    return pd.DataFrame(frame)


def count_rows(columns: Mapping[str, Column]) -> int:
    """Count the rows of columns of one length."""
    return len(next(iter(columns.values())))
