"""Requests as their servers log them: spans of OpenTelemetry and of Langfuse, access logs."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, compress
from pathlib import Path
from typing import Any

from simulator.util.errors import TraceError
from simulator.workload.traces import fields
from simulator.workload.traces.documents import flat, json_objects, lines, objects_of
from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.formats import FORMATS
from simulator.workload.traces.formats.tables import Found
from simulator.workload.traces.outcomes import NO_GENERATION
from simulator.workload.traces.records import Records
from simulator.workload.traces.values import is_plain

LANGFUSE = "langfuse.observation."
FIRST = f"{LANGFUSE}completion_start_time"
"""The attribute in which Langfuse's SDK writes a date as JSON, in quotes."""
OUTCOMES = ("status.code", "status.status_code", "level", f"{LANGFUSE}level")
IDS = ("spanId", "context.span_id", "id")
PARENTS = ("parentSpanId", "parent_id", "parentObservationId")
TRACES = ("traceId", "context.trace_id")
UNEQUAL = "enclosing spans whose tokens are not the sum of what they enclose, left out all the same"
KINDS, MODELS, CALL = (
    fields.NAMES[f"spans' {what}"].split() for what in ("kinds", "models", "calls")
)


def spans(path: Path, problems: Problems) -> Iterator[Found]:
    """Yield the spans that tell their tokens; one that others with tokens lie in is their sum."""
    columns, notes = FORMATS["otel"].columns, problems.notes
    every = [*_all_spans(path, problems)]
    found = [*{_key(span) or k: (line, span) for k, (line, span) in enumerate(every)}.values()]
    notes["spanId: spans that come again left out"] = len(every) - len(found)
    told = [
        all(any(span.get(name) is not None for name in columns[f].names) for f in fields.NEEDED)
        for _, span in found
    ]
    if found and not any(told) and not problems.count:
        field = "gen_ai.usage.input_tokens"
        raise TraceError(path, "no span tells its tokens", found[0][0], field)
    parents = {_first(span, IDS): _first(span, PARENTS) for _, span in found}
    above = [(span, _enclosing(span, parents)) for _, span in compress(found, told)]
    sums = {*chain.from_iterable(names for _, names in above)}
    within: Counter[object] = Counter()  # tokens of the spans that an enclosing one has in it
    for span, names in above:
        if _first(span, IDS) not in sums:
            within.update(dict.fromkeys(names, _tokens(span)))
    for (line, span), tells in zip(found, told, strict=True):
        if (name := _first(span, IDS)) in sums:
            notes["enclosing spans left out, each taken as the sum of its children"] += tells
            notes[UNEQUAL] += tells and _tokens(span) not in (0, within[name])
        elif tells:
            yield line, span
        else:
            called = _is_call(span)
            notes["requests left out, which have no token counts"] += called
            counted = not called and _first(span, FORMATS["otel"].columns["prompt"].names)
            notes["spans left out, no calls to generate text"] += bool(counted)


def _enclosing(span: Mapping[str, Any], parents: Mapping[object, object]) -> dict[object, None]:
    """Return the names of the spans that one lies in."""
    found: dict[object, None] = {}
    name = _first(span, PARENTS)
    while name is not None and name not in found:
        found[name] = None
        name = parents.get(name)
    return found


def _tokens(span: Mapping[str, Any]) -> int:
    """Return a span's tokens, in and out; what is no number is told where it is read."""
    columns = FORMATS["otel"].columns
    told = [_first(span, columns[field].names) for field in ("prompt", "output")]
    return sum(int(float(str(one))) for one in told if is_plain(one, whole=True))


def _key(span: Mapping[str, Any]) -> object:
    """Return what names a span among all; None: nothing does."""
    name = _first(span, IDS)
    return name and (_first(span, TRACES), name)


def _is_call(span: Mapping[str, Any]) -> bool:
    """Return whether a span is a call to generate text, by its kind, else by what it names."""
    kinds = [str(span[name]).lower() for name in KINDS if span.get(name)]
    if kinds:
        good, bad = "|".join(CALL), NO_GENERATION
        return any(re.search(good, one) and not re.search(bad, one) for one in kinds)
    return any(span.get(name) for name in MODELS)


def _first(span: Mapping[str, Any], names: tuple[str, ...]) -> object:
    return next((span[name] for name in names if span.get(name)), None)


def _all_spans(path: Path, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the spans of a file, flat: OTLP's JSON, those of an SDK's console, or Langfuse's."""
    for line, value in json_objects(path, problems, _spans_of_page):
        groups = objects_of(value, "resourceSpans")
        scopes = (scope for group in groups for scope in objects_of(group, "scopeSpans"))
        found = [span for scope in scopes for span in objects_of(scope, "spans")]
        if not isinstance(value.get("resourceSpans"), list):  # a span, or a page in a list of them
            found = objects_of(value, "data") if isinstance(value.get("data"), list) else [value]
        yield from ((line, _flat_span(span)) for span in found)


def _flat_span(span: Mapping[str, Any]) -> dict[str, Any]:
    """Bring attributes up to the span's own fields, and say whether it failed."""
    attributes = span.get("attributes")
    if isinstance(attributes, list):  # OTLP: {"key": .., "value": {"intValue": "12"}}
        attributes = {
            one.get("key"): _unwrapped(one["value"])
            for one in attributes
            if isinstance(one, dict) and isinstance(one.get("value"), dict)
        }
    found = flat({key: value for key, value in span.items() if key != "attributes"})
    found |= flat(attributes) if isinstance(attributes, dict) else {}
    if isinstance(first := found.get(FIRST), str):
        found[FIRST] = first.strip('"')
    if any(found.get(name) in (2, "STATUS_CODE_ERROR", "ERROR") for name in OUTCOMES):
        found["failed"] = "error"
    return found


def _unwrapped(value: Mapping[str, Any]) -> object:
    """Return a value of OTLP's, or those of a list."""
    if isinstance(several := value.get("arrayValue"), dict):
        return [*map(_unwrapped, objects_of(several, "values"))]
    return next(iter(value.values()), None)


def _spans_of_page(value: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the key of the spans in a page of Langfuse's; None: it is none."""
    return ("data",) if isinstance(value.get("data"), list) else None


DATE, ASKED, PAIR = (fields.PATTERNS[name] for name in ("date", "asked", "pair"))


def read_access_log(path: Path, form: Format) -> Table:
    """Read lines with a date and `name=value`; those without counts of tokens are left out.

    Where there is nginx's `request_time`, the date is when the answer had been sent, and the
    request came so much earlier; else it is when the request came.
    """
    problems = Problems(path)
    found = []
    names: dict[str, None] = {}
    for number, line in lines(path):
        date = DATE.search(line)
        told = PAIR.findall(DATE.sub("", line))
        pairs = {name: value.strip("\"'") for name, value in told if value != "None"}
        if "'finish_reason': {" in line:  # SGLang's: {'type': 'stop', ..}
            pairs["finish_reason"] = pairs.pop("type", "")
        if {"prompt", "output"} <= fields.find_fields(pairs).keys():
            if asked := ASKED.search(line):
                pairs |= zip(("path", "status_code", "error"), asked.groups(""), strict=True)
            if date is None:
                problems.add(number, "date", "missing")
                continue
            pairs["date"] = _arrival(date[0], pairs, number, problems)
            found.append((number, pairs))
            names |= dict.fromkeys(pairs)
    problems.stop()
    if not found:
        what = "no line tells its tokens, as prompt_tokens=812 completion_tokens=64; a CSV begins "
        what += "with its columns' names, in a line of their own"
        raise TraceError(path, what, 1, "prompt_tokens")
    sources = fields.find_fields(names) | {"arrival": fields.source("date", unit="us")}
    if "request_time" in names:
        sources["e2el"] = fields.source("request_time")
    for name in ("success", "turn"):
        sources.pop(name, None)
    records = Records(problems, form, sources)
    for number, pairs in found:
        records.add(number, pairs)
    return records.table()


def _arrival(date: str, pairs: Mapping[str, str], number: int, problems: Problems) -> Any:
    """Return when a request came, us since 1970."""
    try:
        took = float(pairs.get("request_time", pairs.get("e2e_latency", 0)))
        return fields.parse_date(date.replace(",", ".")) - round(took * 1e6)
    except (ValueError, OverflowError):
        problems.add(number, "date", f"{date!r}, or request_time, cannot be read")
        return None
