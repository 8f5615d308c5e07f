"""Requests in columns of well-known names, or of names that are told; Headway's own requests.csv.

CSV, Parquet, a JSON object a line, or one JSON text with a list of objects. Times are seconds
unless the name ends in `_ms`, `_us` or `_ns`; moments may be dates, or seconds or less since 1970.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from simulator.util.errors import TraceError, warn
from simulator.workload.traces import documents, fields
from simulator.workload.traces.csv_columns import header, json_keys, json_rows, read_csv
from simulator.workload.traces.documents import Item, flat
from simulator.workload.traces.format import Format, Head, Problems, Table
from simulator.workload.traces.records import Records

ANSWER = "message.id"  # of Claude Code's lines


def read_named(path: Path, form: Format, columns: str | Mapping[str, str] | None = None) -> Table:
    """Read a file by the names of its columns, or by `columns`: see `parse_columns`."""
    sources = None if columns is None else fields.parse_columns(columns)
    named = sources is not None
    if sources and "cached" in sources:  # told, it is where each prompt starts
        sources["warm"] = sources["cached"]
    told = [name for source in (sources or {}).values() for name in source.names]
    cells = {name.partition(".")[0] for name in told if "." in name}
    number, line = (1, "{") if documents.parquet_names(path) else documents.first_line(path)
    if line[0] not in "{[" and not json_keys(path, header(line), cells):
        found = _by_names(header(line), path, number, sources)
        return read_csv(path, form, found, named=named)
    problems = Problems(path)
    needed = sources["prompt"].names if sources and "prompt" in sources else ()
    of_csv = line[0] not in "{["
    some = json_rows(path, problems) if of_csv else json_requests(path, problems, needed)
    requests = _once(problems, [(line, flat(row, cells) if cells else row) for line, row in some])
    problems.stop()
    names = list(dict.fromkeys(name for _, row in requests for name in row))
    for source in (sources or {}).values():
        if requests and not any(name in names for name in source.names):
            raise TraceError(path, "no request has it", 1, source.names[0])
    records = Records(problems, form, _by_names(names, path, 1, sources), named=named)
    for place, row in requests:
        records.add(place, row)
    return records.table()


def _by_names(
    names: Sequence[str], path: Path, line: int, told: fields.Sources | None
) -> fields.Sources:
    """Find the columns by their names, or what is needed alone beside what the user says of others.

    TraceError where needed ones are not there.
    """
    sources: fields.Sources = fields.without_length(fields.find_fields(names), ())
    if told is not None:
        left = {f: sources[f] for f in fields.lacks(told) if f in sources}
        used = fields.used_as(told)
        sources = {f: one for f, one in left.items() if one.names[0] not in used} | dict(told)
        if "arrival" in fields.lacks(sources):
            what = "no column of arrivals is named (arrival=): all requests come at once"
            warn(f"{path}:{line}: {what}")
    fields.check_needed(sources if told is None else {"arrival", *sources}, path, line)
    return sources


def json_requests(path: Path, problems: Problems, needed: Sequence[str] = ()) -> Iterator[Item]:
    """Yield the objects of a file, flat, with their lines; one with a key of `needed` is one."""
    if documents.parquet_names(path):
        yield from ((number, flat(row)) for number, row in documents.parquet_rows(path))
        return
    for line, one in documents.json_objects(path, problems, partial(_requests_in, needed=needed)):
        yield from ((line, flat(request)) for request in _in_page(one, needed))


def _in_page(values: dict[str, Any], needed: Sequence[str]) -> list[dict[str, Any]]:
    """Return an object, or the requests in its lists where it is none itself, one of several pages.

    pandas writes an object for each column, with the values of all rows, by their index.
    """
    if all(isinstance(one, dict) for one in values.values()) and _is_one(values, needed):
        places = next(iter(values.values()))
        return [{name: one.get(k) for name, one in values.items()} for k in places]
    if _are_all_requests(values, needed):
        return [*values.values()]
    lists = [key for key in lists_of_objects(values) if _is_one(flat(values[key][0]), needed)]
    if not lists or _is_one(flat(values), needed):
        return [values]
    return [one for key in lists for one in documents.objects_of(values, key)]


def _is_one(values: Mapping[str, object], needed: Sequence[str]) -> bool:
    """Return whether an object is a request: by a key of `needed`, or by its names."""
    return not values.keys().isdisjoint(needed) if needed else _are_of_request((*values,))


_are_of_request = cache(fields.has_requests)  # of names that come again and again


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


def _requests_in(values: Mapping[str, Any], needed: Sequence[str]) -> list[str] | None:
    """Return the keys of the requests in an object, or of lists of these; None: it is one.

    The totals of a report, beside its requests, look like one.
    """
    lists = lists_of_objects(values)
    if several := [key for key in lists if _is_one(flat(values[key][0]), needed)]:
        return several
    if _are_all_requests(values, needed):
        return [*values]
    if several := [key for key, one in values.items() if _are_all_requests(one, needed)]:
        return several
    return None if _is_one(flat(values), needed) else lists[:1] or ([] if needed else None)


def _are_all_requests(whole: object, needed: Sequence[str]) -> bool:
    """Return whether a value is an object of requests, as one under each request's name."""
    ones = [*whole.values()] if isinstance(whole, dict) else []
    return bool(ones) and all(isinstance(one, dict) and _is_one(flat(one), needed) for one in ones)


def lists_of_objects(whole: Mapping[str, object]) -> list[str]:
    """Return the keys of the lists of objects in a JSON text."""
    lists = {key: one for key, one in whole.items() if isinstance(one, list) and one}
    return [key for key, one in lists.items() if isinstance(one[0], dict)]


def first_request(head: Head) -> dict[str, object]:
    """Return the first request of a JSON file, flat."""
    keys = _requests_in(head.first, ())
    if not keys:
        return flat(head.first)
    nested: Any = head.first[keys[0]]
    return first_request(Head(first=nested[0] if isinstance(nested, list) else nested))


def is_known(head: Head) -> bool:
    """Return whether times and lengths are there under names that are known."""
    if {"sessionId", "parentUuid"} <= head.keys or "leafUuid" in head.keys:  # Claude Code's
        return True
    return fields.has_requests(head.columns) or fields.has_requests(first_request(head))
