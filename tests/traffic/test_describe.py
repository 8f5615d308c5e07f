"""What a workload is like, in numbers and in lines of text."""

import numpy as np
import pytest

from headway.cli.main import main
from headway.traffic.describe import describe, describe_text, spread_seconds
from simulator.workload.prefixes import shared_prefix_tokens
from simulator.workload.traces import read_trace
from tests.support.workloads import of_prompts


def test_describe():
    """Plain numbers: rate over the gaps, CV of the gaps, linear percentiles."""
    workload = of_prompts([(("a", 100),), (("a", 100), ("b", 100)), (("c", 600),)])
    workload.arrival = np.array([0.0, 1.0, 4.0])
    workload.source = "x (mooncake)"
    assert describe(workload, "mooncake") == {
        "format": "mooncake",
        "source": "x (mooncake)",
        "requests": 3,
        "session_turns": 0,
        "span_s": 4.0,
        "request_rate": 0.5,
        "burstiness_cv": 0.5,
        "input_tokens": 900,
        "output_tokens": 6,
        "input_len": {
            "min": 100,
            "mean": 300,
            "p50": 200,
            "p90": 520,
            "p95": 560,
            "p99": 592,
            "max": 600,
        },
        "output_len": {
            "min": 1,
            "mean": 2,
            "p50": 2,
            "p90": 2.8,
            "p95": 2.9,
            "p99": 2.98,
            "max": 3,
        },
        "prefix_sharing": pytest.approx(1 / 9),
        "prefix_granularity": 600,
    }
    assert describe_text(workload, "mooncake").splitlines() == [
        "format          mooncake",
        "requests        3",
        "span            4.000 s",
        "request rate    0.500 req/s",
        "burstiness      CV of gaps 0.50 (Poisson: 1; with workload.burstiness: 4)",
        "input tokens    900",
        "output tokens   6",
        "prefix sharing  11.1% of input tokens (blocks of 600)",
        "tokens                 min      mean       p50       p90       p95       p99       max",
        "input length           100       300       200       520       560       592       600",
        "output length            1         2         2         3         3         3         3",
    ]


def test_describe_of_times_whose_squares_overflow():
    """The CV of the gaps has no unit."""
    workload = of_prompts([None, None, None], [1, 1, 1])
    workload.arrival = np.array([0.0, 1e200, 4e200])
    assert describe(workload, "lengths")["burstiness_cv"] == pytest.approx(0.5)


def test_describe_without_times_or_contents():
    """All at once has no rate; lengths alone share nothing that is known."""
    workload = of_prompts([None, None], [5, 6])
    workload.arrival[:] = 0.0
    text = describe_text(workload, "lengths")
    assert "request rate    all at once" in text
    assert "burstiness      none" in text
    assert "prefix sharing  no prefix information" in text


def test_clients_and_latencies_where_they_are_known():
    """A row for each client, of many the last in one; latencies under the heads of the lengths."""
    workload = of_prompts([None] * 4, [10, 20, 30, 100])
    assert "client" not in describe_text(workload, "lengths")
    workload.client = ["b", "a", "b", "x" * 40]
    ttft = np.array([0.1, np.nan, 0.3, 0.2])
    lines = describe_text(workload, "requests", {"TTFT": ttft, "TPOT": ttft * np.nan}).splitlines()
    (heads,) = [line for line in lines if line.startswith("tokens")]
    (told,) = [line for line in lines if line.startswith("T") and "(ms)" in line]
    values = ["100.0", "200.0", "200.0", "280.0", "290.0", "298.0", "300.0"]
    assert told.split() == ["TTFT", "(ms)", *values, "of", "3", "requests"]
    assert told.index("200.0") + 5 == heads.index("mean") + 4
    assert [line.split() for line in lines[-3:]] == [
        ["b", "2", "50.0%", "20", "2"],
        ["a", "1", "25.0%", "20", "2"],
        ["x" * 23 + "\N{HORIZONTAL ELLIPSIS}", "1", "25.0%", "100", "4"],
    ]
    workload = of_prompts([None] * 40, [10] * 40)
    workload.client = [f"c{k}" for k in range(40)]
    last = describe_text(workload, "requests").splitlines()[-1]
    assert last.split()[:4] == ["30", "others", "30", "75.0%"]


def test_whole_seconds_are_told_and_can_be_parted():
    """Requests that share a second are bursts of the clock, not of the traffic."""
    workload = of_prompts([None] * 4, [10] * 4)
    workload.arrival = np.array([0.0, 0.0, 0.0, 2.0])
    assert "whole seconds: 3 requests share theirs, 3 at most" in describe_text(workload, "x")
    spread_seconds(workload)
    assert workload.arrival.tolist() == [0.0, 1 / 3, 2 / 3, 2.0]
    assert "whole seconds" not in describe_text(workload, "x")
    with pytest.raises(ValueError, match="finer than whole seconds"):
        spread_seconds(workload)


def test_priorities_are_told(put):
    text = "arrival,prompt_tokens,output_tokens,priority\n0,5,3,1\n1,5,3,0\n2,5,3,1\n"
    found = describe_text(read_trace(put(text, "p.csv"), None), "requests")
    assert "priorities      0: 1, 1: 2 (requests of each)" in found


def test_shared_answers_count(put):
    """A prompt that begins with the prompt and the answer before it shares both."""
    text = "arrival,prompt_tokens,output_tokens,chat\n0,160,640,a\n60,960,64,a\n"
    columns = "arrival=arrival,prefix=chat"
    assert shared_prefix_tokens(read_trace(put(text, "p.csv"), columns=columns)) == 800


def test_answers_to_one_prompt_are_no_burst(put):
    """They share a second, and stay together where the others are parted."""
    head = "arrival,prompt_tokens,output_tokens,n\n"
    alone = read_trace(put(head + "0,9,40,4\n3,9,40,1\n4,9,40,1\n", "p.csv"))
    assert "resolution" not in describe_text(alone, "x")
    work = read_trace(put(head + "0,9,40,2\n0,9,40,1\n4,9,40,1\n", "q.csv"))
    assert "2 requests share theirs, 2 at most" in describe_text(work, "x")
    spread_seconds(work)
    assert work.arrival.tolist() == [0, 0, 0.5, 4]


@pytest.mark.parametrize(
    ("name", "cell", "said"),
    [("arrival", "0.5", True), ("arrival_s", "0.5", False), ("arrival", "1772359200", False)],
)
def test_seconds_that_no_name_says_are_told(tmp_path, capsys, name, cell, said):
    path = tmp_path / "log.csv"
    path.write_text(f"{name},input_tokens,output_tokens\n{cell},9,5\n{cell},9,5\n")
    assert main(["trace", "describe", str(path)]) == 0
    row = f"times           taken as seconds; arrival={name}:ms says ms\n"
    assert (row in capsys.readouterr().out) == said
