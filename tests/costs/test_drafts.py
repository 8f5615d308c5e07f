"""What a step costs that verifies drafts, and what the drafts cost."""

from math import isclose

from simulator.core.request import Chunk, Request, Step
from simulator.core.speculative_config import DraftConfig
from simulator.costs.linear import LinearCost
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.pipeline import PipelineCost
from simulator.features.drafts.cost import DraftedCost


def test_a_linear_cost_charges_verified_tokens() -> None:
    """2 sequences with 3 drafts each, 30 tokens read: 1 + 8 * 0.1 + 30 * 0.01 + 2 * 0.2."""
    cost = LinearCost(base=1.0, per_token=0.1, per_context=0.01, per_sequence=0.2)
    assert isclose(cost.execute(Step([], 2, 30, drafts=6)).seconds, 2.5)
    chunk = Chunk(Request(0, 0.0, 10, 1), 0, 10)
    assert isclose(cost.execute(Step([chunk], 2, 30, drafts=6)).seconds, 1 + 1.8 + 0.3 + 0.6)


def test_a_piecewise_cost_reads_the_cache_once_by_the_kernel_for_many_queries() -> None:
    """dense(8) = 8, head 0.5 * 8 rows, c' 30 tokens of 0.1, e' 2 sequences of 1; host 2 of 0.25."""
    cost = PiecewiseCost(
        dense=[[1, 1.0], [16, 16.0]],
        head=0.1,
        head_per_sequence=0.5,
        decode_per_context=0.01,
        mixed_per_context=0.1,
        mixed_per_sequence=1.0,
        host_per_sequence=0.25,
    )
    assert isclose(cost.execute(Step([], 2, 30, drafts=6)).seconds, 8 + 4 + 3 + 2 + 0.5)
    chunk = Chunk(Request(0, 0.0, 4, 1), 0, 4)
    assert isclose(cost.execute(Step([chunk], 2, 30, drafts=6)).seconds, 12 + 4.5 + 3 + 2 + 0.75)


def test_drafting_costs_what_its_terms_say() -> None:
    """3 draft steps; the first as a share of what was verified, two as shares of plain decodes."""
    target = LinearCost(base=1.0, per_token=0.1)
    step = Step([], 2, 30, drafts=6)  # 1.8 s; without drafts 1.2 s
    draft = DraftConfig(seconds=0.01, seconds_per_sequence=0.001)
    assert isclose(DraftedCost(target, 3, draft).execute(step).seconds, 1.8 + 3 * 0.012)
    draft = DraftConfig(fraction=0.1)
    assert isclose(DraftedCost(target, 3, draft).execute(step).seconds, 1.8 + 0.1 * (1.8 + 2 * 1.2))


def test_the_last_stage_of_a_pipeline_drafts() -> None:
    """Each takes 1.8 s, and without drafts 1.2 s; the first draft step a tenth of both stages."""
    target = LinearCost(base=1.0, per_token=0.1)
    pipeline, step = PipelineCost(target, (target, target), send=0.5), Step([], 2, 30, drafts=6)
    drafted = DraftedCost(pipeline, 3, DraftConfig(fraction=0.1))
    host, (first, last), send = drafted.stage_seconds(step)
    assert (host, first, send) == (0.0, 1.8, 0.5)
    assert isclose(last, 1.8 + 0.1 * (2 * 1.8 + 2 * 2 * 1.2))
