"""The pictures of `headway plot`: what they show, by hand, and what they refuse."""

import re
import shutil
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from simulator import load_scenario, run
from simulator.cli.main import main
from simulator.figures import (
    Run,
    draw_chunk,
    draw_clients,
    draw_fairness,
    draw_kv,
    draw_latency,
    draw_occupancy,
    draw_pareto,
    draw_throughput,
)
from simulator.figures.data import read_runs, shown_until
from simulator.figures.occupancy import _batches, lowest_slots, seats_by_phase
from simulator.figures.style import COLORS, MARKERS, PHASES, STATE_COLORS, tones
from simulator.figures.tables import knee
from simulator.views.html.charts import over_time
from simulator.views.report import run_table
from tests.support.scenarios import AZURE, SMALL

SCENARIO = """
name: small
engine: {max_num_seqs: 4, enable_prefix_caching: false}
workload: {num_prompts: 40, request_rate: 20, input_len: 64, output_len: 32, clients: 2,
           range_ratio: 0.5}
"""
LIVE = (
    "start,seconds,predicted_s,chunks\n0,0.010,0.011,\n0.01,0.020,0.018,64:0\n0.03,0.011,0.011,\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A comparison, a sweep and a live run's steps."""
    folder = tmp_path_factory.mktemp("figures")
    (folder / "small.yaml").write_text(SCENARIO, "utf-8")
    scenario, out = str(folder / "small.yaml"), str(folder / "cmp")
    vary = "engine.scheduling_policy=static,fcfs"
    assert main(["compare", scenario, "--vary", vary, "--out", out, "--quiet"]) == 0
    keys = ("workload.request_rate=5,10,20", "engine.max_num_batched_tokens=64,128")
    options = [word for key in keys for word in ("--vary", key)]
    sweep = ["sweep", scenario, *options, "--jobs", "1", "--out", str(folder / "swp"), "--quiet"]
    assert main(sweep) == 0
    (folder / "live").mkdir()
    (folder / "live" / "steps_measured.csv").write_text(LIVE, "utf-8")
    return folder


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
        (["occupancy", "cmp", "--start", "1000"], "no request runs between 1000 and 1060 s"),
        (["occupancy", "cmp", "--seconds", "0"], "must be more than 0"),
        (["cake", "cmp"], 'Invalid value "cake"'),
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
        (steps.assign(start="soon"), "steps.csv: damaged: start holds what is no number"),
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
        assert f"damaged: {key} holds what is no number" in capsys.readouterr().err


def test_damaged_live_steps_are_told(tmp_path, capsys) -> None:
    (tmp_path / "steps_measured.csv").write_text(LIVE.replace("0.020", "soon"), "utf-8")
    assert main(["plot", "steps", str(tmp_path)]) == 2
    assert "damaged: seconds holds what is no number" in capsys.readouterr().err


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
    assert "has one client and one priority only" in capsys.readouterr().err
    assert not (out / "clients.png").exists()


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
