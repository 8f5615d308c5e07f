"""The files that commands wrote, read back: what is wrong is told by its place, as HeadwayError.

Tables come whole, as DataFrames, or row by row where a message must name the line.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, isfinite, isinf, isnan, nan
from os import SEEK_END
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.runs.parts import join_parts
from simulator.cluster.lifecycle import STATES
from simulator.core.log import REASONS
from simulator.util.csv_text import unescape_formula
from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError, one_line
from simulator.util.files import check_regular
from simulator.util.from_mapping import annotation_faults, short_repr
from simulator.util.json_text import parse_json

if TYPE_CHECKING:
    import pandas as pd

WRITES = "`headway run` and `headway compare` write such folders"
COUNTS = ("id", "prompt_tokens", "output_tokens", "preemptions", "cached_tokens")
"""Columns of requests.csv without an empty cell: whole numbers."""
NEVER_EMPTY = ("id", "prompt_tokens", "output_tokens")
WORDS = ("client", "finish_reason", "run")
COMPLETED = ("stop", "length")
"""How requests end that are completed."""
NUMBER = re.compile(
    r"duration|completed|failed|num_prompts|replicas|steps|mfu|preemptions|seed|clients|mean_.*"
    r"|fairness_windows|slo_attainment.*"
    r"|.*_(ms|throughput|tokens|tokens_per_s|requests|fraction|mean|max|min|share|occupancy|hours)"
    r"|.*(hit_rate|utilization|efficiency|fragmentation|imbalance|dollars.*|time|goodput)"
)
"""Keys of summary.json whose values are numbers, or null."""
NEEDED = ("completed", "duration")
COUNT = re.compile(
    r"completed|failed|num_prompts|replicas|(wasted_seat_)?steps|preemptions|clients|rejected"
    r"|fairness_windows|unfinished|never_sent|max_(concurrent_requests|running|waiting)"
    r"|(total_input|total_output|prefill|decode|wasted)_tokens"
)
"""Keys of summary.json whose values are whole numbers of 0 or more, or null."""
DURATIONS = ("duration", "warmup_s", "cooldown_s")
"""Keys of summary.json whose values are numbers of 0 or more."""
TRIMMED = ("warmup_s", "cooldown_s")
COUNTED = {
    "num_prompts": "requests",
    "steps": "steps",
    "clients": "clients",
    "fairness_windows": "windows",
}
"""Keys of summary.json that say how much a table holds."""


def read_yaml(text: str) -> object:
    """Read YAML; raise ValueError where it is none."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError("it is no YAML") from error


def load_mapping(path: Path, parse: Callable[[str], object]) -> Mapping[str, Any]:
    """Read a file that holds one mapping; raise HeadwayError where it is none, or missing."""
    check_regular(path)
    try:
        found = parse(path.read_text("utf-8"))
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file; {WRITES}") from None
    except ValueError as error:
        raise HeadwayError(f"{path}: damaged: {error}") from None
    if not isinstance(found, Mapping):
        raise HeadwayError(f"{path}: damaged: it has no keys")
    return found


def check_numbers(path: Path, values: Mapping[str, Any]) -> None:
    """Raise HeadwayError where one of a file's values is neither null nor a number."""
    for name, value in values.items():
        for fault in annotation_faults(name, float | None, value):
            raise HeadwayError(f"{path}: {name}: {fault.what}")


def load_summary(path: Path) -> Mapping[str, Any]:
    """Read a run's summary.json; HeadwayError where it is none, or what it holds is not in form."""
    folder = path.parent
    if not path.exists() and (folder / "replications.csv").exists():
        raise HeadwayError(
            f"{folder}: is of --replications, which keeps intervals and no run; give a folder that "
            "was written without it"
        )
    summary = load_mapping(path, parse_json)
    for key in ("headway", "completed", "duration"):
        if key not in summary:
            raise HeadwayError(f"{path}: has no key {key}")
    for above, block in _blocks(summary):
        if not isinstance(block, Mapping):
            raise HeadwayError(f"{path}: {above[:-1]}: {short(block)} is not a mapping")
        for key, value in block.items():
            if wrong := _wrong(key, value):
                raise HeadwayError(f"{path}: {above}{key}: {short(value)} {wrong}")
    own = summary["headway"]
    if own.get("replicas") == 0:
        raise HeadwayError(f"{path}: headway.replicas: 0 is not 1 or more")
    if own.get("diagnosis", ()) is None and not find_table(folder, "requests").exists():
        raise HeadwayError(
            f"{folder}: is of --no-tables, which keeps no requests and steps; give a folder that "
            "was written without it, or with --tables-in of the same folder"
        )
    return summary


def _wrong(key: str, value: object) -> str:
    """Say what is wrong with the value of a key of summary.json, if anything; null is unknown."""
    if value is None:
        return "is not a number" if key in NEEDED else ""
    if key in LISTS:
        items, is_item = LISTS[key]
        good = isinstance(value, list) and all(map(is_item, value))
        return "" if good else f"is not a list of {items}"
    if not NUMBER.fullmatch(key) and key not in DURATIONS and not COUNT.fullmatch(key):
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return "is not a number"
    if COUNT.fullmatch(key) and (value < 0 or not isinstance(value, int)):
        return "is not a whole number of 0 or more"
    return "is negative" if key in DURATIONS and value < 0 else ""


def _is_finding(value: object) -> bool:
    """Return whether a value is what a rule of the diagnosis finds."""
    return isinstance(value, Mapping) and all(
        isinstance(value.get(key), str) for key in ("rule", "text", "knob")
    )


def _is_verdict(value: object) -> bool:
    """Return whether a value says whether a service level is kept."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("bound"), str)
        and type(value.get("value")) in (int, float)
        and isinstance(value.get("met"), bool)
    )


LISTS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "diagnosis": ("findings", _is_finding),
    "warnings": ("texts", lambda value: isinstance(value, str)),
    "slo": ("verdicts", _is_verdict),
}
"""Keys of summary.json whose values are lists, or null, and of what."""


def _blocks(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Get the blocks of a summary, each with the dotted key above it; look into mappings alone."""
    yield "", summary
    above, block = "headway.", summary["headway"]
    yield above, block
    for key in ("cluster", "groups"):
        if not isinstance(block, Mapping) or key not in block:
            return
        above, block = f"{above}{key}.", block[key]
        yield above, block
    if isinstance(block, Mapping):
        yield from ((f"{above}{name}.", group) for name, group in block.items())


def short(value: object) -> str:
    """Return a value as JSON has it, not all of it if it is long."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def find_table(folder: Path, name: str) -> Path:
    """Return the path of a table: CSV, else Parquet if that is there, or a folder of its parts."""
    path, other, parts = folder / f"{name}.csv", folder / f"{name}.parquet", folder / name
    found = other if other.exists() and not path.exists() else path
    if not found.exists() and any(parts.glob("part-*.parquet")):
        return parts
    check_regular(found)
    return found


def refuse_unfinished(folder: Path) -> None:
    """Raise HeadwayError for the folder of a plan that was stopped: its table is not there yet."""
    journal = folder / "runs.jsonl"
    if journal.is_file() and not find_table(folder, "plan").is_file():
        count = journal.read_bytes().count(b"\n")
        raise HeadwayError(
            f"{folder}: the plan is unfinished: {count:,} runs are in {journal.name}, and no "
            "answer; the same `headway plan` command goes on from there"
        )


def read_table(folder: Path, name: str, columns: Sequence[str] = ()) -> "pd.DataFrame":
    """Read a table, CSV or Parquet, whose `columns` must be there and hold numbers."""
    import pandas as pd

    path = find_table(folder, name)
    if path.suffix != ".csv":
        need_package(str(path), "parquet", "pyarrow")
    words = dict.fromkeys(WORDS, "category")
    try:
        if path.is_dir():
            frame = join_parts(path, WORDS)
        elif path.suffix == ".parquet":
            frame = pd.read_parquet(path, engine="pyarrow")
        else:
            frame = pd.read_csv(path, dtype=words, keep_default_na=False, na_values=[""])
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file; {WRITES}") from None
    except pd.errors.EmptyDataError:
        raise HeadwayError(f"{path}: damaged: it is empty") from None
    except (OSError, ValueError) as error:  # pandas' ParserError is a ValueError
        raise HeadwayError(f"{path}: damaged: {one_line(error)}") from None
    if path.suffix == ".csv":
        check_end(path)
        frame = unescape_frame(frame)
    check_columns(frame, columns, path)
    return frame if len(frame) else frame.astype(dict.fromkeys(columns, float))


def unescape_frame(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Return a table that was read of a CSV of ours with its texts as they were written."""
    texts = frame.select_dtypes(exclude="number")
    return frame.assign(**{name: texts[name].map(unescape_formula, "ignore") for name in texts})


def check_count(path: Path, count: float, summary: Mapping[str, Any], key: str) -> None:
    """Raise HeadwayError where a table holds more or less than its run's summary.json says.

    A table that was cut at the end of a line is known by nothing else. `key` is one of the
    summary, or below `headway`; one that is null or not there says nothing.
    """
    told = summary.get(key, summary["headway"].get(key))
    if told is not None and told != count:
        raise HeadwayError(
            f"{path}: damaged: it has {count:,g} of the {told:,g} {COUNTED[key]} of summary.json"
        )


def check_completed(path: Path, count: int, summary: Mapping[str, Any]) -> None:
    """Raise HeadwayError where other requests are completed than summary.json says.

    One that leaves out a beginning or an end counts those between alone.
    """
    told = summary["completed"]
    if told != count and not any(summary["headway"].get(key) for key in TRIMMED):
        raise HeadwayError(
            f"{path}: damaged: {count:,} requests are completed in it, and {told:,} by summary.json"
        )


def check_end(path: Path) -> None:
    """Raise HeadwayError where a file of lines does not end with the end of a line."""
    with path.open("rb") as file:
        size = file.seek(0, SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read() != b"\n":
            raise HeadwayError(f"{path}: damaged: it is cut short within its last line")


def check_values(frame: "pd.DataFrame", columns: Sequence[str], where: object) -> None:
    """Raise HeadwayError where a run's numbers are not finite, below 0, or no whole counts.

    Of steps, whose columns have no id, those of the replica are checked where they are there.
    """
    of_steps = "id" not in columns
    if of_steps and "replica" in frame:
        columns = [*columns, "replica"]
    check_columns(frame, columns, where)
    for name in columns:
        values = frame[name]
        if name == "replica" and not of_steps:  # in Parquet -1: never sent
            values = values.where(values != -1)
        is_count = name in COUNTS or (name == "replica" and of_steps)
        wrong = ~(values.isna() | ((values >= 0) & (values < inf)))
        if is_count:
            wrong |= values.isna() | (values % 1 != 0)
        if of_steps:  # which have no empty cells
            wrong |= values.isna()
        if wrong.any():
            row = int(wrong.to_numpy().argmax())
            kind = "whole number" if is_count else "number of 0 or more"
            told = "empty" if values.isna().iloc[row] else f"{values.iloc[row]:g}"
            raise HeadwayError(f"{where}: row {row}: {name}: is {told}, and no {kind}")


def check_rows(frame: "pd.DataFrame", where: object) -> None:
    """Raise HeadwayError unless the rows of requests.csv come by id, and end as requests do."""
    wrong = frame["id"].to_numpy() != np.arange(len(frame))
    if wrong.any():
        row = int(wrong.argmax())
        raise HeadwayError(f"{where}: row {row}: id: is {frame['id'].iloc[row]:g}, not {row}")
    check_ends(frame, where)


def check_ends(frame: "pd.DataFrame", where: object) -> None:
    """Raise HeadwayError unless each request has ended as requests do, or has not."""
    ends = frame["finish_reason"]
    wrong = (ends.notna() & ~ends.isin(REASONS)).to_numpy()
    if wrong.any():
        row = int(wrong.argmax())
        raise HeadwayError(
            f"{where}: row {row}: finish_reason: {ends.iloc[row]!r} is none of {', '.join(REASONS)}"
        )


def check_changes(frame: "pd.DataFrame", where: object) -> None:
    """Raise HeadwayError unless the rows of replicas.csv come by time, each with a state."""
    need_columns(frame, ["state"], where)
    wrong = ~(frame["time"] >= np.fmax(frame["time"].shift(fill_value=0.0), 0.0)).to_numpy()
    wrong |= ~((frame["replica"] >= 0) & (frame["replica"] % 1 == 0)).to_numpy()
    wrong |= ~frame["state"].isin(STATES).to_numpy()
    if wrong.any() or not len(frame):
        row = f"row {int(wrong.argmax())}: is no" if len(frame) else "has no"
        raise HeadwayError(f"{where}: {row} change of a replica's state, in order of time")


def check_columns(frame: "pd.DataFrame", columns: Sequence[str], where: object) -> None:
    """Raise HeadwayError unless the table has these columns, and numbers in them."""
    import pandas as pd

    need_columns(frame, columns, where)
    for name in columns if len(frame) else ():  # without rows there is no telling
        lacking = name in NEVER_EMPTY and frame[name].isna().any()
        if lacking or not pd.api.types.is_numeric_dtype(frame[name]):
            raise HeadwayError(f"{where}: damaged: {name} has what is no number")


def need_columns(frame: "pd.DataFrame", columns: Sequence[str], where: object) -> None:
    """Raise HeadwayError unless the table has these columns."""
    if missing := [name for name in columns if name not in frame]:
        raise HeadwayError(f"{where}: has no column {', '.join(missing)}")


def read_rows(folder: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table, CSV or Parquet, and the place of each.

    Raises HeadwayError where the table is missing or damaged.
    """
    path = find_table(folder, name)
    if path.is_dir():
        raise HeadwayError(f"{path}: is in parts, which report and plot read and this does not")
    if path.suffix == ".parquet":
        from simulator.workload.traces.documents import parquet_rows

        for number, cells in parquet_rows(path):
            yield f"{path}: row {number - 1}", {k: "" if v is None else v for k, v in cells.items()}
        return
    try:
        check_end(path)
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(f"line {reader.line_num} has not as many cells as the first")
                yield f"{path}:{reader.line_num}", {k: unescape_formula(v) for k, v in row.items()}
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file; {WRITES}") from None
    except (ValueError, csv.Error) as error:
        raise HeadwayError(f"{path}: damaged: {error}") from None


def read_cell(place: str, column: str, value: Any) -> float | None:
    """Read a cell; an empty one, or NaN, is None. Raise HeadwayError where it is no number."""
    try:
        number = float(value) if value != "" else nan
        if isnan(number):
            return None
        if isinf(number) or (column in COUNTS and (number < 0 or number % 1)):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        kind = "whole number" if column in COUNTS else "number"
        raise HeadwayError(f"{place}: {column}: {short_repr(value)} is no {kind}") from None
    return number
