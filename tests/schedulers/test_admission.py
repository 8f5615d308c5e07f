"""Rules of admission: what stays free for decodes, what is reserved."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import load_scenario
from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockManager
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError
from tests.support.engines import fcfs, made, play, workload


def boarded(scheduler: Scheduler, *requests: tuple[int, int]) -> list[int]:
    """Who boards in the first step, of requests (prompt, output)."""
    for id, (prompt, output) in enumerate(requests):
        scheduler.add(Request(id, 0.0, prompt, output))
    return [chunk.request.id for chunk in scheduler.schedule(0.0).prefills]


@pytest.mark.parametrize(("blocks", "who"), [(9, [0, 1]), (8, [0]), (7, [0])])
def test_room_to_decode_stays_free_for_everybody_who_runs(blocks: int, who: list[int]) -> None:
    """Prompts of 2 blocks, 2 blocks each to decode: 2 taken, 2 wanted and 4 reserved make 8."""
    assert boarded(fcfs(blocks, 4, min_decode_blocks=2), (8, 9), (8, 9)) == who


@pytest.mark.parametrize(("scope", "count"), [("running", 3), ("newcomer", 8)])
def test_room_to_decode_for_everybody_or_for_the_newcomer(scope: str, count: int) -> None:
    """100 blocks and the null block, prompts of 10, 16 to decode; r run, 100 - 10 r are free.

    For everybody: 10 + 16 * 3 = 58 of 80, then 10 + 16 * 4 = 74 of 70. For the newcomer: 26 of 30
    with 7 running, then 26 of 20.
    """
    scheduler = fcfs(101, 4, min_decode_blocks=16, min_decode_blocks_scope=scope)
    assert len(boarded(scheduler, *[(40, 9)] * 12)) == count


def test_one_who_is_alone_needs_no_room_to_decode() -> None:
    """As with the watermark: else a long prompt could never board."""
    assert boarded(fcfs(4, 4, min_decode_blocks=9), (12, 1)) == [0]


@pytest.mark.parametrize(
    ("reserve", "blocks", "who"),
    [
        (None, 5, [0, 1]),
        ("max_tokens", 7, [0, 1]),
        ("max_tokens", 6, [0]),
        ("max_model_len", 13, [0, 1]),
        ("max_model_len", 12, [0]),
        (0, 5, [0, 1]),
        (8, 9, [0, 1]),
        (8, 8, [0]),
    ],
)
def test_prompt_and_answer_are_reserved(reserve: object, blocks: int, who: list[int]) -> None:
    """Prompts of 8 tokens and answers of 4, at most 24 in all; blocks of 4, one of them null."""
    scheduler = fcfs(blocks, 4, max_model_len=24, reserve_output_tokens=reserve)
    assert boarded(scheduler, (8, 4), (8, 4)) == who


def test_a_reservation_does_not_pass_over_to_the_next() -> None:
    """6 blocks of 4: each request is promised 4, so they run one after the other."""
    log, _ = play(
        workload((0, 8, 8), (0, 8, 8)), fcfs(7, 4, reserve_output_tokens="max_tokens"), leap=False
    )
    assert log.requests["first_scheduled"].tolist() == [0.0, 8.0]
    assert set(log.steps["blocks_used"].tolist()) == {4}
    freely, _ = play(workload((0, 8, 8), (0, 8, 8)), fcfs(7, 4), leap=False)
    assert freely.requests["first_scheduled"].tolist() == [0.0, 0.0]
    assert freely.requests["preemptions"].sum() == 1


def test_a_shared_prefix_is_promised_once() -> None:
    """Both promised 6 blocks of which 4 are the same: 8 in all, of 8."""
    load = workload((0, 17, 4), (1, 17, 4))
    load.segments = [(("s", 16), (("in", i), 1)) for i in range(2)]
    for usable, second in ((8, 1.0), (7, 4.0)):
        blocks = BlockManager(usable + 1, 4, prefix_caching=True)
        log, _ = play(load, made(Scheduler, blocks, reserve_output_tokens="max_tokens"), leap=False)
        assert log.requests["first_scheduled"].max() == second
        assert blocks.reserved == 0


requests = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 3.0]), st.integers(1, 30), st.integers(1, 30)),
    min_size=1,
    max_size=12,
).map(sorted)


@given(requests, st.sampled_from(["max_tokens", "max_model_len"]), st.integers(20, 60))
@settings(max_examples=100, deadline=None)
def test_nobody_is_preempted_whose_answer_is_reserved(rows, reserve, blocks) -> None:
    """Guaranteed no evict: the very point."""
    scheduler = made(
        Scheduler, BlockManager(blocks, 4, True), max_model_len=64, reserve_output_tokens=reserve
    )
    log, _ = play(workload(*rows), scheduler)
    assert not log.requests["preemptions"].any()
    assert (log.steps["blocks_used"] < blocks).all()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (
            "allocation: contiguous, reserve_output_tokens: 5",
            "reserves max_model_len for",
        ),
        ("scheduling_policy: static, min_decode_blocks: 2", "static has no such rule"),
        ("min_decode_blocks_scope: newcomer", "needs min_decode_blocks, which is 0"),
        ("min_decode_blocks: 2, min_decode_blocks_scope: new", "min_decode_blocks_scope"),
        (
            "scheduling_policy: static, min_decode_blocks: 2, min_decode_blocks_scope: newcomer",
            "static has no such rule",
        ),
        ("min_decode_blocks: -1", "must be at least 0, not -1"),
        ("num_gpu_blocks_override: 100, min_decode_blocks: 49", "at most 48, not 49: of 99 KV"),
        ("num_gpu_blocks_override: 100, min_decode_blocks: 44, watermark: 0.1", "at most 43, not"),
        (
            "num_gpu_blocks_override: 100, min_decode_blocks: 98, "
            "min_decode_blocks_scope: newcomer",
            "at most 97, not 98: of 99 KV blocks that leaves none for a second request",
        ),
        ("reserve_output_tokens: all", "max_tokens"),
    ],
)
def test_what_means_nothing_is_refused(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(f"engine: {{{line}}}\n")
    with pytest.raises(HeadwayError, match=what):
        load_scenario(path)
