"""What a scrape of a metrics page sees of steps."""

import numpy as np

from headway.twin.polled_gauges import polled_gauges
from simulator import run
from simulator.scenario.load import load_scenario
from simulator.workload.workload import Workload


def test_polls_see_a_step_when_it_is_over() -> None:
    """Two requests of a chunk and two decodes each, the second of which comes in the first step."""
    engine = "engine={name: vllm, async_scheduling: false}"
    load = Workload(np.array([0.0, 1e-4]), np.array([100, 100]), np.array([3, 2]))
    log = run(load_scenario("demo", [engine]), workload=load, stepwise=True).logs[0]
    ends = log.steps["end"]
    seen = polled_gauges(log, np.array([ends[0] - 1e-9, *ends]))
    # 1st: the first request; 2nd: both; 3rd: both end, the first with its third token.
    assert seen.columns["running"].tolist() == [0, 1, 2, 0]
    assert seen.columns["waiting"].tolist() == [0, 0, 0, 0]
    assert seen.columns["kv_usage"][0] == 0 < seen.columns["kv_usage"][1]
