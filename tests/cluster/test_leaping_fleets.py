"""A run that leaps is one that does not, byte by byte, whatever reads an engine between events.

`HEADWAY_CHECKS=3000` draws so many fleets.
"""

import ast
import os
import re
import warnings
from copy import deepcopy
from math import isclose
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import simulator.cluster
from simulator import load_scenario, run
from simulator.scenario.scenario import Scenario
from simulator.simulation.result import Result
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.workload import Workload
from tests.support.engines import workload
from tests.support.fleets import draw_fleet
from tests.support.run_files import flatten

FLEETS = int(os.environ.get("HEADWAY_CHECKS", "200"))
STATE = {"free", "used", "running", "waiting", "decodes"}
"""What a scheduler, or its blocks, says of the step where a leap began."""
RANKS = """
model: tiny-test
engine:
  {name: textbook, data_parallel_size: 2, max_num_seqs: 16, max_num_batched_tokens: 64,
   block_size: 4, num_gpu_blocks_override: 121}
workload:
  {num_prompts: 25, input_len: 369, output_len: {kind: uniform, low: 1, high: 40}, request_rate: 10}
cluster: {replicas: 2, router: least_kv}
cost: {kind: linear, base: 0.01}
"""


def both(scenario: Scenario, load: Workload | None = None) -> list[Result]:
    """Run a scenario in leaps and step by step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadwayWarning)
        ways = (False, True)
        return [run(scenario, workload=deepcopy(load), stepwise=way) for way in ways]


def requests_csv(result: Result, folder: Path) -> bytes:
    """Return the table of requests as it is written."""
    write_run(result, folder)
    return (folder / "requests.csv").read_bytes()


@given(st.randoms(use_true_random=False))
@settings(max_examples=FLEETS, deadline=None, suppress_health_check=[*HealthCheck])
def test_fleets_leap_as_they_step(tmp_path_factory: pytest.TempPathFactory, rng: Random) -> None:
    """All routers, ranks, pools, autoscaling, cancels, priorities, adapters, failures, models."""
    values, load = draw_fleet(rng)
    try:
        scenario = load_scenario(deepcopy(values))
    except (HeadwayError, ValueError):
        reject()
    leapt, stepped = both(scenario, load)
    folder = tmp_path_factory.mktemp("run")
    assert requests_csv(leapt, folder / "leapt") == requests_csv(stepped, folder / "stepped")
    one, other = (dict(flatten(result.summary())) for result in (leapt, stepped))
    assert one.keys() == other.keys()
    for key, value in one.items():
        same = value == other[key]
        assert same or isclose(value, other[key], rel_tol=1e-9, abs_tol=1e-12), key


@pytest.mark.parametrize(
    "fleet",
    [
        "cluster={replicas: 2, router: least_kv}",
        "cluster={replicas: 2, router: lora_affinity}",
        "cluster={replicas: 4, router: random, pods: 2, pod_router: least_kv}",
    ],
)
def test_a_server_says_how_full_all_its_ranks_are(fleet: str, write, tmp_path: Path) -> None:
    """One rank ends a request in the midst of a leap of the other, whose blocks count, too."""
    for seed in range(1, 7):
        leapt, stepped = both(load_scenario(write(RANKS), [fleet], seed=seed))
        assert requests_csv(leapt, tmp_path / "a") == requests_csv(stepped, tmp_path / "b")


def test_nobody_reads_a_scheduler_between_events() -> None:
    """What a fleet wants to know of an engine it asks `EngineCore.stats`, which counts leaps."""
    wrong = []
    for file in Path(simulator.cluster.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in STATE:
                owner = ast.unparse(node.value)
                if re.search(r"(scheduler|blocks|_producer\(.*\)|_consumer\(.*\))$", owner):
                    wrong.append(f"{file.name}:{node.lineno} {ast.unparse(node)}")
    assert not wrong


def test_a_client_that_hangs_up_as_a_step_ends_comes_too_late_for_the_next(write) -> None:
    """A turn is sent as the one before it ends, and let go at once, while the other replica leaps.

    Its step that begins at that instant has begun: the request waits until that is over.
    """
    text = "{model: tiny-test, engine: {name: textbook, max_num_seqs: 1, block_size: 4, "
    text += "max_model_len: 64, num_gpu_blocks_override: 40}, cost: {kind: linear, base: 0.25}, "
    text += "cluster: {replicas: 2, router: round_robin}}"
    load = workload((0.0, 8, 20), (0.0, 8, 9), (None, 8, 4))
    load.after, load.delay = np.array([-1, -1, 1]), np.zeros(3)
    load.cancel_after = np.array([np.nan, np.nan, 0.0])
    leapt, stepped = both(load_scenario(write(text)), load)
    waiting = [result.summary()["headway"]["mean_waiting"] for result in (leapt, stepped)]
    assert waiting[0] == pytest.approx(waiting[1])
    assert waiting[0] > 0
