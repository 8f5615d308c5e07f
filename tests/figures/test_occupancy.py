"""Occupancy plots: who sits where, and what a static batch keeps."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from headway.figures import (
    Run,
    draw_occupancy,
)
from headway.figures.data import read_runs
from headway.figures.occupancy import _batches, lowest_slots, seats_by_phase
from simulator import load_scenario, run


def test_seats(folder) -> None:
    """Nobody shares a seat, and only static batching keeps seats of requests that are done."""
    static, fcfs = read_runs([folder / "cmp"])
    figure = draw_occupancy([static, fcfs], start=0.0, seconds=1000.0)
    for axes, seats in zip(figure.axes, (4, 4), strict=True):
        worked = axes.containers[1]
        assert len(worked) == 40
        assert {bar.get_y() + bar.get_height() / 2 for bar in worked} == set(range(seats))
        bars = sorted((bar.get_y(), bar.get_x(), bar.get_x() + bar.get_width()) for bar in worked)
        for (seat, _, left), (other, boards, _) in pairwise(bars):
            assert seat != other or boards >= left - 2e-6
    grey = [sum(bar.get_width() for bar in axes.containers[0]) for axes in figure.axes]
    assert grey[0] > 0
    assert grey[1] == pytest.approx(0.0, abs=1e-6)


def test_many_seats_are_counted_by_phase() -> None:
    """60 requests at once: 20 ms of prefill, then decode; no row is drawn for a seat."""
    load = "{num_prompts: 60, request_rate: inf, input_len: 1, output_len: 10}"
    cost = "{kind: linear, base: 1.0, per_token: 0, per_context: 0}"
    settings = [f"workload={load}", f"cost={cost}", "engine.max_num_batched_tokens=60"]
    result = Run.of("many", run(load_scenario("demo", [*settings, "engine.max_num_seqs=60"])))
    found = seats_by_phase(result, np.arange(12.0))
    assert found["prefill"].tolist() == [60] + [0] * 10
    assert found["decode"].tolist() == [0] + [60] * 9 + [0]
    assert not found["done"].any()
    axes = draw_occupancy([result]).axes[0]
    assert not axes.containers
    assert len(axes.collections) == 3
    assert axes.get_ylabel() == "seats"


FIVE = Path(__file__).parents[2] / "scenarios" / "examples" / "three-and-two.yaml"


def test_five_requests_are_drawn_as_in_a_textbook() -> None:
    """Answers of 1000, 200, 400, 300 and 500 tokens on three seats: the whole run, by number."""
    policies = "static", "{policy: static, deliver: batch}", "fcfs"
    five = [
        Run.of(name, run(load_scenario(FIVE, [f"engine.scheduling_policy={name}"])))
        for name in policies
    ]
    figure = draw_occupancy(five)
    works, greys = [], []
    for axes in figure.axes:
        assert axes.get_xlim() == (0.0, 1500.0)
        assert [text.get_text() for text in axes.texts] == ["0", "1", "2", "3", "4"]
        grey, work = axes.containers
        works.append([(bar.get_x(), bar.get_x() + bar.get_width()) for bar in work])
        greys.append([bar.get_width() for bar in grey])
    batched = [(0, 1000), (0, 200), (0, 400), (1000, 1300), (1000, 1500)]
    assert works == [batched, batched, [*batched[:3], (200, 500), (400, 900)]]
    assert greys == [[0, 800, 600, 200, 0]] * 2 + [[0] * 5]
    assert figure.axes[-1].get_xlabel() == "time (s): the whole run"
    assert (
        figure.axes[0].get_title(loc="left") == "static: 1.6 tokens/s, 53.3% of decode seats used"
    )
    later = draw_occupancy(five[:1], start=1200.0, seconds=100.0).axes[0]
    assert later.get_xlim() == (1200.0, 1300.0)
    assert later.get_xlabel() == "time (s): 1,200 to 1,300 s of 1,500 s"


def test_lowest_free_seat() -> None:
    """Worked by hand: two are admitted, the second ends, the third takes its seat."""
    assert list(lowest_slots([0.0, 0.0, 2.0, 2.5], [3.0, 2.0, 9.0, 4.0], 1e-6)) == [0, 1, 1, 2]


def test_static_batches() -> None:
    """A batch is admitted over several steps and ends with its longest member not preempted."""
    admitted, done = np.array([0.0, 1.0, 6.0, np.nan]), np.array([6.0, 20.0, 9.0, np.nan])
    found = list(_batches(admitted, done, np.array([False, True, False, False])))
    assert found == [([0, 1], 6.0), ([2], 9.0)]
