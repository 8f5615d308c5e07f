"""The formats of traces that are known: tables in CSV together, of JSON lines one module each.

They import `traces/format.py` and what lies below. Start with `csv_tables.py`, the simplest.
"""

from simulator.workload.traces.formats import (
    aiperf,
    csv_tables,
    custom,
    guidellm,
    inference_perf,
    llmservingsim,
    mooncake,
    named,
    vllm_bench,
)

FORMATS = {
    format.name: format
    for format in (
        csv_tables.AZURE,
        csv_tables.BURSTGPT,
        csv_tables.LENGTHS,
        mooncake.FORMAT,
        mooncake.TIMED_TRACE,
        llmservingsim.FORMAT,
        vllm_bench.FORMAT,
        guidellm.FORMAT,
        aiperf.FORMAT,
        inference_perf.FORMAT,
        named.FORMAT,
        custom.FORMAT,
    )
}
"""By name. The first that `detect`s a file's first line is taken."""
