"""The fast scheduler and its engine against vLLM's loop as `reference.py` has it."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.request import Chunk, Request, Step
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.schedulers.vllm.reference import Reference, StepTokens, serve
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.engine.test_laws import clocks, times
from tests.support.engines import Clock, made, play, workload
from tests.support.single_steps import expand_steps

limits = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 40),
        "max_model_len": st.sampled_from([64, 30]),
    }
)
sizes = st.tuples(times, st.integers(1, 40), st.integers(1, 30))


@dataclass
class Watch:
    """What the reference's steps take by a clock, and a row of each."""

    scheduler: Reference
    clock: Clock
    rows: list[list[int]] = field(default_factory=list)
    seen: dict[Request, int] = field(default_factory=dict)

    def seconds(self, tokens: StepTokens) -> float:
        """A request that lacks one token, and has answered before, decodes."""
        engine = self.scheduler
        decodes = [one for one in tokens if one.generated and one.computed == one.known]
        decodes = [one for one in decodes if tokens[one] == 1]
        chunks = [Chunk(r, r.computed - n, n) for r, n in tokens.items() if r not in decodes]
        step = Step(chunks, len(decodes), sum(one.computed for one in decodes))
        present = {*engine.running, *engine.waiting}
        preempted = sum(one.preemptions - self.seen.get(one, 0) for one in present)
        self.seen = {one: one.preemptions for one in present}
        prefill = sum(chunk.tokens for chunk in chunks)
        used = engine.usable - engine.free
        self.rows.append([step.context, prefill, len(decodes), preempted])
        self.rows[-1] += [len(engine.running), len(engine.waiting), used]
        return self.clock.execute(step).seconds


COLUMNS = ["context", "prefill_tokens", "decode_tokens", "preempted"]
COLUMNS += ["running", "waiting", "kv_blocks_used"]


@given(st.lists(sizes, min_size=1, max_size=20), limits, st.data())
@settings(max_examples=500, deadline=None)
def test_the_engine_serves_as_the_reference_does(drawn, limits, data) -> None:
    """The same steps, leapt or not, and the same times of each request, to the last bit."""
    drawn.sort(key=lambda one: one[0])
    size = data.draw(st.sampled_from([1, 2, 4]))
    num_blocks = data.draw(st.integers(1, 120)) // size + 2
    named, leap = data.draw(st.booleans()), data.draw(st.booleans())
    clock = data.draw(clocks)
    blocks = BlockManager(num_blocks, size, False) if named else BlockCounter(num_blocks, size)
    log, _ = play(workload(*drawn), made(Scheduler, blocks, **limits), clock, leap=leap)
    watch = Watch(Reference(num_blocks, size, **limits), clock)
    requests = [Request(number, *one) for number, one in enumerate(drawn)]
    served = serve(requests, watch.scheduler, watch.seconds)
    rows = log.requests[log.requests["reason"] != 2]
    for name in ("id", "first_scheduled", "first_token", "finish", "preemptions", "generated"):
        assert rows[name].tolist() == [getattr(one, name) for one in served]
    steps = expand_steps(log)
    columns = [np.asarray(steps[name]).tolist() for name in COLUMNS]
    assert [list(row) for row in zip(*columns, strict=True)] == watch.rows


@pytest.mark.parametrize("knob", ["max_num_seqs", "max_num_batched_tokens"])
def test_the_reference_needs_room_for_a_request(knob) -> None:
    """Else it would never end."""
    with pytest.raises(ValueError, match="must be 1 or more"):
        Reference(10, 16, **{knob: 0})
