"""What a policy of Headway's costs vLLM's scheduler: milliseconds per step, beside its own fcfs.

    python benchmarks/vllm_policy.py [POLICY ...] [--waiting 1000] [--running 256] [--steps 200]

It needs vLLM 0.33, but neither a GPU nor weights. As many requests wait and run all the time: for
each that ends one is admitted and one comes. Prompts, predictions and priorities are all alike, so
that most policies have vLLM do the same work as fcfs. Timed are vLLM's `schedule`,
`update_from_output` and `add_request`; a scheduler with the policy and one without take turns, step
by step. Compared is what nine of ten steps take more than: what else the machine does makes others
longer. The exit code is 1 where a policy adds 0.2 ms or more to a step.
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
WARM_UP = 50  # steps
POLICIES = (
    *("sjf", "boost", "hrrn", "priority", "fair", "wfq", "drr", "virtual-finish-time"),
    *("preemptive", "deadline", "srpt", "mlfq"),
)


class TimedEngine:
    """vLLM's scheduler, kept full; `seconds` is what the last step took."""

    def __init__(self, policy: str | None, waiting: int, running: int) -> None:
        if policy is not None:
            os.environ[POLICY_VARIABLE] = f'{{"policy": "{policy}"}}'
        self.scheduler = InstalledScheduler(
            InstalledBlocks(200_000, 16),
            scheduler_cls=None if policy is None else PLUGIN,
            enable_prefix_caching=False,
            async_scheduling=True,
            max_num_seqs=running,
            max_num_batched_tokens=8192,
            max_model_len=8192,
        )
        self.waiting = waiting
        self.seconds = self.now = 0.0
        self.arrived = self.steps = 0
        self._rng = np.random.default_rng(1)
        self._arrive()  # which starts vLLM
        for name in ("schedule", "update_from_output", "add_request"):
            setattr(self.scheduler.vllm, name, self._timed(getattr(self.scheduler.vllm, name)))

    def _timed(self, call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **options: object) -> object:
            before = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.perf_counter() - before

        return run

    def _arrive(self) -> None:
        answer, client = int(self._rng.integers(20, 200)), int(self._rng.integers(20))
        self.scheduler.add(
            Request(self.arrived, self.now, 100, answer, f"client-{client}", hint=100)
        )
        self.arrived += 1

    def step(self) -> float:
        """Let a step be decided and its outcome be told; return what that took."""
        self.seconds = 0.0
        self.now += 0.02
        while len(self.scheduler.waiting) < self.waiting:
            self._arrive()
        self.scheduler.schedule(self.now)
        if self.steps:  # two batches are in flight
            self.scheduler.commit(None, [self.now])  # type: ignore[arg-type]
        self.steps += 1
        return self.seconds


def milliseconds(policy: str, waiting: int, running: int, steps: int) -> tuple[float, float]:
    """Measure a step of vLLM's scheduler with its own fcfs, and with a policy."""
    engines = [TimedEngine(one, waiting, running) for one in (None, policy)]
    taken = [[one.step() for one in engines] for _ in range(WARM_UP + steps)][WARM_UP:]
    own, with_policy = (
        1000 * float(np.quantile(column, 0.1)) for column in zip(*taken, strict=True)
    )
    return own, with_policy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("policies", nargs="*", default=POLICIES)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    most = 0.0
    for policy in options.policies:
        own, with_policy = milliseconds(policy, options.waiting, options.running, options.steps)
        most = max(most, with_policy - own)
        print(
            f"{policy:>20} {with_policy:6.3f} ms a step, vLLM's fcfs {own:6.3f}: "
            f"{with_policy - own:+.3f}",
            flush=True,
        )
    return 1 if most >= MOST else 0


if __name__ == "__main__":
    sys.exit(main())
