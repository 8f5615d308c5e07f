"""Calibration: measured rows as files, the grid, fits that must find what the rows were made of,
and the measurement that comes with the package."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.engine_steps.fit import HELD_OUT_PREFIX, fit_rows
from calibration.engine_steps.grid import Limits, Point, make_grid
from calibration.engine_steps.refit import (
    META,
    STEPS,
    profile_name,
    read_meta,
    refit,
    steps_profile,
)
from calibration.engine_steps.steps_file import (
    ROWS_PER_MEMBER,
    Row,
    RowFile,
    make_step,
    pack_rows,
    read_rows,
)
from headway.cli.main import main
from simulator.core.request import Step, Swap
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.profile import PROFILES, read_profile
from simulator.util.environment import source_commit
from simulator.util.errors import HeadwayError, HeadwayWarning

MEASURED = Path(__file__).parents[2] / "calibration/measurements/cpu/tiny-test"
ON_H100 = MEASURED.parents[1] / "h100/llama-3.1-8b"
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
    swap_out=2e-5,
    swap_out_per_block=1e-5,
    swap_in=1e-5,
    swap_in_per_block=4e-6,
)
ROW = Row(
    run="r", kind="decode", point=0, turn=1, decodes=2, context=30, longest=20,
    device_s=1.5e-3, host_s=2e-4, wall_s=2e-3,
)  # fmt: skip


def made(point: Point, run: str = "grid") -> Row:
    """A row that takes just what TRUE says."""
    count = len(point.contexts)
    context = sum(point.contexts) + count
    seconds = TRUE.execute(make_step(point.chunks, count, context)).seconds
    return replace(
        ROW,
        run=run,
        kind=point.kind,
        point=point.number if run == "grid" else -1,
        decodes=count,
        context=context,
        chunks=point.chunks,
        device_s=seconds - 1e-4,
        host_s=1e-4,
        wall_s=seconds,
    )


def grid() -> list[Point]:
    return make_grid(Limits(64, 512, 4096, 65_520), np.random.default_rng(0))


def swap(out: tuple[int, ...], back: tuple[int, ...]) -> Row:
    seconds = TRUE.swap_seconds(make_step((), 0, 0, out, back))
    kind = "swap_out" if out else "swap_in"
    empty = replace(ROW, kind=kind, point=-1, decodes=0, context=0, host_s=0.0)
    return replace(empty, swapped_out=out, swapped_in=back, device_s=seconds, wall_s=seconds)


def test_rows_survive_the_file(tmp_path: Path) -> None:
    """What is written is read, to four digits; the same rows give the same bytes."""
    rows = [ROW, replace(ROW, chunks=((0, 16), (512, 1)), swapped_out=(3, 4), swapped_in=(2,))]
    path = tmp_path / STEPS
    path.write_bytes(pack_rows(rows))
    assert read_rows(path) == rows
    assert pack_rows(rows) == pack_rows(read_rows(path))


def test_a_file_that_grows_can_be_read_at_any_time(tmp_path: Path) -> None:
    """Whole batches are there without a flush, the rest after it; it is never overwritten."""
    path = tmp_path / STEPS
    file = RowFile(path)
    for turn in range(ROWS_PER_MEMBER + 5):
        file.add(replace(ROW, turn=turn))
    assert len(read_rows(path)) == ROWS_PER_MEMBER
    file.flush()
    assert [row.turn for row in read_rows(path)] == list(range(ROWS_PER_MEMBER + 5))
    with pytest.raises(HeadwayError, match="is there already"):
        RowFile(path)
    assert len(read_rows(path)) == ROWS_PER_MEMBER + 5


def test_a_file_cut_off_while_it_grew_is_read_without_its_end(tmp_path: Path) -> None:
    """A kill in the middle of a batch costs that batch; where none is whole it is an error."""
    path = tmp_path / STEPS
    file = RowFile(path)
    for turn in range(2 * ROWS_PER_MEMBER):
        file.add(replace(ROW, turn=turn))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(HeadwayWarning, match="is cut off; read without its end"):
        assert [row.turn for row in read_rows(path)] == list(range(ROWS_PER_MEMBER))


def test_damaged_files_are_told(tmp_path: Path) -> None:
    """Cut short, not packed, other columns, wrong values: one line that names the place."""
    path = tmp_path / STEPS
    whole = pack_rows([replace(ROW, turn=turn) for turn in range(500)])
    for content, said in [
        (whole[:-20], "damaged: Compressed file ended"),
        (b"run,kind\n", "damaged: Not a gzipped file"),
        (_packed("a,b\n1,2\n"), r":1: no measured steps: lacks columns run, kind"),
        (_packed(_text(whole).replace("decode,0,7,", "decode,0,x,")), ":9: invalid literal"),
        (_packed(_text(whole).replace(",0.002,", ",nan,", 1)), ":2: times must be seconds"),
        (_packed(_text(whole).split("\n")[0] + "\n"), "has no rows"),
    ]:
        path.write_bytes(content)
        with pytest.raises(HeadwayError, match=said) as caught:
            read_rows(path)
        assert len(caught.value.messages) == 1


def _packed(text: str) -> bytes:
    import gzip

    return gzip.compress(text.encode())


def _text(packed: bytes) -> str:
    import gzip

    return gzip.decompress(packed).decode()


@given(
    sequences=st.integers(1, 300),
    tokens=st.integers(1, 4096),
    length=st.integers(32, 20_000),
    cache=st.integers(64, 1_000_000),
    seed=st.integers(0, 9),
)
def test_the_grid_keeps_to_what_the_engine_holds(
    sequences: int, tokens: int, length: int, cache: int, seed: int
) -> None:
    """No point has more sequences, tokens, context or cache than there can be."""
    limits = Limits(sequences, tokens, length, cache)
    for point in make_grid(limits, np.random.default_rng(seed)):
        count = len(point.contexts) + len(point.chunks)
        assert 1 <= count <= sequences
        assert len(point.contexts) + sum(new for _, new in point.chunks) <= tokens
        assert max([*point.contexts, *map(sum, point.chunks)]) < length
        assert point.kv_tokens <= cache


def test_a_fit_finds_what_the_rows_were_made_of() -> None:
    """Rows without noise: every step within 2 % also where held out, the swaps exactly."""
    points = grid()
    rows = [made(point) for point in points]
    rows += [made(point, "run-1") for point in points[::2]]
    rows += [made(point, f"{HELD_OUT_PREFIX}-1") for point in points[1::2]]
    rows += [swap((n,), ()) for n in (1, 4, 64)] + [swap((), (n,)) for n in (1, 4, 64)]
    fit = fit_rows(rows)
    assert fit.held_out["all"].p95 < 0.02
    assert abs(fit.held_out["all"].bias) < 0.005
    assert fit.cost.decode_per_context == pytest.approx(5e-7, rel=0.05)
    assert fit.cost.prefill_per_pair == pytest.approx(5e-8, rel=0.05)
    for name in ("swap_out", "swap_out_per_block", "swap_in", "swap_in_per_block"):
        assert getattr(fit.cost, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)


def test_outliers_do_not_pull_a_fit_down() -> None:
    """Noise of 30 % either way leaves the sum of all steps unbiased."""
    rng = np.random.default_rng(1)
    rows = []
    for point in grid() * 10:
        row = made(point, "run-1")
        rows.append(replace(row, device_s=row.device_s * float(rng.uniform(0.7, 1.3))))
    assert abs(fit_rows(rows).trained.bias) < 0.01


def test_points_of_the_grid_count_by_their_median() -> None:
    """One wild measurement of three changes nothing."""
    rows = [made(point) for point in grid()]
    wild = [replace(row, device_s=row.device_s * 50) for row in rows]
    assert fit_rows(rows * 2 + wild).cost == fit_rows(rows).cost


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(HeadwayError, match="2 different steps are too few to fit"):
        fit_rows([made(point) for point in grid()[:2]] * 20)


def test_chunks_and_swaps_by_hand() -> None:
    """7 keys of the first chunk, 3 of the second; two copies out of 5 blocks, one back."""
    cost = PiecewiseCost(
        dense=[[1, 1.0]],
        prefill_per_key=10.0,
        prefill_per_sequence=100.0,
        swap_out=1000.0,
        swap_out_per_block=3.0,
        swap_in_per_block=7.0,
    )
    step = make_step(((2, 5), (0, 3)), 0, 0)
    assert cost.execute(step).seconds == 1 + 10 * 10 + 100 * 2
    step.add_copies().outgoing = [
        Swap(step.prefills[0].request, 2),
        Swap(step.prefills[0].request, 3),
    ]
    step.add_copies().incoming = [Swap(step.prefills[0].request, 4)]
    assert cost.execute(step).seconds == 1 + 100 + 200 + 2000 + 15 + 28
    assert cost.execute(Step([], 1, 5)).seconds == cost.leap(Step([], 1, 5), 1).seconds[0] == 1.0


def test_a_profile_says_what_was_fitted(tmp_path: Path) -> None:
    """The text of a profile, read again, is the cost, its range and its hardware."""
    meta = read_meta(MEASURED / META)
    fit = fit_rows([made(point) for point in grid()])
    path = tmp_path / f"{profile_name(meta)}.yaml"
    path.write_text(steps_profile(fit, meta))
    profile = read_profile(path)
    assert profile.cost == fit.cost
    assert profile.cost.limits == fit.limits
    assert profile.hardware["gpu"] == "CPU"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("rows", "profile"),
    [
        (MEASURED, PROFILES / "tiny-test.cpu.fp32.yaml"),
        pytest.param(
            ON_H100, ON_H100 / "llama-3.1-8b.h100.bf16.headway.yaml", marks=pytest.mark.slow
        ),
    ],
)
def test_a_profile_is_the_fit_of_its_measurement(rows: Path, profile: Path, tmp_path: Path) -> None:
    """To the letter; and the fit describes steps that it had not seen."""
    fit = refit(rows / STEPS, tmp_path, lambda _: None)
    assert (tmp_path / profile.name).read_text() == profile.read_text()
    assert fit.held_out["onpolicy"].points > 500
    assert fit.held_out["all"].median < 0.2
    assert abs(fit.held_out["all"].bias) < 0.2
    assert (tmp_path / "predicted-vs-measured.png").stat().st_size > 10_000


def test_a_copy_without_history_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_COMMIT", "0123456789ab")
    assert source_commit() == "0123456789ab"


def test_bad_calls_end_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and what there was is still there."""
    there = tmp_path / "m"
    there.mkdir()
    (there / STEPS).write_bytes((MEASURED / STEPS).read_bytes()[:5000])
    for arguments, said in [
        (["--from", str(there / STEPS)], f"no such file: {there / 'meta.json'}"),
        (["--model", "tiny-test", "--budget-s", "-1"], "--budget-s -1.0: must be more than 0"),
        ([], "--model: say which model to measure"),
        (["--model", "x", "--from", "y"], "--from: cannot be used with --model"),
        (["--device", "cuda", "--from", "y"], "--device: needs --model, not --from"),
        (["--model", "tiny-test", "--set", "a=1"], "--set: needs --from-requests, --from-"),
        (["--model", "tiny-test", "--budget-s", "inf"], "--budget-s inf: must be more than 0"),
        (["--model", "tiny-test", "--max-model-len", "0"], "--max-model-len 0: must be 1 or more"),
        (["--model", "tiny-test", "--max-model-len", "9999"], "9999: is more than the 8192 posi"),
        (["--from", str(tmp_path / "none.csv.gz")], "none.csv.gz: no such file: "),
        (["--model", "tiny-test", "--num-blocks", "2"], "--num-blocks 2: must have 128 tokens"),
        (["--model", "tiny-test", "--seed", "-1"], "--seed -1: must be 0 or more"),
    ]:
        assert main(["calibrate", *arguments]) == 2
        assert said in capsys.readouterr().err
    (there / META).write_bytes((MEASURED / META).read_bytes())
    before = (there / STEPS).read_bytes()
    assert main(["calibrate", "--from", str(there / STEPS)]) == 2
    assert "damaged" in capsys.readouterr().err
    assert (there / STEPS).read_bytes() == before
    assert sorted(path.name for path in there.iterdir()) == [META, STEPS]
    (there / META).write_text("{")
    assert main(["calibrate", "--from", str(there / STEPS)]) == 2
    assert "meta.json: damaged" in capsys.readouterr().err


@pytest.mark.medium
def test_a_grid_without_runs_fits_with_a_warning(tmp_path: Path) -> None:
    """A measurement that was killed early is still good for a profile."""
    rows = [row for row in read_rows(MEASURED / STEPS) if row.point >= 0 and row.turn == 0]
    (tmp_path / STEPS).write_bytes(pack_rows(rows))
    (tmp_path / META).write_bytes((MEASURED / META).read_bytes())
    with pytest.warns(HeadwayWarning, match="no steps of held-out runs"):
        fit = refit(tmp_path / STEPS, tmp_path, lambda _: None)
    assert fit.trained.median < 0.4


@pytest.mark.medium
@pytest.mark.parametrize("verb", ["live", "calibrate"])
def test_without_torch_one_line_names_the_extra(verb: str, tmp_path: Path) -> None:
    """Exit code 2 and nothing written; the other commands never miss it."""
    scenario = str(Path(__file__).parents[2] / "scenarios/live-tiny-cpu.yaml")
    what = [scenario] if verb == "live" else ["--model", "tiny-test"]
    code = (
        "import sys; sys.modules['torch'] = None; from headway.cli.main import main; "
        f"sys.exit(main({[verb, *what, '--out', str(tmp_path / 'out')]!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "headway: error: torch is not installed: pip install 'headway[gpu]' brings it\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_short_calibration_end_to_end(tmp_path: Path) -> None:
    """A few seconds give a file, a profile that a scenario can name, and a picture."""
    pytest.importorskip("torch", reason="needs the extra `gpu`")
    out = tmp_path / "c"
    sizes = ["--num-blocks", "300", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
    asked = ["--model", "tiny-test", "--budget-s", "6", "--max-model-len", "256", *sizes]
    code = main(["calibrate", *asked, "--out", str(out)])
    assert code == 0
    rows = read_rows(out / STEPS)
    assert {"decode", "prefill", "probe", "swap_out", "swap_in"} <= {row.kind for row in rows}
    assert read_meta(out / META)["ended"]
    assert (
        read_profile(out / "tiny-test.cpu.fp32.yaml").cost.execute(Step([], 1, 100)).seconds > 1e-5
    )
    assert main(["calibrate", "--model", "tiny-test", "--out", str(out)]) == 2
    assert read_rows(out / STEPS) == rows
