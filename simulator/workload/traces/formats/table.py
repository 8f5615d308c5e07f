"""How a format that is a table of names becomes one that is read."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from simulator.workload.traces.csv_columns import read_csv
from simulator.workload.traces.fields import Sources, name_sources, used_as
from simulator.workload.traces.format import Format, Head, Problems, Published, Table
from simulator.workload.traces.records import Records

Found = tuple[int, dict[str, Any]] | tuple[int, dict[str, Any], str]
"""A request's line, its flat fields, and what goes before a field's name in messages."""
Requests = Callable[..., Iterator[Found]]


def table_format(
    name: str,
    begins: str,
    detect: Callable[[Head], bool],
    columns: str,
    *,
    idle: str = "",
    requests: Requests | None = None,
    options: tuple[str, ...] = (),
    published: tuple[Published, ...] = (),
) -> Format:
    """Make a format of `FIELD=COLUMN|COLUMN:UNIT, ..` and patterns of columns without effect."""
    sources, patterns = name_sources(columns), tuple(idle.split(", ") if idle else ())
    read = partial(_read_json, requests=requests) if requests else read_csv
    read = partial(read, sources=sources, idle=patterns)
    used = {name: field for name, field in used_as(sources).items() if name}
    form = Format(name, begins, detect, read, options)
    return form._replace(published=published, used=used, idle=patterns)


def _read_json(
    path: Path, requests: Requests, sources: Sources, idle: tuple[str, ...], **options: Any
) -> Table:
    """Read the requests of a file; those not completed count as failed."""
    problems = Problems(path)
    records = Records(problems, sources, idle)
    ends = [name for source in sources.values() for name in source.names if name[-1:] == "]"]
    for line, row, *label in requests(path, problems, **options):
        for name in ends:  # KEY[0] or KEY[-1]
            key, _, place = name[:-1].partition("[")
            if isinstance(values := row.get(key), list) and values:
                row[name] = values[int(place)]
        records.add(line, row, *label)
    return records.table()
