"""The engine on its clock: who is seen by which step, in leaps as stepwise."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np
import pytest
import simpy

from simulator.core.alarm import FastEnvironment
from simulator.core.executor import Leap, Timing
from simulator.core.log import REASONS
from simulator.core.request import Request, Step
from simulator.engine.client import Client
from simulator.engine.replica import Replica
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.orders import SJF, Priority
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.support.engines import Clock, fcfs, play, workload

both = pytest.mark.parametrize("leap", [True, False])


@dataclass
class Counted(Clock):
    """A clock that counts how often it is asked."""

    asked: list[int] = field(default_factory=list)  # steps, per call

    def execute(self, step: Step) -> Timing:
        self.asked.append(1)
        return super().execute(step)

    def leap(self, step: Step, repeats: int) -> Leap:
        self.asked.append(repeats)
        return super().leap(step, repeats)


# ---------------------------------------------------------------- times


@both
def test_step_ends_are_sums_of_the_durations_one_after_the_other(leap: bool) -> None:
    """No closed form: 0.1 added 30 times, from the arrival on."""
    log, _ = play(workload((0.3, 4, 30)), fcfs(), Clock(0.1), leap=leap)
    now, ends = 0.3, []
    for _ in range(30):
        now += 0.1
        ends.append(now)
    assert log.tick_ends.tolist() == ends[1:]
    assert log.requests.tolist() == [(0.3, ends[0], ends[-1], 0, 0, 0, 30, 0)]


# ---------------------------------------------------------------- arrivals


@both
@pytest.mark.parametrize(("arrival", "first"), [(4.0, 4.0), (3.5, 4.0), (4.5, 5.0)])
def test_an_arrival_at_a_steps_end_is_seen_by_the_next_step(leap, arrival, first) -> None:
    """Steps of 1 s: at 4 s it boards at 4 s, a little later at 5 s."""
    log, _ = play(workload((0, 4, 20), (arrival, 4, 1)), fcfs(), leap=leap)
    assert log.requests.tolist()[0][:4] == (first, first + 1, first + 1, 1)


@both
def test_an_arrival_just_after_a_steps_end_is_not(leap: bool) -> None:
    """Steps of 0.1 s: ten of them end at 0.9999999999999999, and it comes at 1."""
    load = workload((0, 20, 30), (0, 39, 9), (1.0, 4, 1))
    scheduler = fcfs(max_num_batched_tokens=40, max_num_seqs=4)
    log, _ = play(load, scheduler, Clock(0.1), leap=leap)
    rows = {row[3]: row[:3] for row in log.requests.tolist()}
    assert rows[1][2] == 0.9999999999999999
    assert rows[2][0] == 0.9999999999999999 + 0.1


def test_an_arrival_cuts_a_leap_at_the_step_in_flight() -> None:
    """Leaping from 1 s on, at 6.5 s the sixth of the leapt steps is under way: it ends at 7 s."""
    log, _ = play(workload((0, 4, 20), (6.5, 4, 1)), fcfs())
    rows = log.steps[["start", "end", "steps", "prefill_tokens", "decodes"]].tolist()
    assert rows == [(0, 1, 1, 4, 0), (1, 7, 6, 0, 1), (7, 8, 1, 4, 1), (8, 20, 12, 0, 1)]


def test_an_arrival_in_the_last_step_of_a_leap_cuts_nothing() -> None:
    """The leap of 3 steps ends at 4 s anyway."""
    clock = Counted()
    log, _ = play(workload((0, 4, 4), (3.5, 4, 1)), fcfs(), clock)
    assert log.steps["end"].tolist() == [1, 4, 5]
    assert clock.asked == [1, 3, 1]


def test_an_arrival_that_finds_no_seat_does_not_cut() -> None:
    """Nor do those behind a head that does not fit."""
    log, _ = play(workload((0, 4, 20), (6.5, 4, 1)), fcfs(max_num_seqs=1))
    assert log.steps["steps"].tolist() == [1, 19, 1]
    load = workload((0, 4, 20), (2.5, 24, 1), (6.5, 4, 1), (7.5, 4, 1))
    log, _ = play(load, fcfs(num_blocks=8, max_num_seqs=4))
    assert log.steps["steps"].tolist() == [1, 2, 17, 1, 1]


def test_a_shorter_job_that_may_overtake_the_head_cuts() -> None:
    """Shortest first: the newcomer of 4 fits where the head of 24 does not."""
    load = workload((0, 4, 20), (2.5, 24, 1), (6.5, 25, 1), (7.5, 4, 1))
    log, _ = play(load, fcfs(num_blocks=8, max_num_seqs=4, policy=SJF()))
    assert log.steps["steps"].tolist() == [1, 2, 5, 1, 11, 1, 1]


@both
def test_several_arrivals_of_one_instant_board_together(leap: bool) -> None:
    """In the order of the workload, whether the engine sleeps, leaps or just ends a step."""
    load = workload((0, 4, 9), (0, 4, 9), (3, 4, 9), (3, 4, 9), (5.5, 4, 1), (5.5, 4, 1))
    log, _ = play(load, fcfs(), leap=leap)
    rows = log.steps
    assert rows["start"][rows["prefill_tokens"] > 0].tolist() == [0, 3, 6]
    assert rows["prefill_tokens"][rows["prefill_tokens"] > 0].tolist() == [8, 8, 8]
    assert log.requests["id"].tolist() == [4, 5, 0, 1, 2, 3]


@both
def test_the_engine_sleeps_between_arrivals(leap: bool) -> None:
    """Idle from 3 s to 10.25 s; no rows for that."""
    log, _ = play(workload((0, 4, 3), (10.25, 4, 2)), fcfs(), leap=leap)
    rows = log.steps
    assert (rows["start"][0], rows["end"][-1]) == (0, 12.25)
    assert 10.25 in rows["start"]
    assert (rows["end"] - rows["start"]).sum() == 5


def test_two_arrivals_in_one_leap_cut_it_once() -> None:
    """The second comes while the step that the first waits for is in flight."""
    log, _ = play(workload((0, 4, 20), (6.5, 4, 1), (6.75, 4, 1)), fcfs())
    assert log.steps[["start", "steps", "prefill_tokens"]].tolist() == [
        (0, 1, 4),
        (1, 6, 0),
        (7, 1, 8),
        (8, 12, 0),
    ]


def test_an_executor_that_cannot_leap_is_asked_for_every_step() -> None:
    """With the same result."""

    class Plain:
        def execute(self, step: Step) -> Timing:
            return Timing(1.0)

    load = workload((0, 4, 9), (2.5, 4, 3))
    log, _ = play(load, fcfs(), Plain())
    same, _ = play(load, fcfs())
    assert len(log.steps) == 9
    assert log.request_rows == same.request_rows
    assert log.tick_ends == same.tick_ends


def test_a_scheduler_that_leaves_requests_waiting_for_nothing_is_an_error() -> None:
    """Rather than a run that ends without them."""

    class Lazy(Scheduler):
        def schedule(self, now: float) -> Step:
            return Step([])

    with pytest.raises(RuntimeError, match="does nothing though requests wait"):
        play(workload((0.5, 4, 1)), Lazy(BlockCounter(9, 4)))


@pytest.mark.parametrize("late", [4.5, 4.0005])
def test_after_a_step_that_could_only_preempt_the_engine_naps(late: float) -> None:
    """10 blocks of one token: at 4 s request 0, the less urgent, lacks one and leaves.

    The prompt of request 1 is held back, so nothing is computed; a millisecond later it is. An
    arrival does not end the nap. The preemption is counted in the next row.
    """
    load = workload((0, 2, 7), (0.5, 8, 1), (late, 1, 1), priority=np.array([1, 0, 2]))
    scheduler = fcfs(
        num_blocks=11,
        block_size=1,
        policy=Priority(),
        max_num_seqs=3,
        max_num_batched_tokens=6,
        prefill_schedule_interval=3,
        scheduler_reserve_full_isl=False,
    )
    log, _ = play(load, scheduler)
    assert log.steps[["start", "prefill_tokens", "decodes", "preempted"]].tolist()[:4] == [
        (0, 2, 0, 0),
        (1, 0, 1, 0),
        (3, 5, 1, 0),
        (4 + 0.001, 3, 0, 1),
    ]


# ---------------------------------------------------------------- beside other processes


def build(
    scheduler: Scheduler, leap: bool = True
) -> tuple[simpy.Environment, Replica, Callable[[int, int, int], Request]]:
    """An engine, and how to submit (id, prompt, output) to it now."""
    env = simpy.Environment()
    replica = Replica(env, scheduler, Clock(), leap=leap)

    def submit(id: int, prompt: int, output: int) -> Request:
        request = Request(id, env.now, prompt, output)
        replica.submit(request)
        return request

    return env, replica, submit


@both
def test_what_on_finish_submits_is_seen_by_the_very_next_step(leap: bool) -> None:
    """One ends at 3 s, its successor boards at 3 s, beside another or alone."""
    for others in (0, 1):
        env, replica, submit = build(fcfs(), leap)
        replica.on_finish = lambda r, s=submit: s(10, 4, 2) if r.id == 0 else None
        submit(0, 4, 3)
        for id in range(1, 1 + others):
            submit(id, 4, 30)
        env.run()
        row = next(row for row in replica.log.requests.tolist() if row[3] == 10)
        assert row[:3] == (3, 4, 5)


@both
def test_a_process_that_waits_for_an_answer_can_ask_again_at_once(leap: bool) -> None:
    """The engine has gone to rest at that instant already, and must wake up again."""
    env, replica, submit = build(fcfs(), leap)
    answers: dict[int, simpy.Event] = {}
    replica.on_finish = lambda request: answers[request.id].succeed()

    def user(env: simpy.Environment) -> Generator[simpy.Event, None, None]:
        for id in range(3):
            answers[id] = env.event()
            submit(id, 4, 3)
            yield answers[id]

    env.process(user(env))
    env.run()
    assert replica.log.requests["finish"].tolist() == [3, 6, 9]


@both
def test_a_process_that_asks_between_steps_is_served_like_any_arrival(leap: bool) -> None:
    """Timeouts of somebody else's: at 2.5 s, at 4 s sharp, and at 4 s after a wait of zero."""
    env, replica, submit = build(fcfs(), leap)
    submit(0, 4, 12)

    def user(env: simpy.Environment) -> Generator[simpy.Event, None, None]:
        yield env.timeout(2.5)
        submit(1, 4, 1)
        yield env.timeout(1.5)
        submit(2, 4, 1)
        yield env.timeout(0)
        submit(3, 4, 1)

    env.process(user(env))
    env.run()
    rows = {row[3]: row[0] for row in replica.log.requests.tolist()}
    assert rows == {0: 0, 1: 3, 2: 4, 3: 4}


@both
@pytest.mark.parametrize("kind", [simpy.Environment, FastEnvironment])
def test_two_engines_in_one_environment_mind_their_own_business(leap: bool, kind) -> None:
    """The second starts a little later; each writes what it would write alone."""
    env = kind()
    logs = []
    for scheduler, load in (
        (fcfs(), workload((0, 4, 9), (2.5, 4, 3))),
        (fcfs(max_num_seqs=1), workload((0.25, 4, 9), (2.5, 4, 3))),
    ):
        replica = Replica(env, scheduler, Clock(), leap=leap)
        replica.on_finish = Client(env, load, replica.submit).finished
        logs.append(replica.log)
    env.run()
    alone, _ = play(workload((0, 4, 9), (2.5, 4, 3)), fcfs(), leap=leap)
    assert logs[0].step_rows == alone.step_rows
    assert logs[1].requests["finish"].tolist() == [9.25, 12.25]


@both
def test_a_clock_that_is_stopped_between_two_steps_goes_on_as_if_nothing_had_been(leap) -> None:
    load = workload((0, 4, 9), (2.5, 40, 3), (3.0, 4, 40))
    alone, _ = play(load, fcfs(), leap=leap)
    env = FastEnvironment()
    replica = Replica(env, fcfs(), Clock(), leap=leap)
    replica.on_finish = Client(env, load, replica.submit).finished
    for until in (0.5, 3.0, 3.25, 7.0, 30.5):
        env.run(until=until)
        assert env.now == until
    env.run()
    assert replica.log.request_rows == alone.request_rows
    assert replica.log.tick_ends == alone.tick_ends


@both
def test_a_rejected_request_is_told_at_once(leap: bool) -> None:
    """`on_finish` is called inside `submit`; the engine is not disturbed."""
    env, replica, submit = build(fcfs(max_model_len=50), leap)
    told: list[tuple[int, float]] = []
    replica.on_finish = lambda request: told.append((request.id, env.now))
    submit(0, 4, 9)
    env.run(until=2.5)
    submit(1, 50, 1)
    assert told == [(1, 2.5)]
    env.run()
    assert told == [(1, 2.5), (0, 9.0)]
    assert [REASONS[row[7]] for row in replica.log.requests.tolist()] == ["rejected", "stop"]
