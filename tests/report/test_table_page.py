"""The page of a sweep or a plan: what it names best, its table, its pictures, the winner's run."""

import re
from pathlib import Path

import pandas as pd
import pytest

from headway.cli.main import main
from headway.figures.grids import draw_costs, draw_grid, draw_room
from headway.figures.tables import point_label
from headway.report.html.table_page import answer_html, answer_of, plan_columns
from simulator.util.errors import HeadwayError
from tests.support.scenarios import SMALL

KEYS = ["--vary", "engine.max_num_seqs=1,8", "--vary", "workload.request_rate=5,20"]


def sweep(folder: Path, *more: str) -> Path:
    (folder / "s.yaml").write_text(SMALL)
    out = folder / "out"
    assert main(["sweep", str(folder / "s.yaml"), *more, "--jobs", "1", "--out", str(out)]) == 0
    return out


def test_a_sweep_ends_with_a_table_and_a_page(tmp_path: Path, capsys) -> None:
    """The table has a row for each point; the page the same figures, and the best point's run."""
    out = sweep(tmp_path, *KEYS, "--slo", "p99_e2el_ms<=1e9")
    said = capsys.readouterr().out
    assert len(re.findall(r"^max_num_seqs=[18] request_rate=\d+ ", said, re.M)) == 4
    best = re.search(r"^Best: (max_num_seqs=\d) (request_rate=\d+): the highest", said, re.M)
    assert best is not None
    rows = pd.read_csv(out / "results.csv")
    top = rows.loc[rows.output_throughput.idxmax()]
    seats = top["engine.max_num_seqs"]
    assert best.groups() == (
        f"max_num_seqs={seats}",
        f"request_rate={top['workload.request_rate']}",
    )
    assert f"max_num_seqs: {seats}" in (out / "best.yaml").read_text()
    page = tmp_path / "r.html"
    assert main(["report", str(out), "--out", str(page)]) == 0
    text = page.read_text("utf-8")
    body = text.partition("<tbody>")[2].partition("</tbody>")[0]
    sorts = re.findall(r'<tr><td data-sort="([\d.]+)">', body)
    assert [float(value) for value in sorts] == rows["engine.max_num_seqs"].tolist()
    assert text.count('<figure class="drawn">') == 2
    assert 'id="data"' in text
    assert "Below is its run" in text


def test_candidates_that_were_not_tried_are_folded_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "plan.csv").write_text(
        "gpu.name,holds,candidate,not_tried,dollars_per_hour,never_holds,error\n"
        "L40S,True,L40S,,1.86,,\nH100,False,H100,costs $6.88/h at least,,,\n"
        "T4,False,T4,,,does not fit,does not fit\n"
    )
    (tmp_path / "plan.json").write_text('{"best": 0, "candidates": [{}], "answer": ["Buy L40S"]}')
    shown, _, folded = answer_of(tmp_path)["table"].partition("<details>")
    assert "L40S" in shown
    assert "H100" not in shown
    assert "error" not in shown + folded
    assert folded.count("does not fit") == 1
    assert folded.startswith("<summary>2 of the candidates not run")
    assert "<td class=word>not tried</td><td class=word>costs $6.88/h at least</td>" in folded


@pytest.mark.medium
def test_the_page_of_a_plan_says_what_its_verdicts_stand_on(tmp_path: Path, capsys) -> None:
    """One seat never keeps up, 16 do; that says how many runs of what length tell so."""
    (tmp_path / "s.yaml").write_text(SMALL)
    out, page = tmp_path / "out", tmp_path / "r.html"
    args = ["--slo", "p99_ttft_ms<=250", "--vary", "engine.max_num_seqs=1,16", "--cheapest"]
    assert main(["plan", str(tmp_path / "s.yaml"), *args, "--jobs", "1", "--out", str(out)]) == 0
    assert main(["report", str(out), "--out", str(page)]) == 0
    text = page.read_text("utf-8")
    body = text.partition("<tbody>")[2].partition("</tbody>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in body.split("<tr>")[1:]]
    assert [(row[0], row[1]) for row in rows] == [("16", "yes")]
    folded = text.partition("1 of the candidates not run</summary>")[2]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", folded.partition("</tbody>")[0])
    assert cells[:2] == ["1", "never"]
    assert "replica can decode" in cells[-1]
    bases = pd.read_csv(out / "plan.csv").looked_at
    assert bases[1] in rows[0]
    assert re.fullmatch(r"\d+ x [\d.]+ (s|min)", bases[1])
    assert "replica can decode" in text
    assert bases[1] in capsys.readouterr().out
    assert f"the table's are means of {bases[1].split()[0]} runs." in text
    best = re.search("The best</h2><p class=headline>(.*?)</p><p class=lines>(.*?)</p>", text, re.S)
    assert best is not None
    assert re.fullmatch(
        r"engine.max_num_seqs=16: carries the load; SLO attainment [\d.]+ %; headroom \d+ %; "
        r"1 GPU, "
        r"\$[\d.]+/h; \$[\d.]+/M output tokens",
        best[1],
    )
    under, looked, *_ = best[2].splitlines()
    assert under.strip() == "under p99_ttft_ms&lt;=250, completion&gt;=1"
    assert looked.strip() == f"looked at {bases[1]} of load"


def test_candidates_of_unlike_keys_have_names() -> None:
    """Rows of autoscaling had no key of their own, and so none."""
    shared = {"holds": [True, False], "at": [2, 3]}
    ragged = {"cluster.autoscaling": [None, "null"], **shared, "candidate": ["the scenario", "a=b"]}
    columns = plan_columns(pd.DataFrame(ragged), "cluster.replicas")
    assert [*columns][:3] == ["candidate", "holds", "at"]
    alike = {"cluster.router": ["random", "fair"], **shared, "candidate": ["a", "b"]}
    assert next(iter(plan_columns(pd.DataFrame(alike), ""))) == "cluster.router"


def test_an_answer_is_a_headline_and_what_folds_away() -> None:
    told = answer_html("Buy 2 x A\n  under\n    p99<=1\nSecond best: B\n  means: 3\nThen C")
    assert told == (
        "<p class=headline>Buy 2 x A</p><p class=lines>under p99&lt;=1</p>"
        "<details><summary>Second best: B</summary><p class=lines>means: 3</p></details>"
        "<p>Then C</p>"
    )


def test_where_no_point_keeps_the_levels_none_is_best(tmp_path: Path, capsys) -> None:
    """And a best.yaml of an earlier sweep goes."""
    out = sweep(tmp_path, *KEYS)
    assert (out / "best.yaml").exists()
    sweep(tmp_path, *KEYS, "--slo", "p99_e2el_ms<=0.001")
    assert "No best point: none keeps the service levels." in capsys.readouterr().out
    assert not (out / "best.yaml").exists()
    page = tmp_path / "r.html"
    assert main(["report", str(out), "--out", str(page)]) == 0
    text = page.read_text("utf-8")
    assert "No point is best, so no run is shown." in text
    assert 'id="data"' not in text


def test_a_page_holds_one_sweep(tmp_path: Path, capsys) -> None:
    out = sweep(tmp_path, *KEYS)
    capsys.readouterr()
    assert main(["report", str(out), str(out), "--out", str(tmp_path / "r.html")]) == 2
    assert "a page has one sweep or plan" in capsys.readouterr().err
    (out / "results.csv").write_text("a,b\n")
    assert main(["report", str(out), "--out", str(tmp_path / "r.html")]) == 2
    assert "its table has no row" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_a_folder_around_a_sweep_is_it_unless_there_is_more(tmp_path: Path, capsys) -> None:
    """Of two it has to be said which; beside runs a sweep is left out, and that is said."""
    out, page = sweep(tmp_path, *KEYS), tmp_path / "r.html"
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--out", str(page)]) == 0
    assert f"{out}, 4 points" in capsys.readouterr().out
    assert "Over the keys" in page.read_text("utf-8")
    other = tmp_path / "other"
    other.mkdir()
    (other / "results.csv").write_bytes((out / "results.csv").read_bytes())
    assert main(["report", str(tmp_path), "--out", str(page)]) == 2
    told = capsys.readouterr().err
    assert told == f"headway: error: {other}, {out}: a page has one sweep or plan; name one\n"
    run = ["run", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "run"), "--quiet"]
    assert main(run) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--out", str(page)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == f"left out: {other}, {out}: a sweep or plan has a page of its own"


@pytest.mark.medium
def test_what_a_plan_did_not_try_is_neither_yes_nor_no(tmp_path: Path) -> None:
    """Nor has the table a place where nothing was searched."""
    (tmp_path / "s.yaml").write_text(SMALL)
    out, page = tmp_path / "out", tmp_path / "r.html"
    args = ["--slo", "p99_ttft_ms<=1e6", "--vary", "cluster.replicas=1,2", "--cheapest"]
    args += ["--min-duration", "60", "--jobs", "1", "--quiet", "--out", str(out)]
    assert main(["plan", str(tmp_path / "s.yaml"), *args]) == 0
    assert main(["report", str(out), "--out", str(page)]) == 0
    text = page.read_text("utf-8")
    rows = text.partition("<tbody>")[2].partition("</tbody>")[0].split("<tr>")[1:]
    assert [re.findall("yes|not tried|no", row)[0] for row in rows] == ["yes"]
    assert "1 of the candidates not run" in text
    heads = re.findall("<th[^>]*>(.*?)</th>", text.partition("<tbody>")[0])
    assert "keeps the bounds" in heads
    assert "at" not in heads


def test_wrong_levels_are_refused_before_the_runs(tmp_path: Path, capsys) -> None:
    (tmp_path / "s.yaml").write_text(SMALL)
    args = ["sweep", str(tmp_path / "s.yaml"), *KEYS, "--out", str(tmp_path / "out")]
    assert main([*args, "--slo", "p99_tft_ms<=1"]) == 2
    assert "no metric 'p99_tft_ms'" in capsys.readouterr().err
    assert not (tmp_path / "out" / "results.csv").exists()


def test_heat_map_and_curve() -> None:
    """Of several points in a cell the best by the measure: the least P99, the highest rate."""
    rows = pd.DataFrame(
        {
            "a.x": [1, 1, 2, 2, 2],
            "b.y": [3, 4, 3, 4, 4],
            "p99_ttft_ms": [10.0, 20.0, 30.0, 40.0, 35.0],
            "output_throughput": [1.0, 2.0, 3.0, 4.0, 5.0],
        }
    )
    figure = draw_grid(rows)
    cells = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert cells == [["10", "30", "20", "35"], ["1", "3", "2", "5"]]
    figure = draw_grid(rows[rows["b.y"] == 3])
    assert figure.axes[0].lines[0].get_ydata().tolist() == [10.0, 30.0]
    costs = {"dollars_per_million_output_tokens": [3.0, 2.0, 1.0, 1.0, 1.0]}
    labels = [axes.get_title() for axes in draw_grid(rows.assign(**costs)).axes]
    assert labels == ["P99 TTFT, ms", "output tokens/s"]
    planned = rows.assign(**costs, capacity=[1.0, 2.0, 3.0, 4.0, 5.0])
    labels = [axes.get_title() for axes in draw_grid(planned).axes]
    assert labels == ["Capacity: largest load within the bounds", "$ per M output tokens"]
    named = rows[rows["b.y"] == 3].assign(**{"a.x": pd.array(["fcfs", "sjf"], dtype="string")})
    assert [bar.get_height() for bar in draw_grid(named).axes[0].patches] == [10.0, 30.0]
    with pytest.raises(HeadwayError, match="nothing to draw"):
        draw_grid(rows.assign(**{"a.x": 1, "b.y": 1}))


def test_points_are_named_by_their_gpus() -> None:
    row = pd.Series({"gpu.name": "H100-80GB", "cluster.replicas": 2, "gpus": 2.0, "a.b": 7})
    assert point_label(row, ["gpu.name", "cluster.replicas", "a.b"]) == "2 x H100-80GB, b 7"
    assert point_label(row.drop(["gpu.name"]), ["cluster.replicas"]) == "2 GPUs"
    assert point_label(row.drop("gpus"), ["gpu.name", "a.b"]) == "gpu.name H100-80GB, b 7"


def test_the_page_of_a_plan_begins_with_what_candidates_cost(tmp_path: Path) -> None:
    """Bars in order of cost, with what breaks next; then room and bounds; none that are equal."""
    rows = pd.DataFrame(
        {
            "gpu.name": ["H100-80GB", "L40S", "A10G"],
            "engine.quantization": ["null", "fp8", "fp8"],
            "holds": [True, True, False],
            "at": [1.0, 2.0, None],
            "gpus": [1, 2, None],
            "p99_ttft_ms": [100.0, 900.0, 2000.0],
            "p90_tpot_ms": [20.0, 20.0, 50.0],
            "dollars_per_hour": [6.88, 3.72, None],
            "reason": ["p99_ttft_ms", "p90_tpot_ms", "p99_ttft_ms"],
            "headroom": [0.4, 0.1, None],
        }
    )
    (cost,) = draw_costs(rows).axes
    rows.attrs["slo"] = ["p99_ttft_ms<=1000", "p90_tpot_ms<=40", "completion>=1"]
    room, ttft = draw_room(rows).axes
    assert [bar.get_width() for bar in cost.patches] == [6.88, 3.72]
    assert [label.get_text() for label in cost.get_yticklabels()] == [
        "1 x H100-80GB",
        "2 x L40S, weights fp8",
    ]
    assert [bar.get_width() for bar in ttft.patches] == [100.0, 900.0]
    assert [line.get_xdata() for line in ttft.lines] == [[1000.0, 1000.0]]
    assert [text.get_text() for text in cost.texts] == ["p99_ttft_ms", "p90_tpot_ms"]
    assert [bar.get_width() for bar in room.patches] == pytest.approx([40.0, 10.0])
    with pytest.raises(HeadwayError, match="cost the same"):
        draw_costs(rows.assign(dollars_per_hour=3.0))
    with pytest.raises(HeadwayError, match="the same room"):
        draw_room(rows.assign(headroom=0.1, p99_ttft_ms=5.0))
