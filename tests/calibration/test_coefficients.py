"""The register of coefficients: complete, and each with its source."""

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from calibration.profile_commands import coefficients
from headway.cli.main import main
from simulator.costs.overhead import FILE
from simulator.costs.roofline import EFFICIENCIES, USUAL, measured_efficiencies
from tools.profiles.fit_efficiencies import measure_shares
from tools.profiles.tables import GPU_TABLES

ROOT = Path(__file__).parents[2]
ROWS = list(coefficients())
NAMES = {row["name"].partition(".")[0] for row in ROWS}
PLACES = yaml.safe_load((FILE.with_name("coefficients.yaml")).read_text("utf-8"))
SIZES = {
    *("BATCHES", "CLIFF", "LAST_PATCH", "LONGER", "LONGEST_TERM", "MAD_TO_SD"),
    *("MAX_TABLE_SEQUENCES", "MAX_TABLE_TOKENS", "MAX_TOKENS", "MEANS", "NEWEST", "QUANTILE"),
    *("SLICE", "STREAM", "TRITON_SINCE", "(STEADY, FIRST)"),
}
"""Numbers that are no time: of tables, of versions, of statistics; and what DRAWN is made of."""


def leaves(part: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Every value in a mapping of mappings, by its last key."""
    for key, value in part.items():
        if isinstance(value, Mapping):
            yield from leaves(value)
        else:
            yield key, str(value)


def constants(path: Path) -> Iterator[str]:
    """The names that a module gives to numbers, or to what is made of them."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            parts = [one for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
            if any(type(one.value) in (int, float) for one in parts):
                yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def test_each_has_value_unit_method_and_source() -> None:
    for row in ROWS:
        assert row["value"], row
        assert row["unit"], row
        assert row["source"], row
        assert row["method"] in ("measured", "vendor", "assumed")
        assert (row["method"] == "measured") == ("script" in row), row


def test_what_whole_runs_were_fitted_with_is_assumed_as_wide_as_a_part_of_the_interval() -> None:
    """Kernels and recorded steps measure; whole runs choose, and judge."""
    page = (ROOT / "docs/uncertainty.md").read_text("utf-8")
    for row in ROWS:
        assert "judge" not in row or {"width", "method"} <= {*row}, row
        assert "width" not in row or row["method"] == "assumed", row
        assert "width" not in row or f"| {row['width']} | " in page, row


def test_scripts_are_there_and_a_test_of_ci_runs_each() -> None:
    texts = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    for script in {row["script"] for row in ROWS if "script" in row}:
        path = script if script.endswith(".py") else f"{script.replace('.', '/')}.py"
        assert (ROOT / path).is_file(), script
        assert path.startswith("tests/") or any(f"from {script} import" in one for one in texts)
    assert {row["judge"] for row in ROWS if "judge" in row} == {"make accuracy"}
    assert "\naccuracy:" in (ROOT / "Makefile").read_text()
    assert "make accuracy" in (ROOT / ".ci/run").read_text()


def test_every_number_of_the_two_files_has_a_row() -> None:
    overheads = [row for row in PLACES if row["of"] == FILE.name]
    told = {(row["name"], str(row["value"])) for row in overheads}
    assert told == {*leaves(yaml.safe_load(FILE.read_text("utf-8")))}
    assert len(told) == len(overheads)
    shares = {name for name, _ in leaves(yaml.safe_load(EFFICIENCIES.read_text("utf-8")))}
    of_gpus = {row["name"] for row in PLACES if row["of"] == EFFICIENCIES.name}
    assert of_gpus == shares
    usual = {f"USUAL.{one.name}" for one in fields(USUAL) if getattr(USUAL, one.name)}
    assert usual <= {row["name"] for row in ROWS}


def test_every_number_of_the_code_has_a_row() -> None:
    modules = [*(ROOT / "simulator/costs").glob("*.py"), ROOT / "headway/planning/sensitivity.py"]
    found = {name for path in modules for name in constants(path)}
    assert {"AMD_SHARE", "REST"} <= found
    assert found - NAMES == SIZES


@pytest.mark.many
@pytest.mark.parametrize("tables", GPU_TABLES, ids=lambda tables: tables.key)
def test_shares_of_data_sheets_are_derived_again(data: Path, tables) -> None:
    known = measured_efficiencies()[tables.gpu.name]
    for name, value in measure_shares(data, tables).items():
        assert getattr(known, name) == pytest.approx(value, rel=5.1e-3), name


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", "coefficients"]) == 0
    text = capsys.readouterr().out
    assert (
        "host_ranks: 0.002 s a step\n    assumed: load stages (0.15), several GPUs; width: host"
        in text
    )
    assert main(["profile", "show", "coefficients", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [row["name"] for row in ROWS]
