"""What load generators write, as traces and as measured runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from calibration.measured.requests import read_requests
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.traces import read_trace
from simulator.workload.traces.detect import detect_format

SAMPLES = Path(__file__).parent / "samples"
BENCH = {
    "date": "20261101-120000",
    "completed": 2,
    "input_lens": [7, 9, 4],
    "output_lens": [3, 0, 1],
    "ttfts": [0.5, 0.0, 0.25],
    "itls": [[0.1, 0.15], [], []],
    "start_times": [100.0, 101.0, 102.5],
    "errors": ["", "timeout", ""],
}


def test_guidellm():
    """Its own moments and lengths; times of the first request as guidellm says them."""
    path = SAMPLES / "guidellm.json"
    raw = json.loads(path.read_text())["benchmarks"][0]["requests"]["successful"]
    assert detect_format(path) == "guidellm"
    found, trace = read_requests(path), read_trace(path)
    starts = np.array([one["request_start_time"] for one in raw])
    assert trace.arrival == pytest.approx(starts - starts[0], abs=1e-6)
    assert found.prompt.tolist() == [one["prompt_tokens"] for one in raw] == [16, 15, 14]
    assert found.output.tolist() == [one["output_tokens"] for one in raw]
    assert found.ttft * 1e3 == pytest.approx([one["time_to_first_token_ms"] for one in raw])
    assert found.e2el == pytest.approx([one["request_latency"] for one in raw])


def test_guidellm_requests_that_were_cancelled(put):
    """They are counted; all benchmarks of a sweep follow each other."""
    one = {"request_start_time": 5.0, "prompt_tokens": 3, "output_tokens": 2}
    groups = {"successful": [one], "errored": [], "incomplete": [one | {"output_tokens": 1}]}
    later = {"successful": [one | {"request_start_time": 9.0}]}
    path = put(json.dumps({"benchmarks": [{"requests": groups}, {"requests": later}]}))
    with (
        pytest.warns(HeadwayWarning, match="1 request left out"),
        pytest.warns(HeadwayWarning, match="benchmarks: 2 loads follow one another"),
    ):
        assert read_trace(path).arrival.tolist() == [0.0, 4.0]
    bad = {"benchmarks": [{"requests": {"successful": [one, one | {"prompt_tokens": "x"}]}}]}
    with pytest.raises(HeadwayError, match=":11: prompt_tokens: 'x' is not a whole number"):
        read_trace(put(json.dumps(bad, indent=1)))
    whole = json.dumps({"benchmarks": [{"requests": later}]})
    for text in (f"{whole}\n{whole}", '{"benchmarks": [3]}'):
        with pytest.raises(HeadwayError, match=":1: benchmarks: missing, or not a list of one"):
            read_trace(put(text), format="guidellm")


def test_aiperf():
    """Moments in ns since 1970, metrics in ms."""
    path = SAMPLES / "aiperf.jsonl"
    raw = [json.loads(line) for line in path.read_text().splitlines()]
    assert detect_format(path) == "aiperf"
    found = read_requests(path)
    starts = [one["metadata"]["request_start_ns"] for one in raw]
    assert found.arrival == pytest.approx([(s - starts[0]) / 1e9 for s in starts], abs=1e-6)
    assert (found.prompt.tolist(), found.output.tolist()) == ([30] * 3, [18] * 3)
    metrics = [one["metrics"] for one in raw]
    assert found.ttft * 1e3 == pytest.approx([m["time_to_first_token"]["value"] for m in metrics])
    assert found.e2el * 1e3 == pytest.approx([m["request_latency"]["value"] for m in metrics])


def test_aiperf_without_its_warm_up(put):
    line = json.loads((SAMPLES / "aiperf.jsonl").read_text().splitlines()[0])
    warm = line | {"metadata": line["metadata"] | {"benchmark_phase": "warmup"}}
    lost = {"metadata": line["metadata"], "metrics": {}, "error": {"code": 500}}
    with pytest.warns(HeadwayWarning, match="1 request left out"):
        found = read_trace(put("\n".join(map(json.dumps, (warm, line, lost)))))
    assert len(found) == 1


def test_inference_perf():
    """The moments of a clock of its own; the first and last token's, not the connection's end."""
    path = SAMPLES / "inference_perf.json"
    raw = json.loads(path.read_text())
    assert detect_format(path) == "inference_perf"
    found = read_requests(path)
    info = [one["info"] for one in raw]
    assert found.prompt.tolist() == [one["input_tokens"] for one in info]
    replies = [one["response_metrics"] for one in info]
    assert found.output.tolist() == [one["output_tokens"] for one in replies]
    starts = np.array([one["start_time"] for one in raw])
    assert found.arrival == pytest.approx(starts - starts[0])
    firsts, lasts = (np.array([one["output_token_times"][k] for one in replies]) for k in (0, -1))
    assert found.ttft == pytest.approx(firsts - starts)
    assert found.e2el == pytest.approx(lasts - starts)


def test_what_vllm_bench_wrote():
    """vLLM 0.33.0's, against a server that answers with fixed words."""
    path = SAMPLES / "vllm_bench.json"
    raw = json.loads(path.read_text())
    assert detect_format(path) == "vllm_bench"
    found, trace = read_requests(path), read_trace(path)
    starts = np.array(raw["start_times"])
    order = np.argsort(starts)
    assert trace.arrival == pytest.approx(np.sort(starts - starts.min()))
    assert found.prompt.tolist() == raw["input_lens"]
    assert found.output.tolist() == raw["output_lens"]
    assert np.sort(found.ttft) == pytest.approx(np.sort(raw["ttfts"]))
    assert found.e2el.mean() * 1e3 == pytest.approx(
        np.mean([t + sum(i) for t, i in zip(raw["ttfts"], raw["itls"], strict=True)]) * 1e3
    )
    assert len(order) == raw["completed"]


def test_vllm_bench(put):
    """Lists for columns; the gaps between tokens add up to the last one's time."""
    path = put(json.dumps(BENCH), "bench.json")
    assert detect_format(path) == "vllm_bench"
    with pytest.warns(HeadwayWarning, match="1 request left out"):
        trace = read_trace(path)
    assert trace.arrival.tolist() == [0.0, 2.5]
    with pytest.warns(HeadwayWarning, match="1 request left out"):
        found = read_requests(path)
    assert found.e2el == pytest.approx([0.75, 0.25])
    assert found.tpot == pytest.approx([0.125, np.nan], nan_ok=True)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (
            {"start_times": None},
            ":1: start_times: missing: its benchmark (no request_rate) did not write when",
        ),
        ({"input_lens": None}, ":1: input_lens: missing: lists of requests come with --save-det"),
        ({"ttfts": [1]}, ":1: ttfts: 1 values for 3 requests"),
        ({"input_lens": [7, 9, -4]}, ":1: request 2: input_lens: -4 is negative"),
        ({"itls": [["x"], [], []]}, ":1: request 0: itls: not a list of numbers"),
        ({"start_times": [1, 2, "soon"]}, ":1: request 2: start_times: 'soon' is not a number"),
    ],
)
def test_bad_results_of_vllm_bench(put, change, wrong):
    with pytest.raises(HeadwayError) as caught:
        read_trace(put(json.dumps(BENCH | change)))
    assert wrong in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"date": "20261102-100000", "completed": 9, "total_input_tokens": 31690, '
            '"total_output_tokens": 900, "request_throughput": 1.5}',
            "lists of requests come with --save-detailed",
        ),
        ('{"input_lens": [1], "output_lens": [1]}\n{"input_lens": [1]}', "say --result 1"),
        (
            '[{"input_lens": [1], "output_lens": [1], "request_rate": 2}, {"input_lens": [1], '
            '"output_lens": [1], "request_rate": 4, "max_concurrency": 8}]',
            "which of 2. 1: request_rate 2, 2: request_rate 4, max_concurrency 8",
        ),
    ],
)
def test_a_result_of_vllm_bench_without_its_requests(put, text, said):
    """Its totals are no request; results after one another are several benchmarks."""
    with pytest.raises(HeadwayError, match=said):
        read_trace(put(text, "bench.json"), None)


def test_trtllm_bench(put):
    """Nanoseconds of a clock of its own; without streaming there is no first token."""
    start = 1_234_567_890_000_000
    rows = [
        {
            "id": k,
            "num_input_tokens": 100,
            "tokens": [1, 2, 3],
            "error_tokens": k // 3,
            "start_timestamp": start + k * 500_000_000,
            "first_token_timestamp": -1 if k == 2 else start + k * 500_000_000 + 100_000_000,
            "end_timestamp": start + k * 500_000_000 + 400_000_000,
            "num_output_tokens": 3,
        }
        for k in range(4)
    ]
    for text in (json.dumps(rows), json.dumps({"requests": rows}, indent=1)):
        path = put(text, "requests.json")
        assert detect_format(path) == "trtllm_bench"
        with pytest.warns(HeadwayWarning, match="1 request left out"):
            found = read_requests(path)
        assert found.arrival == pytest.approx([0, 0.5, 1])
        assert found.ttft == pytest.approx([0.1, 0.1, np.nan], nan_ok=True)
        assert found.e2el == pytest.approx([0.4] * 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("INFO 07-01 12:00:00 [logger.py:43] Received request a: prompt: 'x', params: "
         "SamplingParams(n=1)", ":1: prompt_token_ids: a: not logged"),
        ("Metric,avg,min,max\nRequest Latency (ms),300,290,310", "is a summary of GenAI-Perf"),
        ('{"service_kind": "openai", "experiments": [{"requests": []}]}', "counts no tokens"),
        ('{"engine": {},\n "world_info": {},\n "performance": {}}', "report of trtllm-bench"),
    ],
)  # fmt: skip
def test_files_without_lengths_are_named(put, text, said):
    with pytest.raises(HeadwayError) as caught:
        read_trace(put(text))
    assert said in str(caught.value)


def test_times_without_a_unit_that_are_hardly_seconds(put):
    path = put("t,n,m\n" + "".join(f"{500 * k},100,5\n" for k in range(9)))
    with pytest.warns(HeadwayWarning, match="one request in .* s, if its times are seconds"):
        read_trace(path, columns="arrival=t,prompt=n,output=m")
    assert read_trace(path, columns="arrival=t:ms,prompt=n,output=m").arrival[-1] == 4


def test_agentperfbench(put):
    """Sent when the client's semaphore let it; the turns of a session share their beginnings."""
    row = {
        "success": True,
        "ttft_ms": 100.0,
        "tpot_ms": 20.0,
        "itl_ms": [20.0] * 4,
        "e2el_ms": 180.0,
        "input_tokens": 100,
        "output_tokens": 5,
        "error": None,
        "max_tokens_requested": 64,
        "dispatch_started_at_ms": 0.0,
        "client_queue_wait_ms": 0.0,
        "cached_context_tokens": 96,
    }
    later = {"turn_index": 1, "semaphore_acquired_at_ms": 400.0, "input_tokens": 150}
    rows = [
        row | {"session_id": 3, "turn_index": 0, "semaphore_acquired_at_ms": 0.0},
        row | {"session_id": 4, "turn_index": 0, "semaphore_acquired_at_ms": 200.0},
        row | {"session_id": 3} | later,
        row | {"session_id": 4, "success": False, "error": "timeout", "output_tokens": 0} | later,
    ]
    path = put(json.dumps({"config": {}, "summary": {}, "per_request": rows}, indent=1))
    assert detect_format(path) == "agentperfbench"
    with pytest.warns(HeadwayWarning) as caught:
        trace = read_trace(path)
    assert [str(one.message).rpartition(": ")[2] for one in caught] == [
        "failed or cancelled when recorded, or without output tokens",
        "1",  # later turn, at its recorded time
    ]
    assert trace.arrival == pytest.approx([0, 0.2, 0.4])
    assert trace.max_tokens.tolist() == [64] * 3
    assert trace.segments[2][:2] == ((("in", 0, 0), 100), (("out", 0), 5))
    with pytest.warns(HeadwayWarning, match="1 request left out"):
        found = read_requests(path)
    assert found.ttft == pytest.approx([0.1] * 3)
    assert found.e2el == pytest.approx([0.18] * 3)
