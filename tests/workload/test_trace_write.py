"""Our workloads as Mooncake JSONL: what is written is read back, and its prefixes are shared."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.traffic.describe import describe
from simulator.core.request import Segments
from simulator.util.errors import HeadwayError
from simulator.workload.prefixes import shared_prefix_tokens
from simulator.workload.select import Selection, select
from simulator.workload.traces import read_trace, write_mooncake
from simulator.workload.workload import Workload
from tests.support.workloads import of_prompts


def written(workload: Workload, path: Path) -> list[dict[str, object]]:
    """Write a workload and give the lines."""
    write_mooncake(workload, path)
    data = path.read_bytes()
    text = gzip.decompress(data) if path.name.endswith(".gz") else data
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")  # 88 tokens are lost
@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_equal_ids_are_equal_prefixes(tmp_path, name):
    """Blocks of 512 across runs, chained to what is before them; unique prompts get fresh ids."""
    workload = of_prompts(
        [
            (("system", 600), ("x", 500)),
            (("system", 600), ("y", 500)),
            (("y", 100), ("system", 1024)),
            None,
            (("system", 600), ("x", 500)),
        ],
        [1100, 1100, 1124, 513, 1100],
    )
    workload.arrival = np.array([0.0, 0.0014, 0.5, 2.0, 3.0006])
    rows = written(workload, tmp_path / name)
    assert [row["hash_ids"] for row in rows] == [
        [0, 1, 2],
        [0, 3, 4],
        [5, 6, 7],
        [8, 9],
        [0, 1, 2],
    ]
    assert rows[1] == {
        "timestamp": 1,
        "input_length": 1100,
        "output_length": 2,
        "hash_ids": [0, 3, 4],
    }
    assert [row["timestamp"] for row in rows] == [0, 1, 500, 2000, 3001]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_sessions_are_written_as_aiperf_reads_them(tmp_path):
    """A later turn says after how long it comes and what it adds; it is read back as it was."""
    first: Segments = ((("h", 0), 512), (("h", 1), 88))
    second: Segments = (*first, (("out", 0), 7), (("h", 2), 40))
    third: Segments = (*second, (("out", 2), 3), (("h", 3), 512), (("h", 4), 1))
    workload = Workload(
        arrival=np.array([0.0, 1.0, np.nan, np.nan]),
        prompt_tokens=np.array([600, 5, 647, 1163]),
        output_tokens=np.array([7, 1, 3, 2]),
        segments=[first, ((("h", 5), 5),), second, third],
        after=np.array([-1, -1, 0, 2]),
        delay=np.array([0.0, 0.0, 1.5, 0.25]),
    )
    path = tmp_path / "sessions.jsonl"
    rows = written(workload, path)
    assert rows[0]["session_id"] == rows[2]["session_id"] == rows[3]["session_id"]
    assert "session_id" not in rows[1]
    assert [row.get("timestamp") for row in rows] == [0, 1000, None, None]
    assert [row.get("delay") for row in rows] == [None, None, 1500, 250]
    assert [row["input_length"] for row in rows] == [600, 5, 40, 513]
    again = read_trace(path)
    again.check()
    assert again.prompt_tokens.tolist() == workload.prompt_tokens.tolist()
    assert again.after.tolist() == workload.after.tolist()
    assert again.delay.tolist() == workload.delay.tolist()
    assert again.segments[3][2] == (("out", 0), 7)
    assert written(again, tmp_path / "again.jsonl") == rows


def test_a_turn_that_does_not_continue_cannot_be_written(tmp_path):
    """What the format cannot hold is refused, and nothing is left behind."""
    workload = of_prompts([((("h", 0), 9),), ((("h", 1), 30),)])
    workload.arrival[1] = np.nan
    workload.after = np.array([-1, 0])
    with pytest.raises(HeadwayError, match="request 1: its prompt does not continue request 0"):
        write_mooncake(workload, tmp_path / "x.jsonl")
    assert not list(tmp_path.iterdir())


def test_two_turns_after_one_cannot_be_written(tmp_path):
    """A session is a line of turns, not a tree."""
    answered: Segments = ((("h", 0), 9), (("out", 0), 1))
    workload = of_prompts(
        [((("h", 0), 9),), (*answered, (("h", 1), 1)), (*answered, (("h", 2), 1))],
    )
    workload.arrival[1:] = np.nan
    workload.after = np.array([-1, 0, 0])
    with pytest.raises(HeadwayError, match="request 0: two requests follow it"):
        write_mooncake(workload, tmp_path / "x.jsonl")


def test_unwritable(tmp_path):
    """A path that cannot be written is an error that names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwayError, match="file: cannot write"):
        write_mooncake(of_prompts([((("h", 0), 9),)]), tmp_path / "file" / "x.jsonl")


RUNS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1200)), min_size=1, max_size=4)


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")  # much is lost here
@given(st.lists(st.none() | RUNS, min_size=1, max_size=8), st.integers(0, 10**9))
def test_writing_and_reading_keeps_lengths_times_and_shared_blocks(tmp_path_factory, runs, seed):
    """Two prompts share a block after reading if they agreed up to its end before writing."""
    rng = np.random.default_rng(seed)
    segments = [parts and tuple(parts) for parts in runs]
    sizes = [sum(count for _, count in parts) if parts else 700 for parts in segments]
    workload = of_prompts(segments, sizes)
    workload.arrival = np.concatenate(([0.0], np.cumsum(rng.exponential(1.0, len(runs) - 1))))
    path = tmp_path_factory.mktemp("law") / "w.jsonl"
    write_mooncake(workload, path)
    again = read_trace(path)
    again.check()
    assert again.prompt_tokens.tolist() == sizes
    assert again.output_tokens.tolist() == workload.output_tokens.tolist()
    assert np.abs(again.arrival - workload.arrival).max() <= 0.0005 + 1e-9
    spelled = [
        [(name, k) for name, count in parts for k in range(count)] if parts else [object()] * size
        for parts, size in zip(segments, sizes, strict=True)
    ]
    for i in range(len(runs)):
        for j in range(i):
            blocks = zip(again.segments[i], again.segments[j], strict=False)
            for k, (mine, yours) in enumerate(blocks):
                a, b = (spelled[r][: (k + 1) * 512] for r in (i, j))
                same = segments[i] is not None and segments[j] is not None and a == b
                assert (mine == yours) == same


def test_published_mooncake_there_and_back(data, tmp_path):
    """The conversation trace survives; a part of it keeps its sharing."""
    workload = read_trace(data / "traces" / "mooncake_fast25_conversation.jsonl.gz")
    assert describe(workload, "mooncake")["prefix_sharing"] == pytest.approx(0.374, abs=0.001)
    part = select(workload, Selection(limit=500))
    path = tmp_path / "part.jsonl.gz"
    write_mooncake(part, path)
    again = read_trace(path)
    assert again.arrival.tolist() == part.arrival.tolist()
    assert again.prompt_tokens.tolist() == part.prompt_tokens.tolist()
    assert shared_prefix_tokens(again) == shared_prefix_tokens(part)
