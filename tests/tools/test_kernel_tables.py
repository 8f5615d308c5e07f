"""Calibration: what goes into the synthetic tables comes out, and so do the shipped profiles."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from calibration.errors import Errors
from simulator.core.request import Step
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.profile import PROFILES, read_profile, shipped_profiles
from simulator.costs.terms import TERMS
from simulator.models.load import load_model
from simulator.util.errors import HeadwayError
from simulator.util.yaml_lines import parse
from tools.profiles.attention import TimedSteps
from tools.profiles.compose import Kernels, Target, compose_kernels
from tools.profiles.fit import shipped_targets, target_name, write_all
from tools.profiles.fit_target import (
    FitReport,
    compose_steps,
    cross_validate,
    fit_cost,
    fit_target,
    thin_table,
)
from tools.profiles.llmservingsim import MixedFactors, fit_mixed, read_mixed
from tools.profiles.product_slowdown import FACTORS, measure_factors, sustained
from tools.profiles.profile_text import profile_text
from tools.profiles.tables import (
    GPU_TABLES,
    GpuTables,
    find_table,
    read_table,
    run_command,
)

MODEL = "llama-3-8b"
LLAMA = load_model(MODEL)
A100 = Target(LLAMA, GPU_TABLES[0])
GRID = [tables for tables in GPU_TABLES if not tables.layers]
LAYERS = [tables for tables in GPU_TABLES if tables.layers]
FACTORS_OF_ONE = MixedFactors(1.0, 1.0, 1.0, 0.1, 0.2)
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
    number, length = (grid.ravel() for grid in np.meshgrid([1, 4.0], [16, 64, 256, 1024, 2048.0]))
    context, pairs = count * mean, number * length * (length + 1) / 2
    return Kernels(
        tokens,
        np.array([TRUTH.dense_seconds(int(n)) for n in tokens]),
        tokens,
        np.maximum(6e-4, 4e-6 * tokens),
        TimedSteps.concatenated(
            TimedSteps.of_decodes(count, context, 5e-4 + np.maximum(8e-8 * context, 9e-6 * count)),
            TimedSteps.of_prompts(number, length, 4e-4 + 3e-9 * pairs + 1e-6 * number * length),
        ),
    )


def test_a_fit_finds_what_made_the_tables() -> None:
    """Tables that follow the form give back its coefficients, and no error."""
    kernels = synthetic()
    samples = compose_steps(kernels)
    cost = fit_cost(kernels, samples, None, A100)
    for term in TERMS[1:9]:
        assert getattr(cost, term) == pytest.approx(getattr(TRUTH, term), rel=1e-3), term
    assert np.abs(samples.predict(cost) / samples.seconds - 1).max() < 1e-3
    assert [cost.mixed_per_context, cost.mixed_per_sequence, cost.serial_per_token] == [
        cost.decode_per_context,
        cost.decode_per_sequence,
        0.0,
    ]


def test_one_bad_measurement_does_not_bend_the_fit() -> None:
    """A kernel timed three times too slow is an outlier, not a slope."""
    kernels = synthetic()
    kernels.attention.seconds[40] *= 3
    cost = fit_cost(kernels, compose_steps(kernels), None, A100)
    assert cost.decode_per_context == pytest.approx(8e-8, rel=0.02)


def test_mixed_steps_under_flash_attention_2() -> None:
    """With factors of 1 a decode costs 64 pairs per key, and 128 keys at least."""
    kernels = synthetic()
    cost = fit_cost(kernels, compose_steps(kernels), FACTORS_OF_ONE, A100)
    assert cost.mixed_per_context == pytest.approx(64 * 3e-9, rel=1e-3)
    assert cost.mixed_per_sequence == pytest.approx(128 * 64 * 3e-9, rel=1e-3)
    assert cost.serial_per_token == pytest.approx(64 * 3e-9 * 108 / 32, rel=1e-3)


def test_cross_validation_hides_whole_token_counts() -> None:
    """A table that is straight survives the loss of a row, one with a stair does not."""
    kernels = synthetic()
    straight = replace(kernels, dense=8e-3 + 5e-5 * kernels.tokens)
    stair = replace(kernels, dense=np.where(kernels.tokens < 512, 1e-2, 2e-2))

    def errors(kernels: Kernels) -> Errors:
        samples = compose_steps(kernels)
        return cross_validate(kernels, samples, lambda k, s: fit_cost(k, s, None, A100))[0]

    assert errors(straight).p95 < 2e-3
    assert errors(stair).p95 > 0.1
    samples = compose_steps(kernels)
    inner = (samples.tokens > 1) & (samples.tokens < 8192)
    assert errors(straight).points == inner.sum()


def test_products_hold_the_pace_of_the_longest() -> None:
    """Of 4 and 8 tokens a token takes 1.5 s: 3 take no less, and 1 takes what it took."""
    tokens = np.array([1, 2, 3, 4, 8, 16], float)
    seconds = np.array([5, 3, 3.5, 6.5, 11.5, np.nan])
    np.testing.assert_allclose(sustained(tokens, seconds), [5, 3, 4.5, 6.5, 12, np.nan])


def test_samples_are_the_steps_they_stand_for() -> None:
    """Each composed sample becomes a step with its tokens, sequences and context."""
    found = compose_steps(synthetic())
    columns = (found.chunks, found.tokens, found.sequences, found.context, found.pairs)
    for step, chunks, tokens, count, context, pairs in zip(found.steps(), *columns, strict=True):
        assert step.tokens == tokens
        assert step.decodes + len(step.prefills) == count
        assert (step.decodes == 0, step.context) == (chunks > 0, context)
        assert pairs == sum(c.tokens * (c.tokens + 1) / 2 for c in step.prefills)


def test_a_thinned_table_keeps_its_stairs() -> None:
    """Rows on a straight line go, both sides of a stair stay."""
    tokens = np.array([1, 2, 4, 8, 16, 128, 129, 192, 256], float)
    seconds = np.where(tokens <= 128, 1 + tokens / 128, 3.0)
    assert [row[0] for row in thin_table(tokens, seconds)] == [1, 128, 129, 256]


def report(tables: GpuTables) -> FitReport:
    """Make a report of the synthetic tables."""
    kernels = synthetic()
    samples = compose_steps(kernels)
    mixed = FACTORS_OF_ONE if tables.tiles_decodes else None
    cost = fit_cost(kernels, samples, mixed, Target(LLAMA, tables))
    errors = Errors.of(samples.predict(cost), samples.seconds)
    sources = frozenset({"AIConfigurator", "LLMServingSim"} if mixed else {"AIConfigurator"})
    notes = ("all-reduce: not timed",)
    return FitReport(cost, {"tokens": (1, 8192)}, errors, errors, notes, sources, mixed)


@pytest.mark.parametrize("tables", GRID, ids=lambda tables: tables.key)
def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path, tables: GpuTables) -> None:
    """The file says everything that the cost needs, and where it comes from."""
    made = report(tables)
    path = tmp_path / "made.yaml"
    target = Target(LLAMA, tables, 2, "fp8", "fp8")
    path.write_text(profile_text(target, made))
    profile = read_profile(path)
    assert profile.cost == made.cost
    assert profile.cost.name == "made (in part scaled roofline)"
    assert profile.cost.limits == made.limits
    assert profile.hardware == {
        "gpu": tables.gpu.name,
        "tensor_parallel_size": 2,
        "dtype": "fp8",
        "kv_cache_dtype": "fp8",
    }
    raw, _ = parse(path.read_text(), "made.yaml")
    assert isinstance(raw, dict)
    assert raw["fallback"] == ["all-reduce: not timed"]
    licences = ["Apache-2.0", "MIT", "MIT"][: 3 if tables.tiles_decodes else 2]
    assert [source["licence"] for source in raw["sources"]] == licences


def test_tables_are_found_in_upstreams_tree_and_flattened(tmp_path: Path) -> None:
    """All ways of keeping the published files work; none is an error that names them."""
    path = "a100_sxm/gemm/vllm/0.14.0/gemm_perf.parquet"
    with pytest.raises(HeadwayError, match=r"has neither a100_sxm/gemm/vllm/0\.14\.0/gemm_perf"):
        find_table(tmp_path, path, "aiconfigurator")
    flat = tmp_path / path.replace("/", "__")
    flat.touch()
    assert find_table(tmp_path, path, "aiconfigurator") == flat
    tree = tmp_path / path
    tree.parent.mkdir(parents=True)
    tree.touch()
    assert find_table(tmp_path, path, "aiconfigurator") == tree


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the extra to install."""
    (tmp_path / "gemm.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(HeadwayError, match=r"pip install 'headway\[parquet\]'"):
        read_table(tmp_path, "gemm.parquet", "aiconfigurator", ())


def test_main_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2, nothing written."""
    out = tmp_path / "profiles"
    words = ["--data", str(tmp_path), "--out", str(out)]
    assert run_command("Fit.", write_all, words, out="folder") == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}: has neither ")
    assert not out.exists()


@cache
def some_targets() -> list[Target]:
    """Return 22 of the shipped profiles' targets, each kind of table among them."""
    targets = list(shipped_targets())
    layers = [target for target in targets if target.tables.layers]
    return [*targets[:4], *targets[17::29], layers[0], layers[-1]]


def test_the_shipped_profiles_are_those_that_should_be() -> None:
    """One for each target, under the names by which they are found."""
    assert len(some_targets()) == 22
    wanted = {target_name(target) for target in shipped_targets()}
    assert wanted | {"tiny-test.cpu.fp32"} == set(shipped_profiles())


@pytest.mark.many
@pytest.mark.parametrize("number", range(22))
def test_the_shipped_profiles_come_out_of_the_data(data: Path, number: int) -> None:
    """Fitting again gives the shipped numbers, and the errors that the file states."""
    pytest.importorskip("pyarrow")
    target = some_targets()[number]
    again = fit_target(data, target)
    path = PROFILES / f"{target_name(target)}.yaml"
    shipped = read_profile(path).cost
    assert isinstance(shipped, PiecewiseCost)
    for term in TERMS:
        assert getattr(again.cost, term) == pytest.approx(getattr(shipped, term), rel=1e-2), term
    np.testing.assert_allclose(again.cost.dense, shipped.dense, rtol=1e-3)
    assert shipped.limits == again.limits
    raw, _ = parse(path.read_text(), str(path))
    assert isinstance(raw, dict)
    said = raw["fit"]
    assert again.errors.median == pytest.approx(said["median_relative_error"], abs=1e-3)
    assert said["median_relative_error"] < 0.03
    held = said["cross_validation"]
    assert again.held_out.median == pytest.approx(held["median_relative_error"], abs=5e-3)


def test_kernels_add_up(data: Path) -> None:
    """Steps of Llama-3-8B on an A100, by a sum of the same tables made independently.

    Of decodes only: products of many tokens carry the factor of `in_sequence` here.
    """
    pytest.importorskip("pyarrow")
    samples = compose_steps(compose_kernels(data, A100))
    columns = (samples.decodes, samples.context, samples.seconds)
    found = {(int(n), int(s)): seconds for n, s, seconds in zip(*columns, strict=True) if n}
    assert found[1, 1024] == pytest.approx(10.71e-3, rel=0.01)
    assert found[128, 128 * 1024] == pytest.approx(24.12e-3, rel=0.03)


@pytest.mark.parametrize("tables", LAYERS, ids=lambda tables: tables.key)
def test_the_rule_for_mixed_steps_holds_on_each_gpu(data: Path, tables: GpuTables) -> None:
    """On either measured GPU tiles, blocks and the serial limit are within a sixth of theory."""
    factors = fit_mixed(read_mixed(data, tables), tables.multiprocessors)
    for factor in (factors.keys, factors.block, factors.serial):
        assert 6 / 7 < factor < 7 / 6
    assert factors.median_error < 0.1


@pytest.mark.parametrize("tables", GPU_TABLES[:2], ids=lambda tables: tables.key)
def test_the_factors_of_products_in_sequence_come_out_of_the_data(
    data: Path, tables: GpuTables
) -> None:
    """They are what the two sources' tables say."""
    pytest.importorskip("pyarrow")
    np.testing.assert_allclose(measure_factors(data, tables), FACTORS[tables.key], atol=1e-3)


def test_a_decode_step_of_the_a100_profile(data: Path) -> None:
    """The A100 profile says of 64 sequences what the tables say, without any overhead."""
    pytest.importorskip("pyarrow")
    cost = read_profile(PROFILES / f"{MODEL}.a100.bf16.yaml").cost
    samples = compose_steps(compose_kernels(data, A100))
    found = samples
    wanted = (found.decodes == 64) & (found.context == 64 * 1024)
    said = cost.execute(Step([], 64, 64 * 1024)).seconds
    assert said == pytest.approx(float(samples.seconds[wanted][0]), rel=0.03)
