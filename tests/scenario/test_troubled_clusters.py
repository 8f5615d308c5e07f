"""Scenarios of clusters in trouble: what the summary says of them, and what their keys ask for."""

from pathlib import Path

import numpy as np
import pytest

from headway.cli.main import main
from simulator.scenario.load import load_scenario
from simulator.simulation.result import Result
from simulator.simulation.run import run
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError
from tests.support.scenarios import SMALL, errors


def made(folder: Path, more: str, *overrides: str) -> Result:
    path = folder / "s.yaml"
    path.write_text(SMALL + more)
    return run(load_scenario(path, overrides))


def test_the_summary_counts_what_went_wrong_and_what_it_cost(tmp_path: Path) -> None:
    more = """cluster:
  replicas: 2
  admission: {max_outstanding: 3}
  client: {max_retries: 1, backoff: 0.1}
  failures: {outages: [{replica: 1, start: 0.5}]}
"""
    result = made(tmp_path, more, "engine.max_num_seqs=1")
    summary = result.summary()
    block = summary["headway"]["cluster"]
    assert block["failures"] == 1
    assert block["shed"] == summary["failed"] > 0
    assert summary["completed"] + block["shed"] == 40
    assert block["retries"] == block["refused_tries"] - block["shed"]
    words = result.requests["finish_reason"].astype(str)
    assert (words == "shed").sum() == block["shed"]
    assert set(result.requests["replica"][words == "shed"]) == {-1}


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_retry_finds_what_the_try_before_computed(tmp_path: Path, name: str) -> None:
    """The same prompt comes again, though no other begins as it does."""
    more = "cluster: {replicas: 1, client: {timeout: 1.5, max_retries: 3, backoff: 0.1}}\n"
    engine = f"engine={{name: {name}, max_num_seqs: 12, max_model_len: 512}}"
    result = made(tmp_path, more, engine, "workload.output_len=100")
    assert result.summary()["headway"]["cluster"]["retries"] > 0
    assert result.requests["cached_tokens"].sum() > 0


@pytest.mark.parametrize("tables", [[], ["--no-tables"]])
def test_replicas_that_fail_before_any_answer_ends(
    tmp_path: Path, capsys, monkeypatch, tables: list[str]
) -> None:
    """The run ends with one line that blames the key, and nothing is written."""
    monkeypatch.setattr("simulator.cluster.lifecycle.FUTILE_FAILURES", 500)
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + "cluster: {replicas: 2, failures: {mtbf: 0.01, mttr: 0.001}}\n")
    out = ["--out", str(tmp_path / "out")]
    assert main(["run", str(path), *out, *tables]) == 2
    told = capsys.readouterr().err
    assert "cluster.failures.mtbf: 500 failures in a row lost requests and not one" in told
    assert told.count("\n") == 1
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.medium
def test_a_run_of_endless_simulated_time_is_ended(tmp_path: Path, capsys, monkeypatch) -> None:
    """While it runs, not when it is to be written."""
    monkeypatch.setattr("simulator.engine.drive.LONGEST", 50.0)
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + "cluster: {replicas: 2, failures: {mtbf: 0.01, mttr: 0.001}}\n")
    assert main(["run", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "the run has lasted" in capsys.readouterr().err


def test_what_earlier_tries_take_is_no_queue(tmp_path: Path, capsys) -> None:
    """A replica fails with all that it has; those who come meanwhile are refused at the door."""
    more = """cluster:
  admission: {max_outstanding: 8}
  client: {max_retries: 9, backoff: 0.25, backoff_factor: 1}
  failures: {outages: [{replica: 0, start: 0.5, duration: 0.5}]}
"""
    result = made(tmp_path, more)
    frame, parts = result.requests, result.time_parts()
    assert (frame["finish_reason"] == "stop").all()
    whole = frame["queue_time"] + sum(parts.values())
    assert np.allclose(whole, frame["e2el"], rtol=0, atol=1e-9)
    again = frame["retry_time"] > 0
    early = frame["arrival"] < 0.3  # the prompt and 8 tokens take some 0.1 s: gone before
    assert not again[early].any()
    lost = again & (frame["arrival"] < 0.5)
    assert lost.sum() == result.cluster.counters["tries_lost_in_failures"] > 0
    assert np.allclose((frame["arrival"] + frame["retry_time"])[lost], 0.5)
    refused = again & ~lost  # they come again every 0.25 s
    assert refused.any()
    times = frame["retry_time"][refused] / 0.25
    assert np.allclose(times, np.rint(times))
    summary = result.summary()
    assert summary["mean_retry_time_ms"] == pytest.approx(1e3 * frame["retry_time"].mean())
    finding = next(f for f in summary["headway"]["diagnosis"] if f["rule"] == "tries")
    counts = summary["headway"]["cluster"]
    assert f"{counts['refused_tries']} refused at the door" in finding["text"]
    assert f"{counts['tries_lost_in_failures']} lost with a replica" in finding["text"]
    assert "given up" not in finding["text"]
    write_run(result, tmp_path / "out")
    first = int(frame["id"][lost].iloc[0])
    assert main(["explain", str(tmp_path / "out"), str(first)]) == 0
    told = capsys.readouterr().out
    assert "sent for the first time" in told
    assert "0.500 s  sent to the engine" in told
    assert "tries that were refused, given up or lost with a replica" in told


def test_who_is_turned_away_is_no_backlog_and_the_next_turn_is_due(tmp_path: Path) -> None:
    """Three of four are refused, at once: the requests in the system do not grow."""
    more = "cluster: {admission: {max_outstanding: 1}}"
    load = ["workload.num_prompts=2000", "workload.request_rate=30"]
    summary = made(tmp_path, more, *load).summary()
    assert summary["failed"] > 1000
    assert summary["headway"]["stationary"] is True
    turns = "workload.sessions={turns: 4, think_time: 1}"
    frame = made(tmp_path, more, turns, "workload.request_rate=20").requests
    assert (frame["finish_reason"] == "shed").any()
    assert frame["arrival"].notna().all()
    before = frame[frame["finish_reason"] == "shed"].iloc[0]
    after = frame.iloc[int(before["id"]) + 1]
    assert after["arrival"] == before["arrival"] + 1.0


def test_a_replica_that_is_off_is_not_idle(tmp_path: Path) -> None:
    """One works all the time, and three of which none is ever ordered do not dilute that."""
    more = "cluster: {autoscaling: {target: 1000, max_replicas: 4}}\n"
    own = made(tmp_path, more).summary()["headway"]
    alone = made(tmp_path, "").summary()["headway"]
    assert own["cluster"]["scalings"] == 0
    assert own["gpu_busy_fraction"] == pytest.approx(alone["gpu_busy_fraction"])
    even = {key: own["cluster"][key] for key in ("requests_imbalance", "busy_time_imbalance")}
    assert even == {"requests_imbalance": 1.0, "busy_time_imbalance": 1.0}
    assert own["cluster"]["requests_per_replica_min"] == 40


def test_replica_hours_follow_the_load(tmp_path: Path) -> None:
    more = "cluster: {autoscaling: {interval: 0.1, startup_delay: 0.1, max_replicas: 4}}\n"
    busy = made(tmp_path, more, "engine.max_num_seqs=1").summary()
    block = busy["headway"]["cluster"]
    assert block["scalings"] > 0
    hours = busy["duration"] / 3600
    assert hours < block["replica_hours"] < 4 * hours
    assert block["dollars"] == pytest.approx(3.43 * block["replica_hours"])


def test_a_fleet_that_is_gone_for_good_is_told(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="none comes back"):
        made(tmp_path, "cluster: {failures: {outages: [{replica: 0, start: 0.2}]}}")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("{client: {timeouts: 1}}", "s.yaml:6: cluster.client.timeouts: unknown key; did you mean"),
        ("{client: {timeout: 0}}", "s.yaml:6: cluster.client.timeout: must be more than 0, not 0"),
        (
            "{failures: {outages: [{replica: 2, start: 1}]}}",
            "s.yaml:6: cluster.failures.outages.0.replica: there is no replica 2; the last is 0",
        ),
        (
            "{autoscaling: {metric: kv_usage}}",
            "s.yaml:6: cluster.autoscaling.target: must be less than 1 for kv_usage",
        ),
        (
            "{autoscaling: {min_replicas: 9}}",
            "s.yaml:6: cluster.autoscaling.max_replicas: must be at least min_replicas (9), not 8",
        ),
        (
            "{replicas: 4, autoscaling: {max_replicas: 2}}",
            "s.yaml:6: cluster.replicas: must be at most autoscaling.max_replicas (2)",
        ),
        (
            "{autoscaling: {group: x}, groups: {a: {}, b: {}}}",
            "s.yaml:6: cluster.autoscaling.group: there is a, b",
        ),
        (
            "{admission: {rate: 5, shed_from: 0.5}}",
            "s.yaml:6: cluster.admission.shed_from: needs max_outstanding; shed_from alone has",
        ),
        (
            "{admission: {max_outstanding: 9, burst: 20}}",
            "s.yaml:6: cluster.admission.burst: needs rate; burst alone has no effect",
        ),
        (
            "{client: {timeout: 9, backoff: 0, jitter: 0.5}}",
            "s.yaml:6: cluster.client.backoff: needs max_retries; backoff alone has no effect",
        ),
        (
            "{client: {timeout: 9, backoff: 0, jitter: 0.5}}",
            "s.yaml:6: cluster.client.jitter: needs max_retries; jitter alone has no effect",
        ),
        (
            "{client: {backoff_factor: 3}}",
            "s.yaml:6: cluster.client.backoff_factor: needs max_retries",
        ),
        (
            "{client: {max_retries: 2, backoff: 0}, admission: {}}",
            "s.yaml:6: cluster.client.max_retries: needs timeout, ttft_timeout or admission:",
        ),
        (
            "{failures: {mttr: 60, outages: [{replica: 0, start: 1}]}}",
            "s.yaml:6: cluster.failures.mttr: needs mtbf; mttr alone has no effect",
        ),
    ],
)
def test_what_is_wrong_is_told_by_line_and_key(tmp_path: Path, more: str, message: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + f"cluster: {more}\n")
    told = errors(path)
    assert any(line.startswith(message) for line in told), told


@pytest.mark.parametrize(
    "more",
    [
        "{client: {max_retries: x, timeout: 9, backoff: 0}}",
        "{admission: {max_outstanding: 0, shed_from: 0.5}}",
        "{client: {max_retries: 2}, admission: {rate: x}}",
    ],
)
def test_what_a_wrong_key_should_have_gone_with_is_not_wrong_too(tmp_path: Path, more: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + f"cluster: {more}\n")
    assert len(errors(path)) == 1


@pytest.mark.parametrize(
    "more",
    [
        "{client: {max_retries: 2, backoff: 0, jitter: 1}, admission: {rate: 2, burst: 3}}",
        "{client: {max_retries: 2, ttft_timeout: 9}, failures: {mtbf: 9, mttr: 1}}",
        "{admission: {max_outstanding: 9, shed_from: 0.5, burst: 10.0}}",  # as without it
    ],
)
def test_keys_that_go_together_are_taken(tmp_path: Path, more: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + f"cluster: {more}\n")
    load_scenario(path)


def test_schedulers_take_timeouts(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + "cluster: {client: {timeout: 1}}\n")
    load_scenario(path, ["engine.scheduling_policy=static"])
    load_scenario(path, ["engine.async_scheduling=true"])
