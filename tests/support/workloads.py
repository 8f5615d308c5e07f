"""Workloads of given prompts, and what a generator says of a wrong one."""

import re
from collections.abc import Mapping

import numpy as np
import pytest

from simulator.core.request import Segments
from simulator.util.from_mapping import from_mapping
from simulator.workload.distributions import TraceReader
from simulator.workload.generate import Generator
from simulator.workload.generate import generate as generate_of
from simulator.workload.workload import Workload


def generate(
    spec: Mapping[str, object], seed: int = 0, load: TraceReader | None = None
) -> Workload:
    """Make the workload that the keys of a scenario ask for."""
    return generate_of(from_mapping(Generator, spec), seed, load)


def of_prompts(segments: list[Segments | None], lengths: list[int] | None = None) -> Workload:
    """Make a workload of these prompts, one per second, with outputs 1, 2, 3, ..."""
    lengths = lengths or [sum(count for _, count in parts) for parts in segments]
    n = len(segments)
    return Workload(np.arange(n) * 1.0, np.array(lengths), np.arange(1, n + 1), segments=segments)


def generator_errors(**spec) -> list[str]:
    """Return the lines of the error that a generator raises, less what each key means."""
    with pytest.raises(ValueError, match=r": ") as info:
        generate(spec)
    return [re.sub(r" \(.*\)$", "", line) for line in str(info.value).split("\n")]
