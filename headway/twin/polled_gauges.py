"""What polls of a server's /metrics see of an engine over time."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from simulator.core.log import Log
from simulator.results.request_table import Floats
from simulator.results.time_series import decisions


@dataclass(frozen=True)
class Gauges:
    """Times in seconds, and the value of each gauge from then on; KV usage in percent."""

    time: Floats
    columns: Mapping[str, Floats]

    def at(self, times: Floats) -> "Gauges":
        """Return what polls at these times would have seen."""
        rows = np.searchsorted(self.time, times, side="right") - 1  # the last of equal times
        columns = {
            name: np.where(rows >= 0, column[np.maximum(rows, 0)], 0.0)
            for name, column in self.columns.items()
        }
        return Gauges(times, columns)


def polled_gauges(log: Log, times: Floats) -> Gauges:
    """Return what polls of vLLM's /metrics at these times, s, would have seen of an engine.

    vLLM makes its statistics as a step ends: who is admitted shows with the first end after the
    decision, and who came meanwhile does not wait as yet.
    """
    steps = log.steps
    ends, blocks = steps["end"], steps["blocks_used"].astype(float)
    finish = log.requests["finish"]
    ended = np.searchsorted(ends, finish[~np.isnan(finish)], side="left")
    left = np.bincount(ended, minlength=len(steps) + 1)[: len(steps)]
    freed = np.where(left > 0, np.minimum(blocks, np.append(blocks[1:], 0.0)), blocks)
    # A row of several steps is seen after the first of them, and once more as the last one ends.
    first = steps["start"] + (ends - steps["start"]) / steps["steps"]
    decided = np.searchsorted(ends, decisions(log), side="right")
    alone = ends[np.minimum(decided, len(ends) - 1)]
    seen = np.concatenate((np.where(steps["steps"] > 1, first, alone), ends))
    # Of one instant the end counts; with asynchronous scheduling what has been decided since.
    last = np.repeat((1, 0) if log.decided else (0, 1), len(ends))
    order = np.lexsort((last, seen))

    def twice(early: Floats, late: Floats) -> Floats:
        joined: Floats = np.concatenate((early, late)).astype(float)[order]
        return joined

    levels = {
        "running": twice(steps["running"], steps["running"] - left),
        "waiting": twice(steps["waiting"], steps["waiting"]),
        "kv_usage": twice(blocks, freed) / log.num_blocks * 100.0,
    }
    return Gauges(seen[order], levels).at(times)
