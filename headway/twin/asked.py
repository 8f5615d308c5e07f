"""Requests as clients asked for them, and the workload that they make."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan

import numpy as np
import numpy.typing as npt

from simulator.core.request import Segments
from simulator.workload.workload import Workload


@dataclass(slots=True)
class Asked:
    """A request as it was asked for: the engine's own changes as it goes on.

    It ends by itself after `output_tokens`, and at `max_tokens` at the latest.
    """

    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    client: str = ""
    priority: int = 0
    segments: Segments | None = None
    hint: int | None = None  # predicted output tokens
    answer: str = ""  # the id that its client sees
    arrival: float = 0.0  # simulated s
    cancel_after: float = nan  # s; NaN: its client has not hung up
    n: int = 1  # answers to its prompt, each of which is a request
    ended: list[int] = field(default_factory=list)  # tokens of those that have ended; all share it


def workload_of(asked: Sequence[Asked]) -> Workload:
    """Return requests as a workload that `simulator.run` plays again, request by request."""

    def whole(name: str) -> npt.NDArray[np.int64]:
        return np.array([getattr(one, name) or 0 for one in asked], np.int64)

    def some(name: str) -> npt.NDArray[np.int64] | None:
        return values if (values := whole(name)).any() else None

    clients = [one.client for one in asked]
    cancels = np.array([one.cancel_after for one in asked])
    return Workload(
        np.array([one.arrival for one in asked]),
        whole("prompt_tokens"),
        whole("output_tokens"),
        client=clients if any(clients) else None,
        priority=some("priority"),
        max_tokens=some("max_tokens"),
        segments=[one.segments for one in asked],
        cancel_after=cancels if not np.isnan(cancels).all() else None,
        hint=some("hint"),
        source="requests that came over HTTP",
    )
