"""What each client, and each priority, felt of a run that forgets its requests."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

import numpy as np

from simulator.results.fairness import PART_LATENCIES, PARTS
from simulator.results.request_table import Flags, RequestTable
from simulator.results.service_levels import Bound, keep_bounds
from simulator.util.csv_text import Words
from simulator.util.quantile_sketch import QuantileSketch

MOST_NAMES = 200
"""Clients, or priorities, that are told apart: each takes a sketch of 88 kB for each latency."""


@dataclass
class Felt:
    """Sums over the requests of one client, or of one priority."""

    requests: int = 0
    completed: int = 0
    output_tokens: int = 0
    over: int = 0  # completed or failed
    kept: int = 0  # that keep every bound
    sketches: dict[str, QuantileSketch] = field(default_factory=lambda: defaultdict(QuantileSketch))


class FeltByName:
    """Sums by name, over the parts of a run; more than `MOST_NAMES` are not told apart."""

    SUMS = ("felt", "untold")

    def __init__(self) -> None:
        self.felt: dict[str, Felt] = defaultdict(Felt)  # by name, as a part of a path
        self.untold = 0  # requests of names beyond `MOST_NAMES`

    @property
    def several(self) -> bool:
        """Whether there is anybody to tell apart."""
        return len(self.felt) > 1

    def add(self, table: RequestTable, words: Words, bounds: Mapping[str, Bound]) -> None:
        """Add the requests of a part; codes of -1 have no name. `bounds` in ms."""
        kept = keep_bounds(table, table.completed, bounds)
        for code in np.unique(words.codes[words.codes >= 0]).tolist():
            name, mine = quote(words.names[code], safe=""), words.codes == code
            if name in self.felt or len(self.felt) < MOST_NAMES:
                self._add(self.felt[name], table, mine, kept)
            else:
                self.untold += int(mine.sum())

    def _add(self, felt: Felt, table: RequestTable, mine: Flags, kept: Flags) -> None:
        done = mine & table.completed
        felt.requests += int((mine & ~np.isnan(table.sent)).sum())
        felt.completed += int(done.sum())
        felt.output_tokens += int(table.generated[done].sum())
        felt.over += int((mine & (table.reason >= 0)).sum())
        felt.kept += int((mine & kept).sum())
        for name in PART_LATENCIES:
            values = getattr(table, name)
            known = done & ~np.isnan(values)
            if name == "tpot":
                known &= table.generated > 1
            felt.sketches[name].add(values[known])

    def summary(self, *, bounded: bool) -> dict[str, dict[str, object]] | None:
        """Return what `fairness.summarize_parts` does; None: there are too many names."""
        if self.untold:
            return None
        order = sorted(self.felt.items(), key=lambda item: -item[1].requests)[:PARTS]
        return {unquote(name): _told(felt, bounded=bounded) for name, felt in order}


def _told(felt: Felt, *, bounded: bool) -> dict[str, object]:
    told: dict[str, object] = {
        "requests": felt.requests,
        "completed": felt.completed,
        "output_tokens": felt.output_tokens,
    }
    if bounded:
        told["slo_attainment"] = felt.kept / felt.over if felt.over else None
    for name in PART_LATENCIES:
        some = felt.sketches[name]
        told[f"mean_{name}_ms"] = 1000.0 * some.mean if some.count else None
        told[f"p99_{name}_ms"] = 1000.0 * some.percentiles([99.0])[0] if some.count else None
    return told
