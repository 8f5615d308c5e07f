"""The gateway of a cluster: admission, and timeouts and retries of its clients.

Between the client, who sends each request once and hears once that it has ended, and the fleet.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

import simpy

from simulator.cluster.config import AdmissionConfig, ClientConfig
from simulator.cluster.fleet import Fleet
from simulator.core.alarm import Alarm
from simulator.core.log import SHED, TIMEOUT, Log
from simulator.core.request import Request


class Deadlines:
    """Tries by the time at which patience ends: all wait equally long, so they end in order."""

    def __init__(
        self, env: simpy.Environment, seconds: float, expired: Callable[[int, int], None]
    ) -> None:
        self.env, self.seconds = env, seconds
        self._expired = expired
        self._due: deque[tuple[float, int, int]] = deque()
        self._alarm = Alarm(env, self._ring)

    def add(self, id: int, serial: int) -> None:
        """Let a try expire in a while."""
        when = self.env.now + self.seconds
        self._due.append((when, id, serial))
        if len(self._due) == 1:
            self._alarm.set(when)

    def _ring(self, alarm: simpy.Event) -> None:
        due = self._due
        now = self.env.now
        while due and due[0][0] <= now:
            _, id, serial = due[0]
            self._expired(id, serial)
            due.popleft()  # only now: what that has sent adds to those that wait
        if due:
            self._alarm.set(due[0][0])


class TokenBucket:
    """A token bucket: `rate` per second, at most `burst` at once."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._since = burst, now

    def take(self, now: float) -> bool:
        """Take a token if there is one."""
        self._tokens = min(self._burst, self._tokens + (now - self._since) * self._rate)
        self._since = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class Gateway:
    """Lets requests in, cancels those that take too long, tries again.

    `log` has a row for each request that was given up. `on_finish(request)` is called once for
    every request.
    """

    def __init__(
        self,
        env: simpy.Environment,
        fleet: Fleet,
        admission: AdmissionConfig | None,
        client: ClientConfig | None,
        seed: int,
    ) -> None:
        self.env = env
        self.fleet = fleet
        self.admission = admission or AdmissionConfig()
        self.client = client or ClientConfig()
        self.on_finish: Callable[[Request], None] | None = None
        self.log = Log(0, 1)
        self._random = Random(seed)
        self._serial = 0
        self._in_flight: dict[int, tuple[int, int]] = {}  # by id: the try's serial and its number
        self._hung_up: set[int] = set()  # while they waited for another try
        self._buckets: dict[str, TokenBucket] = {}
        self._deadlines: list[Deadlines] = []
        for seconds, expired in (
            (self.client.timeout, self._timed_out),
            (self.client.ttft_timeout, self._ttft_timed_out),
        ):
            if seconds is not None:
                self._deadlines.append(Deadlines(env, seconds, expired))
        fleet.on_finish = self._finished

    def submit(self, request: Request) -> None:
        """Let a request try for the first time."""
        self._try(request, 0)

    def hang_up(self, request: Request) -> None:
        """Let a request go whose client has hung up, wherever it is."""
        if self._in_flight.pop(request.id, None) is None:
            self._hung_up.add(request.id)  # between two tries
        else:
            self.fleet.hang_up(request)

    def _try(self, request: Request, number: int, _: simpy.Event | None = None) -> None:
        if request.id in self._hung_up:
            self._hung_up.remove(request.id)
            return
        if not self._admits(request):
            self.fleet.counters["refused_tries"] += 1
            self._retry(request, number, SHED)
            return
        self._serial += 1
        self._in_flight[request.id] = self._serial, number
        for deadlines in self._deadlines:
            deadlines.add(request.id, self._serial)
        if number:
            self.fleet.submit_again(request)
        else:
            self.fleet.submit(request)

    def _admits(self, request: Request) -> bool:
        rules = self.admission
        if rules.max_outstanding is not None:
            limit = rules.max_outstanding * max(len(self.fleet.open), 1)
            if request.priority > 0:
                limit = int(limit * rules.shed_from)
            if len(self._in_flight) >= limit:
                return False
        if rules.rate is None:
            return True
        now = self.env.now
        bucket = self._buckets.get(request.client)
        if bucket is None:
            bucket = self._buckets[request.client] = TokenBucket(rules.rate, rules.burst, now)
        return bucket.take(now)

    def _timed_out(self, id: int, serial: int) -> None:
        """Cancel a try that has not ended."""
        live = self._in_flight.get(id)
        if live is not None and live[0] == serial:
            self._give_up(id, live[1])

    def _ttft_timed_out(self, id: int, serial: int) -> None:
        """Cancel a try whose first token has not come."""
        live = self._in_flight.get(id)
        if live is not None and live[0] == serial and not self.fleet.has_first_token(id):
            self._give_up(id, live[1])

    def _give_up(self, id: int, number: int) -> None:
        del self._in_flight[id]
        self.fleet.counters["timed_out_tries"] += 1
        self._retry(self.fleet.cancel(id), number, TIMEOUT)

    def _retry(self, request: Request, number: int, reason: int) -> None:
        """Try once more after a while, or give the request up for good."""
        client = self.client
        if number < client.max_retries:
            self.fleet.counters["retries"] += 1
            wait = client.backoff * client.backoff_factor**number
            wait *= 1.0 + client.jitter * self._random.random()
            Alarm(self.env, partial(self._try, request, number + 1)).set(self.env.now + wait)
            return
        # What was computed is lost with the try: the row says only that and when it was given up.
        self.log.record_unserved(request.id, self.env.now, reason)
        if self.on_finish is not None:
            self.on_finish(request)

    def _finished(self, request: Request) -> None:
        self._in_flight.pop(request.id, None)
        if self.on_finish is not None:
            self.on_finish(request)
