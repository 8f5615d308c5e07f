"""Pages and pictures of long runs in parts: a share of the requests, and steps put together."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from headway.cli.main import main
from headway.figures import data, style
from headway.figures.data import Run
from headway.figures.fleet import fleet_levels
from headway.report.html.charts import charts
from headway.runs import parts, read_parts
from simulator.simulation import stream
from simulator.util.errors import HeadwayError
from tests.support.scenarios import SMALL

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
COUNT = 3000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run a fleet without tables; its folder has them in parts."""
    monkeypatch.setattr(stream, "CHUNK", 256)
    monkeypatch.setattr("simulator.engine.drive.EVENTS_PER_LOOK", 50)
    path, out = tmp_path / "s.yaml", tmp_path / "out"
    path.write_text(SMALL)
    sets = [f"workload.num_prompts={COUNT}", "workload.request_rate=200", "workload.clients=[2, 1]"]
    more = [word for value in sets for word in ("--set", value)]
    words = ["--set", "cluster={replicas: 3}", "--no-tables", "--out", str(out)]
    assert main(["run", str(path), "--quiet", *more, *words, "--tables-in", str(out)]) == 0
    return out


def thin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Read the folder as that of a long run."""
    monkeypatch.setattr(data, "FEW", 100)
    monkeypatch.setattr(read_parts, "KEPT", 1000)
    monkeypatch.setattr(read_parts, "CELLS", 3000)
    return Run.read(folder, "thin")


def test_sums_and_means_are_those_of_all_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, some = Run.read(folder, "whole"), thin(folder, monkeypatch)
    assert (whole.count, some.count, whole.each) == (COUNT, COUNT, 1.0)
    assert 900 < len(some.requests) < 1100
    assert len(some.steps) < len(whole.steps)
    merged = whole.requests.merge(some.requests, on="id", suffixes=("", "_some"))
    assert len(merged) == len(some.requests)
    assert (merged["e2el"] == merged["e2el_some"]).all()
    for one in (whole, some):
        one.steps["tokens"] = one.steps.decode_tokens * one.steps.steps
        one.steps["time"] = one.steps.running * one.steps.duration
        one.steps["blocks"] = one.blocks_used(one.steps) * one.steps.duration
    for name in ("steps", "duration", "tokens", "time", "blocks", "preempted"):
        mine, theirs = (one.steps.groupby("replica")[name].sum() for one in (some, whole))
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, err_msg=name)


def test_charts_are_about_those_of_all_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = charts([Run.read(folder, "x")])
    some = charts([thin(folder, monkeypatch)])
    pairs = [
        *((whole["overtime"][0][k], some["overtime"][0][k]) for k in ("running", "kv", "tokens")),
        *zip(
            (line[2] for line in whole["fleets"][0]["charts"]["load"]),
            (line[2] for line in some["fleets"][0]["charts"]["load"]),
            strict=True,
        ),
    ]
    for one, other in pairs:
        known, told = np.array(one, float), np.array(other, float)
        size = len(known) // 10 * 10
        means = [np.nanmean(v[:size].reshape(10, -1), axis=1) for v in (known, told)]
        assert abs(means[0] - means[1]).max() < 0.15 * means[0].max()
    quarter = [
        np.interp(25, c["latency"]["ttft"]["percent"][0], c["latency"]["ttft"]["ms"])
        for c in (whole, some)
    ]
    assert quarter[1] == pytest.approx(quarter[0], rel=0.1)


def test_queues_hold_those_who_came_within_a_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What steps put together tell of the queue is as of when they were scheduled."""
    some = thin(folder, monkeypatch)
    mean = fleet_levels(some, np.linspace(0.0, some.end, 20)).queue.mean()
    assert mean == pytest.approx(some.summary["headway"]["mean_waiting"], rel=0.15)


def test_a_page_says_of_how_many_requests_it_is_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = len(thin(folder, monkeypatch).requests)
    page = folder / "page.html"
    assert main(["report", str(folder), "--out", str(page)]) == 0
    assert f"{COUNT:,} requests · drawn of {kept:,} of them" in page.read_text()
    drawn: list[Figure] = []
    monkeypatch.setattr(style, "save", lambda figure, path: drawn.append(figure))
    for kind in ("throughput", "kv", "fleet", "policies"):
        assert main(["plot", kind, str(folder), "--out", str(folder / "x.png")]) == 0
        assert drawn[-1].get_supxlabel() == f"out: drawn of {kept:,} of {COUNT:,} requests"
    assert main(["plot", "occupancy", str(folder), "--out", str(folder / "y.png")]) == 2
    assert "has too many requests to show each seat" in capsys.readouterr().err
    assert not (folder / "y.png").exists()


def test_a_part_that_is_missing_or_damaged_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = (folder / "requests").glob("*.parquet")
    frame = pd.read_parquet(path)
    frame.assign(id=frame["id"].where(frame["id"] != 7, 8)).to_parquet(path)
    with pytest.raises(HeadwayError, match="requests: id: is not that of each request once"):
        thin(folder, monkeypatch)
    frame.assign(finish_reason="lost").to_parquet(path)
    with pytest.raises(HeadwayError, match="finish_reason: 'lost' is none of"):
        thin(folder, monkeypatch)
    frame.to_parquet(path)
    frame.assign(client=None).to_parquet(path.with_name("part-9.parquet"))  # another run's
    both = parts.join_parts(path.parent, ["client"])
    assert (both["client"].notna().sum(), len(both)) == (COUNT, 2 * COUNT)
    path.with_name("part-9.parquet").unlink()
    (steps,) = (folder / "steps").glob("*.parquet")
    steps.write_bytes(b"PAR1")
    with pytest.raises(HeadwayError, match=r"part-00000.parquet: damaged: "):
        thin(folder, monkeypatch)
