"""Alarms come off at their time to the last bit, and late ones last."""

from collections.abc import Generator

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from simpy.events import NORMAL

from simulator.core.alarm import LATE, MOST_SKIPS, Alarm, FastEnvironment

KINDS = (simpy.Environment, FastEnvironment)


@given(
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.sampled_from([NORMAL, LATE]),
    st.sampled_from(KINDS),
)
def test_an_alarm_comes_off_at_its_time_to_the_last_bit(one, two, priority, kind) -> None:
    """Whatever the clock says when it is set; SimPy itself adds a delay and rounds."""
    now, when = sorted((one, two))
    env = kind(now)
    rung: list[float] = []
    Alarm(env, lambda _: rung.append(env.now), priority).set(when)
    env.run()
    assert rung == [when]


def test_an_alarm_far_ahead_comes_off_at_its_time() -> None:
    """No float between can be added to the clock to give this time: it takes two hops."""
    now, when = 1.7220177217066497, 6.387511524619408
    env = simpy.Environment(now)
    rung: list[float] = []
    Alarm(env, lambda _: rung.append(env.now), LATE).set(when)
    env.run()
    assert rung == [when]


@pytest.mark.parametrize("kind", KINDS)
def test_an_alarm_can_be_set_again_and_again(kind) -> None:
    """Also by its own ring."""
    env = kind()
    rung: list[float] = []

    def ring(_: simpy.Event) -> None:
        rung.append(env.now)
        if len(rung) < 4:
            alarm.set(0.1 * 3 ** len(rung))

    alarm = Alarm(env, ring, NORMAL)
    alarm.set(0.1)
    env.run()
    assert rung == [0.1 * 3**n for n in range(4)]


@pytest.mark.parametrize("kind", KINDS)
def test_late_comes_after_everything_of_its_instant(kind) -> None:
    """An alarm set first rings last, after timeouts of zero that others start then."""
    env = kind()
    order: list[str] = []

    def process(env: simpy.Environment) -> Generator[simpy.Event, None, None]:
        yield env.timeout(2.0)
        order.append("timeout")
        yield env.timeout(0)
        order.append("zero")

    Alarm(env, lambda _: order.append("late"), LATE).set(2.0)
    env.process(process(env))
    env.run()
    assert order == ["timeout", "zero", "late"]


def test_a_clock_attends_to_all_else_before_a_turn() -> None:
    """What is due at the very time of a turn comes first, too, as it does before a late alarm."""
    env = FastEnvironment(1.0)
    order: list[object] = []
    Alarm(env, lambda _: order.append("alarm")).set(3.0)

    class EveryHalfSecond:
        when = 1.0

        def turn(self, now: float) -> float:
            assert now == env.now
            order.append(now)
            return now + 0.5 if now < 20.0 else -1.0

    timer = EveryHalfSecond()
    env.attend(timer)
    assert order == [1.0, 1.5, 2.0, 2.5, "alarm", *(3.0 + 0.5 * k for k in range(MOST_SKIPS - 3))]
    assert timer.when == env.now + 0.5 == 9.5
    env.attend(timer)
    env.attend(timer)
    assert (timer.when, env.now) == (-1.0, 20.0)
