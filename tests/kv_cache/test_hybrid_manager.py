"""Block tables of groups of layers, by hand; what vLLM does: `tests/conformance`."""

import pytest

from simulator.core.request import Request
from simulator.kv_cache.hybrid_manager import GroupHits, HybridManager
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.support.engines import play, workload


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


@pytest.mark.parametrize("windows", [[0], [0, 8, 16]])
def test_windows_are_of_one_length(windows: list[int]) -> None:
    with pytest.raises(ValueError, match="windows: must be 0 or one length, not"):
        hybrid(20, windows)
