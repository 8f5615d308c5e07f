"""Tables that were changed after the run: what is wrong is told, and what may be is taken."""

import sys
from pathlib import Path

import pytest

from headway.figures.data import STEPS, Run
from headway.runs import parts
from headway.runs.read_parts import LONGEST, read_together
from simulator import load_scenario, run
from simulator.results.request_table import Floats
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError
from tests.diagnosis.test_rules import PAIR

pd = pytest.importorskip("pandas")


@pytest.fixture
def folder(write, tmp_path: Path) -> Path:
    """The files of a run of two requests on two replicas."""
    write_run(run(load_scenario(write(PAIR), ["cluster={replicas: 2}"])), tmp_path / "out")
    return tmp_path / "out"


def spoil(path: Path, column: str, cell: str) -> None:
    """Put a cell into the second row of a table."""
    head, first, second, *rest = path.read_text().splitlines()
    cells = second.split(",")
    cells[head.split(",").index(column)] = cell
    path.write_text("\n".join([head, first, ",".join(cells), *rest, ""]))


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("replica", "-1", "row 1: replica: is -1, and no whole number"),
        ("replica", "", "row 1: replica: is empty, and no whole number"),
        ("replica", "0.5", "row 1: replica: is 0.5, and no whole number"),
        ("replica", "first", "damaged: replica has what is no number"),
        ("waiting", "", "row 1: waiting: is empty, and no number of 0 or more"),
        ("duration", "-1", "row 1: duration: is -1, and no number of 0 or more"),
    ],
)
def test_a_damaged_cell_of_a_step_is_told(
    folder: Path, column: str, cell: str, message: str
) -> None:
    spoil(folder / "steps.csv", column, cell)
    with pytest.raises(HeadwayError) as caught:
        Run.read(folder, "out")
    assert str(caught.value) == f"{folder / 'steps.csv'}: {message}"


def test_a_request_of_replica_minus_one_was_never_sent(folder: Path) -> None:
    """So Parquet has it; -2 is no replica, nor is a time of -1 one."""
    path = folder / "requests.csv"
    text = path.read_text()
    spoil(path, "replica", "-1")
    assert Run.read(folder, "out").requests["replica"].tolist() == [0, -1]
    for column, cell in (("replica", "-2"), ("e2el", "-1")):
        path.write_text(text)
        spoil(path, column, cell)
        with pytest.raises(HeadwayError, match=f"row 1: {column}: is {cell}, and no number of 0"):
            Run.read(folder, "out")


@pytest.fixture
def steps(tmp_path: Path) -> "pd.DataFrame":
    """Three rows: 1 step of a prompt alone for 3 s, 2 that decode for 4 s, 1 for 1 s."""
    frame = pd.DataFrame(0.0, index=range(3), columns=list(STEPS))
    told = {"start": [0, 3, 7], "duration": [3, 4, 1], "steps": [1, 2, 1]}
    return frame.assign(
        **told,
        prefill_tokens=[7, 0, 0],
        decode_tokens=[0, 2, 2],
        kv_blocks_used=4,
        kv_blocks_free=2,
    )


def together(folder: Path, steps: "pd.DataFrame") -> "pd.DataFrame":
    """Read steps of 2 replicas in parts, put together by the 10 s."""
    pytest.importorskip("pyarrow")
    steps.to_parquet(folder / "part-00000.parquet")

    def used(frame: "pd.DataFrame") -> Floats:
        return frame["kv_blocks_used"].to_numpy(float) + 1

    return read_together(folder, STEPS, used, seconds=1e6, replicas=2)


def test_the_longest_step_of_a_long_run_is_one_that_decodes(
    tmp_path: Path, steps: "pd.DataFrame"
) -> None:
    (row,) = together(tmp_path, steps).to_dict("records")
    assert (row[LONGEST], row["duration"], row["steps"]) == (2.0, 8.0, 4.0)
    assert (row["kv_blocks_used"], row["kv_blocks_free"]) == (5.0, 1.0)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("duration", -1.0, "row 2: duration: is -1, and no number of 0 or more"),
        ("running", None, "row 2: running: is empty, and no number of 0 or more"),
        ("replica", -1.0, "row 2: replica: is -1, and no whole number"),
        ("replica", 2.0, "replica: is 2, and there are 2"),
    ],
)
def test_a_damaged_value_in_a_part_is_told(
    tmp_path: Path, steps: "pd.DataFrame", column: str, value: float | None, message: str
) -> None:
    steps["replica"] = 0.0
    steps.loc[2, column] = value
    with pytest.raises(HeadwayError) as caught:
        together(tmp_path, steps)
    assert str(caught.value) == f"{tmp_path}: {message}"


def test_parts_need_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(HeadwayError) as caught:
        parts.count_rows(tmp_path)
    assert str(caught.value).startswith(
        f"{tmp_path}: needs pyarrow: pip install 'headway[parquet]'"
    )
