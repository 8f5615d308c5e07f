"""What a policy of Headway's costs vLLM's scheduler: milliseconds per step, beside its own fcfs.

    python benchmarks/vllm_policy.py [POLICY ...] [--waiting 1000] [--running 256] [--steps 400]

It needs vLLM 0.33, but neither a GPU nor weights. As many requests wait and run all the time: for
each that ends one is admitted and one comes. Prompts, predictions and priorities are all alike, so
that most policies have vLLM do the same work as fcfs; answers are not. Timed are vLLM's `schedule`,
`update_from_output` and `add_request`, by the CPU's clock; the best of five, in turns. The exit
code is 1 where a policy adds 0.2 ms or more to a step.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable

import numpy as np

from simulator.core.request import Request
from simulator.scenario.policy_table import PLUGIN, POLICY_VARIABLE
from simulator.schedulers.vllm.installed import InstalledBlocks, InstalledScheduler

MOST = 0.2  # ms
POLICIES = (
    *("sjf", "boost", "hrrn", "priority", "fair", "wfq", "drr", "virtual-finish-time"),
    *("preemptive", "deadline", "srpt", "mlfq"),
)


def milliseconds(policy: str | None, waiting: int, running: int, steps: int) -> float:
    """Measure a step of vLLM's scheduler with a policy, or with its own fcfs."""
    if policy is not None:
        os.environ[POLICY_VARIABLE] = f'{{"policy": "{policy}"}}'
    scheduler = InstalledScheduler(
        InstalledBlocks(200_000, 16),
        scheduler_cls=None if policy is None else PLUGIN,
        enable_prefix_caching=False,
        async_scheduling=True,
        max_num_seqs=running,
        max_num_batched_tokens=8192,
        max_model_len=8192,
    )
    rng = np.random.default_rng(1)
    spent = 0.0
    arrived = 0

    def timed(call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **options: object) -> object:
            nonlocal spent
            before = time.process_time()
            try:
                return call(*args, **options)
            finally:
                spent += time.process_time() - before

        return run

    def arrive(now: float) -> None:
        nonlocal arrived
        answer, client = int(rng.integers(20, 200)), int(rng.integers(20))
        scheduler.add(Request(arrived, now, 100, answer, f"client-{client}", hint=100))
        arrived += 1

    arrive(0.0)
    for name in ("schedule", "update_from_output", "add_request"):
        setattr(scheduler.vllm, name, timed(getattr(scheduler.vllm, name)))
    now, warm_up = 0.0, 100
    for number in range(warm_up + steps):
        if number == warm_up:
            spent = 0.0
        now += 0.02
        while len(scheduler.waiting) < waiting:
            arrive(now)
        scheduler.schedule(now)
        if number:  # two batches are in flight
            scheduler.commit(None, [now])  # type: ignore[arg-type]
    return 1000 * spent / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("policies", nargs="*", default=POLICIES)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    sizes = options.waiting, options.running, options.steps
    policies = [None, *options.policies]
    best = dict.fromkeys(policies, float("inf"))
    for _ in range(5):
        for policy in policies:
            best[policy] = min(best[policy], milliseconds(policy, *sizes))
    own = best.pop(None)
    print(f"{'vLLM fcfs':>20} {own:7.3f} ms a step")
    for policy, taken in best.items():
        print(f"{policy:>20} {taken - own:+7.3f}")
    return 1 if max(best.values()) - own >= MOST else 0


if __name__ == "__main__":
    sys.exit(main())
