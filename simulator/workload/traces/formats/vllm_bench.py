"""The result of `vllm bench serve --save-result --save-detailed`: a list for each column.

`start_times` (vLLM 0.10 and later) are seconds of a clock of its own.
"""

from pathlib import Path

from simulator.util.errors import HeadwayError
from simulator.workload.traces.documents import parse_object, read_text
from simulator.workload.traces.fields import source
from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.records import Records

SOURCES = {
    "arrival": source("start_times", unit="s"),
    "prompt": source("input_lens"),
    "output": source("output_lens"),
    "ttft": source("ttfts"),
    "e2el": source("latency"),
    "error": source("errors"),
}


def read(path: Path) -> Table:
    """Read a detailed result; the gaps between a request's tokens give the time of its last one."""
    whole = parse_object(path, read_text(path))
    for key in ("start_times", "input_lens", "output_lens"):
        if not isinstance(whole.get(key), list):
            raise HeadwayError(f"{path}:1: {key}: missing: lists come with --save-detailed")
    known = (name for found in SOURCES.values() for name in found.names)
    names = [name for name in (*known, "itls") if isinstance(whole.get(name), list)]
    count = len(whole["input_lens"])
    for name in names:
        if len(whole[name]) != count:
            raise HeadwayError(f"{path}:1: {name}: {len(whole[name])} values for {count} requests")
    problems = Problems(path)
    records = Records(problems, SOURCES)
    for k in range(count):
        row = {name: whole[name][k] for name in names}
        gaps, first = row.get("itls"), row.get("ttfts")
        if isinstance(first, int | float) and first and isinstance(gaps, list):
            try:
                row["latency"] = first + sum(gaps)
            except TypeError:
                problems.add(1, f"request {k}: itls", "not a list of numbers")
        records.add(1, row, f"request {k}: ")
    return records.table()


FORMAT = Format(
    "vllm_bench",
    "JSON of vllm bench serve --save-detailed",
    detect=lambda head: {"input_lens", "output_lens"} <= head.keys,
    read=read,
)
