"""The formats of traces that are known: tables in CSV together, of JSON lines one module each.

They import `traces/format.py` and what lies below. Start with `csv_tables.py`, the simplest.
"""

from simulator.workload.traces.formats import (
    csv_tables,
    custom,
    llmservingsim,
    mooncake,
)

FORMATS = {
    format.name: format
    for format in (
        csv_tables.AZURE,
        csv_tables.BURSTGPT,
        csv_tables.LENGTHS,
        mooncake.FORMAT,
        mooncake.TIMED_TRACE,
        custom.FORMAT,
        llmservingsim.FORMAT,
    )
}
"""By name. The first that `detect`s a file's first line is taken."""
