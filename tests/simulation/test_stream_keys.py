"""A run without tables has the keys of one with them, but for those that the page names."""

from pathlib import Path

import numpy as np
import pytest

from headway.cli.main import main
from simulator.results.felt import MOST_NAMES
from simulator.simulation import stream
from tests.simulation.test_stream import FLEET, flat
from tests.support.scenarios import SMALL

PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"
FEATURES = [
    ["workload.clients=3"],
    ["workload.clients=4", "workload.priorities=[0, 1, 1, 10]"],
    ["workload.clients={number: 2}", "goodput={ttft: 20, tpot: 9}"],
    ["slo=[p99_ttft_ms<=100]"],
    ["workload.max_concurrency=5"],
    ["workload.request_rate=inf"],
    ["workload.diurnal={period: 5, amplitude: 1}"],
    ["workload.sessions={turns: 3, think_time: 0.2}"],
    ["engine.num_gpu_blocks_override=24", "engine.preemption_mode=swap"],
    ["engine.enable_prefix_caching=true", "workload.prefix_len=48"],
    ["engine.speculative_config={num_speculative_tokens: 2, acceptance: 0.6}"],
    [
        "engine={name: vllm, multimodal_config: {encoder_seconds: [[1, 0.01], [99, 0.02]]}}",
        "workload.multimodal={image: {tokens: 20}}",
    ],
    ["workload.max_tokens=40"],
    [FLEET + "}"],
    [FLEET + ", failures: {mtbf: 2, mttr: 0.5}}"],
    [FLEET + ", client: {timeout: 0.4, max_retries: 1}}"],
]


def keys_of(folder: Path, name: str, overrides: list[str]) -> set[str] | None:
    """Run a scenario by the command line; None: these overrides do not go together."""
    given = [word for one in overrides if one != "--no-tables" for word in ("--set", one)]
    more = [one for one in overrides if one == "--no-tables"]
    out = folder / name
    if main(["run", str(folder / "s.yaml"), *given, *more, "--out", str(out), "--quiet"]) == 2:
        return None
    import json

    return {*flat(json.loads((out / "summary.json").read_text()))}


def absent(folder: Path, overrides: list[str]) -> set[str] | None:
    """Return the keys that a run without tables lacks, by their first part under `headway`."""
    whole = keys_of(folder, "whole", overrides)
    streamed = keys_of(folder, "streamed", [*overrides, "--no-tables"])
    if whole is None or streamed is None:
        return None
    assert streamed - whole <= {"headway.percentile_error", "headway.diagnosis"}
    return {key.removeprefix("headway.").partition(".")[0] for key in whole - streamed}


@pytest.mark.filterwarnings("ignore")
def test_keys_that_a_run_without_tables_lacks_are_named_on_the_page(tmp_path, capsys):
    (tmp_path / "s.yaml").write_text(SMALL)
    page = PAGE.read_text().partition("## Runs of any length")[2].partition("\n## ")[0]
    draw, looked, lacking = np.random.default_rng(4), 0, set()
    for _ in range(24):
        drawn = draw.choice(len(FEATURES), size=draw.integers(1, 4), replace=False)
        overrides = ["workload.num_prompts=60", *(one for k in drawn for one in FEATURES[k])]
        found = absent(tmp_path, overrides)
        capsys.readouterr()
        if found is not None:
            looked += 1
            lacking |= found
    assert looked > 8
    assert lacking
    assert not [key for key in lacking if f"`{key}`" not in page]


@pytest.mark.filterwarnings("ignore")
def test_clients_in_parts_of_a_fleet_are_those_of_the_whole(tmp_path, capsys):
    (tmp_path / "s.yaml").write_text(SMALL)
    fleet = ["cluster={replicas: 4, router: round_robin}", "workload.clients=3"]
    assert absent(tmp_path, fleet) <= {"load", "contended_share"} | {
        *("fairness_windows", "jain_index", "jain_index_min"),
        *("service_difference_max", "service_difference_mean"),
    }


@pytest.mark.filterwarnings("ignore")
def test_more_clients_than_are_told_apart_are_null(tmp_path, monkeypatch):
    from tests.simulation.test_stream import scenario

    what = scenario(tmp_path, f"workload.clients={MOST_NAMES + 1}", "workload.num_prompts=2000")
    own = stream.run_streamed(what)["headway"]
    assert (own["per_client"], own["clients"]) == (None, None)
