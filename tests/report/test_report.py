"""The tables as text: vLLM's labels and formats, ratios and marks."""

import json
import re
from collections.abc import Sequence
from math import exp

import numpy as np
import pytest

from headway.cli.main import main
from headway.report.comparison import compare_table
from headway.report.text import run_table
from simulator.core.log import Log
from simulator.results.metrics import Summary
from tests.support.logs import (
    ObservedRequest,
    add_request,
    add_run,
    add_step,
    make_workload,
    summarize,
)

TABLE = """\
============ Serving Benchmark Result ============
Successful requests:                     2
Failed requests:                         1
Maximum request concurrency:             4
Request rate configured (RPS):           2.50
Benchmark duration (s):                  4.00
Total input tokens:                      10
Total generated tokens:                  5
Request throughput (req/s):              0.50
Request goodput (req/s):                 0.25
Output token throughput (tok/s):         1.25
Peak output token throughput (tok/s):    2.00
Peak concurrent requests:                2.00
Total token throughput (tok/s):          3.75
---------------Time to First Token----------------
Mean TTFT (ms):                          1000.00
Median TTFT (ms):                        1000.00
P99 TTFT (ms):                           1000.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          1250.00
Median TPOT (ms):                        1250.00
P99 TPOT (ms):                           1495.00
---------------Inter-token Latency----------------
Mean ITL (ms):                           1333.33
Median ITL (ms):                         1000.00
P99 ITL (ms):                            1980.00
Std ITL (ms):                            471.40
Range of ITL (ms):                       1000.00 to 2000.00
----------------End-to-end Latency----------------
Mean E2EL (ms):                          3000.00
Median E2EL (ms):                        3000.00
P99 E2EL (ms):                           3980.00
---------------Client-side Queueing---------------
Mean Client Queue Time (ms):             0.00
Median Client Queue Time (ms):           0.00
P99 Client Queue Time (ms):              0.00
--------Queue-inclusive End-to-end Latency--------
Mean E2EL incl. Client Queue (ms):       3000.00
Median E2EL incl. Client Queue (ms):     3000.00
P99 E2EL incl. Client Queue (ms):        3980.00
--------------Queueing in the Engine--------------
Mean Queue Time (ms):                    500.00
Median Queue Time (ms):                  500.00
P99 Queue Time (ms):                     500.00
------------------Service Levels------------------
goodput>=0.99:                           broken: 33.33 % of requests keep it, 65.7 points short
completion>=1:                           broken: 66.67 % of requests keep it, 33.3 points short
Requests of E2EL<=3000 ms (%):           33.33
----------------------Engine----------------------
Steps:                                   3
GPU busy (%):                            87.50
Mean batch while busy (requests):        1.43
Batch occupancy, live (% of seats):      71.43
Decode seat utilization (%):             75.00
Mean queue depth (requests):             0.25
Peak queue depth (requests):             2
Mean KV cache usage (%):                 11.43
Peak KV cache usage (%):                 20.00
KV memory efficiency (%):                65.62
Wasted token slots (%):                  27.78
Wasted seat-steps (%):                   0.00
Preemptions:                             0
Prefix cache hit rate (% of tokens):     0.00
Power of all GPUs (W, within 25%):       68.00
Energy of an output token (J):           54.40
Energy of 1M output tokens (Wh):         15111.11
CO2e of 1M output tokens (g):            7147.56
Price ($/h):                             3.43
Cost of 1M output tokens ($):            762.22
Requests rejected (never fit or 503):    1
==================================================
"""


@pytest.fixture
def summary() -> Summary:
    """Two requests that end, with 3 and 2 tokens, and one that never fits."""
    log = Log(num_blocks=10, block_size=4, num_seats=2)
    add_step(log, 0.5, 1.0, running=2, prefill_tokens=10, wasted=4, blocks_used=2, kv_tokens=5)
    add_step(log, 1.0, 2.0, running=2, decodes=2, blocks_used=1, kv_tokens=2)
    add_step(log, 2.0, 4.0, running=1, decodes=1, wasted=1, blocks_used=1, kv_tokens=3)
    log.tick_ends.extend([2.0, 4.0])
    seen = [
        ObservedRequest(0.0, 0.5, [1.0, 2.0, 4.0]),
        ObservedRequest(0.0, 0.5, [1.0, 2.0]),
        ObservedRequest(0.0),
    ]
    seen[2].reason = "rejected"
    for number, request in enumerate(seen):
        add_request(log, number, request)
    add_run(log, 0, 1.0, 0, 2)
    add_run(log, 1, 1.0, 0, 1)
    load = make_workload(seen, max_concurrency=4, request_rate=2.5)
    sent = np.array([0.0, 0.0, 0.0])
    summary = summarize(load, sent, [log], goodput={"e2el": 3000}, max_num_seqs=2)
    summary["headway"] |= dict.fromkeys(("mfu", "bandwidth_utilization"))  # as if unknown
    return summary


def test_run_table(summary: Summary) -> None:
    """Every line, to the letter."""
    assert run_table(summary) + "\n" == TABLE


def test_what_was_not_asked_is_not_shown(summary: Summary) -> None:
    """No rate, no bound, no closed loop: no line, as in vLLM."""
    for key in ("max_concurrency", "request_goodput"):
        summary[key] = None
    own = summary["headway"]
    summary["headway"] = {key: own[key] for key in own if not key.startswith("slo")}
    summary["request_rate"] = "inf"
    text = run_table(summary)
    assert "concurrency" not in text
    assert "goodput" not in text
    assert "RPS" not in text


def test_a_rate_of_sessions_is_named_so(summary: Summary) -> None:
    """Their requests are more: a throughput above the rate would be a riddle."""
    assert summary["request_rate_unit"] == "requests/s"
    summary["request_rate_unit"] = "sessions/s"
    assert "\nSession rate configured (sessions/s):    2.50\n" in run_table(summary)


def test_warnings_follow(summary: Summary) -> None:
    """A summary brings its warnings along, and says if it was broken off."""
    summary["headway"] |= {"interrupted": True, "warnings": ["out of range"]}
    lines = run_table(summary).splitlines()
    assert lines[-3:] == [
        "=" * 50,
        "Interrupted: the figures end there.",
        "Warning: out of range",
    ]


def shorter(summary: Summary, **changes: float) -> Summary:
    return {**summary, "headway": dict(summary["headway"]), **changes}


def test_compare_table(summary: Summary) -> None:
    """Values side by side, the ratio to the first, + where better and - where worse."""
    one = shorter(summary, output_throughput=100.0, mean_ttft_ms=50.0, p99_itl_ms=0.0)
    other = shorter(summary, output_throughput=250.0, mean_ttft_ms=2000.0, p99_itl_ms=7.0)
    other["headway"]["wasted_share"] = 0.0
    lines = compare_table(["static", "fcfs"], [one, other], everything=True).splitlines()
    cells = cells_of(lines)
    assert lines[0].split() == ["static", "fcfs"]
    assert cells["Output throughput (tok/s)"] == ["100.00", "250.00", "2.50x+"]
    assert cells["Mean TTFT (ms)"] == ["50.00", "2000.00", "40.00x-"]
    assert cells["P99 ITL (ms)"] == ["0.00", "7.00", "-"]
    assert cells["Wasted token slots (%)"] == ["27.78", "0.00", "0x+"]
    assert cells["GPU busy (%)"] == ["87.50", "87.50", "1.00x"]
    assert cells["Preemptions"] == ["0", "0", "1.00x"]
    assert not any(label.startswith("Model FLOPs") for label in cells)
    assert lines[-1] == "Ratios are to static; + better, - worse, in one run of each."


def test_rows_that_do_not_differ_are_folded(summary: Summary) -> None:
    """Within 1 % values are alike, and no better or worse; what one run lacks differs."""
    base = shorter(summary, output_throughput=100.0, mean_ttft_ms=50.0, p99_e2el_ms=1000.0)
    other = shorter(summary, output_throughput=100.9, mean_ttft_ms=49.0, p99_e2el_ms=1000.0)
    other["headway"]["jain_index"] = 0.5
    whole = cells_of(compare_table(["a", "b"], [base, other], everything=True).splitlines())
    text = compare_table(["a", "b"], [base, other])
    cells = cells_of(text.split("\n\n")[0].splitlines()[2:])
    assert cells == {
        "Mean TTFT (ms)": ["50.00", "49.00", "0.98x+"],
        "Fairness: Jain's index of": ["n/a", "0.50"],
        "clients": [],
    }
    assert whole["Output throughput (tok/s)"] == ["100.00", "100.90", "1.01x"]
    left_out = "rows that differ by less than 1% left out: --all shows them."
    (line,) = [one for one in text.splitlines() if one.endswith(left_out)]
    folded = int(line.split()[0])
    labels = [label for label in whole if label and label != "clients" and label[0] != "-"]
    assert folded == sum(len(whole[label]) > 1 for label in labels) - 2


def test_three_runs_fit_80_columns(summary: Summary) -> None:
    """However long their names and the labels of the rows, and however large the values."""
    large = shorter(summary, duration=123456789.1, mean_ttft_ms=98765.4321, p99_e2el_ms=1e12)
    large["headway"]["service_difference_max"] = 7_654_321.0
    small = shorter(summary, p99_e2el_ms=3.0, mean_ttft_ms=1e-3)
    small["headway"]["service_difference_max"] = 1.0
    names = ["{policy: static, batch_size: 8}", "a name that is rather long", "x" * 30]
    text = compare_table(names, [small, large, summary], everything=True)
    assert max(map(len, text.split("\n\n")[0].splitlines())) <= 80
    head = "".join(text.splitlines()[:4])
    assert "static," in head
    assert "rather long" in head
    text = compare_table(["static", "fcfs", "sjf"], [small, large, summary], everything=True)
    assert text.splitlines()[0].split() == ["static", "fcfs", "sjf"]


PART = {"requests": 3, "completed": 3, "output_tokens": 30, "slo_attainment": 0.5}


def with_clients(summary: Summary, **ttft: float) -> Summary:
    """Return a summary whose clients have these mean TTFTs, ms."""
    latencies = ("tpot", "e2el", "queue_time")
    more = {f"{word}_{name}_ms": 9.0 for word in ("mean", "p99") for name in latencies}
    parts = {
        name: {**PART, **more, "mean_ttft_ms": value, "p99_ttft_ms": 2 * value}
        for name, value in ttft.items()
    }
    return {**summary, "headway": {**summary["headway"], "per_client": parts, "clients": 30}}


def test_clients_have_rows_of_their_own(summary: Summary) -> None:
    """In the report of a run, and in a comparison where they differ."""
    before = with_clients(summary, **{"client-0": 340.0, "client-1": 50.0})
    after = with_clients(summary, **{"client-0": 122.0, "client-1": 50.0})
    cells = cells_of(compare_table(["fcfs", "fair"], [before, after]).splitlines())
    assert cells["client-0: Mean TTFT (ms)"] == ["340.00", "122.00", "0.36x+"]
    assert cells["client-0: P99 TTFT (ms)"] == ["680.00", "244.00", "0.36x+"]
    assert not any("client-1" in label for label in cells)
    lines = run_table(before).splitlines()
    at = lines.index("---------------------Clients----------------------")
    assert lines[at + 1].split() == [
        *("mean,", "ms", "requests", "TTFT", "P99", "TPOT", "E2EL", "P99", "tok/s", "SLO,", "%")
    ]
    assert lines[at + 2].split() == [
        *("client-0", "3", "340.00", "680.00", "9.00", "9.00", "9.00", "7.50", "50.00")
    ]
    assert lines[at + 4] == "2 of 30 clients; the others are in clients.csv"


def cells_of(lines: Sequence[str]) -> dict[str, list[str]]:
    """Return the cells of a table's rows by their labels, which end before two blanks."""
    found = {}
    for line in lines:
        label, *cells = re.split(r"  +", line.strip(), maxsplit=1)
        found[label] = cells[0].split() if cells else []
    return found


@pytest.mark.parametrize("copies", [1, 5])
def test_who_completed_nobody_has_no_latencies(summary: Summary, copies: int) -> None:
    """Though vLLM's summary calls them 0: nobody is slower, and it is no best."""
    zero = {"completed": 0, "output_throughput": 0.0, "mean_ttft_ms": 0.0, "p99_ttft_ms": 0.0}
    empty = shorter(summary, **zero)
    text = compare_table(["empty", "full"] * copies, [empty, summary] * copies)
    if copies == 1:
        cells = cells_of(text.splitlines())
        assert cells["Mean TTFT (ms)"] == ["n/a", f"{summary['mean_ttft_ms']:.2f}"]
        assert cells["Output throughput (tok/s)"][0] == "0.00"
    else:
        rows = [line.split() for line in text.splitlines() if line.startswith(("empty", "full"))]
        assert [row[3].rstrip("*") == "n/a" for row in rows] == [True, False] * 5


@pytest.mark.parametrize("copies", [1, 5])
def test_answers_that_come_as_a_whole_have_no_gaps(summary: Summary, copies: int) -> None:
    """TPOT and ITL of 0 are no better than any others, and no best."""
    zero = {key: 0.0 for key in summary if "_tpot_" in key or "_itl_" in key}
    whole = {**summary, **zero}
    text = compare_table(["each", "whole"] * copies, [summary, whole] * copies)
    if copies == 1:
        cells = cells_of(text.splitlines())
        for name in ("Mean TPOT (ms)", "P99 TPOT (ms)", "P99 ITL (ms)"):
            assert cells[name][1:] == ["n/a"]
    else:
        rows = [line.split() for line in text.splitlines() if line.startswith(("each", "whole"))]
        assert [row.count("n/a") for row in rows] == [0, 2] * 5
    told = run_table(whole)
    assert "Mean TPOT (ms):                          n/a" in told
    assert "P99 ITL (ms):                            n/a" in told
    assert "Std ITL" not in told


def test_a_run_without_a_metric_shows_that_of_the_others(summary: Summary) -> None:
    """Jain's index is that of several clients."""
    fair = {**summary, "headway": {**summary["headway"], "jain_index": 0.5}}
    for runs, told in (([summary, fair], ["n/a", "0.50"]), ([fair, summary], ["0.50", "n/a"])):
        cells = cells_of(compare_table(["one", "two"], runs).splitlines())
        assert cells["Fairness: Jain's index of"] == told


def test_many_runs_fit_the_screen(summary: Summary) -> None:
    """More than three runs come in blocks, each with the first run."""
    text = compare_table([f"run{i}" for i in range(8)], [summary] * 8, everything=True)
    heads = [block.splitlines()[0].split() for block in text.split("\n\n")[:-1]]
    assert heads == [
        ["run0", "run1", "run2"],
        ["run0", "run3", "run4"],
        ["run0", "run5", "run6"],
        ["run0", "run7"],
    ]
    assert max(map(len, text.splitlines())) <= 80


def test_one_run_alone(summary: Summary) -> None:
    """A comparison of one run is its values."""
    lines = compare_table(["only"], [summary]).splitlines()
    assert lines[0].split() == ["only"]
    assert lines[2].split() == ["Successful", "requests", "2"]


def test_of_many_runs_each_is_a_row(summary: Summary) -> None:
    """The best of a column is marked; what a run does not have is n/a; equal columns go."""
    quick = {**summary, "p99_ttft_ms": summary["p99_ttft_ms"] / 2}
    fair = {**summary, "headway": {**summary["headway"], "jain_index": 0.5}}
    text = compare_table([f"run{i}" for i in range(12)], [summary] * 10 + [quick, fair])
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[3:15]] == [f"run{i}" for i in range(12)]
    assert lines[15:] == [
        "",
        "* best of its column. All metrics of all runs are in comparison.csv.",
    ]
    cells = [line.split() for line in lines[3:15]]
    place = lines[1].replace("tok per s", "tok").split().index("P99,") // 2 + 1
    assert [row[place].endswith("*") for row in cells] == [False] * 10 + [True, False]
    assert [row[-4] for row in cells] == ["n/a"] * 11 + ["0.5*"]
    assert {row[-3] for row in cells} == {"33.33*"}  # SLO attainment
    assert {row[-2] for row in cells} == {"762.2*"}  # $ of a million tokens: 4 s at 3.43 an hour
    assert {row[-1] for row in cells} == {"54.4*"}  # J per token: 5 tokens in 4 s at 68 W
    assert "batch" not in lines[0]
    assert max(map(len, lines)) <= 130


RUN = """model: llama-3-8b
gpu: {name: MI300X}
workload: {num_prompts: 4, request_rate: 4, input_len: 10, output_len: 3}
"""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([], "roofline; 95 % of steps within -44 to +80 %; Headway has no measurements of kernels"),
        (["gpu.name=H100-80GB"], "llama-3-8b.h100.bf16; 95 % of steps within -6 to +6 % (decode)"),
        (
            ["gpu.name=H100-80GB", "engine.pipeline_parallel_size=2"],
            "Headway has no measurements of the split into 2 stages",
        ),
        (["cost={kind: linear, base: 0.1}"], None),
        (["cost={kind: linear, base: 0.1, residuals: {decode: 0.1}}"], "within -18 to +22 % (dec"),
        (["cluster={replicas: 2}"], "95 % of steps within -44 to +80 %"),
    ],
    ids=["roofline", "profile", "pipeline", "terms", "residuals", "cluster"],
)
def test_how_sure_step_times_are_is_told(tmp_path, capsys, changes, told):
    """At 1.96 standard deviations of 0.3 a step takes exp(-0.588) to exp(0.588) times as long."""
    path = tmp_path / "s.yaml"
    path.write_text(RUN)
    options = [word for change in changes for word in ("--set", change)]
    assert main(["run", str(path), *options, "--out", str(tmp_path / "out")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "of steps within" not in text if told is None else told in text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["headway"]
    ends = summary["step_times"]["interval_95"]
    if not changes:
        assert ends["decode"] == ends["prompts"] == pytest.approx([exp(-0.588), exp(0.588)])
    assert (ends is None) == (told is None)


@pytest.mark.medium
def test_of_several_runs_each_cost_is_told_once(tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text(RUN)
    vary = ["--vary", "gpu.name=MI300X,L4", "--out", str(tmp_path / "out")]
    for more in ([], ["--replications", "2"]):
        assert main(["compare", str(path), *vary, *more]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert text.count("95 % of steps within") == 2
        assert "Step times of MI300X: roofline;" in text
        assert "Step times of L4: llama-3-8b.l40s.bf16 scaled to L4;" in text
    vary[1] = "engine.max_num_seqs=1,2"
    assert main(["compare", str(path), *vary]) == 0
    assert " ".join(capsys.readouterr().out.split()).count("Step times: roofline; 95 %") == 1
    assert main(["sweep", str(path), *vary]) == 0
    assert " ".join(capsys.readouterr().out.split()).count("Step times: roofline; 95 %") == 1
