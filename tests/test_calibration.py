"""Calibration: what goes into the synthetic tables comes out, and so do the shipped profiles."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibration.fit_tables import (
    MODEL,
    calibrate,
    compose,
    cross_validate,
    fit_cost,
    main,
    mixed_factors,
    relative_errors,
)
from calibration.kernel_tables import SYSTEMS, Kernels, System, find_table, read_kernels, read_table
from calibration.mixed_steps import MULTIPROCESSORS, MixedFactors, fit_mixed, read_mixed
from calibration.profile_text import FitReport, profile_text
from simulator.errors import HeadwayError
from simulator.model import load_model
from simulator.piecewise import TERMS, PiecewiseCost
from simulator.profile import PROFILES, read_profile
from simulator.request import Step
from simulator.yamlpos import parse

LLAMA = load_model(MODEL)
FACTORS = MixedFactors(1.0, 1.0, 1.0, 0.1, 0.2)
TRUTH = PiecewiseCost(
    dense=[[1, 8e-3], [128, 1e-2], [512, 3e-2], [8192, 0.48]],
    head=6e-4,
    head_per_sequence=4e-6,
    decode=5e-4,
    decode_per_context=8e-8,
    decode_per_sequence=9e-6,
    prefill=4e-4,
    prefill_per_pair=3e-9,
    prefill_per_token=1e-6,
)


def synthetic() -> Kernels:
    """Make the tables of a GPU that follows TRUTH exactly."""
    tokens = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192], float)
    count, mean = (grid.ravel() for grid in np.meshgrid(tokens[:11], [2, 32, 512, 4096, 16_384.0]))
    prompts, length = (grid.ravel() for grid in np.meshgrid([1, 4.0], [16, 64, 256, 1024, 2048.0]))
    context, pairs = count * mean, prompts * length * (length + 1) / 2
    return Kernels(
        tokens,
        np.array([TRUTH.dense_seconds(int(n)) for n in tokens]),
        np.maximum(6e-4, 4e-6 * tokens),
        {
            "N": count,
            "S": context,
            "seconds": 5e-4 + np.maximum(8e-8 * context, 9e-6 * count),
        },
        {
            "n": prompts,
            "T": prompts * length,
            "P": pairs,
            "seconds": 4e-4 + 3e-9 * pairs + 1e-6 * prompts * length,
        },
    )


def test_a_fit_finds_what_made_the_tables() -> None:
    """Tables that follow the form give back its coefficients, and no error."""
    kernels = synthetic()
    samples = compose(kernels)
    cost = fit_cost(kernels, samples, None, LLAMA)
    for term in TERMS[1:9]:
        assert getattr(cost, term) == pytest.approx(getattr(TRUTH, term), rel=1e-3), term
    assert relative_errors(cost, samples).max() < 1e-3
    assert [cost.mixed_per_context, cost.mixed_per_sequence, cost.serial_per_token] == [
        cost.decode_per_context,
        cost.decode_per_sequence,
        0.0,
    ]


def test_one_bad_measurement_does_not_bend_the_fit() -> None:
    """A kernel timed three times too slow is an outlier, not a slope."""
    kernels = synthetic()
    kernels.decode["seconds"][-1] *= 3
    cost = fit_cost(kernels, compose(kernels), None, LLAMA)
    assert cost.decode_per_context == pytest.approx(8e-8, rel=0.02)


def test_mixed_steps_under_flash_attention_2() -> None:
    """With factors of 1 a decode costs 64 pairs per key, and 128 keys at least."""
    kernels = synthetic()
    cost = fit_cost(kernels, compose(kernels), FACTORS, LLAMA)
    assert cost.mixed_per_context == pytest.approx(64 * 3e-9, rel=1e-3)
    assert cost.mixed_per_sequence == pytest.approx(128 * 64 * 3e-9, rel=1e-3)
    assert cost.serial_per_token == pytest.approx(64 * 3e-9 * 108 / 32, rel=1e-3)


def test_cross_validation_hides_whole_token_counts() -> None:
    """A table that is straight survives the loss of a row, one with a stair does not."""
    kernels = synthetic()
    straight = replace(kernels, dense=8e-3 + 5e-5 * kernels.tokens)
    stair = replace(kernels, dense=np.where(kernels.tokens < 512, 1e-2, 2e-2))

    def errors(tables: Kernels) -> np.ndarray:
        samples = compose(tables)
        return cross_validate(tables, samples, lambda k, s: fit_cost(k, s, None, LLAMA))

    assert errors(straight).max() < 2e-3
    assert errors(stair).max() > 0.1
    samples = compose(kernels)
    inner = (samples.tokens > 1) & (samples.tokens < 8192)
    assert len(errors(straight)) == inner.sum()


def test_samples_are_the_steps_they_stand_for() -> None:
    """Each composed sample becomes a step with its tokens, sequences and context."""
    samples = compose(synthetic())
    for step, prompts, tokens, count, context in zip(
        samples.steps(),
        samples.prompts,
        samples.tokens,
        samples.sequences,
        samples.context,
        strict=True,
    ):
        assert step.tokens == tokens
        assert step.decodes + len(step.prefills) == count
        assert (step.decodes == 0, step.context) == (prompts, context)


def report(system: System) -> FitReport:
    """Make a report of the synthetic tables."""
    kernels = synthetic()
    samples = compose(kernels)
    cost = fit_cost(kernels, samples, mixed_or_none(system), LLAMA)
    errors = relative_errors(cost, samples)
    return FitReport(replace(cost, overhead=1e-3), {"tokens": (1, 8192)}, errors, errors)


def mixed_or_none(system: System) -> MixedFactors | None:
    """Give factors to the GPU that needs them."""
    return FACTORS if system.attention == "FlashAttention-2" else None


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.key)
def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path, system: System) -> None:
    """The file says everything that the cost needs, and where it comes from."""
    made = report(system)
    path = tmp_path / "made.yaml"
    path.write_text(profile_text(LLAMA, system, made, mixed_or_none(system)))
    profile = read_profile(path)
    assert profile.cost == made.cost
    assert profile.cost.limits == made.limits
    assert profile.hardware["gpu"] == system.gpu.name
    raw, _ = parse(path.read_text(), "made.yaml")
    assert isinstance(raw, dict)
    assert [source["licence"] for source in raw["sources"]] == ["Apache-2.0", "MIT"][
        : 2 if mixed_or_none(system) else 1
    ]


def test_tables_are_found_in_upstreams_tree_and_flattened(tmp_path: Path) -> None:
    """Both ways of keeping the published files work; neither is an error that names them."""
    path = SYSTEMS[0].path("gemm")
    with pytest.raises(HeadwayError, match=r"has neither a100_sxm/gemm/vllm/0\.14\.0/gemm_perf"):
        find_table(tmp_path, path)
    flat = tmp_path / path.replace("/", "__")
    flat.touch()
    assert find_table(tmp_path, path) == flat
    tree = tmp_path / path
    tree.parent.mkdir(parents=True)
    tree.touch()
    assert find_table(tmp_path, path) == tree


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the extra to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(HeadwayError, match=r"pip install 'headway\[parquet\]'"):
        read_table(tmp_path, SYSTEMS[0].path("gemm"))


def test_main_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2, nothing written."""
    out = tmp_path / "profiles"
    assert main(["--data", str(tmp_path), "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}: has neither ")
    assert not out.exists()


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.key)
def test_the_shipped_profiles_come_out_of_the_data(data: Path, system: System) -> None:
    """Fitting again gives the shipped numbers, and the errors that the file states."""
    pytest.importorskip("pyarrow")
    again = calibrate(data, system, LLAMA, mixed_factors(data, system))
    path = PROFILES / f"{MODEL}.{system.key}.bf16.yaml"
    shipped = read_profile(path).cost
    assert isinstance(shipped, PiecewiseCost)
    for term in TERMS:
        assert getattr(again.cost, term) == pytest.approx(getattr(shipped, term), rel=5e-3), term
    np.testing.assert_allclose(again.cost.dense, shipped.dense, rtol=1e-3)
    assert shipped.limits == again.limits
    raw, _ = parse(path.read_text(), str(path))
    assert isinstance(raw, dict)
    said = raw["fit"]
    assert np.median(again.errors) == pytest.approx(said["median_relative_error"], abs=5e-4)
    held = said["cross_validation"]
    assert np.median(again.held_out) == pytest.approx(held["median_relative_error"], abs=2e-3)
    assert np.percentile(again.held_out, 95) == pytest.approx(held["p95_relative_error"], abs=5e-3)
    assert held["median_relative_error"] < 0.03
    assert said["p95_relative_error"] < 0.06


def test_kernels_add_up(data: Path) -> None:
    """Steps of Llama-3-8B on an A100, by a sum of the same tables made independently."""
    pytest.importorskip("pyarrow")
    samples = compose(read_kernels(data, SYSTEMS[0], LLAMA))
    found = {
        (bool(prompt), int(n), int(context or tokens)): seconds
        for prompt, n, context, tokens, seconds in zip(
            samples.prompts,
            samples.sequences,
            samples.context,
            samples.tokens,
            samples.seconds,
            strict=True,
        )
    }
    assert found[False, 1, 1024] == pytest.approx(11.43e-3, rel=0.01)
    assert found[False, 128, 128 * 1024] == pytest.approx(24.12e-3, rel=0.01)
    assert found[True, 1, 2048] == pytest.approx(122.7e-3, rel=0.01)


@pytest.mark.parametrize("gpu", sorted(MULTIPROCESSORS))
def test_the_rule_for_mixed_steps_holds_on_each_gpu(data: Path, gpu: str) -> None:
    """On either measured GPU tiles, blocks and the serial limit are within a sixth of theory."""
    factors = fit_mixed(read_mixed(data, gpu), MULTIPROCESSORS[gpu])
    for factor in (factors.keys, factors.block, factors.serial):
        assert 6 / 7 < factor < 7 / 6
    assert factors.median_error < 0.1


def test_a_decode_step_of_the_a100_profile(data: Path) -> None:
    """The A100 profile says of 64 sequences what the tables say, plus the overhead."""
    pytest.importorskip("pyarrow")
    cost = read_profile(PROFILES / f"{MODEL}.a100.bf16.yaml").cost
    assert isinstance(cost, PiecewiseCost)
    samples = compose(read_kernels(data, SYSTEMS[0], LLAMA))
    wanted = ~samples.prompts & (samples.sequences == 64) & (samples.context == 64 * 1024)
    said = cost.execute(Step([], 64, 64 * 1024)) - cost.overhead
    assert said == pytest.approx(float(samples.seconds[wanted][0]), rel=0.03)
