"""Preemptions that undo one another for ever."""

from simulator.core.decode_set import DecodeSet
from simulator.util.errors import HeadwayError

BARREN = 10_000  # steps in a row that lose what was computed, and not one token or arrival


class Circles:
    """Notices that nobody gets on, since all throw one another out before they have said a token.

    The policies shipped cannot do that; one of a user's own can, by `displaces` or `victim`.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._said = 0  # ticks and joins of the decode set, when they last changed
        self._barren = 0  # steps with preemptions since
        self._now = -1.0  # s, of the last of them

    def arrived(self) -> None:
        """Take note of a new request: what comes next may be for its sake."""
        self._barren = 0

    def preempted(self, now: float, decodes: DecodeSet) -> None:
        """Take note of a preemption; raise HeadwayError if it is one too many."""
        if now == self._now:  # one of many by the same step
            return
        self._now = now
        said = decodes.tick + decodes.joins
        if said != self._said:
            self._said, self._barren = said, 0
        self._barren += 1
        if self._barren > BARREN:
            raise HeadwayError(
                f"engine.scheduling_policy: {self._who} goes round in circles: {BARREN:,} "
                "steps in a row preempted somebody and not one token has come out, since those who "
                "board are thrown out again before they have said one"
            )
