"""Block tables of groups of layers, by hand; what vLLM does: `tests/conformance`."""

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
from simulator.core.request import Request, Segments, by_admission
from simulator.kv_cache.block_manager import BlockManager
from simulator.kv_cache.hybrid_manager import GroupHits, HybridManager
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.kv_cache.test_block_manager import ask, contents
from tests.support.engines import made, play, workload


def hybrid(blocks: int, windows: list[int], *, caching: bool = True) -> HybridManager:
    return HybridManager(blocks, 4, caching, windows=windows, max_in_flight=64, max_model_len=64)


def prompt(tokens: int, number: int = 0) -> Request:
    """Make a request that begins as all others do."""
    return Request(number, 0.0, tokens, 1, segments=(("a", tokens),))


def test_a_request_holds_the_blocks_of_its_window_while_it_runs() -> None:
    """Prompt and window of 8, blocks of 4: a third is taken, and the first given back at 12."""
    blocks = hybrid(50, [8], caching=False)
    log, _ = play(workload((0, 8, 10)), Scheduler(blocks))
    assert log.steps["blocks_used"].tolist() == [2, 3, 3, 3, 2, 3, 3, 3, 2, 3]
    assert log.steps["kv_tokens"].tolist() == [8, 9, 10, 11, 8, 9, 10, 11, 8, 9]
    assert log.requests["finish"].tolist() == [10]
    assert blocks.free == 49


def test_with_a_step_in_flight_a_block_leaves_one_step_later() -> None:
    """The step that computes the twelfth token still reads the first block in flight."""
    blocks = hybrid(50, [8])
    log, _ = play(workload((0, 8, 10)), AsyncScheduler(blocks))
    assert log.steps["blocks_used"].tolist()[:6] == [2, 3, 3, 3, 3, 3]
    assert blocks.free == 49


def test_a_prompt_in_flight_keeps_its_blocks_for_one_step() -> None:
    """24 tokens in 6 blocks, a window of 8: 4 leave before the 25th token; if it is in flight as
    yet, before the 26th."""
    for kind, used in ((Scheduler, [6, 3, 3, 3]), (AsyncScheduler, [6, 7, 3, 3])):
        log, _ = play(workload((0, 24, 4)), kind(hybrid(50, [8])))
        assert log.steps["blocks_used"].tolist() == used


def found(prompts: list[Segments], windows: list[int], retention: int | None) -> list[int]:
    """Return the tokens that prompts, one after the other, find of those before; blocks of 4."""
    limits = {"max_in_flight": 64, "max_model_len": 64}
    blocks = HybridManager(
        99, 4, True, windows=windows, prefix_cache_retention_interval=retention, **limits
    )
    scheduler, cached = made(Scheduler, blocks, max_num_seqs=4, max_num_batched_tokens=64), []
    for number, segments in enumerate(prompts):
        tokens = sum(count for _, count in segments)
        request = Request(number, 0.0, tokens, 1, segments=segments)
        scheduler.add(request)
        scheduler.commit(scheduler.schedule(float(number)), [number + 0.5])
        cached.append(request.cached)
    assert blocks.free == 98
    return cached


@pytest.mark.parametrize(
    ("retention", "cached"),
    [
        (None, [0, 40, 24, 24]),
        (0, [0, 40, 0, 24]),  # the third prompt branches at 24, which the fourth then finds
        (16, [0, 40, 16, 24]),
        (40, [0, 40, 0, 24]),
    ],
)
def test_of_a_window_the_end_and_the_junctions_are_cached(
    retention: int | None, cached: list[int]
) -> None:
    """A window of 8 needs two blocks before the end of a hit."""
    whole = (("a", 42),)
    branch = (("a", 24), ("b", 10))
    assert found([whole, whole, branch, (("a", 24), ("c", 10))], [0, 8], retention) == cached
    if retention is None:
        assert found([whole, branch], [8], retention) == [0, 24]


@pytest.mark.parametrize("retention", [None, 0, 8])
def test_of_a_window_of_one_token_nothing_is_cached(retention: int | None) -> None:
    """No block before the next query is seen by it, and vLLM finds no hit without one."""
    whole = (("a", 42),)
    assert found([whole, whole], [0, 1], retention) == [0, 0]
    assert found([whole, whole], [0, 2], retention) == [0, 40]


def test_groups_hold_what_each_of_them_needs() -> None:
    """The same with two full groups beside: 2 * 2, 3 or 4 more; too little memory is told."""
    log, _ = play(workload((0, 8, 10)), Scheduler(hybrid(50, [0, 8, 0])))
    assert log.steps["blocks_used"].tolist() == [6, 9, 9, 9, 8, 11, 11, 11, 10, 13]
    small = Scheduler(hybrid(15, [0, 8, 0]))
    assert not small.fits(Request(0, 0.0, 8, 10))  # it wants up to 3 * 5


def test_a_hit_has_the_blocks_that_the_next_token_sees() -> None:
    """Full attention has all five, a window of 8 tokens two; the other three nobody takes."""
    blocks = hybrid(50, [8, 0, 8])
    first = prompt(24)
    blocks.admit(first, blocks.match(first), 24)
    blocks.release(first)
    assert blocks.free == 49
    assert blocks.hashed == 18
    again = prompt(24, 1)
    hits = blocks.match(again)
    assert isinstance(hits, GroupHits)
    assert [sum(map(bool, table)) for table in hits.tables] == [2, 5, 2]
    assert blocks.missing(24, hits) == 3 + 9  # new ones, and those that leave the free list
    blocks.admit(again, hits, 24)
    assert (again.computed, blocks.free) == (24, 49 - 12)
    other = prompt(24, 2)
    blocks.admit(other, blocks.match(other), 24)
    assert (blocks.shared, blocks.free) == (9, 49 - 15)
    blocks.release(again)
    blocks.release(other)
    assert (blocks.shared, blocks.free) == (0, 49)


def test_a_long_prefix_is_found_where_a_shorter_one_is_not() -> None:
    """What left the window first is evicted first: blocks that a long prompt needs not."""
    blocks = hybrid(13, [0, 8])
    first = prompt(24)
    blocks.admit(first, blocks.match(first), 8)
    for tokens in (16, 24):
        blocks.extend(first, tokens)
    assert blocks.free == 2  # of 12: six for full attention, two left the window of two and more
    other = Request(1, 0.0, 4, 1)
    blocks.admit(other, blocks.match(other), 4)
    assert blocks.free == 0
    blocks.release(first)
    assert len(blocks.match(prompt(24, 2))) == 5
    assert len(blocks.match(prompt(13, 3))) == 0


def test_one_block_is_found_where_the_next_token_sees_no_other() -> None:
    """A window of 5: the first block has left it and is somebody else's, the second is there."""
    blocks = hybrid(5, [5])
    first, other = prompt(12), Request(1, 0.0, 8, 1)
    blocks.admit(first, blocks.match(first), 8)
    blocks.extend(first, 12)
    blocks.admit(other, blocks.match(other), 8)
    assert blocks.free == 0
    blocks.release(first)
    assert [len(blocks.match(prompt(tokens, 2))) for tokens in (5, 9, 13)] == [0, 2, 3]


@pytest.mark.parametrize("windows", [[0], [0, 8, 16]])
def test_windows_are_of_one_length(windows: list[int]) -> None:
    with pytest.raises(ValueError, match="windows: must be 0 or one length, not"):
        hybrid(20, windows)


class Alike(RuleBasedStateMachine):
    """The same calls, with decodes as a set and one by one; a window that nothing leaves is none.

    So a third has no windows at all where they are that wide.
    """

    @initialize(
        usable=st.integers(12, 40),
        size=st.sampled_from([1, 2, 4]),
        windows=st.sampled_from([[5], [0, 5], [7, 0, 7], [1000], [1000]]),
        splits=st.booleans(),
    )
    def start(self, usable: int, size: int, windows: list[int], splits: bool) -> None:
        limits = {"windows": windows, "max_in_flight": 64, "max_model_len": 900}
        self.books: list[BlockManager] = [
            HybridManager(usable + 1, size, True, **limits) for _ in range(2)
        ]
        if windows == [1000]:
            self.books.append(BlockManager(usable + 1, size, True))
        for book in self.books:
            book.splits_free_list = splits
        self.decodes = [DecodeSet(size, by_phase=True), None, DecodeSet(size, by_phase=True)]
        self.size, self.groups, self.ids = size, len(windows), 0
        self.running: list[list[Request]] = []
        self.decoding: list[list[Request]] = []
        self.gone: list[list[Request]] = []

    @rule(segments=contents(), chunk=st.integers(1, 20), again=st.booleans())
    def enter(self, segments: Segments, chunk: int, again: bool) -> None:
        if again and self.gone:
            alike = self.gone.pop()
        else:
            alike = [ask(*segments, id=self.ids) for _ in self.books]
            self.ids += 1
        hits = [book.match(r) for book, r in zip(self.books, alike, strict=True)]
        assert len({len(found) for found in hits}) == 1
        tokens = min(alike[0].known, len(hits[0]) * self.size + chunk)
        need = {book.missing(tokens, found) for book, found in zip(self.books, hits, strict=True)}
        assert len(need) == 1
        if max(need) > self.books[0].free:
            self.gone.append(alike)
            return
        for book, request, found in zip(self.books, alike, hits, strict=True):
            book.admit(request, found, tokens)
        self.running.append(alike)
        self._settle(alike)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), chunk=st.integers(1, 20))
    def go_on(self, which: int, chunk: int) -> None:
        alike = self.running[which % len(self.running)]
        tokens = min(alike[0].known, alike[0].computed + chunk)
        if alike in self.decoding or self.books[0].taken(alike[0], tokens) > self.books[0].free:
            return
        for book, request in zip(self.books, alike, strict=True):
            book.extend(request, tokens)
        self._settle(alike)

    def _settle(self, alike: list[Request]) -> None:
        if alike[0].pending:
            return
        self.decoding.append(alike)
        for decodes, request in zip(self.decodes, alike, strict=False):
            request.generated += 1
            if decodes is not None:
                decodes.join(request, 1000)

    @precondition(lambda self: self.decoding)
    @rule(ticks=st.integers(1, 9))
    def decode(self, ticks: int) -> None:
        for _ in range(ticks):
            if len(self.decoding) * self.groups > self.books[0].free:
                return
            for book, decodes in zip(self.books, self.decodes, strict=False):
                if decodes is not None:
                    book.take_ticks(decodes, 1)
                    decodes.advance(1)
            for request in sorted((alike[1] for alike in self.decoding), key=by_admission):
                self.books[1].extend(request, request.computed + 1)
                request.generated += 1

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), back=st.booleans())
    def leave(self, which: int, back: bool) -> None:
        alike = self.running.pop(which % len(self.running))
        for book, decodes, request in zip(self.books, self.decodes, alike, strict=False):
            if decodes is not None and request.joined >= 0:
                request.generated += decodes.leave(request)
            book.release(request)
            assert request.computed == 0
        if alike in self.decoding:
            self.decoding.remove(alike)
        if back:
            self.gone.append(alike)

    @invariant()
    def they_are_alike(self) -> None:
        """The free list in its order, what the prefix cache lists, and all block tables."""
        one, *others = self.books
        for other in others:
            assert (one.free, one.shared, one._blank) == (other.free, other.shared, other._blank)
            assert [*one._idle] == [*other._idle]
            assert (one._block_of, one._others_of) == (other._block_of, other._others_of)
        for first, second, *third in self.running:
            tables = self.books[0]._tables[first]
            assert tables == self.books[1]._tables[second]
            assert not third or tables == [third[0].blocks]


@pytest.mark.medium
def test_a_set_of_decodes_is_its_members_and_a_wide_window_is_none() -> None:
    """Blocks with the same names, given out and found in the same order."""
    run_state_machine_as_test(
        Alike, settings=settings(max_examples=80, stateful_step_count=40, deadline=None)
    )
