"""The radix tree by hand, against a tree of single tokens, and against the hash chain."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simulator import load_scenario
from simulator.core.request import Request, Segments
from simulator.kv_cache.block_manager import BlockManager
from simulator.kv_cache.radix_cache import RadixCache
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError
from tests.support.engines import made, play, workload


def ask(id: int, *segments: tuple[object, int]) -> Request:
    tokens = sum(n for _, n in segments)
    return Request(id, 0.0, tokens, 100, segments=tuple(segments))


def serve(tree: RadixCache, request: Request, output: int = 1) -> int:
    """Board, compute, generate and finish a request; return the tokens that were cached."""
    hits = tree.match(request)
    tree.admit(request, hits, request.known)
    tree.cache(request)
    for _ in range(output - 1):
        request.generated += 1
        tree.extend(request, request.known)
    request.generated += 1
    request.finish = 1.0
    tree.release(request)
    return len(hits) * tree.block_size


def test_tokens_are_shared_one_by_one_but_never_the_last() -> None:
    """20 common tokens: a page of 1 finds them all, pages and blocks of 16 find 16."""
    for size, found in ((1, 20), (4, 20), (16, 16)):
        tree = RadixCache(101, size)
        assert serve(tree, ask(0, ("s", 20), ("a", 9))) == 0
        assert serve(tree, ask(1, ("s", 20), ("b", 9))) == found
        blocks = BlockManager(101, size, prefix_caching=True)
        for id, name in enumerate("ab"):
            request = ask(id, ("s", 20), (name, 9))
            hits = blocks.match(request)
            blocks.admit(request, hits, request.known)
        assert len(hits) * size == found
    same = RadixCache(101, 1)
    serve(same, ask(0, ("s", 20)))
    assert len(same.match(ask(1, ("s", 20)))) == 19


def test_a_request_owns_what_it_took_and_what_nobody_else_reads() -> None:
    """12 of 20 tokens in common, pages of 4: five pages alone, two beside another reader."""
    tree = RadixCache(101, 4)
    serve(tree, ask(0, ("s", 12)))
    first, second = ask(1, ("s", 12), ("a", 8)), ask(2, ("s", 12), ("b", 8))
    for request in (first, second):
        tree.admit(request, tree.match(request), request.known)
        owned = [tree.owned(one, one.computed) for one in (first, request)]
        assert owned == ([5, 5] if request is first else [2, 2])


def test_an_answer_is_found_only_when_its_request_has_finished() -> None:
    """12 tokens of prompt and 5 of answer, of which the last is not computed: 16 are found."""
    tree, first = RadixCache(101, 1), ask(0, ("s", 12))
    tree.admit(first, tree.match(first), 12)
    later = ask(1, ("s", 12), (("out", 0), 5), ("q", 3))
    assert len(tree.match(later)) == 0
    tree.cache(first)
    assert len(tree.match(later)) == 12
    for _ in range(4):
        first.generated += 1
        tree.extend(first, first.known)
    assert len(tree.match(later)) == 12
    first.finish = 1.0
    tree.release(first)
    assert len(tree.match(later)) == 16
    assert (tree.free, tree.hashed) == (100, 16)


def test_what_two_computed_at_once_is_kept_once() -> None:
    """Both take 8 blocks; when the second is put into the tree its copy is given back."""
    tree = RadixCache(21, 1)
    one, two = ask(0, ("s", 8)), ask(1, ("s", 8))
    for request in (one, two):
        tree.admit(request, tree.match(request), 8)
    assert tree.free == 4
    tree.cache(one)
    assert (tree.free, tree.shared) == (4, 0)
    tree.cache(two)
    assert (tree.free, tree.shared) == (12, 8)
    tree.release(one)
    assert (tree.free, tree.shared) == (12, 0)
    tree.release(two)
    assert (tree.free, tree.hashed) == (20, 8)


def test_a_path_ends_where_an_edge_is_left_though_what_follows_stands_below_it() -> None:
    """While `late` computes s[:6] t, others put s[:11] t there: 6 of its tokens are doubles."""
    tree = RadixCache(101, 1)
    late = ask(0, ("s", 6), ("t", 5), ("z", 1))
    tree.admit(late, tree.match(late), late.known)
    serve(tree, ask(1, ("s", 11), ("x", 3)))
    serve(tree, ask(2, ("s", 11), ("t", 5)))
    assert tree.hashed == 11 + 3 + 5
    tree.cache(late)
    assert tree.hashed == 11 + 3 + 5 + 6
    late.generated, late.finish = 1, 1.0
    tree.release(late)
    assert tree.free == tree.usable
    assert len(tree.match(ask(3, ("s", 6), ("t", 5), ("z", 2)))) == 12


def test_the_leaf_that_was_not_used_for_longest_is_evicted_as_a_whole() -> None:
    """s-a and s-b hang on s (4); with 12 blocks, c (3) takes one from nobody: then a goes."""
    tree = RadixCache(13, 1)
    serve(tree, ask(0, ("s", 4), ("a", 3)))
    serve(tree, ask(1, ("s", 4), ("b", 3)))
    assert tree.hashed == 10
    serve(tree, ask(2, ("c", 3)))
    assert tree.hashed == 10
    assert len(tree.match(ask(3, ("s", 4), ("a", 3), ("x", 1)))) == 4
    assert len(tree.match(ask(4, ("s", 4), ("b", 3), ("x", 1)))) == 7
    assert len(tree.match(ask(5, ("c", 3), ("x", 1)))) == 3


def test_a_hash_chain_gives_up_blocks_from_the_end_a_tree_whole_leaves() -> None:
    """8 blocks: of a prompt of 5 the chain keeps 3 when 5 others come, the tree none."""
    tree, blocks = RadixCache(9, 1), BlockManager(9, 1, prefix_caching=True)
    serve(tree, ask(0, ("a", 5)))
    serve(tree, ask(1, ("b", 5)))
    found = ask(2, ("a", 5), ("x", 1))
    assert len(tree.match(found)) == 0
    for id, name in enumerate("ab"):
        request = ask(id, (name, 5))
        blocks.admit(request, blocks.match(request), 5)
        blocks.release(request)
    assert len(blocks.match(found)) == 3


def test_who_runs_cannot_be_evicted_from() -> None:
    """The path of the running request stays; only the rest can be had."""
    tree = RadixCache(11, 1)
    serve(tree, ask(0, ("s", 4), ("a", 3)))
    runner = ask(1, ("s", 4), ("b", 2))
    hits = tree.match(runner)
    assert (len(hits), tree.missing(6, hits)) == (4, 6)
    tree.admit(runner, hits, 6)
    assert tree.free == 4
    other = ask(2, ("c", 4))
    tree.admit(other, tree.match(other), 4)
    assert tree.free == 0
    assert len(tree.match(ask(3, ("s", 4), ("x", 1)))) == 4


def test_leaves_go_in_the_order_of_their_use_whoever_left_first() -> None:
    """12 blocks, of which a has 4 and b 3; b leaves before a. Who takes 6 gets the 4 of a."""
    tree = RadixCache(13, 1)
    one, two = ask(0, ("a", 4)), ask(1, ("b", 3))
    for request in (one, two):
        tree.admit(request, tree.match(request), request.known)
        tree.cache(request)
    tree.release(two)
    tree.release(one)
    other = ask(2, ("c", 6))
    tree.admit(other, tree.match(other), 6)
    assert tree.hashed == 3
    assert len(tree.match(ask(3, ("b", 3), ("x", 1)))) == 3


@pytest.mark.parametrize("chunked", [True, False])
def test_a_prompt_counts_for_one_priority_more_than_its_answer(chunked: bool) -> None:
    """a and its answer have 4 blocks each, b, of priority 1, has 3: first the answer goes, of the
    others, which are of one priority, a, which was used before."""
    tree = RadixCache(13, 1)
    tree.eviction_policy = "priority"
    one, two = ask(0, ("a", 4)), ask(1, ("b", 3))
    two.priority = 1
    tree.admit(one, tree.match(one), 4)
    if chunked:
        tree.cache(one)
    one.generated = 5
    tree.extend(one, 8)
    one.finish = 1.0
    tree.release(one)
    serve(tree, two)
    found = []
    for blocks in (2, 6):
        tree.make_room(blocks)
        found.append((tree.hashed, len(tree.match(ask(2, ("b", 3), ("x", 1))))))
    assert found == [(7, 3), (3, 3)]


def test_an_answer_goes_without_its_prompt_though_that_is_one_block() -> None:
    tree = RadixCache(6, 1)
    serve(tree, ask(0, ("a", 1)), output=4)
    assert tree.hashed == 4
    tree.make_room(2)
    assert tree.hashed == 1


class Naive:
    """SGLang's tree of single tokens, as plain as can be: nodes are paths, an edge a set of them.

    A node's name is all tokens from the root on.
    """

    def __init__(self, usable: int) -> None:
        self.usable = usable
        self.nodes: dict[tuple, int] = {}  # end of an edge: when it was last used
        self.running: dict[Request, tuple[tuple, int]] = {}  # locked path, tokens held in all
        self.clock = 0

    def tokens(self, request: Request, count: int) -> tuple:
        named = (*request.segments, (("out", request.id), request.generated))
        return tuple((name, k) for name, n in named for k in range(n))[:count]

    def found(self, wanted: tuple) -> int:
        return max((_common(wanted, node) for node in self.nodes), default=0)

    def use(self, path: tuple) -> None:
        """Cut the edge in which the path ends, add what is missing, note the use.

        The lower part of an edge that is cut counts as used, too, as in SGLang.
        """
        split = self.found(path)
        for cut in {split, len(path)} - {0}:
            inside = [n for n in self.nodes if n[:cut] == path[:cut] and len(n) > cut]
            lower = min(inside, key=len, default=None)
            if path[:cut] not in self.nodes:
                self.nodes[path[:cut]] = 0
                if lower:
                    self.clock += 1
                    self.nodes[lower] = self.clock
        for node in sorted(self.nodes, key=len):
            if path[: len(node)] == node:
                self.clock += 1
                self.nodes[node] = self.clock

    def in_tree(self) -> int:
        return len({node[:k] for node in self.nodes for k in range(1, len(node) + 1)})

    def own(self) -> int:
        return sum(held - len(path) for path, held in self.running.values())

    def locked(self) -> int:
        paths = [path for path, _ in self.running.values()]
        return len({path[:k] for path in paths for k in range(1, len(path) + 1)})

    @property
    def free(self) -> int:
        return self.usable - self.locked() - self.own()

    def evict(self) -> None:
        while self.in_tree() + self.own() > self.usable:
            paths = [path for path, _ in self.running.values()]
            leaves = [
                node
                for node in self.nodes
                if not any(n != node and n[: len(node)] == node for n in self.nodes)
                and not any(path[: len(node)] == node for path in paths)
            ]
            del self.nodes[min(leaves, key=lambda node: self.nodes[node])]


def _common(one: tuple, two: tuple) -> int:
    for k, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return k
    return min(len(one), len(two))


segments = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", ("out", 0), ("out", 1)]), st.integers(1, 6)),
    min_size=1,
    max_size=4,
)
moves = st.lists(
    st.tuples(st.sampled_from(["board", "board", "grow", "end", "drop"]), st.integers(0, 9)),
    max_size=25,
)


@example(  # the lower part of an edge that is cut is used by that
    [[("a", 1)]] * 6 + [[("b", 1), ("a", 4)], [("a", 1), ("a", 6), ("a", 6), ("a", 3)]],
    [("board", 0)] * 2 + [("end", 0)] * 2 + [("board", 0)],
    21,
)
@example(  # one that finds no room has used what it was compared with
    [
        *[[("a", 1)]] * 4,
        *([(("out", 0), 1), ("a", 3)], [("a", 4), ("a", 6)], [(("out", 0), 2)]),
        [("a", 1), ("a", 1)],
    ],
    [("board", 0)] * 2 + [("end", 0)] * 2 + [("board", 0)] * 2 + [("grow", 0)],
    13,
)
@given(st.lists(segments, min_size=8, max_size=8), moves, st.integers(12, 40))
@settings(max_examples=150, deadline=None)
def test_the_tree_of_runs_is_the_tree_of_tokens(prompts, moves, usable) -> None:
    """Same hits, same free blocks, same tokens kept after any boarding, growing and leaving."""
    tree, naive = RadixCache(usable + 1, 1), Naive(usable)
    fresh = [ask(i, *contents) for i, contents in enumerate(prompts)]
    for move, which in moves:
        running = list(naive.running)
        if move == "board" and fresh:
            request = fresh[-1]
            hits = tree.match(request)
            wanted = naive.tokens(request, request.known - 1)
            assert len(hits) == naive.found(wanted)
            path = wanted[: len(hits)]
            naive.use(path)  # who is compared with a path uses it, boarding or not
            if tree.missing(request.known, hits) > tree.free:
                continue
            fresh.pop()
            tree.admit(request, hits, request.known)
            naive.running[request] = path, request.known
            naive.evict()
            tree.cache(request)
            whole = naive.tokens(request, request.known)
            naive.use(whole)
            naive.running[request] = whole, request.known
        elif running:
            request = running[which % len(running)]
            path, held = naive.running[request]
            if move == "grow" and tree.free:
                request.generated += 1
                tree.extend(request, held + 1)
                naive.running[request] = path, held + 1
                naive.evict()
            elif move in ("end", "drop"):
                if move == "end":
                    request.finish = 1.0
                    naive.use(naive.tokens(request, held))
                tree.release(request)
                del naive.running[request]
        assert tree.free == naive.free
        assert tree.hashed == naive.in_tree()


@st.composite
def shared(draw: st.DrawFn):
    """Up to 12 prompts that begin alike, one after the other or at once."""
    n = draw(st.integers(2, 12))
    parts: list[Segments] = [
        (("s", draw(st.integers(1, 20))), (draw(st.sampled_from("xyz")), draw(st.integers(1, 12))))
        for _ in range(n)
    ]
    gap = draw(st.sampled_from([0.5, 40.0]))
    rows = [(gap * i, sum(k for _, k in p), draw(st.integers(1, 9))) for i, p in enumerate(parts)]
    return workload(*rows, segments=parts)


@given(shared(), st.sampled_from([1, 4]))
@settings(max_examples=60, deadline=None)
def test_with_ample_room_both_caches_find_the_same(load, size) -> None:
    """One request at a time, whole blocks, nothing evicted."""
    load.max_concurrency = 1
    one, _ = play(load, Scheduler(BlockManager(2000, size, prefix_caching=True)))
    two, _ = play(load, Scheduler(RadixCache(2000, size)))
    assert np.array_equal(np.sort(one.requests, order="id"), np.sort(two.requests, order="id"))


@given(shared(), st.integers(12, 40), st.sampled_from([1, 4]))
@settings(max_examples=100, deadline=None)
def test_little_room_leaves_leaps_exact_and_books_balanced(load, blocks, size) -> None:
    """Evictions inside a leap are those of its single steps."""
    logs = []
    for leap in (True, False):
        tree = RadixCache(1 + 48 // size + blocks // size, size)
        logs.append(play(load, made(Scheduler, tree, max_num_seqs=4), leap=leap)[0])
        assert tree.free == tree.usable
        assert tree.shared == 0
        assert tree._pool == tree.usable - tree.hashed
    assert logs[0].request_rows == logs[1].request_rows
    assert logs[0].tick_ends == logs[1].tick_ends


@pytest.mark.parametrize(
    "line", ["enable_prefix_caching: false", "async_scheduling: true", "allocation: contiguous"]
)
def test_a_tree_that_means_nothing_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(f"engine: {{prefix_cache: radix, {line}}}\n")
    with pytest.raises(HeadwayError, match=r"engine\.prefix_cache: "):
        load_scenario(path)
