"""vLLM's `prefill_schedule_interval`: prefill is held back so that decodes run undisturbed for a
while, unless that would keep requests waiting that do not fit anyway."""


class Cadence:
    """Holds prefill until `interval` steps lie between two that carry it."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.held = False  # in this step
        self.carries = False  # this step, prefill
        self._backed_up = False  # the last round of admissions left somebody waiting
        self._last = -interval  # number of the last step that carried prefill

    def begin(self, executed: int, decoding: bool) -> None:
        """Decide for a step, after `executed` others; `decoding`: somebody runs who may decode."""
        self.carries = False
        self.held = decoding and not self._backed_up and executed + 1 - self._last < self.interval

    def end(self, executed: int, admitted: bool, waiting: bool) -> None:
        """Take note of the step, the last of `executed`; `admitted`: it could admit somebody."""
        if admitted and not self.held:
            self._backed_up = waiting
        if self.carries:
            self._last = executed

    def left(self, executed: int) -> int:
        """Count the steps for which prefill is held, the last of `executed` among them."""
        return self.interval - executed + self._last
