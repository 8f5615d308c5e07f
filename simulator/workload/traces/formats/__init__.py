"""The formats of traces that are known, one module each.

They import `traces/format.py` and what lies below. Start with `azure.py`, the simplest.
"""

from simulator.workload.traces.formats import (
    azure,
    burstgpt,
    custom,
    lengths,
    llmservingsim,
    mooncake,
)

FORMATS = {
    format.name: format
    for format in (
        azure.FORMAT,
        burstgpt.FORMAT,
        lengths.FORMAT,
        mooncake.FORMAT,
        mooncake.TIMED_TRACE,
        custom.FORMAT,
        llmservingsim.FORMAT,
    )
}
"""By name. The first that `detect`s a file's first line is taken."""
