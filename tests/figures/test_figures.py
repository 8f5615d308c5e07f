"""The pictures of `headway plot`: what they show, by hand, and what they refuse."""

import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from headway.cli.main import main
from headway.figures import (
    Run,
    draw_chunk,
    draw_clients,
    draw_fairness,
    draw_kv,
    draw_latency,
    draw_pareto,
    draw_throughput,
)
from headway.figures.data import read_runs, shown_until
from headway.figures.style import COLORS, PHASES, STATE_COLORS, tones
from headway.report.html.charts import over_time
from headway.report.text import run_table
from simulator import load_scenario, run
from tests.support.scenarios import AZURE, SMALL

LIVE = (
    "start,seconds,predicted_s,chunks\n0,0.010,0.011,\n0.01,0.020,0.018,64:0\n0.03,0.011,0.011,\n"
)


@pytest.mark.many
@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *((kind, "cmp") for kind in ("throughput", "occupancy", "kv", "policies")),
        *((kind, "cmp") for kind in ("fairness", "clients")),
        *((kind, "swp") for kind in ("latency", "pareto", "chunk")),
        ("steps", "live"),
    ],
)
def test_every_kind(folder, tmp_path, kind: str, source: str) -> None:
    """PNG and SVG, the same bytes each time, units on every axis that has numbers."""
    for ending, head in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"picture{ending}"
        command = ["plot", kind, str(folder / source), "--out", str(path)]
        assert main(command) == 0
        first = path.read_bytes()
        assert first.startswith(head)
        assert main(command) == 0
        assert path.read_bytes() == first


def test_axes_have_units(folder) -> None:
    """Each axis says what it counts."""
    runs = read_runs([folder / "cmp"])
    rows = pd.read_csv(folder / "swp" / "results.csv")
    for figure in (draw_kv(runs), draw_latency(rows), draw_pareto(rows), draw_chunk(rows)):
        for axes in figure.axes:
            assert re.search(r"\(s\)|tokens|%|requests/s", axes.get_xlabel())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["kv", "none"], "none: no such folder"),
        (["kv", "live"], "live/summary.json: no such file; `headway run`"),
        (["latency", "cmp"], "has no results.csv"),
        (["latency", "swp", "cmp"], "takes one folder, not 2"),
        (["kv", "cmp", "--out", "a.jpg"], "must end in .png or .svg"),
        (["throughput", "swp/results.csv"], "swp/results.csv: is a file; throughput draws a fo"),
        (["occupancy", "cmp", "--start", "1000"], "--start 1000.0: no request runs between 1000 "),
        (["memory", "--model", "llama-3-8b", "--gpu", "X"], "error: --gpu X: no GPU 'X' in the t"),
        (["occupancy", "cmp", "--seconds", "0"], "must be more than 0"),
        (["cake", "cmp"], "KIND cake: must be one of throughput, "),
        (["kv"], "OUT_DIR"),
    ],
)
def test_wrong_input_is_told_in_a_line(folder, monkeypatch, capsys, words, told: str) -> None:
    """And nothing is written."""
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert main(["plot", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1
    assert sorted(folder.rglob("*")) == before


def test_latency_is_drawn_over_the_scale_of_a_trace(folder, tmp_path) -> None:
    """By the key that a sweep of a trace varies."""
    (tmp_path / "t.csv").write_text(AZURE)
    (tmp_path / "s.yaml").write_text(SMALL)
    options = ["workload={trace: {path: t.csv}}", "workload.trace.rate_scale=2"]
    assert load_scenario(tmp_path / "s.yaml", options).workload.trace.rate_scale == 2
    rows = pd.read_csv(folder / "swp" / "results.csv")
    scaled = rows.rename(columns={"workload.request_rate": "workload.trace.rate_scale"})
    lines = [len(draw_latency(table).axes[0].lines) for table in (rows, scaled)]
    assert lines[0] == lines[1] > 0


def test_damaged_tables_are_told(folder, tmp_path, capsys) -> None:
    """A column that is missing, one that holds words: a line each."""
    shutil.copytree(folder / "cmp" / "fcfs", tmp_path / "bad")
    steps = pd.read_csv(tmp_path / "bad" / "steps.csv")
    for table, told in (
        (steps.drop(columns="preempted"), "steps.csv: has no column preempted"),
        (steps.assign(start="soon"), "steps.csv: damaged: start has what is no number"),
    ):
        table.to_csv(tmp_path / "bad" / "steps.csv")
        assert main(["plot", "kv", str(tmp_path / "bad")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"headway: error: {tmp_path / 'bad'}/{told}"


def test_a_damaged_comparison_is_told(folder, tmp_path, capsys) -> None:
    """It says which runs there are, and in which order."""
    table = tmp_path / "comparison.csv"
    for text, told in (("", "damaged: it is empty"), ("name\na\n", "has no column run")):
        table.write_text(text)
        assert main(["plot", "throughput", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"headway: error: {table}: {told}\n"


def test_damaged_sweeps_are_told(folder, tmp_path, capsys) -> None:
    """Words where numbers should be."""
    rows = pd.read_csv(folder / "swp" / "results.csv")
    for key, kind in (
        ("output_throughput", "pareto"),
        ("p99_ttft_ms", "latency"),
        ("engine.max_num_batched_tokens", "chunk"),
    ):
        rows.assign(**{key: "x"}).to_csv(tmp_path / "results.csv")
        assert main(["plot", kind, str(tmp_path)]) == 2
        assert f"damaged: {key} has what is no number" in capsys.readouterr().err


def test_damaged_live_steps_are_told(tmp_path, capsys) -> None:
    (tmp_path / "steps_measured.csv").write_text(LIVE.replace("0.020", "soon"), "utf-8")
    assert main(["plot", "steps", str(tmp_path)]) == 2
    assert "damaged: seconds has what is no number" in capsys.readouterr().err


def test_runs_called_the_same_are_told_apart(folder, tmp_path) -> None:
    """By the folder above."""
    shutil.copytree(folder / "cmp" / "fcfs", tmp_path / "fcfs")
    labels = [run.label for run in read_runs([folder / "cmp", tmp_path / "fcfs"])]
    assert labels == ["cmp/static", "cmp/fcfs", f"{tmp_path.name}/fcfs"]


def test_tables_that_lack_something(folder, tmp_path, capsys) -> None:
    """A sweep without load, a broken summary, a run of one client."""
    rows = pd.read_csv(folder / "swp" / "results.csv")
    for key, kind in (
        ("workload.request_rate", "latency"),
        ("engine.max_num_batched_tokens", "chunk"),
    ):
        rows.drop(columns=key).to_csv(tmp_path / "results.csv")
        assert main(["plot", kind, str(tmp_path)]) == 2
        assert "results.csv: the sweep " in capsys.readouterr().err
    broken = tmp_path / "broken"
    shutil.copytree(folder / "cmp" / "fcfs", broken)
    (broken / "fairness.csv").unlink()
    assert main(["plot", "fairness", str(broken)]) == 2
    assert "fairness.csv: no such file" in capsys.readouterr().err
    (broken / "summary.json").write_text("{", "utf-8")
    assert main(["plot", "kv", str(broken)]) == 2
    assert "summary.json: damaged: Expecting" in capsys.readouterr().err


def test_a_run_from_memory_is_the_run_from_its_files(folder) -> None:
    """The same figures from Result and from the folder."""
    scenario = load_scenario(folder / "small.yaml", ["engine.scheduling_policy=fcfs"])
    memory, file = Run.of("fcfs", run(scenario)), Run.read(folder / "cmp" / "fcfs", "fcfs")
    assert memory.summary == file.summary
    assert memory.end == pytest.approx(file.end)
    assert list(memory.fairness.columns) == list(file.fairness.columns)
    edges = np.linspace(0.0, memory.end, 7)
    for each in (memory, file):
        tokens = each.steps.decode_tokens * each.steps.steps / each.steps.duration
        decoded = (each.over_time(tokens, edges) * np.diff(edges)).sum()
        assert decoded == pytest.approx(each.summary["headway"]["decode_tokens"])


def test_no_phase_has_the_colour_of_a_run() -> None:
    assert {*COLORS}.isdisjoint({*PHASES.values(), *STATE_COLORS.values()})
    assert len(tones(COLORS[0])) == len({*tones(COLORS[0])}) == 4


def test_a_slow_run_is_cut_off(folder) -> None:
    """One that takes more than three times as long as the shortest goes on beyond the picture."""
    static, fcfs = read_runs([folder / "cmp"])
    assert shown_until([static, fcfs]) == (max(static.end, fcfs.end), "")
    slow = replace(static, steps=static.steps.assign(start=static.steps.start * 10))
    until, told = shown_until([slow, fcfs])
    assert until == 1.25 * fcfs.end
    assert told == f"goes on: static until {slow.end:,.0f} s"
    for figure, number in ((draw_throughput([slow, fcfs]), 1), (draw_kv([slow, fcfs]), 0)):
        axes = figure.axes[number]
        assert axes.get_xlim()[1] == until
        assert axes.get_xlabel() == f"time (s); {told}"


def test_fairness_says_why_it_is_empty(folder) -> None:
    (found,) = read_runs([folder / "cmp" / "fcfs"])
    found.fairness = found.fairness.assign(jain_index=np.nan)
    texts = [text.get_text() for axes in draw_fairness([found]).axes for text in axes.texts]
    assert len(texts) == 2
    assert "in no window do two" in texts[0]


def test_labels_at_ends_of_lines_do_not_touch(folder) -> None:
    figure = draw_chunk(pd.read_csv(folder / "swp" / "results.csv"))
    assert not figure.legends
    for axes in figure.axes:
        labels = [text for text in axes.texts if text.get_text() != "SLO"]
        assert {text.get_text() for text in labels} == {
            f"{word} {rate}" for word in ("P99", "mean") for rate in (5, 10, 20)
        }
        heights = sorted(text.xy[1] * axes.bbox.height for text in labels)
        assert min(b - a for a, b in pairwise(heights)) > 14.9


SCALED = """
model: tiny-test
gpu: {name: A100-80GB}
engine: {max_num_seqs: 4, num_gpu_blocks_override: 200, max_model_len: 256}
cost: {kind: linear, base: 0.05, per_token: 0.0001}
workload: {num_prompts: 600, request_rate: 10, input_len: 20, output_len: 20,
           diurnal: {period: 60, amplitude: 0.9}}
cluster: {replicas: 1, autoscaling: {target: 2, max_replicas: 4, interval: 2, startup_delay: 2,
          cooldown: 4}}
"""


def test_the_kv_cache_of_a_fleet_is_divided_by_the_replicas_there_at_that_time(tmp_path: Path):
    """In the picture and on the page: by those that serve; those that start are paid for, too."""
    (tmp_path / "s.yaml").write_text(SCALED)
    scaled = Run.of("scaled", run(load_scenario(tmp_path / "s.yaml")))
    cluster, steps = scaled.summary["headway"]["cluster"], scaled.steps
    spans = cluster["paid_times"]
    assert len(spans) == scaled.summary["headway"]["replicas"] == 4
    first = float(scaled.sent.min())
    end = first + scaled.summary["duration"]
    seconds = sum(
        min(end if b is None else b, end) - max(a, first) for each in spans for a, b in each
    )
    assert seconds == pytest.approx(3600 * cluster["replica_hours"])
    assert seconds < 0.9 * 4 * scaled.summary["duration"]

    edges = np.linspace(0.0, scaled.end, 301)
    used = np.zeros(300)
    for _, rows in steps.groupby("replica"):
        for row in rows.itertuples():
            inside = np.minimum(edges[1:], row.start + row.duration) - np.maximum(
                edges[:-1], row.start
            )
            blocks = row.kv_blocks_used + row.kv_blocks_free
            used += 100 * row.kv_blocks_used / blocks * np.maximum(inside, 0.0)
    serving = np.zeros(300)
    for number, each in enumerate(spans):
        for a, b in each:
            start = a + 2 * (number > 0)  # startup_delay
            last = max(scaled.end if b is None else b, start)
            serving += np.maximum(np.minimum(edges[1:], last) - np.maximum(edges[:-1], start), 0.0)
    expected = used / serving
    assert np.allclose(sum(scaled.serving(edges)), serving / np.diff(edges))
    drawn = draw_kv([scaled]).axes[0].lines[0].get_ydata()
    assert np.allclose(drawn, expected[: len(drawn)])
    page = np.array(over_time(scaled, edges)["kv"])
    grown = steps["steps"].max() > 1  # then the page has blocks in the middle of a row
    assert np.allclose(page, expected, rtol=0.5 if grown else 1e-3, atol=0.5 if grown else 0)
    table = run_table(scaled.summary)
    assert "GPU busy (% of replica-hours paid):" in table
    assert "GPU busy (%)" not in table


def test_each_client_has_a_row_with_its_mean_and_p99(folder) -> None:
    """In seconds, those of the summary; a run's colour is its place's."""
    runs = read_runs([folder / "cmp"])
    figure = draw_clients(runs)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["client-0", "client-1"]
    for axes, key in zip(figure.axes, ("ttft", "e2el"), strict=True):
        lines = iter(axes.get_lines())
        for number, found in enumerate(runs):
            parts = found.summary["headway"]["per_client"]
            for word in ("mean", "p99"):
                line = next(lines)
                told = [parts[name][f"{word}_{key}_ms"] for name in ("client-0", "client-1")]
                assert 1000 * line.get_xdata() == pytest.approx(told)
                assert line.get_color() == COLORS[number]


def test_one_client_alone_is_no_picture_of_clients(folder, tmp_path, capsys) -> None:
    """And a comparison of such runs has no panels for them."""
    scenario, out = str(folder / "small.yaml"), tmp_path / "one"
    assert main(["run", scenario, "--set", "workload.clients=null", "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["plot", "clients", str(out)]) == 2
    assert "has one client and one priority, or no tables" in capsys.readouterr().err
    assert not (out / "clients.png").exists()
