"""The campaign over all measured runs: its classes, its table, and what counts as worse."""

from dataclasses import replace
from pathlib import Path

import pytest

from calibration.measured.compare import MetricComparison, Outcome
from headway.planning.sensitivity import Sensitivity
from tests.support.measured_runs import CLOSED, HEAD, STRANGE, run_of
from tools import accuracy
from tools.accuracy import (
    END,
    PAGE,
    TABLE,
    WIDTHS,
    Line,
    as_csv,
    as_markdown,
    as_wide,
    classes,
    drawn,
    main,
    read_csv,
    read_widths,
    table,
    unjudged,
    widths_as_csv,
    with_table,
    worse,
)


def outcome(error: float, *, inside: bool | None = None, impossible: str = "") -> Outcome:
    """An outcome whose mean TPOT is off by so much of 10 ms, and nothing else is known."""
    told = MetricComparison("mean_tpot_ms", 10.0 * (1 + error), 10.0)
    found = Outcome(run_of(), rows=[told], impossible=impossible)
    if inside is not None:
        ends = (9.0, 11.0) if inside else (10.5, 11.0)
        found.sensitivity = [Sensitivity("mean_tpot_ms", told.predicted, 1.0, ends)]
    return found


def lines(*outcomes: Outcome) -> dict[str, Line]:
    """The table of one class, by metric."""
    return {line.metric: line for line in table([(one, {"model": "dense"}) for one in outcomes])}


def test_a_class_has_median_and_90_percent_error_and_counts_what_it_leaves_out() -> None:
    """Of 1, -3 and 5 % these are 3 and 4.6; two of three intervals hold what was measured."""
    good = [outcome(0.01, inside=True), outcome(-0.03, inside=True), outcome(0.05, inside=False)]
    left = [outcome(0.9, impossible="faster than light"), Outcome(run_of(), reason="no GPU")]
    found = lines(*good, *left)
    assert found["TPOT"] == Line("model", "dense", "TPOT", 3, 0.03, 0.046, 2, 3, 1, 1, 0)
    assert found["E2EL"] == Line("model", "dense", "E2EL", 0, None, None, 0, 0, 1, 1, 3)


def test_the_table_is_read_as_it_was_written() -> None:
    found = [*lines(outcome(0.01, inside=True), outcome(0.02)).values()]
    assert read_csv(as_csv(found)) == found


def test_worse_by_two_points_is_told_and_by_less_is_not() -> None:
    (before,) = [lines(outcome(0.03, inside=True))["TPOT"]]
    assert worse([before], [replace(before, median=0.049)]) == []
    assert worse([before], [replace(before, median=0.05)]) == [
        "dense (model), TPOT: median error 5.0%, 3.0% before"
    ]
    assert worse([before], [replace(before, p90=0.1, inside=0)]) == [
        "dense (model), TPOT: 90 % error 10.0%, 3.0% before",
        "dense (model), TPOT: outside their intervals 100.0%, 0.0% before",
    ]
    assert worse([before], [replace(before, inside=0, intervals=0)]) == []  # not computed


def test_runs_that_are_lost_are_told() -> None:
    """A class that predicts fewer runs has not got better by it."""
    (before,) = [lines(outcome(0.03), outcome(0.03))["TPOT"]]
    assert worse([before], []) == ["dense (model), TPOT: 0 runs, 2 before"]
    assert worse([before], [replace(before, runs=1, median=0.0)]) == [
        "dense (model), TPOT: 1 runs, 2 before"
    ]


def test_a_run_counts_in_one_class_of_each_kind(tmp_path: Path) -> None:
    words = {"gpu": "h200_sxm", "engine_version": "0.12.0", "source": "them"}
    dense = classes(Outcome(run_of(model="Qwen/Qwen3-32B", **words)), tmp_path)
    assert dense == {
        "all": "all runs",
        "size": "dense",
        "run": "dense",
        "model": "qwen3-32b",
        "GPU": "H200",
        "precision": "bf16, fp16",
        "engine": "vLLM",
        "scheduling": "synchronous",
        "release": "vLLM 0.12",
        "source": "them",
    }
    long = Outcome(run_of(model="openai/gpt-oss-120b", **words), computed=5000.0)
    assert classes(long, tmp_path)["run"] == "experts, long prompts"
    for model, what in (("openai/gpt-oss-120b", "experts"), ("Qwen/Qwen3-0.6B", "small")):
        assert classes(Outcome(run_of(model=model, **words)), tmp_path)["size"] == what
    drafts = run_of(model="Qwen/Qwen3-32B", engine="sglang", num_speculative_tokens="3", **words)
    told = classes(Outcome(run_of(model="nvidia/Llama-3.3-70B-Instruct-FP4", **words)), tmp_path)
    assert told["precision"] == "nvfp4"
    of = classes(Outcome(drafts), tmp_path)
    assert (of["engine"], of["release"]) == ("SGLang, drafts", "SGLang 0.12")
    strange = classes(Outcome(run_of(model="acme/9B", gpu="Z1")), tmp_path)
    assert strange["size"] == strange["model"] == strange["GPU"] == "unknown"


def test_the_page_shows_the_committed_table() -> None:
    """docs/accuracy.md has what accuracy.csv says: `--write` makes both."""
    page = PAGE.read_text("utf-8")
    assert with_table(page, read_csv(TABLE.read_text("utf-8"))) == page


def test_the_campaign_writes_its_table_and_then_finds_nothing_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, csv = tmp_path / "page.md", tmp_path / "table.csv"
    page.write_text(f"before\n{accuracy.BEGIN}old\n{END}\nafter\n")
    monkeypatch.setattr(accuracy, "PAGE", page)
    monkeypatch.setattr(accuracy, "TABLE", csv)
    monkeypatch.setattr(accuracy, "WIDTHS", tmp_path / "widths.csv")
    monkeypatch.setattr(accuracy, "FOLDERS", {"e2e": ()})
    (tmp_path / "e2e").mkdir()
    (tmp_path / "e2e" / "runs.csv").write_text(HEAD + CLOSED + STRANGE)
    words = ["--data", str(tmp_path)]
    assert main([*words, "--write"]) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{accuracy.BEGIN}")
    assert text.endswith(f"{END}\nafter\n")
    found = read_csv(csv.read_text())
    assert as_markdown(found) in text
    (tpot,) = [one for one in found if (one.kind, one.metric) == ("all", "TPOT")]
    assert (tpot.runs, tpot.not_predicted, tpot.intervals) == (1, 1, 1)
    assert main([*words, "--sample"]) == 0
    assert tpot.median is not None
    better = [replace(one, median=0.0) if one == tpot else one for one in found]
    csv.write_text(as_csv(better))
    capsys.readouterr()
    assert main([*words, "--sample"]) == 1
    assert f"worse: all runs (all), TPOT: median error {tpot.median:.1%}" in capsys.readouterr().out
    csv.write_text(as_csv([replace(one, inside=1) if one == tpot else one for one in found]))
    assert main(words) == (1 - tpot.inside)


def test_a_sample_has_some_of_each_combination_of_classes_the_least_work_first() -> None:
    """Of fourteen dense runs the first, seventh and thirteenth by work; of experts the one."""
    words = {"model": "Qwen/Qwen3-32B", "gpu": "H200", "source": "us"}
    dense = [run_of(run_id=f"d{k}", n_requests=str(100 - k), **words) for k in range(14)]
    dense.append(run_of(run_id="much", n_requests="4001", mean_output_tokens="100", **words))
    dense.append(replace(run_of(run_id="bad", **words), faults=("no",)))
    experts = run_of(run_id="e", n_requests="4000", mean_output_tokens="100")
    assert drawn((run, Path()) for run in (*dense, experts)) == ["d13", "d7", "d1", "e"]


def test_intervals_that_are_not_simulated_lie_as_wide_about_what_is_predicted_now() -> None:
    one = outcome(0.01, inside=True)  # 10.1 ms, 9 to 11
    widths = read_widths(widths_as_csv([(one, {})]))
    (told,) = as_wide(one, widths)
    assert told.interval == pytest.approx((9.0, 11.0), abs=1e-4)
    (moved,) = as_wide(outcome(1.02), widths)
    assert moved.interval == pytest.approx((18.0, 22.0), abs=1e-4)
    assert as_wide(Outcome(run_of(run_id="new"), rows=one.rows), widths) == []


def test_the_committed_intervals_are_of_the_committed_table() -> None:
    """As many of each metric as the table counts."""
    known = [metric for each in read_widths(WIDTHS.read_text()).values() for metric, *_ in each]
    for line in read_csv(TABLE.read_text("utf-8")):
        if line.kind == "all":
            assert known.count(accuracy.METRICS[line.metric]) == line.intervals


def test_what_no_run_is_of_is_named() -> None:
    lines = [
        Line(kind, name, "TPOT", 1, 0.1, 0.1, 0, 0, 0, 0, 0)
        for kind, name in (("GPU", "H200"), ("engine", "vLLM, drafts"))
    ]
    told = unjudged(lines)
    assert {"L40S", "RTX-4090", "SGLang"} <= {*told}
    assert not {"H200", "CPU", "drafts"} & {*told}
    assert f"|no run: {', '.join(told)}|" in as_markdown(lines)


def test_what_is_missing_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"--data {tmp_path}: has no folder e2e\n"
