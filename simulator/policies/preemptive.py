"""Policies by which an urgent request takes the place of one that runs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated

from simulator.core.request import Request
from simulator.policies.policy import Factor, PerSecond, Priorities, RunningView, Tokens, hint_of
from simulator.util.errors import MappingError, field_errors
from simulator.util.from_mapping import check_range, raise_if, read


class Preemptive:
    """As priority, but a waiting request displaces a running one whose number is larger by more
    than `threshold`; numbers fall by `ageing` per second.

    The smaller number is the more urgent, as in vLLM's `priority`, which preempts for want of
    blocks alone. A waiting request displaces a running one whose priority number is larger by
    more than `threshold`. With `ageing`, numbers fall by so much per second since the arrival, of
    those that wait and of those that run alike: the order of two never changes, but a late urgent
    request no longer passes one that came (difference / ageing) seconds before it.
    """

    reads = "priority"
    steady = True
    trials = ({"threshold": 1, "ageing": 0.7},)

    def __init__(self, threshold: Priorities = 0.0, ageing: PerSecond = 0.0) -> None:
        raise_if(
            (not 0 <= threshold < inf, "threshold", f"must be 0 or more, not {threshold}"),
            (not 0 <= ageing < inf, "ageing", f"must be 0 or more, not {ageing}"),
        )
        self.threshold, self.ageing = threshold, ageing

    def key(self, request: Request) -> tuple[float, ...]:
        return request.priority + self.ageing * request.arrival, request.arrival, request.id

    def displaces(self, head: Request, running: RunningView) -> Request | None:
        worst = self.victim(running)
        return worst if self.key(worst)[0] - self.key(head)[0] > self.threshold else None

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=self.key)


@dataclass(frozen=True)
class Due:
    """How long a client waits for its first token, and for each further one, ms."""

    ttft: Annotated[float, "ms"]
    tpot: Annotated[float, "ms"]

    def __post_init__(self) -> None:
        each = (("ttft", self.ttft), ("tpot", self.tpot))
        raise_if(
            *((not 0 < ms < inf, key, f"must be more than 0 ms, not {ms}") for key, ms in each)
        )

    @property
    def seconds(self) -> tuple[float, float]:
        """The same in seconds."""
        return self.ttft / 1000, self.tpot / 1000


class Deadline:
    """Earliest deadline first: token n is due `ttft` + n `tpot` ms after the arrival, by client
    as `clients: {name: {ttft: 200, tpot: 30}}`. It displaces a request whose next token is due
    more than `slack` ms later.

    Token n (from 0) of a request is due at arrival + ttft + n * tpot (Niyama, Goel et al.,
    arXiv:2503.22562). A waiting request displaces the running one whose next token is due last,
    if that is more than `slack` later than its own: so it takes from those who are ahead of their
    due. `ttft`, `tpot` and `slack` are in ms; `clients` gives some their own, as in
    {name: {ttft: 200, tpot: 30}}. Niyama mixes in the length of what is left, and gives up on
    requests that are late anyway; Headway does neither.
    """

    reads = "deadline"
    trials = (
        {"ttft": 2000.0, "tpot": 700.0, "slack": 500.0},
        {"ttft": 900.0, "clients": {"a": {"ttft": 50, "tpot": 900}}},
    )

    def __init__(
        self,
        ttft: Annotated[float, "ms"] = 1000.0,
        tpot: Annotated[float, "ms"] = 50.0,
        slack: Annotated[float, "ms"] = 1000.0,
        clients: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        self.default = Due(ttft, tpot).seconds
        raise_if((not 0 <= slack < inf, "slack", f"must be 0 ms or more, not {slack}"))
        self.slack = slack / 1000
        usual = {"ttft": ttft, "tpot": tpot}
        try:
            own = read(dict[str, dict[str, object]], clients or {})
            found: dict[str, Due] = read(
                dict[str, Due], {str(name): usual | own[name] for name in own}
            )
        except ValueError as error:
            raise MappingError(field_errors(("clients",), error)) from None
        self.clients = {name: due.seconds for name, due in found.items()}

    def due(self, request: Request, generated: int) -> float:
        """Say when the next token is due after so many, in seconds of the simulated clock."""
        ttft, tpot = self.clients.get(request.client, self.default)
        return request.arrival + ttft + generated * tpot

    def key(self, request: Request) -> tuple[float, int]:
        return self.due(request, request.generated), request.id

    def displaces(self, head: Request, running: RunningView) -> Request | None:
        worst, latest = None, self.key(head)[0] + self.slack
        due_of, generated = self.due, running.generated
        for request in running:
            due = due_of(request, generated(request))
            if due > latest:
                worst, latest = request, due
        return worst

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=self.key)


class SRPT:
    """The shortest remaining predicted length first. It displaces a running request with more
    than `margin` more tokens to go, unless that has generated `limit` times its prediction.

    A waiting request displaces the running one with the most predicted tokens to go, if its own
    are fewer by more than `margin`. Who has said more than `limit` times its prediction is not
    displaced any more: the recomputation would cost too much (TRAIL, Shahout et al.,
    arXiv:2410.01035, whose C is `limit`; 1 is SRPT itself while predictions hold). TRAIL predicts
    anew at every token; here the first prediction stands, and what outlives it has 0 to go.
    """

    steady = True
    needs_hint = True
    trials = ({"margin": 3, "limit": 0.5},)

    def __init__(self, margin: Tokens = 0, limit: Factor = 1.0) -> None:
        raise_if(
            (margin < 0, "margin", f"must be 0 tokens or more, not {margin}"),
            (not 0 <= limit < inf, "limit", f"must be 0 or more, not {limit}"),
        )
        self.margin, self.limit = margin, limit

    def key(self, request: Request) -> tuple[int, float]:
        return max(0, hint_of(request) - request.generated), request.arrival

    def displaces(self, head: Request, running: RunningView) -> Request | None:
        worst, most = None, max(0, hint_of(head) - head.generated) + self.margin
        generated, limit = running.generated, self.limit
        for request in running:
            hint = request.hint
            if hint is None:
                hint = hint_of(request)
            if hint > most:
                out = generated(request)
                if hint - out > most and out <= limit * hint:
                    worst, most = request, hint - out
        return worst

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=self.key)


class MLFQ:
    """Skip-join feedback queues: level l has `quantum` `ratio` ** l steps; `prefill_rate` prompt
    tokens count as a step. It displaces requests of lower levels. After a wait of `starvation`
    seconds a request goes to the highest level.

    Skip-join multi-level feedback queues (FastServe, Wu et al., arXiv:2305.05920).

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

    trials = (
        {"quantum": 2, "prefill_rate": 4, "levels": 4},
        {"quantum": 1, "ratio": 3, "prefill_rate": 2, "starvation": 9},
    )

    def __init__(
        self,
        quantum: Annotated[int, "steps"] = 16,
        ratio: Factor = 2.0,
        levels: Annotated[int, "levels"] = 6,
        prefill_rate: Annotated[int, "prompt tokens that count as one step"] = 256,
        starvation: Annotated[float, "s"] = 3.0,
    ) -> None:
        raise_if(
            (quantum < 1, "quantum", f"must be 1 step or more, not {quantum}"),
            check_range("ratio", ratio, 1, 1000),
            check_range("levels", levels, 1, 64),
            (prefill_rate < 1, "prefill_rate", f"must be 1 token or more, not {prefill_rate}"),
            (not starvation > 0, "starvation", f"must be more than 0 s, not {starvation}"),
        )
        self.quanta = [quantum * ratio**level for level in range(levels)]
        self.prefill_rate = prefill_rate
        self.patience = starvation
        self._promoted: dict[int, int] = {}  # by id, tokens that had come out then

    def level(self, request: Request, generated: int) -> int:
        """Return the level of a request after so many tokens, 0 being the highest."""
        quanta = self.quanta
        last = len(quanta) - 1
        level, used = 0, 0.0
        if request.id in self._promoted:
            used = generated - self._promoted[request.id]
        else:
            prompt = request.prompt_tokens / self.prefill_rate
            while level < last and quanta[level] < prompt:
                level += 1
            used = prompt + generated
        while level < last and used >= quanta[level]:
            used -= quanta[level]
            level += 1
        return level

    def key(self, request: Request) -> int:
        return self.level(request, request.generated)

    def promote(self, request: Request) -> None:
        self._promoted[request.id] = request.generated

    def displaces(self, head: Request, running: RunningView) -> Request | None:
        worst, lowest = None, self.key(head) + 1
        level_of, generated = self.level, running.generated
        for request in running:
            level = level_of(request, generated(request))
            if level >= lowest:
                worst, lowest = request, level
        return worst

    def victim(self, running: Iterable[Request]) -> Request:
        # Of equals the last admitted: were it the first, two could throw each other out for ever.
        return max(running, key=lambda request: (self.key(request), request.admission))
