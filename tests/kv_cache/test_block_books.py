"""The books of the block manager: they balance after any sequence of calls."""

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
from simulator.core.request import Request, Segments
from simulator.kv_cache.block_manager import BlockManager
from tests.kv_cache.test_block_manager import ask, contents


class Books(RuleBasedStateMachine):
    """Requests board, go on, decode together, leave and come back."""

    @initialize(usable=st.integers(4, 24), size=st.sampled_from([1, 2, 4]), caching=st.booleans())
    def start(self, usable: int, size: int, caching: bool) -> None:
        self.blocks = BlockManager(usable + 1, size, caching)
        self.size = size
        self.running: list[Request] = []
        self.gone: list[Request] = []
        self.decodes = DecodeSet(size, by_phase=True)
        self.ids = 0

    def _held(self) -> dict[int, int]:
        """How many tables each block is in."""
        held: dict[int, int] = {}
        for request in self.running:
            for block in request.blocks or ():
                held[block] = held.get(block, 0) + 1
        return held

    @rule(segments=contents(), chunk=st.integers(1, 40), again=st.booleans())
    def enter(self, segments: Segments, chunk: int, again: bool) -> None:
        if again and self.gone:
            request = self.gone.pop()
        else:
            request = ask(*segments, id=self.ids)
            request.admission = self.ids
            self.ids += 1
        hits = self.blocks.match(request)
        start = len(hits) * self.size
        tokens = min(request.known, start + chunk)
        assert start < request.known
        free = self.blocks.free
        need = self.blocks.missing(tokens, hits)
        if need > free:
            self.gone.append(request)
            return
        self.blocks.admit(request, hits, tokens)
        assert self.blocks.free == free - need
        self.running.append(request)
        self._settle(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunk=st.integers(1, 40))
    def go_on(self, data: st.DataObject, chunk: int) -> None:
        request = data.draw(st.sampled_from([r for r in self.running if r.joined < 0] or [None]))
        if request is None:
            return
        tokens = min(request.known, request.computed + chunk)
        need = -(-tokens // self.size) - -(-request.computed // self.size)
        if need <= self.blocks.free:
            self.blocks.extend(request, tokens)
            self._settle(request)

    def _settle(self, request: Request) -> None:
        if not request.pending:
            request.generated += 1
            self.decodes.join(request, 1000)

    @rule(ticks=st.integers(1, 9), cut=st.integers(0, 9))
    def decode(self, ticks: int, cut: int) -> None:
        """In one go or in two."""
        if not self.decodes.count or self.decodes.blocks(ticks) > self.blocks.free:
            return
        cut = min(cut, ticks)
        free = self.blocks.free
        need = self.decodes.blocks(ticks)
        if cut:
            self.blocks.take_ticks(self.decodes, cut)
        if ticks > cut:
            self.blocks.take_ticks(self.decodes, ticks - cut, skip=cut)
        self.decodes.advance(ticks)
        assert self.blocks.free == free - need

    @precondition(lambda self: self.running)
    @rule(data=st.data(), back=st.booleans())
    def leave(self, data: st.DataObject, back: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        if request.joined >= 0:
            request.generated += self.decodes.leave(request)
        self.running.remove(request)
        self.blocks.release(request)
        assert (request.computed, request.blocks) == (0, None)
        if back:
            self.gone.append(request)

    @invariant()
    def every_block_is_free_or_in_a_table(self) -> None:
        held = self._held()
        blocks = self.blocks
        assert 0 not in held
        assert blocks.free + len(held) == blocks.usable
        assert blocks.shared == sum(held.values()) - len(held)
        free = [*blocks._blank, *blocks._idle]
        assert len(free) == len(set(free)) == blocks.free
        assert not held.keys() & set(free)

    @invariant()
    def tables_are_as_long_as_their_tokens_need(self) -> None:
        for request in self.running:
            ticks = self.decodes.tick - request.joined if request.joined >= 0 else 0
            assert len(request.blocks or ()) == -(-(request.computed + ticks) // self.size)

    @invariant()
    def the_prefix_cache_knows_the_blocks_it_lists(self) -> None:
        first, others = self.blocks._block_of, self.blocks._others_of
        listed = {block: key for key, block in first.items()}
        listed |= {block: key for key, more in others.items() for block in more}
        known = dict(self.blocks._idle)
        for request in self.running:
            count = self.blocks._hashed[request]
            known |= zip(request.blocks[:count], request.hashes or (), strict=False)
        assert listed == known
        assert len(listed) == len(first) + sum(len(more) for more in others.values())
        assert all(others.values())
        assert others.keys() <= first.keys()
        assert not set(self.blocks._blank) & known.keys()
        assert set(self.blocks._idle) <= known.keys()


def test_the_books_balance_after_any_sequence() -> None:
    """Blocks are neither lost nor given twice, and the cache lists what it has."""
    run_state_machine_as_test(
        Books, settings=settings(max_examples=120, stateful_step_count=30, deadline=None)
    )
