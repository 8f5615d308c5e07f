"""The fit against a GPU that is a formula, where the truth is known."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'headway[gpu]'")

from calibration.engine_steps.fit import StepFit, fit_rows
from calibration.engine_steps.grid import Limits, make_grid
from calibration.engine_steps.steps_file import Row, make_step
from gpu_backend.cuda.graphs import MIXED_SIZES
from simulator.costs.piecewise import PiecewiseCost
from simulator.util.errors import HeadwayError
from tests.gpu_backend.virtual_gpu import VirtualEngine, calibrated

MODEL, LAUNCHES = "llama-3.2-1b", 8e-3  # of 32 layers; this one has 16


def fitted() -> tuple[StepFit, int]:
    engine = VirtualEngine(MODEL, LAUNCHES)
    return calibrated(engine, MODEL, 2.0), engine.steps


@pytest.fixture(scope="module")
def found() -> tuple[StepFit, int]:
    return fitted()


@pytest.mark.medium
def test_a_calibration_of_it_is_the_same_every_time(found: tuple[StepFit, int]) -> None:
    """Its clock counts the steps' seconds, warm-up's too: no other process changes what is run."""
    again, steps = fitted()
    assert steps == found[1]
    assert again.samples == found[0].samples
    assert again.cost == found[0].cost


def test_steps_bound_by_launches_say_nothing_of_kernels() -> None:
    """Noise lifts some of them above the floor; taken for slow kernels they would put a piece of a
    prompt after a long history far above it, too."""
    random = np.random.default_rng(0)
    true = PiecewiseCost(
        dense=[[1, 7e-4], [200, 7e-4], [2048, 7.2e-3]], prefill_per_pair=3e-10,
        prefill_per_sequence=8e-5, decode_per_context=1e-8, mixed_per_context=1e-8,
    )  # fmt: skip
    host, launch = 250e-6, 4e-3
    rows = []
    for point in make_grid(Limits(256, 2048, 8192, 390_000), random):
        context = sum(point.contexts) + len(point.contexts)
        kernels = true.execute(make_step(point.chunks, len(point.contexts), context)).seconds
        kernels *= random.normal(1.0, 0.01)
        device = max(kernels, launch * random.normal(1.0, 0.02))
        row = Row(
            run="grid", kind=point.kind, point=point.number, turn=0, chunks=point.chunks,
            decodes=len(point.contexts), context=context, device_s=device, wall_s=device + host,
        )  # fmt: skip
        rows.append(row)
    cost = fit_rows(rows, "wall", launched=True).cost
    assert cost.launch == pytest.approx(launch, rel=0.01)
    assert cost.overhead == pytest.approx(host, rel=0.02)
    for start, new in ((4096, 512), (3906, 548), (2181, 357), (0, 64)):
        seconds = cost.execute(make_step(((start, new),), 0, 0)).seconds
        assert seconds == pytest.approx(launch + host, rel=0.04)


@pytest.mark.medium
def test_the_last_token_of_a_prompt_runs_in_a_graph(found: tuple[StepFit, int]) -> None:
    """A step of 8 decodes and one such token is padded to 16, as 9 decodes are."""
    rows = [sample.row for sample in found[0].samples]
    one = next(row for row in rows if row.decodes == 9 and not row.chunks)
    assert one.bucket == 16
    ends = replace(one, decodes=8, context=one.context - 700, chunks=((699, 1),))
    sizes = found[0].cost.cudagraph_capture_sizes
    assert fit(*rows, ends, sizes=sizes).samples[-1].row.chunks == ()
    with pytest.raises(HeadwayError, match=r"18 tokens were padded to 16.* cudagraph_mixed_sizes"):
        fit(*rows, replace(ends, chunks=((690, 10),)), sizes=sizes)


def fit(*rows: Row, sizes: tuple[int, ...]) -> StepFit:
    rows = tuple(replace(row, point=-1) for row in rows)
    return fit_rows(rows, "wall", sizes, MIXED_SIZES, launched=True)
