"""inference-perf's `per_request_lifecycle_metrics.json`: requests and their tokens' times.

Seconds of a clock of its own; what was counted of prompt and answer lies in `info`.
"""

from pathlib import Path

from simulator.workload.traces.documents import flat, items, parse, read_text
from simulator.workload.traces.fields import source
from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.records import Records

SOURCES = {
    "arrival": source("start_time", unit="s"),
    "end": source("end_time", unit="s"),
    "first": source("first", unit="s"),
    "prompt": source("input_tokens"),
    "output": source("output_tokens"),
    "error": source("error"),
}


def read(path: Path) -> Table:
    """Read the requests; the last token's time, not the connection's end, ends one."""
    text = read_text(path)
    parse(path, text)
    problems = Problems(path)
    records = Records(problems, SOURCES)
    for line, value in items(text):
        if not isinstance(value, dict):
            problems.add(line, "line", "not a JSON object")
            continue
        row = flat(value)
        times = row.get("output_token_times")
        if isinstance(times, list) and times:
            row |= {"first": times[0], "end_time": times[-1]}
        row["error"] = str(row["error"]) if isinstance(row.get("error"), dict) else row.get("error")
        records.add(line, row)
    return records.table()


FORMAT = Format(
    "inference_perf",
    "JSON: [{start_time, end_time, info: {input_tokens, output_token_times}}]",
    detect=lambda head: {"start_time", "info"} <= head.keys,
    read=read,
)
