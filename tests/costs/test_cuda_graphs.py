"""CUDA graphs of a few batch sizes: a pure decode step costs what the next size costs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.engine_steps.fit import StepFit, fit_rows
from calibration.engine_steps.grid import Limits, Point, make_grid
from calibration.engine_steps.refit import META, STEPS, read_meta, refit, steps_profile
from calibration.engine_steps.steps_file import Row, make_step, pack_rows, read_rows
from calibration.profile_yaml import cost_block
from simulator.core.request import Step
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.profile import read_profile
from simulator.costs.tables import MAX_TABLE_TOKENS
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from tests.support.costs import cost_of

SIZES = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
TRUE = PiecewiseCost(
    dense=[[1, 1e-3], [8, 2e-3], [64, 6e-3], [512, 40e-3]],
    overhead=2e-4,
    head_per_sequence=1e-4,
    decode_per_context=5e-7,
    prefill=3e-4,
    prefill_per_pair=5e-8,
    prefill_per_key=4e-7,
    mixed_per_context=6e-7,
    mixed_per_sequence=1e-5,
    cudagraph_capture_sizes=SIZES,
)
MEASURED = Path(__file__).parents[2] / "calibration/measurements/cpu/tiny-test"


@given(
    sizes=st.lists(st.integers(1, 600), unique=True).map(sorted),
    last=st.integers(2, 300),
    count=st.integers(1, 700),
    context=st.integers(1, 10_000),
)
def test_a_batch_takes_what_the_next_graph_takes(
    sizes: list[int], last: int, count: int, context: int
) -> None:
    """To the last bit, without the terms of attention; a larger batch takes what it always did."""
    plain = PiecewiseCost(dense=[[1, 0.1], [last, 0.7]], head_per_sequence=1e-3, overhead=0.01)
    cost = replace(plain, cudagraph_capture_sizes=sizes)
    padded = next((size for size in sizes if size >= count), count)
    assert (
        cost.execute(Step([], count, context)).seconds
        == plain.execute(Step([], padded, context)).seconds
    )


SCENARIO = """name: graphs
model: llama-3-8b
engine: {max_num_seqs: 40, num_gpu_blocks_override: 900, max_model_len: 2000}
workload: {num_prompts: 120, request_rate: 25, input_len: 200, output_len: {kind: uniform, low: 2,
  high: 90}}
"""


def test_a_run_leaps_with_graphs_as_it_steps(tmp_path: Path) -> None:
    """The same requests to the last bit, later than without padding; each decode step is padded."""
    path = tmp_path / "s.yaml"
    logs = {}
    for name, sizes in (("graphs", SIZES), ("plain", [])):
        cost = json.dumps(cost_block(replace(TRUE, cudagraph_capture_sizes=sizes)))
        path.write_text(SCENARIO + f"cost: {cost}\n")
        leaping, stepwise = (run(load_scenario(path), stepwise=s).logs[0] for s in (False, True))
        assert leaping.request_rows == stepwise.request_rows
        logs[name] = stepwise.steps
    assert logs["graphs"]["end"][-1] > logs["plain"]["end"][-1]
    alone = logs["graphs"][logs["graphs"]["prefill_tokens"] == 0]
    assert set(alone["decodes"]) - set(SIZES)
    for row in alone[:: max(1, len(alone) // 50)]:
        step = Step([], int(row["decodes"]), int(row["context"]))
        assert row["end"] - row["start"] == pytest.approx(TRUE.execute(step).seconds, abs=1e-12)


@pytest.mark.parametrize(
    "sizes",
    ["[2, 1]", "[1, 1]", "[0, 2]", "[1.5]", "'12'", "[true]", f"[{MAX_TABLE_TOKENS + 1}]", "8"],
)
def test_sizes_that_cannot_be_are_refused(sizes: str, tmp_path: Path) -> None:
    """One line names the place in the profile."""
    path = tmp_path / "p.yaml"
    text = "cost:\n  kind: piecewise\n  dense: [[1, 1.0]]\n"
    path.write_text(f"{text}  cudagraph_capture_sizes: {sizes}\n")
    said = "p.yaml:4: cost.cudagraph_capture_sizes: must be whole numbers, ascending, from 1 to"
    with pytest.raises(HeadwayError, match=said) as caught:
        read_profile(path)
    assert len(caught.value.messages) == 1


# ------------------------------------------------------------------------------- the fit


def made(point: Point) -> Row:
    """A row that takes just what TRUE says, padded as its graphs pad."""
    count = len(point.contexts)
    context = sum(point.contexts) + count
    seconds = TRUE.execute(make_step(point.chunks, count, context)).seconds
    bucket = 0 if point.chunks else next(size for size in SIZES if size >= count)
    path = "graph" if bucket else "eager"
    return Row(
        run="grid", kind=point.kind, point=point.number, turn=0, path=path, bucket=bucket,
        decodes=count, context=context, chunks=point.chunks,
        device_s=seconds, host_s=1e-4, wall_s=seconds,
    )  # fmt: skip


ROWS = [
    *map(made, make_grid(Limits(64, 512, 4096, 65_520), np.random.default_rng(0))),
    *(
        made(Point(1000 + k, "decode", (40 * k,) * k, (), coarse=False)) for k in range(1, 65)
    ),
]  # fmt: skip


def fitted() -> StepFit:
    return fit_rows(ROWS, "wall", SIZES)


def test_a_fit_finds_the_cost_behind_padded_steps() -> None:
    """Rows without noise: each path's own terms within 1 %, every step within 0.5 %."""
    cost = fitted().cost
    assert cost.cudagraph_capture_sizes == (*SIZES,)
    for name in ("decode_per_context", "prefill_per_pair", "prefill_per_key"):
        assert getattr(cost, name) == pytest.approx(getattr(TRUE, name), rel=0.01)
    assert cost.decode_per_sequence == cost.decode_least == cost.launch == 0
    assert [size for size, _ in cost.graph_dense] == SIZES
    rise = cost.graph_dense[-1][1] - cost.graph_dense[0][1]
    head = TRUE.head_per_sequence * (64 - 1)
    assert rise == pytest.approx(TRUE.dense_seconds(64) - TRUE.dense_seconds(1) + head, rel=0.01)
    for row in ROWS:
        assert cost.execute(row.step).seconds == pytest.approx(row.wall_s, rel=0.005)


def test_without_the_buckets_the_same_rows_fit_badly() -> None:
    """The same times taken for those of the bare batch: off by more, as a whole and at P95."""
    bare = [replace(row, bucket=0) for row in ROWS]
    assert fitted().trained.p95 < 0.005
    assert fit_rows(bare, "wall").trained.p95 > 0.05


def test_a_staircase_is_found_where_there_is_one() -> None:
    """Products that cost a tile of 64 tokens more or nothing: straight lines miss that by far."""
    tiles = [[n, 1e-3 * (1 + (n - 1) // 64)] for k in range(64, 513, 64) for n in (k, k + 1)]
    true = replace(TRUE, dense=[[1, 1e-3], *tiles])
    rows = []
    for row in ROWS:
        seconds = true.execute(row.step).seconds
        rows.append(replace(row, device_s=seconds, wall_s=seconds))
    cost = fit_rows(rows, "wall", SIZES).cost
    assert cost.execute(make_step(((0, 300),), 0, 0)).seconds == pytest.approx(
        true.execute(make_step(((0, 300),), 0, 0)).seconds, rel=0.01
    )
    for size in (66, 100, 127, 140, 190, 200, 380, 450):
        rise = cost.dense_seconds(size) - cost.dense_seconds(60)
        assert rise == pytest.approx(1e-3 * ((size - 1) // 64), rel=0.02)


def test_rows_that_were_padded_to_something_else_are_refused() -> None:
    with pytest.raises(HeadwayError, match=r"row 2: 5 decodes were padded to 16, which is not"):
        fit_rows([replace(ROWS[0], decodes=5, context=50, bucket=16), *ROWS], "wall", SIZES)


def test_a_refit_takes_the_sizes_from_meta_and_writes_them(tmp_path: Path) -> None:
    """steps.csv.gz and meta.json in, a profile out that pads: read again it is the same cost."""
    meta = read_meta(MEASURED / META) | {"clock": "wall", "cudagraph_capture_sizes": SIZES}
    (tmp_path / META).write_text(json.dumps(meta))
    (tmp_path / STEPS).write_bytes(pack_rows(ROWS))
    with pytest.warns(match="no steps of held-out runs"):
        fit = refit(tmp_path / STEPS, tmp_path, lambda _: None)
    profile = read_profile(tmp_path / "tiny-test.cpu.fp32.headway.yaml")
    assert profile.cost == fit.cost
    assert (
        profile.cost.execute(Step([], 17, 100)).seconds
        == profile.cost.execute(Step([], 24, 100)).seconds
    )
    assert "cudagraph_capture_sizes: [1, 2, 4, 8, 16, 24," in steps_profile(fit, meta)
    (tmp_path / META).write_text(json.dumps(meta | {"cudagraph_capture_sizes": "x"}))
    with pytest.raises(HeadwayError, match=r"meta\.json: cudagraph_capture_sizes must be whole"):
        refit(tmp_path / STEPS, tmp_path, lambda _: None)


def test_a_scenario_can_write_the_sizes_down() -> None:
    cost = cost_of({"kind": "piecewise", "dense": [[1, 1.0], [9, 9.0]],
                      "cudagraph_capture_sizes": [4]})  # fmt: skip
    assert [cost.execute(Step([], n, 0)).seconds for n in (1, 4, 5)] == [4.0, 4.0, 5.0]


# ------------------------------------------------------------- what else a row may hold


def test_columns_that_came_later_may_be_empty_or_missing(tmp_path: Path) -> None:
    """An older file reads as rows that do not know; what is known survives the file."""
    import gzip

    row = replace(ROWS[0], unique_ctx=900, n_logits=3, sm_mhz=1980.0, power_w=431.25)
    path = tmp_path / STEPS
    path.write_bytes(pack_rows([row, ROWS[0]]))
    known, unknown = read_rows(path)
    assert (known.unique_ctx, known.n_logits, known.sm_mhz, known.power_w) == (900, 3, 1980, 431.25)
    assert (unknown.unique_ctx, unknown.sm_mhz) == (None, None)
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    older = "\n".join(line.rsplit(",", 4)[0] for line in lines) + "\n"
    path.write_bytes(gzip.compress(older.encode()))
    assert [found.n_logits for found in read_rows(path)] == [None, None]


# ------------------------------------------------------------- steps with prompts

MIXED_SIZES = [16, 64, 128]
MIXED = replace(
    TRUE, graph_mixed=[[16, 8e-4], [64, 1.5e-3], [128, 3e-3]], prefill=1e-3, launch=9e-3
)  # fmt: skip


def prompts(decodes: int, context: int, *chunks: tuple[int, int]) -> Step:
    return make_step(chunks, decodes, context)


def test_a_fit_finds_the_graphs_of_steps_with_prompts(tmp_path: Path) -> None:
    """Rows without noise give every size's row back, and a refit writes them down."""
    rows = []
    for row in ROWS:
        tokens = row.tokens
        size = next((n for n in MIXED_SIZES if n >= tokens), 0) if row.chunks else row.bucket
        size = 0 if len(row.chunks) > 8 else size
        seconds = MIXED.execute(row.step).seconds
        path = "graph" if size else "eager"
        rows.append(replace(row, bucket=size, path=path, device_s=seconds, wall_s=seconds))
    cost = fit_rows(rows, "wall", SIZES, MIXED_SIZES, launched=True).cost
    assert [size for size, _ in cost.graph_mixed] == MIXED_SIZES
    for row in rows:
        assert cost.execute(row.step).seconds == pytest.approx(row.wall_s, rel=0.02)
    wrong = replace(rows[-1], chunks=((0, 20),), decodes=1, context=9, bucket=128)
    said = r"21 tokens were padded to 128, which is not the next of cudagraph_mixed_sizes: \[16, 64"
    with pytest.raises(HeadwayError, match=said):
        fit_rows([*rows, wrong], "wall", SIZES, MIXED_SIZES)
    meta = read_meta(MEASURED / META) | {
        "clock": "wall", "cudagraph_capture_sizes": SIZES, "cudagraph_mixed_sizes": MIXED_SIZES,
    }  # fmt: skip
    (tmp_path / META).write_text(json.dumps(meta))
    (tmp_path / STEPS).write_bytes(pack_rows(rows))
    with pytest.warns(match="no steps of held-out runs"):
        fit = refit(tmp_path / STEPS, tmp_path, lambda _: None)
    assert read_profile(tmp_path / "tiny-test.cpu.fp32.headway.yaml").cost == fit.cost
    assert len(fit.cost.graph_mixed) == 3


@pytest.mark.parametrize("table", ["[[16.5, 1.0]]", "[[1, 2, 3]]", "[[70000, 1.0]]", "7"])
def test_tables_of_graphs_that_cannot_be_are_refused(table: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"cost:\n  kind: piecewise\n  dense: [[1, 1.0]]\n  graph_mixed: {table}\n")
    with pytest.raises(HeadwayError, match=r"p\.yaml:4: cost\.graph_mixed: ") as caught:
        read_profile(path)
    assert len(caught.value.messages) == 1
