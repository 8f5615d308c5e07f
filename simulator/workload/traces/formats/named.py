"""Requests in columns of well-known names, or of names that are told; Headway's own requests.csv.

CSV, Parquet, a JSON object a line, or one JSON text with a list of objects. Times are seconds
unless the name ends in `_ms`, `_us` or `_ns`; moments may be dates, or seconds or less since 1970.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.traces import fields
from simulator.workload.traces.csv_columns import header, json_keys, json_rows, read_csv
from simulator.workload.traces.documents import (
    Item,
    first_line,
    flat,
    json_objects,
    objects_of,
    parquet_names,
    parquet_rows,
)
from simulator.workload.traces.format import Format, Head, Problems, Table
from simulator.workload.traces.records import Records

ANSWER = "message.id"  # of Claude Code's lines


def read_named(path: Path, form: Format, columns: str | Mapping[str, str] | None = None) -> Table:
    """Read a file by the names of its columns, or by `columns`: see `parse_columns`."""
    sources = None if columns is None else fields.parse_columns(columns)
    named = sources is not None
    if sources and "cached" in sources:  # told, it is where each prompt starts
        sources["warm"] = sources["cached"]
    if sources is not None and "arrival" in fields.lacks(sources):
        text = f"{path}: no column of arrivals is named (arrival=): all requests come at once"
        warnings.warn(text, HeadwayWarning, stacklevel=2)
    number, line = (1, "{") if parquet_names(path) else first_line(path)
    if line[0] not in "{[" and not json_keys(path, header(line)):
        found = _by_names(header(line), f"{path}:{number}", sources)
        return read_csv(path, form, found, named=named)
    problems = Problems(path)
    needed = sources["prompt"].names if sources and "prompt" in sources else ()
    of_csv = line[0] not in "{["
    some = json_rows(path, problems) if of_csv else json_requests(path, problems, needed)
    requests = _once(problems, list(some))
    problems.stop()
    names = list(dict.fromkeys(name for _, row in requests for name in row))
    for source in (sources or {}).values():
        if requests and not any(name in names for name in source.names):
            raise HeadwayError(f"{path}:1: {source.names[0]}: no request has it")
    records = Records(problems, form, _by_names(names, f"{path}:1", sources), named=named)
    for place, row in requests:
        records.add(place, row)
    return records.table()


def _by_names(names: Sequence[str], place: str, told: fields.Sources | None) -> fields.Sources:
    """Find the columns by their names, or lengths alone beside what the user says of others.

    HeadwayError where needed ones are not there.
    """
    sources: fields.Sources = fields.without_length(fields.find_fields(names), ())
    if told is not None:
        sources = {f: sources[f] for f in ("prompt", "output") if f in sources} | dict(told)
    fields.check_needed(sources if told is None else {"arrival", *sources}, place)
    return sources


def json_requests(path: Path, problems: Problems, needed: Sequence[str] = ()) -> Iterator[Item]:
    """Yield the objects of a file, flat, with their lines; one with a key of `needed` is one."""
    if parquet_names(path):
        yield from ((number, flat(row)) for number, row in parquet_rows(path))
        return
    for line, one in json_objects(path, problems, partial(_requests_in, needed=needed)):
        yield from ((line, flat(request)) for request in _in_page(one) or [one])


def _in_page(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the requests in the list of an object that is none itself, one of several pages."""
    for key in list_of_objects(values):
        if _are_of_request((*flat(values[key][0]),)) and not _are_of_request((*flat(values),)):
            return objects_of(values, key)
    return []


@cache
def _are_of_request(names: tuple[str, ...]) -> bool:
    """As `has_requests`, of names that come again and again."""
    return fields.has_requests(names)


def _once(problems: Problems, found: list[Item]) -> list[Item]:
    """Merge the lines of each answer that a client wrote as it streamed: the last one's tokens.

    Claude Code does so, and writes lines of no answer between them.
    """
    if not any(ANSWER in row for _, row in found):
        return found
    answers: dict[object, Item] = {}
    for line, row in found:
        if row.get("message.usage.output_tokens") is not None:
            _, first = answers.setdefault(row[ANSWER], (line, row))
            first |= {name: value for name, value in row.items() if "tokens" in name}
    text = f"{ANSWER}: lines without a new answer are left out"
    problems.notes[text] = len(found) - len(answers)
    return [*answers.values()]


def _requests_in(values: Mapping[str, object], needed: Sequence[str]) -> tuple[str, ...] | None:
    """Return the key of the requests in an object; None: it is one."""
    found, steps = flat(values), list_of_objects(values)
    if not found.keys().isdisjoint(needed) or (not needed and fields.has_requests(found)):
        return None
    return steps if steps or needed else None


def list_of_objects(whole: Mapping[str, object]) -> tuple[str, ...]:
    """Return the key of the first list of objects in a JSON text; nothing if there is none."""
    for key, value in whole.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return (key,)
    return ()


def first_request(head: Head) -> dict[str, object]:
    """Return the first request of a JSON file, flat."""
    found = flat(head.first)
    steps = list_of_objects(head.first)
    if not steps or fields.has_requests(found):
        return found
    nested = head.first[steps[0]]
    assert isinstance(nested, list)
    return flat(nested[0])


def is_known(head: Head) -> bool:
    """Return whether times and lengths are there under names that are known."""
    if {"sessionId", "parentUuid"} <= head.keys:  # Claude Code's
        return True
    return fields.has_requests(head.columns) or fields.has_requests(first_request(head))
