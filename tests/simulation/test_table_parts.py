"""Tables of runs that keep no requests: written as they end, read by others as one table."""

from pathlib import Path

import numpy as np
import pytest
from joblib import parallel_config

from simulator.cli.main import main
from simulator.simulation import partitions, stream
from simulator.simulation.partitions import run_partitions
from simulator.simulation.run import run
from simulator.simulation.stream import run_streamed
from simulator.util.errors import HeadwayError
from tests.simulation.test_partitions import LENGTHS, scenario
from tests.support.scenarios import SMALL

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
FLEET = ["cluster={replicas: 6, pods: 3, router: random}", "workload.request_rate=300", *LENGTHS]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CHUNK", 32)
    monkeypatch.setattr(stream, "PER_REPLICA", 8)
    monkeypatch.setattr("simulator.engine.drive.EVENTS_PER_LOOK", 7)


@pytest.mark.parametrize("apart", [False, True])
def test_the_folder_has_the_requests_and_steps_of_the_run(apart: bool, tmp_path: Path) -> None:
    what, folder = scenario(tmp_path, *FLEET, "engine.max_model_len=300"), tmp_path / "tables"
    if apart:
        with parallel_config(backend="sequential"):
            run_partitions(what, tmp_path / "out", tables=folder)
    else:
        run_streamed(what, tables=folder)
    assert len([*(folder / "requests").iterdir()]) == (3 if apart else 1)
    kept = run(what)
    requests = pd.read_parquet(folder / "requests").sort_values("id", ignore_index=True)
    for name in requests.columns:
        expected = kept.requests[name]
        if name in ("client", "finish_reason"):
            told, wanted = (one.astype(object).fillna("") for one in (requests[name], expected))
            assert told.tolist() == wanted.tolist()
        else:
            np.testing.assert_allclose(requests[name], expected, rtol=1e-9, err_msg=name)
    steps = pd.read_parquet(folder / "steps").sort_values(["replica", "start"], ignore_index=True)
    expected = kept.steps.sort_values(["replica", "start"], ignore_index=True)
    assert list(steps.columns) == list(expected.columns)
    np.testing.assert_allclose(steps.to_numpy(float), expected.to_numpy(float), rtol=1e-9)


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
    assert "--tables-in: goes with --no-tables" in capsys.readouterr().err
