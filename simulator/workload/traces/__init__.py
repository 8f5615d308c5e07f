"""Published traces as workloads: read as they are, and written as Mooncake JSONL.

It may import what `workload` may. Start with `read.py`, which all that reads a trace goes through.

To add a format, write its row in `formats.yaml`: how its files begin, and which column or key is
what. A table of names, be it CSV or JSON, needs no more. What else has to be worked out is a
function in a module of `formats/` that the row names: it finds the requests of a file, or reads all
of it and gives its requests to `Records` (`records.py`). What is wrong becomes
`FILE:LINE: column: what is wrong`.
"""

from simulator.workload.traces.formats import FORMATS, OPTIONS, formats_with, missing_trace
from simulator.workload.traces.read import read_trace
from simulator.workload.traces.write import write_mooncake

__all__ = ["FORMATS", "OPTIONS", "formats_with", "missing_trace", "read_trace", "write_mooncake"]
