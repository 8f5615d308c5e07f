"""guidellm's `benchmarks.json`: the requests of each benchmark of a sweep, one after the other.

Moments are seconds since 1970; requests that guidellm cancelled at the end of a benchmark are told
as incomplete.
"""

from pathlib import Path

from simulator.util.errors import HeadwayError
from simulator.workload.traces.documents import flat, items, parse_object, read_text
from simulator.workload.traces.fields import source
from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.records import Records

SOURCES = {
    "arrival": source("request_start_time", "start_time", unit="s"),
    "prompt": source("prompt_tokens"),
    "output": source("output_tokens"),
    "ttft": source("time_to_first_token_ms", unit="ms"),
    "e2el": source("request_latency", unit="s"),
    "conversation": source("info.conversation_id"),
    "turn": source("info.turn_index"),
    "error": source("failed"),
}


def read(path: Path) -> Table:
    """Read the requests of all benchmarks in the file; those not completed count as failed."""
    text = read_text(path)
    whole = parse_object(path, text)
    benchmarks = whole.get("benchmarks")
    if not isinstance(benchmarks, list):
        raise HeadwayError(f"{path}:1: benchmarks: missing, or not a list")
    problems = Problems(path)
    records = Records(problems, SOURCES)
    for k in range(len(benchmarks)):
        for kind in ("successful", "errored", "incomplete"):
            for line, value in items(text, ("benchmarks", k, "requests", kind)):
                if isinstance(value, dict):
                    failed = {} if kind == "successful" else {"failed": kind}
                    records.add(line, flat(value) | failed)
                else:
                    problems.add(line, "line", "not a JSON object")
    return records.table()


FORMAT = Format(
    "guidellm",
    'JSON: {"benchmarks": [{"requests": {"successful": [..]}}]}',
    detect=lambda head: isinstance(head.first.get("benchmarks"), list),
    read=read,
)
