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

    def pop(self) -> Request: ...


class Fifo:
    """First come, first served; a preempted request goes to the front (vLLM's `fcfs`)."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request) -> bool:
        self._queue.append(request)
        return len(self._queue) == 1

    def put_back(self, request: Request) -> None:
        self._queue.appendleft(request)

    def head(self) -> Request:
        return self._queue[0]

    def pop(self) -> Request:
        return self._queue.popleft()


class Ranked:
    """Ordered by a policy's key; equals in order of joining."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, Request]] = []
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

    def pop(self) -> Request:
        return heappop(self._heap)[2]
