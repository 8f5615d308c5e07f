"""Where a plan is written: the folder of its question, so that no answer is written over."""

import json
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path

from headway.planning.journal import run_key
from headway.planning.problem import PlanProblem
from simulator.util.errors import HeadwayError


def question_key(problem: PlanProblem, *more: object) -> str:
    """Return a short name to a question, by the text of its scenario and all that is asked."""
    source = problem.path
    text = str(source)
    if not isinstance(source, Mapping) and Path(source).is_file():
        text = Path(source).read_text(encoding="utf-8")
    asked = (*problem.overrides, problem.seed, problem.criteria, problem.axes, problem.by_energy)
    searched = (problem.key, problem.low, problem.high)
    return run_key([text, *map(str, (*asked, *searched, *filter(None, more)))])


def choose_folder(out: Path | None, name: str, question: str) -> Path:
    """Return the folder of a plan: `out`, else the first of NAME-plan, NAME-plan-2, ... for it.

    HeadwayError where `out` has the answer to another question: no answer is written over.
    """
    if out is not None:
        if _is_of_another(out, question):
            raise HeadwayError(
                f"--out {out}: plan.json there answers another question; give another folder"
            )
        return out
    names = chain([f"{name}-plan"], (f"{name}-plan-{k}" for k in count(2)))
    return next(
        folder for one in names if not _is_of_another(folder := Path("out") / one, question)
    )


def _is_of_another(folder: Path, question: str) -> bool:
    """Return whether a folder has a plan that is not the answer to a question."""
    try:
        report = json.loads((folder / "plan.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return not isinstance(report, dict) or report.get("question") != question
