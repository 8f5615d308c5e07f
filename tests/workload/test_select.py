"""Parts and repetitions of a workload keep its times, links and contents in order."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.util.errors import HeadwayError, HeadwayWarning, MappingError
from simulator.workload.select import Selection, select
from simulator.workload.workload import Workload

NAN = math.nan


def plain(*arrival: float) -> Workload:
    """Make a workload whose requests are told apart by their lengths, 1, 2, 3, ..."""
    n = len(arrival)
    return Workload(np.array(arrival), np.arange(1, n + 1), np.arange(n, 0, -1), source="plain")


def sessions() -> Workload:
    """Make two conversations: 0 -> 2 -> 3 and 1 -> 4; the prompts spell out the history."""
    return Workload(
        arrival=np.array([0.0, 4.0, NAN, NAN, NAN]),
        prompt_tokens=np.array([10, 20, 16, 23, 28]),
        output_tokens=np.array([5, 6, 5, 5, 5]),
        segments=[
            ((("in", 0), 10),),
            ((("in", 1), 20),),
            ((("in", 0), 10), (("out", 0), 5), (("in", 2), 1)),
            ((("in", 0), 10), (("out", 0), 5), (("in", 2), 1), (("out", 2), 5), (("in", 3), 2)),
            ((("in", 1), 20), (("out", 1), 6), (("in", 4), 2)),
        ],
        client=["a", "b", "a", "a", "b"],
        priority=np.array([0, 1, 0, 0, 1]),
        after=np.array([-1, -1, 0, 2, 1]),
        delay=np.array([0.0, 0.0, 2.0, 3.0, 1.0]),
    )


@pytest.mark.parametrize(
    ("options", "arrival", "prompts"),
    [
        ({}, [0, 1, 3, 6], [1, 2, 3, 4]),
        ({"start_s": 1}, [0, 2, 5], [2, 3, 4]),
        ({"end_s": 3}, [0, 1], [1, 2]),
        ({"start_s": 1, "end_s": 6, "skip": 1}, [0], [3]),
        ({"skip": 2}, [0, 3], [3, 4]),
        ({"limit": 2}, [0, 1], [1, 2]),
        ({"limit": 9}, [0, 1, 3, 6], [1, 2, 3, 4]),
        ({"rate_scale": 2}, [0, 0.5, 1.5, 3], [1, 2, 3, 4]),
        ({"repeat": 2}, [0, 1, 3, 6, 8, 9, 11, 14], [1, 2, 3, 4] * 2),
        ({"repeat": 3, "limit": 6}, [0, 1, 3, 6, 8, 9], [1, 2, 3, 4, 1, 2]),
        ({"skip": 2, "repeat": 2, "rate_scale": 3}, [0, 1, 2, 3], [3, 4, 3, 4]),
        ({"start_s": 6, "repeat": 2}, [0, 0], [4, 4]),
    ],
)
def test_parts_of_a_workload(options, arrival, prompts):
    """Window, skip, repeat, limit, rate: in this order, from 0 on."""
    whole = plain(5.0, 6.0, 8.0, 11.0)
    whole.arrival -= 5.0
    part = select(whole, Selection(**options))
    part.check()
    assert part.arrival.tolist() == arrival
    assert part.prompt_tokens.tolist() == prompts
    assert part.source == "plain"
    assert len(whole) == 4


def test_long_requests_are_left_out_and_counted():
    """They are not shortened; what is left begins at 0."""
    with pytest.warns(HeadwayWarning) as caught:
        part = select(plain(0.0, 1.0, 3.0, 6.0), Selection(max_input_len=3, max_output_len=3))
    assert [str(warning.message) for warning in caught] == [
        "max_input_len: 1 of 4 requests are longer than 3 tokens and are left out",
        "max_output_len: 1 of 4 requests are longer than 3 tokens and are left out",
    ]
    assert part.arrival.tolist() == [0.0, 2.0]
    assert part.prompt_tokens.tolist() == [2, 3]


def test_a_session_goes_with_its_first_turn():
    """The window looks at the first turn; the links and the names of answers move along."""
    part = select(sessions(), Selection(start_s=1.0))
    part.check()
    assert part.prompt_tokens.tolist() == [20, 28]
    assert part.after.tolist() == [-1, 0]
    assert part.delay.tolist() == [0.0, 1.0]
    assert part.segments[1] == ((("in", 1), 20), (("out", 0), 6), (("in", 4), 2))
    assert part.client == ["b", "b"]
    assert part.priority.tolist() == [1, 1]


@pytest.mark.parametrize("options", [{"skip": 1}, {"max_output_len": 5, "start_s": None}])
def test_turns_go_with_the_turn_before(options):
    """A turn whose predecessor is left out is left out, and so are those that follow it."""
    with pytest.warns(HeadwayWarning) as caught:
        part = select(sessions(), Selection(**options))
    assert "turns of sessions are left out" in str(caught[-1].message)
    part.check()
    prompts = [20, 28] if "skip" in options else [10, 16, 23]
    assert part.prompt_tokens.tolist() == prompts


def test_limit_cuts_a_session_short():
    """The first turns stay."""
    part = select(sessions(), Selection(limit=3))
    assert part.prompt_tokens.tolist() == [10, 20, 16]
    assert part.after.tolist() == [-1, -1, 0]


def test_think_times_do_not_scale():
    """Only arrivals come faster: nobody thinks faster."""
    part = select(sessions(), Selection(rate_scale=4.0))
    assert part.arrival.tolist()[:2] == [0.0, 1.0]
    assert part.delay.tolist() == [0.0, 0.0, 2.0, 3.0, 1.0]


def test_repetition_keeps_prompts_and_names_answers_anew():
    """The prompts are the same contents again; each answer belongs to its own repetition."""
    part = select(sessions(), Selection(repeat=2))
    part.check()
    assert part.arrival.tolist()[5:7] == [8.0, 12.0]
    assert part.after.tolist() == [-1, -1, 0, 2, 1, -1, -1, 5, 7, 6]
    assert part.segments[5:7] == part.segments[:2]
    assert part.segments[9] == ((("in", 1), 20), (("out", 6), 6), (("in", 4), 2))
    assert part.client == sessions().client * 2


def test_impossible_selections_are_refused_all_at_once():
    """Every option that cannot be is told; so is nothing left."""
    with pytest.raises(MappingError) as caught:
        select(plain(0.0), Selection(skip=-1, limit=0, rate_scale=0.0, repeat=0))
    keys = [fault.key[0] for fault in caught.value.faults]
    assert keys == ["skip", "limit", "rate_scale", "repeat"]
    with pytest.raises(HeadwayError, match="plain: no request is left"):
        select(plain(0.0), Selection(skip=1))


GAPS = st.lists(st.floats(0, 100), min_size=1, max_size=12)


@given(GAPS, st.integers(0, 3), st.integers(1, 4), st.none() | st.integers(1, 30))
def test_repetitions_are_shifted_copies(gaps, skip, repeat, limit):
    """Each repetition is the first one, one period later, up to the limit."""
    whole = plain(*np.cumsum(gaps).tolist())
    if skip >= len(whole):
        return
    one = select(whole, Selection(skip=skip))
    part = select(whole, Selection(skip=skip, repeat=repeat, limit=limit))
    part.check()
    n = len(one)
    assert len(part) == min(n * repeat, limit or n * repeat)
    period = one.arrival[-1] + (one.arrival[-1] / (n - 1) if n > 1 else 0.0)
    for i in range(len(part)):
        assert part.arrival[i] == pytest.approx(one.arrival[i % n] + i // n * period, abs=1e-9)
        assert part.prompt_tokens[i] == one.prompt_tokens[i % n]


def test_a_repeat_beyond_all_memory_is_refused() -> None:
    """Unless the limit leaves few enough."""
    trace = Workload(np.arange(3.0), np.ones(3, int), np.ones(3, int))
    with pytest.raises(
        HeadwayError,
        match=r"^repeat: 3333334 times 3 requests are more than 10,000,000; give a limit$",
    ):
        select(trace, Selection(repeat=3_333_334))
    assert len(select(trace, Selection(repeat=3_333_334, limit=4))) == 4
