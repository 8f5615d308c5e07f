"""Fit a whole cost profile to a server's own log of steps."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from calibration.engine_steps.fit import HELD_OUT_PREFIX, fit_rows, with_name
from calibration.engine_steps.steps_file import Row, read_chunks
from calibration.errors import MAX_HELD_OUT_ERROR
from calibration.profile_yaml import how_to_use, scenario_profile
from calibration.server_logs.torch_profile import read_profile_steps, report, steps_csv
from calibration.text_files import read_rows
from simulator.scenario.assemble import assemble
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.files import write_atomic

FEWEST = 100  # steps
BLOCK = 20  # steps in a row; every fifth block is held out
PLAUSIBLE = 30.0  # times what the scenario's own cost says, or one part of it
UNITS = {"_s": 1.0, "_sec": 1.0, "_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9, "": 1.0}
DURATIONS = ("duration", "step_time", "wall", "seconds", "latency")


def calibrate_from_steps(source: Path, scenario: Scenario, out: Path) -> str:
    """Fit a profile to a log of steps, write it, and give the report."""
    cost = assemble(scenario).cost
    sizes = getattr(cost, "cudagraph_capture_sizes", ())
    rows = read_steps(source)
    fit = with_name(fit_rows(rows, "wall", sizes), scenario.name)
    path = out / f"{scenario.name}-steps.yaml"
    about = {
        "steps": len(rows),
        "held_out": {kind: asdict(errors) for kind, errors in fit.held_out.items()},
    }
    sources = [f"steps: {source.name}"]
    text = "# Written by `headway calibrate --from-steps`.\n"
    text += scenario_profile(scenario, fit.cost, fit.residuals, about, sources)
    write_atomic(path, text.encode())
    held_out = [f"held out: {fit.held_out['all']}"] if "all" in fit.held_out else []
    ratio = float(np.median([row.wall_s / cost.execute(row.step) for row in rows]))
    doubts = []
    if not 1 / PLAUSIBLE < ratio < PLAUSIBLE:
        took = float(np.median([row.wall_s for row in rows]))
        doubts.append(
            f"a step takes {took:.3g} s, {ratio:.3g} times what the scenario's own cost says; is "
            "the unit of its column right?"
        )
    if "all" in fit.held_out and fit.held_out["all"].median > MAX_HELD_OUT_ERROR:
        doubts.append("half of the held-out steps are off by more than half: it explains nothing")
    if doubts:
        warnings.warn(
            f"{source}: the fit should not be used: {'; '.join(doubts)}",
            HeadwayWarning,
            stacklevel=2,
        )
    use = [] if doubts else [how_to_use(path, scenario)]
    return "\n".join([*held_out, f"written: {path}", *use])


def calibrate_from_profile(source: Path, scenario: Scenario | None, out: Path) -> tuple[str, bool]:
    """Write the steps of a torch profiler's trace, tell where their time went, fit a profile.

    Gives the report, and whether it did all that was asked for. Without a scenario, or where the
    trace does not tell what decodes read, nothing is fitted.
    """
    steps = read_profile_steps(source)
    path = write_atomic(out / "steps.csv", steps_csv(steps).encode())
    told = [report(steps), f"written: {path}"]
    unread = any(step.context is None for step in steps)
    if unread:
        told.append(
            "The trace does not say how many tokens the decodes read, so no profile is fitted: "
            "profile with detailed_trace_annotation in --profiler-config"
        )
    elif scenario is None:
        told.append("With --scenario a profile is fitted to them")
    else:
        told.append(calibrate_from_steps(path, scenario, out))
    return "\n".join(told), not (unread and scenario)


def read_steps(path: Path) -> list[Row]:
    """Read a log of steps in order; HeadwayError tells file, line and what is wrong.

    Columns: `decodes` (sequences that advance by a token), `context` (tokens in their KV caches
    in all), `chunks` (pieces of prompts, `cached+new` with blanks between them) or
    `prefill_tokens` (one piece without history), and the step's time, `duration_s` or `_ms`.
    """
    cells = read_rows(path)
    known = list(cells[0]) if cells else []
    times = [(w + s, unit) for w in DURATIONS for s, unit in UNITS.items() if w + s in known]
    prompts = next((name for name in ("chunks", "prefill_tokens") if name in known), None)
    if {"device_s", "point"} <= {*known}:
        raise HeadwayError(f"{path}: these are steps of `headway calibrate`; --from fits them")
    lacking = [name for name in ("decodes", "context") if name not in known]
    lacking += [] if prompts else ["chunks or prefill_tokens"]
    lacking += [] if times else ["duration_s"]
    if lacking:
        raise HeadwayError(f"{path}:1: lacks the column {', '.join(lacking)}{_other_file(known)}")
    if len(cells) < FEWEST:
        raise HeadwayError(f"{path}: {len(cells)} steps are too few to fit: it takes {FEWEST}")
    assert prompts is not None
    return [
        _row(f"{path}:{number + 2}", number, cell, times[0], prompts)
        for number, cell in enumerate(cells)
    ]


def _other_file(known: Sequence[str]) -> str:
    """Say that columns are those of a simulated run's steps; "" where they are not."""
    if {"start", "end"} <= {*known}:
        return "; these are steps of `headway run`, which were simulated, not measured"
    return ""


def _row(
    place: str, number: int, cell: Mapping[str, str], time: tuple[str, float], prompts: str
) -> Row:
    def read(name: str, kind: Callable[[str], Any]) -> Any:
        try:
            return kind(cell[name] or "0")
        except (ValueError, OverflowError):
            raise HeadwayError(f"{place}: {name}: {cell[name]!r} is no number") from None

    decodes, context = (read(name, lambda x: int(float(x))) for name in ("decodes", "context"))
    seconds = read(time[0], float) * time[1]
    try:
        chunks = read_chunks(cell[prompts]) if prompts == "chunks" else ()
    except ValueError as error:
        raise HeadwayError(f"{place}: chunks: {error}") from None
    if prompts == "prefill_tokens" and (new := read(prompts, lambda x: int(float(x)))) > 0:
        chunks = ((0, new),)
    if not 0 < seconds < 1e6:
        raise HeadwayError(f"{place}: {time[0]}: a step cannot take {cell[time[0]]}")
    if decodes < 0 or context < decodes or not (decodes or chunks):
        raise HeadwayError(f"{place}: {decodes} decodes over {context} tokens: impossible")
    held = number // BLOCK % 5 == 4
    return Row(
        run=f"{HELD_OUT_PREFIX}-log" if held else "log",
        kind="onpolicy",
        turn=number,
        decodes=decodes,
        context=context,
        longest=int(np.ceil(context / decodes)) if decodes else 0,
        chunks=chunks,
        device_s=seconds,
        wall_s=seconds,
    )
