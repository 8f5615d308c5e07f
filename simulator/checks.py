"""What a scenario's keys must be to one another, to the model, to the hardware and to the disk."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from simulator.errors import HeadwayError
from simulator.model import ModelSpec
from simulator.scenario import Scenario, resolve
from simulator.yamlpos import Fault, Key, faults

T = TypeVar("T")
Contradiction = tuple[str, str, str]
"""The key to blame, the others that have a part in it, and what is wrong."""


def contradictions(scenario: Scenario, wrong: set[Key]) -> list[Fault]:
    """Find what is wrong, apart from what depends on a key that is wrong already."""
    found = []
    for key, others, what in _find(scenario):
        keys = [tuple(name.split(".")) for name in (key, *others.split())]
        if not any(_touches(mine, bad) for mine in keys for bad in wrong):
            found.append((keys[0], what))
    return found


def _touches(mine: Key, bad: Key) -> bool:
    length = min(len(mine), len(bad))
    return mine[:length] == bad[:length]


def _find(scenario: Scenario) -> Iterator[Contradiction]:
    engine, gpus = scenario.engine, scenario.gpu.count
    tokens, seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    if tokens < seqs:
        yield (
            "engine.max_num_batched_tokens",
            "engine.max_num_seqs",
            f"must be at least max_num_seqs ({seqs}), not {tokens}: each running request wants "
            "one token a step",
        )
    if gpus != engine.tensor_parallel_size:
        yield (
            "gpu.count",
            "engine.tensor_parallel_size",
            f"must equal engine.tensor_parallel_size ({engine.tensor_parallel_size}), not {gpus}: "
            "one engine is simulated, and it uses just these GPUs",
        )
    yield from _trace(scenario)


def _trace(scenario: Scenario) -> Iterator[Contradiction]:
    """See whether the trace is there, and whether its options go with its format."""
    from simulator.traces import OPTIONS, missing_trace

    trace = scenario.workload.trace
    if trace is None:
        return
    path = resolve(trace.path, scenario.folder)
    if not path.exists():
        for message in missing_trace(path).messages:
            yield "workload.trace.path", "", message
    for option, forms in OPTIONS.items():
        given = getattr(trace, option) is not None
        if given and trace.format is not None and trace.format not in forms:
            yield (
                f"workload.trace.{option}",
                "workload.trace.format",
                f"goes with the formats {' and '.join(forms)}, not with {trace.format}",
            )
