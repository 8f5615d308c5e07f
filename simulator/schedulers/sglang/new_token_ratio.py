"""How much of their answers those who decode are expected to bring out, in SGLang."""

from collections.abc import Sequence

from simulator.core.request import Request
from simulator.schedulers.sglang.options import SglangOptions


class NewTokenRatio:
    """The share of the tokens they may have that those who decode are expected to bring out.

    It falls by a step of decodes to a floor, and becomes what a retraction has taken in the mean.
    """

    __slots__ = ("_decay", "_floor", "_retract_steps", "_start", "value")

    def __init__(self, options: SglangOptions) -> None:
        share, conservativeness = options.init_new_token_ratio, options.schedule_conservativeness
        self.value = self._start = min(share * conservativeness, 1.0)
        self._floor = min(self._start * options.min_new_token_ratio_factor, 1.0)
        self._decay = (self._start - self._floor) / options.new_token_ratio_decay_steps
        self._retract_steps = options.retract_decode_steps

    def reset(self) -> None:
        """Begin anew: nobody runs."""
        self.value = self._start

    def fall(self, steps: int) -> None:
        """Fall by so many steps of decodes, one by one: a leap has the same last bit."""
        ratio, floor, decay = self.value, self._floor, self._decay
        if ratio != floor:
            for _ in range(steps):
                ratio -= decay
                if ratio <= floor:
                    ratio = floor
                    break
            self.value = ratio

    def retracted(self, kept: Sequence[Request], out: int) -> None:
        """Become what those kept have brought out, `out` tokens, and the steps to come beside."""
        out += self._retract_steps * len(kept)
        self.value = min(1.0, out / (sum(request.allowed for request in kept) + 1))
