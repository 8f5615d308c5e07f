"""Requests in order of id, from the rows of a log."""

import numpy as np

from simulator.core.log import Log
from simulator.results.request_table import gather_requests
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from tests.support.logs import ObservedRequest, add_request, make_workload


def test_arrival_of_session_turns() -> None:
    """A later turn is due its delay after the end of the one before, or after its rejection."""
    seen = [
        ObservedRequest(1.0, 1.0, [2.0, 3.0]),
        ObservedRequest(4.5),
        ObservedRequest(1.0, reason="rejected"),
        ObservedRequest(6.0),
    ]
    log = Log(10, 4)
    for number, request in enumerate(seen):
        if request.reason != "rejected":
            request.scheduled, request.tokens = request.sent, request.tokens or [9.0]
        add_request(log, number, request)
    load = make_workload(
        seen,
        after=np.array([-1, 0, -1, 2]),
        delay=np.array([0.0, 0.5, 0.0, 0.5]),
        max_concurrency=2,
    )
    load.arrival[[1, 3]] = np.nan
    table = gather_requests(load, np.array([r.sent for r in seen]), [log])
    assert table.arrival.tolist() == [1.0, 3.5, 1.0, 1.5]
    assert table.client_queue_time.tolist() == [0.0, 1.0, 0.0, 4.5]


def test_a_turn_after_a_rejection_is_due_when_it_was_sent(write) -> None:
    """Also where the one before was rejected only behind the front end."""
    path = write(
        "engine: {max_model_len: 50}\n"
        "cost: {kind: linear, base: 0.1}\n"
        "workload: {num_prompts: 2, request_rate: 1, input_len: 90, output_len: 5,\n"
        "  sessions: {turns: 2, think_time: 0.5}, frontend: {latency: 200}}\n"
    )
    table = run(load_scenario(path)).request_table()
    assert table.arrival[1] == table.sent[1] == table.sent[0] + 0.2 + 0.5
