"""Names for the full blocks of a request: a block's hash says its tokens and all before them.

A run of blocks within one segment has successive numbers from a 64-bit hash on, so that a prompt is
named at the cost of its segments. Among a million runs of a thousand blocks, two overlap with
probability 5e-5.
"""

from collections.abc import Hashable

from simulator.core.request import Request

Piece = tuple[Hashable, int, int]
"""Tokens of one segment: its name, the number of the first, how many."""


def known_hashes(request: Request, blocks: int, size: int, beyond: int = 0) -> list[int]:
    """Return the hashes of at least the first `blocks` full blocks, prompt and answer.

    The list is the request's own and grows with what is asked for. With `beyond` each hash says
    as many tokens behind its block, too.
    """
    hashes = request.hashes
    if hashes is None:
        hashes = request.hashes = prompt_hashes(request, size, beyond)
    while len(hashes) < blocks:
        before = hashes[-1] if hashes else _root(request)
        start = len(hashes) * size + beyond if hashes else 0
        said = start - request.prompt_tokens  # tokens of the answer before what is new
        if said >= size:
            hashes.append(before + 1)
        elif said >= 0:
            hashes.append(hash((before, ("out", request.id), said)))
        else:
            end = size if hashes else size + beyond
            hashes.append(hash((before, _across(request, said, end))))
    return hashes


def prompt_hashes(request: Request, size: int, beyond: int = 0) -> list[int]:
    """Return the hashes of the full blocks of a prompt.

    A block's tokens are named by pieces, which are never split otherwise than at the ends of
    segments and blocks, so equal tokens have equal names.
    """
    hashes: list[int] = []
    key = _root(request)
    pieces: list[Piece] = []  # of a block that is not full yet
    room = size + beyond
    for name, count in request.contents:
        first = 0
        if count and (pieces or room > size):
            first = min(room, count)
            pieces.append((name, 0, first))
            room -= first
            if room:
                continue
            key = hash((key, tuple(pieces)))
            hashes.append(key)
            pieces, room = [], size
        full = (count - first) // size
        if full:
            key = hash((key, name, first))
            hashes.extend(range(key, key + full))
            key += full - 1
            first += full * size
        if first < count:
            pieces = [(name, first, count - first)]
            room = size - (count - first)
    return hashes


def _root(request: Request) -> int:
    """Return what the chain begins with: no two adapters share KV, as in vLLM's block hashes."""
    return hash(("lora", request.model)) if request.model else 0


def _across(request: Request, said: int, size: int) -> tuple[Piece, ...]:
    """Return the pieces of the block in which a prompt ends, `said` tokens after its beginning."""
    pieces: list[Piece] = []
    start = request.prompt_tokens + said
    end = 0
    for name, count in request.contents:
        first = max(0, start - end)
        end += count
        if first < count:
            pieces.append((name, first, count - first))
    return (*pieces, (("out", request.id), 0, size + said))
