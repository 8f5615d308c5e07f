"""Calibrate: measure an engine within a time limit, fit a profile, write both down.

Steps of real schedules come last and in two kinds: runs to fit to and runs to judge the fit by,
under the same three loads with other seeds.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from calibration.engine_steps.fit import HELD_OUT_PREFIX, StepFit, fit_rows
from calibration.engine_steps.grid import LONGEST, Limits, Setup, make_grid
from calibration.engine_steps.refit import (
    META,
    STEPS,
    Echo,
    describe_engine,
    refit,
    utc_now,
    write_meta,
)
from calibration.engine_steps.steps_file import Row, RowFile, pack_rows, read_rows
from calibration.profile_yaml import cost_block
from simulator.costs.piecewise import PiecewiseCost
from simulator.models.gpus import GPUS, find_gpu
from simulator.models.load import load_model
from simulator.scenario.load import check_scenario
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError, ScenarioError
from simulator.util.files import write_atomic
from simulator.util.yaml_lines import SourceMap

if TYPE_CHECKING:
    from gpu_backend.engine import Engine

GRID_SHARE, RUNS_SHARE = 0.5, 0.4  # of the time
LOADS = (0.5, 0.8, 1.3)  # of what the engine can serve
MIXES = (((20, 400), (6, 120)), ((64, 2000), (16, 384)), ((400, 1600), (8, 200)))
"""Tokens of the runs' prompts and answers, from and to. The last is held out: the fit is judged by
lengths that it has not seen."""


def calibrate(setup: Setup, out: Path, echo: Echo = print) -> StepFit:
    """Measure and fit; write steps.csv.gz as it grows, then meta.json, profile and plot.

    Ctrl-C ends the measurement early: what there is then gets fitted.
    """
    from gpu_backend.cuda.graphs import mixed_sizes_for
    from gpu_backend.engine import Engine

    until = monotonic() + setup.budget_s
    assert setup.model is not None
    try:
        spec = load_model(setup.model)
    except ScenarioError as error:
        raise HeadwayError(f"--model: {error.what}") from None
    if (setup.max_model_len or 0) > spec.max_position_embeddings:
        raise HeadwayError(
            f"--max-model-len {setup.max_model_len}: is more than the "
            f"{spec.max_position_embeddings} positions of {spec.name}"
        )
    if (out / STEPS).exists():
        raise HeadwayError(
            f"--out {out}: has measurements already; give another folder, or refit them with "
            f"--from {out / STEPS}"
        )
    engine = Engine(
        spec, setup.num_blocks, setup.block_size, setup.device, max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens, graphs=not setup.no_graphs,
        mixed_sizes=mixed_sizes_for(min(setup.graph_tokens, setup.max_num_batched_tokens)),
    )  # fmt: skip
    meta = describe_engine(engine) | {
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": setup.max_num_batched_tokens,
        "max_model_len": _longest(engine, setup),
        "seed": setup.seed,
        "started": utc_now(),
        "ended": "",
    }
    out.mkdir(parents=True, exist_ok=True)
    file = RowFile(out / STEPS)
    write_meta(out / META, meta)
    try:
        measure_all(engine, setup, file, until, echo=echo)
    except KeyboardInterrupt:
        echo("interrupted: fitting the steps measured so far")
    finally:
        file.flush()
    write_meta(out / META, meta | {"ended": utc_now()})
    rows = read_rows(out / STEPS)
    write_atomic(out / STEPS, pack_rows(rows))
    return refit(out / STEPS, out, echo)


def measure_all(
    engine: "Engine",
    setup: Setup,
    file: RowFile,
    until: float,
    *,
    echo: Echo = print,
    clock: Callable[[], float] = monotonic,
) -> None:
    """Measure grid, swaps and runs until the clock says so; rows go to the file as measured."""
    from calibration.engine_steps.measure import live_rows, measure_grid, measure_swaps
    from gpu_backend.live import run_live, warm_up
    from gpu_backend.sensors import Sensors

    rng = np.random.default_rng(setup.seed)
    rows: list[Row] = []

    def sink(row: Row) -> None:
        rows.append(row)
        file.add(row)

    with Sensors(engine.device) as sensors:
        cache = (engine.num_blocks - 1) * engine.block_size
        sizes = setup.max_num_seqs, setup.max_num_batched_tokens, _longest(engine, setup)
        points = make_grid(Limits(*sizes, cache), rng)
        warm_up(engine)
        left = until - clock()
        share = GRID_SHARE * left
        passes = measure_grid(engine, points, sink, rng, share, sensors=sensors, clock=clock)
        echo(f"grid: {len(points)} points in {passes} whole passes, {len(rows)} rows")
        measure_swaps(engine, sink, rng)
        file.flush()
        kind = "wall" if engine.device.type == "cuda" else "cpu"
        guess = fit_rows(rows, kind, engine.capture_sizes, engine.mixed_sizes).cost
        seconds = min(RUNS_SHARE * left, until - clock())
        for name, scenario in _runs(engine, setup, guess, seconds):
            if clock() > until:
                echo("the time is over before all runs were done")
                return
            live = run_live(scenario, engine.device.type, "exec", engine=engine, warm_s=0.2)
            found = live_rows(live, name, sensors.latest)
            for row in found:
                sink(row)
            if live.result.interrupted:
                raise KeyboardInterrupt
            file.flush()
            echo(f"{name}: {len(found)} steps")


def _runs(
    engine: "Engine", setup: Setup, guess: PiecewiseCost, seconds: float
) -> Iterator[tuple[str, Scenario]]:
    """Yield runs under every load, so many requests in each that all take the time given."""
    lengths = [_lengths(mix, _longest(engine, setup)) for mix in MIXES]
    capacity = []  # requests/s of each mix
    for mix in lengths:
        probe = run(_scenario(engine, setup, guess, {**mix, "num_prompts": 100}, 0))
        capacity.append(float(probe.summary()["request_throughput"]))
    each = 0.8 * seconds / (len(LOADS) * len(MIXES))  # the rest: between the steps
    for number in range(len(LOADS) * len(MIXES)):
        turn, place = divmod(number, len(LOADS))
        load, seed = LOADS[place], setup.seed + 1 + number
        chosen = (turn + place) % len(MIXES)  # every load with every mix, spread over the time
        workload = lengths[chosen] | {
            "num_prompts": max(10, min(400, int(each * capacity[chosen] * min(load, 1.0)))),
            "request_rate": load * capacity[chosen],
        }
        kind = HELD_OUT_PREFIX if chosen == len(MIXES) - 1 else "run"
        yield f"{kind}-load{load}-seed{seed}", _scenario(engine, setup, guess, workload, seed)


def _lengths(mix: tuple[tuple[int, int], tuple[int, int]], longest: int) -> dict[str, object]:
    """Return the lengths of a mix, as far as an engine's longest context goes."""
    limits = (longest // 2, longest // 4)
    found: dict[str, object] = {}
    for name, (low, high), most in zip(("input_len", "output_len"), mix, limits, strict=True):
        top = max(1, min(high, most))
        found[name] = {"kind": "uniform", "low": max(1, min(low, top // 2)), "high": top}
    return found


def _scenario(
    engine: "Engine", setup: Setup, cost: PiecewiseCost, workload: Mapping[str, object], seed: int
) -> Scenario:
    """Write the scenario of a run."""
    raw: dict[str, Any] = {
        "name": "onpolicy",
        "model": setup.model,
        "gpu": {"name": _known_gpu(engine)},
        "engine": {
            "name": "textbook",
            "dtype": str(engine.dtype).removeprefix("torch."),
            "num_gpu_blocks_override": engine.num_blocks,
            "block_size": engine.block_size,
            "max_num_seqs": setup.max_num_seqs,
            "max_num_batched_tokens": setup.max_num_batched_tokens,
            "max_model_len": _longest(engine, setup),
        },
        "cost": cost_block(cost),
        "workload": dict(workload),
        "seed": seed,
    }
    return check_scenario(raw, SourceMap("calibrate", {}))


def _longest(engine: "Engine", setup: Setup) -> int:
    return min(setup.max_model_len or LONGEST, engine.spec.max_position_embeddings)


def _known_gpu(engine: "Engine") -> str:
    """Name the GPU for the scenario's bookkeeping; an unknown one counts as the largest."""
    try:
        return find_gpu(engine.gpu_name).name
    except ValueError:
        return max(GPUS.values(), key=lambda gpu: gpu.memory).name
