"""What the host does for a decode step of 256 sequences, in CPU time: `python benchmarks/host.py`.

Between two steps stands nothing; 5 ms of spinning, as a host waits for a GPU by default; 5 ms of
sleep; or the real forward pass of `tiny-test` on this CPU, which leaves cold caches, as no GPU
does. Each is measured as the engine runs, and with every sequence listed anew, as after a step
that somebody joined or left.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from gpu_backend.engine import Engine
from gpu_backend.executor import TorchExecutor
from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockManager
from simulator.models.load import load_model
from simulator.schedulers.vllm.scheduler import Scheduler

BATCH, CONTEXT, STEPS, FEW, WAIT = 256, 1000, 150, 30, 0.005

Sample = Callable[..., torch.Tensor]


class Bench:
    """An engine on which so many requests decode."""

    def __init__(self) -> None:
        self.engine = Engine(load_model("tiny-test"), BATCH * (CONTEXT + 1000) // 16, 16)
        blocks = BlockManager(self.engine.num_blocks, 16, prefix_caching=True)
        self.scheduler = Scheduler(blocks, max_num_seqs=BATCH, max_num_batched_tokens=8192)
        self.executor = TorchExecutor(self.engine, self.scheduler)
        self.forward: Sample = self.engine.model.sample
        self.now = 0.0
        self.put(self.nothing)
        for name in range(BATCH):
            self.scheduler.add(Request(name, 0.0, CONTEXT - 3 * (name % 50), 4000))
        while self.scheduler.waiting or self.scheduler.partial or not self.now:
            self.step()

    def put(self, sample: Sample) -> None:
        """Put something in the place of the forward pass."""
        self.engine.model.sample = sample  # type: ignore[method-assign]

    def nothing(self, batch: object) -> torch.Tensor:
        """Say zeros, at once."""
        return torch.zeros(len(batch.emits), dtype=torch.int64)  # type: ignore[attr-defined]

    def spin(self, batch: object) -> torch.Tensor:
        """Say zeros after a while of looking at the clock."""
        until = time.perf_counter() + WAIT
        while time.perf_counter() < until:
            pass
        return self.nothing(batch)

    def sleep(self, batch: object) -> torch.Tensor:
        """Say zeros after a while in which others may have the core."""
        time.sleep(WAIT)
        return self.nothing(batch)

    def step(self) -> tuple[float, float]:
        """Give the seconds of scheduler with commit, and of metadata with book-keeping."""
        begun = time.thread_time()
        step = self.scheduler.schedule(self.now)
        ready = time.thread_time()
        self.executor.execute(step)
        done = time.thread_time()
        self.now += 1.0
        self.scheduler.commit(step, [self.now])
        return ready - begun + time.thread_time() - done, self.executor.last.host_s

    def times(self, steps: int) -> list[tuple[float, float]]:
        """Measure so many steps as they come, each followed by one whose sequences are listed."""
        as_run, anew = [], []
        for _ in range(steps):
            as_run.append(self.step())
            self.executor.decoding = []  # forgotten: the next step lists everybody
            anew.append(self.step())
        return [_middle(as_run), _middle(anew)]


def _middle(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    scheduler, metadata = zip(*pairs, strict=True)
    return median(scheduler), median(metadata)


def main() -> int:
    """Measure and print a table, in milliseconds."""
    bench = Bench()
    print(f"{BATCH} decodes; median ms of CPU time per step")
    print(f"{'between steps':<18}{'scheduler':>10}{'metadata':>10}{'sum':>8}{'listed anew':>13}")
    for name, sample, steps in (
        ("nothing", bench.nothing, STEPS),
        ("5 ms of spinning", bench.spin, STEPS),
        ("5 ms of sleep", bench.sleep, STEPS),
        ("CPU forward", bench.forward, FEW),
    ):
        bench.put(sample)
        bench.times(5)
        (scheduler, metadata), anew = (
            [1e3 * seconds for seconds in pair] for pair in bench.times(steps)
        )
        both = scheduler + metadata
        print(f"{name:<18}{scheduler:>10.3f}{metadata:>10.3f}{both:>8.3f}{sum(anew):>13.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
