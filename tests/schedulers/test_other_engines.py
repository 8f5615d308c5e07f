"""Schedules of other engines, worked out by hand: every step takes 1 s."""

import pytest

from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.kv_cache.radix_cache import RadixCache
from simulator.results.frames import expand_steps
from simulator.schedulers.continuous_batching import ContinuousBatching, Orca, Sarathi
from simulator.schedulers.fastgen import FastGen
from simulator.schedulers.sglang import SgLang
from simulator.schedulers.static import HfStatic
from simulator.schedulers.tgi import Tgi
from simulator.schedulers.trtllm import TrtLlm
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.schedulers.vllm_v0 import VllmV0
from tests.support.engines import Clock, play, workload

Seen = tuple[dict[int, tuple[int, int]], int]
"""One step: (start, tokens) of each prompt by request, and how many decode."""


class Spy(Clock):
    """Write down each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def execute(self, step: Step) -> float:
        self.seen.append(({c.request.id: (c.start, c.tokens) for c in step.prefills}, step.decodes))
        return super().execute(step)


def run(
    scheduler: Scheduler, *requests: tuple[float, int, int], **more: object
) -> tuple[list[Seen], list[int]]:
    """Give the steps, and how often each request was preempted."""
    spy = Spy()
    log, _ = play(workload(*requests, **more), scheduler, spy, leap=False)
    return spy.seen, [row["preemptions"] for row in sorted(log.requests, key=lambda r: r["id"])]


def prompts(*ids: int, tokens: int) -> Seen:
    """A step of prompts alone, all of one length."""
    return dict.fromkeys(ids, (0, tokens)), 0


def counter(usable: int, size: int = 4) -> BlockCounter:
    return BlockCounter(usable + 1, size)


# ---------------------------------------------------------------- Orca


def test_orca_mixes_whole_prompts_and_decodes() -> None:
    """Two seats: the third boards in the very step after one of the two has ended."""
    seen, _ = run(
        Orca(counter(20), max_new_tokens="exact", max_num_seqs=2),
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
    seen, _ = run(Orca(counter(20), max_model_len=40), *three)
    assert seen == [prompts(0, 1, tokens=5), *[({}, 2)] * 3, prompts(2, tokens=5), *[({}, 1)] * 3]
    for asked in (4, "exact"):
        seen, _ = run(Orca(counter(6), max_model_len=40, max_new_tokens=asked), *three)
        assert seen == [prompts(0, 1, 2, tokens=5), *[({}, 3)] * 3]
    seen, _ = run(Orca(counter(6), max_model_len=40, max_new_tokens=2), *three)
    assert seen == [prompts(0, 1, 2, tokens=5), ({}, 3)]


@pytest.mark.parametrize("make", [Orca, Tgi, TrtLlm])
def test_what_is_reserved_counts_as_used(make: type[ContinuousBatching]) -> None:
    """Blocks of 4: prompts of 5 with answers of up to 8 have 3 reserved, and take 2."""
    options = {"max_new_tokens": 8, "max_model_len": 40, "max_num_seqs": 4}
    log, _ = play(workload((0, 5, 2), (0, 5, 3)), make(counter(20), **options), leap=False)
    assert log.steps["blocks_used"].tolist() == [6, 6, 3]
    leapt, _ = play(workload((0, 5, 8)), make(counter(20), **options))
    used = expand_steps(leapt)["kv_blocks_used"]
    assert used.tolist() == [3] * 8
    assert len(leapt.steps) < 8


@pytest.mark.parametrize("make", [BlockManager, RadixCache])
def test_what_several_share_is_reserved_once(make: type[BlockManager | RadixCache]) -> None:
    """12 blocks of 4: requests 0 and 1 may need 6 each, 4 in common; 4 are left."""
    blocks = make(13, 4, True) if make is BlockManager else make(13, 4)
    scheduler = TrtLlm(blocks, max_new_tokens="exact", max_num_seqs=4, max_model_len=40)
    segments = [(("a", 16), ("x", 4)), (("a", 16), ("y", 4)), (("b", 12),)]
    seen, _ = run(scheduler, (0, 20, 5), (0.5, 20, 5), (0.5, 12, 5), segments=segments)
    assert seen[:2] == [({0: (0, 20)}, 0), ({1: (16, 4), 2: (0, 12)}, 1)]


def test_what_can_never_be_reserved_is_rejected() -> None:
    """10 blocks hold 40 positions, 9 do not, though the request wants 3 blocks only."""
    request = Request(0, 0.0, 8, 4)
    assert Orca(counter(10), max_model_len=40).fits(request)
    assert not Orca(counter(9), max_model_len=40).fits(request)
    assert Orca(counter(9), max_model_len=40, max_new_tokens="exact").fits(request)


@pytest.mark.parametrize("asked", [0, -1, True, "all", 2.5])
def test_what_clients_ask_for_is_a_number_or_exact(asked: object) -> None:
    with pytest.raises(ValueError, match="max_new_tokens: must be a whole number of at least 1"):
        Orca(counter(9), max_new_tokens=asked)  # type: ignore[arg-type]


# ---------------------------------------------------------------- Sarathi-Serve


def test_sarathi_gives_decodes_their_token_first_then_prompts_in_order() -> None:
    """8 tokens a step: 10 = 8 + 2; the prompt of 20 takes what two decodes leave, then one."""
    scheduler = Sarathi(counter(90), max_num_seqs=4, max_num_batched_tokens=8)
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
    scheduler = Sarathi(counter(5), max_num_seqs=4, max_num_batched_tokens=8, watermark=0.0)
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
    assert len(run(Sarathi(counter(10), watermark=0.0), *load)[0]) == 1
    assert len(run(Sarathi(counter(10), watermark=0.1), *load)[0]) == 2
    assert len(run(Sarathi(counter(10), watermark=0.1), (0, 40, 1))[0]) == 1


# ---------------------------------------------------------------- vLLM V0


def test_v0_computes_prompts_alone_while_decodes_wait() -> None:
    """Request 2 arrives in the second step; request 0 pauses for its prompt."""
    seen, _ = run(VllmV0(counter(90), max_model_len=16), (0, 4, 4), (0, 4, 2), (1.5, 6, 1))
    assert seen == [prompts(0, 1, tokens=4), ({}, 2), prompts(2, tokens=6), ({}, 1), ({}, 1)]


def test_v0_splits_no_prompt() -> None:
    """Of 16 tokens a step 10 are taken: the next 10 wait for a step of their own."""
    scheduler = VllmV0(counter(90), max_num_seqs=4, max_num_batched_tokens=16, max_model_len=16)
    assert run(scheduler, (0, 10, 1), (0, 10, 1))[0] == [
        prompts(0, tokens=10),
        prompts(1, tokens=10),
    ]
    assert VllmV0(counter(90), max_model_len=4096).max_num_batched_tokens == 4096


def test_v0_wants_a_block_at_hand_for_every_decode() -> None:
    """4 blocks of 4 hold both requests to their end, 8 tokens each, but none is at hand.

    So request 1 leaves, boards again at once, for its blocks are free, and leaves again.
    """
    seen, preempted = run(VllmV0(counter(4), watermark=0.0), (0, 5, 4), (0, 5, 4))
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
    seen, preempted = run(VllmV0(counter(4), watermark=0.2), (0, 5, 4), (0, 5, 4))
    assert seen == [prompts(0, tokens=5), *[({}, 1)] * 3, prompts(1, tokens=5), *[({}, 1)] * 3]
    assert preempted == [0, 0]


def test_v0_brings_back_the_swapped_before_it_takes_a_prompt() -> None:
    """Request 1 goes to the host. Request 2 would fit into its 2 blocks, but must wait.

    To come back request 1 wants its 2 blocks and one at hand; when nobody runs, its own suffice.
    """
    scheduler = VllmV0(counter(4), watermark=0.0, swap_blocks=2)
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


def test_v0_computes_again_what_the_host_has_no_room_for() -> None:
    """One block on the host: request 1 does not fit there."""
    seen, _ = run(VllmV0(counter(4), watermark=0.0, swap_blocks=1), (0, 5, 4), (0, 5, 4))
    assert seen[2] == prompts(1, tokens=6)


def test_v0_may_hold_prompts_back() -> None:
    """The step of prompts took 1 s: at 2.5 times that request 1, come at 1.5, boards at 5, not 4.

    Request 2 comes along. With nobody running there is no delay.
    """
    scheduler = VllmV0(counter(90), scheduler_delay_factor=2.5)
    seen, _ = run(scheduler, (0, 4, 9), (1.5, 4, 1), (4.5, 4, 1))
    assert seen[:6] == [prompts(0, tokens=4), *[({}, 1)] * 4, prompts(1, 2, tokens=4)]
    seen, _ = run(VllmV0(counter(90), scheduler_delay_factor=2.5), (0, 4, 1), (0.5, 4, 1))
    assert seen == [prompts(0, tokens=4), prompts(1, tokens=4)]


# ---------------------------------------------------------------- TGI


def test_tgi_waits_for_enough_or_for_long_enough() -> None:
    """Ratio 1: two decode, so two must wait; after 3 steps one is taken all the same.

    Request 3 comes in the step of request 2's prompt: then everybody decodes first.
    """
    options = {"max_new_tokens": "exact", "waiting_served_ratio": 1.0}
    scheduler = Tgi(counter(90), max_waiting_tokens=3, **options)
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
    scheduler = Tgi(counter(90), max_waiting_tokens=99, **options)
    seen, _ = run(scheduler, (0, 4, 20), (0, 4, 20), (0.5, 4, 1), (2.5, 4, 1))
    assert seen[:4] == [prompts(0, 1, tokens=4), ({}, 2), ({}, 2), prompts(2, 3, tokens=4)]


def test_tgi_decodes_between_two_steps_of_prompts_but_for_the_first() -> None:
    """Requests 0 and 1 find nobody decoding; request 2 must wait for a step."""
    seen, _ = run(Tgi(counter(90), max_new_tokens="exact"), (0, 4, 9), (0.5, 4, 9), (1.5, 4, 9))
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
    assert run(Tgi(counter(12), **options), *[(0, 4, 3)] * 3)[0] == two
    seen, _ = run(Tgi(counter(12), max_batch_total_tokens=20, **options), *[(0, 4, 3)] * 2)
    assert seen == [prompts(0, tokens=4), *[({}, 1)] * 2, prompts(1, tokens=4), *[({}, 1)] * 2]


def test_tgi_takes_none_where_too_few_fit() -> None:
    """Two must be taken together, but there is memory for one more only."""
    scheduler = Tgi(counter(15), max_new_tokens=17, waiting_served_ratio=1.0, max_waiting_tokens=99)
    seen, _ = run(scheduler, (0, 4, 4), (0, 4, 9), (0.5, 4, 1), (0.5, 4, 1))
    assert seen[:5] == [prompts(0, 1, tokens=4), *[({}, 2)] * 3, prompts(2, 3, tokens=4)]


# ---------------------------------------------------------------- DeepSpeed-FastGen


def test_fastgen_splits_long_prompts_and_fuses_short_ones() -> None:
    """8 tokens in every step, as long as there are prompts."""
    scheduler = FastGen(counter(90), max_num_seqs=4, max_num_batched_tokens=8)
    seen, _ = run(scheduler, (0, 12, 3), (0, 3, 2), (0, 9, 1))
    assert seen == [
        ({0: (0, 8)}, 0),
        ({0: (8, 4), 1: (0, 3), 2: (0, 1)}, 0),
        ({2: (1, 6)}, 2),
        ({2: (7, 2)}, 1),
    ]


def test_fastgen_lets_wait_who_lacks_a_block() -> None:
    """3 blocks of 4: request 0 takes the third, request 1 stands still until request 0 ends."""
    seen, preempted = run(FastGen(counter(3)), (0, 4, 5), (0, 4, 5))
    assert seen == [prompts(0, 1, tokens=4), *[({}, 1)] * 8]
    assert preempted == [0, 0]


def test_fastgen_starts_over_when_nobody_can_go_on() -> None:
    """2 blocks of 4, both full: all is dropped, and request 0 is computed again, alone."""
    seen, preempted = run(FastGen(counter(2)), (0, 4, 5), (0, 4, 5))
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
    scheduler = FastGen(counter(4), max_num_seqs=2, max_num_batched_tokens=8)
    seen, preempted = run(scheduler, (0, 4, 5), (0, 12, 1))
    assert seen == [({0: (0, 4), 1: (0, 4)}, 0), *[({}, 1)] * 4, ({1: (4, 8)}, 0)]
    assert preempted == [0, 0]


# ---------------------------------------------------------------- TensorRT-LLM


def test_trtllm_evicts_nobody_or_uses_all() -> None:
    """6 blocks of 4: 12 + 12 tokens at their end are all of them, but a third fits today."""
    load = [(0, 4, 9), (0, 8, 5), (0, 4, 1)]
    options = {"max_model_len": 24, "max_new_tokens": "exact"}
    seen, preempted = run(TrtLlm(counter(6), **options), *load)
    assert seen[0] == ({0: (0, 4), 1: (0, 8)}, 0)
    assert seen[5] == ({2: (0, 4)}, 1)  # request 1 has ended
    assert preempted == [0, 0, 0]
    options["capacity_scheduler_policy"] = "MAX_UTILIZATION"
    seen, _ = run(TrtLlm(counter(6), **options), *load)
    assert seen[0] == ({0: (0, 4), 1: (0, 8), 2: (0, 4)}, 0)


def test_trtllm_pauses_the_last_started() -> None:
    """4 blocks of 4: with 8 tokens each both want a third block. Request 1 is computed again."""
    scheduler = TrtLlm(counter(4), capacity_scheduler_policy="MAX_UTILIZATION")
    seen, preempted = run(scheduler, (0, 4, 9), (0, 4, 9))
    assert seen == [
        prompts(0, 1, tokens=4),
        *[({}, 2)] * 4,
        *[({}, 1)] * 4,
        prompts(1, tokens=9),
        *[({}, 1)] * 3,
    ]
    assert preempted == [0, 1]


def test_trtllm_waits_until_a_prompt_fits_as_a_whole() -> None:
    """24 tokens a step: 10 + 12, and 4 with the decodes of the next."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 24}
    seen, _ = run(TrtLlm(counter(90), **options), (0, 10, 2), (0, 12, 2), (0, 4, 1))
    assert seen == [({0: (0, 10), 1: (0, 12)}, 0), ({2: (0, 4)}, 2)]


def test_trtllm_chunks_by_whole_blocks() -> None:
    """10 tokens a step and blocks of 4: 8 of 14, then 6 and 4 of 9, the rest beside a decode."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 10, "max_model_len": 24}
    scheduler = TrtLlm(counter(90), enable_chunked_prefill=True, **options)
    seen, _ = run(scheduler, (0, 14, 2), (0, 9, 1))
    assert seen == [({0: (0, 8)}, 0), ({0: (8, 6), 1: (0, 4)}, 0), ({1: (4, 5)}, 1)]


def test_trtllm_static_batch() -> None:
    """Nobody boards until the last has ended, though a seat is free."""
    options = {"capacity_scheduler_policy": "STATIC_BATCH", "max_new_tokens": "exact"}
    scheduler = TrtLlm(counter(90), max_num_seqs=2, **options)
    seen, _ = run(scheduler, (0, 4, 3), (0, 4, 1), (0, 4, 1))
    assert seen == [prompts(0, 1, tokens=4), ({}, 1), ({}, 1), prompts(2, tokens=4)]


# ---------------------------------------------------------------- SGLang


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


# ---------------------------------------------------------------- Hugging Face


def test_hf_pads_prompts_and_answers() -> None:
    """Two at a time: 5 tokens each, then 3 steps for both, though one has ended after the first.

    The third starts when the batch is over, and waits for nobody.
    """
    seen, _ = run(HfStatic(counter(90), batch_size=2), (0, 3, 2), (0, 5, 4), (0, 4, 1))
    assert seen == [prompts(0, 1, tokens=5), *[({}, 2)] * 3, prompts(2, tokens=4)]
