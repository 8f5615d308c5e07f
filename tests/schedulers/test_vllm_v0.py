"""Schedules of vLLM V0, worked out by hand: every step takes 1 s."""

from simulator.core.request import Request
from simulator.schedulers.vllm_v0 import SwappedByArrival, VllmV0
from tests.support.engines import made
from tests.support.schedules import counter, prompts, run
from tests.support.with_fields import with_fields


def test_v0_computes_prompts_alone_while_decodes_wait() -> None:
    """Request 2 arrives in the second step; request 0 pauses for its prompt."""
    seen, _ = run(made(VllmV0, counter(90), max_model_len=16), (0, 4, 4), (0, 4, 2), (1.5, 6, 1))
    assert seen == [prompts(0, 1, tokens=4), ({}, 2), prompts(2, tokens=6), ({}, 1), ({}, 1)]


def test_a_step_of_v0_copies_nothing_where_nobody_is_swapped() -> None:
    scheduler = made(VllmV0, counter(90), max_model_len=16)
    scheduler.add(Request(0, 0.0, 4, 4))
    scheduler.commit(scheduler.schedule(0.0), [1.0])
    step = scheduler.schedule(1.0)
    assert (step.decodes, step.copies) == (1, None)


def test_v0_splits_no_prompt() -> None:
    """Of 16 tokens a step 10 are taken: the next 10 wait for a step of their own."""
    scheduler = made(
        VllmV0, counter(90), max_num_seqs=4, max_num_batched_tokens=16, max_model_len=16
    )
    assert run(scheduler, (0, 10, 1), (0, 10, 1))[0] == [
        prompts(0, tokens=10),
        prompts(1, tokens=10),
    ]
    assert made(VllmV0, counter(90), max_model_len=4096).max_num_batched_tokens == 4096


def test_v0_wants_a_block_at_hand_for_every_decode() -> None:
    """4 blocks of 4 hold both requests to their end, 8 tokens each, but none is at hand.

    So request 1 leaves, boards again at once, for its blocks are free, and leaves again.
    """
    seen, preempted = run(made(VllmV0, counter(4), watermark=0.0), (0, 5, 4), (0, 5, 4))
    assert seen == [
        prompts(0, 1, tokens=5),
        ({}, 1),
        prompts(1, tokens=6),
        ({}, 1),
        prompts(1, tokens=7),
        ({}, 1),
        prompts(1, tokens=8),
    ]
    assert preempted == [0, 3]


def test_v0_keeps_the_watermark_free_for_decodes() -> None:
    """With 20 % of 5 blocks kept free the two of above take turns, and nothing is lost."""
    seen, preempted = run(made(VllmV0, counter(4), watermark=0.2), (0, 5, 4), (0, 5, 4))
    assert seen == [prompts(0, tokens=5), *[({}, 1)] * 3, prompts(1, tokens=5), *[({}, 1)] * 3]
    assert preempted == [0, 0]


def test_v0_brings_back_the_swapped_before_it_takes_a_prompt() -> None:
    """Request 1 goes to the host. Request 2 would fit into its 2 blocks, but must wait.

    To come back request 1 wants its 2 blocks and one at hand; when nobody runs, its own suffice.
    """
    scheduler = made(VllmV0, counter(4), watermark=0.0, swap_blocks=2)
    seen, preempted = run(scheduler, (0, 5, 4), (0, 5, 3), (0, 5, 1))
    assert seen == [
        prompts(0, 1, tokens=5),
        *[({}, 1)] * 3,  # request 0
        ({}, 1),  # request 1 is back
        prompts(2, tokens=5),
        ({}, 1),
    ]
    assert preempted == [0, 1, 0]
    assert scheduler.swap_space.free == 2


def test_v0_brings_back_those_that_came_together_in_the_order_in_which_they_left() -> None:
    """vLLM sorts by arrival, and that sort is stable."""
    queue = SwappedByArrival()
    for number, arrival in ((0, 1.0), (2, 1.0), (1, 1.0), (3, 0.0)):
        queue.put_back(with_fields(Request(number, arrival, 4, 9), swapped=4))
    assert [request.id for request in queue] == [3, 0, 2, 1]


def test_v0_computes_again_what_the_host_has_no_room_for() -> None:
    """One block on the host: request 1 does not fit there."""
    seen, _ = run(made(VllmV0, counter(4), watermark=0.0, swap_blocks=1), (0, 5, 4), (0, 5, 4))
    assert seen[2] == prompts(1, tokens=6)


def test_v0_may_hold_prompts_back() -> None:
    """The step of prompts took 1 s: at 2.5 times that request 1, come at 1.5, boards at 5, not 4.

    Request 2 comes along. With nobody running there is no delay.
    """
    scheduler = made(VllmV0, counter(90), scheduler_delay_factor=2.5)
    seen, _ = run(scheduler, (0, 4, 9), (1.5, 4, 1), (4.5, 4, 1))
    assert seen[:6] == [prompts(0, tokens=4), *[({}, 1)] * 4, prompts(1, 2, tokens=4)]
    seen, _ = run(made(VllmV0, counter(90), scheduler_delay_factor=2.5), (0, 4, 1), (0.5, 4, 1))
    assert seen == [prompts(0, tokens=4), prompts(1, tokens=4)]


def test_v0_puts_who_is_swapped_out_behind_those_that_came_before_and_are_swapped() -> None:
    queue, requests = SwappedByArrival(), [Request(k, float(k), 4, 1) for k in range(4)]
    for request in requests[:3]:
        request.swapped = 4
        queue.put_back(request)
    queue.add(requests[3])
    queue.remove(requests[1])
    queue.put_back(requests[1])
    assert list(queue) == requests
