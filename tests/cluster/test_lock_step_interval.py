"""`prefill_schedule_interval` of ranks in lock-step, against the schedulers of vLLM 0.33.

`lock_step_interval.json.gz` is a recording of them: two or three ranks of vLLM's scheduler, on each
joint step `schedule` with what `DPEngineCoreProc._should_throttle_prefills` says of one counter.
Every joint step takes 1 s; the counter begins anew where all ranks rest.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import simpy

from simulator.cluster.data_parallel import LockStepLoop, Rank
from simulator.core.request import Request, Step
from simulator.costs.cost_model import JointStep
from simulator.engine.core import ScheduledStep
from simulator.engine.loop import LoopTimer
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.support.engines import Clock, made

RECORDED = json.loads(
    gzip.decompress((Path(__file__).parent / "lock_step_interval.json.gz").read_bytes())
)
CASES = RECORDED["cases"]
ROUND = 10  # ns of a recording that a joint step takes


class SeenRank(Rank):
    """A rank that writes down whom it schedules, and with how many tokens."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.seen: dict[float, dict[int, int]] = {}

    def schedule(self, now: float) -> ScheduledStep | None:
        scheduled = super().schedule(now)
        if scheduled is not None:
            self.seen[now] = self._tokens(scheduled[0])
        return scheduled

    def _tokens(self, step: Step) -> dict[int, int]:
        chunks = (*step.prefills, *(step.singles or ()))
        tokens = {chunk.request.id: chunk.tokens for chunk in chunks}
        if step.decodes > len(step.singles or ()):
            tokens |= {one.id: 1 for one in self.scheduler.running.members()}
        return tokens


def play(
    case: dict[str, Any],
    *,
    leap: bool,
    kind: type[Scheduler] = Scheduler,
    interval: int | None = None,
) -> list[SeenRank]:
    """Play the ranks of a case."""
    config, env = case["config"], simpy.Environment()
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    cores = [
        SeenRank(
            env,
            made(
                kind,
                BlockCounter(config["num_gpu_blocks"], config["block_size"]),
                prefill_schedule_interval=case["interval"] if interval is None else interval,
                **{name: config[name] for name in names},
            ),
            Clock(1.0),
            leap=leap,
        )
        for _ in case["ranks"]
    ]
    LockStepLoop(env, cores, JointStep(), LoopTimer)

    def come(core: Rank, requests: list[list[int]]) -> Any:
        for id, (arrival, prompt, output) in enumerate(requests):
            yield env.timeout(arrival / ROUND - env.now)
            core.submit(Request(id, env.now, prompt, output))

    for core, requests in zip(cores, case["ranks"], strict=True):
        env.process(come(core, requests))
    env.run()
    return cores


def rows_of(cores: list[SeenRank]) -> list[Any]:
    """List the joint steps as a recording does."""
    times = sorted({now for core in cores for now in core.seen})
    return [
        [now, [[list(pair) for pair in sorted(core.seen.get(now, {}).items())] for core in cores]]
        for now in times
    ]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_ranks_hold_prefill_back_in_the_same_steps_as_vllms(case: dict[str, Any]) -> None:
    assert rows_of(play(case, leap=False)) == case["rows"]


def test_the_interval_matters_in_the_recording() -> None:
    """Without it most cases go otherwise, so that the comparison can fail."""
    others = [case for case in CASES if rows_of(play(case, leap=False, interval=1)) != case["rows"]]
    assert len(others) > len(CASES) / 2


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_leaps_keep_count_of_the_joint_steps(kind: type[Scheduler]) -> None:
    for case in CASES:
        slow, fast = (play(case, leap=leap, kind=kind) for leap in (False, True))
        for one, other in zip(slow, fast, strict=True):
            assert one.log.run_rows == other.log.run_rows
            assert one.log.request_rows == other.log.request_rows
            assert one.log.tick_ends == other.log.tick_ends
