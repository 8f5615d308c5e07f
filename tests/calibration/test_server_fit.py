"""A cost fitted to loads that were sent to a server, whose truth is known."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from calibration.engine_steps.steps_file import make_step, write_chunks
from calibration.running_server.ask import Server
from calibration.running_server.calibrate import _faults, _files
from calibration.running_server.drive import Drive, Sent
from calibration.running_server.judge import compare, fit_sent
from calibration.server_logs.from_loads import fit_latency, fit_loads, play_load
from headway.twin.replay import Replayed
from simulator.costs.profile import read_profile
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError
from tests.support.known_server import SCENARIO, TRUTH, loads


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    path = tmp_path / "truth.yaml"
    path.write_text(SCENARIO)
    return load_scenario(path)


@pytest.mark.slow
def test_a_whole_cost_is_found_from_requests_alone(scenario: Scenario) -> None:
    measured = loads(scenario, noise=0.03)
    fit = fit_loads(scenario, measured)
    assert fit.latency == pytest.approx(0.004, abs=0.001)
    for decodes, context, chunks in (
        *((1, 100, ()), (4, 800, ()), (8, 3000, ())),
        *((0, 0, ((0, 60),)), (0, 0, ((0, 256),)), (5, 1000, ((0, 150),))),
    ):
        step = make_step(chunks, decodes, context)
        assert fit.cost.execute(step).seconds == pytest.approx(
            TRUTH.execute(step).seconds, rel=0.05
        )
    for one in compare(scenario, fit, measured):
        for metric in ("ttft", "tpot", "e2el"):
            assert abs(one.error(metric)) < 0.03, (one.load.name, metric)
    assert set(fit.residuals) == {"decode", "prompts"}


def test_where_steps_are_known_the_way_to_the_scheduler_is_found(scenario: Scenario) -> None:
    assert fit_latency(scenario, TRUTH, loads(scenario, 0.02)) == pytest.approx(0.004, abs=5e-4)


def test_too_few_requests_are_told(scenario: Scenario) -> None:
    with pytest.raises(HeadwayError, match="25 answered requests are too few"):
        fit_loads(scenario, loads(scenario, 0.0)[:1])


@pytest.mark.medium
def test_steps_that_were_logged_are_fitted(scenario: Scenario, tmp_path: Path) -> None:
    """Each load has its own rows of the log; those held out are judged."""
    path, sent, lines = tmp_path / "steps.csv", [], ["decodes,context,chunks,duration_s"]
    for number, load in enumerate(loads(scenario, 0.01)):
        played = play_load(scenario, resolve(scenario), TRUTH, load.workload)
        first = len(lines) - 1
        lines += [
            f"{row.decodes},{row.context},{write_chunks(row.chunks)},{row.wall_s}"
            for row in played.rows
        ]
        held = replace(load, held_out=number in {4, 6})
        sent.append(Sent(held, Replayed("m", "", []), 1.0, (first, len(lines) - 1)))
    path.write_text("\n".join(lines) + "\n")
    outcome = fit_sent(scenario, sent, path)
    assert outcome.by_steps is not None
    assert outcome.by_steps.median < 0.02
    assert outcome.held_out
    assert outcome.fit.latency == pytest.approx(0.004, abs=5e-4)
    assert all(abs(one.error("e2el")) < 0.05 for one in outcome.compared)


def test_a_request_whose_tokens_came_at_once_decides_nothing(scenario: Scenario) -> None:
    """A client was stalled: an answer of 175 took 1 us for each token."""
    measured = loads(scenario, noise=0.03)[:3]
    one = int(np.argmax(measured[2].workload.output_tokens))
    measured[2].ttft[one] = measured[2].e2el[one] - 1e-6 * measured[2].workload.output_tokens[one]
    sent = [Sent(load, Replayed("m", "", []), 1.0) for load in measured]
    outcome = fit_sent(scenario, sent, None)
    assert outcome.fit.left_out == 1
    step = make_step((), 4, 800)
    assert outcome.fit.cost.execute(step).seconds == pytest.approx(
        TRUTH.execute(step).seconds, rel=0.05
    )
    [note] = outcome.notes
    assert note.startswith("1 of the requests is left out of the fit: all tokens came at once")


@pytest.mark.medium
def test_what_is_written_where_nothing_was_held_out(scenario: Scenario, tmp_path: Path) -> None:
    """No error is called held out; a fit that explains nothing is told."""
    measured = loads(scenario, noise=0.03)[:3]
    drive = Drive(Server("http://x", "0.32.0", "m", "m", 1024, {}), 1000, 8, 60.0)
    drive.sent = [Sent(load, Replayed("m", "", []), 1.0) for load in measured]
    outcome = fit_sent(scenario, drive.sent, None)
    assert not outcome.notes
    assert not outcome.doubts
    slow = replace(outcome.fit, cost=replace(outcome.fit.cost, overhead=0.02))
    outcome = replace(outcome, compared=compare(scenario, slow, measured))
    [note] = outcome.doubts
    assert "the means of what it was fitted to are off by up to +" in note
    files = _files(drive, scenario, {"engine.dtype": "float32"}, outcome, ["stopped", note])
    assert files["scenario.yaml"].decode().splitlines()[1] == "# Do not trust its times: stopped."
    (tmp_path / "profile.yaml").write_bytes(files["profile.yaml"])
    profile = read_profile(tmp_path / "profile.yaml")
    assert profile.cost.name == f"profile (do not trust its times: stopped; {note})"
    figures = json.loads(files["calibration.json"])
    assert figures["notes"] == ["stopped", note]
    assert figures["knee_requests_per_s"] is None
    assert set(figures["fitted_loads"]) == {"closed-1", "closed-2", "closed-4"}
    page = files["calibration.html"].decode()
    assert "Errors on the loads fitted to" in page
    assert not any(b"held" in name for name in (files["calibration.json"], files["profile.yaml"]))
    assert "Held-out" not in page
    row = "<td>engine.dtype</td><td>auto</td><td>--set or --scenario</td>"
    assert row in page
    assert "<td>model</td><td>tiny-test</td><td>the server</td>" in page


def test_fewer_seats_than_said_are_told(scenario: Scenario) -> None:
    """Four of them, always taken; a KV cache that is full holds others up, too."""
    drive = Drive(Server("http://x", "0.32.0", "m", "m", 1024, {}), 1000, 8, 60.0)
    load = loads(scenario, noise=0.03)[0]

    def polled(*gauges: tuple[float, ...]) -> None:
        drive.sent = [Sent(load, Replayed("m", "", [], [*gauges]), 1.0)]

    taken = [(at / 2, 4.0, 2.0, 0.3) for at in range(5)]
    polled(*taken, (9.0, 3.0, 0.0, 0.2))
    assert drive.seats == 4
    [fault] = _faults(drive, 8)
    assert fault.endswith("is engine.max_num_seqs 4, not 8?")
    assert not _faults(drive, 4)
    for others in ([*taken[:4]], [*taken, (9.0, 5.0, 0.0, 0.2)], [(1.0, 4.0, 2.0, 0.95)] * 9):
        polled(*others)
        assert drive.seats is None
    polled()
    assert drive.seats is None
