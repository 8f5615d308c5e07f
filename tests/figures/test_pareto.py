"""Pareto plots: the front, its knee, and labels that can be read."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from headway.figures import (
    draw_pareto,
)
from headway.figures.style import COLORS, MARKERS
from headway.figures.tables import knee


def test_knee() -> None:
    """The point farthest below the chord, on scaled axes; none on a straight line."""
    assert knee(np.array([0.0, 5.0, 9.0, 10.0]), np.array([1.0, 2.0, 3.0, 11.0])) == 2
    assert knee(np.array([0.0, 5.0, 10.0]), np.array([1.0, 2.0, 3.0])) is None
    assert knee(np.array([0.0, 5.0]), np.array([1.0, 2.0])) is None
    assert knee(np.array([1.0, 1.0, 1.0]), np.array([1.0, 2.0, 3.0])) is None


def test_the_front_is_drawn_over_the_points_that_nothing_beats() -> None:
    """Of four points one is beaten in both."""
    rows = pd.DataFrame(
        {
            "mean_tpot_ms": [10.0, 20.0, 40.0, 50.0],
            "output_throughput": [100.0, 300.0, 250.0, 400.0],
            "engine.max_num_seqs": [1, 2, 3, 4],
            "error": None,
        }
    )
    (axes,) = draw_pareto(rows).axes
    front = axes.lines[-1]
    assert list(front.get_xdata()) == [20.0, 50.0, 100.0]
    assert list(front.get_ydata()) == [400.0, 300.0, 100.0]
    assert len(axes.lines) == 5
    assert axes.get_xlim() == (0.0, 105.0)  # the marks at the ends are whole
    assert axes.get_ylim() == (0.0, 420.0)


@pytest.mark.medium
def test_of_more_points_than_colours_those_on_the_front_have_one() -> None:
    """Forty candidates of a plan, of which the first nine make the front and eight get a colour."""
    place = np.arange(40)
    rows = pd.DataFrame(
        {
            "engine.max_num_seqs": place + 1,
            "tokens_per_s_per_user": np.where(place < 9, 10.0 + place, 5.0),
            "tokens_per_s_per_gpu": np.where(place < 9, 100.0 - place, 40.0 + place),
        }
    )
    (axes,) = (figure := draw_pareto(rows)).axes
    grey = [line for line in axes.lines if line.get_color() == "0.65"]
    marks = [line for line in axes.lines if line not in grey][:-1]  # the last is the front
    assert (len(grey), len(marks)) == (32, 8)
    assert {(line.get_color(), line.get_marker()) for line in marks} == set(
        zip(COLORS, MARKERS, strict=True)
    )
    ends = [*range(10, 14), *range(15, 19)]  # both of them, and what lies evenly between
    assert [line.get_xdata()[0] for line in marks] == ends
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["others", "1", "2", "3", "4", "6", "7", "8", "9", "front"]


def test_a_front_of_one_point_is_no_line() -> None:
    """And a key whose last word says little is named in full."""
    rows = pd.DataFrame(
        {
            "gpu.name": ["A", "B"],
            "tokens_per_s_per_user": [10.0, 20.0],
            "tokens_per_s_per_gpu": [100.0, 200.0],
        }
    )
    (legend,) = draw_pareto(rows).legends
    assert [text.get_text() for text in legend.get_texts()] == ["A", "B"]
    assert legend.get_title().get_text() == "gpu.name"


def test_a_sweep_of_clusters_is_drawn_per_gpu() -> None:
    """9,000 tokens on 2 GPUs for half a minute, and on 4: 150 and 75 tokens/s of each."""
    rows = pd.DataFrame(
        {
            "mean_tpot_ms": [20.0, 10.0],
            "output_throughput": [300.0, 300.0],
            "total_output_tokens": [9000, 9000],
            "gpu_hours": [1 / 60, 2 / 60],
            "cluster.replicas": [2, 4],
            "error": None,
        }
    )
    (axes,) = draw_pareto(rows).axes
    assert axes.lines[-1].get_ydata() == pytest.approx([150.0, 75.0])
    assert axes.get_ylabel() == "output tokens/s per GPU"


def test_no_label_of_a_pareto_plot_covers_another():
    """Twelve candidates, of which the points all but fall together."""
    rows = pd.DataFrame(
        {
            "engine.max_num_seqs": [2**k for k in range(12)],
            "gpus": [1.0] * 12,
            "holds": [True] * 12,
            "tokens_per_s_per_gpu": [800.0 + 9 * k for k in range(12)],
            "tokens_per_s_per_user": [57.0 - k / 2 for k in range(12)],
        }
    )
    figure = draw_pareto(rows)
    figure.draw_without_rendering()
    labels = [text for text in figure.axes[0].texts if "GPU" in text.get_text()]
    assert sum(len(text.get_text().splitlines()) for text in labels) == 12
    boxes = [Text.get_window_extent(label) for label in labels]  # without the line to its point
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert all(figure.bbox.contains(*corner) for box in boxes for corner in (box.min, box.max))
