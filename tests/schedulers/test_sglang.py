"""Schedules of SGLang, worked out by hand: every step takes 1 s."""

import pytest

from simulator.kv_cache.block_manager import BlockManager
from simulator.kv_cache.radix_cache import RadixCache
from simulator.schedulers.sglang import SgLang
from tests.support.schedules import counter, prompts, run


def test_sglang_expects_seven_tenths_of_what_may_still_come() -> None:
    """100 blocks of a token, prompts of 10, answers of at most 20: 30 < 100, 70 and 40, not 10.

    When request 0 ends, requests 1 and 2 hold 12 tokens each and may say 17 more: of 76 free
    tokens 34 times 0.698 are set aside, and 30 < 52.3.
    """
    scheduler = SgLang(counter(100, 1), max_new_tokens=20, max_model_len=100)
    seen, _ = run(scheduler, (0, 10, 3), *[(0, 10, 20)] * 3)
    assert seen[:4] == [
        prompts(0, 1, 2, tokens=10),
        *[({}, 3)] * 2,
        prompts(3, tokens=10),
    ]
    scheduler = SgLang(counter(100, 1), max_new_tokens=20, max_model_len=100)
    assert scheduler.ratio == 0.7
    scheduler._decayed = 300
    assert scheduler.ratio == pytest.approx(0.7 - 0.5 * (0.7 - 0.098))
    scheduler._decayed = 601
    assert scheduler.ratio == pytest.approx(0.098)


def test_sglang_retracts_those_with_the_fewest_tokens_out() -> None:
    """40 tokens of memory, none set aside. At 7 s three have 5 tokens out, and one block is free.

    The longest prompt goes first, 18 tokens; 19 are too few for 2 x 20, so the next goes, too.
    Both come back behind each other when there is room for their answers.
    """
    options = {"schedule_conservativeness": 0.0, "max_new_tokens": 12, "max_model_len": 40}
    scheduler = SgLang(counter(40, 1), **options)
    seen, preempted = run(scheduler, (0, 10, 12), (0.5, 14, 12), (1.5, 3, 12))
    assert seen[:16] == [
        prompts(0, tokens=10),
        prompts(1, tokens=14),
        prompts(2, tokens=3),
        *[({}, 3)] * 4,
        *[({}, 1)] * 7,
        ({1: (0, 19)}, 0),
        ({}, 1),
    ]
    assert preempted == [1, 1, 0]
    assert [step for step in seen if step[0] and step[1] == 0][-1] == ({0: (0, 15)}, 0)


def test_sglang_chunks_the_last_prompt_while_decodes_wait() -> None:
    """8 tokens of prompts a step: 20 = 8 + 8 + 4, and then both decode."""
    scheduler = SgLang(counter(90), max_num_seqs=8, max_num_batched_tokens=8, max_model_len=60)
    seen, _ = run(scheduler, (0, 4, 3), (0.5, 20, 2))
    assert seen == [
        prompts(0, tokens=4),
        ({1: (0, 8)}, 0),
        ({1: (8, 8)}, 0),
        ({1: (16, 4)}, 0),
        ({}, 2),
        ({}, 1),
    ]


def test_sglang_takes_no_prompt_beyond_max_prefill_tokens_but_the_first() -> None:
    """4 + 4 of 10; the next 4 would be beyond. A prompt of 12 goes alone."""
    options = {"max_prefill_tokens": 10, "max_model_len": 20}
    seen, _ = run(SgLang(counter(90), **options), *[(0, 4, 1)] * 3)
    assert seen == [prompts(0, 1, tokens=4), prompts(2, tokens=4)]
    seen, _ = run(SgLang(counter(90), **options), (0, 12, 1), (0, 4, 1))
    assert seen == [prompts(0, tokens=12), prompts(1, tokens=4)]


def cache(make: type[BlockManager | RadixCache], size: int) -> BlockManager | RadixCache:
    """360 tokens with a prefix cache of either kind."""
    if make is RadixCache:
        return RadixCache(360 // size, size)
    return BlockManager(360 // size, size, prefix_caching=True)


@pytest.mark.parametrize("make", [BlockManager, RadixCache])
@pytest.mark.parametrize(("order", "second"), [("lpm", 2), ("fcfs", 1)])
def test_sglang_serves_the_longest_known_prefix_first(
    order: str, second: int, make: type[BlockManager | RadixCache]
) -> None:
    """Request 2 begins as request 0 did; one seat."""
    blocks = cache(make, 4)
    scheduler = SgLang(blocks, order=order, max_num_seqs=1, max_model_len=40)
    segments = [(("a", 8), ("x", 4)), (("b", 12),), (("a", 8), ("y", 4))]
    seen, _ = run(scheduler, (0, 12, 1), (0.5, 12, 1), (0.5, 12, 1), segments=segments)
    steps = [({0: (0, 12)}, 0), ({1: (0, 12)}, 0), ({2: (8, 4)}, 0)]
    assert seen == [steps[0], steps[second], steps[3 - second]]


@pytest.mark.parametrize("make", [BlockManager, RadixCache])
@pytest.mark.parametrize("size", [1, 4])
def test_sglang_computes_a_common_beginning_once(
    size: int, make: type[BlockManager | RadixCache]
) -> None:
    """Requests 0 and 1 begin alike and nothing is known: request 1 waits, request 2 overtakes."""
    blocks = cache(make, size)
    scheduler = SgLang(blocks, order="lpm", max_num_seqs=2, max_model_len=60)
    segments = [(("a", 32), ("x", 4)), (("a", 32), ("y", 4)), (("b", 36),)]
    seen, _ = run(scheduler, *[(0, 36, 1)] * 3, segments=segments)
    assert seen == [({0: (0, 36), 2: (0, 36)}, 0), ({1: (32, 4)}, 0)]


def test_sglang_shuffles_by_seed() -> None:
    """The same seed, the same order; another seed, another order."""

    def order(seed: int) -> list[int]:
        scheduler = SgLang(counter(90), order="random", seed=seed, max_num_seqs=1)
        return [next(iter(step[0])) for step in run(scheduler, *[(0, 4, 1)] * 9)[0]]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(9))
