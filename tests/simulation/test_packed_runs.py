"""Long runs pack what they have written: every file and export is as of one that does not."""

import warnings
from pathlib import Path

import pytest
import yaml

from headway.report.prometheus import metrics_text
from headway.report.timeline import write_timeline
from simulator.core import log, packed
from simulator.engine import drive
from simulator.scenario.load import load_scenario
from simulator.simulation.cluster import REWRITING
from simulator.simulation.run import run
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError, HeadwayWarning
from tests.support.random_scenarios import draw_scenario

SEEDS = range(24)


def files(
    folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch, page: int
) -> tuple[bool, dict[str, bytes]] | None:
    """Run a drawn scenario; say whether it packed, and give all files; None: it makes no sense."""
    for where in (packed, log):
        monkeypatch.setattr(where, "PAGE", page)
    try:
        result = run(load_scenario(folder / "s.yaml"), stepwise=seed % 2 == 0)
    except HeadwayError:
        return None
    written = {path.name: path.read_bytes() for path in write_run(result, folder / "out")}
    write_timeline(result, folder / "timeline.json")
    written["timeline"] = (folder / "timeline.json").read_bytes()
    written["metrics"] = metrics_text(result).encode()
    return any(one.pages for one in result.logs), written


@pytest.mark.many
@pytest.mark.parametrize("seed", SEEDS)
def test_packed_runs_write_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(draw_scenario(seed)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadwayWarning)
        monkeypatch.setattr(drive, "EVENTS_PER_LOOK", 1)
        monkeypatch.setattr(drive, "PAGES_LEFT", 1)
        plain = files(tmp_path, seed, monkeypatch, 1 << 30)
        small = files(tmp_path, seed, monkeypatch, 2)
    if plain is None or small is None:
        assert plain is small
        return
    assert plain[0] is False
    cluster = draw_scenario(seed).get("cluster", {})
    assert small[0] or (REWRITING | {"kv_transfer", "ec_transfer"}) & cluster.keys()
    assert plain[1] == small[1]
