"""SGLang's prefix tree where EAGLE drafts: its keys are pairs of neighbouring tokens."""

from simulator.core.request import Request
from simulator.kv_cache.radix_cache import Piece, RadixCache, pieces_of


class EagleTree(RadixCache):
    """The tree of pairs: of n tokens it has n - 1, and each names the place of its first token.

    So a prompt finds a token if the one behind it is the same, too (`is_bigram` in SGLang 0.5.23's
    `mem_cache/radix_cache.py`).
    """

    reads_next = 1

    def _content(self, request: Request, tokens: int, start: int = 0) -> list[Piece]:
        """Name pairs: as their first token within a run, by both tokens where two runs meet."""
        runs = pieces_of(request, tokens + 1, start)
        found: list[Piece] = []
        for number, (name, first, count) in enumerate(runs, 1):
            if count > 1:
                found.append((name, first, count - 1))
            if number < len(runs):
                other, begin, _ = runs[number]
                found.append(((name, first + count - 1, other, begin), 0, 1))
        return found
