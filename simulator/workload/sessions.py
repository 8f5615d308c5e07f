"""Requests that belong together: turns of a session, and prompts that begin alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from simulator.core.request import Segments
from simulator.util.config import NonNegativeFinite
from simulator.workload import distributions as laws
from simulator.workload.arrivals import Things
from simulator.workload.workload import Floats, Ints

SHUFFLED = 1 << 20
"""Sessions whose prefixes are put into random order together."""
PREFIX_LEN, THINK_TIME = laws.Fixed(256), laws.Fixed(0.0)  # tokens; s


@dataclass(slots=True, eq=False)
class PrefixGroups:
    """Prompts that begin with one of a few prefixes: vLLM's dataset `prefix_repetition`.

    Without `zipf` every prefix begins equally many prompts, in random order. vLLM drops prompts
    until `num_prefixes` divides their number; here some prefixes have one prompt more. With `zipf`
    each prompt draws its prefix, the k-th in proportion to k ** -zipf.
    """

    num_prefixes: Annotated[Things, "prefixes"] = 10
    prefix_len: Annotated[laws.Lengths, "tokens of a prefix"] = PREFIX_LEN
    zipf: Annotated[NonNegativeFinite, "weight of the k-th: k ** -zipf; 0: all alike"] = 0.0


@dataclass(slots=True, eq=False)
class Sessions:
    """Conversations: a turn's prompt is the last one, its answer and `input_len` new tokens.

    A turn comes `think_time` after the answer to the one before it.
    """

    turns: Annotated[laws.Lengths, "turns of a session"]
    think_time: Annotated[laws.Amounts, "s from an answer to the next turn"] = THINK_TIME


def session_parts(
    sessions: Sessions | None, total: int, size: int, rng: "np.random.Generator"
) -> Iterator[tuple[Ints, Floats]]:
    """Yield whole sessions of `total` requests, some `size` requests at a time.

    Of each part: which of its requests begin a session, and the think time (s) before each request.
    """
    if sessions is None:
        for at in range(0, total, size):
            count = min(size, total - at)
            yield np.arange(count), np.zeros(count)
        return
    turns, pauses = rng.spawn(2)
    ends, left = np.zeros(1, np.int64), total
    while left:
        if len(ends) == 1:
            ends = np.cumsum(np.append(0, laws.token_counts(sessions.turns, turns.random(size))))
        upto = min(int(np.searchsorted(ends, size)), len(ends) - 1)
        count = min(int(ends[upto]), left)
        starts = ends[:upto]
        yield starts[starts < count], laws.durations(sessions.think_time, pauses.random(count))
        ends, left = ends[upto:] - ends[upto], left - count


def prefix_parts(
    shared: int, groups: PrefixGroups | None, counts: Sequence[int], rng: "np.random.Generator"
) -> tuple[list[Segments], Iterator[Ints]]:
    """Return the prefixes that there are, and for parts of so many sessions the one each draws.

    `shared` tokens come before every prefix.
    """
    first: Segments = ((("shared",), shared),) if shared else ()
    if groups is None:
        return [first], (np.zeros(count, np.int64) for count in counts)
    sizes, order = rng.spawn(2)
    k = groups.num_prefixes
    length = laws.token_counts(groups.prefix_len, sizes.random(k)).tolist()
    heads = [(*first, (("prefix", g), length[g])) for g in range(k)]
    if not groups.zipf:
        return heads, _shuffled(k, counts, order)
    weights = np.arange(1.0, k + 1) ** -groups.zipf
    return heads, (laws.weighted_choice(weights, order.random(count)) for count in counts)


def _shuffled(k: int, counts: Sequence[int], rng: "np.random.Generator") -> Iterator[Ints]:
    """Yield each of `k` numbers equally often, in random order, so many at a time."""
    held, drawn, total = np.empty(0, np.int64), 0, sum(counts)
    for count in counts:
        while len(held) < count:
            size = min(SHUFFLED, total - drawn)
            held = np.append(held, (drawn + rng.permutation(size)) % k)
            drawn += size
        yield held[:count]
        held = held[count:]


def write_segments(
    heads: list[Segments],
    group: Ints,
    follows: npt.NDArray[np.bool_],
    new: Ints,
    output: Ints,
    *,
    first: int,
    media: list[Segments] | None = None,
) -> list[Segments | None]:
    """Write down what each prompt consists of: a prefix, and by turns a user and the model.

    `first` is the number of the first request; `media` are the images of each, before its text.
    """
    rows: list[Segments | None] = []
    parts: Segments = ()
    answer = 0
    columns = zip(group.tolist(), follows.tolist(), new.tolist(), output.tolist(), strict=True)
    for i, (head, goes_on, fresh, answered) in enumerate(columns, first):
        parts = (*parts, (("out", i - 1), answer)) if goes_on else heads[head]
        if media is not None:
            parts = (*parts, *media[i - first])
        if fresh:
            parts = (*parts, (("in", i), fresh))
        rows.append(parts)
        answer = answered
    return rows
