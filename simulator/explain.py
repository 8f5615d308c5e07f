"""One request's story in words, from the files that a run wrote."""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from simulator.breakdown import PARTS
from simulator.errors import HeadwayError
from simulator.tables import TRANSFER_PARTS

ENDINGS = {
    "stop": "It ended by itself.",
    "length": "It was cut at max_model_len.",
    "rejected": "It was rejected: it could never fit.",
    "unfinished": "The run was interrupted before it ended.",
    "shed": "The cluster's admission control refused it.",
    "timeout": "Its client gave up waiting.",
    "": "It was never sent: the run was interrupted before.",
}
WORDS = {
    "queue_time": "waiting in the engine's queue",
    "prefill_time": "prefill",
    "decode_queue_time": "waiting for blocks and a seat where it decodes",
    "transfer_time": "transfer of its KV cache from the replica that prefilled it",
    "decode_alone_time": "decode, as if alone",
    "decode_slowed_time": "decode slowed by others' prompts",
    "preempted_time": "preempted, waiting to be admitted again",
    "recompute_time": "computing again what a preemption lost",
    "swap_time": "copies of KV blocks to the host or back",
}
COLUMNS = (
    *("id", "client", "arrival", "client_queue_time", "prompt_tokens", "output_tokens"),
    *("queue_time", "ttft", "tpot", "e2el", *PARTS),
    *("preemptions", "cached_tokens", "replica", "finish_reason"),
)
APART = (*TRANSFER_PARTS, "prefill_replica")
"""Columns that are there only where prefill and decode are on different replicas."""
TEXTS = ("client", "finish_reason")

Row = dict[str, Any]
"""A request's cells: numbers, None where one is empty, and the words of TEXTS."""


@dataclass(slots=True)
class Around:
    """What the engine did while a request was there."""

    running: int = 0  # as it was sent
    waiting: int = 0
    steps: int = 0
    with_prompts: int = 0
    batch_time: float = 0.0  # requests x s
    time: float = 0.0


def command(
    folder: Annotated[Path, Parameter(name="OUT_DIR", help="folder that `headway run` wrote")],
    request: Annotated[int, Parameter(name="REQUEST_ID", help="id of requests.csv, from 0")],
    /,
) -> int:
    """Tell one request's story in words: where its time went, and why."""
    print(explain(folder, request))
    return 0


def explain(folder: Path, request: int) -> str:
    """Tell the story of request number `request` of the run in `folder`.

    Raises HeadwayError where the folder, a file or the request is missing, or a file damaged.
    """
    if not folder.is_dir():
        raise HeadwayError(f"{folder}: no such folder; `headway run` writes one")
    row = _find(folder, request)
    summary = _load(folder / "summary.json", json.loads)
    scenario = _load(folder / "scenario.yaml", _yaml)
    around = None if row["queue_time"] is None else _look_around(folder, row)
    lines = [_head(row), "", *_events(row, scenario, around)]
    if row["e2el"] is not None:
        lines += ["", *_parts(row), "", *_remarks(row, summary, scenario, around)]
    return "\n".join(lines)


def _yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError("it is no YAML") from error


def _load(path: Path, parse: Any) -> Mapping[str, Any]:
    """Read a file that holds one mapping."""
    try:
        found = parse(path.read_text("utf-8"))
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file; is this a folder of `headway run`?") from None
    except ValueError as error:
        raise HeadwayError(f"{path}: damaged: {error}") from None
    if not isinstance(found, Mapping):
        raise HeadwayError(f"{path}: damaged: it holds no keys")
    return found


def _rows(folder: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table, CSV or Parquet, and the place of each."""
    path = folder / f"{name}.csv"
    if not path.exists() and (other := folder / f"{name}.parquet").exists():
        yield from _parquet_rows(other)
        return
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(f"line {reader.line_num} has not as many cells as the first")
                yield f"{path}:{reader.line_num}", row
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file; is this a folder of `headway run`?") from None
    except (ValueError, csv.Error) as error:
        raise HeadwayError(f"{path}: damaged: {error}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise HeadwayError(f"{path}: needs pyarrow; pip install headway[parquet]") from None
    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        for batch in batches:
            for number, row in enumerate(batch.to_pylist()):
                yield f"{path}: row {number}", {k: "" if v is None else v for k, v in row.items()}
    except (OSError, ValueError) as error:
        raise HeadwayError(f"{path}: damaged: {error}") from None


def _find(folder: Path, request: int) -> Row:
    """Find a request among the rows, which come by id."""
    count = 0
    for place, cells in _rows(folder, "requests"):
        if not count and (missing := [name for name in COLUMNS if name not in cells]):
            raise HeadwayError(f"{place.partition(':')[0]}: has no column {', '.join(missing)}")
        if count == request:
            there = (*COLUMNS, *(name for name in APART if name in cells))
            row = {k: cells[k] if k in TEXTS else _number(place, k, cells[k]) for k in there}
            if row["id"] != request or row["finish_reason"] not in ENDINGS:
                raise HeadwayError(f"{place}: damaged: this is not the row of request {request}")
            return row
        count += 1
    raise HeadwayError(f"{folder}: no request {request}; there are {count:,}, from 0 on")


def _number(place: str, column: str, value: Any) -> float | None:
    """Read a cell; an empty one, or NaN, is None."""
    try:
        number = float(value) if value != "" else nan
    except ValueError:
        raise HeadwayError(f"{place}: {column}: {value!r} is no number") from None
    return None if isnan(number) else number


def _look_around(folder: Path, row: Row) -> Around:
    """Sum up the steps from when a request was sent until it ended."""
    around = Around()
    begin = row["arrival"] + row["client_queue_time"]
    end = begin + (float("inf") if row["e2el"] is None else row["e2el"])
    for place, cells in _rows(folder, "steps"):
        if "replica" in cells and _number(place, "replica", cells["replica"]) != row["replica"]:
            continue
        try:
            start, time = float(cells["start"]), float(cells["duration"])
            steps, prompts = int(cells["steps"]), int(cells["prefill_tokens"])
            running, waiting = int(cells["running"]), int(cells["waiting"])
        except (KeyError, ValueError) as error:
            raise HeadwayError(f"{place}: damaged: {error}") from None
        if start >= end:
            continue
        if start < begin:
            here = begin < start + time
            around.running, around.waiting = (running, waiting) if here else (0, 0)
            continue
        around.steps += steps
        around.with_prompts += steps if prompts else 0
        around.batch_time += running * time
        around.time += time
    return around


def _seconds(value: float) -> str:
    return f"{value:,.3f} s" if value >= 1 else f"{value * 1e3:,.1f} ms"


def _head(row: Row) -> str:
    client = f" of {row['client']}" if row["client"] else ""
    cached = f" ({int(row['cached_tokens']):,} of them in the prefix cache)"
    return (
        f"Request {int(row['id'])}{client}: {int(row['prompt_tokens']):,} prompt tokens"
        f"{cached if row['cached_tokens'] else ''}, {int(row['output_tokens']):,} generated. "
        f"{ENDINGS[row['finish_reason']]}"
    )


def _events(row: Row, scenario: Mapping[str, Any], around: Around | None) -> list[str]:
    """Tell what happened when; what never happened is left out."""
    events: list[tuple[float, str]] = []
    held = row["client_queue_time"]
    if row["arrival"] is None:
        return ["It was never due: the turn before it did not end."]
    if held:
        events.append((row["arrival"], "due; the client holds it back: max_concurrency"))
    if held is None:
        events.append((row["arrival"], "due"))
        return [_event(*event) for event in events]
    sent = row["arrival"] + held
    there = ""
    if around is not None:
        taken = f"{around.running}{_of_seats(scenario)}"
        there = f"; {taken} seats are taken, {around.waiting} requests wait"
    events.append((sent, f"sent to the engine{there}"))
    if row["queue_time"] is not None:
        where = "" if row.get("prefill_replica") is None else f" by {_replica(row, 'prefill_')}"
        events.append((sent + row["queue_time"], f"scheduled for the first time{where}"))
    if row["ttft"] is not None:
        text = f"first token (TTFT {_seconds(row['ttft'])})"
        if row.get("transfer_time") is not None:
            took = _seconds(row["transfer_time"])
            text += f" from {_replica(row)}, where its KV cache came in {took}"
        events.append((sent + row["ttft"], text))
    if row["e2el"] is not None:
        events.append((sent + row["e2el"], f"last token (E2EL {_seconds(row['e2el'])})"))
    return [_event(*event) for event in events]


def _of_seats(scenario: Mapping[str, Any]) -> str:
    """Say of how many seats; nothing where the replicas' groups have different ones."""
    cluster = scenario.get("cluster")
    groups = cluster.get("groups") if isinstance(cluster, Mapping) else None
    kinds = [scenario, *(groups.values() if isinstance(groups, Mapping) else ())]
    engines = [kind.get("engine") for kind in kinds if isinstance(kind, Mapping)]
    seats = {engine.get("max_num_seqs") for engine in engines if isinstance(engine, Mapping)}
    return f" of {seats.pop()}" if len(seats) == 1 else ""


def _replica(row: Row, role: str = "") -> str:
    return f"replica {int(row[f'{role}replica'])}"


def _event(time: float, text: str) -> str:
    return f"{time:14,.3f} s  {text}"


def _parts(row: Row) -> list[str]:
    """Tell where the time went, in order of what happens; nothing of parts that are 0."""
    whole = row["e2el"]
    lines = [f"Where its {_seconds(whole)} went:"]
    for name, words in WORDS.items():
        if row.get(name):
            lines.append(f"{row[name]:14,.3f} s  {row[name] / whole:6.1%}  {words}")
    return lines


def _remarks(
    row: Row, summary: Mapping[str, Any], scenario: Mapping[str, Any], around: Around | None
) -> list[str]:
    """Say what is worth saying about it."""
    most = max(WORDS, key=lambda name: row.get(name) or 0.0)
    share = row[most] / row["e2el"] if row["e2el"] else 0.0
    remarks = [f"The largest part, {share:.0%}, is {WORDS[most]}."]
    if isinstance(median := summary.get("median_e2el_ms"), int | float) and median:
        remarks.append(
            f"The run's median E2EL is {_seconds(median / 1e3)}; "
            f"this request took {row['e2el'] * 1e3 / median:.2f} times that."
        )
    if row["tpot"] is not None:
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
    if around is not None and around.time:
        remarks.append(
            f"From being sent to its end the engine took {around.steps:,} steps, "
            f"{around.with_prompts / around.steps:.0%} of them with prompts, "
            f"with {around.batch_time / around.time:.1f} requests in the batch on average."
        )
    return [*remarks, *_bounds(row, scenario)]


def _bounds(row: Row, scenario: Mapping[str, Any]) -> list[str]:
    """Say which bounds of the goodput it meets; a single token meets any TPOT."""
    bounds = scenario.get("goodput")
    lines = []
    for name, bound in (bounds if isinstance(bounds, Mapping) else {}).items():
        if bound is None or row.get(name) is None:
            continue
        meets = "meets" if row[name] * 1e3 <= bound else "misses"
        lines.append(f"It {meets} goodput.{name} ({bound:g} ms): {row[name] * 1e3:,.1f} ms.")
    return lines
