"""The formats of traces that are known: those of a kind together in a module.

They import `traces/format.py` and what lies below. Start with `csv_tables.py`, the simplest.
"""

from simulator.workload.traces.formats import (
    agents,
    csv_tables,
    custom,
    load_generators,
    logs,
    mooncake,
    named,
)

FORMATS = {
    format.name: format
    for format in (
        csv_tables.AZURE,
        csv_tables.BURSTGPT,
        csv_tables.LENGTHS,
        agents.DYNAMO,
        agents.WEKA,
        agents.AGENTIC_MOONCAKE,
        mooncake.MOONCAKE,
        mooncake.TIMED_TRACE,
        mooncake.LLMSERVINGSIM,
        load_generators.VLLM_BENCH,
        load_generators.GUIDELLM,
        load_generators.AIPERF,
        load_generators.INFERENCE_PERF,
        logs.OTEL,
        logs.ACCESS_LOG,
        named.FORMAT,
        custom.SHAREGPT,
        custom.FORMAT,
    )
}
"""By name. The first that `detect`s a file's first line is taken."""
