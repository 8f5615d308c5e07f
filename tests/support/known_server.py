"""A server whose cost is known, and loads as they would be measured of it."""

import numpy as np

from calibration.server_logs.from_loads import Load, play_load
from simulator.costs.piecewise import PiecewiseCost
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.workload.workload import Workload

SCENARIO = """
name: truth
model: tiny-test
gpu: {name: CPU}
engine: {version: 0.32.0, max_num_seqs: 8, max_num_batched_tokens: 256, max_model_len: 1024,
  num_gpu_blocks_override: 2000}
cost: {kind: piecewise, dense: [[1, 0.004], [8, 0.006], [256, 0.03]], overhead: 0.001,
  decode_per_context: 2.0e-7, prefill_per_pair: 2.0e-8}
workload: {num_prompts: 4, request_rate: 5, input_len: 50, output_len: 10}
"""
TRUTH = PiecewiseCost(
    dense=[[1, 0.004], [8, 0.006], [256, 0.03]],
    overhead=0.001,
    decode_per_context=2e-7,
    prefill_per_pair=2e-8,
)


def loads(scenario: Scenario, noise: float, latency: float = 0.004) -> list[Load]:
    """Play closed and open loops under the truth; what is measured spreads by so much."""
    random, parts, found = np.random.default_rng(1), resolve(scenario), []

    def add(name: str, count: int, **more: object) -> None:
        long = random.random(count) < 0.3
        prompts = np.where(long, random.integers(128, 500, count), random.integers(16, 100, count))
        rate = more.pop("rate", None)
        arrival = (
            np.zeros(count) if rate is None else np.cumsum(random.exponential(1 / rate, count))
        )
        load = Workload(arrival, prompts, random.integers(8, 60, count), **more)
        table = play_load(scenario, parts, TRUTH, load, latency).table
        spread = [np.exp(noise * random.standard_normal(count)) for _ in range(2)]
        ttft = table.ttft * spread[0]
        found.append(Load(name, load, ttft, ttft + (table.e2el - table.ttft) * spread[1]))

    for clients in (1, 2, 4, 8):
        add(f"closed-{clients}", 25 * clients, max_concurrency=clients)
    for rate in (3, 8, 12):
        add(f"open-{rate}", 100, rate=rate)
    return found
