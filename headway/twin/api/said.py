"""What an answer says, token by token: words that mean nothing, a text that a schema asks for, or
the words up to a stop string.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log

from headway.twin.api.tokenizers import TokenCounter


@dataclass(frozen=True, slots=True)
class FixedText:
    """What a guided answer begins with, and what is behind its words; "": it has none."""

    before: str
    after: str = ""
    call: str = ""  # the function that is called; the text is its arguments
    hidden: tuple[str, str] = ("", "")  # around the text; computed, but no part of the message


class Said:
    """The texts of a choice's tokens: `words` in turn, from number `offset` on, or `pieces`."""

    def __init__(self, words: Sequence[str], offset: int) -> None:
        self.words, self.offset = words, offset
        self.likelihood = -log(len(words))  # of a word
        self.pieces: list[str] | None = None
        self.free = self.shown = range(2**31)  # the tokens that could be any word; that are told
        self.call = ""
        self.stop: str | None = None  # the stop string that ended it

    def text(self, first: int, last: int) -> str:
        """Return what is told of the tokens from number `first` up to `last`."""
        return "".join(self.tokens(max(first, self.shown.start), min(last, self.shown.stop)))

    def tokens(self, first: int, last: int) -> list[str]:
        """Return the texts of these tokens, one by one."""
        if self.pieces is not None:
            return self.pieces[first:last]
        words, offset = self.words, self.offset
        return [words[(offset + number) % len(words)] for number in range(first, last)]

    def logprobs(self, own: str, number: int, most: int) -> dict[str, float]:
        """Return the likeliest texts of a token, its own first: each word is as likely as any."""
        return self.likeliest(own, number, most) if number in self.free else {own: 0.0}

    def likeliest(self, own: str, number: int, most: int) -> dict[str, float]:
        """Return so many texts, `own` first, which could be token number `number` as well."""
        count, at = len(self.words), self.offset + number
        others = (self.words[(at + more) % count] for more in range(1, min(most, count)))
        return dict.fromkeys([own, *others], self.likelihood)

    def fix(self, text: FixedText, length: int, counter: TokenCounter) -> int:
        """Say a guided text, with words up to `length` tokens; return how many tokens it has."""
        hidden = [counter.pieces(part) for part in text.hidden]
        before = [*hidden[0], *counter.pieces(text.before)]
        after = [*counter.pieces(text.after), *hidden[1]]
        room = max(length - len(before) - len(after), 0) if text.after else 0
        self.free, self.call = range(len(before), len(before) + room), text.call
        self.pieces = [*before, *self.tokens(0, room), *after]
        self.shown = range(len(hidden[0]), len(self.pieces) - len(hidden[1]))
        return len(self.pieces)

    def stop_at(self, stops: Sequence[str], least: int, length: int, *, keep: bool) -> int:
        """End at the first of `stops` behind `least` tokens; return the tokens up to there.

        The text ends before the stop string, or with it (`keep`). Without one it is `length`.
        """
        pieces = self.tokens(0, length)
        text, ends = "".join(pieces), [*accumulate(map(len, pieces))]
        begin = ends[least - 1] if least else 0
        found = [
            (bisect_left(ends, at + len(stop)), order, at, stop)
            for order, stop in enumerate(stops)
            if (at := text.find(stop, max(begin - len(stop) + 1, 0))) >= 0
        ]
        if not found:
            return length
        last, _, at, self.stop = min(found)
        visible = at + len(self.stop) if keep else at
        self.pieces = [
            piece[: max(visible - end + len(piece), 0)]
            for piece, end in zip(pieces[: last + 1], ends, strict=False)
        ]
        return last + 1
