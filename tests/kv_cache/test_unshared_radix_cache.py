"""A radix tree of which nobody shares anything, counted: as the tree itself."""

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

from simulator.core.request import Request
from simulator.kv_cache.radix_cache import RadixCache
from simulator.kv_cache.unshared_radix_cache import UnsharedRadixCache
from simulator.schedulers.sglang.overlap import OverlappedSgLang
from simulator.schedulers.sglang.scheduler import SgLang
from tests.engine.test_laws import assert_same_steps, clocks, workloads
from tests.support.engines import made, play

ROWS = ("request_rows", "pause_rows")
WHICH = st.integers(0, 3)
Cache = type[RadixCache] | type[UnsharedRadixCache]


def test_a_retracted_request_finds_its_prompt_until_that_is_evicted() -> None:
    """10 blocks, and a prompt of 4 with an answer of 2: the prompt stays, the answer does not.

    Another takes 8, for which the prompt has to go as a whole.
    """
    blocks = UnsharedRadixCache(11, 1)
    first, second = Request(0, 0.0, 4, 9), Request(1, 0.0, 8, 9)
    blocks.admit(first, blocks.match(first), 4)
    blocks.cache(first)
    first.generated = 3
    blocks.extend(first, 6)
    blocks.release(first)
    assert (blocks.free, blocks.hashed, len(blocks.match(first))) == (10, 4, 4)
    blocks.admit(second, blocks.match(second), 8)
    assert (blocks.free, blocks.hashed, len(blocks.match(first))) == (2, 0, 0)
    assert [*blocks._chains] == [second]


@pytest.mark.parametrize("cache", [RadixCache, UnsharedRadixCache])
def test_who_boards_may_evict_its_own_block(cache: Cache) -> None:
    """That of its last token, which it computes again; then the block is in the tree once more."""
    blocks = cache(11, 1)
    request, other = Request(0, 0.0, 1, 9), Request(1, 0.0, 9, 9)
    blocks.admit(request, blocks.match(request), 1)
    blocks.cache(request)
    blocks.release(request)
    for one in (other, request):
        blocks.admit(one, blocks.match(one), one.known)
    assert (blocks.free, blocks.hashed) == (0, 0)
    blocks.cache(request)
    assert blocks.hashed == 1


@pytest.mark.parametrize("cache", [RadixCache, UnsharedRadixCache])
def test_a_node_that_is_used_in_part_becomes_two_where_it_stands(cache: Cache) -> None:
    """Chunks of 5 and 1 blocks, of which 2 are used: the leaf that is evicted is still the 1.

    Then another prompt goes, which was used before those 2.
    """
    blocks = cache(11, 1)
    request, other = Request(0, 0.0, 6, 9), Request(1, 0.0, 4, 9)
    blocks.admit(request, blocks.match(request), 5)
    blocks.cache(request)
    blocks.extend(request, 6)
    blocks.cache(request)
    blocks.release(request)
    blocks.admit(other, blocks.match(other), 4)
    blocks.cache(other)
    blocks.release(other)
    blocks.find(request, 2)
    for room, left in ((1, 9), (2, 5)):
        blocks.make_room(room)
        assert blocks.hashed == left
    assert len(blocks.match(request)) == 5


class Twins(RuleBasedStateMachine):
    """The same calls to the tree and to the count of it."""

    @initialize(usable=st.integers(8, 24), size=st.sampled_from([1, 2, 4]))
    def start(self, usable: int, size: int) -> None:
        self.size = size
        self.trees = RadixCache(usable + 1, size), UnsharedRadixCache(usable + 1, size)
        self.running: list[tuple[Request, Request]] = []
        self.waiting: list[tuple[Request, Request]] = []
        self.count = 0

    @precondition(lambda self: len(self.running) + len(self.waiting) < 4)
    @rule(tokens=st.integers(1, 20))
    def arrive(self, tokens: int) -> None:
        self.waiting.append(
            (Request(self.count, 0.0, tokens, 99), Request(self.count, 0.0, tokens, 99))
        )
        self.count += 1

    @precondition(lambda self: self.waiting)
    @rule(which=WHICH, chunk=st.integers(1, 20), done=st.booleans())
    def enter(self, which: int, chunk: int, done: bool) -> None:
        pair = self.waiting[which % len(self.waiting)]
        hits = [tree.match(request) for tree, request in zip(self.trees, pair, strict=True)]
        assert len(hits[0]) == len(hits[1])
        tokens = min(pair[0].known, len(hits[0]) * self.size + chunk)
        need = {tree.missing(tokens, own) for tree, own in zip(self.trees, hits, strict=True)}
        assert len(need) == 1
        if max(need) > self.trees[0].free:
            return  # who was compared with a path has used it
        for tree, request, own in zip(self.trees, pair, hits, strict=True):
            tree.admit(request, own, tokens)
            if done:
                tree.cache(request)
        self.waiting.remove(pair)
        self.running.append(pair)

    @precondition(lambda self: self.waiting)
    @rule(which=WHICH, tokens=st.integers(0, 30))
    def look(self, which: int, tokens: int) -> None:
        """Compare what a waiting request begins with, as orders of the queue do."""
        pair = self.waiting[which % len(self.waiting)]
        blocks, _ = self.trees[0].find(pair[0], tokens)
        assert self.trees[1].find(pair[1], tokens) == blocks

    @precondition(lambda self: self.running)
    @rule(which=WHICH, chunk=st.integers(0, 9), answer=st.integers(0, 3), done=st.booleans())
    def go_on(self, which: int, chunk: int, answer: int, done: bool) -> None:
        pair = self.running[which % len(self.running)]
        for request in pair:
            request.generated += answer if not request.pending else 0
        tokens = min(pair[0].known, pair[0].computed + chunk)
        if -(-tokens // self.size) - -(-pair[0].computed // self.size) > self.trees[0].free:
            return
        for tree, request in zip(self.trees, pair, strict=True):
            tree.extend(request, tokens)
            if done:
                tree.cache(request)

    @precondition(lambda self: self.running)
    @rule(which=WHICH, tokens=st.integers(0, 20))
    def insert(self, which: int, tokens: int) -> None:
        """Put the first tokens into the tree, as when a later chunk is under way."""
        pair = self.running[which % len(self.running)]
        there = self.trees[0]._held[pair[0]].blocks * self.size
        for tree, request in zip(self.trees, pair, strict=True):
            tree.insert(request, min(there + tokens, request.computed))

    @precondition(lambda self: self.running)
    @rule(which=WHICH, back=st.sampled_from([True, True, False]))
    def leave(self, which: int, back: bool) -> None:
        pair = self.running.pop(which % len(self.running))
        for tree, request in zip(self.trees, pair, strict=True):
            request.finish = -1.0 if back else 0.0
            tree.release(request)
            assert request.computed == 0
        if back:
            self.waiting.append(pair)

    @rule(count=st.integers(1, 9))
    def make_room(self, count: int) -> None:
        for tree in self.trees:
            tree.make_room(count)

    @invariant()
    def as_much_is_free_and_in_the_tree(self) -> None:
        one, two = self.trees
        assert (one.free, one.hashed, one._pool) == (two.free, two.hashed, two._pool)


@pytest.mark.medium
def test_the_same_calls_have_the_same_outcome() -> None:
    """Requests board, go on, are put into the tree, retracted and evicted from, in any order."""
    run_state_machine_as_test(
        Twins, settings=settings(max_examples=80, stateful_step_count=50, deadline=None)
    )


@st.composite
def trees(draw: st.DrawFn) -> Callable[[Cache], SgLang]:
    """SGLang's schedulers, mostly with little memory, with the one or the other tree."""
    kind = draw(st.sampled_from([SgLang, OverlappedSgLang, OverlappedSgLang]))
    size = draw(st.sampled_from([1, 1, 2, 4]))
    options: dict[str, object] = {
        "max_num_seqs": draw(st.integers(1, 8)),
        "max_num_batched_tokens": draw(st.integers(size, 48)),
        "max_model_len": 64,
        "max_new_tokens": draw(st.sampled_from([None, "exact", 7, 40])),
        "schedule_conservativeness": draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        "retract_decode_steps": draw(st.sampled_from([20, 2])),
        "enable_mixed_chunk": draw(st.booleans()),
        "ignore_eos": draw(st.booleans()),
        "order": draw(st.sampled_from(["fcfs", "lof", "random"])),
    }
    if options["order"] != "random" and draw(st.booleans()):
        options["enable_priority_scheduling"] = True
        options["priority_scheduling_preemption_threshold"] = draw(st.sampled_from([0, 1]))
    blocks = 2 + draw(st.integers(40, 130)) // size
    return lambda cache: made(kind, cache(blocks, size), **options)


@given(workloads(), trees(), clocks, st.booleans())
@settings(max_examples=100, deadline=None)
def test_runs_are_those_with_the_tree_to_the_last_bit(load, make, clock, leap) -> None:
    """The same steps, requests and retractions, and as much in the tree after each."""
    load.segments = None
    one, two = make(RadixCache), make(UnsharedRadixCache)
    tree, counted = play(load, one, clock, leap=False)[0], play(load, two, clock, leap=leap)[0]
    assert_same_steps(counted, tree)
    for rows in ROWS:
        assert getattr(counted, rows) == getattr(tree, rows), rows
    assert not one.running
    assert not two.running
    assert one.blocks.hashed == two.blocks.hashed
    assert one.blocks._pool == two.blocks._pool
    assert two.blocks.free == two.blocks.usable


@pytest.mark.parametrize("options", [{"order": "lpm"}, {"radix_eviction_policy": "lfu"}])
def test_orders_by_the_tree_and_other_evictions_want_the_tree(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="UnsharedRadixCache"):
        made(SgLang, UnsharedRadixCache(11, 1), **options)  # type: ignore[arg-type]
