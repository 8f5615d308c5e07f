"""What the host does for a decode step of 256 sequences, in CPU time: `python benchmarks/host.py`.

Between two steps stands nothing; 5 ms of spinning, as a host waits for a GPU by default; 5 ms of
sleep; or the real forward pass of `tiny-test` on this CPU, which leaves cold caches, as no GPU
does. Each is measured as the engine runs, and with every sequence listed anew, as after a step
that somebody joined or left.
"""

import time
from statistics import median

import torch

from gpu_backend.engine import Engine
from gpu_backend.executor import NOBODY, TorchExecutor
from gpu_backend.input_batch import InputBatch
from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockManager
from simulator.models.load import load_model
from simulator.schedulers.vllm.scheduler import Scheduler

BATCH, CONTEXT, STEPS, FEW, WAIT = 256, 1000, 150, 30, 0.005


def zeros(batch: InputBatch) -> torch.Tensor:
    """Stand in for the forward pass: say zeros, at once."""
    return torch.zeros(len(batch.emits), dtype=torch.int64)


def spin(batch: InputBatch) -> torch.Tensor:
    """Say zeros after a while of looking at the clock."""
    until = time.perf_counter() + WAIT
    while time.perf_counter() < until:
        pass
    return zeros(batch)


def sleep(batch: InputBatch) -> torch.Tensor:
    """Say zeros after a while in which others may have the core."""
    time.sleep(WAIT)
    return zeros(batch)


class Bench:
    """An engine on which so many requests decode."""

    def __init__(self) -> None:
        self.engine = Engine(load_model("tiny-test"), BATCH * (CONTEXT + 1000) // 16, 16)
        self.forward = self.engine.model.sample
        blocks = BlockManager(self.engine.num_blocks, 16, prefix_caching=True)
        self.scheduler = Scheduler(blocks, max_num_seqs=BATCH, max_num_batched_tokens=8192)
        self.executor = TorchExecutor(self.engine, self.scheduler)
        self.now = 0.0
        self.engine.model.sample = zeros  # type: ignore[method-assign]
        for name in range(BATCH):
            self.scheduler.add(Request(name, 0.0, CONTEXT - 3 * (name % 50), 4000))
        while self.scheduler.waiting or self.scheduler.running.partial or not self.now:
            self.step()

    def step(self) -> tuple[float, float]:
        """Return the seconds of scheduler with commit, and of metadata with book-keeping."""
        begun = time.thread_time()
        step = self.scheduler.schedule(self.now)
        ready = time.thread_time()
        self.executor.execute(step)
        done = time.thread_time()
        self.now += 1.0
        self.scheduler.commit(step, [self.now])
        return ready - begun + time.thread_time() - done, self.executor.last.host_s

    def times(self, steps: int) -> tuple[float, float, float]:
        """Return the median ms of scheduler and metadata, and of both where everybody is listed.

        Each step as it comes is followed by one whose sequences are listed anew.
        """
        as_run, anew = [], []
        for _ in range(steps):
            as_run.append(self.step())
            self.executor.decoding = NOBODY  # forgotten: the next step lists everybody
            anew.append(self.step())
        scheduler, metadata = (1e3 * median(column) for column in zip(*as_run, strict=True))
        return scheduler, metadata, 1e3 * sum(median(column) for column in zip(*anew, strict=True))


def main() -> None:
    """Measure and print a table, in milliseconds."""
    bench = Bench()
    print(f"{BATCH} decodes; median ms of CPU time per step")
    print(f"{'between steps':<18}{'scheduler':>10}{'metadata':>10}{'sum':>8}{'listed anew':>13}")
    for name, sample, steps in (
        ("nothing", zeros, STEPS),
        ("5 ms of spinning", spin, STEPS),
        ("5 ms of sleep", sleep, STEPS),
        ("CPU forward", bench.forward, FEW),
    ):
        bench.engine.model.sample = sample  # type: ignore[method-assign]
        bench.times(5)
        scheduler, metadata, anew = bench.times(steps)
        both = scheduler + metadata
        print(f"{name:<18}{scheduler:>10.3f}{metadata:>10.3f}{both:>8.3f}{anew:>13.3f}")


if __name__ == "__main__":
    main()
