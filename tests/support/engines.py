"""What the tests of the engine share: a clock of three numbers, and a run without a scenario."""

from copy import copy
from dataclasses import dataclass, field
from math import nan
from typing import Any, TypeVar

import numpy as np
import simpy
from hypothesis import strategies as st

from simulator.build.engines import ENGINES
from simulator.build.policy_table import POLICIES
from simulator.core.alarm import FastEnvironment
from simulator.core.executor import Leap, StageTimes, Timing
from simulator.core.log import Log
from simulator.core.request import Chunk, Step
from simulator.engine.client import Client
from simulator.engine.replica import make_replica
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.predictor import Noisy
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.limits import ALL_LIMITS, Limits
from simulator.schedulers.vllm.pipeline import Pipelined
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload
from tests.support.consistency import assert_consistent


@dataclass
class Clock:
    """base + per_token * tokens + per_context * context of the decodes, in seconds.

    The books of what is `watched` must be right at each step.
    """

    base: float = 1.0
    per_token: float = 0.0
    per_context: float = 0.0
    watched: SchedulerBase | None = None

    def execute(self, step: Step) -> Timing:
        if self.watched is not None:
            assert_consistent(self.watched)
        return Timing(self.base + self.per_token * step.tokens + self.per_context * step.context)

    def leap(self, step: Step, repeats: int) -> Leap:
        fixed = self.base + self.per_token * step.decodes
        last = step.context + repeats * step.decodes
        contexts = range(step.context, last, step.decodes)
        return Leap([fixed + self.per_context * context for context in contexts])


@dataclass
class Stages:
    """A pipeline whose host and stages take so many times what a clock says, links `send` s."""

    clock: Clock = field(default_factory=Clock)
    shares: tuple[float, ...] = (1.0,)
    host: float = 0.0
    send: float = 0.0

    def execute(self, step: Step) -> Timing:
        return self.clock.execute(step)

    def stage_seconds(self, step: Step) -> StageTimes:
        seconds = self.clock.execute(step).seconds
        return StageTimes(
            self.host * seconds, [share * seconds for share in self.shares], self.send
        )


def listed(scheduler: Scheduler, step: Step) -> list[Chunk]:
    """Spell out all work of `step`, just scheduled: prefills, singles, then who decodes on."""
    running = scheduler.running
    members = running.members() if step.decodes else []
    decoding = [Chunk(request, running.decodes.computed(request), 1) for request in members]
    return [*step.prefills, *(step.singles or ()), *decoding]


def workload(*requests: tuple[float, int, int], **more: object) -> Workload:
    """A workload of (arrival, prompt tokens, output tokens)."""
    columns = list(zip(*requests, strict=True)) or [(), (), ()]
    return Workload(
        np.array([nan if a is None else a for a in columns[0]], dtype=float),
        np.array(columns[1], dtype=np.int64),
        np.array(columns[2], dtype=np.int64),
        **more,  # type: ignore[arg-type]
    )


@st.composite
def shared_beginnings(draw: st.DrawFn) -> Workload:
    """A few requests whose prompts begin as one of four do and go on by themselves."""
    one = st.tuples(st.integers(0, 30), st.integers(0, 3), st.integers(0, 8))
    drawn = sorted(draw(st.lists(one, max_size=12)), key=lambda each: each[0])
    rows = [(float(when), 8 + 3 * more, 1 + k % 7) for k, (when, _, more) in enumerate(drawn)]
    load = workload(*rows or [(0.0, 4, 1)])
    if drawn:
        own = enumerate(drawn)
        load.segments = [((("same", first), 8), (k, 3 * more)) for k, (_, first, more) in own]
    return load


def play(
    load: Workload,
    scheduler: Scheduler,
    clock: object | None = None,
    leap: bool = True,
    sigma: float = 0.0,
    env: simpy.Environment | None = None,
) -> tuple[Log, Client]:
    """Run a workload to its end on one replica, with lengths predicted `sigma` wrong."""
    env, clock = env or FastEnvironment(), clock or Clock()
    if isinstance(clock, Clock):
        clock = copy(clock)
        clock.watched = scheduler
    if isinstance(scheduler, Pipelined) and isinstance(clock, Clock):
        clock = Stages(clock, (1.0,) * scheduler.pipeline_parallel_size)
    replica = make_replica(env, scheduler, clock, leap=leap)  # type: ignore[arg-type]
    predictor = Noisy(sigma).predictor(load, np.random.default_rng(0))
    client = Client(env, load, replica.submit, predictor, replica.cancel)
    replica.on_finish = client.finished
    env.run()
    return replica.log, client


def fcfs(num_blocks: int = 1000, block_size: int = 4, **options: object) -> Scheduler:
    """A small engine without a prefix cache."""
    return made(Scheduler, BlockCounter(num_blocks, block_size), **options)  # type: ignore[arg-type]


Kind = TypeVar("Kind")
DEFAULTS = {
    one.defaults["scheduling_policy"]: one.defaults
    for one in ENGINES.values()
    if one.defaults["scheduling_policy"] != "fcfs"
}
"""What the engines of other schedulers have unless told, by policy."""


def made(kind: type[Kind], blocks: BlockCounter, **options: Any) -> Kind:
    """Make a scheduler as an engine with some knobs does: those are among the options."""
    given = DEFAULTS.get(POLICIES.name_of(kind) or "", {}) | options
    limits = Limits(**{name: given[name] for name in ALL_LIMITS & {*given}})
    own = {name: value for name, value in options.items() if name not in ALL_LIMITS}
    if kind.options_type is not None:
        policy = own.pop("policy", None)
        own = {"options": kind.options_type(**own), "policy": policy}
    return kind(blocks, limits=limits, **own)  # type: ignore[call-arg]
