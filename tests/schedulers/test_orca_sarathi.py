"""Schedules of Orca and Sarathi-Serve, worked out by hand: every step takes 1 s."""

import pytest

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockManager
from simulator.kv_cache.radix_cache import RadixCache
from simulator.schedulers.continuous_batching import ContinuousBatching, Orca, Sarathi
from simulator.schedulers.tgi import Tgi
from simulator.schedulers.trtllm import TrtLlm
from tests.support.engines import made, play, workload
from tests.support.schedules import counter, prompts, run
from tests.support.single_steps import expand_steps


def test_orca_mixes_whole_prompts_and_decodes() -> None:
    """Two seats: the third boards in the very step after one of the two has ended."""
    seen, _ = run(
        made(Orca, counter(20), max_new_tokens="exact", max_num_seqs=2),
        (0, 6, 3),
        (0, 10, 2),
        (0, 4, 1),
    )
    assert seen == [({0: (0, 6), 1: (0, 10)}, 0), ({}, 2), ({2: (0, 4)}, 1)]


def test_orca_reserves_for_the_longest_answer() -> None:
    """20 blocks of 4 and 40 positions: 39 tokens are 10 blocks, so two run, whatever they say.

    Where clients ask for at most 4 tokens, prompts of 5 take 2 blocks each, and all three run.
    Where they ask for 2, answers are cut there.
    """
    three = [(0, 5, 4)] * 3
    seen, _ = run(made(Orca, counter(20), max_model_len=40), *three)
    assert seen == [prompts(0, 1, tokens=5), *[({}, 2)] * 3, prompts(2, tokens=5), *[({}, 1)] * 3]
    for asked in (4, "exact"):
        seen, _ = run(made(Orca, counter(6), max_model_len=40, max_new_tokens=asked), *three)
        assert seen == [prompts(0, 1, 2, tokens=5), *[({}, 3)] * 3]
    seen, _ = run(made(Orca, counter(6), max_model_len=40, max_new_tokens=2), *three)
    assert seen == [prompts(0, 1, 2, tokens=5), ({}, 3)]


@pytest.mark.parametrize("make", [Orca, Tgi, TrtLlm])
def test_what_is_reserved_counts_as_used(make: type[ContinuousBatching]) -> None:
    """Blocks of 4: prompts of 5 with answers of up to 7 have 3 reserved, and take 2."""
    options = {"max_new_tokens": 7, "max_model_len": 40, "max_num_seqs": 4}
    log, _ = play(workload((0, 5, 2), (0, 5, 3)), made(make, counter(20), **options), leap=False)
    assert log.steps["blocks_used"].tolist() == [6, 6, 3]
    leapt, _ = play(workload((0, 5, 7)), made(make, counter(20), **options))
    used = expand_steps(leapt)["kv_blocks_used"]
    assert used.tolist() == [3] * 7
    assert len(leapt.steps) < 7


@pytest.mark.parametrize("make", [BlockManager, RadixCache])
def test_what_several_share_is_reserved_once(make: type[BlockManager | RadixCache]) -> None:
    """12 blocks of 4: requests 0 and 1 may need 6 each, 4 in common; 4 are left."""
    blocks = make(13, 4, True) if make is BlockManager else make(13, 4)
    scheduler = made(TrtLlm, blocks, max_new_tokens="exact", max_num_seqs=4, max_model_len=40)
    segments = [(("a", 16), ("x", 4)), (("a", 16), ("y", 4)), (("b", 12),)]
    seen, _ = run(scheduler, (0, 20, 4), (0.5, 20, 4), (0.5, 12, 4), segments=segments)
    assert seen[:2] == [({0: (0, 20)}, 0), ({1: (16, 4), 2: (0, 12)}, 1)]


def test_what_can_never_be_reserved_is_rejected() -> None:
    """10 blocks hold 40 positions, 9 do not, though the request wants 3 blocks only."""
    request = Request(0, 0.0, 8, 4)
    assert made(Orca, counter(10), max_model_len=40).fits(request)
    assert not made(Orca, counter(9), max_model_len=40).fits(request)
    assert made(Orca, counter(9), max_model_len=40, max_new_tokens="exact").fits(request)


@pytest.mark.parametrize("asked", [0, -1, True, "all", 2.5])
def test_what_clients_ask_for_is_a_number_or_exact(asked: object) -> None:
    told = "max_new_tokens: must be a whole number of at least 1"
    with pytest.raises(ValueError, match=told):
        made(Orca, counter(9), max_new_tokens=asked)  # type: ignore[arg-type]


def test_sarathi_gives_decodes_their_token_first_then_prompts_in_order() -> None:
    """8 tokens a step: 10 = 8 + 2; the prompt of 20 takes what two decodes leave, then one."""
    scheduler = made(Sarathi, counter(90), max_num_seqs=4, max_num_batched_tokens=8)
    seen, _ = run(scheduler, (0, 10, 3), (0, 5, 2), (1.5, 20, 1))
    assert seen == [
        ({0: (0, 8)}, 0),
        ({0: (8, 2), 1: (0, 5)}, 0),
        ({2: (0, 6)}, 2),
        ({2: (6, 7)}, 1),
        ({2: (13, 7)}, 0),
    ]


def test_sarathi_promises_a_prompt_all_its_blocks() -> None:
    """5 blocks of 4. Request 1 has computed 4 of 8 when request 0 wants its fourth block.

    One is free but promised, so request 1 leaves.
    """
    scheduler = made(Sarathi, counter(5), max_num_seqs=4, max_num_batched_tokens=8, watermark=0.0)
    seen, preempted = run(scheduler, (0, 12, 2), (0, 8, 1))
    assert seen == [
        ({0: (0, 8)}, 0),
        ({0: (8, 4), 1: (0, 4)}, 0),
        ({}, 1),
        ({1: (0, 8)}, 0),
    ]
    assert preempted == [0, 1]


def test_sarathi_leaves_a_watermark_free() -> None:
    """10 % of 11 blocks: one must stay free beside 5 + 5, unless nobody runs."""
    load = [(0, 20, 1), (0, 20, 1)]
    assert len(run(made(Sarathi, counter(10), watermark=0.0), *load)[0]) == 1
    assert len(run(made(Sarathi, counter(10), watermark=0.1), *load)[0]) == 2
    assert len(run(made(Sarathi, counter(10), watermark=0.1), (0, 40, 1))[0]) == 1
