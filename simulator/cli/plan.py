"""The verb `headway plan`, and `simulator.plan` behind it."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    import pandas as pd

    from simulator.planning.plan import Candidate, Question


def plan_command(
    scenario: Annotated[Path, Parameter(name="SCENARIO", help="scenario file (YAML)")],
    /,
    *,
    slo: Annotated[
        list[str] | None,
        Parameter(negative="", help="bound, as 'p99_ttft_ms<=1000' (repeatable)"),
    ] = None,
    vary: Annotated[
        list[str] | None,
        Parameter(negative="", help="dotted.key=a,b,c (repeated: all combinations)"),
    ] = None,
    fewest: Annotated[
        str | None,
        Parameter(help="dotted.key=LOW..HIGH: the least that holds the load", show_default=False),
    ] = None,
    cheapest: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="the cheapest that holds the load"),
    ] = False,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", help="set a key: dotted.key=value (repeatable)"),
    ] = None,
    seed: Annotated[int | None, Parameter(help="seed, in place of the scenario's")] = None,
    replications: Annotated[int | None, Parameter(help="runs of each place [default: 3]")] = None,
    tolerance: Annotated[
        float | None, Parameter(help="of the largest rate, relative [default: 0.02]")
    ] = None,
    optuna: Annotated[
        int | None,
        Parameter(help="try so many of the combinations, chosen by Optuna", show_default=False),
    ] = None,
    jobs: Annotated[int | None, Parameter(help="workers [default: one per core]")] = None,
    out: Annotated[
        Path | None,
        Parameter(help="folder for the files [default: out/NAME-plan]", show_default=False),
    ] = None,
    quiet: Annotated[
        bool, Parameter(negative="", show_default=False, help="print errors and warnings only")
    ] = False,
) -> int:
    """Find the largest request rate under service levels, the fewest replicas, the cheapest fleet.

    Keys of the scenario's block `plan` stand where options are not given; without any bound,
    99 % of the requests must keep the scenario's `goodput`.
    """
    from simulator.planning.plan_files import write_plan
    from simulator.simulation.write import check_folder
    from simulator.util.workers import use_backend

    if jobs is not None and jobs < 1:
        raise HeadwayError(f"--jobs {jobs}: must be at least 1")
    if optuna is not None and optuna < 1:
        raise HeadwayError(f"--optuna {optuna}: must be at least 1")
    given = Given(slo, vary, fewest, cheapest, replications, tolerance)
    question, axes, name = ask(scenario, given, set_ or (), seed)
    folder = check_folder(out or Path("out") / f"{name}-plan")
    with use_backend("loky", jobs), _counter(quiet) as progress:
        candidates, best = find(question, axes, optuna, jobs, progress)
    files = write_plan(question, candidates, best, folder)
    if not quiet:
        print(told(question, candidates, best))
        print(f"written to {folder}: {', '.join(file.name for file in files)}")
    return 0


def plan(
    scenario: str | Path,
    slo: Sequence[str] = (),
    vary: Mapping[str, Sequence[object]] | None = None,
    *,
    fewest: str | None = None,
    cheapest: bool = False,
    jobs: int | None = None,
) -> "pd.DataFrame":
    """Find what `headway plan` finds; return a row per candidate, the best first.

    Runs on joblib's active backend. HeadwayError where no candidate keeps the bounds.
    """
    import pandas as pd

    from simulator.planning.plan_files import row_of
    from simulator.planning.sweep import as_yaml

    items = [f"{k}={','.join(as_yaml(v) for v in values)}" for k, values in (vary or {}).items()]
    given = Given([*slo] or None, items or None, fewest, cheapest, None, None)
    question, axes, _ = ask(Path(scenario), given, (), None)
    candidates, best = find(question, axes, None, jobs, None)
    ordered = [best, *(c for c in candidates if c is not best)]
    return pd.DataFrame([row_of(question, candidate) for candidate in ordered])


Axes = list[tuple[str, list[str]]]
"""Dotted keys and the values to try, as YAML."""


@dataclass(slots=True, frozen=True)
class Given:
    """What the command line says; None where the scenario's block `plan` decides."""

    slo: list[str] | None
    vary: list[str] | None
    fewest: str | None
    cheapest: bool
    replications: int | None
    tolerance: float | None


def ask(
    path: Path, given: Given, overrides: Sequence[str], seed: int | None
) -> "tuple[Question, Axes, str]":
    """Make the question, and what is varied, of the options and the block `plan`."""
    from simulator.planning.plan import Question, rate_key
    from simulator.planning.points import hidden, split_values
    from simulator.planning.search import Rules
    from simulator.planning.service_levels import parse_slo
    from simulator.planning.sweep import as_yaml
    from simulator.scenario.load import load_scenario

    base = load_scenario(path, overrides, seed)
    block = base.plan
    if given.vary is not None:
        axes = [split_values(item) for item in given.vary]
    else:
        axes = [(key, [as_yaml(v) for v in values]) for key, values in block.vary.items()]
    texts = given.slo if given.slo is not None else block.slo
    if not texts and not any(base.goodput.model_dump().values()):
        raise HeadwayError(f"{path}: no service level; give --slo 'p99_ttft_ms<=1000'")
    slos = [parse_slo(text) for text in texts or ["goodput>=0.99"]]
    if any(s.metric == "goodput" for s in slos) and not any(base.goodput.model_dump().values()):
        raise HeadwayError(f"{path}: --slo goodput: needs bounds in the scenario's `goodput`")
    if all(s.metric != "completion" for s in slos):
        slos.append(parse_slo("completion>=1"))
    count = block.replications if given.replications is None else given.replications
    if count < 1:
        raise HeadwayError(f"--replications {count}: must be at least 1")
    rules = Rules(
        slos,
        count,
        max(block.most_replications, count),
        block.confidence,
        block.tolerance if given.tolerance is None else given.tolerance,
    )
    if not 0 < rules.tolerance <= 1:
        raise HeadwayError(f"--tolerance {rules.tolerance}: must be more than 0 and at most 1")
    key, low, high = "", 0, 0
    asked = given.fewest or next((f"{k}={v}" for k, v in block.fewest.items()), None)
    if asked is not None:
        key, low, high = _range(asked)
    elif not (given.cheapest or block.cheapest):
        key = rate_key(base)[0]
    if messages := hidden([k for k, _ in axes], overrides, seed, searched=key):
        raise HeadwayError(messages)
    return Question(path, overrides, base.seed, rules, key, low, high), axes, base.name


def _range(text: str) -> tuple[str, int, int]:
    """Read `key=LOW..HIGH`."""
    key, _, values = text.partition("=")
    low, dots, high = values.partition("..")
    try:
        numbers = int(low), int(high)
    except ValueError:
        numbers = 0, 0
    if not key or not dots or not 0 <= numbers[0] <= numbers[1] or not numbers[1]:
        raise HeadwayError(
            f"--fewest {text}: must be dotted.key=LOW..HIGH with 0 <= LOW <= HIGH and HIGH >= 1"
        )
    return key.strip(), *numbers


def find(
    question: "Question",
    axes: Axes,
    optuna: int | None,
    jobs: int | None,
    progress: Callable[[int], None] | None,
) -> "tuple[list[Candidate], Candidate]":
    """Search; return the candidates with their answers, and the best."""
    from simulator.planning.plan import answer, best_of, climb, find_candidates

    if optuna is None:
        candidates = find_candidates(question.path, axes, question.overrides, question.seed)
        answer(question, candidates, jobs, progress)
    else:
        from simulator.planning.plan_optuna import answer_by_optuna

        candidates = answer_by_optuna(question, axes, optuna, jobs, progress)
    rate = bool(question.key) and not question.high
    best = best_of(question, candidates)
    if rate:
        climb(question, candidates, jobs)
    return candidates, best


def told(question: "Question", candidates: "Sequence[Candidate]", best: "Candidate") -> str:
    """Give the table of candidates, and what it cannot tell."""
    from simulator.planning.plan_files import row_of

    bounds = question.rules.slos
    metrics = [*dict.fromkeys(slo.metric for slo in bounds if slo.metric != "completion")]
    searched = {"workload.request_rate": "req/s"}.get(question.key, question.key or "holds")
    place = [searched, "surely"] if question.key else [searched]
    lines = [["candidate", *place, *metrics, *MONEY.values()]]
    for candidate in candidates:
        row = row_of(question, candidate)
        name = ("* " if candidate is best else "  ") + candidate.label
        cells = _cells(row, [*metrics, *MONEY], searched=bool(question.key))
        lines.append(
            [name, *cells] if row["holds"] else [name, "cannot run" if candidate.error else "never"]
        )
    text = _aligned(lines)
    notes = _notes(question, candidates)
    return "\n".join(
        ["under " + ", ".join(s.text for s in bounds), "", *text, "", *notes, "* the best"]
    )


MONEY = {
    "tokens_per_s_per_gpu": "tok/s/GPU",
    "tokens_per_s_per_user": "tok/s/user",
    "dollars_per_hour": "$/h",
    "dollars_per_million_output_tokens": "$/Mtok",
}


def _cells(row: Mapping[str, Any], names: Sequence[str], searched: bool) -> Iterator[str]:
    """Write the cells of a candidate that holds."""
    yield f"{row['at']:.4g}" if searched else "yes"
    if searched:
        ends = [row["surely_holds"], row["surely_fails"]]
        if row["surely_fails"] is not None and row["surely_fails"] < row["at"]:
            ends.reverse()
        yield "..".join(map(_number, ends))
    for name in names:
        yield "-" if row[name] is None else f"{row[name]:,.4g}"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Set a table, the first column to the left and the others to the right."""
    widths = [max(len(line[k]) for line in lines if k < len(line)) for k in range(len(lines[0]))]
    return [
        "  ".join(
            f"{cell:{'>' if k else '<'}{width}}"
            for k, (cell, width) in enumerate(zip(line, widths, strict=False))
        )
        for line in lines
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _notes(question: "Question", candidates: "Sequence[Candidate]") -> list[str]:
    """Tell what the table cannot: errors, doubts, contradictions."""
    from simulator.planning.search import not_monotone

    notes = [f"{c.label}: {c.error}" for c in candidates if c.error]
    for candidate in candidates:
        for a, b in not_monotone(candidate.answer.trials, rising=bool(question.high)):
            notes.append(f"{candidate.label}: not monotone: {a.at:g} and {b.at:g} contradict")
    return notes


@contextmanager
def _counter(quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """Count the runs on a terminal; how many it takes is not known before."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    done = 0
    with Console(file=sys.stderr).status("searching") as status:

        def tell(runs: int) -> None:
            nonlocal done
            done += runs
            status.update(f"searching: {done:,} runs")

        yield tell
