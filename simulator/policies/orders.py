"""Orders that need more than the prompt: response ratio, boost, remaining length, feedback queues.

Sizes are in tokens (`policies.SIZES`): prompts and answers are counted alike, though a prompt's
tokens are cheaper, so where the difference matters `by: hint` is the better size.
"""

from collections.abc import Iterable
from math import exp, expm1, inf, log, log1p
from typing import TYPE_CHECKING, Any

from simulator.core.request import Request
from simulator.policies.policy import check_by, hint_of, size_of
from simulator.util.from_mapping import refuse

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from simulator.schedulers.vllm.dynamic import Running


class HRRN:
    """Highest response ratio next (Brinch Hansen, "Short-term scheduling in multiprogramming
    systems", SOSP 1971): whoever has the largest (waited + size) / size boards first.

    The ratio grows faster for a short job, but for a long one it grows as well: nobody starves.
    In units of size the ratio has the order of waited / size, so it needs no seconds per token.
    As in the original, the choice is made when a seat or blocks become free, and preempts nobody.
    """

    def __init__(self, by: str = "prompt") -> None:
        check_by(by)
        self.by = by
        self.needs_hint = by != "prompt"

    def rank(self, waiting: Any, now: float) -> "npt.NDArray[np.float64]":
        if self.by == "prompt":
            size = waiting.prompt_tokens
        else:
            size = waiting.hint + (waiting.prompt_tokens if self.by == "total" else 0.0)
        ratio: npt.NDArray[np.float64] = (waiting.arrival - now) / size
        return ratio


class Boost:
    """Bound the tail: first come, first served by a boosted arrival time, earlier for small jobs.

    The gamma-Boost of Yu and Scully ("Strongly tail-optimal scheduling in the light-tailed
    M/G/1", SIGMETRICS 2024): a job of s seconds counts as having come
    log(1 / (1 - exp(-gamma s))) / gamma seconds before it did. Their optimal gamma is the rate at
    which the tail of the waiting time of first come, first served decays; a large one is close to
    FCFS, a small one to shortest job first. A short job overtakes those who came up to its boost
    before it and nobody else, so that the longest wait stays bounded. Headway boards in that order
    and preempts nobody; a size is `token_time` seconds per token.
    """

    def __init__(self, by: str = "prompt", gamma: float = 0.1, token_time: float = 1e-3) -> None:
        check_by(by)
        refuse(
            (not 0 < gamma < inf, f"gamma: must be more than 0 per second, not {gamma}"),
            (not 0 < token_time < inf, f"token_time: must be more than 0 s, not {token_time}"),
        )
        self.by, self.gamma, self.token_time = by, gamma, token_time
        self.needs_hint = by != "prompt"

    def key(self, request: Request) -> float:
        x = self.gamma * self.token_time * size_of(request, self.by)
        # -log(1 - exp(-x)), each branch where it loses no digits
        boost = -log(-expm1(-x)) if x < 1 else -log1p(-exp(-x))
        return request.arrival - boost / self.gamma


class SRPT:
    """Shortest remaining predicted length first, preemptive.

    A waiting request displaces the running one with the most predicted tokens to go, if its own
    are fewer by more than `margin`. Who has said more than `limit` times its prediction is not
    displaced any more: the recomputation would cost too much (TRAIL, Shahout et al.,
    arXiv:2410.01035, whose C is `limit`; 1 is SRPT itself while predictions hold). TRAIL predicts
    anew at every token; here the first prediction stands, and what outlives it has 0 to go.
    """

    steady = True
    needs_hint = True

    def __init__(self, margin: int = 0, limit: float = 1.0) -> None:
        refuse(
            (margin < 0, f"margin: must be 0 tokens or more, not {margin}"),
            (not 0 <= limit < inf, f"limit: must be 0 or more, not {limit}"),
        )
        self.margin, self.limit = margin, limit

    def key(self, request: Request) -> tuple[int, float]:
        return max(0, hint_of(request) - request.generated), request.arrival

    def displaces(self, head: Request, running: "Running") -> Request | None:
        worst, most = None, max(0, hint_of(head) - head.generated) + self.margin
        for request in running:
            hint, out = hint_of(request), running.generated(request)
            if hint - out > most and out <= self.limit * hint:
                worst, most = request, hint - out
        return worst

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=self.key)


class MLFQ:
    """Skip-join multi-level feedback queues (FastServe, Wu et al., arXiv:2305.05920).

    Level l has a quantum of quantum * ratio ** l steps. A request joins the first level whose
    quantum its prompt fits into (skip-join), at `prefill_rate` prompt tokens to a step, goes down
    a level when it has used up the quantum of the one it is in, and is displaced by a waiting
    request of a higher level (a smaller l). Within a level the order is that of joining the queue.
    Who has waited for `starvation` seconds is promoted to the highest level, with a new quantum.

    FastServe measures quanta in time (10 ms times 2 ** l, starvation 3 s, in its artifact), with a
    profile of the model; a policy here has no clock for steps, so they are counted. FastServe
    looks for the starved every 1,000 steps, Headway at every one. It chooses the whole batch anew
    each step and copies KV in advance; here one request per step displaces others.
    """

    def __init__(
        self,
        quantum: int = 16,
        ratio: float = 2.0,
        levels: int = 6,
        prefill_rate: int = 256,
        starvation: float = 3.0,
    ) -> None:
        refuse(
            (quantum < 1, f"quantum: must be 1 step or more, not {quantum}"),
            (not 1 <= ratio <= 1000, f"ratio: must be from 1 to 1000, not {ratio}"),
            (not 1 <= levels <= 64, f"levels: must be from 1 to 64, not {levels}"),
            (prefill_rate < 1, f"prefill_rate: must be 1 token or more, not {prefill_rate}"),
            (not starvation > 0, f"starvation: must be more than 0 s, not {starvation}"),
        )
        self.quanta = [quantum * ratio**level for level in range(levels)]
        self.prefill_rate = prefill_rate
        self.patience = starvation
        self._promoted: dict[int, int] = {}  # by id, tokens that had come out then

    def level(self, request: Request, generated: int) -> int:
        """Give the level of a request after so many tokens, 0 being the highest."""
        last = len(self.quanta) - 1
        level, used = 0, 0.0
        if request.id in self._promoted:
            used = generated - self._promoted[request.id]
        else:
            prompt = request.prompt_tokens / self.prefill_rate
            while level < last and self.quanta[level] < prompt:
                level += 1
            used = prompt + generated
        while level < last and used >= self.quanta[level]:
            used -= self.quanta[level]
            level += 1
        return level

    def key(self, request: Request) -> int:
        return self.level(request, request.generated)

    def promote(self, request: Request) -> None:
        self._promoted[request.id] = request.generated

    def displaces(self, head: Request, running: "Running") -> Request | None:
        worst, lowest = None, self.key(head) + 1
        for request in running:
            level = self.level(request, running.generated(request))
            if level >= lowest:
                worst, lowest = request, level
        return worst

    def victim(self, running: Iterable[Request]) -> Request:
        # Of equals the last admitted: were it the first, two could throw each other out for ever.
        return max(running, key=lambda request: (self.key(request), request.seat))
