"""Fault injection: replicas slowed, hung, killed and restarted; answers that fail by chance."""

from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, create_model

from headway.twin.live_engine import LOST, LiveEngine
from simulator.core.alarm import Alarm
from simulator.core.executor import Executor, Timing
from simulator.core.request import Step
from simulator.util.errors import HeadwayError

FAILURES = (
    "rate_limit",
    "server_error",
    "context_length",
    "invalid_request",
    "invalid_api_key",
    "model_not_found",
)
"""Ways to fail, by llm-d-inference-sim's names, each with its words in api/refusals.json."""
FOREVER = 1e9  # s
SLOWEST = 1e6


SHARES: Any = dict.fromkeys(FAILURES, (Annotated[float, Field(ge=0, le=1, strict=True)], 0.0))
Rates = create_model("Rates", __config__=ConfigDict(extra="forbid"), **SHARES)
"""The share of requests that fail in each way; ways that are left out are off."""


class FaultyExecutor:
    """An executor that can be made slow, and hang in its next step."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.factor = 1.0
        self.stall = 0.0  # s, of the next step

    def execute(self, step: Step) -> Timing:
        """Say what a step takes."""
        told = self.inner.execute(step)
        seconds, self.stall = told.seconds * self.factor + self.stall, 0.0
        return Timing(seconds, told.swap, told.features, told.host)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class FaultInjector:
    """What is done to the replicas of a fleet, by their numbers from 0 on."""

    def __init__(self, engine: LiveEngine) -> None:
        self.engine, self.fleet, self.life = engine, engine.fleet, engine.life
        self.executors: list[list[FaultyExecutor]] = [[] for _ in self.fleet.targets]
        self.hangs: set[int] = set()
        self._repairs: dict[int, int] = {}  # orders to come back; the last one counts
        for core, target in zip(self.fleet.cores, self.fleet.owners, strict=True):
            core.executor = executor = FaultyExecutor(core.executor)
            self.executors[target.index].append(executor)

    def slow(self, number: int, factor: float) -> None:
        """Let steps take `factor` times as long, from the next one on."""
        for executor in self.executors[number]:
            executor.factor = factor

    def hang(self, number: int, seconds: float | None) -> None:
        """Let the next step take so much longer; None: it never ends."""
        if seconds is None:
            self.hangs.add(number)
        for executor in self.executors[number]:
            executor.stall = FOREVER if seconds is None else seconds

    def kill(self, number: int) -> None:
        """Let a replica fail, with all requests that are there: they end as lost.

        It does not come back by itself.
        """
        engine, target = self.engine, self.fleet.targets[number]
        owners = dict(zip(engine.cores, self.fleet.owners, strict=True))
        for stream in [*engine.streams.values()]:
            if stream.core is not None and owners[stream.core] is target:
                end = stream.on_end
                engine.cancel(stream)
                end(stream.request, LOST)
        if not self.life.fail(target):
            state = self.life.states[number]
            raise HeadwayError(f"replica: {number} is not up: it is {state}")
        self.hangs.discard(number)
        for executor in self.executors[number]:
            executor.factor, executor.stall = 1.0, 0.0

    def restart(self, number: int, delay: float) -> None:
        """Let a replica come back `delay` s from now, empty; one that is up is killed first."""
        if self.life.states[number] == "up":
            self.kill(number)
        env, target = self.fleet.env, self.fleet.targets[number]
        self._repairs[number] = order = self._repairs.get(number, 0) + 1
        Alarm(env, partial(self._repair, target, order)).set(env.now + delay)
        self.engine.clock.catch_up()

    def _repair(self, target: Any, order: int, _: object) -> None:
        if order == self._repairs[target.index]:
            self.life.repair(target)

    def states(self) -> list[dict[str, Any]]:
        """Tell how each replica is."""
        return [
            {
                "replica": target.index,
                "group": target.group,
                "state": self.life.states[target.index],
                "slow": executors[0].factor,
                "hangs": target.index in self.hangs or executors[0].stall > 0,
                "outstanding": target.outstanding,
            }
            for target, executors in zip(self.fleet.targets, self.executors, strict=True)
        ]


class FailureRates:
    """Answers that fail by chance, whatever was asked."""

    def __init__(self, seed: int) -> None:
        self.rates: dict[str, float] = {}
        self._random = np.random.default_rng([seed, 20])

    def set(self, rates: BaseModel) -> None:
        """Set the `Rates`."""
        found = {name: rate for name, rate in rates.model_dump().items() if rate}
        if sum(found.values()) > 1:
            raise HeadwayError("the rates add up to more than 1")
        self.rates = found

    def draw(self) -> str | None:
        """Say in which of the FAILURES the next request fails; None: not at all."""
        names, rates = [*self.rates], [*self.rates.values()]
        return self._random.choice([*names, None], p=[*rates, max(1 - sum(rates), 0)])  # type: ignore[arg-type,no-any-return]
