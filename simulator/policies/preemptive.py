"""Policies by which an urgent request takes the place of one that runs."""

from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING

from simulator.core.request import Request
from simulator.util.from_mapping import refuse

if TYPE_CHECKING:
    from simulator.schedulers.vllm.dynamic import Running


class Preemptive:
    """Priority that does not wait: an urgent request displaces the least urgent running one.

    The smaller number is the more urgent, as in vLLM's `priority`, which preempts for want of
    blocks alone. A waiting request displaces a running one whose priority number is larger by
    more than `threshold`. With `ageing`, numbers fall by so much per second since the arrival, of
    those that wait and of those that run alike: the order of two never changes, but a late urgent
    request no longer passes one that came (difference / ageing) seconds before it.
    """

    steady = True

    def __init__(self, threshold: float = 0.0, ageing: float = 0.0) -> None:
        refuse(
            (not 0 <= threshold < inf, f"threshold: must be 0 or more, not {threshold}"),
            (not 0 <= ageing < inf, f"ageing: must be 0 or more, not {ageing}"),
        )
        self.threshold, self.ageing = threshold, ageing

    def key(self, request: Request) -> tuple[float, float, int]:
        return request.priority + self.ageing * request.arrival, request.arrival, request.id

    def displaces(self, head: Request, running: "Running") -> Request | None:
        worst = self.victim(running)
        return worst if self.key(worst)[0] - self.key(head)[0] > self.threshold else None

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=self.key)


class Deadline:
    """Earliest deadline first, where the deadlines are those of the next token.

    Token n (from 0) of a request is due at arrival + ttft + n * tpot (Niyama, Goel et al.,
    arXiv:2503.22562). A waiting request displaces the running one whose next token is due last,
    if that is more than `slack` later than its own: so it takes from those who are ahead of their
    due. `ttft`, `tpot` and `slack` are in ms; `clients` gives some their own, as in
    {name: {ttft: 200, tpot: 30}}. Niyama mixes in the length of what is left, and gives up on
    requests that are late anyway; Headway does neither.
    """

    def __init__(
        self,
        ttft: float = 1000.0,
        tpot: float = 50.0,
        slack: float = 1000.0,
        clients: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        self.default = _seconds("", {"ttft": ttft, "tpot": tpot})
        refuse((not 0 <= slack < inf, f"slack: must be 0 ms or more, not {slack}"))
        self.slack = slack / 1000
        self.clients: dict[str, tuple[float, float]] = {}
        if clients is not None and not isinstance(clients, Mapping):
            raise ValueError(f"clients: must be a mapping of clients, not {clients!r}")
        for client, due in (clients or {}).items():
            if not isinstance(due, Mapping):
                raise ValueError(f"clients.{client}: must be a mapping, not {due!r}")
            self.clients[str(client)] = _seconds(
                f"clients.{client}.", {"ttft": ttft, "tpot": tpot, **due}
            )

    def due(self, request: Request, generated: int) -> float:
        """Say when the next token is due after so many, in seconds of the simulated clock."""
        ttft, tpot = self.clients.get(request.client, self.default)
        return request.arrival + ttft + generated * tpot

    def key(self, request: Request) -> tuple[float, int]:
        return self.due(request, request.generated), request.id

    def displaces(self, head: Request, running: "Running") -> Request | None:
        worst, latest = None, self.key(head)[0] + self.slack
        for request in running:
            due = self.due(request, running.generated(request))
            if due > latest:
                worst, latest = request, due
        return worst

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=self.key)


def _seconds(name: str, due: Mapping[str, object]) -> tuple[float, float]:
    """Check a pair of service levels, in ms; give it in seconds."""
    values = []
    for key, value in due.items():
        if key not in ("ttft", "tpot"):
            raise ValueError(f"{name}{key}: unknown key; there are ttft and tpot")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < inf:  # type: ignore[operator]
            raise ValueError(f"{name}{key}: must be more than 0 ms, not {value!r}")
        values.append(float(value) / 1000)  # type: ignore[arg-type]
    return values[0], values[1]
