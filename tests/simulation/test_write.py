"""The files of a run: what stands in them, that bytes are stable, that they come all or none."""

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from headway.runs.read import read_table
from simulator.core.engine_config import EngineConfig
from simulator.core.log import Log
from simulator.costs.linear import LinearCost
from simulator.results.frames import request_frame, step_frame
from simulator.results.record import Record
from simulator.simulation.write import check_folder, write_run
from simulator.util.errors import HeadwayError
from simulator.workload.workload import Workload
from tests.support.logs import ObservedRequest, add_request, add_run, add_step, make_workload

REQUESTS = """\
id,client,arrival,client_queue_time,prompt_tokens,output_tokens,queue_time,ttft,tpot,e2el,\
prefill_time,decode_alone_time,decode_slowed_time,preempted_time,recompute_time,swap_time,\
preemptions,cached_tokens,replica,asked_output_tokens,finish_reason
0,"a,b",0.000000000,0.000000000,5,3,0.500000000,1.000000000,1.000000000,3.000000000,\
0.500000000,2.000000000,0.000000000,0.000000000,0.000000000,0.000000000,1,2,0,,stop
1,c,0.250000000,0.000000000,7,1,0.250000000,0.750000000,,0.750000000,\
0.500000000,0.000000000,0.000000000,0.000000000,0.000000000,0.000000000,0,0,0,1,length
2,c,0.500000000,0.000000000,900,0,,,,,,,,,,,0,0,0,1,rejected
3,"a,b",0.750000000,0.000000000,5,0,,,,,,,,,,,0,0,0,1,unfinished
4,c,1000.123456789,,5,0,,,,,,,,,,,0,0,,1,
"""
STEPS = """\
start,duration,steps,running,waiting,prefill_tokens,decode_tokens,wasted_tokens,context,\
kv_blocks_used,kv_blocks_free,preempted
0.500000000,0.500000000,1,2,1,12,0,3,0,4,6,0
1.000000000,2.000000000,2,1,0,0,1,0,6,2,8,1
"""


class Ran(Record):
    """As much of a Result as the files need."""

    def __init__(self, load: Workload, sent: np.ndarray, logs: list[Log]) -> None:
        engine = EngineConfig()
        told = {"name": "näme", "seed": 0}
        scenario = SimpleNamespace(
            resolved=lambda: told, folder=Path(), engine=engine, cluster=None
        )
        specs = {"": SimpleNamespace(cost=LinearCost(base=1.0), engine=EngineConfig())}
        super().__init__(scenario, load, sent, logs, specs)
        self.note = {"completed": 2}

    def summary(self) -> dict:
        return self.note


@pytest.fixture
def ran() -> Ran:
    """Five requests: stopped, cut, rejected, unfinished, never sent; two rows of steps."""
    seen = [
        ObservedRequest(0.0, 0.5, [1.0, 2.0, 3.0], cached=2, preemptions=1),
        ObservedRequest(0.25, 0.5, [1.0], "length", prompt=7),
        ObservedRequest(0.5, reason="rejected", prompt=900),
        ObservedRequest(0.75, reason="unfinished"),
        ObservedRequest(1000.123456789),
    ]
    log = Log(num_blocks=10, block_size=4)
    add_step(log, 0.5, 1.0, running=2, waiting=1, prefill_tokens=12, wasted=3, blocks_used=4)
    values = {"running": 1, "decodes": 1, "context": 6, "blocks_used": 2, "preempted": 1}
    add_step(log, 1.0, 3.0, steps=2, **values)
    log.tick_ends.extend([2.0, 3.0])
    log.leap_blocks.append(0)
    add_run(log, 0, 1.0, 0, 2)
    for number in (2, 1, 0, 3):
        add_request(log, number, seen[number])
    load = make_workload(seen, client=["a,b", "c", "c", "a,b", "c"])
    return Ran(load, np.array([r.sent for r in seen[:4]] + [np.nan]), [log])


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_a_priority_may_be_negative(ran: Ran, tmp_path: Path, format: str) -> None:
    """As in vLLM, where the smaller is the more urgent."""
    urgent = [-1, 0, 3, -20, 5]
    ran.workload.priority = np.array(urgent)
    write_run(ran, tmp_path, format)
    assert read_table(tmp_path, "requests")["priority"].tolist() == urgent
    assert request_frame(ran)["priority"].tolist() == urgent


def test_files_of_a_run(ran: Ran, tmp_path: Path) -> None:
    """Every cell as documented: by id, empty where undefined, nanoseconds."""
    out = tmp_path / "new" / "folder"
    paths = write_run(ran, out)
    tables = ["requests.csv", "steps.csv", "clients.csv", "fairness.csv"]
    assert [p.name for p in paths] == ["summary.json", *tables, "scenario.yaml"]
    assert sorted(out.iterdir()) == sorted(paths)
    assert (out / "requests.csv").read_text() == REQUESTS
    assert (out / "steps.csv").read_text() == STEPS
    assert read_table(out, "clients")["client"].tolist() == ["a,b", "c"]
    assert read_table(out, "fairness")["backlogged"].tolist()[:4] == [1, 0, 0, 1]
    assert json.loads((out / "summary.json").read_text()) == {"completed": 2}
    assert yaml.safe_load((out / "scenario.yaml").read_text()) == {"name": "näme", "seed": 0}


def test_priorities_are_a_column_where_there_are_any(ran: Ran, tmp_path: Path) -> None:
    ran.workload.priority = np.array([5, 0, -1, 0, 7])
    write_run(ran, tmp_path)
    with (tmp_path / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row.pop("priority") for row in rows] == ["5", "0", "-1", "0", "7"]
    assert list(rows[0]) == REQUESTS.splitlines()[0].split(",")


def test_bytes_are_stable(ran: Ran, tmp_path: Path) -> None:
    """Writing twice, the second time over the first, gives the same bytes."""
    first = [p.read_bytes() for p in write_run(ran, tmp_path)]
    assert [p.read_bytes() for p in write_run(ran, tmp_path)] == first


def test_several_replicas(ran: Ran, tmp_path: Path) -> None:
    """Then steps.csv has a column that says whose step it was."""
    other = Log(num_blocks=10, block_size=4)
    add_step(other, 0.25, 0.5)
    ran.logs.append(other)
    write_run(ran, tmp_path)
    with (tmp_path / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["replica"], row["start"]) for row in rows] == [
        ("0", "0.500000000"),
        ("0", "1.000000000"),
        ("1", "0.250000000"),
    ]


@pytest.mark.parametrize("slice_", [1, 2, 3, 100])
def test_short_logs_are_encoded_together(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_: int
) -> None:
    """However many rows go at once, each replica's come after those of the one before."""
    monkeypatch.setattr("simulator.simulation.write.SLICE", slice_)
    for start in (0.25, 7.0):
        log = Log(num_blocks=10, block_size=4)
        add_step(log, start, start + 1.0, blocks_used=3)
        ran.logs += [Log(num_blocks=10, block_size=4), log]
    write_run(ran, tmp_path)
    header, *first = STEPS.splitlines()
    later = [f"{at},1.000000000,1,0,0,0,0,0,0,3,7,0" for at in ("0.250000000", "7.000000000")]
    rows = [*(f"0,{row}" for row in first), f"2,{later[0]}", f"4,{later[1]}"]
    assert (tmp_path / "steps.csv").read_text().splitlines() == [f"replica,{header}", *rows]


def test_frames(ran: Ran) -> None:
    """The tables as DataFrames have the columns of the files."""
    requests, steps = request_frame(ran), step_frame(ran)
    assert list(requests.columns) == REQUESTS.splitlines()[0].split(",")
    assert requests["finish_reason"].tolist()[:3] == ["stop", "length", "rejected"]
    assert requests["tpot"].isna().tolist() == [False, True, True, True, True]
    assert list(steps.columns) == STEPS.splitlines()[0].split(",")


@pytest.mark.parametrize("replicas", [1, 2])
def test_parquet_has_the_columns_of_csv(ran: Ran, tmp_path: Path, replicas: int) -> None:
    """With one engine and with several."""
    parquet = pytest.importorskip("pyarrow.parquet")
    ran.logs += [Log(num_blocks=10, block_size=4)] * (replicas - 1)
    write_run(ran, tmp_path)
    write_run(ran, tmp_path, "parquet")
    for name in ("requests", "steps"):
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            header = next(csv.reader(file))
        assert parquet.read_table(tmp_path / f"{name}.parquet").column_names == header


def test_times_too_large_for_a_table_are_told(ran: Ran, tmp_path: Path) -> None:
    """A cell has 64 bits; nothing is written."""
    ran.workload.arrival[4] = 1e19
    with pytest.raises(HeadwayError, match=r"^requests.csv: not every value lies in 0 to 9"):
        write_run(ran, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_write_leaves_the_old_files(ran: Ran, tmp_path: Path) -> None:
    """If one file cannot be written, none of the folder's files changes."""
    write_run(ran, tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    ran.sent = ran.sent + 1.0
    ran.note = {"completed": 2, "headway": {"mfu": float("nan"), "n": [1]}, "x": float("inf")}
    with pytest.raises(HeadwayError, match=r"number: headway\.mfu is nan, x is inf"):
        write_run(ran, tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_parquet(ran: Ran, tmp_path: Path) -> None:
    """The same tables; numbers need no rounding there."""
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    write_run(ran, tmp_path, "parquet")
    names = {p.name for p in tmp_path.iterdir()}
    tables = {f"{name}.parquet" for name in ("requests", "steps", "clients", "fairness")}
    assert names == {"summary.json", *tables, "scenario.yaml"}
    assert pd.read_parquet(tmp_path / "requests.parquet")["ttft"].tolist()[:2] == [1.0, 0.75]


def test_parquet_without_pyarrow(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to get it, and nothing is written."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(HeadwayError, match=r"pip install 'headway\[parquet\]'"):
        write_run(ran, tmp_path / "out", "parquet")
    with pytest.raises(HeadwayError, match=r"pip install 'headway\[parquet\]'"):
        check_folder(tmp_path / "out", "parquet")  # before anything is simulated
    assert not (tmp_path / "out").exists()
