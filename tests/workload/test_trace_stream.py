"""Traces read a piece at a time: the same requests as read whole, and the same refusals."""

import gzip
import json
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from simulator.scenario.draw import make_workload, trace_pieces
from simulator.scenario.load import load_scenario
from simulator.scenario.scenario import Scenario
from simulator.simulation import stream as simulation_stream
from simulator.simulation.stream import chunks, run_streamed
from simulator.util.errors import HeadwayError
from simulator.workload.traces import documents, read, read_trace
from simulator.workload.workload import COLUMNS, Workload
from tests.simulation.test_partitions import assert_alike
from tests.simulation.test_stream import assert_as_kept
from tests.support.scenarios import SMALL

ROWS = 500
RNG = np.random.default_rng(1)
TIMES = np.cumsum(RNG.exponential(0.3, ROWS)).round(3)
LENGTHS = RNG.integers(1, 90, (ROWS, 2))


def azure(path: Path) -> None:
    seconds = (np.datetime64("2023-11-16T18:00:00") + (TIMES * 1e6).astype("m8[us]")).astype(str)
    lines = [
        f"{time.replace('T', ' ')},{a},{b}" for time, (a, b) in zip(seconds, LENGTHS, strict=True)
    ]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")


def named(path: Path) -> None:
    lines = [f"x,{t},{a},{b}" for t, (a, b) in zip(TIMES, LENGTHS, strict=True)]
    text = "\n".join(["note,arrival,prompt_tokens,output_tokens", *lines])
    path.write_bytes(gzip.compress(text.encode()))


def mooncake(path: Path) -> None:
    rows = [
        {"timestamp": int(t * 1e3), "input_length": int(a), "output_length": int(b)}
        | {"hash_ids": [int(a) % 7]}
        for t, (a, b) in zip(TIMES, LENGTHS, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parquet(path: Path) -> None:
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    columns = {"arrival": TIMES, "prompt_tokens": LENGTHS[:, 0], "output_tokens": LENGTHS[:, 1]}
    pd.DataFrame(columns).to_parquet(path)


WRITERS = {"t.csv": azure, "n.csv.gz": named, "m.jsonl": mooncake, "p.parquet": parquet}
SELECTIONS = (
    "",
    "start_s: 20, end_s: 90, rate_scale: 2",
    "skip: 30, limit: 800, repeat: 3, max_input_len: 80",
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files of some kilobytes come in many pieces."""
    monkeypatch.setattr(read, "BLOCK", 1000)
    monkeypatch.setattr(documents.line_blocks, "__defaults__", (1000,))
    monkeypatch.setattr(documents, "PIECE_ROWS", 60)


def scenario(path: Path, selection: str, *more: str) -> Scenario:
    file = path.with_suffix(".yaml")
    trace = f"workload: {{trace: {{path: {path.name}, {selection}}}}}\n"
    file.write_text(SMALL.partition("workload")[0] + trace)
    return load_scenario(file, more)


def assert_same(found: list[Workload], whole: Workload) -> None:
    for name in COLUMNS:
        columns = [getattr(part, name) for part in found]
        expected = getattr(whole, name)
        if expected is None:
            assert columns == [None] * len(columns)
        elif isinstance(expected, list):
            assert [*chain(*columns)] == expected
        else:
            assert (np.concatenate(columns) == expected).all()


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.filterwarnings("ignore")
def test_pieces_have_the_requests_of_the_whole(name: str, selection: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    what = scenario(path, selection)
    assert trace_pieces(what) is not None
    total, parts, _ = chunks(what, 64)
    found = list(parts)
    assert {len(part) for part in found[:-1]} == {64}
    assert sum(map(len, found)) == total
    assert_same(found, make_workload(what))


def test_a_run_of_pieces_is_that_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mooncake(tmp_path / "m.jsonl")
    what = scenario(tmp_path / "m.jsonl", "", "workload.max_tokens=20")
    told = run_streamed(what)
    monkeypatch.setattr(read, "BLOCK", 1 << 30)
    assert trace_pieces(what) is None
    assert_alike(told, run_streamed(what))


def test_requests_a_little_out_of_order_are_sorted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    azure(path)
    lines = path.read_text().splitlines()
    lines[200], lines[205] = lines[205], lines[200]
    path.write_text("\n".join(lines) + "\n")
    what = scenario(path, "")
    with pytest.warns(match="requests earlier than one before them: [15]"):
        found = list(trace_pieces(what)())
    with pytest.warns(match="sorted by arrival"):
        whole = make_workload(what)
    assert_same(found, whole)


def test_a_request_that_comes_much_too_late_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    azure(path)
    lines = path.read_text().splitlines()
    lines.insert(400, lines.pop(3))
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(HeadwayError, match=f"^{path}:401: arrival: comes before .* sort the trace"):
        chunks(scenario(path, ""), 64)


def test_a_bad_line_is_named_from_any_piece(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    azure(path)
    lines = path.read_text().splitlines()
    lines[300] = lines[300].rpartition(",")[0] + ",x"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(HeadwayError, match=f"^{path}:301: GeneratedTokens: 'x' is not a whole"):
        chunks(scenario(path, ""), 64)


@pytest.mark.filterwarnings("ignore")
def test_a_trace_whose_turns_wait_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns stand far from those before them, and some come long before they would be read."""
    path = tmp_path / "m.jsonl"
    lines = [
        {"timestamp": 100 * k, "input_length": 5 + k % 7, "output_length": 2, "session_id": k % 40}
        | ({"delay": k % 3 * 400} if k >= 40 else {})
        for k in range(160)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    what = scenario(path, "rate_scale: 2, repeat: 2", "cluster.router=session_affinity")
    assert trace_pieces(what) is not None
    monkeypatch.setattr(simulation_stream, "CHUNK", 32)
    monkeypatch.setattr(simulation_stream, "PER_REPLICA", 8)
    assert_as_kept(what)


def test_clients_of_a_trace_are_drawn_piece_by_piece(tmp_path: Path) -> None:
    azure(tmp_path / "t.csv")
    what = scenario(tmp_path / "t.csv", "", "workload.clients=3")
    _, parts, _ = chunks(what, 64)
    assert_same([*parts], make_workload(what))


def test_what_is_told_of_pieces_is_that_of_the_whole(tmp_path: Path) -> None:
    """Counts add up over the pieces; what counts nothing is told once."""
    path = tmp_path / "log.csv"
    head = "arrival,prompt_tokens,output_tokens,cache_hit,cached_tokens,deadline_us,mood,status"
    rows = [
        f"{t},{90 + a},{b},{k % 5 == 0},{k % 60},{k % 2},x,{'odd' if k % 7 == 0 else 'ok'}"
        for k, (t, (a, b)) in enumerate(zip(TIMES, LENGTHS, strict=True))
    ]
    path.write_text("\n".join([head, *rows, f"{TIMES[-1]},9,0,,,,,"]) + "\n")

    def warnings_of(read: Callable[[], object]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read()
        return [str(one.message).removeprefix(f"{path}: ") for one in caught]

    given = path, "requests", {}, ""
    found = warnings_of(lambda: [*read.read_pieces(*given)])
    assert found == warnings_of(lambda: read_trace(path))
    assert [text.partition(": ")[0] for text in found] == [
        "1 request left out",
        *("cache_hit", "status", "deadline_us", "cached_tokens"),
        "not understood, and without effect",
    ]
    assert found[1] == "cache_hit: requests left out: 100, answered by a proxy's cache"
    assert "requests: 72" in found[2]


def test_what_comes_again_in_another_piece_is_counted(tmp_path: Path) -> None:
    """And images and models, which the run does not have."""
    path = tmp_path / "t.csv"
    rows = [f"r{k % 60},{k},9,5,{k % 2},m{k % 2},c{k % 50}" for k in range(100)]
    head = "request_id,arrival,prompt_tokens,output_tokens,images,model,conversation_id"
    path.write_text("\n".join([head, *rows]) + "\n")
    what = scenario(path, "")
    assert trace_pieces(what) is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert sum(map(len, trace_pieces(what)())) == 100
    said = [str(one.message) for one in caught]
    for text in (
        "request_id: requests whose id came before, played all the same: 40",
        "conversation_id: requests that continue a conversation: 50",
        "images: 50, whose sizes nothing tells",
        "several models: m0 (50), m1 (50)",
    ):
        assert any(text in one for one in said), text
    encoder = "engine.multimodal_config={encoder_seconds: [[1, 0.004]]}"
    drawn = scenario(path, "", "workload.multimodal={image: {tokens: 5}}", encoder)
    assert trace_pieces(drawn) is None
