"""Calibrate: measure an engine within a time limit, fit a profile, write both down.

Steps of real schedules come last and in two kinds: runs to fit to and runs to judge the fit by,
under the same three loads with other seeds.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from calibration.engine_steps.fit import HOLD, StepFit, fit_rows, named
from calibration.engine_steps.grid import make_grid
from calibration.engine_steps.meta import (
    Meta,
    capture_sizes,
    describe_engine,
    now,
    read_meta,
    write_meta,
)
from calibration.engine_steps.plots import plot_fit
from calibration.engine_steps.profile_text import profile_name, steps_profile
from calibration.engine_steps.rows import Row, RowFile, pack_rows, read_rows
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.profile import RESERVED
from simulator.models.gpus import GPUS, find_gpu
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.files import write_atomic, write_together

if TYPE_CHECKING:
    from gpu_backend.engine import Engine
    from gpu_backend.sensors import Sensors
    from simulator.scenario.scenario import Scenario

STEPS, META = "steps.csv.gz", "meta.json"
GRID_SHARE, RUNS_SHARE = 0.5, 0.4  # of the time
LOADS = (0.5, 0.8, 1.3)  # of what the engine can serve
ROUNDS = 3  # of the loads; one run of each is held out
PROMPT, ANSWER = 200, 60  # mean tokens of the runs' requests

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Setup:
    """What to measure."""

    model: str
    device: str = "cpu"
    budget_s: float = 480.0
    num_blocks: int = 4096
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 4096
    seed: int = 0


def calibrate(setup: Setup, out: Path, tell: Tell = print) -> StepFit:
    """Measure and fit; write steps.csv.gz as it grows, then meta.json, profile and plot.

    Ctrl-C ends the measurement early: what there is then gets fitted.
    """
    from gpu_backend.engine import Engine
    from simulator.models.load import load_model

    until = monotonic() + setup.budget_s
    try:
        spec = load_model(setup.model)
    except ValueError as error:
        raise HeadwayError(f"--model: {str(error).removeprefix('model: ')}") from None
    _check_folder(out)
    engine = Engine(spec, setup.num_blocks, setup.block_size, setup.device)
    meta = describe_engine(engine) | {
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": setup.max_num_batched_tokens,
        "max_model_len": setup.max_model_len,
        "seed": setup.seed,
        "started": now(),
        "ended": "",
    }
    out.mkdir(parents=True, exist_ok=True)
    file = RowFile(out / STEPS)
    write_meta(out / META, meta)
    try:
        measure_all(engine, setup, file, until, tell)
    except KeyboardInterrupt:
        tell("interrupted: fitting the steps measured so far")
    finally:
        file.flush()
    write_meta(out / META, meta | {"ended": now()})
    rows = read_rows(out / STEPS)
    write_atomic(out / STEPS, lambda target: target.write(pack_rows(rows)))
    return refit(out / STEPS, out, tell)


def _check_folder(out: Path) -> None:
    if (out / STEPS).exists():
        raise HeadwayError(
            f"--out {out}: holds measurements already; give another folder, or refit them with "
            f"--from {out / STEPS}"
        )


def measure_all(
    engine: "Engine", setup: Setup, file: RowFile, until: float, tell: Tell = print
) -> None:
    """Measure grid, swaps and runs; each row goes to the file as it is measured."""
    from gpu_backend.sensors import Sensors

    with Sensors(engine.device) as sensors:
        _measure_all(engine, setup, file, until, sensors=sensors, tell=tell)


def _measure_all(
    engine: "Engine", setup: Setup, file: RowFile, until: float, *, sensors: "Sensors", tell: Tell
) -> None:
    from calibration.engine_steps.measure import limits_of, measure_grid, measure_swaps
    from gpu_backend.live import warm_up

    rng = np.random.default_rng(setup.seed)
    rows: list[Row] = []

    def sink(row: Row) -> None:
        rows.append(row)
        file.add(row)

    limits = limits_of(
        engine, setup.max_num_seqs, setup.max_num_batched_tokens, setup.max_model_len
    )
    points = make_grid(limits, rng)
    warm_up(engine)
    left = until - monotonic()
    passes = measure_grid(engine, points, sink, rng, GRID_SHARE * left, sensors=sensors)
    tell(f"grid: {len(points)} points in {passes} whole passes, {len(rows)} rows")
    measure_swaps(engine, sink, rng)
    file.flush()
    clock = "wall" if engine.device.type == "cuda" else "cpu"
    guess = fit_rows(rows, clock, engine.capture_sizes).cost
    share = RUNS_SHARE * left
    for name, scenario in _runs(engine, setup, guess, min(share, until - monotonic())):
        if monotonic() > until:
            tell("the time is over before all runs were done")
            return
        count = _run(engine, scenario, name, sink, sensors)
        file.flush()
        tell(f"{name}: {count} steps")


def _run(
    engine: "Engine",
    scenario: "Scenario",
    name: str,
    sink: Callable[[Row], None],
    sensors: "Sensors",
) -> int:
    """Run a scenario on the engine; return its number of steps."""
    from calibration.engine_steps.measure import live_rows
    from gpu_backend.live import run_live

    live = run_live(scenario, engine.device.type, "exec", engine=engine, warm_s=0.2)
    rows = live_rows(live, name, sensors.latest)
    for row in rows:
        sink(row)
    if live.result.interrupted:
        raise KeyboardInterrupt
    return len(rows)


def _runs(
    engine: "Engine", setup: Setup, guess: PiecewiseCost, seconds: float
) -> Iterator[tuple[str, "Scenario"]]:
    """Give runs under every load, so many requests in each that all take the time given."""
    from simulator.simulation.run import run

    probe = run(_scenario(engine, setup, guess, {"num_prompts": 100}, 0))
    capacity = float(probe.summary()["request_throughput"])
    each = 0.8 * seconds / (len(LOADS) * ROUNDS)  # the rest: between the steps
    for number in range(len(LOADS) * ROUNDS):
        turn, place = divmod(number, len(LOADS))
        load, seed = LOADS[place], setup.seed + 1 + number
        workload = {
            "num_prompts": max(10, min(400, int(each * capacity * min(load, 1.0)))),
            "request_rate": load * capacity,
        }
        # Every load is held out once, and those runs are spread over the time.
        kind = HOLD if (turn + place) % ROUNDS == 1 else "run"
        yield f"{kind}-load{load}-seed{seed}", _scenario(engine, setup, guess, workload, seed)


def _scenario(
    engine: "Engine", setup: Setup, cost: PiecewiseCost, workload: Mapping[str, object], seed: int
) -> "Scenario":
    """Write the scenario of a run."""
    from simulator.scenario.load import check_scenario
    from simulator.util.yaml_lines import Places

    longest = min(setup.max_model_len, engine.spec.max_position_embeddings)
    raw: dict[str, Any] = {
        "name": "onpolicy",
        "model": setup.model,
        "gpu": {"name": _known_gpu(engine)},
        "engine": {
            "dtype": str(engine.dtype).removeprefix("torch."),
            "num_gpu_blocks_override": engine.num_blocks,
            "block_size": engine.block_size,
            "max_num_seqs": setup.max_num_seqs,
            "max_num_batched_tokens": setup.max_num_batched_tokens,
            "max_model_len": longest,
        },
        "cost": inline(cost),
        "workload": {
            "input_len": {"kind": "uniform", "low": PROMPT // 10, "high": 2 * PROMPT},
            "output_len": {"kind": "uniform", "low": ANSWER // 10, "high": 2 * ANSWER},
            **workload,
        },
        "seed": seed,
    }
    return check_scenario(raw, Places("calibrate", {}))


def _known_gpu(engine: "Engine") -> str:
    """Name the GPU for the scenario's bookkeeping; an unknown one counts as the largest."""
    name = str(describe_engine(engine)["gpu"])
    try:
        return find_gpu(name).name
    except ValueError:
        return max(GPUS.values(), key=lambda gpu: gpu.memory).name


def inline(cost: PiecewiseCost) -> dict[str, object]:
    """Write a cost as a scenario has it."""
    names = [f.name for f in fields(cost) if f.init and f.name not in RESERVED]
    values = {name: getattr(cost, name) for name in names}
    values["cudagraph_capture_sizes"] = [*cost.cudagraph_capture_sizes]
    return {"kind": "piecewise", **values}


def refit(source: Path, out: Path, tell: Tell = print) -> StepFit:
    """Fit a profile to a file of measured steps, meta.json beside it; write profile and plot."""
    meta: Meta = read_meta(source.parent / META)
    rows = read_rows(source)
    name = profile_name(meta)
    sizes = capture_sizes(meta, source.parent / META)
    fit = named(fit_rows(rows, str(meta["clock"]), sizes), name)
    text = steps_profile(fit, meta).encode()
    written = write_together(
        out,
        {
            f"{name}.yaml": lambda file: file.write(text),
            "predicted-vs-measured.png": partial(plot_fit, fit),
        },
    )
    for kind, errors in fit.held_out.items():
        tell(
            f"held out, {kind}: {errors.points} steps, median {errors.median:.1%}, "
            f"P95 {errors.p95:.1%}, bias {errors.bias:+.1%}"
        )
    if "onpolicy" not in fit.held_out:
        warnings.warn(
            f"{source}: has no steps of held-out runs; the errors are those of the grid",
            HeadwayWarning,
            stacklevel=2,
        )
    tell(f"written to {out}: {', '.join(path.name for path in written)}")
    return fit
