"""Policies: who boards first. A policy is a small class; what it leaves out, vLLM's scheduler
does (budgets, chunks, blocks, preemption of the last admitted: `scheduler.py`).

A policy of your own needs no registration: `scheduling_policy: {policy: my_module:MyPolicy}` in
the scenario, with keyword arguments beside `policy`.
"""

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Protocol

from simulator.request import Request


class Policy(Protocol):
    """Order of the waiting queue.

    A policy may also have `victim(running)`, which picks from the running requests, in order of
    admission, the one to preempt when blocks run out; without it the last admitted goes.
    """

    def key(self, request: Request) -> Any:
        """Rank a waiting request: the smallest key boards first.

        Called when a request arrives and when it returns after a preemption.
        """


class SJF:
    """Shortest job first, by the length of the prompt (the output length is not known)."""

    def key(self, request: Request) -> tuple[int, float]:
        return request.prompt_tokens, request.arrival


class Priority:
    """vLLM's `priority`: the smaller number first, among equals the earlier arrival.

    Urgent arrivals preempt nobody. Only when a running request lacks a block the least urgent one
    leaves, which may be the very request that lacks it.
    """

    def key(self, request: Request) -> tuple[int, float, int]:
        return request.priority, request.arrival, request.id

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=_urgency)  # of exact equals the first


def _urgency(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival


class Waiting(Protocol):
    """The waiting queue that a scheduler works with."""

    def __len__(self) -> int: ...

    def add(self, request: Request) -> bool:
        """Take a new request; say whether it is now the head."""

    def put_back(self, request: Request) -> None:
        """Take back a preempted request."""

    def head(self) -> Request: ...

    def take(self) -> Request: ...

    def remove(self, request: Request) -> None: ...


class Fifo(deque[Request]):
    """First come, first served; a preempted request goes to the front (vLLM's `fcfs`)."""

    def add(self, request: Request) -> bool:
        self.append(request)
        return len(self) == 1

    def put_back(self, request: Request) -> None:
        self.appendleft(request)

    def head(self) -> Request:
        return self[0]

    def take(self) -> Request:
        return self.popleft()


class Ranked:
    """Ordered by a policy's key, a heap; equals in order of joining."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._heap: list[tuple[Any, int, Request]] = []
        self._key = key
        self._joined = count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> bool:
        heappush(self._heap, (self._key(request), next(self._joined), request))
        return self._heap[0][2] is request

    def put_back(self, request: Request) -> None:
        self.add(request)

    def head(self) -> Request:
        return self._heap[0][2]

    def take(self) -> Request:
        return heappop(self._heap)[2]

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[2] is not request]
        heapify(self._heap)
