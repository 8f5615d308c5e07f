"""AIPerf's `profile_export.jsonl`: a line for each request, its metrics each with a unit.

`metadata` holds moments in ns since 1970, `metrics` lengths of time in ms.
"""

from pathlib import Path

from simulator.workload.traces.documents import flat
from simulator.workload.traces.fields import source
from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.json_lines import rows
from simulator.workload.traces.records import Records

METRICS = "metrics.{}.value"
SOURCES = {
    "arrival": source("metadata.request_start_ns", unit="ns"),
    "prompt": source(
        METRICS.format("input_sequence_length"), METRICS.format("usage_prompt_tokens")
    ),
    "output": source(
        METRICS.format("output_sequence_length"), METRICS.format("usage_completion_tokens")
    ),
    "ttft": source(METRICS.format("time_to_first_token"), unit="ms"),
    "e2el": source(METRICS.format("request_latency"), unit="ms"),
    "conversation": source("metadata.conversation_id"),
    "turn": source("metadata.turn_index"),
    "error": source("error", "metadata.was_cancelled"),
}


def read(path: Path) -> Table:
    """Read the requests of the measured phase, not those of the warm-up."""
    problems = Problems(path)
    records = Records(problems, SOURCES)
    for row in rows(path, problems):
        values = flat(row.values)
        if values.get("metadata.benchmark_phase") != "warmup":
            records.add(row.line, values)
    return records.table()


FORMAT = Format(
    "aiperf",
    'JSONL: {"metadata": {"request_start_ns": ..}, "metrics": {..}}',
    detect=lambda head: {"metadata", "metrics"} <= head.keys,
    read=read,
)
