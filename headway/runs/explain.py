"""One request's story in words, from the files that a run wrote."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.runs.read import (
    COMPLETED,
    COUNTS,
    check_completed,
    check_count,
    check_numbers,
    find_table,
    load_mapping,
    load_summary,
    read_cell,
    read_rows,
    read_yaml,
)
from simulator.results.breakdown import PARTS
from simulator.results.request_table import DELIVERY, ENCODER_PARTS, RETRY, TRANSFER_PARTS
from simulator.util.errors import HeadwayError, printable

ENDINGS = {
    "stop": "It ended by itself.",
    "length": "It was cut at its max_tokens or at max_model_len.",
    "rejected": "It was rejected: it could never fit, or a limit of the queue (503) kept it out.",
    "unfinished": "The run was interrupted before it ended.",
    "shed": "The cluster's admission control refused it.",
    "timeout": "Its client gave up waiting.",
    "": "It was never sent: the run was interrupted before.",
}
WORDS = {
    RETRY: "tries that were refused, given up or lost with a replica",
    "encoder_time": "encoding of its images at other replicas, and waiting for it",
    "ec_transfer_time": "transfer of what the encoders made of them",
    "queue_time": "waiting in the engine's queue",
    "prefill_time": "prefill",
    "decode_queue_time": "waiting for blocks and a seat where it decodes",
    "transfer_time": "transfer of its KV cache from the replica that prefilled it",
    "decode_alone_time": "decode, as if alone",
    "decode_slowed_time": "decode slowed by others' prompts",
    "preempted_time": "preempted, waiting to be admitted again",
    "recompute_time": "computing again what a preemption lost",
    "swap_time": "copies of KV blocks to the host or back",
    DELIVERY: "waiting for the longest answer of its batch: all are delivered together",
}
COLUMNS = (
    "id",
    "client",
    "arrival",
    "client_queue_time",
    "prompt_tokens",
    "output_tokens",
    "queue_time",
    "ttft",
    "tpot",
    "e2el",
    *PARTS,
    "preemptions",
    "cached_tokens",
    "replica",
    "finish_reason",
)
KINDS = ("client", "priority", "model")
"""Of requests, that may have bounds of their own."""
SEAT_COLUMNS = ("seat_idle_time", "seat_idle_steps", "batch_steps")
OPTIONAL_COLUMNS = (
    *ENCODER_PARTS,
    RETRY,
    *TRANSFER_PARTS,
    "prefill_replica",
    DELIVERY,
    *SEAT_COLUMNS,
    *KINDS[1:],
)
"""Columns that are there only in clusters that try again, or prefill and decode apart, and where
requests keep their seats beyond their end."""
TIMES = ("ttft", "tpot", "e2el")
TEXTS = (*KINDS, "finish_reason")
MEDIAN = "median_e2el_ms"
STEPS = ("start", "duration", "steps", "prefill_tokens", "running", "waiting")

Row = dict[str, Any]
"""A request's cells: numbers, None where one is empty, and the words of TEXTS."""


@dataclass(slots=True)
class EngineActivity:
    """What the engine did while a request was there."""

    running: int = 0  # as it was sent
    waiting: int = 0
    steps: int = 0
    with_prompts: int = 0
    batch_time: float = 0.0  # requests x s
    time: float = 0.0


def explain(folder: Path, request: int) -> str:
    """Tell the story of request number `request` of the run in `folder`.

    Raises HeadwayError where the folder, a file or the request is missing, or a file damaged.
    """
    if not folder.is_dir():
        raise HeadwayError(f"{folder}: no such folder; `headway run` writes one")
    summary = load_summary(folder / "summary.json")
    row = _find(folder, request, summary)
    scenario = load_mapping(folder / "scenario.yaml", read_yaml)
    check_numbers(folder / "scenario.yaml", _goodput(scenario, row))
    activity = None if row["queue_time"] is None else _engine_activity(folder, row, summary)
    lines = [_head(row), "", *_events(row, scenario, activity)]
    if row["e2el"] is not None:
        lines += ["", *_parts(row), "", *_remarks(row, summary, activity)]
        lines += _goodput_remarks(row, scenario)
    return "\n".join(lines)


def _find(folder: Path, request: int, summary: Mapping[str, Any]) -> Row:
    """Find a request among the rows, which come by id; all are counted."""
    count, completed, found = 0, 0, None
    for place, cells in read_rows(folder, "requests"):
        if not count and (missing := [name for name in COLUMNS if name not in cells]):
            raise HeadwayError(f"{place.partition(':')[0]}: has no column {', '.join(missing)}")
        if count == request:
            there = (*COLUMNS, *(name for name in OPTIONAL_COLUMNS if name in cells))
            row = {k: cells[k] if k in TEXTS else read_cell(place, k, cells[k]) for k in there}
            if row["id"] != request or row["finish_reason"] not in ENDINGS:
                raise HeadwayError(f"{place}: damaged: this is not the row of request {request}")
            _check(place, row)
            found = row
        count += 1
        completed += cells["finish_reason"] in COMPLETED
    check_count(find_table(folder, "requests"), count, summary, "num_prompts")
    check_completed(find_table(folder, "requests"), completed, summary)
    if found is not None:
        return found
    raise HeadwayError(f"{folder}: no request {request}; there are {count:,}, from 0 on")


def _check(place: str, row: Row) -> None:
    """Raise HeadwayError where a cell is empty that cannot be so in such a row."""
    needed = [*COUNTS]
    if row["finish_reason"] in COMPLETED or row["e2el"] is not None:
        needed += ["arrival", "client_queue_time", "queue_time", "ttft", "e2el", *PARTS]
        needed += ["tpot"] if (row["output_tokens"] or 0) > 1 else []
        needed += [] if "prefill_replica" in row else ["replica"]
    elif row["queue_time"] is not None or row["ttft"] is not None:
        needed += ["arrival", "client_queue_time"]
    if row.get("transfer_time") is not None:
        needed.append("replica")
    for name in needed:
        if row[name] is None:
            raise HeadwayError(f"{place}: {name}: is empty")


def _engine_activity(folder: Path, row: Row, summary: Mapping[str, Any]) -> EngineActivity:
    """Sum up the steps from when a request was sent until it ended."""
    activity, count = EngineActivity(), 0.0
    begin = row["arrival"] + row["client_queue_time"] + (row.get(RETRY) or 0.0)
    end = float("inf")
    if row["e2el"] is not None:
        end = begin - (row.get(RETRY) or 0.0) + row["e2el"]
    for place, cells in read_rows(folder, "steps"):
        count += _number(place, cells, "steps")
        if "replica" in cells and read_cell(place, "replica", cells["replica"]) != row["replica"]:
            continue
        start, time, *counts = (_number(place, cells, name) for name in STEPS)
        steps, prompts, running, waiting = map(int, counts)
        if start >= end:
            continue
        if start < begin:
            here = begin < start + time
            activity.running, activity.waiting = (running, waiting) if here else (0, 0)
            continue
        activity.steps += steps
        activity.with_prompts += steps if prompts else 0
        activity.batch_time += running * time
        activity.time += time
    check_count(find_table(folder, "steps"), count, summary, "steps")
    return activity


def _number(place: str, cells: Mapping[str, Any], name: str) -> float:
    """Read a cell that must be there."""
    number = read_cell(place, name, cells.get(name, ""))
    if number is None:
        what = "is empty" if name in cells else "there is no such column"
        raise HeadwayError(f"{place}: {name}: {what}")
    return number


def _seconds(value: float) -> str:
    return f"{value:,.3f} s" if value >= 1 else f"{value * 1e3:,.1f} ms"


def _head(row: Row) -> str:
    client = f" of {printable(row['client'])}" if row["client"] else ""
    cached = f" ({int(row['cached_tokens']):,} of them cached)"
    return (
        f"Request {int(row['id'])}{client}: {int(row['prompt_tokens']):,} prompt tokens"
        f"{cached if row['cached_tokens'] else ''}, {int(row['output_tokens']):,} generated. "
        f"{ENDINGS[row['finish_reason']]}"
    )


def _events(row: Row, scenario: Mapping[str, Any], activity: EngineActivity | None) -> list[str]:
    """Describe what happened when; what never happened is left out."""
    arrival, held = row["arrival"], row["client_queue_time"]
    if arrival is None:
        return ["It was never due: the turn before it did not end."]
    if held is None:
        return [_event(arrival, "due")]
    events = [(arrival, "due; the client keeps it back: max_concurrency")] if held else []
    sent = arrival + held
    there = ""
    if activity is not None:
        taken = f"{activity.running}{_batch_limit(scenario)}"
        there = f"; {taken} seats are taken, {activity.waiting} requests wait"
    if again := row.get(RETRY):
        events.append((sent, "sent for the first time"))
    last = sent + (again or 0.0)
    if row.get("encoder_time"):
        events.append((last, "its images sent to the encoders"))
        last += row["encoder_time"] + row["ec_transfer_time"]
    events.append((last, f"sent to the engine{there}"))
    if row["queue_time"] is not None:
        where = "" if row.get("prefill_replica") is None else f" by {_replica(row, 'prefill_')}"
        events.append((last + row["queue_time"], f"scheduled for the first time{where}"))
    if row["ttft"] is not None:
        text = f"first token (TTFT {_seconds(row['ttft'])})"
        if row.get("transfer_time") is not None:
            took = _seconds(row["transfer_time"])
            text += f" from {_replica(row)}, where its KV cache came in {took}"
        events.append((sent + row["ttft"], text))
    if row["e2el"] is not None:
        events.append((sent + row["e2el"], f"last token (E2EL {_seconds(row['e2el'])})"))
    return [_event(*event) for event in events]


def _batch_limit(scenario: Mapping[str, Any]) -> str:
    """Say of how many seats; nothing where the replicas' groups have different ones."""
    cluster = scenario.get("cluster")
    groups = cluster.get("groups") if isinstance(cluster, Mapping) else None
    kinds = [scenario, *(groups.values() if isinstance(groups, Mapping) else ())]
    engines = [kind.get("engine") for kind in kinds if isinstance(kind, Mapping)]
    seats = {str(engine.get("max_num_seqs")) for engine in engines if isinstance(engine, Mapping)}
    return f" of {seats.pop()}" if len(seats) == 1 else ""


def _replica(row: Row, role: str = "") -> str:
    return f"replica {int(row[f'{role}replica'])}"


def _event(time: float, text: str) -> str:
    return f"{time:14,.3f} s  {text}"


def _parts(row: Row) -> list[str]:
    """Describe where the time went, in order of what happens; nothing of parts that are 0."""
    whole = row["e2el"]
    lines = [f"Where its {_seconds(whole)} went:"]
    for name, words in WORDS.items():
        if row.get(name):
            share = row[name] / whole if whole else 0.0
            lines.append(f"{row[name]:14,.3f} s  {share:6.1%}  {words}")
    return lines


def _remarks(row: Row, summary: Mapping[str, Any], activity: EngineActivity | None) -> list[str]:
    """Say what is worth saying about it."""
    most = max(WORDS, key=lambda name: row.get(name) or 0.0)
    share = row[most] / row["e2el"] if row["e2el"] else 0.0
    remarks = [f"The largest part, {share:.1%}, is {WORDS[most]}."]
    if median := summary.get(MEDIAN):
        remarks.append(
            f"The run's median E2EL is {_seconds(median / 1e3)}; "
            f"this request took {row['e2el'] * 1e3 / median:.2f} times that."
        )
    if row["tpot"] is not None and row["output_tokens"] > 1 and row.get(DELIVERY) is None:
        tokens = row["output_tokens"] - 1
        less = row["decode_alone_time"] / tokens
        remarks.append(
            f"Each token after the first took {row['tpot'] * 1e3:.2f} ms on average; "
            f"decoding as if alone, {less * 1e3:.2f} ms."
        )
    if row["preemptions"]:
        times = "once" if row["preemptions"] == 1 else f"{int(row['preemptions'])} times"
        remarks.append(
            f"It was preempted {times}: {_seconds(row['preempted_time'])} until it was admitted "
            f"again, {_seconds(row['recompute_time'])} to compute again what was lost."
        )
    if activity is not None and activity.steps and activity.time:
        remarks.append(
            f"From being sent to its end the engine took {activity.steps:,} steps, "
            f"{activity.with_prompts / activity.steps:.0%} of them with prompts, "
            f"with {activity.batch_time / activity.time:.1f} requests in the batch on average."
        )
    if row.get("batch_steps") and row.get("seat_idle_time") is not None:
        idle, steps = int(row["seat_idle_steps"]), int(row["batch_steps"])
        share = f"{100 * idle / steps:.3g}%, {_seconds(row['seat_idle_time'])}"
        if idle:  # the longest of its batch leaves at once
            remarks.append(
                f"Its seat was idle for {idle:,} of the {steps:,} steps of its batch ({share}): it "
                "was kept until the longest answer had ended."
            )
    return remarks


def _goodput_remarks(row: Row, scenario: Mapping[str, Any]) -> list[str]:
    """Say which bounds of the goodput it meets; a single token meets any TPOT."""
    lines = []
    for key, bound in _goodput(scenario, row).items():
        time = row[key.rpartition(".")[2]]
        if bound is None or time is None:
            continue
        meets = "meets" if time * 1e3 <= bound else "misses"
        lines.append(f"It {meets} {key} ({bound:g} ms): {time * 1e3:,.1f} ms.")
    return lines


def _goodput(scenario: Mapping[str, Any], row: Row) -> dict[str, Any]:
    """Return the bounds on a request's times, by the scenario's keys; of its class, if it has."""
    block, key = scenario.get("goodput"), "goodput"
    of = {f"{kind} {row.get(kind)}" for kind in KINDS}
    items = {**block} if isinstance(block, Mapping) else {}
    if (own := next((name for name in items if name in of), "")) and isinstance(items[own], dict):
        items, key = items[own], f"goodput.{own}"
    return {f"{key}.{name}": bound for name, bound in items.items() if name in TIMES}
