"""The load of a running server, from its metrics."""

import json
import os
import re

import pytest

from headway.cli.main import main
from headway.report.prometheus import metrics_text
from headway.traffic.scrapes import read_metrics
from headway.traffic.server_metrics import infer_load, load_text, scenario_text
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from tests.support.scenarios import SMALL

INFO = (
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",enable_prefix_caching="True",'
    'gpu_memory_utilization="0.9",cpu_offload="None",engine="0"} 1.0\n'
)


def scrape(ended, prompt, output, *, running=0, waiting=0, model="m"):
    """Write a scrape: so many requests, with buckets of their lengths by bound."""
    label = f'model_name="{model}",engine="0"'
    lines = [
        f'vllm:request_success_total{{{label},finished_reason="stop"}} {float(ended)}',
        f'vllm:request_success_total{{{label},finished_reason="abort"}} 0.0',
        f"vllm:num_requests_running{{{label}}} {float(running)}",
        f"vllm:num_requests_waiting{{{label}}} {float(waiting)}",
        f"vllm:e2e_request_latency_seconds_sum{{{label}}} {2.0 * ended}",
        f"vllm:e2e_request_latency_seconds_count{{{label}}} {float(ended)}",
    ]
    for name, (mean, shares) in (("prompt", prompt), ("generation", output)):
        metric = f"vllm:request_{name}_tokens"
        lines += [
            f'{metric}_bucket{{{label},le="{bound}"}} {share * ended}'
            for bound, share in shares.items()
        ]
        lines += [f"{metric}_sum{{{label}}} {mean * ended}", f"{metric}_count{{{label}}} {ended}"]
    return "# HELP vllm:x y\n" + "\n".join(lines) + "\n" + INFO


PROMPT = (150, {"100.0": 0.5, "200.0": 1.0, "+Inf": 1.0})
OUTPUT = (30, {"20.0": 0.25, "50.0": 1.0, "+Inf": 1.0})


def test_two_scrapes(put):
    """What came between them, with those that are still there."""
    first = put(scrape(100, PROMPT, OUTPUT, running=5), "a.txt")
    later = put(scrape(400, PROMPT, OUTPUT, running=25, waiting=10), "b.txt")
    load = infer_load(read_metrics(first, later, 60.0), "b.txt")
    assert load.requests == 330  # 20 more run, 10 more wait
    assert load.rate == pytest.approx((300 + 20 + 10) / 60)
    assert load.engine == {
        "block_size": 16,
        "num_gpu_blocks_override": 1000,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True,
    }
    # From 1 to 100, half of them to 200: a mean of 100.25, scaled to 150.
    scale = 150 / ((1 + 100) / 2 / 2 + (100 + 200) / 2 / 2)
    assert load.lengths["input_len"]["values"] == [
        1.5,
        round(100 * scale, 1),
        round(200 * scale, 1),
    ]
    assert load.lengths["input_len"]["at"] == [0.0, 0.5, 1.0]
    told = {what: value for what, value, _ in load.lines}
    assert told["concurrency"].startswith("10.0 in flight")  # 300 times 2 s in 60 s
    assert told["KV cache"] == "16,000 tokens"
    later.write_text(later.read_text() + INFO.replace('engine="0"', 'engine="1"'))
    load = infer_load(read_metrics(first, later, 60.0), "b.txt")
    assert "\n  data_parallel_size: 2\n" in scenario_text(load, None, ["b.txt"])
    os.utime(first, (1000, 1000))
    os.utime(later, (1100, 1100))
    assert read_metrics(first, later).seconds == 100


STARTED = "process_start_time_seconds {}\n"


def test_two_scrapes_are_of_one_server_and_some_time_apart(put):
    """Else one taken from the other is no load of anybody's."""
    first, later = put(scrape(100, PROMPT, OUTPUT), "a.txt"), put("", "b.txt")
    later.write_text(scrape(400, PROMPT, OUTPUT, model="n"))
    with pytest.raises(HeadwayError) as caught:
        read_metrics(first, later, 60.0)
    assert str(caught.value) == f"{later}: model_name: n, but {first} is of m: two servers"
    for path, start in ((first, 1000), (later, 2000)):
        path.write_text(scrape(start, PROMPT, OUTPUT) + STARTED.format(start))
    with pytest.raises(HeadwayError, match="process_start_time_seconds: another than in"):
        read_metrics(first, later, 60.0)
    later.write_text(scrape(2000, PROMPT, OUTPUT) + STARTED.format(1000))
    assert read_metrics(first, later, 60.0).seconds == 60
    os.utime(first, (1000, 1000))
    os.utime(later, ns=(1000 * 10**9, 1000 * 10**9 + 400_000))
    with pytest.raises(HeadwayError, match=r"is 0.0004 s younger than .*; say --seconds"):
        read_metrics(first, later)


def test_lengths_that_no_histogram_tells(put):
    """The counters' mean, or vLLM's defaults, which both the report and the scenario tell."""
    lines = scrape(100, PROMPT, OUTPUT).splitlines(keepends=True)
    text = "".join(line for line in lines if "_tokens" not in line)
    text += 'vllm:prompt_tokens_total{model_name="m"} 4000.0\n'
    load = infer_load(read_metrics(put(text), seconds=10.0), "a")
    assert load.lengths == {"input_len": 40, "output_len": None}
    assert "output_len            not recorded" in load_text(load)
    assert "nor vllm:generation_tokens_total: 128 tokens are taken" in load_text(load)
    told = scenario_text(load, None, ["a"])
    assert "  output_len: 128  # vLLM's default: the metrics have none\n" in told
    assert "  input_len: 40\n" in told


def test_one_scrape(put):
    """Since the server's start, where it tells; else as told."""
    path = put(scrape(120, PROMPT, OUTPUT) + "process_start_time_seconds 1000.0\n")
    os.utime(path, (1060, 1060))
    assert infer_load(read_metrics(path), "a").rate == pytest.approx(2)
    assert infer_load(read_metrics(path, seconds=30.0), "a").rate == pytest.approx(4)
    path = put(scrape(120, PROMPT, OUTPUT))
    with pytest.raises(HeadwayError, match="does not say since when it counts"):
        read_metrics(path)


def matrix(*series):
    """Write what Prometheus answers: name, labels, values."""
    found = [
        {"metric": {"__name__": name, "job": "vllm", **labels}, "values": values}
        for name, labels, values in series
    ]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": found}})


def test_a_range_query(put):
    """Counters that fall were of a server that was started again; gauges are averaged."""
    ended = ("vllm:request_success_total", {"model_name": "m", "finished_reason": "stop"},
             [[0, "100"], [30, "160"], [60, "10"], [90, "40"]])  # fmt: skip
    running = ("vllm:num_requests_running", {"model_name": "m"}, [[0, "4"], [90, "8"]])
    load = infer_load(read_metrics(put(matrix(ended, running))), "q.json")
    assert load.requests == 60 + 10 + 30 + 4
    assert load.rate == pytest.approx((100 + 4) / 90)
    told = {what: value for what, value, _ in load.lines}
    assert told["num_requests_running"] == "6.0"
    assert told["input_len"] == "not recorded"


@pytest.mark.parametrize(("begun", "base"), [(0, 5000), (60, 9), (300, 0)])
def test_servers_side_by_side_grow_each_for_itself(put, begun, base):
    """One that starts after the other has gone is the same server, which counts from 0 again."""
    servers = [
        (
            name,
            {"engine": "0", "instance": instance},
            [[at + k, f"{first + k}"] for k in (0, 60, 120)],
        )
        for instance, at, first in (("a", 0, 100), ("b", begun, base))
        for name in ("vllm:request_success_total", "vllm:cache_config_info")
    ]
    load = infer_load(read_metrics(put(matrix(*servers))), "q.json")
    assert load.requests == 240
    assert load.engine.get("data_parallel_size", 1) == (1 if begun == 300 else 2)


def test_a_run_is_read_back(write, tmp_path):
    """What `run --prometheus` wrote tells the rate and the lengths that the run had."""
    result = run(load_scenario(write(SMALL)))
    path = tmp_path / "m.om"
    path.write_text(metrics_text(result, interval=0.5, start=1.7e9))
    load = infer_load(read_metrics(path), "m.om")
    summary = result.summary()
    assert load.requests == summary["completed"]
    told = {what: value for what, value, _ in load.lines}
    mean = summary["total_input_tokens"] / summary["completed"]
    assert told["input_len"].startswith(f"mean {mean:,.0f}, ")
    assert told["mean TTFT"] == f"{summary['mean_ttft_ms']:,.1f} ms"


def test_the_command_writes_a_scenario_that_runs(put, tmp_path, monkeypatch, capsys):
    """With what it inferred, and from what."""
    monkeypatch.chdir(tmp_path)
    text = scrape(40, PROMPT, OUTPUT, model="meta-llama/Llama-3.1-8B-Instruct")
    put(text, "a.txt")
    assert main(["trace", "from-metrics", "a.txt", "--seconds", "20", "--out", "s.yaml"]) == 0
    out = capsys.readouterr().out
    assert "request rate" in out
    assert "40 finished, 0 aborted" in out
    scenario = load_scenario(tmp_path / "s.yaml")
    assert scenario.model == "llama-3.1-8b"
    assert scenario.engine.num_gpu_blocks_override == 1000
    workload = make_workload(scenario)
    assert len(workload) == 40
    assert workload.prompt_tokens.mean() == pytest.approx(150, rel=0.25)
    assert main(["trace", "from-metrics", "a.txt", "--seconds", "20"]) == 0
    assert (tmp_path / "s.yaml").read_text().split("\n", 1)[1] in capsys.readouterr().out
    assert main(["trace", "from-metrics", "a.txt", "--seconds", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scenario"] == (tmp_path / "s.yaml").read_text()
    assert (found["requests"], found["span_s"], found["request_rate"]) == (40, 20, 2)
    assert found["engine"]["num_gpu_blocks_override"] == 1000
    assert found["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert found.keys() > {"input_len", "output_len"}


@pytest.mark.parametrize(
    ("texts", "options", "wrong"),
    [
        (["up 1\n"], {}, ":1: vllm: no metric of vLLM or SGLang in it"),
        (["vllm:x soon\n"], {}, ":1: line: no metric of Prometheus: 'vllm:x soon'"),
        ([scrape(9, PROMPT, OUTPUT)], {"seconds": -1}, "--seconds -1: is not more than 0"),
        ([scrape(9, PROMPT, OUTPUT), scrape(5, PROMPT, OUTPUT)], {"seconds": 9}, "started again"),
        ([scrape(5, PROMPT, OUTPUT)] * 2, {"seconds": 9}, "no request was finished"),
        ([scrape(5, PROMPT, OUTPUT) + scrape(5, PROMPT, OUTPUT, model="n")], {"seconds": 9},
         "has several models, say --model-name: m, n"),
        ([scrape(5, PROMPT, OUTPUT)], {"seconds": 9, "model": "q"}, "--model-name q: not in it"),
        (['{"data": {"resultType": "vector"}}'], {}, "data.resultType: is not matrix"),
        (['{"data"'], {}, ":1: line: bad JSON"),
        ([matrix(("vllm:x", {}, [[0, "a"]]))], {}, "data.result[0]: no metric with values"),
        ([matrix(("vllm:x", {}, [[0, "1"]]))], {}, "values of one moment alone"),
        ([matrix(("vllm:x", {}, [[0, "1"]]))], {"seconds": 5}, "has times of its own"),
    ],
)  # fmt: skip
def test_bad_metrics(put, texts, options, wrong):
    paths = [put(text, f"{k}.txt") for k, text in enumerate(texts)]
    with pytest.raises(HeadwayError) as caught:
        infer_load(read_metrics(*paths, **options), str(paths[-1]))
    assert wrong in str(caught.value)


SGLANG = """\
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
sglang:prompt_tokens_total{{{label}}} {prompt}
sglang:generation_tokens_total{{{label}}} {output}
sglang:cached_tokens_total{{cache_source="device",{label}}} {cached}
sglang:num_requests_total{{{label}}} {ended}
sglang:num_aborted_requests_total{{{label}}} {aborted}
sglang:e2e_request_latency_seconds_sum{{{label}}} {busy}
sglang:e2e_request_latency_seconds_count{{{label}}} {ended}
sglang:time_per_output_token_seconds_sum{{{label}}} {busy}
sglang:time_per_output_token_seconds_count{{{label}}} {output}
sglang:num_running_reqs{{{label}}} {running}
sglang:token_usage{{{label}}} 0.25
sglang:max_total_num_tokens{{{label}}} 424242.0
"""
LABEL = 'engine_type="unified",model_name="meta-llama/Llama-3.1-8B-Instruct",tp_rank="0"'


def sglang(ended, running=0):
    counts = {"prompt": 700.0, "output": 200.0, "cached": 70.0, "busy": 3.0, "aborted": 0.01}
    told = {name: value * ended for name, value in counts.items()}
    return SGLANG.format(label=LABEL, ended=float(ended), running=running, **told)


def test_scrapes_of_sglang(put, tmp_path):
    """Its metrics have other names; its pool is the engine's; the scenario is one of SGLang's."""
    paths = put(sglang(1000, 5), "a.txt"), put(sglang(1600, 17), "b.txt")
    load = infer_load(read_metrics(*paths, 60.0), "b.txt")
    assert load.rate == pytest.approx((600 + 6 + 12) / 60)
    assert load.lengths == {"input_len": 693, "output_len": 198}  # 1 % of them aborted
    assert load.engine == {"name": "sglang", "num_gpu_blocks_override": 424242}
    said = load_text(load)
    assert "vllm" not in said.lower()
    for line in (
        r"600 finished, 6 aborted, \+12 in flight",
        r"KV cache +424,242 tokens +sglang:max_total_num_tokens",
        r"mean ITL +15.0 ms +sglang:time_per_output_token_seconds",
        r"prefix cache +10.0% of tokens found",
        r"num_requests_running +11.0",
        r"input_len .*sglang:prompt_tokens_total by request that ended: no sglang:prompt_tok",
    ):
        assert re.search(line, said), (line, said)
    path = tmp_path / "s.yaml"
    path.write_text(scenario_text(load, "llama-3.1-8b", ["a.txt", "b.txt"]))
    assert load_scenario(path).engine.name == "sglang"


def test_sglang_before_it_counted_requests(put):
    """Then those with a latency are the finished ones."""
    lines = sglang(100).splitlines(keepends=True)
    path = put("".join(line for line in lines if "requests_total" not in line))
    assert infer_load(read_metrics(path, None, 10.0), "a.txt").requests == 100
    with pytest.raises(HeadwayError, match="sglang:num_requests_total: no request was finished"):
        infer_load(read_metrics(put(sglang(0)), None, 10.0), "a.txt")


def test_bytes_that_are_no_text_cost_no_figure(tmp_path):
    """A label of another encoding, or with a separator of lines that is none of Prometheus'."""
    text = scrape(40, PROMPT, OUTPUT).encode()
    odd = b'other{name="\xff\xfe \xe2\x80\xa8 \xc2\x85"} 1\n'
    (tmp_path / "a.txt").write_bytes(odd + text)
    load = infer_load(read_metrics(tmp_path / "a.txt", seconds=20), "a.txt")
    assert (load.requests, load.seconds) == (40, 20)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_a_pipe_is_no_scrape(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(HeadwayError, match="is a pipe or a device, not a file"):
        read_metrics(tmp_path / "pipe", seconds=20)


def test_what_the_metrics_have_and_the_scenario_does_not(put):
    """Aborted requests, several answers, drafts, adapters: each is named."""
    more = (
        'vllm:num_preemptions_total{engine="0"} 5\n'
        'vllm:request_params_n_sum{engine="0"} 30\nvllm:request_params_n_count{engine="0"} 10\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 100\n'
        'vllm:lora_requests_info{running_lora_adapters="a,b",waiting_lora_adapters=""} 1.7e9\n'
    )
    text = scrape(10, PROMPT, OUTPUT).replace('"abort"} 0.0', '"abort"} 2.0')
    load = infer_load(read_metrics(put(text + more), None, 60.0), "a.txt")
    found = {what: value for what, value, _ in load.lines}
    assert found["aborted"] == "2 requests"
    assert found["preemptions"] == "5"
    assert found["answers (n)"] == "3.00 by request"
    assert found["accepted drafts"] == "100"
    assert found["adapters"] == "a, b"
    plain = infer_load(read_metrics(put(scrape(10, PROMPT, OUTPUT)), None, 60.0), "a.txt")
    names = {"aborted", "preemptions", "answers (n)", "adapters"}
    assert names.isdisjoint(what for what, _, _ in plain.lines)


def test_a_mean_is_of_all_that_ended(put):
    """Tokens of aborted requests are in the counters, and these requests in the rate."""
    lines = scrape(100, PROMPT, OUTPUT).splitlines(keepends=True)
    text = "".join(line for line in lines if "_tokens" not in line)
    text += 'vllm:request_success_total{model_name="m",finished_reason="abort"} 100.0\n'
    text += 'vllm:prompt_tokens_total{model_name="m"} 80000.0\n'
    load = infer_load(read_metrics(put(text), seconds=100.0), "a")
    assert load.lengths["input_len"] * load.rate == pytest.approx(800)
