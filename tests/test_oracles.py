"""Other people's answers: vLLM's own loop, queueing theory, Ciw, Little's law."""

from dataclasses import dataclass

import ciw
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.blocks import BlockCounter, BlockManager
from simulator.log import Log
from simulator.policies import SJF
from simulator.request import Request, Segments, Step
from simulator.scheduler import Scheduler
from tests.engines import Clock, fcfs, play, workload
from tests.naive import Naive

# ---------------------------------------------------------------- vLLM's own loop


@dataclass
class Job:
    """A request that arrives before the step of this number."""

    at: int
    prompt: int
    output: int
    segments: Segments | None

    def request(self, id: int) -> Request:
        return Request(id, float(self.at), self.prompt, self.output, segments=self.segments)


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    """Some requests, whose prompts may hold pieces of each other's prompts and answers."""
    at, jobs = 0, []
    for i in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from([0, 0, 0, 1, 3, 8, 20]))
        output = draw(st.integers(1, 20))
        prompt = draw(st.integers(1, 30))
        segments: list[tuple[object, int]] = []
        while (left := prompt - sum(n for _, n in segments)) > 0 and draw(st.booleans()):
            other = draw(st.integers(0, i))
            name = draw(st.sampled_from(["a", "b", ("in", other), ("out", other)]))
            segments.append((name, draw(st.integers(1, left))))
        if segments and left > 0:
            segments.append((("in", i), left))
        jobs.append(Job(at, prompt, output, tuple(segments) or None))
    return jobs


options = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 40),
        "max_model_len": st.sampled_from([64, 40]),
        "enable_chunked_prefill": st.sampled_from([True, True, False]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3, 7]),
        "scheduler_reserve_full_isl": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.0, 0.2]),
    }
)


def _facts(scheduler: Scheduler, step: Step, before: set[int], preempted: set[int]) -> object:
    """What `Naive.step` says, asked of the scheduler that works on sums."""
    tick = scheduler.decodes.tick
    given = [(c.request.id, c.start, c.tokens) for c in (*step.prefills, *(step.singles or ()))]
    for request in scheduler.running:
        if request.joined >= 0:
            given.append((request.id, request.computed + tick - request.joined, 1))
    assert sum(n for _, _, n in given) == step.tokens
    admitted = [(c.request.id, c.start) for c in step.prefills if c.request.id not in before]
    row = scheduler.account(step)
    waiting = scheduler.waiting
    assert row[3] == step.tokens - step.decodes
    assert row[6:] == (
        len(scheduler.running),
        len(waiting),
        scheduler.blocks.usable - scheduler.blocks.free,
        len(preempted),
    )
    return {
        "given": sorted(given),
        "preempted": sorted(preempted),
        "admitted": admitted,
        "running": [request.id for request in scheduler.running],
        "waiting": len(waiting),
        "head": waiting.head().id if waiting else None,
        "free": scheduler.blocks.free,
        "hashed": getattr(scheduler.blocks, "hashed", 0),
        "stored": row[2],
    }


@given(jobs(), options, st.sampled_from([1, 2, 4]), st.data())
@settings(max_examples=500, deadline=None)
def test_the_scheduler_decides_as_vllms_own_loop_does(todo, chosen, size, data) -> None:
    """Every step, every decision, every number of the cache; leapt steps too."""
    named, caching = data.draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    policy = data.draw(st.sampled_from([None, SJF()]))
    if not chosen["enable_chunked_prefill"]:  # vLLM asks for this much
        chosen["max_num_batched_tokens"] = chosen["max_model_len"]
    usable = data.draw(st.integers(1, 120)) // size + 1
    blocks = BlockManager(usable + 1, size, caching) if named else BlockCounter(usable + 1, size)
    scheduler = Scheduler(blocks, policy=policy, **chosen)
    naive = Naive(usable + 1, size, caching, key=policy and policy.key, **chosen)
    requests = [job.request(i) for i, job in enumerate(todo)]
    number = 0
    while todo or scheduler.running or scheduler.waiting:
        while todo and todo[0].at <= number:
            request = requests[-len(todo)]
            del todo[0]
            if scheduler.fits(request):
                scheduler.add(request)
                naive.add(request)
        before = {request.id for request in scheduler.running}
        count = [request.preemptions for request in requests]
        step = scheduler.schedule(float(number))
        gone = {r.id for r, n in zip(requests, count, strict=True) if r.preemptions > n}
        expected = naive.step()
        assert _facts(scheduler, step, before, gone) == expected
        repeats = scheduler.horizon(step) if step.decodes or step.prefills else 1
        if todo:
            repeats = min(repeats, max(1, todo[0].at - number))
        for _ in range(repeats - 1):
            assert naive.end() == []
            again = naive.step()
            assert not again["preempted"]
            assert not again["admitted"]
            assert [job[::2] for job in again["given"]] == [job[::2] for job in expected["given"]]
        done = scheduler.commit(step, [float(number + i + 1) for i in range(repeats)])
        assert [request.id for request in done] == naive.end()
        assert scheduler.blocks.free == len(naive.free)
        number += repeats
    asked = [min(r.output_tokens, chosen["max_model_len"] - r.prompt_tokens) for r in requests]
    for request, tokens in zip(requests, asked, strict=True):
        assert request.generated == (tokens if scheduler.fits(request) else 0)
