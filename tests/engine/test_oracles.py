"""Other people's answers: vLLM's own loop, queueing theory, Ciw, Little's law."""

from collections.abc import Hashable
from dataclasses import dataclass
from math import sqrt

import ciw
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simulator.core.request import Request, Segments, Step
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.policies.orders import SJF, Priority
from simulator.schedulers.static import Static
from simulator.schedulers.vllm.rules import NEWEST_RELEASE, families, rules_of
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload
from tests.engine.test_laws import clocks, engines, workloads
from tests.support.engines import Clock, fcfs, made, play
from tests.support.reference_scheduler import ReferenceScheduler

# ---------------------------------------------------------------- vLLM's own loop


@dataclass
class Job:
    """A request that arrives before the step of this number."""

    at: int
    prompt: int
    output: int
    segments: Segments
    priority: int

    def request(self, id: int, quotes: bool) -> Request:
        """Make it; no two arrive in the same instant. Without `quotes` answers are made up."""
        segments = tuple(
            (("said", name) if name[0] == "out" and not quotes else name, count)
            for name, count in self.segments
        )
        return Request(
            id,
            self.at + id / 1000,
            self.prompt,
            self.output,
            segments=segments,
            priority=self.priority,
        )


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    """Some requests, whose prompts may hold pieces of each other's prompts and answers."""
    at, jobs = 0, []
    for i in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from([0, 0, 0, 1, 3, 8, 20]))
        prompt = draw(st.integers(1, 30))
        parts: list[tuple[Hashable, int]] = []
        if jobs and draw(st.booleans()):  # goes on where an earlier one ends, or before
            other = draw(st.integers(0, i - 1))
            parts += [*jobs[other].segments, (("out", other), draw(st.integers(1, 20)))]
        while draw(st.booleans()):
            name = draw(st.sampled_from(["a", "b", ("in", 0), ("out", 0)]))
            parts.append((name, draw(st.integers(1, 20))))
        segments = []
        left = prompt
        for name, count in (*parts, (("in", i), prompt)):
            if take := min(count, left):
                segments.append((name, take))
            left -= take
        jobs.append(
            Job(at, prompt, draw(st.integers(1, 20)), tuple(segments), draw(st.integers(0, 2)))
        )
    return jobs


options = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 40),
        "max_model_len": st.sampled_from([64, 40]),
        "enable_chunked_prefill": st.sampled_from([True, True, False]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3, 7]),
        "long_prefill_token_threshold_adaptive": st.booleans(),
        "prefill_schedule_interval": st.sampled_from([1, 1, 2, 4]),
        "scheduler_reserve_full_isl": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.0, 0.2]),
        "rules": st.sampled_from([NEWEST_RELEASE, NEWEST_RELEASE, *families().values()]).map(
            rules_of
        ),
    }
)


def _facts(scheduler: Scheduler, step: Step, before: set[int], preempted: set[int]) -> object:
    """What `ReferenceScheduler.step` says, asked of the scheduler that works on sums."""
    tick = scheduler.decodes.tick
    given = [(c.request.id, c.start, c.tokens) for c in (*step.prefills, *(step.singles or ()))]
    given += [
        (request.id, request.computed + tick - request.joined, 1)
        for request in scheduler.running
        if request.joined >= 0
    ]
    assert sum(n for _, _, n in given) == step.tokens
    prefills = {c.request.id for c in step.prefills}
    assert step.context == sum(start + 1 for id, start, _ in given if id not in prefills)
    admitted = [(c.request.id, c.start) for c in step.prefills if c.request.id not in before]
    row = scheduler.account(step)
    waiting = scheduler.waiting
    assert row[3] == step.tokens - step.decodes
    assert row[6:] == (
        len(scheduler.running),
        len(waiting),
        scheduler.blocks.usable - scheduler.blocks.free,
        len(step.prefills),
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
    policy = data.draw(st.sampled_from([None, SJF(), Priority()]))
    if not chosen["enable_chunked_prefill"]:  # vLLM asks for this much
        chosen["max_num_batched_tokens"] = chosen["max_model_len"]
    usable = data.draw(st.integers(1, 120)) // size + 1
    blocks = BlockManager(usable + 1, size, caching) if named else BlockCounter(usable + 1, size)
    scheduler = made(Scheduler, blocks, policy=policy, **chosen)
    naive = ReferenceScheduler(
        usable + 1,
        size,
        caching,
        key=policy and policy.key,
        by_priority=isinstance(policy, Priority),
        **chosen,
    )
    # A capped prompt may hold, by foresight, the very token that a decode behind it computes in
    # the same step. Which of the two equal blocks is registered first differs; it cannot happen.
    quotes = not chosen["long_prefill_token_threshold"]
    requests = [job.request(i, quotes) for i, job in enumerate(todo)]
    assume(not isinstance(policy, Priority) or chosen["rules"].withdraws_tokens)
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


# ---------------------------------------------------------------- queueing theory

SERVICE = 0.75  # seconds: one seat, prompts of one step, answers of one token


def poisson(rho: float, requests: int, seed: int) -> npt.NDArray[np.float64]:
    """Arrival times that keep one seat busy for a share `rho` of the time."""
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.exponential(SERVICE / rho, requests))


def waits(arrivals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Queue times of an engine with one seat and constant service, by request."""
    ones = np.ones(len(arrivals), dtype=np.int64)
    log, client = play(Workload(arrivals, 4 * ones, ones), fcfs(max_num_seqs=1), Clock(SERVICE))
    rows = log.requests
    assert (np.diff(rows["id"]) == 1).all()
    assert (rows["finish"] == rows["first_scheduled"] + SERVICE).all()
    return np.asarray(rows["first_scheduled"] - np.array(client.sent))


@pytest.mark.medium
@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_one_seat_with_constant_service_is_an_m_d_1_queue(rho: float) -> None:
    """Mean wait by Pollaczek and Khinchine: rho S / (2 (1 - rho)); its error from batch means."""
    mean = rho * SERVICE / (2 * (1 - rho))
    batches = waits(poisson(rho, 40_000, seed=1)).reshape(40, -1).mean(axis=1)
    error = batches.std(ddof=1) / sqrt(len(batches))
    assert error < 0.05 * mean
    assert abs(batches.mean() - mean) < 3 * error


def test_every_request_waits_as_long_as_in_ciw() -> None:
    """The same arrivals through another simulator of queues."""
    arrivals = poisson(0.8, 3000, seed=2)
    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Sequential(np.diff(arrivals, prepend=0.0).tolist())],
        service_distributions=[ciw.dists.Deterministic(SERVICE)],
        number_of_servers=[1],
    )
    simulation = ciw.Simulation(network)
    simulation.simulate_until_max_customers(len(arrivals), method="Finish")
    records = sorted(simulation.get_all_records(), key=lambda record: record.arrival_date)
    assert [r.waiting_time for r in records[: len(arrivals)]] == pytest.approx(
        waits(arrivals).tolist(), abs=1e-7
    )


@pytest.mark.medium
@given(workloads(), engines(), clocks, st.booleans())
@settings(max_examples=150, deadline=None)
def test_littles_law(load, engine, clock, leap) -> None:
    """Requests in the engine, averaged over time, are arrival rate times mean stay.

    The one side comes from the step rows, the other from the request rows.
    """
    scheduler = engine()
    # The ghosts of a static batch keep their seats, and batches in flight overlap.
    assume(not (isinstance(scheduler, Static) or scheduler.traits.overlaps))
    log, client = play(load, scheduler, clock, leap=leap)
    rows, served = log.steps, log.requests[log.requests["reason"] != 2]
    assume(len(served))
    sent = np.array(client.sent)[served["id"]]
    span = rows["end"][-1] - min(sent)
    inside = (rows["running"] + rows["waiting"]) * (rows["end"] - rows["start"])
    boundaries = np.unique(np.concatenate([rows["start"], rows["end"]]))
    late = boundaries[np.searchsorted(boundaries, sent)] - sent  # until a row could count them
    gaps = zip(rows["end"][:-1], rows["start"][1:], strict=True)  # idle, or a nap while all wait
    napped = sum((b - a) * ((sent <= a) & (served["finish"] > a)).sum() for a, b in gaps if b > a)
    average = (inside.sum() + late.sum() + napped) / span
    rate, stay = len(served) / span, (served["finish"] - sent).mean()
    assert average == pytest.approx(rate * stay, rel=1e-9)
