"""Cost models: by hand, and by the law that a leap is its steps."""

import re
import warnings
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.executor import CanLeap
from simulator.core.request import Step
from simulator.costs.linear import LinearCost
from simulator.costs.profile import (
    shipped_profiles,
)
from simulator.costs.roofline import roofline
from simulator.costs.tables import MAX_TABLE_TOKENS
from simulator.models.gpus import GPUS
from simulator.models.load import load_model
from tests.support.costs import HAND, cost_of, mixed
from tests.support.logs import logged
from tests.support.with_fields import with_fields

LLAMA = load_model("llama-3-8b")
OF_LLAMA = [name for name in shipped_profiles() if re.fullmatch(r"llama-3-8b\.[^-]*\.bf16", name)]
SOME = [*OF_LLAMA, "tiny-test.cpu.fp32", *shipped_profiles()[::25]]


def test_linear_by_hand() -> None:
    """Base, 7 tokens in all, 20 cached ones read, 3 sequences."""
    cost = LinearCost(base=1.0, per_token=10.0, per_context=0.5, per_sequence=100.0)
    assert cost.execute(mixed((0, 5), decodes=2, context=20)).seconds == 1 + 70 + 10 + 300
    assert cost.execute(Step([], 2, 20)).seconds == 1 + 20 + 10 + 200
    assert cost.leap(Step([], 2, 20), 3).seconds == [231.0, 232.0, 233.0]


def test_a_mixed_step_by_hand() -> None:
    """Two prompts and four decodes: 12 tokens, 6 sequences, all attention in one sum."""
    step = mixed((0, 3), (0, 5), decodes=4, context=400)
    work = 0.25 * (6 + 15) + 4 * 8 + 1.5 * 400 + 5 * 4
    assert replace(HAND, serial_per_token=0.0).execute(step).seconds == 1 + 22 + 6 + 200 + work
    mean = 400 / 4  # the longest sequence that is known of
    assert HAND.execute(step).seconds == 1 + 22 + 6 + 200 + max(work, 16 * mean)


def test_padding_and_ghosts_are_paid_for() -> None:
    """A ghost costs what a decode costs, a padded token what a token costs."""
    for cost in (HAND, LinearCost(1.0, 1.0, 1.0)):
        ghosts = with_fields(Step([], 4, 40), ghosts=3)
        assert cost.execute(ghosts).seconds == cost.execute(Step([], 4, 40)).seconds
        padded = mixed((0, 8))
        padded.padding = 5
        assert cost.execute(padded).seconds == cost.execute(mixed((0, 8))).seconds


def test_the_dense_table() -> None:
    """Constant below its first row, straight between rows, and beyond as in its upper half."""
    cost = replace(HAND, dense=[[5, 10.0], [10, 20.0], [20, 60.0]])
    assert [cost.dense_seconds(n) for n in (1, 5, 7, 10, 15, 20, 30)] == [
        10.0,
        10.0,
        14.0,
        20.0,
        40.0,
        60.0,
        100.0,
    ]
    assert replace(HAND, dense=[[5, 10.0]]).dense_seconds(100) == 10.0
    stairs = replace(HAND, dense=[[1, 1.0], [8, 8.0], [9, 16.0], [16, 15.0]])
    assert stairs.dense_seconds(32) == 15.0 + 16 * (15.0 - 8.0) / 8
    falling = replace(HAND, dense=[[1, 2.0], [2, 1.0]])
    assert falling.dense_seconds(9) == 1.0


def test_a_long_table_is_searched() -> None:
    """Rows beyond the part that is looked up by index count all the same."""
    far = 4 * MAX_TABLE_TOKENS
    cost = replace(HAND, dense=[[1, 1.0], [2 * MAX_TABLE_TOKENS, 2.0], [far, 4.0]])
    assert cost.dense_seconds(2 * MAX_TABLE_TOKENS) == 2.0
    assert cost.dense_seconds(3 * MAX_TABLE_TOKENS) == 3.0
    assert cost.dense_seconds(5 * MAX_TABLE_TOKENS) == 5.0
    assert cost.execute(Step([], far, 0)).seconds == 1 + 4 + far + 100 + 2 * far


COSTS = {
    "linear": LinearCost(1e-3, 3.3e-5, 1.7e-8, 1.1e-6),
    "piecewise": HAND,
    "roofline": roofline(LLAMA, GPUS["L40S"]),
    "graphs": replace(HAND, cudagraph_capture_sizes=[1, 2, 4, *range(8, 513, 8)]),
    "overlapped": replace(HAND, host=30.0, host_per_sequence=50.0, overlapped=True),
    "waited for": replace(HAND, host=30.0, host_per_sequence=50.0, host_per_prefill=2.0),
}
with warnings.catch_warnings(action="ignore"):  # each is of a model and a GPU of its own
    COSTS |= {name: cost_of(name) for name in SOME}


@given(
    name=st.sampled_from(sorted(COSTS)),
    decodes=st.integers(1, 3000) | st.integers(1, 8),
    mean=st.integers(1, 40_000) | st.integers(1, 30),
    repeats=st.integers(1, 50),
)
def test_a_leap_is_its_steps_to_the_last_bit(
    name: str, decodes: int, mean: int, repeats: int
) -> None:
    """Item i of a leap is what `execute` says of the i-th step, context grown by one each."""
    cost = COSTS[name]
    context = decodes * mean
    steps = [Step([], decodes, context + k * decodes) for k in range(repeats)]
    assert cost.leap(steps[0], repeats).seconds == [cost.execute(step).seconds for step in steps]


@pytest.mark.parametrize("name", sorted(COSTS))
def test_every_kind_can_leap(name: str) -> None:
    """The replica asks this protocol before it leaps."""
    assert isinstance(COSTS[name], CanLeap)
    assert COSTS[name].name.split(" ")[0] in {name, ""}


LIMITED = replace(
    HAND,
    name="hand",
    limits={"tokens": (1, 20), "sequences": (1, 8), "context": (1, 100), "pairs": (0, 50)},
)


def test_steps_inside_the_range_say_nothing() -> None:
    """The bounds themselves are inside; without limits everything is."""
    rows = logged(decodes=[8, 4], prefill_tokens=[0, 12], wasted=[0, 4], context=[100, 7])
    assert LIMITED.range_warnings(rows) == []
    rows["context"] = 10**9
    assert HAND.range_warnings(rows) == []
    assert LIMITED.range_warnings(rows[:0]) == []


def test_padding_is_tokens_and_ghosts_are_sequences() -> None:
    """A static step of nothing but padding computes 20 tokens, for no 20 sequences."""
    assert LIMITED.range_warnings(logged(wasted=[20])) == []
    assert "sequences of 9" in LIMITED.range_warnings(logged(decodes=[1], wasted=[8]))[0]


def test_steps_outside_are_counted_by_quantity() -> None:
    """Each quantity has its line, with its share of the steps."""
    rows = logged(
        decodes=[9, 1, 1, 1], prefill_tokens=[0, 20, 5, 5], prefill_context=[0, 10, 51, 5]
    )
    tokens, sequences, pairs = LIMITED.range_warnings(rows)
    assert tokens == (
        "cost hand: tokens of 6 to 21 in a step, fitted from 1 to 20: "
        "25.00% of the steps are extrapolated"
    )
    assert sequences.startswith("cost hand: sequences of 1 to 9 in a step, fitted from 1 to 8: 25")
    assert pairs.startswith("cost hand: pairs of 5 to 51")


@pytest.mark.parametrize(("first", "late"), [(91, 5), (90, 4), (95, 7), (101, 10), (1, 0)])
def test_a_leapt_row_counts_the_steps_that_lie_outside(first: int, late: int) -> None:
    """Ten steps of two sequences read first, first + 2, ...; those above 100 count."""
    reads = [first + 2 * k for k in range(10)]
    assert sum(read > 100 for read in reads) == late
    rows = logged(decodes=[1], wasted=[1], context=[first], steps=[10])
    shares = [message.rsplit(": ", 1)[1] for message in LIMITED.range_warnings(rows)]
    assert shares == [f"{late / 10:.2%} of the steps are extrapolated"] * (late > 0)
