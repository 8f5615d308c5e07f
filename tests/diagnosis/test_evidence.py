"""What requests wait for in a queue is the same where steps are leapt over."""

import pytest

from simulator.core.engine_config import EngineConfig
from simulator.core.packed import PAGE
from simulator.diagnosis.evidence import blocked_time
from tests.support.engines import fcfs, play, workload

ROWS = [(0.0, 8, 60), (0.0, 8, 90), (10.5, 40, 30), (12.5, 40, 30), (40.5, 40, 9), (80.25, 60, 4)]
"""Two decode for long; those that come meanwhile find no room, two of them in one leap each."""


@pytest.mark.parametrize("spare", [0.25, float("inf")])
def test_leaps_wait_for_what_their_steps_do(spare: float) -> None:
    engine = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64)
    found = []
    for leap in (True, False):
        scheduler = fcfs(20, 4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
        log, _ = play(workload(*ROWS), scheduler, leap=leap)
        found.append(blocked_time(log, engine, spare))
    (areas, blocked), (other, by_step) = found
    assert areas == pytest.approx(other)
    assert blocked == pytest.approx(by_step)


def test_pages_of_ticks_change_nothing() -> None:
    """Three leaps of pages each; somebody comes in each, and finds no room."""
    ticks = 3 * PAGE
    rows = [(0.0, 4, ticks), (10.5, 4, ticks), *((k * ticks + 20.5, 4, ticks) for k in range(3))]
    scheduler = fcfs(ticks, 4, max_num_seqs=1, max_model_len=2 * ticks)
    log, _ = play(workload(*rows), scheduler)
    engine = EngineConfig(max_num_seqs=1, max_num_batched_tokens=64)
    whole = blocked_time(log, engine, 0.25)
    log.put_by()
    assert len(log.pages["tick_ends"]) > 9
    assert blocked_time(log, engine, 0.25) == whole
