"""The wall clock in the place of a simulation's own: events happen when they are due, or late."""

import asyncio
import time
from collections import deque
from itertools import islice
from math import inf

import numpy as np
import simpy

EVENTS_AT_ONCE = 2000  # then sockets have their turn
KEPT = 65536  # delays of steps that are remembered
USUAL = 32  # of them that say what is usual now


class RealTimeClock:
    """Drives an environment `speed` times as fast as the wall clock.

    Where this process is late the simulation is not: its decisions stay those of an engine on time,
    and only what is told of them comes late. `lateness` tells by how much.
    """

    def __init__(self, env: simpy.Environment, speed: float = 1.0) -> None:
        self.env = env
        self.speed = speed
        self.delays: deque[float] = deque(maxlen=KEPT)  # wall seconds, of the last steps
        self.first_delays: deque[float] = deque(maxlen=KEPT)  # of the last requests' first tokens
        self._origin = time.perf_counter() - env.now / speed
        self._wake = asyncio.Event()
        self._stopped: float | None = None  # simulated s

    @property
    def now(self) -> float:
        """Simulated seconds by the wall clock; the environment may be behind."""
        if self._stopped is not None:
            return self._stopped
        return (time.perf_counter() - self._origin) * self.speed

    def stop(self) -> None:
        """Let time stand still: what comes after the end of serving is no part of the run."""
        self._stopped = self.now

    def note_delay(self, due: float, *, first: bool = False) -> None:
        """Write down that what was due at a simulated time, s, is done now."""
        delays = self.first_delays if first else self.delays
        delays.append(max(self.now - due, 0.0) / self.speed)

    def usual_delay(self) -> float:
        """Return the median delay of the last steps, simulated s."""
        last = sorted(islice(reversed(self.delays), USUAL))
        return last[len(last) // 2] * self.speed if last else 0.0

    def lateness(self, *, first: bool = False) -> dict[str, float]:
        """Return percentiles of the last steps' delays, wall ms; or of `first` tokens'."""
        delays = np.array((self.first_delays if first else self.delays) or [0.0]) * 1e3
        return {f"p{q}": float(np.percentile(delays, q)) for q in (50, 90, 99, 100)}

    def catch_up(self, most: int = EVENTS_AT_ONCE) -> bool:
        """Let happen what is due, `most` events at most; say whether that was all."""
        env, now = self.env, self.now
        for _ in range(most):
            if env.peek() > now:
                return True
            env.step()
        return False

    def advance(self) -> None:
        """Bring the environment to this very moment: something comes from outside."""
        env, now = self.env, self.now
        while env.peek() <= now:
            env.step()
        if now > env.now:
            mark = env.timeout(now - env.now)
            while not mark.processed:
                env.step()
        self._wake.set()

    async def run(self) -> None:
        """Sleep until the next event is due, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = self.env.peek()
            wait = (due - self.now) / self.speed
            self._wake.clear()
            if wait <= 0:
                await asyncio.sleep(0)
            elif due == inf:
                await self._wake.wait()
            else:
                alarm = loop.call_later(wait, self._wake.set)
                await self._wake.wait()
                alarm.cancel()
            self.catch_up()
