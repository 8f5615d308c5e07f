"""Service levels as lines in pictures of sweeps and runs."""

from pathlib import Path

import pandas as pd
import pytest

from headway.figures import Run, draw_chunk, draw_latency, draw_policies, draw_throughput
from simulator import load_scenario, run

SCENARIO = """
name: small
engine: {max_num_seqs: 4, enable_prefix_caching: false}
workload: {num_prompts: 40, request_rate: 20, input_len: 64, output_len: 32}
goodput: {ttft: 30, tpot: 5}
slo: [output_throughput>=900, goodput>=0.5]
"""


def rows(**more: float) -> pd.DataFrame:
    """Three points of a sweep over load and chunks."""
    names = ("ttft", "tpot", "itl", "e2el")
    latencies = {
        f"{word}_{name}_ms": [10.0, 20.0, 90.0] for word in ("mean", "p99") for name in names
    }
    return pd.DataFrame(
        {
            "error": None,
            "output_throughput": [1.0, 2.0, 3.0],
            "request_throughput": [1.0, 2.0, 2.5],
            **latencies,
            "workload.request_rate": [1, 2, 3],
            **{name: [bound] * 3 for name, bound in more.items()},
        }
    )


def levels(figure, number: int) -> list[float]:
    """Return where lines across lie in one of the axes."""
    lines = (line.get_ydata() for line in figure.axes[number].lines)
    return [float(y[0]) for y in lines if len(y) == 2 and y[0] == y[1]]


def test_bounds_lie_across_the_latencies_of_a_sweep() -> None:
    figure = draw_latency(rows(slo_ttft_ms=40.0, slo_tpot_ms=30.0))
    assert levels(figure, 0) == [40]
    assert levels(figure, 1) == [30]
    assert figure.axes[1].get_ylabel() == "P99 TPOT (ms)"  # of each request, not of the mean
    assert draw_latency(rows()).axes[1].get_ylabel() == "mean TPOT (ms)"
    chunks = rows(slo_ttft_ms=40.0, slo_tpot_ms=5000.0).drop(columns="workload.request_rate")
    figure = draw_chunk(chunks.assign(**{"engine.max_num_batched_tokens": [64, 128, 256]}))
    assert levels(figure, 0) == [40]
    assert levels(figure, 1) == []
    assert levels(draw_latency(rows()), 0) == []


def test_a_bound_on_another_percentile_lies_across_that_percentile() -> None:
    """A bound on the P95 lay across the P99."""
    given = {"slo_ttft_ms": 40.0, "slo_ttft_percentile": 95.0, "slo_tpot_ms": 30.0}
    figure = draw_latency(rows(**given, p95_ttft_ms=45.0, slo_tpot_percentile=97.0))
    assert 40 in levels(figure, 0)
    assert figure.axes[0].get_ylabel() == "P95 TTFT (ms)"
    assert levels(figure, 1) == []  # the table lacks the P97
    assert levels(draw_latency(rows(**given)), 0) == []


def test_a_bound_on_a_mean_lies_across_the_mean() -> None:
    table = rows(slo_ttft_mean_ms=40.0)
    figure = draw_latency(table)
    assert figure.axes[0].get_ylabel() == "mean TTFT (ms)"
    assert levels(figure, 0) == [40]
    chunks = table.drop(columns="workload.request_rate")
    figure = draw_chunk(chunks.assign(**{"engine.max_num_batched_tokens": [64, 128, 256]}))
    assert levels(figure, 0) == [40]


def test_a_bound_on_throughput_is_upright_and_in_sight(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SCENARIO)
    found = Run.of("small", run(load_scenario(tmp_path / "s.yaml")))
    bars = draw_throughput([found]).axes[0]
    assert [line.get_xdata()[0] for line in bars.lines] == [900]
    assert bars.get_xlim()[1] > 900


@pytest.mark.filterwarnings("error")
def test_the_legend_of_policies_names_no_bound(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SCENARIO)
    figure = draw_policies([Run.of("small", run(load_scenario(tmp_path / "s.yaml")))])
    assert [text.get_text() for text in figure.legends[0].texts] == ["mean", "median", "P99"]
