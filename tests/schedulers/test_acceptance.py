"""What is published of the acceptance of drafts: by model, by method, in a run and in the docs."""

import csv
from pathlib import Path

import pytest

from simulator.core import speculative_config
from simulator.core.speculative_config import TYPICAL, DraftConfig, SpeculativeConfig, published
from simulator.models.load import shipped_models
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run


def test_typical_acceptance_is_the_published_one_of_its_model_else_of_its_method() -> None:
    """0.7125 for EAGLE-3 on Llama-3.1-8B: as if the number stood there; 0.66 on others."""
    kind, draft = {"method": "eagle3", "num_speculative_tokens": 3}, DraftConfig()
    typical, number = (
        SpeculativeConfig(acceptance=one, draft=draft, **kind) for one in ("typical", 0.7125)
    )
    assert typical.on("llama-3.1-8b").accepted(7, 3, 200) == number.accepted(7, 3, 200)
    other = typical.on("llama-3-70b")
    assert other.acceptance == pytest.approx(0.66, abs=0.005)
    assert other.accepted(7, 3, 200) == typical.accepted(7, 3, 200)
    assert number.on("llama-3.1-8b") is number
    with pytest.raises(ValueError, match="typical is known of eagle, eagle3, mtp; give a number"):
        SpeculativeConfig(num_speculative_tokens=3, acceptance="typical")


def test_a_run_prints_what_is_published_for_its_model() -> None:
    drafts = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": "typical"}
    sets = {"engine": {"speculative_config": drafts}, "workload": {"num_prompts": 40}}
    typical, number = (
        run(load_scenario({"model": "qwen3-8b"} | sets | {"engine": {"speculative_config": one}}))
        for one in (drafts, drafts | {"acceptance": 0.59})
    )
    told = typical.summary()
    assert told["headway"]["engines"][0]["acceptance"] == {
        "mean": pytest.approx(0.59),
        "least": 0.5,
        "most": 0.65,
        "where": "Qwen3-8B (vLLM 32030)",
    }
    assert told["mean_tpot_ms"] == number.summary()["mean_tpot_ms"]


def test_the_docs_say_what_is_published() -> None:
    """The file that the page names has rows of shipped models; the means are the page's."""
    page = (Path(__file__).parents[2] / "docs" / "speculative.md").read_text("utf-8")
    file = Path(speculative_config.__file__).with_name("acceptance.csv")
    assert file.as_posix().endswith("/simulator/core/acceptance.csv")
    assert "`simulator/core/acceptance.csv`" in page
    rows = [*csv.DictReader(file.read_text("utf-8").splitlines())]
    assert len(rows) == 10
    assert "ten published figures" in page
    assert all(row["model"] in ("", *shipped_models()) for row in rows)
    for method in TYPICAL:
        assert f"{published(method, '')['mean']:.3f} for `{method}`" in page.replace("\n", " ")
