"""The picture of a comparison: its size, what its lines say, and how many runs it takes."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

from headway.figures.compare import (
    draw_compare,
    draw_many,
)
from headway.figures.style import save
from simulator.core.log import Log
from simulator.kv_cache.block_manager import BlockCounter
from simulator.results.record import Record
from simulator.results.time_series import arrivals, depth_in_bins, mean_in_bins, queue_levels
from simulator.schedulers.static import Static
from simulator.workload.workload import Workload
from tests.support.engines import Clock, fcfs, made, play, workload
from tests.support.logs import TICK, LoggedRun, logged_runs, summarize

LOAD = workload(*((0.5 * i, 8 + i % 7, 1 + 5 * (i % 9)) for i in range(60)))


class Ran(Record):
    """As much of a Result as a picture needs."""

    def __init__(self, log: Log, sent: np.ndarray, load: Workload = LOAD) -> None:
        names = {name: SimpleNamespace(name=name) for name in ("model", "GPU")}
        parts = SimpleNamespace(model=names["model"], gpu=names["GPU"], role=None)
        super().__init__(SimpleNamespace(name="tiny"), load, sent, [log], {"": parts})

    def summary(self) -> dict:
        return summarize(self.workload, self.sent, self.logs)


@pytest.fixture(scope="module")
def runs() -> list[Ran]:
    """The same requests in static and in continuous batches."""
    static = made(Static, BlockCounter(1000, 4), max_num_seqs=8, max_num_batched_tokens=64)
    engines = [static, fcfs(max_num_seqs=8, max_num_batched_tokens=64)]
    played = [play(LOAD, engine, Clock(0.1, 0.001)) for engine in engines]
    return [Ran(log, np.array(client.sent)) for log, client in played]


def size_of(path: Path) -> tuple[int, int]:
    """Read width and height from the head of a PNG."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


@pytest.mark.medium
def test_a_picture_for_the_readme(runs: list[Ran], tmp_path: Path) -> None:
    """1350 x 900 pixels; the same runs give the same bytes."""
    path = save(draw_compare(["static", "fcfs"], runs), tmp_path / "compare.png")
    assert size_of(path) == (1350, 900)
    first = path.read_bytes()
    assert save(draw_compare(["static", "fcfs"], runs), path).read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["compare.png"]


def test_what_it_shows(runs: list[Ran]) -> None:
    """Bars are the throughputs, the ratio is to the first; axes have units."""
    figure = draw_compare(["static", "fcfs"], runs, "engine.scheduling_policy")
    assert figure.get_suptitle().endswith(", by engine.scheduling_policy")
    throughput, latency, batch, queue = figure.axes
    values = [run.summary()["output_throughput"] for run in runs]
    assert [bar.get_width() for bar in throughput.patches] == values
    assert [text.get_text() for text in throughput.texts] == [
        f"{values[0]:.1f}",
        f"{values[1]:.1f}  ({values[1] / values[0]:.2f}x)",
    ]
    assert [axes.get_xlabel() for axes in (throughput, latency, batch, queue)] == [
        "tokens/s",
        "time since sent (s)",
        "time (s): the whole run",
        "time (s): the whole run",
    ]
    end = max(run.logs[0].steps["end"][-1] for run in runs)
    assert batch.get_xlim() == queue.get_xlim() == (0.0, end)
    ttft, e2el = (max(line.get_xdata()) for line in latency.lines[:2])
    log, sent = runs[0].logs[0], runs[0].sent
    ids = log.requests["id"]
    assert ttft == pytest.approx(max(log.requests["first_token"] - sent[ids]))
    assert e2el == pytest.approx(max(log.requests["finish"] - sent[ids]))
    assert len(batch.collections) == 1  # the seats that static batching wastes
    assert max(batch.lines[0].get_ydata()) == pytest.approx(8)


def test_many_requests_are_shown_for_two_minutes_from_the_middle() -> None:
    """101 of 3 s each, one after the other: 303 s, of which 91.5 to 211.5; the queue is whole."""
    load = workload(*((0.0, 1, 3) for _ in range(101)))
    log, client = play(load, fcfs(max_num_seqs=1), Clock(1.0))
    _, _, batch, queue = draw_compare(["fcfs"], [Ran(log, np.array(client.sent), load)]).axes
    assert batch.get_xlim() == (91.5, 211.5)
    assert batch.get_xlabel() == "time (s): 92 to 212 s of 303 s"
    assert queue.get_xlim() == (0.0, 303.0)
    assert queue.lines[0].get_ydata()[0] == pytest.approx(100, abs=1)


def test_labels_of_any_length_stay_in_the_picture(runs: list[Ran]) -> None:
    """Long ones stand in the legend alone, in so many columns as fit, and nothing lies outside."""
    long = "{policy: static, deliver: each, max_batch_size: 8}"
    for labels, columns in ((["static", long], 2), ([f"{long} {k}" for k in range(4)], 1)):
        figure = draw_compare(labels, runs[:1] * len(labels))
        figure.draw_without_rendering()
        throughput, latency, batch, _ = figure.axes
        assert not throughput.get_yticks().size
        (legend,) = figure.legends
        assert legend._ncols == columns
        for inside, outside in (
            (legend.get_window_extent(), figure.bbox),
            (latency.get_legend().get_window_extent(), latency.bbox),
            (batch.get_legend().get_window_extent(), batch.bbox),
        ):
            assert inside.x0 >= outside.x0
            assert inside.x1 <= outside.x1


def test_curves_upon_one_another_are_all_seen(runs: list[Ran]) -> None:
    """Three of the same run, and one of another: dashes in turn, 5 and 10 widths of a line."""
    figure = draw_compare(list("abcd"), [runs[0], runs[1], runs[0], runs[0]])
    lines = figure.axes[3].lines
    dashes = [line._unscaled_dash_pattern for line in lines]
    assert dashes == [(0, (5, 10)), (0, None), (10, (5, 10)), (5, (5, 10))]


def test_four_requests_are_four_steps() -> None:
    """Ends at 1, 2, 4 and 8 s: no share between 25, 50, 75 and 100 % at any time between."""
    load = workload(*((0.0, 1, tokens) for tokens in (1, 2, 4, 8)))
    log, client = play(load, fcfs(max_num_seqs=4), Clock(1.0))
    latency = draw_compare(["fcfs"], [Ran(log, np.array(client.sent), load)]).axes[1]
    _, e2el = latency.lines
    assert sorted({*e2el.get_xdata()}) == [1, 2, 4, 8]
    shares = [max(e2el.get_ydata()[e2el.get_xdata() == end]) for end in (1, 2, 4, 8)]
    assert shares == pytest.approx([25, 50, 75, 100], abs=0.26)


@pytest.mark.medium
@pytest.mark.parametrize("count", [1, 8])
def test_one_to_eight_runs(runs: list[Ran], count: int, tmp_path: Path) -> None:
    """Each has a colour of its own."""
    figure = draw_compare([f"run {i}" for i in range(count)], runs[:1] * count)
    path = save(figure, tmp_path / "x.png")
    assert size_of(path) == (1350, 900)


def test_nine_runs_are_refused(runs: list[Ran]) -> None:
    """There are eight colours that everybody can tell apart."""
    with pytest.raises(ValueError, match="1 to 8 runs, not 9"):
        draw_compare(["x"] * 9, runs[:1] * 9)


@pytest.mark.medium
def test_a_run_in_which_nothing_happened(tmp_path: Path) -> None:
    """No step and no request: an empty picture, no warning."""
    nothing = Ran(Log(10, 4), np.empty(0), workload())
    assert size_of(save(draw_compare(["none"], [nothing]), tmp_path / "x.png")) == (1350, 900)


def test_means_in_bins() -> None:
    """A level counts for the share of the bin in which it holds; outside it is 0."""
    starts, ends, levels = np.array([1.0, 2.0]), np.array([2.0, 4.0]), np.array([4, 10])
    edges = np.array([0.0, 1.5, 3.0, 6.0])
    assert mean_in_bins(starts, ends, levels, edges) == pytest.approx([2 / 1.5, 12 / 1.5, 10 / 3])


@settings(max_examples=30)
@given(logged_runs(max_replicas=1))
def test_queue_depth_in_bins(story: LoggedRun) -> None:
    """The mean over bins is that of the depth listed at every instant."""
    log, sent = story.logs[0], story.sent
    rows = log.steps
    end = max([*rows["end"], *sent, 1.0]) + 1.0
    edges = np.linspace(0.0, end, 5)
    total = 0.0
    for time in np.arange(0.0, end, TICK) + TICK / 2:
        begun = rows[rows["start"] <= time]
        since = begun["start"][-1] if len(begun) else -1.0
        waits = [r.reason != "rejected" and since < r.sent <= time for r in story.requests]
        total += TICK * (sum(waits) + (begun["waiting"][-1] if len(begun) else 0))
    depth = depth_in_bins(*queue_levels(log), arrivals(log), edges)
    assert depth.sum() * end / 4 == pytest.approx(total)


def test_a_picture_of_many_runs(runs: list[Ran], tmp_path: Path) -> None:
    """A row for each: its throughput as a bar, mean and P99 of each latency as points."""
    labels = [f"run {k}" for k in range(20)]
    figure = draw_many(labels, runs * 10)
    bars, *panels = figure.axes
    assert [tick.get_text() for tick in bars.get_yticklabels()] == labels
    summaries = [run.summary() for run in runs * 10]
    assert [bar.get_width() for bar in bars.patches] == [s["output_throughput"] for s in summaries]
    for axes, key, scale in zip(panels, ("ttft", "tpot", "e2el"), (1e-3, 1, 1e-3), strict=True):
        for line, word in zip(axes.lines, ("mean", "p99"), strict=True):
            expected = [s[f"{word}_{key}_ms"] * scale for s in summaries]
            assert line.get_xdata().tolist() == expected
    assert size_of(save(figure, tmp_path / "many.png")) == (1350, 1125)
