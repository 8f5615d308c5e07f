"""Blocks of groups that keep states, worked out by hand: blocks of 4 tokens."""

import pytest

from simulator.core.request import Request, Step
from simulator.features.states.states import States
from simulator.kv_cache.state_manager import StateManager
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.support.engines import made


def make(blocks: int = 100, *, exports: bool = False, retention: int | None = 0) -> Scheduler:
    """Make a scheduler of a model with one group of full attention and one of states."""
    manager = StateManager(
        blocks,
        4,
        True,
        states=[False, True],
        max_model_len=64,
        exports=exports,
        prefix_cache_retention_interval=retention,
    )
    return made(
        Scheduler,
        manager,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=64,
        features=[States()],
    )


def ask(id: int, prompt: int, shared: int, output: int = 2) -> Request:
    """Make a request whose first `shared` tokens are those of all others."""
    return Request(id, 0.0, prompt, output, segments=(("all", shared), (id, prompt - shared)))


def play(scheduler: Scheduler, *requests: Request) -> list[list[tuple[int, int, int]]]:
    """Let requests end; return (id, start, tokens) of the chunks of each step that has some."""
    for request in requests:
        scheduler.add(request)
    found, now = [], 0.0
    while len(scheduler.waiting) or len(scheduler.running):
        step: Step = scheduler.schedule(now)
        found.append([(one.request.id, one.start, one.tokens) for one in step.prefills])
        now += 1
        scheduler.commit(step, [now])
    return [chunks for chunks in found if chunks]


def test_a_prompt_ends_a_chunk_at_its_last_boundary() -> None:
    """Of 13 tokens the last that can be found are 12; a kernel that exports needs one chunk."""
    assert play(make(), ask(0, 13, 1)) == [[(0, 0, 12)], [(0, 12, 1)]]
    assert play(make(exports=True), ask(0, 13, 1)) == [[(0, 0, 13)]]
    assert play(make(), ask(0, 12, 1)) == [[(0, 0, 8)], [(0, 8, 4)]]


def test_a_state_takes_one_block_and_those_before_it_none() -> None:
    """12 tokens: 3 blocks of full attention, 1 of states; one more where one is exported."""
    scheduler = make()
    scheduler.add(ask(0, 13, 1))
    scheduler.schedule(0.0)
    assert scheduler.blocks.usable - scheduler.blocks.free == 3 + 1
    scheduler = make(exports=True)
    scheduler.add(ask(0, 13, 1))
    scheduler.schedule(0.0)
    assert scheduler.blocks.usable - scheduler.blocks.free == 4 + 2


def test_the_third_of_those_that_branch_finds_the_junction() -> None:
    """8 tokens are shared: the second computes the state after them, at which its chunk ends."""
    scheduler = make()
    play(scheduler, ask(0, 14, 9))
    second, third = ask(1, 14, 9), ask(2, 14, 9)
    assert play(scheduler, second) == [[(1, 0, 8)], [(1, 8, 4)], [(1, 12, 2)]]
    assert play(scheduler, third) == [[(2, 8, 4)], [(2, 12, 2)]]
    assert (second.cached, third.cached) == (0, 8)


def test_nobody_reads_a_state_in_the_step_that_computes_it() -> None:
    """The same prompt at once: the second waits for the next step."""
    chunks = play(make(), ask(0, 13, 13 - 1), ask(1, 13, 13 - 1))
    assert chunks == [[(0, 0, 12)], [(0, 12, 1), (1, 12, 1)]]


@pytest.mark.parametrize(("rests", "waits"), [(True, False), (False, True)])
@pytest.mark.parametrize("prompt", [13, 14])
def test_before_vllm_0_33_a_state_is_new_while_its_request_is_at_it(
    prompt: int, rests: bool, waits: bool
) -> None:
    """The first computes what is beyond 12, its last boundary: another waits for that, too."""
    scheduler = make()
    scheduler.blocks.rests_states = rests
    first, second = ask(0, prompt, 12), ask(1, prompt + 1, 12)
    rest, other = (0, 12, prompt - 12), (1, 12, prompt - 11)
    after = [[rest], [other]] if waits else [[rest, other]]
    assert play(scheduler, first, second) == [[(0, 0, 12)], *after]


def test_with_none_every_state_at_a_boundary_is_kept() -> None:
    """Chunks of 32 tokens: a prompt of 44 has states after 32 and 40, one kept apart of its end."""
    for retention, found in ((None, 32), (0, 0), (16, 32)):
        scheduler = make(retention=retention)
        play(scheduler, ask(0, 44, 34))
        again = ask(1, 40, 34)
        play(scheduler, again)
        assert again.cached == found


def test_all_blocks_come_back() -> None:
    scheduler = make(30)
    play(scheduler, *(ask(id, 20 + id, 9, output=9) for id in range(8)))
    assert scheduler.blocks.free == scheduler.blocks.usable
    assert scheduler.blocks.most_held(20) == 5 + 2


def test_tokens_in_use_are_those_of_full_attention_and_whole_states() -> None:
    """6 tokens in a prompt that is half read: 2 blocks of full attention with 6 tokens, a state."""
    scheduler = make()
    scheduler.add(ask(0, 6, 1, output=9))
    for now in range(3):
        scheduler.commit(scheduler.schedule(now), [now + 1.0])
    blocks = scheduler.blocks
    tokens = 8
    held = blocks.usable - blocks.free
    assert blocks.in_use(tokens) == tokens + 4 * (held - 2)
