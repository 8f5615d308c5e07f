"""Published traces as workloads: read as they are, and written as Mooncake JSONL.

It may import what `workload` may. Start with `read.py`, which all that reads a trace goes through.

To add a format, write a `Format` (`format.py`) in a module of `formats/`, and list its place in
`formats/__init__.py`. A `Format` has two functions:

- `detect` gets the names in the first line of a file, and says whether it is in this format;
- `read` reads a file into a `Table`. For a CSV, `csv_format` (`csv_columns.py`) makes both from
  three columns: see `formats/csv_tables.py`. For JSON lines, `read` asks each `Row`
  (`json_lines.py`) for its numbers: see `formats/custom.py`. What is wrong becomes
  `FILE:LINE: column: what is wrong`.
"""

from simulator.workload.traces.formats import FORMATS, formats_with, missing_trace
from simulator.workload.traces.read import OPTIONS, read_trace
from simulator.workload.traces.write import write_mooncake

__all__ = [
    "FORMATS",
    "OPTIONS",
    "formats_with",
    "missing_trace",
    "read_trace",
    "write_mooncake",
]
