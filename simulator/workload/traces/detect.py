"""Which format a trace has, by how it begins."""

import re
from collections.abc import Iterable
from pathlib import Path

from simulator.util.errors import TraceError
from simulator.workload.traces import documents, fields
from simulator.workload.traces.csv_columns import header, json_keys
from simulator.workload.traces.format import Head
from simulator.workload.traces.formats import FORMATS, NO_REQUESTS, missing_trace
from simulator.workload.traces.formats.named import first_request


def detect_format(path: Path, option: str = "--columns ") -> str:
    """Tell the format of a trace by how it begins.

    A `timed_trace` of others cannot be told from `mooncake` and is called that. Raises TraceError
    if it is no known format: with the mapping of columns that may be meant, as `option` takes it.
    """
    if not path.exists():
        raise missing_trace(path)
    packed = documents.parquet_names(path)
    number, line = (1, "") if packed else documents.first_line(path)
    head = Head(columns=(*packed, *json_keys(path, packed))) if packed else _head(path, line)
    for form in (FORMATS["requests"],) if packed else FORMATS.values():
        if form.detect(head):
            return form.name
    begins = " ".join((*head.first, line[:5000]))
    for pattern, what in NO_REQUESTS.items():
        if re.search(pattern, begins):
            raise TraceError(path, what, number, "format")
    names = head.columns or [name for name in first_request(head) if "." not in name]
    for file in (path, Path(path.name)):  # the whole path where there is room for it
        if meant := _proposal(names, option, f"{file}:{number}: format: "):
            raise TraceError(file, meant, number, "format")
    if not fields.find_fields(names).keys().isdisjoint(fields.NEEDED):
        fields.check_needed(fields.find_fields(names), path, number)
    begins = f"{', '.join(packed)[:60]!r} are the columns of" if packed else f"{line[:60]!r} begins"
    known = ", ".join(FORMATS) + f"; or name columns, as {option}arrival=t,prompt=n,output=m"
    raise TraceError(path, f"{begins} no known format. Known are: {known}", number, "format")


def _proposal(names: Iterable[str], option: str, place: str) -> str:
    """Say which `columns` to try, in LONGEST characters at most with the place; "" for none."""
    for told in ("", " (no column of arrivals: all would come at once)"):
        begins = f"not known{told}; try "
        room = fields.LONGEST - len("headway: error: ") - len(place) - len(begins)
        meant = fields.propose(names, option, room)
        if meant and (told or "arrival=" in meant):
            return begins + meant
    return ""


def _head(path: Path, line: str) -> Head:
    """Read how a file begins: its header or its first object, be it one of many lines or not."""
    if line[0] not in "{[":
        names = header(line)
        return Head(columns=(*names, *json_keys(path, names)), line=line)
    first = documents.first_value(path, line)
    if first is None:
        if fields.PATTERNS["date"].search(line) and not line.startswith("[{"):
            return Head(line=line)  # a log's line in brackets
        next(documents.json_values(path, documents.read_text(path)), None)  # says what is wrong
    if first in ([], {}, {"data": []}):
        raise TraceError(path, "no requests in it", 1, "line")
    first = first[0] if isinstance(first, list) else first
    return Head(first=first if isinstance(first, dict) else {})
