"""Published traces as workloads: read as they are, and written as Mooncake JSONL.

It may import what `workload` may. Start with `read.py`, which all that reads a trace goes through.

To add a format, write a `Format` (`format.py`) in a module of `formats/`, and list its place in
`formats/__init__.py`. A `Format` has two functions:

- `detect` gets the names in the first line of a file, and says whether it is in this format;
- `read` reads a file into a `Table`. What is a table of names, be it CSV or JSON, is a row of
  `formats/tables.py`. Others give their requests to `Records` (`records.py`). What is wrong becomes
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
