"""The decode set: its sums are those over its members, whatever happened before."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request
from simulator.schedulers.sglang.running_batch import RunningBatch

MOST = 9  # tokens that a member may still say, as far as they are counted
ALLOWED = 30, 5, 12  # tokens that a request may say in all, by its number


def request(id: int, computed: int, admission: int | None = None) -> Request:
    """A request with `computed` tokens in the cache, about to decode."""
    made = Request(id, 0.0, max(computed, 1), 1000)
    made.computed = computed
    made.admission = id if admission is None else admission
    made.allowed = ALLOWED[id % 3]
    return made


@dataclass
class Member:
    """What the machine knows of a member: its tokens, spelt out tick by tick."""

    tokens: int
    left: int  # ticks until it ends; 0 and below: it stays on though it has ended


class Decoding(RuleBasedStateMachine):
    """Members come, advance, end, leave and come back; a dictionary keeps the truth."""

    @initialize(size=st.sampled_from([1, 2, 3, 16]), by_phase=st.booleans())
    def start(self, size: int, by_phase: bool) -> None:
        self.size = size
        self.set = RunningBatch(size, by_phase, MOST)
        self.truth: dict[Request, Member] = {}
        self.away: dict[Request, int] = {}  # requests that left, with the ticks they had left
        self.admissions = 0
        self.ticks = 0

    def admission(self) -> int:
        self.admissions += 1
        return self.admissions

    def members(self) -> list[Request]:
        return sorted(self.truth, key=lambda request: request.admission)

    @rule(computed=st.integers(1, 40), ticks=st.integers(1, 12))
    def join(self, computed: int, ticks: int) -> None:
        made = request(self.admissions, computed, self.admission())
        self.set.join(made, ticks)
        self.truth[made] = Member(computed, ticks)

    @rule(computed=st.integers(1, 40))
    def join_with_the_last_token_out(self, computed: int) -> None:
        """A request of one token joins and leaves at once."""
        made = request(self.admissions, computed, self.admission())
        self.set.join(made, 0)
        assert self.set.leave(made) == 0
        assert made.computed == computed

    @precondition(lambda self: self.truth)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        made = data.draw(st.sampled_from(self.members()))
        member = self.truth.pop(made)
        computed = made.computed
        assert self.set.leave(made) == member.tokens - computed
        assert (made.computed, made.joined) == (member.tokens, -1)
        if member.left > 0:
            self.away[made] = member.left

    @precondition(lambda self: self.away)
    @rule(data=st.data(), less=st.sampled_from([0, 1, 1]), anew=st.booleans())
    def come_back(self, data: st.DataObject, less: int, anew: bool) -> None:
        """Some return: at once, with a token brought out elsewhere, or admitted anew."""
        some = sorted(self.away, key=lambda request: request.admission)
        for made in some[: data.draw(st.integers(1, len(some)))]:
            left = self.away.pop(made) - less
            if left < 1:
                continue
            if anew:
                made.admission = self.admission()
            self.set.join(made, left)
            self.truth[made] = Member(made.computed, left)

    @rule(most=st.integers(1, 40), stay=st.booleans())
    def tick(self, most: int, stay: bool) -> None:
        """Advance, at most to the next end; those who end leave or stay on as ghosts."""
        ends = [member.left for member in self.truth.values() if member.left > 0]
        ticks = min([most, *ends])
        self.ticks += ticks
        for member in self.truth.values():
            member.tokens += ticks
            member.left -= ticks
        over = [made for made in self.members() if self.truth[made].left == 0]
        assert self.set.advance(ticks) == over
        for made in over:
            self.truth[made].left = -1000
            if not stay:
                del self.truth[made]
                self.set.leave(made)

    @invariant()
    def the_sums_are_those_over_the_members(self) -> None:
        decodes, size = self.set, self.size
        tokens = {made: member.tokens for made, member in self.truth.items()}
        assert decodes.tick == self.ticks
        assert decodes.count == len(tokens)
        assert decodes.context == sum(tokens.values())
        phases = [
            [made for made, held in tokens.items() if (held + tick - self.ticks) % size == 0]
            for tick in range(self.ticks, self.ticks + size)
        ]
        for tick, members in enumerate(phases, self.ticks):
            assert decodes.phases[tick % size] == len(members)
            if decodes.members is not None:
                assert set(decodes.members[tick % size]) == set(members)

    @invariant()
    def ticks_to_end_is_that_of_the_next_member_to_end(self) -> None:
        left = [member.left for member in self.truth.values() if member.left > 0]
        assert self.set.ticks_to_end() == min(left, default=0)

    def _taken(self, tick: int) -> int:
        """Blocks that the tick `tick` ticks from now takes: one per table that is just full."""
        return sum((member.tokens + tick) % self.size == 0 for member in self.truth.values())

    @rule(ticks=st.integers(0, 40), skip=st.integers(0, 3))
    def blocks_are_counted_as_tables_would_grow(self, ticks: int, skip: int) -> None:
        grown = sum(
            -(-(member.tokens + skip + ticks) // self.size)
            - -(-(member.tokens + skip) // self.size)
            for member in self.truth.values()
        )
        assert self.set.blocks(ticks, skip) == grown
        assert grown == sum(self._taken(tick) for tick in range(skip, skip + ticks))

    @rule()
    def what_may_still_come_out_is_the_sum_over_the_members(self) -> None:
        left = [made.allowed - (self.ticks - made.joined) for made in self.truth]
        assert self.set.remaining(1.0) == sum(min(tokens, MOST) for tokens in left)

    @rule(free=st.integers(0, 20), ticks=st.integers(0, 40))
    def affords_is_the_last_tick_before_the_blocks_are_short(self, free: int, ticks: int) -> None:
        needs = [sum(self._taken(tick) for tick in range(1, 1 + n)) for n in range(ticks + 1)]
        assert self.set.affords(free, ticks) == max(
            n for n, need in enumerate(needs) if need <= free
        )


def test_the_sums_hold_after_any_sequence() -> None:
    """Join, tick, leave, come back, in any order."""
    run_state_machine_as_test(
        Decoding, settings=settings(max_examples=150, stateful_step_count=30, deadline=None)
    )


def test_a_member_takes_a_block_when_all_its_blocks_are_full() -> None:
    """With 4 tokens a block, 6 tokens in the cache take the third block at the third tick."""
    decodes = DecodeSet(4)
    decodes.join(request(0, 6), 100)
    assert [decodes.blocks(1, skip) for skip in range(6)] == [0, 0, 1, 0, 0, 0]
    decodes.advance(2)
    assert [decodes.blocks(ticks) for ticks in range(6)] == [0, 1, 1, 1, 1, 2]
    assert decodes.context == 8


def test_affords_leaves_out_the_tick_that_is_paid() -> None:
    """Three members fill up at ticks 0, 1 and 1: after tick 0 no block is needed but at tick 1."""
    decodes = DecodeSet(4)
    for id, tokens in enumerate((4, 3, 3)):
        decodes.join(request(id, tokens), 100)
    assert decodes.affords(0, 10) == 0
    assert decodes.affords(1, 10) == 0
    assert decodes.affords(2, 10) == 3  # ticks 1, 2 and 3; the fourth needs one again
    assert decodes.affords(2, 2) == 2


def test_those_who_end_together_come_in_order_of_admission() -> None:
    """In the order of the running list, not of joining."""
    decodes = DecodeSet(4)
    one, two, three = (
        request(0, 5, admission=2),
        request(1, 5, admission=0),
        request(2, 5, admission=1),
    )
    for member, ticks in ((one, 3), (two, 3), (three, 4)):
        decodes.join(member, ticks)
    assert decodes.advance(2) == []
    assert decodes.ticks_to_end() == 1
    assert decodes.advance(1) == [two, one]


@pytest.mark.parametrize("anew", [False, True])
def test_two_who_left_and_came_back_end_once_each(anew: bool) -> None:
    """Two leave, one tick passes, they return with one token more: they end when they would have.

    Either on their old seats (the budget did not reach them) or on new ones (preempted).
    """
    decodes = DecodeSet(4)
    pair = [request(0, 5, admission=0), request(1, 7, admission=1)]
    for member in pair:
        decodes.join(member, 5)
    for member in pair:
        assert decodes.leave(member) == 0
    decodes.advance(1)
    for admission, member in enumerate(pair, 2):
        if anew:
            member.admission = admission
        decodes.join(member, 4)
    assert decodes.ticks_to_end() == 4
    assert decodes.advance(4) == pair


def test_a_member_that_has_ended_but_stays_ends_nothing() -> None:
    """A ghost ticks on: it costs, but no end is waited for."""
    decodes = DecodeSet(4)
    ghost, other = request(0, 5), request(1, 5)
    decodes.join(ghost, 1)
    decodes.join(other, 4)
    assert decodes.advance(1) == [ghost]
    assert decodes.ticks_to_end() == 3
    assert decodes.advance(3) == [other]
    assert (decodes.count, decodes.context, decodes.ticks_to_end()) == (2, 18, 0)
    assert decodes.leave(ghost) == 4
