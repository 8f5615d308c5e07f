"""A replica on a clock of its own, and the requests that go to it.

Where a fleet's router looks at no replica and nothing else ties them together, each can be
simulated by itself: what it does follows from its requests alone.
"""

from dataclasses import dataclass

import numpy as np
import simpy

from simulator.core.alarm import Alarm
from simulator.core.executor import Executor
from simulator.core.log import REQUEST
from simulator.engine.client import Writer
from simulator.engine.replica import Replica
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Floats, Ints, Workload


@dataclass(slots=True)
class Mail:
    """What one replica gets: requests as columns, in the order in which they reach it."""

    requests: Workload
    ids: Ints  # of the whole workload
    times: Floats  # s, at which they reach the replica
    stamps: Floats  # s, likewise, never the same twice
    hints: Ints | None = None  # predicted output tokens


class Lane:
    """Simulates one replica, as far as is wanted; its log tells what happened."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, mail: Mail, *, leap: bool = True
    ) -> None:
        self.env = simpy.Environment()
        self.replica = Replica(self.env, scheduler, executor, leap=leap)
        self.log = self.replica.log
        self._write = Writer(mail.requests).write
        self._times, self._stamps = mail.times.data, mail.stamps.data
        self._ids = mail.ids.data
        self._hints = None if mail.hints is None else mail.hints.data
        self._index = 0
        self._alarm = Alarm(self.env, self._arrive)
        if len(mail.ids):
            self._alarm.set(self._times[0])

    @property
    def done(self) -> int:
        """Requests that have ended."""
        return len(self.log.request_rows) // REQUEST.itemsize

    def advance(self, until: float | None = None) -> None:
        """Go on until that time, s, or to the end; what happens at that time is left."""
        if until is None or until > self.env.now:
            self.env.run(until)

    def end(self) -> None:
        """Take stock of what only the scheduler knows."""
        if (tier := self.replica.scheduler.blocks.tier) is not None:
            self.log.offloaded = tier.stored

    def _arrive(self, alarm: simpy.Event) -> None:
        times, stamps, submit = self._times, self._stamps, self.replica.submit
        index, total, now = self._index, len(times), self.env.now
        while index < total and times[index] <= now:
            request = self._write(index, stamps[index])
            request.id = self._ids[index]
            if self._hints is not None:
                request.hint = self._hints[index]
            submit(request)
            index += 1
        self._index = index
        if index < total:
            self._alarm.set(times[index])


def reach(workload: Workload) -> tuple[Floats, Floats, Ints]:
    """Give when each request reaches the replicas, its stamp, and the order in which they do.

    As `Client` has it, for requests that wait for nobody.
    """
    times = workload.arrival
    if (front := workload.frontend) is not None:
        free, through = 0.0, np.empty(len(times))
        prompts = workload.prompt_tokens.tolist()
        for index, now in enumerate(times.tolist()):
            free = max(free, now) + (front.per_request + front.per_token * prompts[index])
            through[index] = now + (free - now + front.latency)
        times = through
    order = np.argsort(times, kind="stable")
    stamps, last = times.copy(), -1.0
    if len(times) and not (np.diff(times[order]) > 0).all():
        for index in order.tolist():
            now = float(times[index])
            last = stamps[index] = now if now > last else np.nextafter(last, np.inf)
    return times, stamps, order
