"""The verb `headway conform`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.options import Json, print_json, silent
from simulator.util.errors import HeadwayError


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
    leap: Annotated[bool, silent("take equal steps at once, as in a run")] = False,
    families: Annotated[
        bool, silent("print the versions of vLLM that the schedule agrees with")
    ] = False,
    json_: Json = False,
) -> int:
    """Compare every decision with a recorded schedule of vLLM or SGLang.

    The exit code is 1 where they differ.
    """
    from headway.conformance.compare import conform as compare_all
    from headway.conformance.compare import conform_families, report, report_families

    if not cases:
        raise HeadwayError("conform: name a case file, as case.json")
    if len(cases) > 1 and (golden is not None or write is not None):
        raise HeadwayError(f"conform: --golden and --write need one case file, not {len(cases)}")
    if families:
        if write is not None:
            raise HeadwayError("--write: cannot be used with --families, which plays by many rules")
        if len(cases) > 1:
            raise HeadwayError(f"conform: --families needs one case file, not {len(cases)}")
        found = conform_families(cases[0], golden, leap=leap)
        agrees = {name: all(one.agrees for one in each) for name, each in found.items()}
        print_json(agrees) if json_ else print(report_families(found))
        return int(not any(agrees.values()))
    outcomes = []
    for case in cases:
        outcomes += compare_all(case, golden, leap=leap, write=write)
    if json_:
        print_json([asdict(one) | {"agrees": one.agrees} for one in outcomes])
    elif outcomes:
        print(report(outcomes))
    if write is not None and not json_:
        print(f"written to {write}{'' if outcomes else '; no recording to compare it with'}")
    if any(outcome.difference is not None for outcome in outcomes):
        return 1
    return 2 if any(outcome.refused for outcome in outcomes) else 0
