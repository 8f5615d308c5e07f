"""A scenario's requests a chunk at a time: generated as they come, or cut from a trace."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from simulator.core.request import Segments
from simulator.workload.distributions import TraceReader
from simulator.workload.generate import Generator, draw_lengths, random_streams
from simulator.workload.workload import Workload

if TYPE_CHECKING:
    from simulator.scenario.scenario import Scenario


def chunks(scenario: "Scenario", size: int) -> tuple[int, Iterator[Workload]]:
    """Give the number of requests, and their workload in chunks of `size`; the last is smaller.

    The numbers are those of the whole workload. What is read from a trace, and prompts of prefix
    groups, stand in memory as a whole, some 24 bytes a request and more with prefixes.
    """
    spec = scenario.workload.generator
    if scenario.workload.trace is not None or not comes_in_parts(spec):
        whole = scenario.make_workload()
        return len(whole), _cut(whole, size)
    full, rest = divmod(spec.num_prompts, size)
    sizes = [size] * full + [rest] * (rest > 0)
    parts = generate_parts(spec, scenario.seed, cache(scenario.reader()), sizes)
    frontend = scenario.frontend()
    return spec.num_prompts, (replace(part, frontend=frontend) for part in parts)


def comes_in_parts(spec: Generator) -> bool:
    """Say whether `generate_parts` can make this workload."""
    return spec.sessions is None and spec.prefix_groups is None and spec.clients is None


def generate_parts(
    spec: Generator, seed: int, load: TraceReader | None, sizes: Sequence[int]
) -> Iterator[Workload]:
    """Make the workload of `generate` in parts of these sizes, one at a time: the same numbers."""
    rng = random_streams(seed)
    times = spec.arrival_parts(sum(sizes), lambda: random_streams(seed)["arrivals"], sizes)
    shared: Segments = ((("shared",), spec.prefix_len),) if spec.prefix_len else ()
    first = 0
    for size, arrival in zip(sizes, times, strict=True):
        new, output = draw_lengths(replace(spec, num_prompts=size), rng, load)
        work = Workload(
            arrival,
            prompt_tokens=new + spec.prefix_len,
            output_tokens=output,
            max_concurrency=spec.max_concurrency,
            request_rate=float(spec.request_rate),
            burstiness=float(spec.burstiness),
            source=f"generated, seed {seed}",
        )
        if shared:
            work.segments = [
                (*shared, (("in", first + i), fresh)) if fresh else shared
                for i, fresh in enumerate(new.tolist())
            ]
        first += size
        yield work


def _cut(whole: Workload, size: int) -> Iterator[Workload]:
    for at in range(0, len(whole), size):
        rows = slice(at, at + size)
        yield replace(
            whole,
            arrival=whole.arrival[rows],
            prompt_tokens=whole.prompt_tokens[rows],
            output_tokens=whole.output_tokens[rows],
            client=None if whole.client is None else whole.client[rows],
            priority=None if whole.priority is None else whole.priority[rows],
            segments=None if whole.segments is None else whole.segments[rows],
        )
