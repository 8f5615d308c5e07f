"""The tests as one collected pytest session, run in forks: with coverage, or with a mutant."""

import gc
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import coverage
import pytest
from hypothesis import Phase, settings

from tools.mutants.mutate import Mutant, install

Reach = dict[str, dict[str, list[int]]]
"""By file and line, the tests that run it, by number."""
WORKERS = 2
FEW = 10
"""Examples that a property test draws while its lines are noted."""
GRACE = 10.0  # CPU seconds for one test, and so many times what it took: then it is endless
WORDS = {
    0: "survived",
    1: "killed",
    2: "stillborn",
    3: "unfinished",
    -signal.SIGPROF: "endless",
    -signal.SIGALRM: "late",
}
"""What an exit code says; a fork that crashed was killed. Late and unfinished ones say nothing."""


class Session:
    """A plugin that, once the tests are collected, runs `work` in place of them."""

    def __init__(self, root: Path, work: Callable[["Session"], None]) -> None:
        self.root, self.work = root, work
        self.items: list[pytest.Item] = []
        self.failed = False
        self.took = 0.0

    def pytest_configure(self, config: pytest.Config) -> None:
        """Draw as CI does, but leave failing examples alone: neither stored nor made smaller."""
        standard = settings()
        kept = [p for p in standard.phases if p is not Phase.shrink]
        settings.register_profile(
            "mutants", standard, derandomize=True, database=None, phases=kept, deadline=None
        )
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = [i for i in session.items if not i.get_closest_marker("slow")]
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        gc.collect()
        self.work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def run(self, number: int, following: int | None = None) -> bool:
        """Run one test; say whether it passed or was skipped."""
        item, self.failed, before = self.items[number], False, _cpu_seconds()
        next_item = None if following is None else self.items[following]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        self.took = _cpu_seconds() - before
        return not self.failed

    def reach(self, packages: Sequence[str], out: Path) -> None:
        """Write which test runs which line, how long each takes, and which pass."""
        jobs = [(lambda at=at: self._trace(packages, out, at)) for at in range(WORKERS)]
        for _, status in forked(jobs, [3600.0] * WORKERS):
            if status:
                raise SystemExit("the tests' lines were not traced to the end")

    def _trace(self, packages: Sequence[str], out: Path, worker: int) -> int:
        cov = coverage.Coverage(data_file=None, source=[str(self.root / p) for p in packages])
        numbers = range(worker, len(self.items), WORKERS)
        took: dict[int, float] = {}
        asked: dict[Any, int] = {}
        cov.start()
        for number in numbers:
            cov.switch_context(str(number))
            share = _draw_few(self.items[number], asked)
            if self.run(number, number + WORKERS if number + WORKERS < len(self.items) else None):
                took[number] = self.took / share
        cov.stop()
        data, lines = cov.get_data(), dict[str, Any]()
        for file in data.measured_files():
            by_line = data.contexts_by_lineno(file)
            lines[os.path.relpath(file, self.root)] = {
                line: [int(c) for c in contexts if c and int(c) in took]
                for line, contexts in by_line.items()
            }
        out.with_suffix(f".{worker}").write_text(json.dumps({"took": took, "lines": lines}))
        return 0

    def judge(
        self, mutants: Sequence[Mutant], tests: Sequence[list[tuple[int, float]]], seconds: float
    ) -> Iterator[tuple[int, str]]:
        """Run tests of each mutant until one fails, or for so long; give place and word."""
        functions = [f for f in gc.get_objects() if isinstance(f, FunctionType)]
        jobs = [
            (lambda m=m, t=t: self._try(m, t, functions, seconds))
            for m, t in zip(mutants, tests, strict=True)
        ]
        for at, status in forked(jobs, [300.0 + 10 * seconds] * len(jobs)):
            yield at, WORDS.get(status, "killed")

    def _try(
        self,
        mutant: Mutant,
        tests: list[tuple[int, float]],
        functions: list[FunctionType],
        seconds: float,
    ) -> int:
        if not install(self.root, mutant, functions):
            return 2
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        for at, (number, took) in enumerate(tests):
            seconds -= took
            if at and seconds < 0:
                return 3
            signal.setitimer(signal.ITIMER_PROF, GRACE + 10 * took)
            if not self.run(number, tests[at + 1][0] if at + 1 < len(tests) else None):
                return 1
        return 0


def _draw_few(item: pytest.Item, asked: dict[Any, int]) -> float:
    """Let a property test draw few examples, enough for its lines; return their share.

    `asked` has how many each test had before.
    """
    test: Any = getattr(item, "obj", None)
    drawn = getattr(test, "_hypothesis_internal_use_settings", None)
    if drawn is None:
        return 1.0
    test._hypothesis_internal_use_settings = settings(
        drawn, max_examples=min(drawn.max_examples, FEW)
    )
    most = asked.setdefault(test, drawn.max_examples)
    return min(FEW / most, 1.0)


def _cpu_seconds() -> float:
    """CPU seconds of this process and of those that it waited for: others' load adds nothing."""
    return sum(os.times()[:4])


def forked(jobs: Sequence[Callable[[], int]], limits: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Run each job in a fork, a few at a time; give its place and exit code (minus a signal)."""
    running = dict[int, tuple[int, float]]()
    waiting = list(range(len(jobs)))
    while waiting or running:
        while waiting and len(running) < WORKERS:
            at = waiting.pop(0)
            pid = os.fork()
            if not pid:
                _exit_with(jobs[at])
            running[pid] = at, time.monotonic() + limits[at]
        pid, code = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            at, _ = running.pop(pid)
            yield at, os.waitstatus_to_exitcode(code)
        elif not pid:
            time.sleep(0.01)
            for late in [p for p, (_, end) in running.items() if time.monotonic() > end]:
                os.kill(late, signal.SIGALRM)


def _exit_with(job: Callable[[], int]) -> None:
    code = 1
    try:
        code = job()
    except BaseException as error:  # whatever a mutant breaks
        print("in a fork:", repr(error))
    finally:
        os._exit(code)
