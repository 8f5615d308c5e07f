"""Timelines for Perfetto and metrics for Prometheus: structure, and schedules by hand."""

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

from headway.cli.main import main
from headway.report import timeline
from headway.report.prometheus import DASHBOARD, metrics_text
from headway.report.timeline import write_timeline
from simulator.core.log import Log
from simulator.costs.linear import LinearCost
from simulator.results.record import Record
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from tests.support.engines import fcfs, play, workload
from tests.support.logs import LoggedRun, logged_runs
from tests.support.scenarios import SMALL


def record_of(load, sent: np.ndarray, logs: list[Log]) -> Record:
    """As much of a record as the two files need."""
    spec = SimpleNamespace(
        model=SimpleNamespace(name='a "b"'), max_model_len=40, cost=None, role=None
    )
    return Record(SimpleNamespace(name="tiny", seed=0), load, sent, logs, {"": spec})


def played(scheduler, *requests: tuple[float, int, int], **cost: float) -> Record:
    load = workload(*requests)
    log, client = play(load, scheduler, LinearCost(base=1.0, **cost))
    return record_of(load, np.array(client.sent), [log])


def read(path: Path) -> dict:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def traced(result, folder: Path) -> list[dict]:
    write_timeline(result, folder / "trace.json")
    return read(folder / "trace.json")["traceEvents"]


def spans(events: list[dict], number: int) -> list[tuple[str, float, float]]:
    """Return name, start and end (s) of what a request did, outermost first."""
    stack, done = [], []
    for event in events:
        if event.get("id") != number:
            continue
        if event["ph"] == "b":
            stack.append((event["name"], event["ts"] / 1e6))
        else:
            name, start = stack.pop()
            assert event["name"] == name
            done.append((name, start, event["ts"] / 1e6))
    return sorted(done, key=lambda span: (span[1], -span[2]))


def check(events: list[dict]) -> None:
    """See that the trace is well formed: in order, every begin with its end, nested by track."""
    timed = [event for event in events if event["ph"] != "M"]
    assert events[: len(events) - len(timed)] == [e for e in events if e["ph"] == "M"]
    times = [event["ts"] for event in timed]
    assert times == sorted(times)
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    open_: dict[tuple, list[str]] = {}
    ends: dict[int, float] = {}
    for event in timed:
        assert event["pid"] in named
        track = (event["pid"], event.get("cat"), event.get("id"))
        if event["ph"] == "b":
            open_.setdefault(track, []).append(event["name"])
        elif event["ph"] == "e":
            assert open_[track].pop() == event["name"]
        elif event["ph"] == "X":
            assert event["ts"] >= ends.get(event["pid"], 0.0)
            assert event["dur"] >= 0
            ends[event["pid"]] = event["ts"] + event["dur"] - 2e-3  # rounding to nanoseconds
        elif event["ph"] == "C":
            assert all(value >= 0 for value in event["args"].values())
        else:
            assert event["ph"] == "i"
    assert not any(open_.values())


def test_a_preemption_by_hand(tmp_path: Path) -> None:
    """Blocks of 4, 5 of them, 1 s a step: request 1 leaves at 2 s and is back at 4 s."""
    events = traced(played(fcfs(6, 4), (0, 7, 4), (0, 7, 4)), tmp_path)
    check(events)
    assert spans(events, 0) == [("request 0", 0, 4), ("prefill", 0, 1), ("decode", 1, 4)]
    assert spans(events, 1) == [
        ("request 1", 0, 6),
        ("prefill", 0, 1),
        ("decode", 1, 2),
        ("preempted", 2, 4),
        ("recompute", 4, 5),
        ("decode", 5, 6),
    ]
    slices = [e for e in events if e["ph"] == "X"]
    told = [(e["ts"], e["dur"], e["name"], *list(e["args"].values())[:3]) for e in slices]
    assert told == [
        (0, 1e6, "prefill", 1, 14, 0),
        (1e6, 1e6, "decode", 1, 0, 2),
        (2e6, 1e6, "decode", 1, 0, 1),
        (3e6, 1e6, "decode", 1, 0, 1),
        (4e6, 1e6, "prefill", 1, 9, 0),
        (5e6, 1e6, "decode", 1, 0, 1),
    ]
    assert [e["args"]["preempted"] for e in slices] == [0, 0, 1, 0, 0, 0]
    assert slices[2]["args"]["kv_blocks_used"] == 3
    counted = [e for e in events if e["ph"] == "C" and e["name"] == "KV cache usage"]
    assert [(e["ts"], e["args"]["percent"]) for e in counted[:3]] == [(0, 80), (1e6, 80), (2e6, 60)]
    assert counted[-1]["args"] == {"percent": 0}


def test_a_swap_and_a_queue_by_hand(tmp_path: Path) -> None:
    """A swapped request goes on at once; a second one waits while the only seat is taken."""
    events = traced(played(fcfs(6, 4, swap_blocks=10), (0, 7, 4), (0, 7, 4)), tmp_path)
    names = [name for name, *_ in spans(events, 1)]
    assert names == ["request 1", "prefill", "decode", "swapped", "decode"]
    events = traced(played(fcfs(max_num_seqs=1), (0, 4, 3), (1.5, 4, 1)), tmp_path)
    assert spans(events, 1) == [("request 1", 1.5, 4), ("queued", 1.5, 3), ("prefill", 3, 4)]
    waits = [(e["ts"] / 1e6, e["args"]["requests"]) for e in events if e["name"] == "waiting"]
    assert waits == [(0, 0), (1, 0), (1.5, 1), (3, 0), (4, 0)]
    runs = [(e["ts"] / 1e6, e["args"]["requests"]) for e in events if e["name"] == "running"]
    assert runs == [(0, 1), (1, 1), (1.5, 1), (3, 1), (4, 0)]


@settings(max_examples=30, deadline=None)
@given(logged_runs(max_replicas=2))
def test_any_trace_is_well_formed(tmp_path_factory, story: LoggedRun) -> None:
    """Whatever the log says, of requests that were preempted, rejected or never finished."""
    result = record_of(story.workload, story.sent, story.logs)
    check(traced(result, tmp_path_factory.mktemp("trace")))


def test_large_runs_are_thinned(tmp_path: Path, monkeypatch, write) -> None:
    """Every k-th request, several rows in a slice; tokens are not lost, and it says so."""
    result = run(load_scenario(write(SMALL)))
    whole = traced(result, tmp_path)
    monkeypatch.setattr(timeline, "MAX_REQUESTS", 10)
    monkeypatch.setattr(timeline, "MAX_SLICES", 20)
    rows = len(result.logs[0].steps)
    said = write_timeline(result, tmp_path / "small.json.gz")
    merged = -(-rows // 20)
    assert said == f"every 4th of 40 requests, {merged} successive rows of steps.csv in one slice"
    trace = read(tmp_path / "small.json.gz")
    assert trace["metadata"]["shown"] == said
    events = trace["traceEvents"]
    check(events)
    assert sorted({e["id"] for e in events if "id" in e}) == list(range(0, 40, 4))
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) <= 20
    assert max(sum(e["name"] == name for e in events) for name in ("running", "waiting")) <= 21
    for key in ("steps", "prefill_tokens", "decode_tokens"):
        one, other = (
            sum(e["args"][key] for e in some if e["ph"] == "X") for some in (whole, events)
        )
        assert one == other > 0


def test_metrics_by_hand() -> None:
    """A step takes 1 s and 1/8 s per token: TTFT 1.5 and 2.625 s, gaps 2.125, 1.25, 1.125, 1.25."""
    result = played(fcfs(), (0, 4, 4), (1, 8, 2), per_token=1 / 8)
    found = samples(metrics_text(result, interval=2.0, start=100.0))
    assert {dict(labels)["model_name"] for _, labels in found} == {r"a \"b\""}
    assert {tuple(times) for times in found.values()} == {(100.0, 102.0, 104.0, 106.0)}

    def values(family: str, suffix: str = "", **labels: str) -> list[float]:
        wanted = {"model_name": r"a \"b\"", "engine": "0"} | labels
        return list(found[family + suffix, tuple(sorted(wanted.items()))].values())

    def value(family: str, suffix: str = "", **labels: str) -> float:
        return values(family, suffix, **labels)[-1]

    ttft = "vllm:time_to_first_token_seconds"
    assert value(ttft, "_count") == 2
    assert value(ttft, "_sum") == 1.5 + 2.625
    assert [value(ttft, "_bucket", le=le) for le in ("1.0", "2.5", "5.0", "+Inf")] == [0, 1, 2, 2]
    itl = "vllm:inter_token_latency_seconds"
    assert value(itl, "_count") == 4
    assert value(itl, "_sum") == 2.125 + 1.25 + 1.25 + 1.125
    tpot = "vllm:request_time_per_output_token_seconds"
    assert value(tpot, "_sum") == 4.5 / 3 + 1.25
    assert value("vllm:e2e_request_latency_seconds", "_sum") == 6.0 + 3.875
    assert value("vllm:request_queue_time_seconds", "_sum") == 0.5
    assert value("vllm:prompt_tokens", "_total") == 12
    assert value("vllm:generation_tokens", "_total") == 6
    assert value("vllm:request_success", "_total", finished_reason="stop") == 2
    assert value("vllm:num_preemptions", "_total") == 0
    assert value("vllm:num_requests_running") == value("vllm:kv_cache_usage_perc") == 0
    steps = "vllm:iteration_tokens_total"
    assert value(steps, "_sum") == 12 + 4  # the prefills bring out 2 of the 6 tokens
    lengths = [dict(k) for name, k in found if name == "vllm:request_prompt_tokens_bucket"]
    assert [one["le"] for one in lengths] == ["1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"]
    # Steps end at 1.5, 3.625, 4.875 and 6 s; the second comes at 1 s, and ends at 4.875 s.
    assert values("vllm:num_requests_running") == [1, 2, 2, 0]
    assert values(ttft, "_count") == [0, 1, 2, 2]
    assert values("vllm:generation_tokens", "_total") == [0, 1, 3, 6]
    assert values("vllm:request_success", "_total", finished_reason="stop") == [0, 0, 0, 2]
    found = samples(metrics_text(result, interval=1.25))
    assert values("vllm:num_requests_waiting") == [0, 1, 0, 0, 0, 0]


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], dict[float, float]]:
    """Read OpenMetrics: of each name and labels the values by time, which ascends."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], dict[float, float]] = {}
    assert text.endswith("\n# EOF\n")
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, labels, value, time = re.fullmatch(r"(\S+?)\{(.*)\} (\S+) (\S+)", line).groups()
        pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)
        series = found.setdefault((name, tuple(sorted(pairs))), {})
        assert not series or float(time) > max(series)
        series[float(time)] = float(value)
    return found


@pytest.mark.parametrize("more", [[], ["engine.num_gpu_blocks_override=40"]])
def test_metrics_over_time(write, more: list[str]) -> None:
    """Counters ascend to the summary's figures; gauges stay within their bounds."""
    result = run(load_scenario(write(SMALL), more))
    found = samples(metrics_text(result, interval=0.25))
    summary = result.summary()
    last = {}
    for (name, labels), series in found.items():
        values = list(series.values())
        if not name.startswith(("vllm:num_requests", "vllm:kv_cache")):
            assert values == sorted(values), name
        last[name] = last.get(name, 0.0) + values[-1] * (dict(labels).get("le") is None)
    assert last["vllm:request_success_total"] == summary["completed"]
    assert last["vllm:generation_tokens_total"] == summary["total_output_tokens"]
    assert last["vllm:prompt_tokens_total"] == summary["total_input_tokens"]
    mean = last["vllm:time_to_first_token_seconds_sum"] / summary["completed"]
    assert mean * 1e3 == pytest.approx(summary["mean_ttft_ms"])
    for name, most in (("kv_cache_usage_perc", 1.0), ("num_requests_running", 256)):
        (series,) = [v for (n, _), v in found.items() if n == f"vllm:{name}"]
        assert 0 < max(series.values()) <= most
        assert list(series.values())[-1] == 0
    with pytest.raises(HeadwayError, match="--prometheus-interval 1e-09: makes"):
        metrics_text(result, interval=1e-9)


def test_promtool_takes_it_for_backfill(write, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    result = run(load_scenario(write(SMALL)))
    (tmp_path / "m.om").write_text(metrics_text(result, interval=1.0, start=1.7e9))
    made = subprocess.run(
        [promtool, "tsdb", "create-blocks-from", "openmetrics", "m.om", "data"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert str(len(samples((tmp_path / "m.om").read_text()))) in made.stdout


def test_every_query_of_the_dashboard_names_a_metric(write) -> None:
    """And labels that it has."""
    found = samples(metrics_text(run(load_scenario(write(SMALL)))))
    names = {name for name, _ in found}
    labels = {key for _, pairs in found for key, _ in pairs}
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [
        one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"
    ]
    assert len(queries) > 30
    for query in queries:
        asked = re.findall(r"vllm:\w+", query)
        assert asked
        assert set(asked) <= names, query
        inner = "".join(re.findall(r"\{(.*?)\}", query))
        by = re.findall(r"by \((\w+)\)", query)
        assert {*re.findall(r"(\w+)=~?", inner), *by} <= labels, query


def test_the_command_writes_both(tmp_path: Path, monkeypatch, capsys) -> None:
    """The same seed gives the same bytes; what cannot be written is told before the run."""
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SMALL)
    for name in ("a", "b"):
        Path(name).mkdir()
        options = ["--timeline", f"{name}/t.json.gz", "--prometheus", f"{name}/m.prom"]
        assert main(["run", "s.yaml", *options]) == 0
        told = capsys.readouterr().out
        assert f"written to {name}/t.json.gz: all requests and steps; open it" in told
    for file in ("t.json.gz", "m.prom"):
        assert Path("a", file).read_bytes() == Path("b", file).read_bytes()
    check(read(Path("a/t.json.gz"))["traceEvents"])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--timeline", "."], "--timeline .: is a folder"),
        (["--prometheus-start", "2026-01-01"], "--prometheus-start: needs --prometheus"),
        (["--prometheus", "m", "--prometheus-start", "soon"], "--prometheus-start soon: must be"),
        (["--prometheus", "m", "--prometheus-interval", "0"], "--prometheus-interval 0: must be"),
        (["--prometheus", "s.yaml/m"], "--prometheus s.yaml/m: {}/s.yaml is not a folder"),
        (["--timeline", "x", "--prometheus", "x"], "--prometheus x: --timeline names the same"),
    ],
)
def test_bad_files(tmp_path: Path, monkeypatch, capsys, options, error: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SMALL)
    assert main(["run", "s.yaml", *options]) == 2
    assert error.format(tmp_path) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]
