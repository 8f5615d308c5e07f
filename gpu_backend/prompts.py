"""Token ids of prompts: no text is known, so each token's name decides which one it is.

A token is named by its segment and its place in it, and its id is a hash of both. So prompts that
the scheduler takes for equal are equal, and the KV blocks that it shares hold the same numbers.
"""

from collections.abc import Callable, Hashable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from simulator.core.request import Request

Ids = npt.NDArray[np.int32]


def token_ids(name: Hashable, first: int, count: int, vocab_size: int) -> Ids:
    """Give the ids of tokens `first` to `first + count` of the segment `name`.

    The same in every process: names are hashed by what `repr` makes of them, places by splitmix64.
    """
    seed = int.from_bytes(blake2b(repr(name).encode(), digest_size=8).digest(), "little")
    place = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    mixed = place * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(vocab_size)).astype(np.int32)


def prompt_ids(
    request: Request, vocab_size: int, answer: Callable[[int], Ids | None] = lambda _: None
) -> Ids:
    """Give the ids of a request's prompt, int32 [prompt_tokens].

    A segment ("out", i) is what request i has answered: `answer(i)`, as far as that is known.
    """
    parts = []
    for name, count in request.segments or ((("in", request.id), request.prompt_tokens),):
        ids = token_ids(name, 0, count, vocab_size)
        if isinstance(name, tuple) and len(name) == 2 and name[0] == "out":
            said = answer(name[1])
            if said is not None:
                ids[: len(said)] = said[:count]
        parts.append(ids)
    return np.concatenate(parts)
