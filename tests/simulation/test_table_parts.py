"""Tables of runs that keep no requests: written as they end, read by others as one table."""

from pathlib import Path

import numpy as np
import pytest
from joblib import parallel_config

from headway.cli.main import main
from headway.figures.data import Run
from simulator.simulation import partitions, stream
from simulator.simulation.partitions import run_partitions
from simulator.simulation.run import run
from simulator.simulation.stream import run_streamed
from simulator.util.errors import HeadwayError
from tests.simulation.test_partitions import LENGTHS, scenario
from tests.simulation.test_stream import CASES
from tests.simulation.test_stream import scenario as plain_scenario
from tests.support.scenarios import SMALL

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
FLEET = ["cluster={replicas: 6, pods: 3, router: random}", "workload.request_rate=300", *LENGTHS]

LOAD = ["asked_output_tokens", "cancel_after", "prefix_request", "prefix_tokens", "media"]
"""What it takes to play a table again: only where a run keeps all its requests."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CHUNK", 32)
    monkeypatch.setattr(stream, "PER_REPLICA", 8)
    monkeypatch.setattr("simulator.engine.drive.EVENTS_PER_LOOK", 7)


@pytest.mark.parametrize("apart", [False, True])
def test_the_folder_has_the_requests_and_steps_of_the_run(apart: bool, tmp_path: Path) -> None:
    what, folder = scenario(tmp_path, *FLEET, "engine.max_model_len=300"), tmp_path / "tables"
    (folder / "requests").mkdir(parents=True)
    (folder / "requests" / ".part-00000.parquet.1.tmp").touch()  # of a worker that was killed
    if apart:
        with parallel_config(backend="sequential"):
            run_partitions(what, tmp_path / "out", tables=folder)
    else:
        run_streamed(what, tables=folder)
    assert len([*(folder / "requests").iterdir()]) == (3 if apart else 1)
    kept = run(what)
    whole = kept.requests.drop(columns=LOAD, errors="ignore")
    requests = pd.read_parquet(folder / "requests").sort_values("id", ignore_index=True)
    assert list(requests.columns) == list(whole.columns)
    for name in requests.columns:
        expected = whole[name]
        if name in ("client", "finish_reason"):
            told, wanted = (one.astype(object).fillna("") for one in (requests[name], expected))
            assert told.tolist() == wanted.tolist()
        else:
            np.testing.assert_allclose(requests[name], expected, rtol=1e-9, err_msg=name)
    steps = pd.read_parquet(folder / "steps").sort_values(["replica", "start"], ignore_index=True)
    expected = kept.steps.sort_values(["replica", "start"], ignore_index=True)
    assert list(steps.columns) == list(expected.columns)
    np.testing.assert_allclose(steps.to_numpy(float), expected.to_numpy(float), rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_where_the_time_went_is_told_of_every_request(case: str, tmp_path: Path) -> None:
    """Also where a preemption, a copy or a try began in an earlier part of the run."""
    what, folder = plain_scenario(tmp_path, *CASES[case]), tmp_path / "tables"
    run_streamed(what, tables=folder)
    kept = run(what).requests.drop(columns=LOAD, errors="ignore")
    requests = pd.read_parquet(folder / "requests").sort_values("id", ignore_index=True)
    assert list(requests.columns) == list(kept.columns)
    for name in requests.columns:
        if name not in ("client", "finish_reason"):
            np.testing.assert_allclose(
                requests[name], kept[name], rtol=1e-9, atol=1e-9, err_msg=name
            )


def test_report_and_plot_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the summary; the rows are those of the run that keeps them, in the same order."""
    path, out, kept = tmp_path / "s.yaml", tmp_path / "out", tmp_path / "kept"
    path.write_text(SMALL)
    words = ["run", str(path), "--quiet", "--set", "cluster={replicas: 3}"]
    assert main([*words, "--format", "parquet", "--out", str(kept)]) == 0
    assert main([*words, "--no-tables", "--out", str(out), "--tables-in", str(out)]) == 0
    one, two = Run.read(out, "parts"), Run.read(kept, "kept")
    assert len([*(out / "requests").glob("*.parquet")]) == 1
    for mine, theirs in ((one.requests, two.requests), (one.steps, two.steps)):
        for name in theirs.columns:
            if name in ("client", "finish_reason"):
                told, wanted = (one[name].astype(object).fillna("") for one in (mine, theirs))
                assert told.tolist() == wanted.tolist()
            else:
                np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-9, err_msg=name)
    assert main(["report", str(out), "--out", str(tmp_path / "page.html")]) == 0
    assert "forgot its requests" in (tmp_path / "page.html").read_text()
    for kind in ("throughput", "kv", "fleet"):
        assert main(["plot", kind, str(out), "--out", str(tmp_path / f"{kind}.png")]) == 0
    assert main(["explain", str(out), "3"]) == 2
    assert "is in parts, which report and plot read" in capsys.readouterr().err


def test_other_programs_read_it_as_one_table(tmp_path: Path) -> None:
    what, folder = scenario(tmp_path, *FLEET), tmp_path / "tables"
    with parallel_config(backend="sequential"):
        run_partitions(what, tmp_path / "out", tables=folder)
    files = f"{folder}/requests/*.parquet"
    duckdb = pytest.importorskip("duckdb")
    assert duckdb.sql(f"select count(*), max(id) from '{files}'").fetchall() == [(300, 299)]
    polars = pytest.importorskip("polars")
    assert polars.scan_parquet(files).select(polars.len()).collect().item() == 300


def test_a_disk_that_fills_leaves_no_half_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow.parquet import ParquetWriter

    what, folder = scenario(tmp_path, *FLEET), tmp_path / "tables"
    write, calls = ParquetWriter.write_table, []

    def fills(self: ParquetWriter, table: object) -> None:
        calls.append(table)
        if len(calls) == 20:
            raise OSError(28, "No space left on device")
        write(self, table)

    monkeypatch.setattr(ParquetWriter, "write_table", fills)
    with parallel_config(backend="sequential"):
        with pytest.raises(HeadwayError, match=r"parquet: cannot write: No space left on device"):
            run_partitions(what, tmp_path / "out", tables=folder)
        assert [file.name for file in folder.rglob(".*")] == []
        done = len([*(tmp_path / "out" / partitions.FOLDER).iterdir()])
        assert done == len([*(folder / "requests").iterdir()]) == 2
        run_partitions(what, tmp_path / "out", tables=folder)
    assert len(pd.read_parquet(folder / "requests")) == 300


def test_tables_of_another_run_are_not_added_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "s.yaml", tmp_path / "tables"
    path.write_text(SMALL)
    words = ["run", str(path), "--no-tables", "--quiet", "--tables-in", str(folder)]
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    assert main([*words, "--out", str(tmp_path / "two")]) == 2
    assert "has tables of another run; give another folder" in capsys.readouterr().err
    assert main(["run", str(path), "--tables-in", str(folder)]) == 2
    assert "--tables-in: needs --no-tables" in capsys.readouterr().err
