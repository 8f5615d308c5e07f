"""Published traces as workloads: read as they are, and written as Mooncake JSONL.

It may import what `workload` may. Start with `read.py`, which all that reads a trace goes through.

To add a format, write a module in `formats/` with a `Format` named `FORMAT` in it, and list it in
`formats/__init__.py`. A `Format` has two functions:

- `detect` says of the names in a file's first line whether it is one of its files;
- `read` makes a `Table` of a file. Of a CSV `csv_format` makes both from three columns, see
  `formats/csv_tables.py`; of JSON lines `read` asks each `Row` for its numbers, see
  `formats/llmservingsim.py`. What is wrong becomes `FILE:LINE: column: what is wrong`.
"""

from simulator.workload.traces.formats import FORMATS
from simulator.workload.traces.read import OPTIONS, detect_format, missing_trace, read_trace
from simulator.workload.traces.write import write_mooncake

__all__ = [
    "FORMATS",
    "OPTIONS",
    "detect_format",
    "missing_trace",
    "read_trace",
    "write_mooncake",
]
