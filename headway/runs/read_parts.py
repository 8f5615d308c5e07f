"""Tables in parts of a long run, read a row group at a time as rows that stand for many.

Of its requests a share is kept, chosen by their ids. Its steps are put together: those of a replica
that begin in one short stretch of time become one row, which means over them are right of.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headway.runs.parts import count_rows, row_groups
from headway.runs.read import (
    COMPLETED,
    WORDS,
    check_ends,
    check_values,
    need_columns,
)
from simulator.results.request_table import Floats
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    import pandas as pd

FEW = 300_000  # rows that are read whole
KEPT = 100_000  # requests, about, of a longer run
CELLS = 200_000  # stretches of time, of all replicas, of which each has one row of steps
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # spreads ids evenly over 64 bits, whatever their period
SUMMED = ("duration", "steps", "preempted")
BY_STEP = ("prefill_tokens", "decode_tokens", "wasted_tokens")
"""What a row tells of each of its steps; of levels it tells over its time."""
LONGEST = "longest_step"
"""A column of steps put together: the longest that decodes, in s."""


def read_share(folder: Path, columns: Sequence[str]) -> "tuple[pd.DataFrame, int, int]":
    """Read some of the requests of a long run; also count all, and those that are completed."""
    import pandas as pd

    share, count, completed, ids = KEPT / count_rows(folder), 0, 0, 0
    kept: list[pd.DataFrame] = []
    for frame in _frames(folder):
        need_columns(frame, ["finish_reason"], folder)
        check_values(frame, columns, folder)
        check_ends(frame, folder)
        count, ids = count + len(frame), ids + int(frame["id"].sum())
        completed += int(frame["finish_reason"].isin(COMPLETED).sum())
        spread = frame["id"].to_numpy(np.uint64) * GOLDEN
        kept.append(frame[spread < np.uint64(share * 2**64)])
    if ids != count * (count - 1) // 2:
        raise HeadwayError(f"{folder}: id: is not that of each request once")
    whole = pd.concat(kept).sort_values("id", ignore_index=True)
    words = {name: "category" for name in WORDS if name in whole}
    return whole.astype(words), count, completed


def read_together(
    folder: Path,
    columns: Sequence[str],
    blocks_used: "Callable[[pd.DataFrame], Floats]",
    *,
    seconds: float,
    replicas: int,
) -> "pd.DataFrame":
    """Read the steps of a long run put together; it lasts so many `seconds`.

    `blocks_used` says how many KV blocks the steps of each row have in use, on the mean.
    """
    import pandas as pd

    bins = max(CELLS // replicas, 500)
    cells = bins * replicas
    sums = {name: np.zeros(cells) for name in columns}
    sums["start"][:], longest = np.inf, np.zeros(cells)
    for frame in _frames(folder):
        check_values(frame, columns, folder)
        number = frame.get("replica", pd.Series(0, frame.index)).to_numpy(np.int64)
        if number.max(initial=0) >= replicas:
            raise HeadwayError(f"{folder}: replica: is {number.max()}, and there are {replicas}")
        told = {name: frame[name].to_numpy(float) for name in columns}
        cell = np.clip((told["start"] * (bins / seconds)).astype(np.int64), 0, bins - 1)
        cell += bins * number
        used = blocks_used(frame)
        told["kv_blocks_free"] = told["kv_blocks_free"] + told["kv_blocks_used"] - used
        told["kv_blocks_used"] = used
        np.minimum.at(sums["start"], cell, told.pop("start"))
        decoding = told["decode_tokens"] > 0
        each = told["duration"] / told["steps"]
        np.maximum.at(longest, cell[decoding], each[decoding])
        for name, values in told.items():
            by = 1.0 if name in SUMMED else told["steps" if name in BY_STEP else "duration"]
            sums[name] += np.bincount(cell, values * by, cells)
    there = np.flatnonzero(sums["steps"])
    found = {name: values[there] for name, values in sums.items()}
    for name in found.keys() - {"start", *SUMMED}:
        by = found["steps" if name in BY_STEP else "duration"]
        found[name] = np.divide(found[name], by, out=np.zeros(len(there)), where=by > 0)
    return pd.DataFrame(found | {LONGEST: longest[there], "replica": there // bins})


def _frames(folder: Path) -> "Iterator[pd.DataFrame]":
    for group in row_groups(folder):
        yield group.to_pandas()
