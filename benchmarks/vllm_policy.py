"""What a policy of Headway's costs vLLM's scheduler: milliseconds of a step spent in headway_vllm.

    python benchmarks/vllm_policy.py [POLICY ...] [--waiting 1000] [--running 256] [--steps 200]

It needs vLLM 0.33, but neither a GPU nor weights. As many requests wait and run all the time: for
each that ends one is admitted and one comes. Timed are all operations on the waiting queue, the
questions to the policy and its books of tokens; beside it vLLM's `schedule` as a whole. Times are
of the thread's CPU, since other processes disturb. The exit code is 1 where the median of a policy
is 0.2 ms or more.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median

import numpy as np

from simulator.core.request import Request
from simulator.scenario.policy_table import PLUGIN, POLICY_VARIABLE
from simulator.schedulers.vllm.installed import InstalledBlocks, InstalledScheduler

MOST = 0.2  # ms of CPU
WARM_UP = 50  # steps
POLICIES = (
    *("sjf", "boost", "hrrn", "priority", "fair", "wfq", "drr", "virtual-finish-time"),
    *("preemptive", "deadline", "srpt", "mlfq"),
)


QUEUE = ("add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests")


class TimedEngine:
    """vLLM's scheduler with a policy, kept full; `own` and `whole` are seconds of the last step."""

    def __init__(self, policy: str, waiting: int, running: int) -> None:
        os.environ[POLICY_VARIABLE] = f'{{"policy": "{policy}"}}'
        self.scheduler = InstalledScheduler(
            InstalledBlocks(200_000, 16),
            scheduler_cls=PLUGIN,
            enable_prefix_caching=False,
            async_scheduling=True,
            max_num_seqs=running,
            max_num_batched_tokens=8192,
            max_model_len=8192,
        )
        self.waiting = waiting
        self.own = self.whole = self.now = 0.0
        self.arrived = self.steps = 0
        self._inside = False  # a timed call within another
        self._rng = np.random.default_rng(1)
        self._arrive()  # which starts vLLM
        vllm = self.scheduler.vllm
        for name in QUEUE:
            setattr(vllm.waiting, name, self._timed(getattr(vllm.waiting, name)))
        for name in ("_look_at_prompts", "_count_tokens", "_ask", "_settle"):
            if getattr(vllm, name) is not None:
                setattr(vllm, name, self._timed(getattr(vllm, name)))

    def _timed(self, call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **options: object) -> object:
            if self._inside:
                return call(*args, **options)
            self._inside = True
            before = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.own += time.thread_time() - before
                self._inside = False

        return run

    def _arrive(self) -> None:
        answer, client = int(self._rng.integers(20, 200)), int(self._rng.integers(20))
        self.scheduler.add(
            Request(self.arrived, self.now, 100, answer, f"client-{client}", hint=100)
        )
        self.arrived += 1

    def step(self) -> tuple[float, float]:
        """Let a step be decided and its outcome be told; return seconds of ours and of all."""
        self.own = 0.0
        self.now += 0.02
        while len(self.scheduler.waiting) < self.waiting:
            self._arrive()
        before = time.thread_time()
        self.scheduler.schedule(self.now)
        self.whole = time.thread_time() - before
        if self.steps:  # two batches are in flight
            self.scheduler.commit(None, [self.now])  # type: ignore[arg-type]
        self.steps += 1
        return self.own, self.whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("policies", nargs="*", default=POLICIES)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if find_spec("vllm") is None:
        parser.error("vLLM is not installed here: pip install vllm==0.33.0")
    most = 0.0
    for policy in options.policies:
        engine = TimedEngine(policy, options.waiting, options.running)
        taken = [engine.step() for _ in range(WARM_UP + options.steps)][WARM_UP:]
        own, whole = (1000 * median(column) for column in zip(*taken, strict=True))
        most = max(most, own)
        print(f"{policy:>20} {own:.3f} ms of {whole:.3f}", flush=True)
    return 1 if most >= MOST else 0


if __name__ == "__main__":
    sys.exit(main())
