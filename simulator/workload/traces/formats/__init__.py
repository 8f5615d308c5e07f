"""The formats of traces that are known, rows of `formats.yaml`, and what reads their files.

The readers import `traces/format.py` and what lies below. Start with `tables.py`: tables of names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.util.errors import TraceError
from simulator.util.yaml_lines import read_own
from simulator.workload.traces.fields import column_source
from simulator.workload.traces.format import Format

_ROWS: dict[str, dict[str, Any]] = read_own(Path(__file__).parents[1] / "formats.yaml")
NO_REQUESTS: Mapping[str, str] = _ROWS.pop("no format")
"""What a line, or the keys of an object, show of files that have no requests with lengths."""


def _format(name: str, row: dict[str, Any]) -> Format:
    columns, beside, files = (row.pop(key, {}) for key in ("columns", "used", "files"))
    sources = {field: column_source(text) for field, text in columns.items()}
    used = {one: what for what, names in beside.items() for one in names}
    return Format(name=name, columns=sources, beside=used, files=files, **row)


FORMATS = {name: _format(name, row) for name, row in _ROWS.items()}
"""By name. The first that `detect`s a file's first line is taken."""
OPTIONS = tuple(dict.fromkeys(option for form in FORMATS.values() for option in form.options))
"""What some formats take; `encoding` any file may need."""


def formats_with(option: str) -> tuple[str, ...]:
    """Name the formats that take an option."""
    return tuple(name for name, form in FORMATS.items() if option in form.options)


def missing_trace(path: Path) -> TraceError:
    """Say that the file is missing and, of a well-known trace, whose it is and how to get it."""
    for parts, whose in (one for form in FORMATS.values() for one in form.files.items()):
        if any(part in path.name.lower() for part in parts.split(", ")):
            what = f"no such file. It is {whose}, and put it, plain or packed by gzip, as "
            what += f"{path.name} under traces/ in the folder that HEADWAY_DATA names"
            return TraceError(path, what)
    return TraceError(path, "no such file")
