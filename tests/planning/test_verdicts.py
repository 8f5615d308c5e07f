"""Whether a plan's fleets hold: random fleets of servers whose waiting times are known.

Each replica serves one request at a time, all alike (M/D/1) or of exponential lengths (near to
M/M/1), and a router draws which gets a request: each has Poisson arrivals of its own.
HEADWAY_PLAN_CASES=200 draws so many.
"""

import os
import random
from math import exp, factorial, floor
from pathlib import Path
from typing import NamedTuple

import pytest

from headway.planning.candidate import Candidate
from headway.planning.measure import measure_run
from headway.planning.plan import Runs, find_best
from headway.planning.problem import PlanOptions, PlanProblem, make_problem
from simulator import load_scenario

CASES = os.environ.get("HEADWAY_PLAN_CASES")
SEEDS = range(int(CASES)) if CASES else (0, 4, 10, 11)  # of the latter none takes long
TOKENS = 20
SERVER = """
model: tiny-test
gpu: {{name: A100-80GB}}
engine: {{max_num_seqs: 1, num_gpu_blocks_override: 200, max_model_len: 1024}}
cost: {{kind: linear, base: {step}}}
cluster: {{replicas: 1, router: random}}
workload: {{request_rate: {rate}, burstiness: 1, input_len: 20, output_len: {lengths}}}
seed: {seed}
"""


def share_that_waits_longer(rate: float, service: float, wait: float) -> float:
    """Erlang's distribution of the wait in M/D/1."""
    terms = (
        (-rate * (wait - k * service)) ** k / factorial(k) * exp(rate * (wait - k * service))
        for k in range(floor(wait / service) + 1)
    )
    return 1 - (1 - rate * service) * sum(terms)


def test_the_closed_form_at_its_ends():
    """Who finds the server idle does not wait; at half load, one in e / 2 waits below a service."""
    assert share_that_waits_longer(0.5, 1.0, 0.0) == pytest.approx(0.5)
    assert share_that_waits_longer(0.5, 1.0, 1.0) == pytest.approx(1 - 0.5 * (exp(0.5) - 0.0))


class Case(NamedTuple):
    """A fleet of servers and what is asked of it."""

    text: str  # the scenario
    rate: float  # requests/s
    service: float  # s
    bound: float  # s, of TTFT
    percentile: int
    alike: bool  # D, else M

    def share_above(self, replicas: int) -> float:
        """Get the share of requests above the bound; the first token comes a step after a wait."""
        rate, wait = self.rate / replicas, self.bound - self.service / TOKENS
        return share_that_waits_longer(rate, self.service, wait) if rate * self.service < 1 else 1.0


def draw(seed: int) -> Case:
    """Draw a fleet."""
    rng = random.Random(seed)
    alike = rng.random() < 0.5
    service = 10 ** rng.uniform(-0.7, 0.3)
    rate = rng.uniform(0.3, 3.0) / service
    percentile = rng.choice([90, 95, 99])
    bound = service * rng.uniform(1.0, 16.0)
    lengths = TOKENS if alike else f"{{kind: exponential, mean: {TOKENS}}}"
    text = SERVER.format(step=service / TOKENS, rate=rate, lengths=lengths, seed=seed)
    return Case(text, rate, service, bound, percentile, alike)


def holds(problem: PlanProblem, found: Candidate, replicas: int, case: Case, seed: int) -> bool:
    """By the closed form; else run so many replicas ten times as long as all looks together.

    Under other requests, at most 400,000 of them.
    """
    if case.alike:
        return case.share_above(replicas) <= 1 - case.percentile / 100
    seconds = max(t.looked_at for t in found.result.trials if t.at == replicas)
    count = min(round(10 * seconds * case.rate), 400_000)
    keys = [f"cluster.replicas={replicas}", f"workload.num_prompts={count}"]
    scenario = load_scenario(problem.path, keys, seed=seed + 10**6)
    (slo, _) = problem.criteria.slos
    values = measure_run(scenario, [slo], steady=True)
    return not values["broken"] and slo.met(values[slo.metric])


@pytest.mark.slow
def test_the_chosen_fleet_holds_and_one_replica_fewer_does_not(tmp_path: Path):
    """Of 61 cases all held, and of the 51 with more than one replica 49 failed with one fewer.

    In one of the others, seed 192, 4.95 % of the requests are then above the bound of a P95.
    """
    path = tmp_path / "s.yaml"
    held, failed, smaller = 0, 0, 0
    for seed in SEEDS:
        case = draw(seed)
        path.write_text(case.text)
        slo = f"p{case.percentile}_ttft_ms<={1000 * case.bound}"
        problem = make_problem(path, PlanOptions([slo], fewest="cluster.replicas=1..32"))
        _, best, _ = find_best(problem, None, Runs(1))
        chosen = int(best.best.at)
        held += holds(problem, best, chosen, case, seed)
        if chosen > 1:
            smaller += 1
            failed += not holds(problem, best, chosen - 1, case, seed)
    assert held >= 0.99 * len(SEEDS)
    assert failed >= 0.95 * smaller
