"""When the loops of a fleet go on: one timer for all of them."""

from collections.abc import Callable

from simulator.cluster.fleet import FleetClock
from simulator.core.alarm import FastEnvironment


class Turns:
    """A loop that notes its turns, and then rests."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def turn(self, now: float, deliver: Callable[[], None]) -> float:
        self.seen.append(now)
        return -1.0


def test_a_loop_that_is_put_off_goes_on_then_and_not_before() -> None:
    """One is set to 1 s and put off to 3 s, one is cancelled, one has its turn at 2 s."""
    env = FastEnvironment()
    clock = FleetClock(env, lambda: None)
    late, never, other = Turns(), Turns(), Turns()
    first, second, third = (clock.timer(loop) for loop in (late, never, other))
    first.set(1.0)
    first.set(3.0)
    second.set(1.5)
    second.cancel()
    third.set(2.0)
    env.run(4.0)
    assert (late.seen, never.seen, other.seen) == ([3.0], [], [2.0])
