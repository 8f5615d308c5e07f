"""A consumer of KV caches in a case of its own, without producers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from simulator.core.request import Request, Step
from simulator.schedulers.vllm.kv_roles import Consumer


class Pulling(Consumer):
    """A consumer that hears of its copies with the outcome of a step, or every millisecond.

    `pull_time` is what a block takes on its one link, ns.
    """

    pull_time = 0

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.traits = replace(self.traits, polls=True)  # type: ignore[misc]
        self.on_ask = self._begin
        self._link_free = self._heard = 0.0
        self._copies: deque[tuple[float, Request]] = deque()
        self._unheard = False

    def _begin(self, request: Request, found: int) -> None:
        count = -(-request.known // self.blocks.block_size) - found
        self._link_free = max(self._link_free, self.now) + count * self.pull_time
        self._copies.append((self._link_free, request))

    @property
    def copies(self) -> bool:
        return bool(self._copies)

    def start(self, request: Request) -> None:
        super().start(request)
        if not request.preemptions:
            request.cached = request.known - 1  # as vLLM counts

    def schedule(self, now: float) -> Step:
        while self._copies and self._copies[0][0] <= self._heard:
            self.arrived(self._copies.popleft()[1])
        step = super().schedule(now)
        if self._unheard:
            self._heard, self._unheard = now, False
        if not step.decodes and not step.prefills:
            self._unheard = self.traits.overlaps
            if not self.traits.overlaps:
                self._heard = now
        return step

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        self._heard = ends[-1]
        return super().commit(step, ends)
