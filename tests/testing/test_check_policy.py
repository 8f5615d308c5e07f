"""`check_policy` passes what is shipped and catches what is broken, one class for each law."""

import random
from collections.abc import Mapping

import pytest

from headway.testing.check import check_policy
from simulator.build.policy_table import POLICIES
from simulator.core.request import Request, Step
from simulator.policies.fair import Fair
from simulator.policies.waiting_queues import Fifo
from simulator.schedulers.vllm.scheduler import Scheduler

ARGUMENTS = {"hf-static": {"batch_size": 1}}  # its own default is more than the cases have seats


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("name", POLICIES)
def test_every_shipped_policy_keeps_the_laws(name: str) -> None:
    """Those added later too."""
    check_policy(name, **ARGUMENTS.get(name, {}))


@pytest.mark.usefixtures("few_cases")
def test_arguments_are_handed_on() -> None:
    """And refused as in a scenario."""
    check_policy("fair", weights={"a": 3}, output_weight=1)
    check_policy("tests.testing.test_check_policy:Last", number=3)
    with pytest.raises(ValueError, match=r"boost: must be from 0"):
        check_policy("wfq", boost=-1)
    with pytest.raises(ValueError, match=r"Last takes no such argument"):
        check_policy(Last, nmber=3)


class Last:
    """Priority to all but those of one number; a policy that keeps the laws."""

    def __init__(self, number: int) -> None:
        self.number = number

    def key(self, request: Request) -> object:
        return request.priority == self.number, request.arrival


class Failing:
    """Knows two priorities only."""

    def key(self, request: Request) -> object:
        return {0: "a", 1: "b"}[request.priority]


class Forgetful:
    """Loses the requests of a client."""

    def queue(self, batch: object) -> Fifo:
        class Lossy(Fifo):
            def add(self, request: Request) -> bool:
                return request.client != "c" and super().add(request)

        return Lossy()


class Endless(Scheduler):
    """Preempts everybody before each step."""

    def schedule(self, now: float) -> Step:
        for request in list(self.running):
            self.preempt(request)
            request.generated = 0
        return super().schedule(now)


class Leaky(Scheduler):
    """Gives the blocks of a preempted request back without taking note of it."""

    def preempt(self, request: Request) -> None:
        super().preempt(request)
        self.blocks.free -= 1


class Spendthrift(Scheduler):
    """Doubles the budget of a step."""

    def schedule(self, now: float) -> Step:
        budget = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = 2 * budget
        try:
            return super().schedule(now)
        finally:
            self.max_num_scheduled_tokens = budget


class Crowded(Scheduler):
    """Has one seat more than it should."""

    def schedule(self, now: float) -> Step:
        self.max_num_active_seqs += 1
        try:
            return super().schedule(now)
        finally:
            self.max_num_active_seqs -= 1


class Oracle:
    """The shortest answer first."""

    def key(self, request: Request) -> object:
        return request.output_tokens


class Sly:
    """The same, by what the engine has made of it."""

    def key(self, request: Request) -> object:
        return request.output_limit


class Clairvoyant:
    """Preempts the one that would end last, by a way that no guard stands in."""

    def key(self, request: Request) -> object:
        return request.arrival

    def victim(self, running: Mapping[Request, None]) -> Request:
        return max(running, key=Request.output_tokens.__get__)


class Hasty(Fair):
    """Claims that its head does not change while nothing but decodes happens."""

    moves = False

    def add(self, request: Request) -> bool:
        super().add(request)
        return False


class Dicing:
    """A random order without a seed."""

    def key(self, request: Request) -> object:
        return random.random()


@pytest.mark.many
@pytest.mark.parametrize(
    ("policy", "law"),
    [
        (Failing, r"fails: HeadwayError: .* Failing.key\(request 0\) raised KeyError: 2"),
        (Forgetful, r"does not end every request: request 0 never ends, and nothing happens"),
        (Endless, r"does not end every request: request 0 never ends, though it has gone on"),
        (Leaky, r"does not give everything back: \d+ of \d+ blocks are in use at the end"),
        (Spendthrift, r"goes over max_num_batched_tokens: a step has \d+ tokens, not \d+"),
        (Crowded, r"goes over max_num_seqs: 2 requests run at once, not 1"),
        (Oracle, r"reads the length .*: request.output_tokens \(test_check_policy.py:\d+\)"),
        (Sly, r"reads the length .*: request.output_limit \(test_check_policy.py:\d+\)"),
        (Clairvoyant, r"uses the length .*: with other answers, .* step \d+ differs"),
        (Hasty, r"leaps wrongly: leaping and stepwise differ: .* of request \d+ is "),
        (Dicing, r"is not deterministic: two equal runs differ"),
    ],
)
def test_a_broken_policy_is_caught_with_a_small_case(policy: type, law: str) -> None:
    """The message names class, law and what happened, and lists the requests."""
    random.seed(0)
    with pytest.raises(AssertionError, match=rf"^{policy.__name__} {law}") as caught:
        check_policy(policy)
    message = str(caught.value)
    assert "Smallest case found: max_num_seqs " in message
    assert message.count("\n  (") <= 4
    random.seed(0)
    with pytest.raises(AssertionError) as again:
        check_policy(policy)
    assert str(again.value) == message
