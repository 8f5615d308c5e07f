"""Static batching: how long seats are kept, and answers that are given when the batch is over."""

import numpy as np
import pytest

from simulator import Result, load_scenario, run
from simulator.core.log import REASONS, SEAT
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.static import HfStatic, Static
from tests.support.engines import made, play, workload
from tests.support.scenarios import SMALL


def static(usable: int = 1000, **options: object) -> Static:
    """A static engine with `usable` blocks of one token."""
    return made(Static, BlockCounter(usable + 1, 1), **options)  # type: ignore[arg-type]


def given(scheduler: Static, *requests: tuple[float, int, int], **more: object) -> dict:
    """First token and finish of each request, as its client sees them; a step takes 1 s."""
    log, _ = play(workload(*requests, **more), scheduler)
    return {int(row["id"]): (row["first_token"], row["finish"]) for row in log.requests}


@pytest.fixture
def small(tmp_path) -> object:
    """Run a small scenario on a second a step, with overrides."""
    (tmp_path / "s.yaml").write_text(SMALL)

    def play_small(*overrides: str) -> Result:
        words = ["cost={kind: linear, base: 1.0}", "workload.input_len=1", *overrides]
        return run(load_scenario(tmp_path / "s.yaml", words))

    return play_small


@pytest.mark.parametrize(("deliver", "mean"), [("each", 212.5), ("batch", 500.0)])
def test_four_of_50_to_500_tokens(deliver: str, mean: float) -> None:
    """(50 + 100 + 200 + 500) / 4 if each is given as it ends, 500 if all wait for the last."""
    requests = [(0, 1, tokens) for tokens in (50, 100, 200, 500)]
    found = given(static(2000, deliver=deliver, batch_size=4), *requests)
    assert np.mean([finish for _, finish in found.values()]) == mean
    hf = made(HfStatic, BlockCounter(2001, 1), deliver=deliver, batch_size=4)  # type: ignore[arg-type]
    assert given(hf, *requests) == found


def test_an_answer_that_is_given_whole_has_its_e2el_as_ttft(small) -> None:
    """Four of 2, 3, 4 and 5 tokens: all at 5 s, none streams."""
    options = ["workload.num_prompts=4", "workload.request_rate=inf", "engine.max_num_seqs=4"]
    options += ["workload.output_len={kind: cycle, values: [2, 3, 4, 5]}"]
    result = small(*options, "engine.scheduling_policy={policy: static, deliver: batch}")
    summary, rows = result.summary(), result.requests
    assert rows.ttft.tolist() == rows.e2el.tolist() == [5.0] * 4
    assert rows.tpot.tolist() == [0.0] * 4
    assert summary["p99_itl_ms"] == summary["std_itl_ms"] == summary["mean_tpot_ms"] == 0.0
    assert summary["max_output_tokens_per_s"] == 14
    assert rows.prefill_time.tolist() == [1.0] * 4
    assert rows.decode_alone_time.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert rows.delivery_time.tolist() == rows.seat_idle_time.tolist() == [3.0, 2.0, 1.0, 0.0]
    each = small(*options, "engine.scheduling_policy=static")
    assert each.requests.seat_idle_time.tolist() == [3.0, 2.0, 1.0, 0.0]
    assert "delivery_time" not in each.requests
    assert "seat_idle_time" not in small(*options, "engine.scheduling_policy=fcfs").requests
    gauges = summary["headway"], each.summary()["headway"]
    assert gauges[0]["wasted_tokens"] == gauges[1]["wasted_tokens"] == 3 + 2 + 1


def test_steps_that_a_seat_is_kept() -> None:
    """Prompts in two steps; 2, 4 and 1 tokens: 5 steps, of which the last request needs two."""
    load = workload((0, 3, 2), (0, 3, 4), (0, 3, 1))
    for leap in (True, False):
        log, _ = play(
            load, static(batch_size=3, max_num_batched_tokens=6, max_num_seqs=3), leap=leap
        )
        assert log.seats.tolist() == [
            (1.0, 3.0, 5.0, 0, 5, 2),
            (1.0, 5.0, 5.0, 1, 5, 0),
            (2.0, 2.0, 5.0, 2, 5, 3),
        ]
        assert log.seats.dtype == SEAT


def test_who_waits_for_a_place_gets_it_when_the_batch_is_given() -> None:
    """Two at a time at the client: the third is sent at 5, not at 2."""
    requests = [(0, 1, 2), (0, 1, 5), (0, 1, 1)]
    scheduler = static(deliver="batch", batch_size=2, timeout=0.0)
    assert given(scheduler, *requests, max_concurrency=2)[2] == (6.0, 6.0)
    scheduler = static(batch_size=2, timeout=0.0)
    load = workload(*requests, max_concurrency=2)
    _, client = play(load, scheduler)
    assert client.sent[2] == 2.0


def test_a_member_that_makes_way_gives_its_answer() -> None:
    """Blocks run out at 3 s: request 1 ended at 2 s, and leaves then. The other ends at 8 s."""
    scheduler = static(usable=13, deliver="batch", batch_size=2)
    assert given(scheduler, (0, 4, 8), (0, 4, 2)) == {0: (8.0, 8.0), 1: (3.0, 3.0)}


def test_a_batch_whose_last_live_member_makes_way_is_given_at_once() -> None:
    """Request 0 ended at 1 s and cannot wait for request 1, which is computed again alone."""
    scheduler = static(usable=20, deliver="batch", batch_size=2, timeout=0.0)
    found = given(scheduler, (0, 10, 1), (0, 1, 5))
    assert found[0] == (1.0, 1.0)
    assert found[1] == (5.0, 5.0)


def test_an_interrupt_gives_nothing_out(small, monkeypatch) -> None:
    """Of a batch that is not over nobody has an answer: all are unfinished, without a TTFT."""

    def stop(env, *_: object) -> bool:
        env.run(until=3.5)
        return True

    monkeypatch.setattr("simulator.simulation.setup.drive", stop)
    options = ["workload.num_prompts=4", "workload.request_rate=inf", "engine.max_num_seqs=4"]
    options += ["workload.output_len={kind: cycle, values: [2, 3, 4, 5]}"]
    rows = small(*options, "engine.scheduling_policy={policy: static, deliver: batch}").requests
    assert rows.finish_reason.tolist() == [REASONS[3]] * 4
    assert rows.ttft.isna().all()
    assert rows.seat_idle_time.isna().all()
    assert rows.output_tokens.tolist() == [2, 3, 3, 3]


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="deliver: must be batch or each, not 'all'"):
        static(deliver="all")
