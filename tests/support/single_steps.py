"""A run's rows of steps with every leap unrolled, as stepwise runs have them."""

from types import SimpleNamespace

import numpy as np

from simulator.core.log import Log
from simulator.results.frames import copy_columns, step_columns
from simulator.results.request_table import Floats, Ints
from simulator.results.time_series import arrivals, decisions
from simulator.util.csv_text import Numbers


def expand_steps(log: Log, *, copy_seconds: Floats | None = None) -> dict[str, Numbers]:
    """Unroll the leaps: the columns of steps.csv with one row per step, in order of time.

    `waiting` is what the row began with and the requests that have come since.
    """
    rows = log.steps
    row, index = _unroll(rows["steps"].astype(np.int64))
    starts, ends = _step_times(log, row, index)
    queue, decided = arrivals(log), starts
    if log.decided:  # each step when the one before it began
        decided = np.where(index > 0, np.append(0.0, starts[:-1]), decisions(log)[row])
    since = np.searchsorted(queue, decided, "right")
    since -= np.searchsorted(queue, decisions(log), "right")[row]
    singles = rows[row]
    singles["start"], singles["end"] = starts, ends
    singles["context"] += index * (singles["decodes"] + singles["wasted"])
    singles["preempted"][index > 0] = 0
    singles["blocks_used"] = blocks_in_steps(log, row, index)
    shown = SimpleNamespace(steps=singles, num_blocks=log.num_blocks)
    columns = step_columns(shown) | {"waiting": singles["waiting"] + since}
    del columns["steps"]
    first = np.where(index == 0, rows["start"][row], -1.0)
    return columns | copy_columns(log, first, copy_seconds)


def _unroll(steps: Ints) -> tuple[Ints, Ints]:
    """Return, for every step, its row and its place in the row."""
    row = np.repeat(np.arange(len(steps)), steps)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(steps) - steps, steps)


def _step_times(log: Log, row: Ints, index: Ints) -> tuple[Floats, Floats]:
    """Return start and end of every step; those inside a leap are ticks."""
    rows = log.steps
    steps = rows["steps"].astype(np.int64)
    starts: Floats = rows["start"][row]
    ends: Floats = rows["end"][row]
    ticks = np.asarray(log.tick_ends)
    last = np.searchsorted(ticks, rows["end"], side="right") - 1
    leapt = np.flatnonzero(steps[row] > 1)
    ends[leapt] = ticks[last[row[leapt]] - (steps[row] - 1 - index)[leapt]]
    inner = np.flatnonzero(index > 0)
    starts[inner] = ends[inner - 1]
    return starts, ends


def blocks_in_steps(log: Log, row: Ints, index: Ints) -> Ints:
    """Get the KV blocks in use during each step: the step `index` of each `row`, all in order."""
    used: Ints = log.steps["blocks_used"].astype(np.int64)[row]
    added = np.zeros(len(row), np.int64)
    added[index > 0] = log.leap_blocks
    total = np.cumsum(added)
    used += total - total[np.arange(len(row)) - index]
    return used
