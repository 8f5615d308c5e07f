"""Policies: who boards first. A policy is a small class; what it leaves out, vLLM's scheduler
does (budgets, chunks, blocks, preemption of the last admitted: `scheduler.py`).

A policy of your own needs no registration: `scheduling_policy: {policy: my_module:MyPolicy}` in
the scenario, with keyword arguments beside `policy`.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

from simulator.request import Request


class Policy(Protocol):
    """Order of the waiting queue."""

    def key(self, request: Request) -> Any:
        """Rank a waiting request: the smallest key boards first.

        Called when a request arrives and when it returns after a preemption.
        """


class SJF:
    """Shortest job first, by the length of the prompt (the output length is not known)."""

    def key(self, request: Request) -> tuple[int, float]:
        return request.prompt_tokens, request.arrival


class Waiting(Protocol):
    """The waiting queue that a scheduler works with."""

    def __len__(self) -> int: ...

    def add(self, request: Request) -> bool:
        """Take a new request; say whether it is now the head."""

    def put_back(self, request: Request) -> None:
        """Take back a preempted request."""

    def head(self) -> Request: ...

    def take(self) -> Request: ...


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


class Ranked(list[tuple[Any, int, Request]]):
    """Ordered by a policy's key, a heap; equals in order of joining."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        super().__init__()
        self._key = key
        self._joined = count()

    def add(self, request: Request) -> bool:
        heappush(self, (self._key(request), next(self._joined), request))
        return self[0][2] is request

    def put_back(self, request: Request) -> None:
        self.add(request)

    def head(self) -> Request:
        return self[0][2]

    def take(self) -> Request:
        return heappop(self)[2]
