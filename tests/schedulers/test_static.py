"""Static batching, worked out by hand: every step takes 1 s, one block holds one token."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.executor import Timing
from simulator.core.log import Log
from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.schedulers.static import HfStatic, Static
from simulator.workload.workload import Workload
from tests.support import schedules
from tests.support.engines import Clock, made, play, workload


def static(usable: int = 1000, size: int = 1, **options: object) -> Static:
    """A static engine with `usable` blocks."""
    return made(Static, BlockCounter(usable + 1, size), **options)  # type: ignore[arg-type]


def run(load: Workload, scheduler: Static) -> Log:
    """Run stepwise: one row per step."""
    return play(load, scheduler, leap=False)[0]


def columns(log: Log, *names: str) -> list[tuple[object, ...]]:
    return log.steps[list(names)].tolist()


def ends(log: Log) -> dict[int, tuple[float, float, float]]:
    """First scheduled, first token and finish by request."""
    return {row[3]: row[:3] for row in log.requests.tolist()}


# ---------------------------------------------------------------- when a batch starts


def test_a_full_batch_starts_at_once() -> None:
    """The third arrival of three makes it full; nobody waits for the timeout."""
    load = workload((0, 4, 1), (1.25, 4, 1), (2.5, 4, 1))
    log = run(load, static(batch_size=3, timeout=60.0))
    assert {row[0] for row in ends(log).values()} == {2.5}


def test_a_batch_that_does_not_fill_starts_after_the_timeout() -> None:
    """Counted from the arrival of the oldest, not of the latest."""
    load = workload((1, 4, 1), (1.5, 4, 1), (1.75, 4, 1), (2.5, 4, 1))
    log = run(load, static(batch_size=4, timeout=1.0))
    assert {id: row[0] for id, row in ends(log).items()} == {0: 2.0, 1: 2.0, 2: 2.0, 3: 3.5}


def test_one_who_arrives_as_the_timeout_ends_is_taken_along() -> None:
    """The batch is formed after everything else of that instant."""
    load = workload((1, 4, 1), (2, 4, 1))
    assert ends(run(load, static(batch_size=4, timeout=1.0)))[1][0] == 2.0


def test_without_a_timeout_whoever_is_there_starts() -> None:
    """Timeout 0: the first alone, those who come meanwhile together."""
    load = workload((0, 4, 3), (0.5, 4, 1), (1.5, 4, 1))
    log = run(load, static(batch_size=4, timeout=0.0))
    assert {id: row[0] for id, row in ends(log).items()} == {0: 0.0, 1: 3.0, 2: 3.0}


def test_nobody_boards_a_batch_under_way() -> None:
    """The second waits until the longest of the first batch has ended, though seats are free."""
    load = workload((0, 4, 6), (0, 4, 2), (1, 4, 1))
    log = run(load, static(batch_size=2))
    assert ends(log) == {0: (0, 1, 6), 1: (0, 1, 2), 2: (6, 7, 7)}


def test_a_batch_takes_at_most_its_size() -> None:
    """5 requests in batches of 2: 2, 2 and, after the timeout long gone, 1."""
    log = run(workload(*[(0, 4, 2)] * 5), static(batch_size=2))
    assert columns(log, "running", "waiting") == [(2, 3), (2, 3), (2, 1), (2, 1), (1, 0), (1, 0)]


def test_the_batch_size_is_max_num_seqs_unless_given() -> None:
    """Larger than that it may not be, nor empty; the timeout is not negative."""
    assert static(max_num_seqs=7).batch_size == 7
    for options, message in (
        ({"batch_size": 8, "max_num_seqs": 7}, "batch_size: must be from 1 to max_num_seqs"),
        ({"batch_size": 0}, "batch_size: must be from 1"),
        ({"timeout": -0.1}, "timeout: must be from 0 to 1,000,000 seconds"),
        ({"timeout": float("inf")}, "timeout: must be from 0 to 1,000,000 seconds"),
        ({"timeout": float("nan")}, "timeout: must be from 0 to 1,000,000 seconds"),
    ):
        with pytest.raises(ValueError, match=message):
            static(**options)


# ---------------------------------------------------------------- prompts, padding, ghosts


def test_prompts_are_padded_to_the_longest_and_computed_before_anybody_decodes() -> None:
    """Prompts of 6 and 2, budget 8: 6 + 2 of padding, then 2 + 2; two tokens each come out.

    The first has its first token after the first step and waits for the other's prompt.
    """
    load = workload((0, 6, 2), (0, 2, 2))
    log = run(load, static(batch_size=2, max_num_batched_tokens=8, max_num_seqs=4))
    assert columns(log, "prefill_tokens", "wasted", "decodes", "context") == [
        (6, 2, 0, 0),
        (2, 2, 0, 0),
        (0, 0, 2, 14),
    ]
    assert ends(log) == {0: (0, 1, 3), 1: (0, 2, 3)}
    assert columns(log, "kv_tokens", "blocks_used") == [(6, 8), (8, 12), (10, 14)]
    assert log.steps["prefill_context"].tolist() == [21 + 3, 3 + 4 + 5 + 6, 0]
    assert log.runs.tolist() == [(1, 0, 0, 1), (2, 1, 0, 1)]


def test_a_chunk_that_ends_in_the_padding_holds_no_prompt() -> None:
    """Prompts of 7 and 2 at 4 a step: the padding of 5 is spread over chunks."""
    load = workload((0, 7, 1), (0, 2, 1))
    log = run(load, static(batch_size=2, max_num_batched_tokens=4, max_num_seqs=4))
    assert columns(log, "prefill_tokens", "wasted", "kv_tokens") == [
        (4, 0, 4),
        (3, 1, 7),
        (0, 4, 0),  # request 0 has ended: nobody needs what it stored
        (2, 0, 2),
    ]


def test_who_has_ended_keeps_the_seat_and_is_paid_for() -> None:
    """2, 4 and 1 tokens: from the second step on, 1 ghost, then 2."""
    load = workload((0, 3, 2), (0, 3, 4), (0, 3, 1))
    log = run(load, static(batch_size=3))
    names = ("decodes", "wasted", "context", "kv_tokens", "blocks_used", "running")
    assert columns(log, *names) == [
        (0, 0, 0, 9, 9, 3),
        (2, 1, 12, 8, 12, 3),
        (1, 2, 15, 5, 15, 3),
        (1, 2, 18, 6, 18, 3),
    ]
    assert ends(log) == {0: (0, 1, 2), 1: (0, 1, 4), 2: (0, 1, 1)}
    assert log.runs.tolist() == [(1, 2, 0, 0), (1, 0, 0, 1), (1, 1, 0, 3)]


def test_a_leap_over_ghosts_is_one_row() -> None:
    """The same, leapt: the last two steps are alike."""
    load = workload((0, 3, 2), (0, 3, 4), (0, 3, 1))
    log, _ = play(load, static(batch_size=3))
    assert columns(log, "steps", "decodes", "wasted") == [(1, 0, 0), (1, 2, 1), (2, 1, 2)]


def test_an_arrival_does_not_cut_the_leap_of_a_batch() -> None:
    """It cannot board; and a batch under way waits for no timeout."""
    scheduler = static(batch_size=1, timeout=9.0)
    log, _ = play(workload((0, 4, 9), (3.5, 4, 1)), scheduler)
    assert log.steps["steps"].tolist() == [1, 8, 1]
    assert scheduler.next_wakeup() is None
    scheduler.add(Request(2, 30.0, 4, 2))
    assert scheduler.next_wakeup() == 39.0
    scheduler.commit(scheduler.schedule(39.0), [40.0])
    scheduler.add(Request(3, 39.5, 4, 2))
    assert scheduler.next_wakeup() is None


def test_the_blocks_of_a_batch_are_free_when_the_last_one_ends() -> None:
    """Not before, and then all; the next batch starts in the same instant."""
    scheduler = static(usable=20, batch_size=2)
    log = run(workload((0, 5, 3), (0, 5, 1), (0, 9, 1), (0, 9, 1)), scheduler)
    assert columns(log, "start", "blocks_used") == [(0, 10), (1, 12), (2, 14), (3, 18)]
    assert scheduler.blocks.free == 20
    assert (scheduler.unfinished, scheduler._stored, scheduler.decodes.count) == (0, 0, 0)


def test_max_model_len_ends_a_member_too() -> None:
    """Prompt 6 of at most 8: two tokens."""
    log = run(workload((0, 6, 50), (0, 2, 4)), static(batch_size=2, max_model_len=8))
    assert [row[3:] for row in log.requests.tolist()] == [(0, 0, 0, 2, 1), (1, 0, 0, 4, 0)]


# ---------------------------------------------------------------- memory


def test_a_batch_takes_only_as_many_as_fit_with_their_padding() -> None:
    """12 blocks: 2 prompts padded to 4 and a third of 4 fit; padded to 5 only two would."""
    load = workload((0, 2, 1), (0, 3, 1), (0, 4, 1))
    assert run(load, static(usable=12, batch_size=3)).steps["running"].tolist() == [3]
    load = workload((0, 2, 1), (0, 3, 1), (0, 5, 1))
    log = run(load, static(usable=12, batch_size=3))
    assert columns(log, "running", "prefill_tokens", "wasted") == [(2, 5, 1), (1, 5, 0)]


def test_memory_is_counted_in_whole_blocks() -> None:
    """Blocks of 4: two prompts of 5 take 4 blocks."""
    load = workload((0, 5, 1), (0, 5, 1))
    assert run(load, static(usable=4, size=4, batch_size=2)).steps["running"].tolist() == [2]
    assert run(load, static(usable=3, size=4, batch_size=2)).steps["running"].tolist() == [1, 1]


def test_the_last_to_board_leaves_when_blocks_run_out_and_comes_again_later() -> None:
    """13 blocks, prompts of 4: 8, 10 and 12 blocks, and then no 14.

    Request 1 goes with 3 tokens out, keeps them, and boards again with 7 known tokens when
    request 0 has ended; it needs no padding then.
    """
    load = workload((0, 4, 6), (0, 4, 5))
    log = run(load, static(usable=13, batch_size=2))
    assert columns(
        log, "start", "prefill_tokens", "decodes", "running", "waiting", "blocks_used", "preempted"
    ) == [
        (0, 8, 0, 2, 0, 8, 0),
        (1, 0, 2, 2, 0, 10, 0),
        (2, 0, 2, 2, 0, 12, 0),
        (3, 0, 1, 1, 1, 7, 1),
        (4, 0, 1, 1, 1, 8, 0),
        (5, 0, 1, 1, 1, 9, 0),
        (6, 7, 0, 1, 0, 7, 0),
        (7, 0, 1, 1, 0, 8, 0),
    ]
    assert log.steps["kv_tokens"].tolist() == [8, 10, 12, 7, 8, 9, 7, 8]
    assert log.requests.tolist() == [(0, 1, 6, 0, 0, 0, 6, 0), (0, 1, 8, 1, 1, 0, 5, 0)]
    assert log.runs.tolist() == [(1, 1, 0, 2), (1, 0, 0, 5), (7, 1, 5, 1)]


def test_a_ghost_may_be_the_one_that_leaves() -> None:
    """Request 1 has ended; its seat and blocks go, and it is not computed again."""
    load = workload((0, 4, 8), (0, 4, 2))
    log = run(load, static(usable=13, batch_size=2))
    assert columns(log, "decodes", "wasted", "running", "blocks_used", "preempted") == [
        (0, 0, 2, 8, 0),
        (2, 0, 2, 10, 0),
        (1, 1, 2, 12, 0),
        (1, 0, 1, 7, 0),
        (1, 0, 1, 8, 0),
        (1, 0, 1, 9, 0),
        (1, 0, 1, 10, 0),
        (1, 0, 1, 11, 0),
    ]
    assert log.requests["preemptions"].tolist() == [0, 0]


def test_the_padding_of_a_victim_goes_with_it() -> None:
    """Padded to 8 it was; now it has 3 known tokens, and the other of its batch is padded to 3."""
    load = workload((0, 8, 6), (0, 1, 4), (0, 2, 1))
    log = run(load, static(usable=19, batch_size=2))
    assert columns(log, "prefill_tokens", "wasted", "preempted", "blocks_used") == [
        (9, 7, 0, 16),
        (0, 0, 0, 18),
        (0, 0, 1, 10),
        (0, 0, 0, 11),
        (0, 0, 0, 12),
        (0, 0, 0, 13),
        (5, 1, 0, 6),
        (0, 1, 0, 8),
    ]


def test_a_preemption_that_ends_its_batch_is_counted() -> None:
    """Request 0 is a ghost of 10 blocks, request 1 padded to 10: neither can go on."""
    load = workload((0, 10, 1), (0, 1, 5))
    log = run(load, static(usable=20, batch_size=2, timeout=1000.0))
    assert log.requests["preemptions"].tolist() == [0, 1]
    assert log.steps["preempted"].sum() == 1
    assert columns(log, "prefill_tokens", "decodes", "wasted") == [
        (11, 0, 9),
        (2, 0, 0),  # no step of ghosts alone
        (0, 1, 0),
        (0, 1, 0),
        (0, 1, 0),
    ]


def test_a_prefix_cache_is_refused() -> None:
    """There is none in static batching."""
    with pytest.raises(ValueError, match="blocks: static batching has no prefix cache"):
        made(Static, BlockManager(14, 1, prefix_caching=True), batch_size=2)


# ---------------------------------------------------------------- laws


@dataclass
class Auditor(Clock):
    """Counts, member by member and step by step, what the rows say in sums."""

    scheduler: Static = field(default_factory=static)
    rows: list[tuple[int, int, int]] = field(default_factory=list)

    def execute(self, step: Step) -> Timing:
        assert all(chunk.tokens > 0 for chunk in step.prefills)
        scheduler = self.scheduler
        useful = live = 0
        for request in scheduler.running:
            if request.finish >= 0:
                continue
            live += 1
            cached = request.computed
            if request.joined >= 0:
                cached += scheduler.decodes.tick - request.joined + bool(step.decodes)
            useful += max(0, cached - request.padding)
        wasted = step.padding + (len(scheduler.running) - live if step.decodes else 0)
        self.rows.append((useful, wasted, live if step.decodes else 0))
        return Timing(1.0)


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=9
    ),
    st.integers(1, 5),
    st.integers(6, 80),
    st.sampled_from([1, 3]),
    st.integers(5, 30),
)
@settings(max_examples=250, deadline=None)
def test_every_row_counts_useful_tokens_alone(jobs, batch, usable, size, budget) -> None:
    """kv_tokens without padding and ghosts, wasted slots and decodes, preemptions included."""
    load = workload(*sorted(jobs))
    scheduler = static(
        usable, size, batch_size=batch, timeout=2.0, max_num_seqs=5, max_num_batched_tokens=budget
    )
    auditor = Auditor(scheduler=scheduler)
    log, _ = play(load, scheduler, auditor, leap=False)
    assert columns(log, "kv_tokens", "wasted", "decodes") == auditor.rows
    assert log.steps["preempted"].sum() == log.requests["preemptions"].sum()
    computed = log.steps["prefill_tokens"].sum()
    accepted = np.isin(np.arange(len(load)), log.requests["id"][log.requests["reason"] != 2])
    assert computed >= load.prompt_tokens[accepted].sum()
    if not log.requests["preemptions"].any():
        assert computed == load.prompt_tokens[accepted].sum()
        tokens = load.output_tokens[accepted]
        assert log.steps["decodes"].sum() == (tokens - 1).sum()


def test_hf_pads_prompts_and_answers() -> None:
    """Two at a time: 5 tokens each, then 3 steps for both, though one has ended after the first.

    The third starts when the batch is over, and waits for nobody.
    """
    requests = (0, 3, 2), (0, 5, 4), (0, 4, 1)
    seen, _ = schedules.run(made(HfStatic, schedules.counter(90), batch_size=2), *requests)
    first, last = schedules.prompts(0, 1, tokens=5), schedules.prompts(2, tokens=4)
    assert seen == [first, *[({}, 2)] * 3, last]
