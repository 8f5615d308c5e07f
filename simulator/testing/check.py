"""Check a policy or a scheduler of your own against the laws that every shipped one keeps.

    from simulator.testing.check import check_policy

    check_policy(MyPolicy, weight=3)

runs it on a hundred small random workloads, on engines from little memory to plenty, and
raises AssertionError with the law that it breaks and the smallest case found. The same class gives
the same answer every time.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np
import simpy
from simpy.core import EmptySchedule

from simulator.core.log import REASONS, Log
from simulator.core.request import Request
from simulator.engine.async_replica import make_replica
from simulator.engine.client import Client
from simulator.scenario import assemble, make_scheduler
from simulator.scenario.assemble import Parts
from simulator.scenario.load import check_scenario
from simulator.scenario.policy_table import find_policy
from simulator.scenario.scenario import Scenario
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.testing.trials import (
    LONGEST,
    LONGEST_ANSWER,
    Case,
    Clock,
    Forbidden,
    Guarded,
    Leaper,
    Run,
    draw_case,
    make_workload,
    smaller,
)
from simulator.util.errors import HeadwayWarning
from simulator.util.yaml_lines import Places

CASES = 120
TRIES = 10  # equal runs, before a difference is laid to something else than chance
SHRINKS = 300  # runs that the search for a smaller case may take
ENDED = (REASONS.index("stop"), REASONS.index("length"))
MECHANISM = {"simulator.schedulers.vllm.scheduler", "simulator.schedulers.vllm.batch"}


def check_policy(policy: type | str, **arguments: Any) -> None:
    """Raise AssertionError unless a policy, or a subclass of Scheduler, keeps the laws.

    `policy` is the class, or its name as in a scenario; `arguments` are its own. The laws: it does
    not fail; ends every request; holds no block, seat or host memory when all is over; keeps to
    max_num_batched_tokens and max_num_seqs; never uses the length that an answer will have; gives
    the same result stepwise and in leaps, and the same every time. Raises ValueError for wrong
    arguments.
    """
    scenario, parts = _bare()
    wanted = {"policy": policy, **arguments}
    scenario = _with_engine(scenario, {"scheduling_policy": wanted})
    found, _ = find_policy(scenario)
    subject = _Subject(scenario, parts, found)
    subject.make(draw_case(np.random.default_rng(0), 1, False))  # wrong arguments are told here
    for case in subject.cases():
        if broken := subject.judge(case):
            law, what = broken
            smallest, what = subject.shrink(case, law, what)
            raise AssertionError(f"{found.__name__} {law}: {what}\nSmallest case found: {smallest}")


@cache
def _bare() -> tuple[Scenario, Parts]:
    scenario = check_scenario({"cost": {"kind": "linear", "base": 1.0}}, Places("check", {}))
    scenario = scenario.model_copy(update={"predictor": {"kind": "oracle"}})
    return scenario, assemble(scenario)


def _with_engine(scenario: Scenario, values: dict[str, Any]) -> Scenario:
    engine = scenario.engine.model_copy(update=values)
    return scenario.model_copy(update={"engine": engine})


class _Subject:
    """The class under examination."""

    def __init__(self, scenario: Scenario, parts: Parts, found: type) -> None:
        self.scenario, self.parts = scenario, parts
        scheduler = issubclass(found, Scheduler)
        own = {cls.__module__ for cls in found.__mro__} - MECHANISM
        self.forbidden = Forbidden(frozenset(own), scheduler)

    def cases(self) -> Iterator[Case]:
        """Yield cases of growing size, some with async_scheduling where the class takes it."""
        rng = np.random.default_rng(0)
        for number in range(CASES):
            case = draw_case(rng, 1 + number // 8, number % 3 == 2)
            if case.overlapping and not self._overlaps(case):
                case = replace(case, overlapping=False)
            yield case

    def _overlaps(self, case: Case) -> bool:
        try:
            self.make(case)
        except ValueError as error:
            if "async_scheduling" in str(error):
                return False
            raise
        return True

    def make(self, case: Case) -> Scheduler:
        """Build the engine of a case."""
        scenario = _with_engine(
            self.scenario,
            {
                "max_num_seqs": case.seats,
                "max_num_batched_tokens": case.budget,
                "block_size": case.block_size,
                "enable_prefix_caching": case.caching,
                "async_scheduling": case.overlapping,
            },
        )
        parts = replace(self.parts, num_gpu_blocks=case.blocks, max_model_len=LONGEST)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HeadwayWarning)
            return make_scheduler(scenario, parts, shares_prefixes=True)

    def play(self, case: Case, *, leap: bool) -> Run:
        """Run a case to its end, or until it is clear that there will be none."""
        env = simpy.Environment()
        scheduler = self.make(case)
        run = Run(Log(0, 1), scheduler)
        replica = make_replica(env, scheduler, Leaper(run) if leap else Clock(run), leap=leap)
        run.log = replica.log

        def submit(request: Request) -> None:
            request.hint = 1 + (7 * request.id + 3) % 24  # whatever the answer will be
            replica.submit(Guarded(request, self.forbidden, run.secrets))

        def finished(request: Request) -> None:
            run.before_end = run.before_end or max(1, len(run.steps) - scheduler.overlaps)
            client.finished(request)

        client = Client(env, make_workload(case), submit)
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

    def judge(self, case: Case) -> tuple[str, str] | None:
        """Say which law is broken on a case, and how."""
        leapt = self.play(case, leap=True)
        if broken := _single(case, leapt):
            return broken
        stepped = self.play(case, leap=False)
        if broken := _single(case, stepped):
            return broken
        broken = _different(leapt, stepped, "leaps wrongly", "leaping and stepwise")
        broken = broken or self._clairvoyant(case, stepped)
        return self._dices(case, stepped, TRIES if broken else 1) or broken

    def _dices(self, case: Case, run: Run, tries: int) -> tuple[str, str] | None:
        """Say whether the class does the same every time; what differs by chance tells nothing."""
        for _ in range(tries):
            again = self.play(case, leap=False)
            if broken := _different(run, again, "is not deterministic", "two equal runs"):
                return broken
        return None

    def _clairvoyant(self, case: Case, run: Run) -> tuple[str, str] | None:
        """Run a twin whose answers have other lengths: until one ends nothing may differ."""
        lengths = [LONGEST_ANSWER + 1 - row[2] for row in case.requests]
        rows = (
            (*row[:2], length, *row[3:]) for row, length in zip(case.requests, lengths, strict=True)
        )
        twin = self.play(replace(case, requests=tuple(rows)), leap=False)
        for number in range(min(run.before_end, twin.before_end)):
            if run.steps[number] != twin.steps[number]:
                return (
                    "uses the length that an answer will have",
                    f"with other answers, of {lengths} tokens, step {number + 1} differs though "
                    "nobody has ended",
                )
        return None

    def shrink(self, case: Case, law: str, what: str) -> tuple[Case, str]:
        """Look for a smaller case that breaks the same law."""
        left = SHRINKS
        progress = True
        while progress and left > 0:
            progress = False
            for candidate in smaller(case):
                left -= 1
                broken = self.judge(candidate)
                if broken and broken[0] == law:
                    case, what, progress = candidate, broken[1], True
                    break
                if left <= 0:
                    break
        return case, what


def _single(case: Case, run: Run) -> tuple[str, str] | None:
    """Look for a law that one run breaks."""
    for words, law in LAWS:
        if what := law(case, run):
            return words, what
    return None


def _reads_secrets(case: Case, run: Run) -> str:
    """Say where the class asked for the length of an answer."""
    return ", ".join(dict.fromkeys(run.secrets))


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
        asked = case.requests[row["id"]][2]
        if row["reason"] not in ENDED or row["generated"] != asked:
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
    return f"{most} requests run at once, not {case.seats}" if most > case.seats else ""


def _different(one: Run, two: Run, law: str, runs: str) -> tuple[str, str] | None:
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
    ("reads the length that an answer will have", _reads_secrets),
    ("fails", _fails),
    ("does not end every request", _leaves_requests),
    ("does not give everything back", _leaks),
    ("goes over max_num_batched_tokens", _overspends),
    ("goes over max_num_seqs", _overfills),
)
