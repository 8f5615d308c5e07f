"""What a run says of images that other replicas encode, from what the fleet wrote down."""

from typing import NamedTuple

import numpy as np

from simulator.core.log import ENCODING
from simulator.results.engine_metrics import share
from simulator.results.request_table import ENCODER_PARTS, Floats, Rows


class Encodings(NamedTuple):
    """The requests whose images were encoded elsewhere, and what went over the encoders' links."""

    rows: Rows  # of dtype ENCODING, ascending by id: those of the last tries
    links: dict[int, tuple[int, int, float]]
    """By number: outputs that an encoder sent, their tokens, seconds that they took of its link."""

    @classmethod
    def of(cls, rows: bytes, links: dict[int, tuple[int, int, float]]) -> "Encodings":
        """Take the facts of a run; `rows` has those of earlier tries, too."""
        every = np.frombuffer(rows, ENCODING)
        _, last = np.unique(every["id"][::-1], return_index=True)
        return cls(every[::-1][last], links)

    def time_parts(self, prefill: Floats) -> dict[str, Floats]:
        """Return the parts of each request's e2el in s, by id; NaN where it has no `prefill`."""
        rows, parts = self.rows, {}
        spans = rows["encoded"] - rows["begin"], rows["end"] - rows["encoded"]
        for name, seconds in zip(ENCODER_PARTS, spans, strict=True):
            whole = np.zeros(len(prefill))  # of those without images
            whole[rows["id"]] = seconds
            parts[name] = np.where(np.isnan(prefill), np.nan, whole)
        return parts

    def summary(self, token_bytes: int, paid: float) -> dict[str, object]:
        """Return the figures of the encoders' links, which are `paid` for so many s.

        Times are of the requests that have images.
        """
        rows = self.rows
        counts, tokens, busy = (sum(each) for each in zip(*self.links.values(), strict=True))
        found: dict[str, object] = {
            "requests": len(rows),
            "transfers": counts,
            "bytes": tokens * token_bytes,
        }
        spans = rows["encoded"] - rows["begin"], rows["end"] - rows["encoded"]
        for name, seconds in zip(ENCODER_PARTS, spans, strict=True):
            some = 1e3 * seconds if len(rows) else np.zeros(1)
            found[f"mean_{name}_ms"] = float(some.mean())
            found[f"p99_{name}_ms"] = float(np.percentile(some, 99))
        return {**found, "link_utilization": share(busy, paid)}
