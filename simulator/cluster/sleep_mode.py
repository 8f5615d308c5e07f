"""Models that share GPUs: one of them is awake, the others sleep (vLLM's sleep mode).

Each set of GPUs has a server of every model. vLLM's `/sleep?level=1` copies the weights to host
memory, `level=2` drops them, and both lose the KV cache; `/wake_up` copies them back, or reads them
from the disk (`reload_weights`). With `mode=wait` a server ends what it has before it sleeps.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import simpy

from simulator.cluster.config import SleepModeConfig
from simulator.cluster.lifecycle import Lifecycle
from simulator.cluster.routers import Target
from simulator.core.alarm import Alarm
from simulator.core.request import Request

SLEEP_S = {1: 0.05, 2: 0.25}
WAKE_S = {1: 0.2, 2: 0.55}
"""What falling asleep, and waking up, take besides the bytes, by the level; see `SleepTimes`."""


class SleepTimes(NamedTuple):
    """How long a server takes to fall asleep, and to wake up, s.

    The defaults are of vLLM 0.11's figures for A100 (blog, "Zero-Reload Model Switching with vLLM
    Sleep Mode", 2025): tests/cluster/test_sleep_mode.py has them.
    """

    sleep: float
    wake: float

    @classmethod
    def of(cls, block: SleepModeConfig, weights: float, gpus: int) -> "SleepTimes":
        """Work them out for a server with so many bytes of weights on each of its GPUs."""
        sleep, wake = SLEEP_S[block.level], WAKE_S[block.level]
        if block.level == 2:
            return cls(sleep, wake + weights * gpus / (block.disk_bandwidth * 1e9))
        copied = weights / (block.bandwidth * 1e9)
        return cls(sleep + copied, wake + copied)


class SleepMode:
    """Decides which of the servers on each set of GPUs is awake.

    A request whose model sleeps waits at the router. Its model takes the GPUs of one that has had
    nothing to do for `idle_timeout`, of several the one idle longest. If there is none within
    `max_wait` it takes those of the least busy, which ends what it has and gets nothing more. Of
    several models the one whose first request has waited longest comes first, and it serves all
    that waited before it sleeps again, so nobody waits for ever. A model is awake on one set.
    """

    def __init__(
        self,
        life: Lifecycle,
        block: SleepModeConfig,
        servers: Mapping[str, Sequence[Target]],
        times: Mapping[str, SleepTimes],
    ) -> None:
        """`servers` has those of each model, one for each set; `times` are by group."""
        self.life, self.block = life, block
        self._servers, self._times = servers, times
        self._awake = [
            next(each[k] for each in servers.values() if life.states[each[k].index] != "off")
            for k in range(block.replicas)
        ]
        self._idle_since = [0.0] * block.replicas
        self._waiting: dict[str, float] = {}  # models, and since when, s: first come first
        self._next: dict[int, Target] = {}  # who takes over a set whose model drains
        self._models = {each[0].group: model for model, each in servers.items()}
        self._armed, self._alarm = inf, Alarm(life.env, self._look)
        self._serve_idle = life.fleet.on_idle
        life.fleet.counters["switches"] = 0
        life.fleet.sleeps = self._sleeps
        life.fleet.on_idle = self._idle
        life.on_off = self._take_over

    def _state(self, model: str) -> str:
        """Return the state of the model's server that has GPUs; `off`: it sleeps on all sets."""
        states = (self.life.states[target.index] for target in self._servers[model])
        return next((state for state in states if state != "off"), "off")

    def _sleeps(self, request: Request) -> bool:
        """Say whether a request has to wait for its model, which is told to wake up then."""
        model = request.model
        if model not in self._servers or (state := self._state(model)) == "up":
            return False
        if state != "starting" and model not in self._waiting:
            self._waiting[model] = self.life.env.now
            self._look_at(self.life.env.now)
        return True

    def _idle(self, target: Target) -> None:
        if target in self._awake:
            self._idle_since[self._awake.index(target)] = self.life.env.now
        assert self._serve_idle is not None
        self._serve_idle(target)
        if self._waiting:
            self._look_at(self.life.env.now)

    def _look_at(self, when: float) -> None:
        """Look at `when`, or before; never in the midst of what happens now."""
        if when < self._armed:
            self._armed = when
            self._alarm = Alarm(self.life.env, self._look)  # an old one comes off to no effect
            self._alarm.set(when)

    def _look(self, alarm: simpy.Event) -> None:
        """Give GPUs to the models that wait, as far as it is time."""
        if alarm is not self._alarm:
            return
        self._armed, now, later = inf, self.life.env.now, inf
        coming, draining = {target.group for target in self._next.values()}, list[int]()
        for model, since in self._waiting.items():
            group = self._servers[model][0].group
            if group in coming or self._state(model) != "off":
                continue
            place, when = self._find_set(now, since + self.block.max_wait)
            if place is None:
                later = min(later, when)
                continue
            self._next[place] = self._servers[model][place]
            draining.append(place)
        for place in draining:
            self.life.drain(self._awake[place])
        self._look_at(later)

    def _find_set(self, now: float, patience: float) -> tuple[int | None, float]:
        """Find GPUs for a model whose patience ends then; else say when to look again."""
        states = [self.life.states[target.index] for target in self._awake]
        up = [k for k, state in enumerate(states) if state == "up" and k not in self._next]
        idle = [k for k in up if not self._awake[k].outstanding]
        since, late = self._idle_since, now >= patience
        if ready := [k for k in idle if late or since[k] + self.block.idle_timeout <= now]:
            return min(ready, key=since.__getitem__), now
        if up and late:
            return min(up, key=lambda k: (self._awake[k].outstanding, k)), now
        due = [since[k] + self.block.idle_timeout for k in idle]
        due += [since[k] for k, state in enumerate(states) if late and state == "starting"]
        return None, min(due if late else [*due, patience], default=inf)

    def _take_over(self) -> None:
        """Wake the servers whose GPUs are free now."""
        for place, target in [*self._next.items()]:
            old = self._awake[place]
            if self.life.states[old.index] == "off":
                delay = self._times[old.group].sleep + self._times[target.group].wake
                del self._next[place], self._waiting[self._models[target.group]]
                self._awake[place] = target
                self._idle_since[place] = self.life.env.now + delay
                self.life.fleet.counters["switches"] += 1
                self.life.order(target, delay)


def awake_first(groups: Sequence[str], name: str, place: int) -> bool:
    """Say whether a group is awake on a set of GPUs at first: those that share come in turn."""
    return name not in groups or groups[place % len(groups)] == name
