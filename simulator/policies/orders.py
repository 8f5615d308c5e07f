"""Orders of the waiting queue: by size, by priority, by the time that was waited.

Sizes are in tokens (SIZES): prompts and answers are counted alike, though a prompt's
tokens are cheaper, so where the difference matters `by: hint` is the better size. None of these
policies takes the place of a running request; `preemptive.py` has those that do.
"""

from collections.abc import Iterable
from functools import partial
from math import exp, expm1, inf, log, log1p
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.core.request import Request
from simulator.policies.policy import Batch, PerSecond, Seconds, hint_of
from simulator.policies.waiting_queues import RatioQueue
from simulator.util.errors import MappingError
from simulator.util.from_mapping import raise_if

SIZES = {"prompt": "prompt tokens", "hint": "predicted output tokens", "total": "the sum of both"}


class BySize:
    """What policies have in common that rank by a size: `by` names one of SIZES."""

    reads = "size"

    def __init__(self, by: str = "prompt") -> None:
        if by not in SIZES:
            raise MappingError("by", f"must be one of {', '.join(SIZES)}, not {by!r}")
        self.by = by
        self.needs_hint = by != "prompt"


class SJF(BySize):
    """The shortest first: by its prompt, its predicted answer (`by: hint`) or both (`by:
    total`). A second of waiting counts as `ageing` tokens less.

    So long jobs are not starved. All age alike: the order of two never changes, and the key stays
    what it was.
    """

    trials = ({"by": "total", "ageing": 5},)

    def __init__(self, by: str = "prompt", ageing: PerSecond = 0.0) -> None:
        super().__init__(by)
        raise_if((not 0 <= ageing < inf, "ageing", f"must be 0 or more, not {ageing}"))
        self.ageing = ageing

    def key(self, request: Request) -> tuple[float, float]:
        return size_of(request, self.by) + self.ageing * request.arrival, request.arrival


class Priority:
    """The smaller priority of the trace first, among equals the earlier arrival.

    Urgent arrivals preempt nobody. Only when a running request lacks a block the least urgent one
    leaves, which may be the very request that lacks it.
    """

    reads = "priority"

    def key(self, request: Request) -> tuple[float, ...]:
        return request.priority, request.arrival, request.id

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=_urgency)  # of exact equals the first


def _urgency(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival


class HRRN(BySize):
    """The highest response ratio, (waited + size) / size, first; `by` as in sjf.

    Highest response ratio next (Brinch Hansen, "Short-term scheduling in multiprogramming
    systems", SOSP 1971): whoever has the largest (waited + size) / size is admitted first.

    The ratio grows faster for a short job, but for a long one it grows as well: nobody starves.
    In units of size the ratio has the order of waited / size, so it needs no seconds per token.
    As in the original, the choice is made when a place or blocks become free, and preempts nobody.
    """

    trials = ({"by": "hint"},)

    def rank(self, waiting: Any, now: float) -> npt.NDArray[np.float64]:
        if self.by == "prompt":
            size = waiting.prompt_tokens
        else:
            size = waiting.hint + (waiting.prompt_tokens if self.by == "total" else 0.0)
        ratio: npt.NDArray[np.float64] = (waiting.arrival - now) / size
        return ratio

    def queue(self, batch: Batch) -> RatioQueue:
        """Order by `rank`, in a queue that need not rank all who wait."""
        return RatioQueue(partial(size_of, by=self.by))


class Boost(BySize):
    """First come, first served by arrival times that are earlier for small requests, which
    bounds the tail; `by` as in sjf, `token_time` seconds per token; a large `gamma` (1/s) is
    close to fcfs.

    The gamma-Boost of Yu and Scully ("Strongly tail-optimal scheduling in the light-tailed
    M/G/1", SIGMETRICS 2024): a job of s seconds counts as having come
    log(1 / (1 - exp(-gamma s))) / gamma seconds before it did. Their optimal gamma is the rate at
    which the tail of the waiting time of first come, first served decays; a large one is close to
    FCFS, a small one to shortest job first. A short job overtakes those who came up to its boost
    before it and nobody else, so that the longest wait stays bounded. Headway admits in that
    order and preempts nobody; a size is `token_time` seconds per token.
    """

    trials = ({"gamma": 0.5, "token_time": 0.1},)

    def __init__(
        self, by: str = "prompt", gamma: PerSecond = 0.1, token_time: Seconds = 1e-3
    ) -> None:
        super().__init__(by)
        raise_if(
            (not 0 < gamma < inf, "gamma", f"must be more than 0 per second, not {gamma}"),
            (not 0 < token_time < inf, "token_time", f"must be more than 0 s, not {token_time}"),
        )
        self.gamma, self.token_time = gamma, token_time

    def key(self, request: Request) -> float:
        x = self.gamma * self.token_time * size_of(request, self.by)
        # -log(1 - exp(-x)), each branch where it loses no digits
        boost = -log(-expm1(-x)) if x < 1 else -log1p(-exp(-x))
        return request.arrival - boost / self.gamma


def size_of(request: Request, by: str) -> int:
    """Return the tokens of a request that a policy ranks by: SIZES says which."""
    if by == "prompt":
        return request.prompt_tokens
    hint = hint_of(request)
    return hint if by == "hint" else request.prompt_tokens + hint
