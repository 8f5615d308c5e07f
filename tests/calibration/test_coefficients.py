"""The register of coefficients: complete, and each with its source."""

import json
from pathlib import Path

import pytest

from calibration.profile_commands import coefficients
from headway.cli.main import main
from headway.planning import sensitivity
from simulator.costs.overhead import NEWEST, find_overhead
from simulator.models.gpus import GPUS

ROOT = Path(__file__).parents[2]
ROWS = list(coefficients())


def test_each_has_value_unit_method_and_source() -> None:
    for row in ROWS:
        assert row["value"], row
        assert row["unit"], row
        assert row["source"], row
        assert row["method"] in ("measured", "vendor", "assumed")


def test_scripts_are_there() -> None:
    for script in {row["script"] for row in ROWS} - {"", "make accuracy"}:
        path = script if script.endswith(".py") else f"{script.replace('.', '/')}.py"
        assert (ROOT / path).is_file(), script
    assert "\naccuracy:" in (ROOT / "Makefile").read_text()


def test_no_term_of_todays_engine_and_no_part_of_an_interval_is_left_out() -> None:
    names = {row["name"] for row in ROWS}
    terms = vars(find_overhead(NEWEST, GPUS["H200"], "auto", overlapped=True))
    set_ = {name for name, value in terms.items() if value and not name.endswith("_interval")}
    assert set_ - names == {"multiprocessors", "nccl_ranks"}  # of a GPU; of a term that is 0
    parts = {"CLIENT", "REST", "EXPERTS", "DRAWN", "UNTOLD", "ALIKE", "HOST", "IN_MEAN"}
    assert parts <= names
    assert all(hasattr(sensitivity, name) for name in parts)


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", "coefficients"]) == 0
    text = capsys.readouterr().out
    assert "host_ranks: 0.002 s a step\n    measured: load stages (0.15), several GPUs" in text
    assert main(["profile", "show", "coefficients", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [row["name"] for row in ROWS]
