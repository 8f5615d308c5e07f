"""Schedules of SGLang, worked out by hand: every step takes 1 s."""

import numpy as np
import pytest

from simulator.core.log import RUN
from simulator.core.request import Request, Step
from simulator.kv_cache.radix_cache import RadixCache
from simulator.policies.orders import SJF
from simulator.schedulers.running_requests import PreemptionLoop
from simulator.schedulers.sglang.overlap import OverlappedRunning, OverlappedSgLang
from simulator.schedulers.sglang.prefill import PrefillBudget
from simulator.schedulers.sglang.queue_order import Queue, QueueOrder
from simulator.schedulers.sglang.scheduler import SgLang
from simulator.schedulers.vllm.async_scheduler import Run
from tests.support.engines import made, play, workload
from tests.support.schedules import counter, prompts, run


def test_sglang_expects_seven_tenths_of_what_may_still_come() -> None:
    """100 tokens, prompts of 10, answers of at most 20, a page each: 31 < 100, 69 and 38, not 7.

    When request 0 ends, requests 1 and 2 hold 12 tokens each and may say 17 more: of 76 free
    tokens 34 times 0.698 are set aside, and 31 < 52.3.
    """
    scheduler = made(SgLang, counter(100, 1), max_new_tokens=20, max_model_len=100)
    assert scheduler.ratio.value == 0.7
    seen, _ = run(scheduler, (0, 10, 3), *[(0, 10, 20)] * 3)
    assert seen[:4] == [
        prompts(0, 1, 2, tokens=10),
        *[({}, 3)] * 2,
        prompts(3, tokens=10),
    ]
    assert scheduler.ratio.value == 0.7  # idle


def test_sglangs_ratio_falls_with_each_step_of_decodes() -> None:
    """From 0.7 by (0.7 - 0.098) / 4 a step; the answer of 7 has 6 such steps."""
    ratios: list[float] = []

    class Listening(SgLang):
        def schedule(self, now: float) -> Step:
            step = super().schedule(now)
            if step.decodes:
                ratios.append(self.ratio.value)
            return step

    run(
        made(Listening, counter(100, 1), new_token_ratio_decay_steps=4, max_model_len=100),
        (0, 10, 7),
    )
    assert ratios == pytest.approx([0.5495, 0.399, 0.2485, 0.098, 0.098, 0.098])


def test_sglang_retracts_those_with_the_fewest_tokens_out() -> None:
    """41 tokens of memory, none set aside. At 7 s three have 5 tokens out, and two are free.

    The longest prompt goes, with 18 tokens, and is enough. Of what the others may say all is set
    aside then, 50 / 25, and 27 must be free for it: it comes back when they have ended.
    """
    options = {"schedule_conservativeness": 0.0, "max_new_tokens": 12, "max_model_len": 40}
    scheduler = made(SgLang, counter(41, 1), **options)
    seen, preempted = run(scheduler, (0, 10, 12), (0.5, 14, 12), (1.5, 3, 12))
    assert seen == [
        prompts(0, tokens=10),
        prompts(1, tokens=14),
        prompts(2, tokens=3),
        *[({}, 3)] * 4,
        *[({}, 2)] * 7,
        ({1: (0, 19)}, 0),
        *[({}, 1)] * 6,
    ]
    assert preempted == [0, 1, 0]


def test_sglang_chunks_the_last_prompt_while_decodes_wait() -> None:
    """8 tokens of prompts a step: 20 = 8 + 8 + 4, and then both decode. 6 fill 2 pages: no more."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "max_model_len": 60}
    assert run(made(SgLang, counter(90), **options), (0, 6, 1))[0] == [prompts(0, tokens=6)]
    seen, _ = run(made(SgLang, counter(90), **options), (0, 4, 3), (0.5, 20, 2))
    assert seen == [
        prompts(0, tokens=4),
        ({1: (0, 8)}, 0),
        ({1: (8, 8)}, 0),
        ({1: (16, 4)}, 0),
        ({}, 2),
        ({}, 1),
    ]


def test_sglang_takes_no_prompt_beyond_max_prefill_tokens_but_the_first() -> None:
    """4 + 4 of 8. Where prompts are whole, a third 4 would be beyond 10, and 12 go alone."""
    options = {"max_prefill_tokens": 8, "max_model_len": 20}
    seen, _ = run(made(SgLang, counter(90), **options), *[(0, 4, 1)] * 3)
    assert seen == [prompts(0, 1, tokens=4), prompts(2, tokens=4)]
    options = {"max_prefill_tokens": 10, "max_model_len": 20, "enable_chunked_prefill": False}
    seen, _ = run(made(SgLang, counter(90), **options), *[(0, 4, 1)] * 3)
    assert seen == [prompts(0, 1, tokens=4), prompts(2, tokens=4)]
    seen, _ = run(made(SgLang, counter(90), **options), (0, 12, 1), (0, 4, 1))
    assert seen == [prompts(0, tokens=12), prompts(1, tokens=4)]


def test_decodes_in_a_mixed_step_count_among_its_tokens_of_prompts() -> None:
    """10 tokens, of which a decode takes 1: 9 of a prompt are all, and 4 of the next wait."""
    options = {"enable_mixed_chunk": True, "max_prefill_tokens": 10, "max_model_len": 40}
    seen, _ = run(made(SgLang, counter(400, 1), **options), (0, 4, 4), (0.5, 9, 1), (0.5, 4, 1))
    assert seen == [
        prompts(0, tokens=4),
        ({1: (0, 9)}, 1),
        ({2: (0, 4)}, 1),
        ({}, 1),
    ]


@pytest.mark.parametrize(("order", "second"), [("lpm", 2), ("fcfs", 1)])
def test_sglang_serves_the_longest_known_prefix_first(order: str, second: int) -> None:
    """Request 2 begins as request 0 did; one seat."""
    scheduler = made(SgLang, RadixCache(90, 4), order=order, max_num_seqs=1, max_model_len=40)
    segments = [(("a", 8), ("x", 4)), (("b", 12),), (("a", 8), ("y", 4))]
    seen, _ = run(scheduler, (0, 12, 1), (0.5, 12, 1), (0.5, 12, 1), segments=segments)
    steps = [({0: (0, 12)}, 0), ({1: (0, 12)}, 0), ({2: (8, 4)}, 0)]
    assert seen == [steps[0], steps[second], steps[3 - second]]


@pytest.mark.parametrize("size", [1, 4])
def test_sglang_computes_a_common_beginning_once(size: int) -> None:
    """Requests 0 and 1 begin alike and nothing is known: request 1 waits, request 2 overtakes."""
    scheduler = made(
        SgLang, RadixCache(360 // size, size), order="lpm", max_num_seqs=2, max_model_len=60
    )
    segments = [(("a", 32), ("x", 4)), (("a", 32), ("y", 4)), (("b", 36),)]
    seen, _ = run(scheduler, *[(0, 36, 1)] * 3, segments=segments)
    assert seen == [({0: (0, 36), 2: (0, 36)}, 0), ({1: (32, 4)}, 0)]


def test_sglang_mixes_decodes_into_steps_of_prompts() -> None:
    """Of chunks of 8 a decode takes one; the first chunk is cut to whole pages of 4."""
    options = {"enable_mixed_chunk": True, "max_num_batched_tokens": 8, "max_model_len": 60}
    seen, _ = run(made(SgLang, counter(90), **options), (0, 4, 9), (0.5, 20, 2))
    assert seen[:4] == [
        prompts(0, tokens=4),
        ({1: (0, 4)}, 1),
        ({1: (4, 7)}, 1),
        ({1: (11, 7)}, 1),
    ]
    assert seen[4] == ({1: (18, 2)}, 1)


def test_sglang_knows_what_ignores_the_end() -> None:
    """Answers of 9 at least, as their client allows, though they would have ended after 3."""
    seen, _ = run(made(SgLang, counter(90), ignore_eos=True, max_new_tokens=9), (0, 4, 3))
    assert seen == [prompts(0, tokens=4), *[({}, 1)] * 8]


def test_who_ends_last_counts_before_the_one_that_would_have_been() -> None:
    """80 tokens of memory, prompts of 20, answers of 2, 3 and 9 that ignore the end: all fit.

    Request 2 is looked at behind request 0: 17 are free when it is in, and 20 more when that ends.
    """
    scheduler = made(
        SgLang, counter(80, 1), ignore_eos=True, max_new_tokens="exact", max_model_len=60
    )
    seen, _ = run(scheduler, (0, 20, 2), (0, 20, 3), (0, 20, 9))
    assert seen[0] == prompts(0, 1, 2, tokens=20)


@pytest.mark.parametrize(("memory", "second"), [(17, ({}, 1)), (18, prompts(1, tokens=8))])
def test_an_answer_of_one_token_that_ignores_the_end_counts(memory: int, second: object) -> None:
    """Behind its prompt more than two tokens must be free for each of the two that then run."""
    scheduler = made(
        SgLang, counter(memory, 1), ignore_eos=True, max_new_tokens="exact", max_model_len=60
    )
    seen, _ = run(scheduler, (0, 4, 2), (0, 8, 1))
    assert seen[:2] == [prompts(0, tokens=4), second]


def test_sglang_lets_the_urgent_take_a_place() -> None:
    """One seat. Priority 20 differs from 0 by more than 10, 5 does not."""
    options = {"enable_priority_scheduling": True, "max_num_seqs": 1, "max_model_len": 60}
    load = (0, 4, 6), (1.5, 4, 1)
    for urgent, gone in ((5, 0), (20, 1)):
        scheduler = made(SgLang, counter(90, 1), **options)
        seen, preempted = run(scheduler, *load, priority=np.array([0, urgent]))
        assert preempted == [gone, 0]
        assert seen[2][0] == ({1: (0, 4)} if gone else {})


def test_who_is_urgent_takes_a_place_if_its_answer_just_fits() -> None:
    """15 tokens of memory: at 3 s, 9 are free and 6 of 9 to come. With those 6, 9 are enough for 9.

    What its prompt takes is not known before a first try.
    """
    options = {"enable_priority_scheduling": True, "max_num_seqs": 1, "max_model_len": 60}
    options |= {"init_new_token_ratio": 1.0, "min_new_token_ratio_factor": 1.0}
    scheduler = made(SgLang, counter(15, 1), max_new_tokens=9, **options)
    _, preempted = run(scheduler, (0, 4, 9), (2.5, 4, 1), priority=np.array([0, 20]))
    assert preempted == [1, 0]


def test_who_was_sent_away_takes_no_place_in_which_its_prompt_does_not_fit() -> None:
    """33 tokens of memory, two seats. At 9 s request 1 is retracted, and request 2 has its seat.

    Then request 1 is more urgent than request 0, but what that has yet to say is no room for 14.
    """
    options = {"enable_priority_scheduling": True, "max_num_seqs": 2, "max_new_tokens": 12}
    options |= {"schedule_conservativeness": 0.0, "retract_decode_steps": 0, "max_model_len": 60}
    scheduler = made(SgLang, counter(33, 1), **options)
    load = (0, 4, 12), (0.5, 14, 12), (7.5, 2, 2)
    _, preempted = run(scheduler, *load, priority=np.array([0, 20, 40]))
    assert preempted == [0, 1, 0]


def test_sglang_tries_anew_who_came_while_a_prompt_was_split() -> None:
    """14 pages of 4, 10 tokens of prompts a step, the shortest first.

    At 1 s request 1 gets 8 of its 16 tokens, and request 2 does not fit: the batch counts as full.
    At 2 s request 3 lacks tokens of the step, at 3 s it has them.
    """
    options = {"policy": SJF(), "max_num_batched_tokens": 10, "max_model_len": 56}
    scheduler = made(SgLang, counter(14), max_new_tokens="exact", **options)
    seen, _ = run(scheduler, (0, 8, 12), (0.5, 16, 9), (0.5, 30, 9), (1.5, 3, 2))
    assert seen[:4] == [
        prompts(0, tokens=8),
        ({1: (0, 8)}, 0),
        ({1: (8, 8)}, 0),
        prompts(3, tokens=3),
    ]


def test_a_shorter_prompt_has_a_page_of_two_beside_a_split_one() -> None:
    """Under shortest-prefill-first; with one page a step all are the split prompt's."""
    for size, second in ((8, {0: (8, 4), 1: (0, 3)}), (4, {0: (4, 4)})):
        options = {"order": "shortest-prefill-first", "max_num_batched_tokens": size}
        scheduler = made(SgLang, RadixCache(90, 4), max_model_len=60, **options)
        seen, _ = run(scheduler, (0, 40, 1), (0.5, 3, 1))
        assert seen[1] == (second, 0)


def test_the_passes_between_prefills_take_no_time_where_nobody_decodes() -> None:
    scheduler = made(SgLang, counter(90), prefill_decode_interval=3, max_model_len=60)
    assert run(scheduler, (0, 4, 1), (0.5, 4, 1))[0] == [prompts(0, tokens=4), prompts(1, tokens=4)]


@pytest.mark.parametrize(("size", "between"), [(1, 40), (4, 36)])
def test_a_batch_evicts_no_more_than_it_takes(size: int, between: int) -> None:
    """Of 80 tokens 40 are cached. Pages are counted one more for each prompt, tokens are not.

    So the prompt of request 0, which comes again as that of 2, is there but for its last page.
    """
    scheduler = made(SgLang, RadixCache(80 // size + 1, size), max_new_tokens=1, max_model_len=60)
    load = workload((0, 40, 1), (2, between, 1), (4, 40, 1))
    load.segments = [(("a", 40),), (("b", between),), (("a", 40),)]
    log, _ = play(load, scheduler)
    assert log.requests["cached"].tolist() == [0, 0, 40 - size]


def test_what_those_who_wait_will_find_is_used_before_others_are_evicted() -> None:
    """`a` came before `b`, but somebody waits who begins so."""
    tree = RadixCache(11, 1)
    for number, name in enumerate("ab"):
        request = Request(number, 0.0, 4, 9, segments=((name, 4),))
        tree.admit(request, tree.match(request), 4)
        tree.cache(request)
        request.finish = 1.0
        tree.release(request)
    queue = Queue(None)
    queue.add(Request(2, 0.0, 5, 9, segments=(("a", 4), ("x", 1))))
    QueueOrder("fcfs", tree, None, 0).sort(queue, 0, 0.0)
    tree.make_room(6)
    assert len(tree.match(queue[0])) == tree.hashed == 4


@pytest.mark.parametrize(
    ("name", "allowed", "message"),
    [
        ("max_num_seqs", 1, "must be at least 1, not 0"),
        ("max_num_batched_tokens", 4, "must be at least 4, not 3"),
        ("max_prefill_tokens", 1, "must be at least 1, not 0"),
        ("prefill_decode_interval", 0, "must be at least 0, not -1"),
        ("new_token_ratio_decay_steps", 1, "must be at least 1, not 0"),
        ("retract_decode_steps", 0, "must be at least 0, not -1"),
        ("schedule_conservativeness", 1000.0, "must be from 0 to 1000, not 1001"),
        ("init_new_token_ratio", 1.0, "must be from 0 to 1, not 2"),
        ("min_new_token_ratio_factor", 1.0, "must be from 0 to 1, not 2"),
    ],
)
def test_numbers_have_ends(name: str, allowed: float, message: str) -> None:
    """The last that is allowed is, the next is not."""
    made(SgLang, counter(90), **{name: allowed})
    beyond = allowed - 1 if isinstance(allowed, int) else allowed + 1
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        made(SgLang, counter(90), **{name: beyond})


def test_overlap_decodes_once_in_vain_for_who_ends_by_itself() -> None:
    """Answers of 3 of at most 9: a third decode is on its way when the third token comes out.

    At most 3, the end can be foreseen.
    """
    for most, decodes in ((9, 3), (3, 2)):
        scheduler = made(OverlappedSgLang, counter(90), max_new_tokens=most, max_model_len=60)
        seen, _ = run(scheduler, (0, 4, 3))
        assert seen == [prompts(0, tokens=4), *[({}, 1)] * decodes]


def test_overlap_tells_when_the_tokens_came() -> None:
    """The last of each run as its request ends, also of the one that came later."""
    scheduler = made(OverlappedSgLang, counter(90), max_new_tokens=9, max_model_len=60)
    log, _ = play(workload((0, 4, 9), (3.5, 4, 3)), scheduler)
    ends = {row["id"]: row["finish"] for row in log.requests}
    assert len(log.runs) == 2
    for run_ in log.runs:
        last = int(run_["first_tick"] + run_["ticks"]) - 1
        assert log.tick_ends[last] == ends[run_["id"]]


def test_overlap_tells_when_an_answer_of_one_token_came() -> None:
    """It leaves the batch of those who decode before the batch with its prompt is over."""
    scheduler = made(OverlappedSgLang, counter(90), max_model_len=60)
    load = workload((0, 4, 9), (3.5, 4, 1), max_tokens=np.array([9, 1]))
    log, _ = play(load, scheduler)
    ends = {row["id"]: row["finish"] for row in log.requests}
    runs = {row["id"]: row for row in log.runs}
    assert (runs[1]["start"], runs[1]["ticks"]) == (ends[1], 0)
    assert runs[0]["ticks"] == 8


def test_who_comes_first_may_be_run_at_once() -> None:
    """An engine asks a scheduler that says so when its step is over, not when its leap is."""
    assert made(SgLang, counter(90)).add(Request(0, 0.0, 4, 1))


def test_sglang_shuffles_by_seed() -> None:
    """The same seed, the same order; another seed, another order."""

    def order(seed: int) -> list[int]:
        scheduler = made(SgLang, counter(90), order="random", seed=seed, max_num_seqs=1)
        return [next(iter(step[0])) for step in run(scheduler, *[(0, 4, 1)] * 9)[0]]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(9))


def test_who_comes_back_to_a_whole_prompt_in_the_tree_goes_first_under_hrrn() -> None:
    """Nothing of its prompt is left to compute: its ratio is endless, and not divided by 0."""
    tree = RadixCache(50, 1)
    scheduler = made(SgLang, tree, order="hrrn", max_model_len=50)
    back, fresh = Request(0, 0.0, 4, 9), Request(1, 0.0, 4, 9)
    tree.admit(back, tree.match(back), 4)
    tree.cache(back)
    back.generated = 3
    tree.release(back)
    for request in (fresh, back):
        scheduler.queue.add(request)
    scheduler.queue_order.sort(scheduler.queue, 0, 0.0)
    assert list(scheduler.queue) == [back, fresh]


def test_who_hangs_up_makes_room_in_a_full_batch() -> None:
    """Two seats: the third is tried again when one of those who run has left."""
    one = made(SgLang, counter(100, 1), max_num_seqs=2, max_new_tokens=20, max_model_len=100)
    asked = [Request(k, 0.0, 10, 20) for k in range(3)]
    for request in asked:
        one.add(request)
    for now in (0.0, 1.0):
        one.commit(one.schedule(now), [now + 1.0])
    assert one.full
    one.cancel(asked[0])
    assert [chunk.request.id for chunk in one.schedule(2.0).prefills] == [2]


def test_a_run_of_decodes_in_the_first_second_is_written_down() -> None:
    running = OverlappedRunning(counter(90), PreemptionLoop("sglang"))
    request = Request(0, 0.0, 4, 9)
    request.output_limit = 9
    running.admit(request, 0.0)
    running.start_decoding(request)
    running.open[request] = Run(0.25)
    running.decodes.advance(2)
    running.stop_decoding(request)
    assert np.frombuffer(bytes(running.runs), RUN)["start"].tolist() == [0.25]


def test_a_split_prompt_goes_on_with_one_token_where_one_is_not_promised() -> None:
    """Where none is, by a chunk: it must give back its memory one day."""
    scheduler = made(SgLang, counter(100, 1), max_model_len=100)
    for left, tokens in ((1, 1), (0, 8), (2, 2)):
        request = Request(0, 0.0, 20, 1)
        request.allowed = 1
        free = scheduler.blocks.free
        budget = PrefillBudget(scheduler, 64, 8, float(free - left), 0)
        assert budget.continue_chunked(request, None) == tokens
