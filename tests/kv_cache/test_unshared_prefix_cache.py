"""A prefix cache where everybody finds but his own blocks: as with named blocks, counted."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
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
from simulator.core.log import Log
from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockManager
from simulator.kv_cache.unshared_prefix_cache import UnsharedPrefixCache
from simulator.policies.orders import SJF, Priority
from simulator.policies.preemptive import Deadline, Preemptive
from simulator.schedulers.trtllm import POLICIES, TrtLlm
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.dynamic import DynamicScheduler
from simulator.schedulers.vllm.rules import families, rules_of
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.engine.test_laws import PRICES, assert_same_steps, clocks, workloads
from tests.support.engines import made, play

ROWS = ("request_rows", "pause_rows", "swap_rows")


def tokens(log: Log) -> dict[int, list[float]]:
    """Return by request when its tokens came out."""
    times: dict[int, list[float]] = {}
    for run in log.runs:
        first, ticks = int(run["first_tick"]), int(run["ticks"])
        ends = log.tick_ends[first : first + ticks]
        times.setdefault(int(run["id"]), []).extend([float(run["start"]), *ends])
    return times


def ask(tokens: int) -> Request:
    return Request(0, 0.0, tokens, 100)


def board(blocks: UnsharedPrefixCache, request: Request) -> int:
    """Let a request compute all that is known of it; return the blocks it found."""
    hits = blocks.match(request)
    blocks.admit(request, hits, request.known)
    return len(hits)


def test_a_request_finds_what_others_have_left_of_its_blocks() -> None:
    """Of 10 blocks, 10 tokens take 3: two with a hash and one without. Then another takes 9.

    These are the 7 that nobody had, the one without a hash, and the last of the other two.
    """
    blocks = UnsharedPrefixCache(11, 4)
    first, second = ask(10), ask(33)
    assert board(blocks, first) == 0
    first.generated = 1
    blocks.release(first)
    assert (blocks.free, len(blocks.match(first)), first.computed) == (10, 2, 0)
    assert board(blocks, second) == 0
    assert (blocks.free, len(blocks.match(first))) == (1, 1)
    blocks.release(second)
    assert board(blocks, first) == 1
    assert blocks.free == 7


def test_nobody_finds_the_blocks_of_another() -> None:
    blocks = UnsharedPrefixCache(11, 4)
    first, second = ask(9), ask(9)
    board(blocks, first)
    blocks.release(first)
    assert board(blocks, second) == 0


@pytest.mark.parametrize("preempted", [False, True])
def test_a_request_that_has_ended_is_forgotten(preempted: bool) -> None:
    """Its blocks stay where they are until somebody takes them."""
    blocks = UnsharedPrefixCache(6, 4)
    first = ask(8)
    board(blocks, first)
    if preempted:
        blocks.release(first)
        assert board(blocks, first) == 1  # of two: it computes its last token again
    first.finish = 0.5
    blocks.release(first)
    assert not blocks.match(first)
    assert board(blocks, ask(17)) == 0
    assert blocks.free == 0
    assert not blocks._freed_by


def test_of_two_equal_blocks_the_elder_is_found() -> None:
    """A request that goes before its first token comes has to compute its last block again.

    Both lie in the free list when it goes once more, the elder before another's two blocks. Back
    again it takes the elder, so that who needs all blank blocks and two more gets the other's.
    """
    blocks = UnsharedPrefixCache(11, 1)
    first, other = ask(3), ask(2)
    assert board(blocks, first) == 0
    blocks.release(first)
    assert board(blocks, first) == 2
    assert board(blocks, other) == 0
    blocks.release(other)
    first.generated = 1
    blocks.release(first)
    assert blocks.match(other)
    blocks.admit(first, blocks.match(first), 3)
    assert blocks.free == 7
    board(blocks, ask(6))
    assert not blocks.match(other)


class Twins(RuleBasedStateMachine):
    """The same calls to named and to unnamed blocks."""

    @initialize(
        usable=st.integers(6, 60),
        size=st.sampled_from([1, 2, 4]),
        delay=st.booleans(),
        splits=st.booleans(),
    )
    def start(self, usable: int, size: int, delay: bool, splits: bool) -> None:
        self.size = size
        self.blocks = BlockManager(usable + 1, size, True), UnsharedPrefixCache(usable + 1, size)
        self.decodes = DecodeSet(size, by_phase=True), DecodeSet(size)
        for blocks in self.blocks:
            blocks.delay = int(delay)
            blocks.splits_free_list = splits
        self.running: list[tuple[Request, Request]] = []
        self.waiting: list[tuple[Request, Request]] = []
        self.count = 0

    @precondition(lambda self: len(self.running) + len(self.waiting) < 4)
    @rule(tokens=st.integers(1, 20))
    def arrive(self, tokens: int) -> None:
        one, two = (Request(self.count, 0.0, tokens, 1000) for _ in range(2))
        one.admission = two.admission = self.count
        self.waiting.append((one, two))
        self.count += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), chunk=st.integers(1, 30), emit=st.booleans())
    def enter(self, data: st.DataObject, chunk: int, emit: bool) -> None:
        pair = data.draw(st.sampled_from(self.waiting))
        named, own = (b.match(r) for b, r in zip(self.blocks, pair, strict=True))
        assert len(named) == len(own)
        tokens = min(pair[0].known, len(own) * self.size + chunk)
        need = self.blocks[0].missing(tokens, named)
        assert self.blocks[1].missing(tokens, own) == need
        if need > self.blocks[0].free:
            return
        for blocks, request, hits in zip(self.blocks, pair, (named, own), strict=True):
            blocks.admit(request, hits, tokens)
        self.waiting.remove(pair)
        self.running.append(pair)
        self._settle(pair, emit)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunk=st.integers(0, 30), emit=st.booleans())
    def go_on(self, data: st.DataObject, chunk: int, emit: bool) -> None:
        pair = data.draw(st.sampled_from(self.running))
        if pair[0].joined >= 0:
            return
        tokens = min(pair[0].known, pair[0].computed + chunk)
        if -(-tokens // self.size) - -(-pair[0].computed // self.size) > self.blocks[0].free:
            return
        for blocks, request in zip(self.blocks, pair, strict=True):
            blocks.extend(request, tokens)
        self._settle(pair, emit)

    def _settle(self, pair: tuple[Request, Request], emit: bool) -> None:
        """Let a request whose tokens are computed decode; or it may go before its token comes."""
        if emit and not pair[0].pending:
            for decodes, request in zip(self.decodes, pair, strict=True):
                request.generated += 1
                request.unknown = 0
                decodes.join(request, 1000)

    @precondition(lambda self: self.decodes[0].count)
    @rule(ticks=st.integers(1, 9))
    def decode(self, ticks: int) -> None:
        taken = self.decodes[0].blocks(ticks)
        if taken <= self.blocks[0].free:
            found = self._found()
            for blocks, decodes in zip(self.blocks, self.decodes, strict=True):
                blocks.take_ticks(decodes, ticks)
                decodes.advance(ticks)
            for before, after in zip(found, self._found(), strict=True):
                assert before - taken <= after <= before

    def _found(self) -> list[int]:
        """Count what each who waits would find: the blocks that it lacks may not get fewer."""
        return [len(self.blocks[1].match(own)) for _, own in self.waiting]

    @precondition(lambda self: self.decodes[0].count)
    @rule(data=st.data(), learn=st.booleans())
    def step_out(self, data: st.DataObject, learn: bool) -> None:
        """Leave the decode set, as when the running list is walked."""
        pair = data.draw(st.sampled_from([p for p in self.running if p[0].joined >= 0]))
        for blocks, decodes, request in zip(self.blocks, self.decodes, pair, strict=True):
            request.generated += decodes.leave(request)
            request.unknown = blocks.delay
            if learn:
                request.unknown = 0
                blocks.register_last(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), back=st.sampled_from([True] * 9 + [False]))
    def leave(self, data: st.DataObject, back: bool) -> None:
        pair = data.draw(st.sampled_from(self.running))
        self.running.remove(pair)
        for blocks, decodes, request in zip(self.blocks, self.decodes, pair, strict=True):
            if request.joined >= 0:
                request.generated += decodes.leave(request)
            request.unknown = 0
            request.finish = -1.0 if back else 0.0
            blocks.release(request)
        if back:
            self.waiting.append(pair)

    @invariant()
    def the_free_lists_are_alike(self) -> None:
        """Whose block is next, and which, where somebody may come back for it."""
        named, own = self.blocks
        assert named.free == own.free
        assert named.shared == own.shared == 0
        of = {}
        for request, _ in (*self.running, *self.waiting):
            of.update({key: (request.id, i) for i, key in enumerate(request.hashes or ())})
        alive = {number for number, _ in of.values()}
        listed = [(-1, 0)] * (own.free - own._cached)
        for place in own._idle:
            number = -1 if place.owner is None else place.owner.id
            for first, end in reversed(place.parts):
                listed += [(number, i) for i in reversed(range(first, end))]
        found = [of.get(key) for key in named._idle.values()]
        assert [None] * len(named._blank) + found == [
            (number, i) if number in alive else None for number, i in listed
        ]


def test_requests_that_have_ended_take_no_memory() -> None:
    """However large the pool, their blocks are one place in the free list."""
    blocks = UnsharedPrefixCache(1_000_000, 4)
    for number in range(1000):
        request = Request(number, 0.0, 32, 4)
        blocks.admit(request, (), 32)
        request.finish = 1.0
        blocks.release(request)
    assert len(blocks._idle) == 1
    assert blocks.free == blocks.usable


@pytest.mark.medium
def test_blocks_without_names_are_given_out_as_those_with() -> None:
    """Any sequence of calls leaves the same free list, and requests find as much again."""
    run_state_machine_as_test(
        Twins, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )


@st.composite
def caches(draw: st.DrawFn) -> Callable[[bool], Scheduler]:
    """Schedulers with or without names of blocks, mostly with little memory."""
    seats = draw(st.integers(1, 8))
    limits = {
        "max_num_seqs": seats,
        "max_num_batched_tokens": draw(st.integers(max(seats, 3), 48)),
        "max_model_len": 64,
    }
    kind = draw(st.sampled_from([Scheduler, AsyncScheduler, AsyncScheduler, None, TrtLlm]))
    if kind is TrtLlm:
        limits["capacity_scheduler_policy"] = draw(st.sampled_from(POLICIES))
        limits["max_new_tokens"] = "exact"
        limits["enable_chunked_prefill"] = True
    else:
        limits["long_prefill_token_threshold"] = draw(st.sampled_from([0, 0, 3, 7]))
        limits["prefill_schedule_interval"] = draw(st.sampled_from([1, 1, 3]))
        limits["scheduler_reserve_full_isl"] = draw(st.booleans())
        limits["watermark"] = draw(st.sampled_from([0.0, 0.0, 0.2]))
        limits["reserve_output_tokens"] = draw(st.sampled_from([None, None, 5, "max_tokens"]))
        limits["rules"] = draw(
            st.sampled_from([rules_of(release) for release in [*families().values()][1:]])
        )
        policies = [None, Priority, SJF] if kind else [Preemptive, lambda: Deadline(slack=500)]
        policy = draw(st.sampled_from(policies))
        if kind is not AsyncScheduler:
            limits["swap_blocks"] = draw(st.sampled_from([0, 0, 8, 1000]))
            limits["swap_prices"] = draw(st.sampled_from([None, PRICES]))
    size = draw(st.sampled_from([1, 2, 4, 16]))
    blocks = 2 + draw(st.integers(48, 130)) // size

    def make(named: bool) -> Scheduler:
        memory = BlockManager(blocks, size, True) if named else UnsharedPrefixCache(blocks, size)
        if kind is TrtLlm:
            return made(kind, memory, **limits)
        return made(kind or DynamicScheduler, memory, policy=policy and policy(), **limits)

    return make


@given(workloads(), caches(), clocks, st.booleans())
@settings(max_examples=300, deadline=None)
def test_runs_are_the_same_to_the_last_bit(load, make, clock, leap) -> None:
    """Leaps without names, also while others wait, and each step with them.

    The same steps, requests, preemptions, copies, times of tokens.
    """
    load.segments = None
    named = play(load, make(True), clock, leap=False)[0]
    own = play(load, make(False), clock, leap=leap)[0]
    assert_same_steps(own, named)
    for rows in ROWS:
        assert getattr(named, rows) == getattr(own, rows), rows
    assert tokens(named) == tokens(own)
