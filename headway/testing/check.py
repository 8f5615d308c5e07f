"""Check a policy or a scheduler of your own against the laws that every shipped one keeps.

    from headway.testing import check_policy

    check_policy(MyPolicy, weight=3)

runs it on a hundred small random workloads, on engines from little memory to plenty, and
raises AssertionError with the law that it breaks and the smallest case found. The same class gives
the same answer every time.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np
import simpy
from simpy.core import EmptySchedule

from headway.testing.cases import MAX_MODEL_LEN, Case, draw_case
from simulator.build.assemble_scheduler import make_scheduler
from simulator.build.choose_scheduler import can_overlap
from simulator.build.policy_table import find_policy
from simulator.core.executor import Leap, Timing
from simulator.core.log import REASONS, REJECTED, Log
from simulator.core.request import Request, Step
from simulator.engine.client import Client
from simulator.engine.replica import Replica
from simulator.policies.predictor import Oracle
from simulator.results.request_table import COMPLETED
from simulator.scenario.load import check_scenario
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.config import Named
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.yaml_lines import SourceMap

GIVEN = [one.name for one in fields(Request) if one.init and one.name != "output_tokens"]
"""What a client says of a request; the length of its answer is guarded."""
MECHANISM = {cls.__module__ for cls in Scheduler.__mro__}


@dataclass(slots=True)
class Run:
    """What a policy did with a case."""

    log: Log
    scheduler: SchedulerBase
    steps: list[tuple[object, ...]] = field(default_factory=list)
    before_end: int = 0  # of the steps, those that were decided before anybody had ended
    forbidden_reads: list[str] = field(default_factory=list)  # of an answer's length: where
    requests: list[tuple[Request, Request]] = field(default_factory=list)  # as sent, as served
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
        given = {one.name: getattr(request, one.name) for one in fields(Request) if one.init}
        super().__init__(**given)


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
            try:
                return make_scheduler(spec, shares_prefixes=True)
            except HeadwayError as error:  # what a class of the user's raises
                raise AssertionError(f"{self.policy.__name__} cannot be made: {error}") from error

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
            served = GuardedRequest(request, self._hides, run.forbidden_reads)
            run.requests.append((request, served))
            replica.submit(served)

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


CASES = 120
TRIES = 10  # equal runs, before a difference is laid to something else than chance
SHRINKS = 300  # runs that the search for a smaller case may take

Violation = tuple[str, str] | None
"""The law that is broken, and how."""


def check_policy(policy: type | str, **arguments: Any) -> None:
    """Raise AssertionError unless a policy, or a subclass of Scheduler, keeps the laws.

    `policy` is the class, or its name as in a scenario; `arguments` are its own. The laws: it can
    be made; does not fail; changes nothing that a client says of a request; ends every request;
    holds no block, seat or host memory when all is over; keeps to max_num_batched_tokens and
    max_num_seqs; never uses the length that an answer will have; gives the same result stepwise
    and in leaps, and the same every time. Raises ValueError for arguments that it does not take.
    """
    subject = PolicyUnderTest(policy, arguments)
    subject.make(draw_case(np.random.default_rng(0), 1, False))  # wrong arguments are told here
    for case in _cases(subject):
        if broken := find_violation(subject, case):
            smallest, what = _shrink(subject, case, *broken)
            raise AssertionError(
                f"{subject.policy.__name__} {broken[0]}: {what}\nSmallest case found: {smallest}"
            )


def _cases(subject: PolicyUnderTest) -> Iterator[Case]:
    """Yield cases of growing size, some with async_scheduling where the class takes it."""
    rng, overlaps = np.random.default_rng(0), can_overlap(subject.policy)
    for number in range(CASES):
        case = draw_case(rng, 1 + number // 8, overlaps and number % 3 == 2)
        budget = max(case.max_num_batched_tokens, case.block_size)  # SGLang takes no less
        yield replace(case, max_num_batched_tokens=budget)


def find_violation(subject: PolicyUnderTest, case: Case) -> Violation:
    """Say which law is broken on a case, and how."""
    leapt = subject.play(case, leap=True)
    if broken := _broken_law(case, leapt):
        return broken
    stepped = subject.play(case, leap=False)
    if broken := _broken_law(case, stepped):
        return broken
    broken = _different(leapt, stepped, "leaps wrongly", "leaping and stepwise")
    broken = broken or _clairvoyant(subject, case, stepped)
    for _ in range(TRIES if broken else 1):  # what differs by chance tells nothing
        again = subject.play(case, leap=False)
        if by_chance := _different(stepped, again, "is not deterministic", "two equal runs"):
            return by_chance
    return broken


def _clairvoyant(subject: PolicyUnderTest, case: Case, run: Run) -> Violation:
    """Run a twin whose answers have other lengths: until one ends nothing may differ."""
    twin = case.twin()
    other = subject.play(twin, leap=False)
    for number in range(min(run.before_end, other.before_end)):
        if run.steps[number] != other.steps[number]:
            return (
                "uses the length that an answer will have",
                f"with other answers, of {[row[2] for row in twin.requests]} tokens, step "
                f"{number + 1} differs though nobody has ended",
            )
    return None


def _shrink(subject: PolicyUnderTest, case: Case, law: str, what: str) -> tuple[Case, str]:
    """Look for a smaller case that breaks the same law."""
    smaller = case.smaller()
    for _ in range(SHRINKS):
        candidate = next(smaller, None)
        if candidate is None:
            break
        broken = find_violation(subject, candidate)
        if broken and broken[0] == law:
            case, what, smaller = candidate, broken[1], candidate.smaller()
    return case, what


def _broken_law(case: Case, run: Run) -> Violation:
    """Look for a law that one run breaks."""
    for words, law in LAWS:
        if what := law(case, run):
            return words, what
    return None


def _reads_lengths(case: Case, run: Run) -> str:
    """Say where the class asked for the length of an answer."""
    return ", ".join(dict.fromkeys(run.forbidden_reads))


def _changes_requests(case: Case, run: Run) -> str:
    """Name a request that is no longer what its client has sent."""
    for sent, served in run.requests:
        for name in GIVEN:
            was, now = getattr(sent, name), getattr(served, name)
            if now != was:
                return f"{name} of request {sent.id} is {now!r}, not {was!r}"
    return ""


def _fails(case: Case, run: Run) -> str:
    """Say what was raised, and where."""
    if run.error is None:
        return ""
    place = extract_tb(run.error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return f"{type(run.error).__name__}: {run.error} ({where})"


def _leaves_requests(case: Case, run: Run) -> str:
    """Name a request that did not end as it should."""
    rows = run.log.requests
    missing = sorted({*range(len(case.requests))} - {*rows["id"].tolist()})
    if missing:
        when = "though it has gone on and on" if run.endless else "and nothing happens any more"
        return f"request {missing[0]} never ends, {when}"
    if len(rows) > len(case.requests):
        return "a request ends twice"
    for row in rows:
        arrival, prompt, output = case.requests[row["id"]][:3]
        # SGLang ends an answer where memory does, and refuses what leaves no room for one.
        asked = run.scheduler.output_limit(Request(int(row["id"]), arrival, prompt, output))
        if asked < 1 and row["reason"] == REJECTED:
            continue
        if row["reason"] not in COMPLETED or row["generated"] != asked:
            return (
                f"request {row['id']} is {REASONS[row['reason']]} after {row['generated']} of "
                f"{asked} tokens"
            )
    return ""


def _leaks(case: Case, run: Run) -> str:
    """Say what is still taken when all is over."""
    scheduler = run.scheduler
    blocks = scheduler.blocks
    if blocks.free != blocks.usable:
        return f"{blocks.usable - blocks.free} of {blocks.usable} blocks are in use at the end"
    if scheduler.running or scheduler.waiting:
        return "at the end requests are still listed as running or waiting"
    if scheduler.decodes.count or scheduler.decodes.context:
        return "at the end requests are still in the decode set"
    return ""


def _overspends(case: Case, run: Run) -> str:
    """Find a step of too many tokens."""
    rows = run.log.steps
    tokens = rows["prefill_tokens"] + rows["decodes"] + rows["wasted"]
    limit = run.scheduler.max_num_batched_tokens
    return f"a step has {tokens.max()} tokens, not {limit}" if (tokens > limit).any() else ""


def _overfills(case: Case, run: Run) -> str:
    """Find a step of too many requests."""
    most = int(run.log.steps["running"].max(initial=0))
    return (
        f"{most} requests run at once, not {case.max_num_seqs}" if most > case.max_num_seqs else ""
    )


def _different(one: Run, two: Run, law: str, runs: str) -> Violation:
    """Compare two runs that must agree to the last bit."""
    for name in ("request_rows", "run_rows", "tick_ends"):
        if getattr(one.log, name) != getattr(two.log, name):
            a, b = (np.sort(run.log.requests, order="id") for run in (one, two))
            for field_name in ("finish", "first_token", "first_scheduled", "preemptions"):
                for number in np.flatnonzero(a[field_name] != b[field_name]):
                    values = f"{a[field_name][number]} and {b[field_name][number]}"
                    return law, f"{runs} differ: {field_name} of request {number} is {values}"
            return law, f"{runs} differ in the times of tokens, or the order of ends"
    return None


LAWS: tuple[tuple[str, Callable[[Case, Run], str]], ...] = (
    ("reads the length that an answer will have", _reads_lengths),
    ("changes a request", _changes_requests),
    ("fails", _fails),
    ("does not end every request", _leaves_requests),
    ("does not give everything back", _leaks),
    ("goes over max_num_batched_tokens", _overspends),
    ("goes over max_num_seqs", _overfills),
)
