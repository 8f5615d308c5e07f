"""A radix tree of which nobody shares anything, counted: as the tree itself."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.request import Request
from simulator.kv_cache.radix_cache import RadixCache
from simulator.kv_cache.unshared_radix_cache import UnsharedRadixCache
from simulator.schedulers.sglang.overlap import OverlappedSgLang
from simulator.schedulers.sglang.scheduler import SgLang
from tests.engine.test_laws import assert_same_steps, clocks, workloads
from tests.support.engines import play

ROWS = ("request_rows", "pause_rows")
Cache = type[RadixCache] | type[UnsharedRadixCache]


def test_a_retracted_request_finds_its_prompt_until_that_is_evicted() -> None:
    """10 blocks, and a prompt of 4 with an answer of 2: the prompt stays, the answer does not.

    Another takes 8, for which the prompt has to go as a whole.
    """
    blocks = UnsharedRadixCache(11, 1)
    first, second = Request(0, 0.0, 4, 9), Request(1, 0.0, 8, 9)
    blocks.admit(first, blocks.match(first), 4)
    blocks.cache(first)
    first.generated = 3
    blocks.extend(first, 6)
    blocks.release(first)
    assert (blocks.free, blocks.hashed, len(blocks.match(first))) == (10, 4, 4)
    blocks.admit(second, blocks.match(second), 8)
    assert (blocks.free, blocks.hashed, len(blocks.match(first))) == (2, 0, 0)


@st.composite
def trees(draw: st.DrawFn) -> Callable[[Cache], SgLang]:
    """SGLang's schedulers, mostly with little memory, with the one or the other tree."""
    kind = draw(st.sampled_from([SgLang, OverlappedSgLang, OverlappedSgLang]))
    size = draw(st.sampled_from([1, 1, 2, 4]))
    options: dict[str, object] = {
        "max_num_seqs": draw(st.integers(1, 8)),
        "max_num_batched_tokens": draw(st.integers(size, 48)),
        "max_model_len": 64,
        "max_new_tokens": draw(st.sampled_from([None, "exact", 7, 40])),
        "schedule_conservativeness": draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        "retract_decode_steps": draw(st.sampled_from([20, 2])),
        "enable_mixed_chunk": draw(st.booleans()),
        "ignore_eos": draw(st.booleans()),
        "order": draw(st.sampled_from(["fcfs", "lof", "random"])),
    }
    if options["order"] != "random" and draw(st.booleans()):
        options["enable_priority_scheduling"] = True
        options["priority_scheduling_preemption_threshold"] = draw(st.sampled_from([0, 1]))
    blocks = 2 + draw(st.integers(40, 130)) // size
    return lambda cache: kind(cache(blocks, size), **options)  # type: ignore[arg-type]


@given(workloads(), trees(), clocks, st.booleans())
@settings(max_examples=300, deadline=None)
def test_runs_are_those_with_the_tree_to_the_last_bit(load, make, clock, leap) -> None:
    """The same steps, requests and retractions, and as much in the tree after each."""
    load.segments = None
    one, two = make(RadixCache), make(UnsharedRadixCache)
    tree, counted = play(load, one, clock, leap=False)[0], play(load, two, clock, leap=leap)[0]
    assert_same_steps(counted, tree)
    for rows in ROWS:
        assert getattr(counted, rows) == getattr(tree, rows), rows
    assert one.blocks.hashed == two.blocks.hashed
    assert one.blocks._pool == two.blocks._pool
    assert two.blocks.free == two.blocks.usable


@pytest.mark.parametrize("options", [{"order": "lpm"}, {"radix_eviction_policy": "lfu"}])
def test_orders_by_the_tree_and_other_evictions_want_the_tree(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="UnsharedRadixCache"):
        SgLang(UnsharedRadixCache(11, 1), **options)  # type: ignore[arg-type]
