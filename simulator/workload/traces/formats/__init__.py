"""The formats of traces that are known: those of a kind together in a module.

They import `traces/format.py` and what lies below. Start with `tables.py`: tables of names.
"""

from pathlib import Path

from simulator.util.errors import HeadwayError
from simulator.util.imported import Imported
from simulator.workload.traces.format import Format

_PLACES = {
    "azure": "tables:AZURE",
    "burstgpt": "tables:BURSTGPT",
    "lengths": "tables:LENGTHS",
    "dynamo": "agents:DYNAMO",
    "weka": "agents:WEKA",
    "agentic_mooncake": "agentic_mooncake:AGENTIC_MOONCAKE",
    "copilot": "copilot:FORMAT",
    "mooncake": "mooncake:MOONCAKE",
    "timed_trace": "mooncake:TIMED_TRACE",
    "llmservingsim": "mooncake:LLMSERVINGSIM",
    "vllm_bench": "tables:VLLM_BENCH",
    "trtllm_bench": "tables:TRTLLM_BENCH",
    "agentperfbench": "tables:AGENTPERFBENCH",
    "guidellm": "tables:GUIDELLM",
    "aiperf": "tables:AIPERF",
    "inference_perf": "tables:INFERENCE_PERF",
    "otel": "logs:OTEL",
    "access_log": "logs:ACCESS_LOG",
    "requests": "named:FORMAT",
    "sharegpt": "custom:SHAREGPT",
    "custom": "custom:FORMAT",
}
FORMATS: Imported[Format] = Imported(
    {name: f"{__name__}.{place}" for name, place in _PLACES.items()}
)
"""By name. The first that `detect`s a file's first line is taken."""


def formats_with(option: str) -> tuple[str, ...]:
    """Name the formats that take an option."""
    return tuple(name for name, form in FORMATS.items() if option in form.options)


def missing_trace(path: Path) -> HeadwayError:
    """Say that the file is missing and, of a well-known trace, whose it is and how to get it."""
    for published in (one for form in FORMATS.values() for one in form.published):
        if any(part in path.name.lower() for part in published.name_parts):
            return HeadwayError(
                f"{path}: no such file. It is {published.source}, and put it, plain or packed by "
                f"gzip, as {path.name} under traces/ in the folder that HEADWAY_DATA names"
            )
    return HeadwayError(f"{path}: no such file")
