"""A policy under examination: what it does with a case, and whether it reads what it must not."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import simpy
from simpy.core import EmptySchedule

from simulator.core.executor import Leap, Timing
from simulator.core.log import Log
from simulator.core.request import Request, Step
from simulator.engine.client import Client
from simulator.engine.replica import Replica
from simulator.policies.predictor import Oracle
from simulator.scenario.assemble_scheduler import make_scheduler
from simulator.scenario.load import check_scenario, resolve
from simulator.scenario.policy_table import find_policy
from simulator.scenario.scenario import Scenario
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.testing.cases import MAX_MODEL_LEN, Case
from simulator.util.config import Named
from simulator.util.errors import HeadwayWarning
from simulator.util.yaml_lines import SourceMap

MECHANISM = {cls.__module__ for cls in Scheduler.__mro__}


@dataclass(slots=True)
class Run:
    """What a policy did with a case."""

    log: Log
    scheduler: SchedulerBase
    steps: list[tuple[object, ...]] = field(default_factory=list)
    before_end: int = 0  # of the steps, those that were decided before anybody had ended
    forbidden_reads: list[str] = field(default_factory=list)  # of an answer's length: where
    error: Exception | None = None
    endless: bool = False


def _guarded(name: str) -> property:
    """Make a field of a request that notes who reads it."""
    hidden = getattr(Request, name)  # what reads and writes the field itself

    def read(request: "GuardedRequest") -> int:
        frame = sys._getframe(1)
        if request.hides(name, frame.f_globals.get("__name__", "")):
            place = f"request.{name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
            request.reads.append(place)
        return int(hidden.__get__(request))

    return property(read, hidden.__set__)


class GuardedRequest(Request):
    """A request that notes who asks for the length of its answer."""

    __slots__ = ("hides", "reads")

    output_tokens = _guarded("output_tokens")
    output_limit = _guarded("output_limit")

    def __init__(
        self, request: Request, hides: Callable[[str, str], bool], reads: list[str]
    ) -> None:
        self.hides, self.reads = hides, reads
        super().__init__(
            *(request.id, request.arrival, request.prompt_tokens, request.output_tokens),
            *(request.client, request.priority, request.segments, request.hint),
            *(request.max_tokens, request.ignore_eos, request.model),
        )


class RecordingCost:
    """A linear cost that notes what each step computes, and for whom."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def execute(self, step: Step) -> Timing:
        running = tuple(request.id for request in self.run.scheduler.running)
        chunks = tuple((c.request.id, c.start, c.tokens) for c in step.prefills)
        self.run.steps.append((running, chunks, step.decodes, step.context))
        return Timing(0.25 + 0.01 * step.tokens + 0.001 * step.context)


class LeapingCost(RecordingCost):
    """The same, for equal steps at once."""

    def leap(self, step: Step, repeats: int) -> Leap:
        """Say what each of `repeats` steps takes."""
        fixed, count = 0.25 + 0.01 * step.decodes, step.decodes
        return Leap([fixed + 0.001 * (step.context + k * count) for k in range(repeats)])


class PolicyUnderTest:
    """The class under examination, on engines as the cases say.

    `policy` and its arguments are as in a scenario. Raises ValueError for wrong arguments once an
    engine is made.
    """

    def __init__(self, policy: type | str, arguments: dict[str, Any]) -> None:
        wanted = {"scheduling_policy": Named(policy, arguments)}
        self._scenario = _with_engine(_bare(), wanted)
        self.policy: type = find_policy(self._scenario.engine, Path())[0]
        self._is_scheduler = issubclass(self.policy, SchedulerBase)
        self._modules = {cls.__module__ for cls in self.policy.__mro__} - MECHANISM

    def make(self, case: Case) -> SchedulerBase:
        """Build the engine of a case."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HeadwayWarning)
            spec = resolve(_with_engine(self._scenario, case.engine))
            spec = replace(spec, num_gpu_blocks=case.num_gpu_blocks, max_model_len=MAX_MODEL_LEN)
            return make_scheduler(spec, shares_prefixes=True)

    def play(self, case: Case, *, leap: bool) -> Run:
        """Run a case to its end, or until it is clear that there will be none."""
        env = simpy.Environment()
        scheduler = self.make(case)
        run = Run(Log(0, 1), scheduler)
        cost = LeapingCost(run) if leap else RecordingCost(run)
        replica = Replica(env, scheduler, cost, leap=leap)
        run.log = replica.log

        def submit(request: Request) -> None:
            request.hint = 1 + (7 * request.id + 3) % 24  # whatever the answer will be
            replica.submit(GuardedRequest(request, self._hides, run.forbidden_reads))

        def finished(request: Request) -> None:
            run.before_end = run.before_end or max(1, len(run.steps) - scheduler.traits.overlaps)
            client.finished(request)

        client = Client(env, case.make_workload(), submit)
        replica.on_finish = finished
        tokens = sum(prompt + output for _, prompt, output, _, _ in case.requests)
        try:
            for _ in range(1000 + 50 * tokens):
                env.step()
            run.endless = True
        except EmptySchedule:
            pass
        except Exception as error:  # whatever the class does
            run.error = error
        return run

    def _hides(self, name: str, module: str) -> bool:
        """Say whether a field must not be read by code of a module.

        A policy may read nothing of an answer's length. A scheduler must end its requests: it may
        ask for `output_limit`.
        """
        if name == "output_limit" and self._is_scheduler:
            return False
        return module in self._modules or not module.startswith("simulator.")


@cache
def _bare() -> Scenario:
    scenario = check_scenario({"cost": {"kind": "linear", "base": 1.0}}, SourceMap("check", {}))
    return scenario.model_copy(update={"predictor": Oracle()})


def _with_engine(scenario: Scenario, values: dict[str, Any]) -> Scenario:
    engine = scenario.engine.model_copy(update=values)
    return scenario.model_copy(update={"engine": engine})
