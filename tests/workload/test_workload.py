"""A workload knows its sums and refuses to be one that cannot be run."""

import numpy as np
import pytest

from simulator.workload.workload import Workload
from tests.support.workloads import generate


def work(arrival=(0.0, 0.5, 2.0), prompt=(3, 5, 7), output=(1, 2, 4), **rest) -> Workload:
    return Workload(
        np.array(arrival, float), np.array(prompt, np.int64), np.array(output, np.int64), **rest
    )


def session(**rest) -> Workload:
    """Two turns, and a request by itself."""
    columns = {"after": np.array([-1, 0, -1]), "delay": np.array([0.0, 1.5, 0.0])} | rest
    return work((0.0, np.nan, 2.0), **columns)


def test_sums():
    """Length, token sums and duration are those of the columns."""
    w = work()
    w.check()
    assert (len(w), w.total_input, w.total_output, w.duration) == (3, 15, 7, 2.0)


def test_nobody():
    """A workload without requests is one, of no duration."""
    w = work((), (), ())
    w.check()
    assert (len(w), w.total_input, w.duration) == (0, 0, 0.0)


def test_duration_of_sessions():
    """Turns whose time is not known yet have no part in the duration."""
    w = session()
    w.check()
    assert w.duration == 2.0
    assert work((1.0, np.nan, np.nan), after=np.array([-1, 0, 1])).duration == 1.0


def test_segments_that_add_up():
    """Contents are accepted when their tokens are those of the prompts; a prompt may have none."""
    work(segments=[(("a", 1), ("b", 2)), None, (("a", 7),)]).check()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (work(prompt=(3, 5)), "prompt_tokens: 2 values for 3 requests"),
        (work(client=["a"]), "client: 1 values for 3 requests"),
        (work(prompt=(3, 0, 7)), "prompt_tokens: request 1 has 0, not 1 or more"),
        (work(output=(3, 1, -7)), "output_tokens: request 2 has -7, not 1 or more"),
        (work((0.0, 2.0, 1.0)), "arrival: the times do not ascend"),
        (work((-1.0, 2.0, 3.0)), "arrival: not every time is finite and 0 or more"),
        (work((0.0, 2.0, np.inf)), "arrival: not every time is finite and 0 or more"),
        (work((0.0, np.nan, 3.0)), "after: request 1 needs either a time or a predecessor"),
        (work(after=np.array([-1, 0, -1])), "after: request 1 needs either a time or a predecess"),
        (
            session(after=np.array([-1, 1, -1])),
            "after: request 1 follows a request that is not before it",
        ),
        (
            session(delay=np.array([0, -0.1, 0])),
            "delay: not every think time is finite and 0 or more",
        ),
        (
            session(delay=np.array([0, np.nan, 0])),
            "delay: not every think time is finite and 0 or more",
        ),
        (
            work(segments=[None, (("a", 4),), None]),
            "segments: of request 1 do not add up to its prompt",
        ),
        (work(max_concurrency=0), "max_concurrency: 0 is not 1 or more"),
    ],
)
def test_refusals(bad, message):
    """Each way of not being a workload is named with its column."""
    with pytest.raises(ValueError, match=message):
        bad.check()


def test_adapters_are_asked_for_by_a_zipf_law() -> None:
    """The k-th in proportion to 1 / k; a fifth asks for the model. Nothing else moves."""
    asked = {"num_adapters": 4, "zipf": 1.0, "base": 0.2}
    plain = generate({"num_prompts": 20_000, "request_rate": 5})
    work = generate({"num_prompts": 20_000, "request_rate": 5, "adapters": asked})
    assert work.model is not None
    share = np.array(
        [work.model.count(name) for name in ("", *(f"adapter-{k}" for k in range(1, 5)))]
    )
    expected = np.array([0.2, *(0.8 / k / (25 / 12) for k in range(1, 5))])
    assert share / 20_000 == pytest.approx(expected, abs=0.01)
    assert (work.arrival == plain.arrival).all()
    assert (work.prompt_tokens == plain.prompt_tokens).all()


def test_turns_of_a_session_ask_for_one_adapter() -> None:
    asked = {"num_adapters": 50, "zipf": 0.0}
    work = generate({"num_prompts": 90, "sessions": {"turns": 3}, "adapters": asked})
    assert work.model is not None
    assert work.model[::3] == work.model[1::3] == work.model[2::3]
    assert len(set(work.model)) > 10
