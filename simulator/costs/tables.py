"""Tables of seconds by tokens, and sizes of CUDA graphs: checks that they are such."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

from simulator.costs.linear import LONGEST_TERM
from simulator.util.from_mapping import Check, short_repr

Table = Sequence[Sequence[float]]
"""Rows of (tokens, seconds), tokens ascending."""

INTERVALS = ("host_interval", "step_interval", "stream_interval")
MAX_TOKENS = 1 << 31
MAX_TABLE_TOKENS = 1 << 16
"""Tokens up to which a table is looked up by index; beyond, by search."""


def check_table(table: object, name: str = "dense") -> list[Check]:
    """Check that a dense table is one; for `raise_if`."""
    good = isinstance(table, Sequence) and not isinstance(table, str) and len(table) > 0
    rows = list(table) if isinstance(table, Sequence) else []
    for row in rows:
        numbers = isinstance(row, Sequence) and all(isinstance(x, Real) for x in row)
        good = good and numbers and len(row) == 2
        good = good and 1 <= row[0] <= MAX_TOKENS and 0 < row[1] <= LONGEST_TERM
    if good:
        tokens = [row[0] for row in rows]
        good = tokens == sorted(set(tokens))
    what = (
        "must be rows [tokens, seconds], tokens whole, from 1 on and ascending, seconds above 0 "
        f"and at most {LONGEST_TERM:,.0f}, not {'' if good else short_repr(table)}"
    )
    return [(not good, name, what)]


def check_graphs(table: object) -> list[Check]:
    """Check a table of graphs of steps with prompts; for `raise_if`."""
    found = check_table(table, "graph_mixed")
    if found[0][0]:
        return found
    tokens = [row[0] for row in table]  # type: ignore[attr-defined]
    good = all(isinstance(size, int) for size in tokens) and tokens[-1] <= MAX_TABLE_TOKENS
    return [(not good, "graph_mixed", f"tokens must be whole, at most {MAX_TABLE_TOKENS:,}")]


def check_interval(ends: object, name: str) -> list[Check]:
    """Check that an interval is one, or empty; for `raise_if`."""
    numbers: list[Any] = list(ends) if isinstance(ends, list | tuple) else [None]
    good = all(isinstance(x, Real) and 0 <= float(x) <= LONGEST_TERM for x in numbers)
    good = good and (not numbers or (len(numbers) == 2 and numbers[0] <= numbers[1]))
    return [(not good, name, f"must be [lowest, highest], not {short_repr(ends)} (s)")]


def check_intervals(cost: object) -> list[Check]:
    """Check the intervals of the engine's terms; for `raise_if`."""
    return [found for name in INTERVALS for found in check_interval(getattr(cost, name), name)]


def check_sizes(sizes: object) -> list[Check]:
    """Check that the batch sizes of CUDA graphs are such; for `raise_if`."""
    good = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    found = list(sizes) if isinstance(sizes, Sequence) else []
    good = good and all(isinstance(size, int) and not isinstance(size, bool) for size in found)
    good = good and found == sorted(set(found))
    good = good and (not found or (found[0] >= 1 and found[-1] <= MAX_TABLE_TOKENS))
    what = f"must be whole numbers, ascending, from 1 to {MAX_TABLE_TOKENS:,}, not "
    what += "" if good else short_repr(sizes)
    return [(not good, "cudagraph_capture_sizes", what)]
