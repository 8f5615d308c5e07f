"""The verb `headway conform`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from simulator.cli.options import silent


def conform(
    cases: Annotated[
        tuple[Path, ...],
        Parameter(name="CASE", help="case files: .json, or .jsonl of many; of vLLM or SGLang"),
    ],
    /,
    *,
    golden: Annotated[
        Path | None,
        silent("recorded schedule [default: ../golden/NAME.jsonl.gz beside the case's folder]"),
    ] = None,
    write: Annotated[
        Path | None, Parameter(help="write Headway's own schedule, packed if it ends in .gz")
    ] = None,
    leap: Annotated[bool, silent("equal steps at once, as in a run")] = False,
) -> int:
    """Compare every decision with a recorded schedule, of vLLM or SGLang; 1 on a difference."""
    from simulator.conformance.compare import conform as compare_all
    from simulator.conformance.compare import report
    from simulator.util.errors import HeadwayError

    if not cases:
        raise HeadwayError("conform: name a case file")
    if len(cases) > 1 and (golden is not None or write is not None):
        raise HeadwayError("conform: --golden and --write go with one case file")
    outcomes = []
    for case in cases:
        outcomes += compare_all(case, golden, leap=leap, write=write)
    print(report(outcomes) if outcomes else f"written to {write}; no recording to compare it with")
    return int(any(outcome.difference is not None for outcome in outcomes))
