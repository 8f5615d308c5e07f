"""The scheduler that works on sums decides as vLLM's loop does, taken literally."""

from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.vllm.reference import Job, ReferenceScheduler
from simulator.schedulers.vllm.scheduler import Scheduler

requests = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 20), st.sampled_from([0, 0, 1, 3, 9])),
    min_size=1,
    max_size=12,
)
"""Tokens of prompt and answer, and how many steps after the one before it arrives."""


@given(
    requests, st.integers(1, 40), st.sampled_from([1, 2, 4]), st.integers(1, 6), st.integers(6, 40)
)
@settings(max_examples=500, deadline=None)
def test_it_decides_as_the_literal_loop_does(drawn, usable, size, seats, budget) -> None:
    """Every step: tokens of each request, who is admitted, preempted and done, free blocks."""
    knobs = {"max_num_seqs": seats, "max_num_batched_tokens": budget}
    fast = Scheduler(
        BlockCounter(usable + 1, size),
        **knobs,
        max_model_len=64,
        watermark=0.0,
        scheduler_reserve_full_isl=False,
    )
    literal = ReferenceScheduler(usable, size, **knobs)
    todo, at = [], 0
    for id, (prompt, output, gap) in enumerate(drawn):
        at += gap
        todo.append((at, Request(id, at + id / 1000, prompt, output)))
    known = [request for _, request in todo]
    number = 0
    while todo or fast.running or fast.waiting:
        while todo and todo[0][0] <= number:
            _, request = todo.pop(0)
            if fast.fits(request):
                fast.add(request)
                literal.add(Job(request.id, request.prompt_tokens, request.output_tokens))
        before = {request.id for request in fast.running}
        preemptions = [request.preemptions for request in known]
        step = fast.schedule(float(number))
        gone = {r.id for r, n in zip(known, preemptions, strict=True) if r.preemptions > n}
        expected = literal.schedule()
        chunks = {c.request.id: c.tokens for c in (*step.prefills, *(step.singles or ()))}
        decodes = {request.id: 1 for request in fast.running if request.joined >= 0}
        assert chunks | decodes == expected.tokens
        assert [c.request.id for c in step.prefills if c.request.id not in before] == (
            expected.admitted
        )
        assert gone == set(expected.preempted)
        assert [request.id for request in fast.running] == [job.id for job in literal.running]
        repeats = fast.horizon(step) if step.decodes or step.prefills else 1
        if todo:
            repeats = min(repeats, max(1, todo[0][0] - number))
        for _ in range(repeats - 1):  # what the fast one leaps over
            assert literal.commit(expected) == []
            again = literal.schedule()
            assert (again.tokens, again.admitted, again.preempted) == (expected.tokens, [], [])
        done = fast.commit(step, [float(number + k + 1) for k in range(repeats)])
        assert [request.id for request in done] == literal.commit(expected)
        assert fast.blocks.free == literal.free
        number += repeats
    assert not literal.running
    assert not literal.waiting
