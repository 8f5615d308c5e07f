"""Pages of packed columns and rows: what comes out is what went in, to the last bit."""

import numpy as np
import pytest

from simulator.core import packed
from simulator.core.log import RUN, STEP, Log, pack_run
from simulator.core.packed import PAGE, PackedRows, pack, pack_column, unpack_column

RANDOM = np.random.default_rng(0)
COLUMNS = {
    "times that ascend": np.cumsum(RANDOM.random(PAGE)),
    "times that do not": RANDOM.random(PAGE),
    "some at once": np.repeat(np.arange(PAGE // 4) * 0.1, 4),
    "never": np.array([-1.0, *RANDOM.random(PAGE - 1)]),
    "no numbers": np.array([np.nan, np.inf, -np.inf, -0.0] * 4),
    "one": np.array([5.0]),
    "zeros": np.zeros(PAGE, np.int64),
    "small": RANDOM.integers(0, 256, PAGE),
    "large": RANDOM.integers(0, 1 << 62, PAGE),
    "below 0": RANDOM.integers(-5, 3, PAGE, np.int32),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_come_back(name: str) -> None:
    values = COLUMNS[name]
    back = np.empty_like(values)
    back[:] = unpack_column(pack_column(values))
    assert back.tobytes() == values.tobytes()


def steps(count: int) -> np.ndarray:
    """Make rows of steps, some of which begin after a pause."""
    rows = np.zeros(count, STEP)
    for name in STEP.names[2:]:
        rows[name] = RANDOM.integers(0, 300, count)
    ends = np.cumsum(RANDOM.random(count))
    rows["start"], rows["end"] = np.append(0.0, ends[:-1]), ends
    rows["start"][::7] += 1e-9
    return rows


@pytest.mark.parametrize(
    "key",
    [
        *(slice(None), slice(3, 9), slice(2, 31), slice(None, None, 3), slice(26, None)),
        *(slice(-4, None), slice(9, 3), np.array([0, 33, 5, 5]), np.array([-1, 2])),
        *(np.array([], np.int64), np.arange(34) % 3 == 0, np.zeros(34, bool)),
    ],
)
def test_rows_by_number(monkeypatch: pytest.MonkeyPatch, key) -> None:
    monkeypatch.setattr(packed, "PAGE", 8)
    rows = steps(34)
    some = PackedRows([pack(rows[at : at + 8]) for at in range(0, 32, 8)], rows[32:])
    assert len(some) == 34
    assert some[key].tobytes() == rows[key].tobytes()
    assert [*some] == [*rows]
    for name in STEP.names:
        assert some[name].tobytes() == rows[name].tobytes()
        assert some[name].dtype == STEP[name]


def test_times_take_less_room() -> None:
    times = 1000.0 + np.cumsum(0.01 + 0.001 * RANDOM.random(PAGE))
    assert pack_column(times).bytes.nbytes <= 5 * PAGE
    assert len(pack(steps(PAGE)).columns["start"]) == PAGE // 7 + 1


def test_a_log_keeps_its_last_page_as_it_is() -> None:
    log = Log(10, 4)
    for id in range(3 * PAGE - 1):
        log.run_rows += pack_run(0.5 * id, id, 2 * id, id % 5)
        log.tick_ends.append(0.1 * id)
    runs, ticks = log.runs.copy(), np.array(log.tick_ends)
    log.put_by(2)
    assert not log.pages
    log.put_by()
    assert len(log.run_rows) == (2 * PAGE - 1) * RUN.itemsize
    assert len(log.tick_ends) == 2 * PAGE - 1
    log.run_rows += pack_run(7.0, 1, 2, 3)
    assert log.runs[:-1].tobytes() == runs.tobytes()
    assert log.runs[-1:]["start"] == [7.0]
    assert (log.column("tick_ends") == ticks).all()


@pytest.mark.parametrize("begin", [0, 5, PAGE, 2 * PAGE + 3, 3 * PAGE, 3 * PAGE + 9])
@pytest.mark.parametrize("end", [PAGE, 2 * PAGE + 7, 3 * PAGE, 3 * PAGE + 20, 9 * PAGE, None])
def test_a_part_of_a_log(begin: int, end: int | None) -> None:
    """Whether it lies in pages, in what follows them, or in both."""
    log = Log(10, 4)
    log.tick_ends.extend(range(4 * PAGE + 50))
    log.put_by()
    assert len(log.pages["tick_ends"]) == 3
    assert log.column("tick_ends", begin, end).tolist() == [*range(4 * PAGE + 50)][begin:end]
