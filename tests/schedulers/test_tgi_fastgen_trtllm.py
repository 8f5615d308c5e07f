"""Schedules of TGI, DeepSpeed-FastGen and TensorRT-LLM, worked out by hand; steps of 1 s."""

import pytest

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockManager
from simulator.schedulers.fastgen import FastGen
from simulator.schedulers.tgi import Tgi
from simulator.schedulers.trtllm import TrtLlm
from tests.support.engines import made, play, workload
from tests.support.schedules import counter, prompts, run


def test_tgi_waits_for_enough_or_for_long_enough() -> None:
    """Ratio 1: two decode, so two must wait; after 3 steps one is taken all the same.

    Request 3 comes in the step of request 2's prompt: then everybody decodes first.
    """
    options = {"max_new_tokens": "exact", "waiting_served_ratio": 1.0}
    scheduler = made(Tgi, counter(90), max_waiting_tokens=3, **options)
    seen, _ = run(scheduler, (0, 4, 20), (0, 4, 20), (0.5, 4, 20), (3.5, 4, 20))
    assert seen[:7] == [
        prompts(0, 1, tokens=4),
        ({}, 2),
        ({}, 2),
        prompts(2, tokens=4),
        ({}, 3),
        ({}, 3),
        prompts(3, tokens=4),
    ]
    scheduler = made(Tgi, counter(90), max_waiting_tokens=99, **options)
    seen, _ = run(scheduler, (0, 4, 20), (0, 4, 20), (0.5, 4, 1), (2.5, 4, 1))
    assert seen[:4] == [prompts(0, 1, tokens=4), ({}, 2), ({}, 2), prompts(2, 3, tokens=4)]


def test_tgi_takes_as_many_as_its_tokens_are_for() -> None:
    """24 tokens a step: the two that must be taken together are 24."""
    options = {"max_new_tokens": "exact", "waiting_served_ratio": 1.0, "max_waiting_tokens": 99}
    options |= {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 24}
    scheduler = made(Tgi, counter(90), **options)
    seen, _ = run(scheduler, (0, 4, 20), (0, 4, 20), (0.5, 12, 1), (2.5, 12, 1))
    assert seen[:4] == [prompts(0, 1, tokens=4), ({}, 2), ({}, 2), prompts(2, 3, tokens=12)]


def test_tgi_decodes_between_two_steps_of_prompts_but_for_the_first() -> None:
    """Requests 0 and 1 find nobody decoding; request 2 must wait for a step."""
    seen, _ = run(
        made(Tgi, counter(90), max_new_tokens="exact"), (0, 4, 9), (0.5, 4, 9), (1.5, 4, 9)
    )
    assert seen[:4] == [
        prompts(0, tokens=4),
        prompts(1, tokens=4),
        ({}, 2),
        prompts(2, tokens=4),
    ]


def test_tgi_reserves_prompt_and_answer() -> None:
    """12 blocks of 4; 20 tokens each are 5: two run. A budget of 20 tokens lets one run."""
    two = [prompts(0, 1, tokens=4), *[({}, 2)] * 2, prompts(2, tokens=4), *[({}, 1)] * 2]
    options = {"max_new_tokens": 17, "waiting_served_ratio": 0.0}
    assert run(made(Tgi, counter(12), **options), *[(0, 4, 3)] * 3)[0] == two
    seen, _ = run(made(Tgi, counter(12), max_batch_total_tokens=20, **options), *[(0, 4, 3)] * 2)
    assert seen == [prompts(0, tokens=4), *[({}, 1)] * 2, prompts(1, tokens=4), *[({}, 1)] * 2]


def test_tgi_takes_none_where_too_few_fit() -> None:
    """Two must be taken together, but there is memory for one more only."""
    scheduler = made(
        Tgi, counter(15), max_new_tokens=17, waiting_served_ratio=1.0, max_waiting_tokens=99
    )
    seen, _ = run(scheduler, (0, 4, 4), (0, 4, 9), (0.5, 4, 1), (0.5, 4, 1))
    assert seen[:5] == [prompts(0, 1, tokens=4), *[({}, 2)] * 3, prompts(2, 3, tokens=4)]


def test_fastgen_splits_long_prompts_and_fuses_short_ones() -> None:
    """8 tokens in every step, as long as there are prompts."""
    scheduler = made(FastGen, counter(90), max_num_seqs=4, max_num_batched_tokens=8)
    seen, _ = run(scheduler, (0, 12, 3), (0, 3, 2), (0, 9, 1))
    assert seen == [
        ({0: (0, 8)}, 0),
        ({0: (8, 4), 1: (0, 3), 2: (0, 1)}, 0),
        ({2: (1, 6)}, 2),
        ({2: (7, 2)}, 1),
    ]


def test_fastgen_lets_wait_who_lacks_a_block() -> None:
    """3 blocks of 4: request 0 takes the third, request 1 stands still until request 0 ends."""
    seen, preempted = run(made(FastGen, counter(3)), (0, 4, 5), (0, 4, 5))
    assert seen == [prompts(0, 1, tokens=4), *[({}, 1)] * 8]
    assert preempted == [0, 0]


def test_fastgen_starts_over_when_nobody_can_go_on() -> None:
    """2 blocks of 4, both full: all is dropped, and request 0 is computed again, alone."""
    seen, preempted = run(made(FastGen, counter(2)), (0, 4, 5), (0, 4, 5))
    assert seen == [
        prompts(0, 1, tokens=4),
        prompts(0, tokens=5),
        *[({}, 1)] * 3,
        prompts(1, tokens=5),
        *[({}, 1)] * 3,
    ]
    assert preempted == [1, 1]


def test_fastgen_goes_on_with_a_prompt_only_if_the_rest_fits() -> None:
    """4 blocks: request 1 has 4 of 12 tokens when request 0 takes a block, and 1 is too few.

    It keeps what it has until request 0 ends.
    """
    scheduler = made(FastGen, counter(4), max_num_seqs=2, max_num_batched_tokens=8)
    seen, preempted = run(scheduler, (0, 4, 5), (0, 12, 1))
    assert seen == [({0: (0, 4), 1: (0, 4)}, 0), *[({}, 1)] * 4, ({1: (4, 8)}, 0)]
    assert preempted == [0, 0]


def test_trtllm_evicts_nobody_or_uses_all() -> None:
    """8 blocks of 4: 13 + 13 tokens at their end want all of them, but a third fits today."""
    load = [(0, 4, 9), (0, 8, 5), (0, 4, 1)]
    options = {"max_model_len": 24, "max_new_tokens": "exact"}
    seen, preempted = run(made(TrtLlm, counter(8), **options), *load)
    assert seen[0] == ({0: (0, 4), 1: (0, 8)}, 0)
    assert seen[5] == ({2: (0, 4)}, 1)  # request 1 has ended
    assert preempted == [0, 0, 0]
    options["capacity_scheduler_policy"] = "MAX_UTILIZATION"
    seen, _ = run(made(TrtLlm, counter(6), **options), *load)
    assert seen[0] == ({0: (0, 4), 1: (0, 8), 2: (0, 4)}, 0)


def test_trtllm_reserves_a_place_for_the_last_token() -> None:
    """5 blocks of 4, and 5 + 4 tokens, of which 8 are stored: 3 blocks each, so one runs."""
    options = {"max_model_len": 24, "max_new_tokens": 4}
    seen, _ = run(made(TrtLlm, counter(5), **options), (0, 5, 4), (0, 5, 4))
    assert seen[:5] == [prompts(0, tokens=5), *[({}, 1)] * 3, prompts(1, tokens=5)]


def test_trtllm_pauses_the_last_started() -> None:
    """4 blocks of 4: with 8 tokens each both want a third block. Request 1 is computed again."""
    scheduler = made(TrtLlm, counter(4), capacity_scheduler_policy="MAX_UTILIZATION")
    seen, preempted = run(scheduler, (0, 4, 9), (0, 4, 9))
    assert seen == [
        prompts(0, 1, tokens=4),
        *[({}, 2)] * 4,
        *[({}, 1)] * 4,
        prompts(1, tokens=9),
        *[({}, 1)] * 3,
    ]
    assert preempted == [0, 1]


def test_trtllm_pauses_no_more_than_it_must() -> None:
    """6 blocks of 4: the three of 8 tokens want one more each; the two of one are enough."""
    scheduler = made(TrtLlm, counter(6), capacity_scheduler_policy="MAX_UTILIZATION")
    seen, preempted = run(scheduler, *[(0, 4, 9)] * 3)
    assert seen[:6] == [prompts(0, 1, 2, tokens=4), *[({}, 3)] * 4, ({}, 2)]
    assert preempted == [0, 0, 1]


def test_trtllm_goes_on_with_those_who_stay_as_before() -> None:
    """As above: the tokens of request 0 are one run, those of request 1 one before and after."""
    scheduler = made(TrtLlm, counter(4), capacity_scheduler_policy="MAX_UTILIZATION")
    log, _ = play(workload((0, 4, 9), (0, 4, 9)), scheduler)
    runs = [(int(row["id"]), float(row["start"]), int(row["ticks"])) for row in log.runs]
    assert sorted(runs) == [(0, 1.0, 8), (1, 1.0, 4), (1, 10.0, 3)]


def test_trtllm_waits_until_a_prompt_fits_as_a_whole() -> None:
    """24 tokens a step: 10 + 12, and 4 with the decodes of the next."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 24}
    seen, _ = run(made(TrtLlm, counter(90), **options), (0, 10, 2), (0, 12, 2), (0, 4, 1))
    assert seen == [({0: (0, 10), 1: (0, 12)}, 0), ({2: (0, 4)}, 2)]


def test_trtllm_chunks_by_whole_blocks() -> None:
    """10 tokens a step and blocks of 4: 8 of 14, then 6 and 4 of 9, the rest beside a decode."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 10, "max_model_len": 24}
    scheduler = made(TrtLlm, counter(90), enable_chunked_prefill=True, **options)
    seen, _ = run(scheduler, (0, 14, 2), (0, 9, 1))
    assert seen == [({0: (0, 8)}, 0), ({0: (8, 6), 1: (0, 4)}, 0), ({1: (4, 5)}, 1)]


def test_trtllm_tries_the_next_prompt_where_one_gets_no_whole_block() -> None:
    """10 tokens and blocks of 4: 8 of 14; 2 are no block of request 1, but all of request 2."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 10, "max_model_len": 24}
    scheduler = made(TrtLlm, counter(90), enable_chunked_prefill=True, **options)
    seen, _ = run(scheduler, (0, 14, 2), (0, 9, 1), (0, 2, 1))
    assert seen == [
        ({0: (0, 8), 2: (0, 2)}, 0),
        ({0: (8, 6), 1: (0, 4)}, 0),
        ({1: (4, 5)}, 1),
    ]


def test_trtllm_pauses_who_runs_for_one_who_came_before() -> None:
    """6 blocks of 4. Request 1 is passed by as above, and has its turn before request 2.

    Then request 0 wants a third block and request 1 three of the three that are free.
    """
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 10, "max_model_len": 24}
    options |= {"capacity_scheduler_policy": "MAX_UTILIZATION", "enable_chunked_prefill": True}
    seen, preempted = run(made(TrtLlm, counter(6), **options), (0, 8, 3), (0, 9, 1), (0, 2, 9))
    assert seen[:3] == [
        ({0: (0, 8), 2: (0, 2)}, 0),
        ({1: (0, 9)}, 1),
        ({2: (0, 3)}, 1),
    ]
    assert preempted == [0, 0, 1]


def test_trtllm_holds_back_who_will_find_it_cached() -> None:
    """Request 1 begins with the 8 tokens of request 0: it waits for them, request 2 passes it by.

    A static batch does not wait for it, and computes them twice.
    """
    load = [(0, 9, 2), (0, 9, 2), (0, 9, 1)]
    segments = [(("a", 8), ("x", 1)), (("a", 8), ("y", 1)), None]
    blocks = BlockManager(91, 4, prefix_caching=True)
    seen, _ = run(made(TrtLlm, blocks, max_new_tokens="exact"), *load, segments=segments)
    assert seen == [prompts(0, 2, tokens=9), ({1: (8, 1)}, 1), ({}, 1)]
    blocks = BlockManager(91, 4, prefix_caching=True)
    options = {"capacity_scheduler_policy": "STATIC_BATCH", "max_new_tokens": "exact"}
    scheduler = made(TrtLlm, blocks, **options)
    assert run(scheduler, *load, segments=segments)[0] == [prompts(0, 1, 2, tokens=9), ({}, 2)]


def test_trtllm_holds_back_who_will_find_what_a_split_prompt_adds() -> None:
    """12 tokens a step: 12 of request 0's 17, then 5.

    Request 1 begins with the same 16 and waits for the last 4 of them; request 2 passes it by.
    """
    segments = [(("a", 16), ("x", 1)), (("a", 16), ("y", 1)), None]
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 12, "max_model_len": 24}
    blocks = BlockManager(91, 4, prefix_caching=True)
    scheduler = made(TrtLlm, blocks, enable_chunked_prefill=True, **options)
    seen, _ = run(scheduler, (0, 17, 1), (0.5, 17, 1), (0.5, 6, 1), segments=segments)
    assert seen == [({0: (0, 12)}, 0), ({0: (12, 5), 2: (0, 6)}, 0), ({1: (16, 1)}, 0)]


def test_trtllm_computes_as_many_tokens_as_a_step_may_have() -> None:
    """Request 1 waits as above; its 19 tokens and five decodes are the 24 of a step."""
    segments = [(("a", 4), ("x", 1)), (("a", 4), ("y", 19)), *[None] * 4]
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 24}
    blocks = BlockManager(91, 4, prefix_caching=True)
    scheduler = made(TrtLlm, blocks, capacity_scheduler_policy="MAX_UTILIZATION", **options)
    seen, _ = run(scheduler, (0, 5, 9), (0, 23, 1), *[(0, 1, 9)] * 4, segments=segments)
    assert seen[1] == ({1: (4, 19)}, 5)


def test_trtllm_computes_no_prompt_of_a_static_batch_beside_decodes() -> None:
    """8 tokens a step: 4 of request 1's 8 are left over, and wait until request 0 has ended."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "max_model_len": 24}
    options |= {"capacity_scheduler_policy": "STATIC_BATCH", "enable_chunked_prefill": True}
    seen, _ = run(made(TrtLlm, counter(90), **options), (0, 4, 3), (0, 8, 1))
    assert seen == [({0: (0, 4), 1: (0, 4)}, 0), ({}, 1), ({}, 1), ({1: (4, 4)}, 0)]


def test_trtllm_static_batch() -> None:
    """Nobody boards until the last has ended, though a seat is free."""
    options = {"capacity_scheduler_policy": "STATIC_BATCH", "max_new_tokens": "exact"}
    scheduler = made(TrtLlm, counter(90), max_num_seqs=2, **options)
    seen, _ = run(scheduler, (0, 4, 3), (0, 4, 1), (0, 4, 1))
    assert seen == [prompts(0, 1, tokens=4), ({}, 1), ({}, 1), prompts(2, tokens=4)]


def test_trtllm_refuses_prompts_beyond_a_step() -> None:
    """A step of 8 tokens, requests of 64: the server starts, and answers the shorter prompts."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64}
    scheduler = made(TrtLlm, counter(90), **options)
    short, long = Request(0, 0.0, 8, 20), Request(1, 0.0, 9, 1)
    assert (scheduler.fits(short), scheduler.fits(long)) == (True, False)
    assert scheduler.room.startswith("a step of 8 tokens, or ")
    split = made(TrtLlm, counter(90), enable_chunked_prefill=True, **options)
    assert split.fits(long)
    with pytest.raises(ValueError, match="without chunked prefill"):
        made(TrtLlm, counter(90), capacity_scheduler_policy="MAX_UTILIZATION", **options)
