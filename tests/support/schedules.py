"""Schedules of requests on an engine whose steps take 1 s, as the tests read them."""

from simulator.core.executor import Timing
from simulator.core.request import Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.support.engines import Clock, play, workload

Seen = tuple[dict[int, tuple[int, int]], int]
"""One step: (start, tokens) of each prompt by request, and how many decode."""


class Spy(Clock):
    """Write down each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def execute(self, step: Step) -> Timing:
        self.seen.append(({c.request.id: (c.start, c.tokens) for c in step.prefills}, step.decodes))
        return super().execute(step)


def run(
    scheduler: Scheduler, *requests: tuple[float, int, int], **more: object
) -> tuple[list[Seen], list[int]]:
    """Return the steps, and how often each request was preempted."""
    spy = Spy()
    log, _ = play(workload(*requests, **more), scheduler, spy, leap=False)
    return spy.seen, [row["preemptions"] for row in sorted(log.requests, key=lambda r: r["id"])]


def prompts(*ids: int, tokens: int) -> Seen:
    """A step of prompts alone, all of one length."""
    return dict.fromkeys(ids, (0, tokens)), 0


def counter(usable: int, size: int = 4) -> BlockCounter:
    return BlockCounter(usable + 1, size)
