"""Measured runs of which some clients gave up: their requests load the engine while they waited."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from calibration.measured.predict import assemble_run, validate_measured
from calibration.measured.requests import read_requests
from calibration.server_logs.request_log import read_log, terms_of
from headway.cli.main import main
from simulator.build.assemble_scheduler import make_scheduler
from simulator.core.alarm import FastEnvironment
from simulator.engine.replica import make_replica
from simulator.results.request_table import RequestTable, gather_requests
from simulator.scenario.load import load_scenario
from simulator.simulation.run import play
from simulator.util.errors import HeadwayWarning
from simulator.workload.workload import FRONTENDS, Workload
from tests.support.measured_runs import run_of

PATIENCE = 1.0  # s
ROW = {"run_id": "a", "gpu": "H100", "model": "llama-3-8b", "tp": "1", "engine_version": "0.11"}
ROW |= {"max_num_batched_tokens": "2048"}
FILED = ROW | {"per_request_file": "requests.csv"}
UNTOLD = {"prompt_tokens": 0, "max_tokens": "", "e2e_s": ""}


def overload(every: int = 1) -> RequestTable:
    """Return what became of 60 long prompts in 3 s; every such client waits for 1 s alone."""
    scenario, spec = assemble_run(run_of(**ROW))
    size = 60
    lengths = np.full(size, 3000), np.full(size, 5)
    load = Workload(0.05 * np.arange(size), *lengths, frontend=FRONTENDS["server"])
    load.cancel_after = np.where(np.arange(size) % every, np.nan, PATIENCE)
    replica = make_replica(FastEnvironment(), make_scheduler(spec, False), spec.cost)
    result = play(scenario, spec, load, replica)
    return gather_requests(load, result.sent, result.logs)


def recorded(table: RequestTable, untold: dict[str, object]) -> list[dict[str, object]]:
    """Return the rows that a load generator writes of it."""
    rows = []
    for k, done in enumerate(table.completed.tolist()):
        row: dict[str, object] = {"arrival_s": table.sent[k], "prompt_tokens": 3000}
        row |= {"output_tokens": 5, "ttft_s": table.ttft[k], "e2e_s": table.e2el[k]}
        row |= {"max_tokens": 5, "error": ""}
        if not done:
            row |= {"output_tokens": 0, "ttft_s": "", "e2e_s": PATIENCE, "error": "TimeoutError"}
            row |= untold
        rows.append(row)
    return rows


def write(folder: Path, rows: list[dict[str, object]], row: dict[str, str]) -> None:
    (folder / "runs.csv").write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    with (folder / "requests.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize(
    ("untold", "more"), [({}, {}), (UNTOLD, {"timeout_s": str(PATIENCE)})], ids=["told", "untold"]
)
def test_who_gave_up_is_replayed_until_then(tmp_path, untold, more):
    """As an engine of ours has it; what a failed request's row lacks is that of the others."""
    table = overload()
    lost = int((~table.completed).sum())
    assert 20 < lost < 40
    write(tmp_path, recorded(table, untold), FILED | more)
    (outcome,) = validate_measured(tmp_path)
    found = {row.metric: row for row in outcome.rows}
    assert found["failed_requests"].measured == lost
    assert found["failed_requests"].predicted == lost
    for metric in ("mean_ttft_ms", "p99_ttft_ms", "mean_e2el_ms", "request_throughput"):
        assert found[metric].error == pytest.approx(0, abs=1e-6)
    assert any(f"until their clients let go: {lost}" in note for note in outcome.notes)


def test_without_them_the_others_wait_less(tmp_path):
    table = overload(every=3)
    assert 5 < (~table.completed).sum() < 20
    write(tmp_path, recorded(table, UNTOLD), FILED)  # nobody says when they failed
    (outcome,) = validate_measured(tmp_path)
    found = {row.metric: row for row in outcome.rows}
    assert "failed_requests" not in found
    assert found["mean_ttft_ms"].error < -0.1
    assert any(
        "requests left out: failed or cancelled when recorded" in note for note in outcome.notes
    )


def test_a_row_says_how_many_gave_up(tmp_path):
    """The load is made of a rate: who waits longer than `timeout_s` gives up."""
    row = ROW | {"rate_rps": "20", "arrival": "constant", "n_requests": "60", "n_failed": "25"}
    row |= {"mean_input_tokens": "3000", "mean_output_tokens": "5", "ttft_mean_ms": "300"}
    keys = [*row, "timeout_s"]
    lines = [",".join(keys)]
    for name, wait in (("told", str(PATIENCE)), ("untold", "")):
        lines.append(",".join((row | {"run_id": name, "timeout_s": wait}).values()))
    (tmp_path / "runs.csv").write_text("\n".join(lines) + "\n")
    told, untold = validate_measured(tmp_path)
    lost = next(one for one in told.rows if one.metric == "failed_requests")
    assert lost.measured == 25
    assert 20 < lost.predicted < 40
    assert next(one for one in untold.rows if one.metric == "failed_requests").predicted == 0
    assert any("timeout_s is empty" in note for note in untold.notes)


def test_what_a_failed_request_says_may_be_anything(tmp_path):
    """inference-perf writes no tokens of it; what is no number is not told."""
    path = tmp_path / "requests.jsonl"
    good = {"start_time": 5.0, "end_time": 6.0, "input_tokens": 3, "output_tokens": 4}
    gone = {"start_time": 7.0, "end_time": 37.0, "input_tokens": 0, "error": "TimeoutError"}
    odd = gone | {"end_time": "soon", "output_tokens": "none"}
    never = {"input_tokens": 3, "error": "not sent"}
    path.write_text("".join(f"{json.dumps(one)}\n" for one in (good, gone, odd, never)))
    with pytest.warns(HeadwayWarning) as caught:
        found = read_requests(path, failed=True)
    assert [*found.arrival] == [0.0, 2.0]
    assert [*found.prompt] == [3, 3]
    assert [*found.output] == [4, 4]
    np.testing.assert_equal(found.patience, [np.nan, 30.0])
    np.testing.assert_equal(found.ends, [1.0, 32.0])
    said = [str(one.message) for one in caught]
    assert any("2 requests left out" in one for one in said)
    assert any("clients let go: 1" in one for one in said)
    with pytest.warns(HeadwayWarning, match="3 requests left out"):
        assert len(read_requests(path)) == 1
    with pytest.warns(HeadwayWarning):
        found = read_requests(path, failed=True, timeout=60.0)
    np.testing.assert_equal(found.patience, [np.nan, 30.0, 60.0])


def test_cells_that_are_told_stand_where_a_row_has_none(tmp_path, capsys):
    row = ROW | {"rate_rps": "4", "n_requests": "8", "mean_output_tokens": "5", "ttft_mean_ms": "9"}
    lines = [
        ",".join([*row, "mean_input_tokens"]),
        *(f"{','.join(row.values())},{one}" for one in ("900", "")),
    ]
    (tmp_path / "runs.csv").write_text("\n".join(lines).replace("\na,", "\nlong,", 1) + "\n")
    assert validate_measured(tmp_path)[1].reason
    long, short = validate_measured(tmp_path, cells=["mean_input_tokens=90"])
    assert long.rows[0].predicted > 2 * short.rows[0].predicted
    for cell, message in (
        ("prompt_pool", "--set prompt_pool: is not COLUMN=VALUE"),
        ("prompt_pol=3", "prompt_pol: no column of runs.csv; did you mean prompt_pool?"),
        ("prompt_pool=1.5", "--set: prompt_pool: must be a whole number, not '1.5'"),
        ("prompt_pool=abc", "--set: prompt_pool: must be a number, 0 or more, not 'abc'"),
    ):
        assert main(["validate", "--measured", str(tmp_path), "--set", cell]) == 2
        assert message in capsys.readouterr().err
    assert main(["validate", str(tmp_path), "--set", "tp=1"]) == 2
    assert "--set: needs --measured" in capsys.readouterr().err


SERVER = """model: llama-3-8b
gpu: {name: H100-80GB}
workload: {num_prompts: 1}
"""
GIVEN_UP = "arrival,prompt_tokens,output_tokens,asked_output_tokens,ttft,e2el,finish_reason\n"


def test_failed_requests_load_the_engine_of_a_fit(write):
    """Until their recorded end; of others it is said that the fit is not to be trusted."""
    rows = [{"arrival_s": k / 10, "prompt_tokens": 300, "output_tokens": 20} for k in range(100)]
    for k, row in enumerate(rows):
        row.update(ttft_s=0.02, e2e_s=0.5, success="false" if k % 5 == 0 else "true")
    server = load_scenario(write(SERVER, "server.yaml"))
    lines = (",".join(map(str, row.values())) for row in rows)
    text = "\n".join([",".join(rows[0]), *lines])
    with pytest.warns(HeadwayWarning, match="replayed until their clients let go: 20$"):
        log = read_log(write(text, "log.csv"), server)
    assert len(log.workload) == 100
    assert [*np.flatnonzero(np.isfinite(log.workload.cancel_after))] == [*range(0, 100, 5)]
    assert np.isnan(log.residuals(terms_of(log.cost))[:, ::5]).all()
    gone = write(text.replace("0.5,false", ",false"), "gone.csv")
    with pytest.warns(HeadwayWarning, match="when 20 of 80 requests failed; .* not to be trusted"):
        assert len(read_log(gone, server).workload) == 80


def test_timeouts_of_a_run_load_a_fit_with_the_same_clients(write, recwarn):
    """Without, nobody knows when they ended."""
    rows = (
        f"{k},300,0,20,,,timeout" if k % 5 == 0 else f"{k},300,20,,1,2,stop" for k in range(100)
    )
    path = write(GIVEN_UP + "\n".join(rows), "requests.csv")
    for text, count in ((SERVER, 1), (f"{SERVER}cluster: {{client: {{timeout: 1.5}}}}\n", 0)):
        recwarn.clear()
        read_log(path, load_scenario(write(text, "server.yaml")))
        doubts = [one for one in recwarn if "not to be trusted" in str(one.message)]
        assert len(doubts) == count
