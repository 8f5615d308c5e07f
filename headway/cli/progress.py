"""Progress of what lasts, on stderr; on a terminal only, but for the decisions of a plan."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from headway.cli.console import print_line

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

    from headway.planning.candidate import Candidate

FEW_DONE = 4  # a search is estimated once one in so many candidates, which ran, is done
SHOWN = 20  # candidates that a table has room for
SILENCE = 30.0  # s after which a plan says how many runs it has made
DELAY = 0.7  # s; a shorter run shows nothing and pays nothing


@contextmanager
def run_progress(label: str, quiet: bool) -> Iterator[Callable[[float, int, int], None] | None]:
    """Show the simulated seconds, the requests done and all of a run, after DELAY seconds."""
    if not _shown(quiet):
        yield None
        return
    began, bar = perf_counter(), None
    with ExitStack() as shown:

        def show(now: float, done: int, total: int) -> None:
            nonlocal bar
            if bar is None:
                if perf_counter() - began < DELAY:
                    return
                bar = shown.enter_context(_run_bar())
                bar.add_task(label[:20], total=total, simulated="")
            bar.update(bar.task_ids[0], completed=done, simulated=f"{now:,.0f} s simulated")

        yield show


def _run_bar() -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    return _progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[simulated]}"),
    )


@contextmanager
def runs_progress(unit: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show how many runs, or whatever their unit is, are done of how many, and the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (MofNCompleteColumn(), TextColumn(f"{unit}, left"), TimeRemainingColumn())
    with _progress(BarColumn(bar_width=20), *columns, shown=_shown(quiet)) as progress:
        task = progress.add_task("")
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def results_progress(unit: str, quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Show what came of each run as it gets done, a line on stderr; on a terminal a bar below.

    Of a single run there is nothing to show.
    """
    with runs_progress(unit, quiet) as progress:

        def show(done: int, total: int, line: str) -> None:
            if quiet or total < 2:
                return
            print_line(f"{done}/{total} {line}")
            progress(done, total)

        yield show


class SearchProgress:
    """Shows what a plan knows: a table on a terminal, else a line on stderr for each decision."""

    def __init__(self, live: "Live | None", key: str, rising: bool) -> None:
        self._live = live
        self._place, self._rising = _form_of_place(key), rising
        self._began = self._told = perf_counter()
        self._runs = 0
        self._phase, self._phase_began = "", self._began

    def enter(self, phase: str) -> None:
        """Say what begins; from now on a line for each candidate that is done, not for each run."""
        self._phase, self._phase_began = phase, perf_counter()
        if self._live is None:
            print_line(f"{phase}:")

    def __call__(
        self, candidates: "Sequence[Candidate]", runs: int, decided: "Candidate | None"
    ) -> None:
        """Show all candidates; `runs` were made since, and one may have got a new trial."""
        self._runs += runs
        if self._live is not None:
            self._live.update(self._table(candidates))
        elif decided is not None and (decided.done or not self._phase):
            state = "done" if decided.done else "so far"
            said = _last_trial(decided, self._place)
            if self._phase and decided.result.trials:
                said = _bracket(decided, self._place, self._rising)
            elif self._place and not decided.not_tried:
                said += f"; {state}: {_bracket(decided, self._place, self._rising)}"
            print_line(f"{decided.label}: {said}")
            self._told = perf_counter()
        elif (now := perf_counter()) - self._told > SILENCE:
            made = "1 run" if self._runs == 1 else f"{self._runs} runs"
            print_line(f"{made} made in {now - self._began:.0f} s, {self._left(candidates)}")
            self._told = now

    def _left(self, candidates: "Sequence[Candidate]") -> str:
        """Say how many candidates are done and, once enough are, how long the others may take.

        The estimate goes by the load in the runs that this phase has made. A search that stops at
        the first that is enough, or leaves out what another has shown to be worse, is over sooner.
        """
        done = [_looks(one) for one in candidates if one.done and one.result.trials]
        under_way = [_looks(one) for one in candidates if not one.done]
        count = sum(one.done for one in candidates)
        text = f"{count} of {len(candidates)} candidates done"
        if not done or FEW_DONE * len(done) < len(done) + len(under_way):
            return text
        each = sum(done) / len(done)
        left = sum(max(each - own, own / 4, 1.0) for own in under_way)
        left *= (perf_counter() - self._phase_began) / (sum(done) + sum(under_way))
        where = " in this phase" if self._phase else ""
        return f"{text}, about {left / 60:.1f} min left{where} if the others take as long"

    def _table(self, candidates: "Sequence[Candidate]") -> "Table":
        from rich.table import Table

        phase = f"{self._phase}: " if self._phase else ""
        table = Table(title=f"{phase}{self._runs} runs, {self._left(candidates)}")
        for head in ("candidate", "so far", "runs", "last"):
            table.add_column(head)
        for one in [*filter(lambda one: one.result.trials, candidates)][-SHOWN:]:
            count = sum(len(trial.runs) for trial in one.result.trials)
            bracket = _bracket(one, self._place, self._rising)
            table.add_row(one.label, bracket, str(count), _last_trial(one, self._place))
        return table


def _looks(candidate: "Candidate") -> float:
    """Return the load in a candidate's runs, in times that of its first one."""
    trials = candidate.result.trials
    first = (trials[0].seconds if trials else None) or 1.0
    return sum((trial.seconds or 1.0) / first * len(trial.runs) for trial in trials)


def _form_of_place(key: str) -> str:
    """Return how a value of the searched key is written; "" where things are run as they are."""
    if key == "workload.request_rate":
        return "request_rate={:.4g}"
    if key == "workload.trace.rate_scale":
        return "{:.4g} x the trace's rate"
    return f"{key}={{:g}}" if key else ""


def _bracket(candidate: "Candidate", place: str, rising: bool) -> str:
    """Write between which places the answer lies, as far as it is known.

    `place` is the form of one (`_form_of_place`). `rising`: more of what is searched is better
    (replicas), else worse (load).
    """
    from headway.planning.search import ends

    if candidate.errors:
        return "cannot run"
    if candidate.never:
        return "no run"
    result = candidate.result
    holds, fails = ends([trial for trial in result.trials if not trial.superseded], rising)
    if candidate.done:
        holds, fails = result.best, result.beyond
    found = []
    if holds is not None:
        found.append((holds.at, "is enough" if rising else "keeps the bounds"))
    if fails is not None:
        found.append((fails.at, "breaks the bounds" if fails.breaks else "may not be enough"))
    return ", ".join(f"{place.format(at)} {word}".strip() for at, word in found) or "nothing"


def _last_trial(candidate: "Candidate", place: str) -> str:
    """Write what the newest place said."""
    from headway.planning.verdict import TOO_CLOSE

    if not candidate.result.trials:
        never = f"fails: {candidate.never}" if candidate.never else ""
        spared = f"not tried: {candidate.not_tried}" if candidate.not_tried else ""
        return candidate.error or never or spared or "no run"
    trial = candidate.result.trials[-1]
    verdict = f"breaks {trial.breaks}" if trial.breaks else f"fails: {trial.reason}"
    verdict = "keeps the bounds" if trial.ok else verdict
    length = "" if trial.seconds is None else f" of {trial.seconds:.0f} s"
    sure = "" if trial.sure or TOO_CLOSE in verdict else f", {TOO_CLOSE}"
    runs = f"{len(trial.runs)} run{'s' if len(trial.runs) > 1 else ''}"
    return f"{place.format(trial.at)} {verdict} ({runs}{length}{sure})".lstrip()


@contextmanager
def search_progress(quiet: bool, key: str, *, rising: bool) -> Iterator[SearchProgress | None]:
    """Show what a plan finds while it searches for a value of a key ("": whether things hold).

    `rising`: for more replicas, not for more load.
    """
    if quiet:
        yield None
    elif not sys.stderr.isatty():
        yield SearchProgress(None, key, rising)
    else:
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(file=sys.stderr), transient=True) as live:
            try:
                yield SearchProgress(live, key, rising)
            except KeyboardInterrupt:
                live.transient = False  # what is known stays in sight
                raise


def _shown(quiet: bool) -> bool:
    return not quiet and sys.stderr.isatty()


def _progress(*columns: "ProgressColumn", shown: bool = True) -> "Progress":
    from rich.console import Console
    from rich.progress import Progress

    return Progress(
        *columns,
        console=Console(file=sys.stderr),
        transient=True,
        speed_estimate_period=600,
        disable=not shown,
    )
