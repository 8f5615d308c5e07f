"""HiCache by hand, and its books under random requests."""

from random import Random

import pytest

from simulator import load_scenario, run
from simulator.core.request import Request
from simulator.kv_cache.hierarchical_cache import (
    LEAST_LOAD,
    WRITE_POLICIES,
    HierarchicalCache,
    TieredNode,
)
from simulator.kv_cache.radix_cache import EVICTION_POLICIES
from simulator.util.errors import HeadwayError


def ask(id: int, *segments: tuple[object, int]) -> Request:
    return Request(id, 0.0, sum(n for _, n in segments), 100, segments=tuple(segments))


def admit(tree: HierarchicalCache, request: Request) -> tuple[int, int]:
    """Admit and compute a whole prompt; return the tokens cached on the GPU and those loaded."""
    hits = tree.match(request)
    here, loads = len(hits), tree.host_hits
    if loads and not tree.load_back():
        loads = 0
    tree.admit(request, range(here + loads), (here + loads) * tree.block_size)
    if loads:
        tree.take_loads()
    tree.extend(request, request.known)
    tree.cache(request)
    tree.end_step(0.0, loads=loads > 0, in_flight=False)
    tree.begin_pass(0.0, in_flight=False)
    return here * tree.block_size, loads * tree.block_size


def serve(tree: HierarchicalCache, request: Request) -> tuple[int, int]:
    """Serve a request that ends with its first token."""
    found = admit(tree, request)
    finish(tree, request)
    return found


def finish(tree: HierarchicalCache, request: Request) -> None:
    request.generated += 1
    request.finish = 1.0
    tree.release(request)
    tree.end_step(0.0, loads=False, in_flight=False)
    tree.begin_pass(0.0, in_flight=False)


@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_what_the_gpu_evicts_is_loaded_again(policy: str) -> None:
    """20 blocks: of prompts of 15 tokens the second evicts the first, which comes back as 14."""
    tree = HierarchicalCache(21, 1, 100, policy)
    found = [serve(tree, ask(k, (name, 15))) for k, name in enumerate("ababa")]
    through = [(0, 0), (0, 0), (0, 14), (0, 14), (0, 14)]
    # A second request must put it in before it is copied: then it is computed twice, and a third
    # finds nothing either, for the second evicted it before anybody used it again.
    assert found == ([(0, 0)] * 5 if policy == "write_through_selective" else through)
    assert tree.offloaded == (0 if policy == "write_through_selective" else 30)


def test_selective_copies_what_a_second_request_has() -> None:
    tree = HierarchicalCache(21, 1, 100, "write_through_selective")
    assert serve(tree, ask(0, ("a", 15))) == (0, 0)
    assert tree.offloaded == 0
    assert serve(tree, ask(1, ("a", 15))) == (14, 0)
    assert tree.offloaded == 15
    serve(tree, ask(2, ("b", 18)))
    assert serve(tree, ask(3, ("a", 15))) == (0, 14)


def test_few_tokens_are_computed_again() -> None:
    """9 tokens on the host are fewer than 10; then they are on the GPU, and are not copied anew."""
    tree = HierarchicalCache(21, 1, 100)
    serve(tree, ask(0, ("a", 9)))
    serve(tree, ask(1, ("b", 19)))
    assert LEAST_LOAD == 10
    assert serve(tree, ask(2, ("a", 9), ("q", 1))) == (0, 0)
    assert tree.offloaded == 9 + 19 + 1
    assert serve(tree, ask(3, ("a", 9), ("q", 1))) == (9, 0)


def test_a_copy_holds_its_blocks_until_it_is_there() -> None:
    """A copy of 10 blocks takes 10 s, and begins when the step in flight has ended."""
    tree = HierarchicalCache(21, 1, 100, store_time=float)
    request = ask(0, ("a", 10))
    tree.admit(request, tree.match(request), 10)
    tree.cache(request)
    request.generated, request.finish = 1, 1.0
    tree.release(request)
    tree.end_step(1.0, loads=False, in_flight=True)
    assert (tree.free, tree.evictable, tree.next_store) == (10, 0, None)
    tree.end_step(2.0, loads=False, in_flight=False)
    assert tree.next_store == 12.0
    tree.begin_pass(11.0, in_flight=False)
    assert (tree.free, tree.copying) == (10, True)
    tree.begin_pass(12.0, in_flight=False)
    assert (tree.free, tree.evictable, tree.copying) == (20, 10, False)


def test_the_host_evicts_its_oldest_leaf() -> None:
    """20 blocks of the host hold one prompt of 15: the copy of the second takes its place."""
    tree = HierarchicalCache(21, 1, 20)
    for k, name in enumerate("abc"):
        serve(tree, ask(k, (name, 15)))
    assert serve(tree, ask(3, ("a", 15))) == (0, 0)
    assert serve(tree, ask(4, ("a", 15))) == (14, 0)


@pytest.mark.parametrize("policy", WRITE_POLICIES)
@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_the_books_are_right(policy: str, eviction: str) -> None:
    """Whatever comes: blocks add up, the GPU has the upper part of a path, all can be evicted."""
    rng = Random(f"{policy} {eviction}")
    for page, host in ((1, 300), (4, 60), (1, 20)):
        tree = HierarchicalCache(1 + 240 // page, page, host // page, policy)
        tree.eviction_policy = eviction
        running: list[Request] = []
        loads = 0
        for number in range(150):
            own = rng.randrange(25)
            request = ask(number, ("abcdef"[own % 6], 4 * own % 30 + 1), (f"own {own}", 13 + own))
            if rng.random() < 0.5 and len(running) > 1:
                finish(tree, running.pop(rng.randrange(len(running))))
            elif tree.free * page > 90:
                loads += admit(tree, request)[1]
                running.append(request)
            check(tree)
        while running:
            finish(tree, running.pop())
        tree.make_room(tree.usable)
        assert (tree.free, tree.evictable, tree.hashed) == (tree.usable, 0, 0)
        check(tree)
        assert loads or host < 300


def check(tree: HierarchicalCache) -> None:
    nodes, todo = list[TieredNode](), list(tree._root.children.values())
    while todo:
        node = todo.pop()
        assert isinstance(node, TieredNode)
        nodes.append(node)
        todo += node.children.values()
    on_gpu = [node for node in nodes if node.on_gpu]
    assert tree.hashed == sum(node.blocks for node in on_gpu)
    idle = sum(node.blocks for node in on_gpu if not node.locks and not node.copies)
    assert tree.evictable == idle
    on_host = sum(node.blocks for node in nodes if node.on_host)
    size = tree.host_free + on_host
    assert size == getattr(tree, "_size", size)
    tree._size = size  # type: ignore[attr-defined]
    for node in nodes:
        below = [child for child in node.children.values() if child.on_gpu]  # type: ignore[attr-defined]
        assert node.on_gpu_below == len(below)
        assert node.on_gpu or node.on_host
        assert node.on_gpu or not (below or node.locks or node.copies)


SGLANG = {
    "model": "llama-3-8b",
    "gpu": "A100-80GB",
    "engine": {"name": "sglang", "num_gpu_blocks_override": 20_000, "kv_offloading_size": 16},
    "workload": {
        "num_prompts": 300,
        "request_rate": 8,
        "input_len": 100,
        "output_len": 20,
        "prefix_groups": {"num_prefixes": 30, "prefix_len": 1500},
    },
}


@pytest.mark.parametrize("policy", WRITE_POLICIES)
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_scenario_tells_hits_by_tier(policy: str, overlaps: bool) -> None:
    """Leaps change nothing, and a request's tokens from the host are some of those cached."""
    engine = SGLANG["engine"] | {"hicache_write_policy": policy, "async_scheduling": overlaps}  # type: ignore[operator]
    scenario = load_scenario(SGLANG | {"engine": engine})
    leapt, stepped = run(scenario), run(scenario, stepwise=True)
    table = leapt.requests
    assert table.equals(stepped.requests)
    host, cached = table["cached_tokens_host"], table["cached_tokens"]
    assert (host <= cached).all()
    told = leapt.summary()
    assert host.sum() == told["headway"]["external_prefix_cache_hits"] > 10_000
    assert cached.sum() > host.sum()
    without = run(load_scenario(SGLANG | {"engine": engine | {"kv_offloading_size": None}}))
    assert cached.sum() > without.requests["cached_tokens"].sum() + 10_000
    assert told["mean_ttft_ms"] < without.summary()["mean_ttft_ms"]


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"store_threshold": 2}, "engine.store_threshold: cannot be used with the policy sglang"),
        (
            {"secondary_tiers": [{"type": "fs", "size": 9, "bandwidth": 1}]},
            "engine.secondary_tiers",
        ),
        ({"enable_prefix_caching": False}, "needs enable_prefix_caching: true"),
        (
            {"name": "textbook", "hicache_write_policy": "write_through_selective"},
            "write_through_selective needs the policy sglang",
        ),
        (
            {"name": "textbook", "prefix_cache": "radix"},
            "engine.kv_offloading_size: needs prefix_cache: hash",
        ),
    ],
)
def test_what_it_does_not_do_is_refused(engine: dict[str, object], told: str) -> None:
    with pytest.raises(HeadwayError, match=told):
        load_scenario(SGLANG | {"engine": SGLANG["engine"] | engine})  # type: ignore[operator]
