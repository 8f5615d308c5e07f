"""The KV cache: vLLM's rules by hand, and its books over any sequence of calls."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request, Segments
from simulator.features.drafts.blocks import DraftBlocks
from simulator.kv_cache.block_hashes import known_hashes
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from tests.support.with_fields import with_fields

ids = count()


def ask(*segments: tuple[object, int], output: int = 100, id: int | None = None) -> Request:
    """A request whose prompt is `segments`."""
    made = next(ids) if id is None else id
    tokens = sum(n for _, n in segments)
    request = Request(made, 0.0, tokens, output, segments=tuple(segments))
    return with_fields(request, admission=made)


def board(blocks: BlockManager, request: Request, tokens: int | None = None) -> int:
    """Admit a request, all its known tokens or `tokens`; return how many were cached."""
    hits = blocks.match(request)
    blocks.admit(request, hits, request.known if tokens is None else tokens)
    return len(hits) * blocks.block_size


def generate(blocks: BlockManager, request: Request, tokens: int) -> None:
    """Bring out `tokens` tokens; the last one's KV is never computed."""
    for _ in range(tokens - 1):
        request.generated += 1
        blocks.extend(request, request.known)
    request.generated += 1


def manager(usable: int, size: int = 4) -> BlockManager:
    return BlockManager(usable + 1, size, prefix_caching=True)


# ---------------------------------------------------------------- counting


def test_the_null_block_is_nobodys() -> None:
    """Of 10 blocks, 9 are usable."""
    assert BlockCounter(10, 4).usable == BlockCounter(10, 4).free == 9
    assert BlockManager(10, 4, prefix_caching=True).free == 9


@pytest.mark.parametrize(("blocks", "size"), [(1, 4), (0, 4), (2, 0)])
def test_a_cache_without_a_usable_block_is_refused(blocks: int, size: int) -> None:
    """Also blocks without tokens."""
    with pytest.raises(ValueError, match=f"not {blocks} and {size}"):
        BlockCounter(blocks, size)
    BlockCounter(2, 1)


def test_a_counter_counts_the_blocks_that_tables_need() -> None:
    """5 tokens take 2 blocks of 4; up to 8 take no more; 9 take a third; all come back."""
    blocks, request = BlockCounter(10, 4), ask(("a", 20))
    assert blocks.match(request) == ()
    assert [blocks.missing(tokens, ()) for tokens in (1, 4, 5, 8)] == [1, 1, 2, 2]
    blocks.admit(request, (), 5)
    assert (blocks.free, request.computed) == (7, 5)
    blocks.extend(request, 8)
    assert blocks.free == 7
    blocks.extend(request, 9)
    assert (blocks.free, request.computed) == (6, 9)
    blocks.release(request)
    assert (blocks.free, request.computed) == (9, 0)


@pytest.mark.parametrize("kind", [BlockCounter, lambda n, s: BlockManager(n, s, False)])
def test_ticks_take_a_block_for_each_table_that_is_full(kind) -> None:
    """Two members with 4 and 6 tokens, blocks of 4: ticks 0, 2, 4, 6 take one each."""
    blocks = kind(20, 4)
    decodes = DecodeSet(4, by_phase=blocks.names_blocks)
    for tokens in (4, 6):
        request = ask(("a", tokens))
        blocks.admit(request, (), tokens)
        request.generated = 1
        decodes.join(request, 100)
    assert blocks.free == 16
    for left in (15, 15, 14, 14):
        blocks.take_ticks(decodes, 1)
        decodes.advance(1)
        assert blocks.free == left
    blocks.take_ticks(decodes, 1)
    assert blocks.free == 13
    blocks.take_ticks(decodes, 3, skip=1)
    decodes.advance(4)
    assert blocks.free == 12


# ---------------------------------------------------------------- the free list


def test_blocks_are_given_out_in_order() -> None:
    """A fresh cache: 1, 2, 3; block 0 is the null block."""
    blocks, request = manager(5), ask(("a", 9))
    board(blocks, request)
    assert request.blocks == [1, 2, 3]


def test_unhashed_blocks_go_to_the_head_last_first() -> None:
    """With caching off no block has a hash: after a table of three is freed, 3, 2, 1 come next."""
    blocks = BlockManager(7, 4, prefix_caching=False)
    first, second = ask(("a", 12)), ask(("b", 20))
    board(blocks, first)
    blocks.release(first)
    assert first.blocks is None
    board(blocks, second)
    assert second.blocks == [3, 2, 1, 4, 5]


def test_hashed_blocks_go_to_the_tail_and_the_unhashed_one_to_the_head() -> None:
    """10 tokens: blocks 1 and 2 are full and hashed, 3 is not: it is the next to be given out."""
    blocks = manager(5)
    first, second = ask(("a", 10)), ask(("b", 20))
    board(blocks, first)
    assert blocks.hashed == 2
    blocks.release(first)
    board(blocks, second)
    assert second.blocks == [3, 4, 5, 2, 1]


def test_the_least_recently_freed_prefix_is_evicted_first_and_from_its_end() -> None:
    """Two cached prompts of 3 blocks; the first is hit and freed again, so the second goes."""
    blocks = manager(6)
    one, two = ask(("a", 12)), ask(("b", 12))
    for request in (one, two):
        board(blocks, request)
    assert (one.blocks, two.blocks) == ([1, 2, 3], [4, 5, 6])
    blocks.release(one)
    blocks.release(two)
    again = ask(("a", 12))
    assert board(blocks, again) == 8  # 1 and 2; the last token needs a block of its own: 3
    assert again.blocks == [1, 2, 3]
    blocks.release(again)
    third = ask(("c", 8))
    board(blocks, third)
    assert third.blocks == [6, 5]
    assert len(blocks.match(ask(("b", 13)))) == 1
    assert len(blocks.match(ask(("a", 13)))) == 3


def test_an_evicted_block_is_found_no_more() -> None:
    """Taking a hashed block off the head of the list forgets its hash."""
    blocks = manager(3)
    first = ask(("a", 12))
    board(blocks, first)
    blocks.release(first)
    assert len(blocks.match(ask(("a", 13)))) == 3
    board(blocks, ask(("b", 3)))
    assert blocks.hashed == 2
    assert len(blocks.match(ask(("a", 13)))) == 2


def test_a_hit_takes_idle_blocks_out_of_the_free_list() -> None:
    """It needs the missing block and the two idle ones; in use by another, only the missing one."""
    blocks = manager(8)
    first = ask(("a", 8))
    board(blocks, first)
    blocks.release(first)
    second = ask(("a", 8), ("b", 4))
    hits = blocks.match(second)
    assert hits == [1, 2]
    assert blocks.missing(12, hits) == 3
    blocks.admit(second, hits, 12)
    assert (blocks.free, blocks.shared) == (5, 0)
    third = ask(("a", 8), ("c", 4))
    hits = blocks.match(third)
    assert blocks.missing(12, hits) == 1
    blocks.admit(third, hits, 12)
    assert (blocks.free, blocks.shared) == (4, 2)
    blocks.release(second)
    assert (blocks.free, blocks.shared) == (5, 0)
    blocks.release(third)
    assert blocks.free == 8


def test_a_block_shared_by_three_is_free_when_the_last_lets_go() -> None:
    """Reference counts, and table entries beyond the first of each block."""
    blocks = manager(8)
    users = [ask(("a", 4), ("own", 1)) for _ in range(3)]
    for user in users:
        board(blocks, user)
    assert (blocks.shared, blocks.free) == (2, 4)
    for user, shared, free in zip(users, (1, 0, 0), (5, 6, 8), strict=True):
        blocks.release(user)
        assert (blocks.shared, blocks.free) == (shared, free)


# ---------------------------------------------------------------- what is found


def test_the_last_token_is_always_computed() -> None:
    """A fully cached prompt of 8 hits one block of 4, one of 9 hits two, one of 4 none."""
    blocks = manager(9)
    board(blocks, ask(("a", 9)))
    assert [board(blocks, ask(("a", tokens))) for tokens in (4, 5, 8, 9)] == [0, 4, 4, 8]


def test_two_requests_admitted_in_one_step_share_a_prefix() -> None:
    """A block can be hit as soon as it is scheduled, chunk by chunk."""
    blocks = manager(9)
    first = ask(("a", 20))
    board(blocks, first, tokens=7)
    assert board(blocks, ask(("a", 20)), tokens=8) == 4
    blocks.extend(first, 11)
    assert len(blocks.match(ask(("a", 20)))) == 2


def test_with_caching_off_nothing_is_shared() -> None:
    """Names alone share nothing."""
    blocks = BlockManager(20, 4, prefix_caching=False)
    for _ in range(2):
        assert board(blocks, ask(("a", 9))) == 0
    assert (blocks.hashed, blocks.free, blocks.shared) == (0, 13, 0)


def test_a_prompt_without_contents_is_shared_with_nobody() -> None:
    """Two prompts of equal length, contents unknown; the request itself finds its own again."""
    blocks = manager(20)
    first, second = Request(1, 0.0, 9, 5), Request(2, 0.0, 9, 5)
    assert board(blocks, first) == board(blocks, second) == 0
    blocks.release(first)
    assert board(blocks, first) == 8


def test_an_equal_block_behind_another_prefix_is_not_hit() -> None:
    """Hashes are chained: block 2 of `a b` is not block 2 of `c b`; nor does it move forward."""
    blocks = manager(20)
    board(blocks, ask(("a", 4), ("b", 4), ("x", 1)))
    assert board(blocks, ask(("c", 4), ("b", 4), ("x", 1))) == 0
    assert board(blocks, ask(("b", 4), ("x", 1))) == 0
    assert board(blocks, ask(("a", 4), ("b", 4), ("y", 1))) == 8


def test_a_hole_in_the_chain_ends_the_hit() -> None:
    """Of three cached blocks the first was evicted: nothing is hit, though two are there."""
    blocks = manager(4)
    first = ask(("a", 12))
    board(blocks, first)
    twin = ask(("a", 5))
    assert board(blocks, twin) == 4
    for request in (first, twin):
        blocks.release(request)
    # Freed: 3, 2 by the first, then 4 (unhashed) and 1 by the twin.
    filler = ask(("b", 12))
    board(blocks, filler)
    assert filler.blocks == [4, 3, 2]
    blocks.release(filler)
    assert len(blocks.match(ask(("a", 13)))) == 1


def test_tokens_are_equal_by_name_and_place_however_blocks_cut_them() -> None:
    """`a` 6 then `b` 6 shares with `a` 6, `b` 9 two blocks, with `a` 5, `b` 6 one."""
    blocks = manager(20)
    board(blocks, ask(("a", 6), ("b", 6), ("x", 3)))
    assert len(blocks.match(ask(("a", 6), ("b", 9)))) == 3
    assert len(blocks.match(ask(("a", 6), ("b", 3), ("y", 9)))) == 2
    assert len(blocks.match(ask(("a", 5), ("b", 7), ("y", 9)))) == 1


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    """Prompt 6 and 4 tokens generated: 10 known, 9 computed; 2 of its blocks are still there."""
    blocks = manager(9)
    request = ask(("a", 6))
    board(blocks, request)
    generate(blocks, request, 4)
    assert (request.computed, request.known) == (9, 10)
    blocks.release(request)
    assert board(blocks, request) == 8
    assert request.blocks == [1, 2, 3]


def test_the_next_turn_hits_what_the_last_one_said() -> None:
    """Prompt 6, answer 7: 12 tokens computed, block 2 straddles both, block 3 is all answer.

    The token that came out last was never computed, so the fourth block is not there.
    """
    blocks = manager(20)
    first = ask(("a", 6))
    board(blocks, first)
    generate(blocks, first, 7)
    assert first.computed == 12
    blocks.release(first)
    assert board(blocks, ask(("a", 6), (("out", first.id), 7), ("more", 5))) == 12


def test_an_answer_that_fills_its_block_with_its_last_token_is_not_cached_to_the_end() -> None:
    """Prompt 6, answer 6: the 12th token is never computed, so block 3 has no hash."""
    blocks = manager(20)
    first = ask(("a", 6))
    board(blocks, first)
    generate(blocks, first, 6)
    blocks.release(first)
    assert board(blocks, ask(("a", 6), (("out", first.id), 6), ("more", 5))) == 8


def test_another_answer_is_not_hit() -> None:
    """Same prompt, but the answer of somebody else."""
    blocks = manager(20)
    first = ask(("a", 6))
    board(blocks, first)
    generate(blocks, first, 7)
    assert board(blocks, ask(("a", 6), (("out", first.id + 1), 7), ("more", 5))) == 4


def test_the_duplicate_registered_first_is_hit_and_survives_its_twin() -> None:
    """Equal blocks are not merged: the elder is hit; when it goes, the younger is."""
    blocks = manager(8)
    elder, younger = ask(("a", 4)), ask(("a", 4))
    board(blocks, elder)
    board(blocks, younger)  # the last-token rule keeps it from hitting block 1
    assert (elder.blocks, younger.blocks, blocks.hashed) == ([1], [2], 1)
    assert blocks.match(ask(("a", 5))) == [1]
    blocks.release(elder)
    assert blocks.match(ask(("a", 5))) == [1]
    board(blocks, ask(("b", 27)), tokens=27)  # the six never used and block 1
    assert blocks.free == 0
    assert blocks.match(ask(("a", 5))) == [2]


def test_a_twin_that_goes_first_leaves_the_elder_known() -> None:
    """And no trace: when the elder goes, too, nobody is hit, and the books are empty."""
    blocks = manager(8)
    elder, younger = ask(("a", 4)), ask(("a", 4))
    board(blocks, elder)
    board(blocks, younger)
    blocks.release(younger)
    board(blocks, ask(("b", 27)), tokens=27)  # the five never used and block 2
    assert blocks.match(ask(("a", 5))) == [1]
    assert blocks._others_of == {}
    blocks.release(elder)
    board(blocks, ask(("c", 4)), tokens=4)
    assert not blocks.match(ask(("a", 5)))


@st.composite
def contents(draw: st.DrawFn) -> Segments:
    """Few names and short runs, so that prompts are often equal for a while."""
    run = st.tuples(st.sampled_from("ab"), st.integers(1, 7))
    return tuple(draw(st.lists(run, min_size=1, max_size=5)))


@given(contents(), contents(), st.integers(0, 9), st.sampled_from([1, 2, 3, 4]))
@settings(max_examples=300, deadline=None)
def test_hits_are_the_full_blocks_of_the_common_tokens(one, two, said, size) -> None:
    """Token by token; the second prompt may go on with what the first request said."""
    first = ask(*one)
    second = ask(*two) if not said else ask(*one, (("out", first.id), said), *two)
    blocks = BlockManager(200, size, prefix_caching=True)
    board(blocks, first)
    generate(blocks, first, 6)

    def spell(segments: Segments) -> list[tuple[object, int]]:
        return [(name, k) for name, tokens in segments for k in range(tokens)]

    have = spell((*one, (("out", first.id), 6)))[: first.computed]
    want = spell(second.segments or ())
    same = next(
        (i for i, pair in enumerate(zip(have, want, strict=False)) if pair[0] != pair[1]),
        min(len(have), len(want)),
    )
    assert board(blocks, second) == min(same, len(want) - 1) // size * size


def test_slots_for_drafts_are_taken_after_the_first_step_before_vllm_023() -> None:
    """A prompt of 4 tokens has its block; its fifth token takes those of 5 + 4 slots."""
    blocks = DraftBlocks(20, 4, prefix_caching=False)
    blocks.looks_ahead_at_once, blocks.lookahead, blocks.max_model_len = False, 4, 100
    request = Request(0, 0.0, 4, 9)
    blocks.admit(request, (), 4)
    assert request.blocks == [1]
    assert blocks.taken(request, 5) == 2
    blocks.extend(request, 5)
    assert request.blocks == [1, 2, 3]


def test_adapters_share_no_blocks() -> None:
    """Nor with the model alone; two requests of one adapter do."""
    names = ["", "a", "b", "a"]
    requests = [
        Request(k, 0.0, 8, 1, model=name, segments=(("all", 8),)) for k, name in enumerate(names)
    ]
    found = [tuple(known_hashes(one, 2, 4)) for one in requests]
    assert found[1] == found[3]
    assert len({block for blocks in found for block in blocks}) == 6
