"""Whoever sends the requests: each at its time, behind `max_concurrency`, turn after turn."""

from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf, nan, nextafter

import numpy as np
import simpy

from simulator.core.alarm import Alarm
from simulator.core.request import Request
from simulator.policies.predictor import Predictor
from simulator.workload.workload import Workload


class Writer:
    """Writes a workload's requests, one at a time."""

    def __init__(self, workload: Workload) -> None:
        # Plain numbers come out of a memoryview faster than out of an array.
        self.prompts = workload.prompt_tokens.data
        self._outputs = workload.output_tokens.data
        self._client, self._priority = workload.client, workload.priority
        self._segments = workload.segments

    def write(self, index: int, arrival: float) -> Request:
        """Write a request that reaches the engine then, s."""
        return Request(
            index,
            arrival,
            self.prompts[index],
            self._outputs[index],
            "" if self._client is None else self._client[index],
            0 if self._priority is None else int(self._priority[index]),
            None if self._segments is None else self._segments[index],
        )


class Client:
    """Sends a workload's requests through `submit`; `finished` must be told of their ends.

    Under `max_concurrency` a request whose time has come waits here for its turn, as behind the
    semaphore of `vllm bench serve`. A session's next turn comes `delay` seconds after the end of
    the one before, also when that one was rejected. A `predictor` gives each request its hint as
    it is sent.
    """

    def __init__(
        self,
        env: simpy.Environment,
        workload: Workload,
        submit: Callable[[Request], None],
        predictor: Predictor | None = None,
    ) -> None:
        self.env = env
        self.workload = workload
        self.submit = submit
        self.sent = array("d", [nan]) * len(workload)  # s, when each request went to the engine
        self.predictor = predictor
        # Predicted output tokens of each request; 0: it was never sent.
        self.hints = None if predictor is None else array("q", [0]) * len(workload)
        self.done = 0  # requests that have ended
        self._flying = 0
        self._free = 0.0  # s, when the frontend has passed on all that was sent
        self._stamp = -1.0  # the last request's arrival at the engine, s
        self._limit = workload.max_concurrency or len(workload) + 1
        self._held: deque[int] = deque()
        self._sending = False
        self._writer = Writer(workload)
        self._next: dict[int, list[int]] = {}
        if workload.after is not None:
            for turn in np.flatnonzero(workload.after >= 0).tolist():
                self._next.setdefault(int(workload.after[turn]), []).append(turn)
        self._times = workload.arrival.data
        self._index = 0  # of the next to arrive
        self._alarm = Alarm(env, self._arrive)
        self._alarm.set(env.now)

    def _arrive(self, alarm: simpy.Event) -> None:
        """Offer the requests whose time has come, sleep until the next one's."""
        times, total = self._times, len(self.sent)
        now = self.env.now
        index = self._index
        while index < total and not times[index] > now:
            if times[index] == times[index]:  # NaN: a later turn
                self._offer(index)
            index += 1
        self._index = index
        if index < total:
            self._alarm.set(times[index])

    def _offer(self, index: int) -> None:
        """Send a request whose time has come, after those that wait already."""
        self._held.append(index)
        if not self._sending:
            self._send_held()

    def _send_held(self) -> None:
        """Send as many as may be sent; one that is rejected at once lets the next go."""
        self._sending = True
        while self._held and self._flying < self._limit:
            self._send(self._held.popleft())
        self._sending = False

    def _send(self, index: int) -> None:
        self._flying += 1
        self.sent[index] = now = self.env.now
        frontend = self.workload.frontend
        if frontend is None:
            self._submit(index)
            return
        work = frontend.per_request + frontend.per_token * self._writer.prompts[index]
        self._free = max(self._free, now) + work
        arrival = self.env.timeout(self._free - now + frontend.latency)
        arrival.callbacks.append(partial(self._pass_on, index))

    def _pass_on(self, index: int, _: simpy.Event) -> None:
        """Hand over a request that has come through the frontend."""
        self._submit(index)

    def _submit(self, index: int) -> None:
        """Hand a request to the engine, now."""
        now = self.env.now
        # Engines stamp requests by a clock that never shows the same time twice. Of two that
        # agreed in priority and arrival, vLLM's scheduler would undo the work for ever.
        self._stamp = now if now > self._stamp else nextafter(self._stamp, inf)
        request = self._writer.write(index, self._stamp)
        if self.hints is not None and self.predictor is not None:
            request.hint = self.hints[index] = self.predictor.predict(request)
        self.submit(request)

    def finished(self, request: Request) -> None:
        """Take note that a request has ended: its seat at the client is free."""
        self.done += 1
        self._flying -= 1
        if self.predictor is not None:
            self.predictor.observe(request)
        for turn in self._next.pop(request.id, ()):
            delay = 0.0 if self.workload.delay is None else float(self.workload.delay[turn])
            if delay > 0:
                later = self.env.timeout(delay)
                later.callbacks.append(partial(self._take_turn, turn))
            else:
                self._offer(turn)
        if self._held and not self._sending:
            self._send_held()

    def _take_turn(self, turn: int, _: simpy.Event) -> None:
        """Offer a turn after its think time."""
        self._offer(turn)
