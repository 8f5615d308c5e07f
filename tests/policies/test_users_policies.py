"""Policies of the user's: orders by columns, nonsense, and circles of preemptions."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.waiting_queues import PromotingQueue
from simulator.schedulers.vllm.dynamic import DynamicScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError
from tests.support.engines import made, play, workload
from tests.support.policies import engine, order, spans


class Latest:
    """Whoever came last boards first; an order by columns."""

    def rank(self, waiting, now):
        return now - waiting.arrival


class Wrong(Latest):
    """Gives what is no array of numbers."""

    def __init__(self, ranks: object) -> None:
        self.ranks = ranks

    def rank(self, waiting, now):
        if isinstance(self.ranks, Exception):
            raise self.ranks
        return self.ranks


class Pushy:
    """Displaces whatever it was told to."""

    def __init__(self, chosen: object) -> None:
        self.chosen = chosen

    def key(self, request):
        return request.id

    def displaces(self, head, running):
        return self.chosen


def test_the_example_of_the_documentation() -> None:
    """At 3 s gold displaces the client that has said 3 tokens, not the one that has said 2."""
    page = Path(__file__).parents[2] / "docs" / "schedulers.md"
    example = page.read_text("utf-8").split("```python\n")[1].split("```")[0]
    names: dict[str, type] = {}
    exec(example, names)
    load = workload((0, 4, 9), (0.5, 4, 9), (2.5, 4, 2), client=["a", "b", "gold-1"])
    assert spans(load, names["Gold"](), seats=2) == {2: (3, 4, 5), 1: (1, 2, 10), 0: (0, 1, 11)}


def test_who_has_waited_long_enough_is_ranked_anew() -> None:
    """The newest goes first, but after 2 s the one that came at 0 s."""
    promoted: set[int] = set()
    policy = SimpleNamespace(
        patience=2.0,
        promote=lambda request: promoted.add(request.id),
        key=lambda request: (request.id not in promoted, -request.arrival),
    )
    queue = PromotingQueue(policy, SimpleNamespace(now=0.0))
    requests = [Request(k, float(k), 4, 4) for k in range(2)]
    for request in requests:
        queue.add(request)
    for now, first in ((1.9, 1), (2.0, 0)):
        queue.refresh(now)
        assert queue.head() is requests[first]
    assert [queue.take() for _ in requests] == requests


def test_an_order_by_columns() -> None:
    """A minimal one; equals go by id."""
    load = workload((0, 4, 5), (1, 4, 1), (2, 4, 1), (3, 4, 1))
    assert order(load, Latest()) == [0, 3, 2, 1]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Wrong([1.0]), "Wrong.rank(waiting, now) must give a number for each of 3 requests, not"),
        (Wrong([np.nan] * 2), "Wrong.rank(waiting, now) must give a number for each of 3"),
        (
            Wrong(KeyError("x")),
            "Wrong.rank(waiting, now) raised KeyError: 'x' (test_users_policies.py:",
        ),
        (Pushy("them"), "Pushy.displaces(head, running) gave 'them', which is none of the running"),
        (
            Pushy(Request(9, 0.0, 4, 5)),
            "Pushy.displaces(head, running) gave request 9, which is none of the running requests",
        ),
    ],
)
def test_a_policy_that_answers_nonsense_is_named(policy: object, message: str) -> None:
    """In one line."""
    with pytest.raises(HeadwayError) as caught:
        play(workload((0, 4, 5), (0, 4, 5), (0, 4, 5)), engine(policy))
    (told,) = caught.value.messages
    assert told.startswith(f"engine.scheduling_policy: {message}")


class Headlong:
    """Whoever waits takes the place of whoever runs."""

    def key(self, request):
        return request.arrival

    def displaces(self, head, running):
        return next(iter(running), None)


class SelfSacrifice:
    """Whoever runs longest leaves."""

    def key(self, request):
        return request.arrival

    def victim(self, running):
        return next(iter(running))


def test_policies_by_which_all_throw_one_another_out_are_named() -> None:
    """Prompts of two steps never come to their second, or to that which lacks a block."""
    load = workload((0, 10, 1), (0, 10, 1))
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 8}
    headlong = made(DynamicScheduler, BlockCounter(9, 4), policy=Headlong(), **options)
    options = {"long_prefill_token_threshold": 2, "scheduler_reserve_full_isl": False}
    sacrifice = made(
        Scheduler, BlockCounter(4, 4), policy=SelfSacrifice(), max_num_seqs=2, **options
    )
    for scheduler, name in ((headlong, "Headlong"), (sacrifice, "SelfSacrifice")):
        with pytest.raises(HeadwayError) as caught:
            play(load, scheduler)
        (told,) = caught.value.messages
        assert told.startswith(f"engine.scheduling_policy: {name} goes round in circles: 10,000 st")


def test_many_preemptions_by_one_step_are_no_circle() -> None:
    """20,000 requests of a block want their second at once: half of them leave."""
    requests, options = 20_002, {"max_num_seqs": 20_002, "max_num_batched_tokens": 100_000}
    scheduler = made(Scheduler, BlockCounter(1 + requests, 4), **options)
    log, _ = play(workload(*[(0, 4, 2)] * requests), scheduler)
    assert log.requests["preemptions"].sum() == requests / 2
    assert log.requests["generated"].tolist() == [2] * requests


@pytest.mark.parametrize("leap", [True, False])
def test_who_says_a_token_before_it_is_displaced_gets_on(leap: bool) -> None:
    """Two answers of 6,000 tokens, one token at a time in turn."""
    load = workload((0, 1, 6000), (0, 1, 6000))
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 6000}
    log, _ = play(
        load, made(DynamicScheduler, BlockCounter(4000, 4), policy=Headlong(), **options), leap=leap
    )
    assert log.requests["generated"].tolist() == [6000, 6000]
    assert log.requests["preemptions"].sum() == 11_998
