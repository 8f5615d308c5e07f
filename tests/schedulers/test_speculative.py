"""Speculative decoding: schedules worked out by hand, a plain scheduler beside it, statistics."""

from math import isclose

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simulator.core.request import Request, Step
from simulator.core.speculative_config import DraftConfig, SpeculativeConfig
from simulator.features.drafts.as_sums import Speculative
from simulator.features.drafts.blocks import SlotCounter
from simulator.features.drafts.cost import DraftedCost
from simulator.models.sliding_window import LayerGroups
from simulator.policies.orders import SJF
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from tests.support.engines import Clock, made, play, workload
from tests.support.reference_speculative import Job, ReferenceSpeculative
from tests.support.scenarios import errors

SCENARIO = """name: drafts
engine:
  enable_prefix_caching: false
  speculative_config: {num_speculative_tokens: 3, acceptance: 0.7}
cost: {kind: linear, base: 1e-2, per_token: 1e-5, per_context: 1e-8}
workload: {num_prompts: 300, request_rate: 20, input_len: 64, output_len: 101}
"""


def drafted(
    k: int = 3,
    acceptance: float | list[float] = 1.0,
    num_blocks: int = 1000,
    size: int = 4,
    method: str = "ngram",
    groups: LayerGroups | None = None,
    **options: object,
) -> Speculative:
    """A small engine that verifies k drafts a step."""
    longest = int(options.get("max_model_len", 8192))  # type: ignore[call-overload]
    block = SpeculativeConfig(
        num_speculative_tokens=k,
        acceptance=acceptance,
        method=method,
        draft=None if method == "ngram" else DraftConfig(seconds=0.0),
    )
    ahead = block.lookahead
    blocks = SlotCounter(num_blocks, size, lookahead=ahead, max_model_len=longest, groups=groups)
    return made(Speculative, blocks, speculation=block, **options)


# ---------------------------------------------------------------- by hand


def test_all_drafts_right_give_k_plus_1_tokens_a_step() -> None:
    """The prompt brings 1 token, then 3 steps of 4: 13 tokens in 4 steps of 1 s."""
    log, _ = play(workload((0, 8, 13)), drafted(3, 1.0))
    row = log.requests[0]
    assert (row["first_token"], row["finish"], row["generated"]) == (1, 4, 13)
    assert log.steps["decodes"].tolist() == [0, 4, 4, 4]
    assert log.steps["wasted"].tolist() == [0, 0, 0, 0]
    assert log.steps["context"].tolist() == [0, 12, 16, 20]


def test_tokens_beyond_the_end_are_wasted() -> None:
    """1 and 4 and 4 of 10: of the last four verified, one is wanted. vLLM counts them accepted."""
    log, _ = play(workload((0, 8, 10)), drafted(3, 1.0))
    assert log.steps["decodes"].tolist() == [0, 4, 4, 1]
    assert log.steps["wasted"].tolist() == [0, 0, 0, 3]
    assert log.drafts["accepted"].tolist() == [3, 3, 3]
    assert log.requests["finish"].tolist() == [4]


def test_no_draft_right_is_fcfs_with_costlier_steps() -> None:
    """A token a step; 4 tokens of 0.1 s instead of one, and the prompt's 8 as ever."""
    log, _ = play(workload((0, 8, 3)), drafted(3, 0.0), Clock(1.0, per_token=0.1))
    assert log.steps["decodes"].tolist() == [0, 1, 1]
    assert log.steps["wasted"].tolist() == [0, 3, 3]
    assert np.allclose(log.steps["end"], [1.8, 3.2, 4.6])


def test_acceptance_by_position_stops_at_the_first_rejected() -> None:
    """The third is always right, but never reached; two come out with the token after them."""
    log, _ = play(workload((0, 8, 7)), drafted(3, [1.0, 0.0, 1.0]))
    assert log.steps["decodes"].tolist() == [0, 2, 2, 2]


def test_several_tokens_at_a_time_are_one_gap() -> None:
    """As `vllm bench serve` counts chunks of a stream: 3 gaps of 1 s; TPOT is 3 s / 12 tokens."""
    log, _ = play(workload((0, 8, 13)), drafted(3, 1.0))
    assert [(row["start"], row["ticks"]) for row in log.runs] == [(1, 3)]
    assert list(log.tick_ends) == [2, 3, 4]


def test_what_a_table_takes_is_counted_in_every_group_of_layers() -> None:
    """Two entries more in two tables, though a block of one of them leaves its window then."""
    groups = LayerGroups(full=1, windowed=1, window=4)
    blocks = SlotCounter(99, 4, lookahead=0, max_model_len=64, groups=groups)
    request = Request(0, 0.0, 8, 9)
    blocks.admit(request, (), 8)
    assert (blocks.taken(request, 16), blocks.growth(request, 16)) == (4, 3)


def test_decodes_want_k_plus_1_tokens_of_the_budget() -> None:
    """Two decodes take 8 of 10: of the third prompt 2 tokens a step are left."""
    scheduler = drafted(3, 1.0, max_num_batched_tokens=10, max_num_seqs=3)
    log, _ = play(workload((0, 4, 9), (0, 4, 9), (1, 5, 2)), scheduler)
    assert log.steps["prefill_tokens"].tolist() == [8, 2, 2, 1, 0]
    assert log.steps["decodes"].tolist() == [0, 8, 8, 0, 1]


def test_where_the_budget_ends_drafts_are_cut_off() -> None:
    """Of 6 tokens the first decode takes 4, the second 2: it says 2, though all are right."""
    scheduler = drafted(3, 1.0, max_num_batched_tokens=6, max_num_seqs=2)
    log, _ = play(workload((0, 3, 5), (0, 3, 5)), scheduler)
    assert log.steps["prefill_tokens"].tolist() == [6, 0, 0]
    assert log.steps["decodes"].tolist() == [0, 6, 2]
    assert log.drafts["drafts"].tolist() == [4, 3]
    assert log.requests["finish"].tolist() == [2, 3]


def test_slots_of_drafts_take_blocks_before_they_are_right() -> None:
    """4 tokens are computed, then 5; 3 slots more ahead, and with 4 to verify 8 and 9 slots."""
    for method, used in (("ngram", [1, 2, 3]), ("eagle", [2, 3, 3])):
        log, _ = play(workload((0, 4, 3)), drafted(3, 0.0, method=method))
        assert log.steps["blocks_used"].tolist() == used


def test_a_preempted_request_comes_back_without_drafts() -> None:
    """Two prompts of 4 fill 2 of 3 blocks; the first decode takes the third, the second must go.

    Its 5 known tokens are computed again when the first is done, and bring out one token.
    """
    scheduler = drafted(3, 1.0, num_blocks=4)
    log, _ = play(workload((0, 4, 5), (0, 4, 5)), scheduler)
    assert log.steps["preempted"].tolist() == [0, 1, 0, 0]
    assert log.steps["prefill_tokens"].tolist() == [8, 0, 5, 0]
    assert log.steps["decodes"].tolist() == [0, 4, 0, 3]
    assert scheduler.blocks.free == 3


def test_no_draft_lies_beyond_the_longest_request() -> None:
    """Of 10 positions 8 are the prompt's: after the first token, only one more can come."""
    log, _ = play(workload((0, 8, 9)), drafted(3, 1.0, max_model_len=10))
    assert log.steps["decodes"].tolist() == [0, 1]
    assert log.drafts["drafts"].tolist() == [0]
    assert log.requests["generated"].tolist() == [2]


# ---------------------------------------------------------------- beside a plain scheduler


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=10),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from([1, 2, 4, 16]),
    st.integers(2, 60),
    st.integers(1, 6),
    st.integers(6, 40),
    st.sampled_from(["ngram", "eagle", "draft_model"]),
    st.sampled_from([(1, 0, 0), (1, 0, 0), (0, 1, 5), (1, 1, 4), (2, 1, 11), (1, 3, 1)]),
)
@settings(max_examples=400, deadline=None)
def test_sums_decide_as_the_plain_loop_does(
    load, k, share, size, num_blocks, seats, budget, method, windows
) -> None:
    """Step by step: tokens, drafts, chunks, blocks, preemptions, and who is done.

    A request alone may preempt itself for ever, where its chunk and the slots of its drafts are
    more than the blocks beside a window: vLLM 0.33 does, as recorded, and nothing is compared.
    """
    limits = {"max_num_seqs": seats, "max_num_batched_tokens": budget, "max_model_len": 40}
    fast = drafted(k, share, num_blocks, size, method, LayerGroups(*windows, budget), **limits)
    ahead, slots = 0 if method == "ngram" else k, int(method == "draft_model")
    plain = ReferenceSpeculative(num_blocks, size, k, ahead, seats, budget, 40, windows, slots)
    for id, (prompt, output) in enumerate(load):
        request = Request(id, 0.0, prompt, output)
        if fast.fits(request):
            fast.add(request)
            accepted = list(fast.accepted(request))
            plain.waiting.append(Job(id, prompt, request.output_limit, accepted))
    now = 0.0
    while plain.waiting or plain.running:
        expected = plain.step()
        try:
            step = fast.schedule(now)
        except HeadwayError:
            assume(not windows[1])  # else it goes round in circles
            raise
        found = {
            "decodes": step.decodes,
            "drafts": step.drafts,
            "context": step.context,
            "chunks": sorted((c.request.id, c.start, c.tokens) for c in step.prefills),
            "preempted": fast.preempted,
            "free": fast.blocks.free,
            "running": [request.id for request in fast.running],
        }
        assert found == expected
        row = fast.account(step)
        assert 0 <= row[2] <= row[8] * size
        now += 1.0
        done, out = plain.end()
        assert [request.id for request in fast.commit(step, [now])] == done
        assert row[4] == out
    assert fast.blocks.free == fast.blocks.usable
    assert not fast.blocks.tables
    assert not fast.decodes.paths
    assert fast.decodes.now() == [0] * 7


@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=12
    ),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_leaping_and_stepwise_runs_agree_to_the_last_bit(load, shortest) -> None:
    logs = []
    for leap in (True, False):
        policy = SJF() if shortest else None
        scheduler = drafted(2, 0.6, 12, 4, policy=policy, max_num_seqs=4, max_model_len=44)
        logs.append(play(workload(*sorted(load)), scheduler, Clock(0.3, 0.01), leap=leap)[0])
    assert logs[0].request_rows == logs[1].request_rows
    assert logs[0].step_rows == logs[1].step_rows
    assert logs[0].draft_rows == logs[1].draft_rows
    assert logs[0].tick_ends == logs[1].tick_ends


def test_what_is_accepted_depends_on_seed_request_and_position_alone() -> None:
    block = SpeculativeConfig(num_speculative_tokens=4, acceptance=0.6)
    longer, shorter = block.accepted(7, 3, 500), block.accepted(7, 3, 100)
    assert longer[:100] == shorter
    assert block.accepted(8, 3, 100) != shorter
    assert block.accepted(7, 4, 100) != shorter


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        # A layer of Llama-3-8B without norms, fc of two states, lm_head
        ("eagle", 4096 * (3 * 14336 + 6144 + 4096 + 2 * 4096 + 128_256)),
        # fc of three, one more input to attention, lm_head of 32,000 tokens
        ("eagle3", 4096 * (3 * 14336 + 2 * 6144 + 4096 + 3 * 4096 + 32_000)),
    ],
)
def test_drafting_takes_the_share_of_the_weights_that_it_reads(method: str, weights: int) -> None:
    drafts = {"method": method, "num_speculative_tokens": 3, "acceptance": "typical"}
    found = load_scenario({"model": "llama-3-8b", "engine": {"speculative_config": drafts}})
    cost = resolve(found).cost
    assert isinstance(cost, DraftedCost)
    whole = 8_030_261_248 - 4096 * 128_256  # of its parameters all but the input's table
    assert cost.draft.fraction == pytest.approx(weights / whole, rel=0.01)
    free = {**drafts, "draft": {}}
    own = resolve(load_scenario({"engine": {"speculative_config": free}})).cost
    step = Step([], 8, 8000)
    step.drafts = 24
    assert cost.execute(step).seconds > own.execute(step).seconds


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize(("k", "a"), [(1, 0.8), (3, 0.7), (5, 0.5), (8, 0.9)])
def test_tokens_per_step_are_those_of_the_geometric_sum(k: int, a: float) -> None:
    """(1 - a^(k+1)) / (1 - a), Leviathan et al., ICML 2023; within 5 standard errors."""
    block = SpeculativeConfig(num_speculative_tokens=k, acceptance=a)
    counts = 1 + np.concatenate([block.accepted(0, id, 1000) for id in range(40)])
    expected = (1 - a ** (k + 1)) / (1 - a)
    assert abs(counts.mean() - expected) < 5 * counts.std() / len(counts) ** 0.5
    assert (counts.min(), counts.max()) == (1, k + 1)


def test_a_run_reports_what_vllm_does(write) -> None:
    """300 answers of 101 tokens at 0.7 and k = 3: 2.533 tokens a step, 51.1 % accepted."""
    summary = run(load_scenario(write(SCENARIO))).summary()
    assert summary["total_output_tokens"] == 300 * 101
    assert isclose(summary["spec_decode_acceptance_length"], 2.533, rel_tol=0.02)
    assert isclose(summary["spec_decode_acceptance_rate"], 51.1, rel_tol=0.03)
    assert summary["spec_decode_draft_tokens"] == 3 * summary["spec_decode_num_drafts"]
    gap, token = summary["mean_itl_ms"], summary["mean_tpot_ms"]
    # the last step of an answer verifies some tokens in vain
    assert isclose(gap / token, 2.533, rel_tol=0.03)
    plain = run(load_scenario(write(SCENARIO), ["engine.speculative_config=null"])).summary()
    assert not [key for key in plain if key.startswith("spec_decode")]
    assert summary["mean_tpot_ms"] < plain["mean_tpot_ms"] / 2


def test_parts_of_a_requests_time_add_up(write) -> None:
    result = run(load_scenario(write(SCENARIO), ["engine.num_gpu_blocks_override=80"]))
    parts = result.time_parts()
    table = result.requests
    assert table["preemptions"].sum() > 0
    total = table["queue_time"] + sum(parts.values())
    assert np.allclose(total, table["e2el"])


# ---------------------------------------------------------------- what is refused

ACCEPTANCE = SpeculativeConfig.model_fields["acceptance"].description


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (
            "{num_speculative_tokens: 3}",
            f"engine.speculative_config.acceptance: is missing ({ACCEPTANCE})",
        ),
        (
            "{num_speculative_tokens: 3, acceptance: [0.5, 0.4]}",
            "engine.speculative_config.acceptance: must be one probability for each of the "
            "num_speculative_tokens (3), not 2 of them",
        ),
        *(
            (
                f"{{num_speculative_tokens: 2, acceptance: {value}}}",
                "engine.speculative_config.acceptance: must be from 0 to 1, or a list of such "
                f"numbers, not {told} ({ACCEPTANCE})",
            )
            for value, told in (("1.5", "1.5"), ("[0.5, x]", "[0.5, 'x']"), (".nan", "nan"))
        ),
        (
            "{num_speculative_tokens: 3, acceptance: 0.5, method: draft_model}",
            "engine.speculative_config.draft: name a known `model`, or give {fraction: 0.1}",
        ),
        (
            "{num_speculative_tokens: 3, acceptance: 0.5}, scheduling_policy: static",
            "engine.speculative_config: static verifies no drafts; fcfs does, and policies that "
            "only order the queue: priority, sjf, boost, sglang",
        ),
        (
            "{num_speculative_tokens: 3, acceptance: 0.5}, kv_offloading_size: 1, version: 0.31",
            "engine.kv_offloading_size: beside drafts needs the rules of vLLM 0.32 or later",
        ),
        (
            "{num_speculative_tokens: 3, acceptance: 0.5}, kv_offloading_size: 1, "
            "hicache_write_policy: write_through, "
            "secondary_tiers: [{type: disk, size: 1, bandwidth: 1, latency: 0}]",
            "engine.kv_offloading_size: beside drafts needs hicache_write_policy: write_through, "
            "without secondary_tiers",
        ),
        (
            "{num_speculative_tokens: 3, acceptance: 0.5, method: eagle, "
            "draft: {}, disable_eagle_block_drop: true}, kv_offloading_size: 1, "
            "hicache_write_policy: write_through",
            "engine.kv_offloading_size: beside drafts needs no "
            "num_speculative_tokens_per_batch_size, disable_eagle_block_drop, "
            "disable_lookahead_block_hashes",
        ),
        (
            "{num_speculative_tokens: 3, acceptance: 0.5}, preemption_mode: swap",
            "engine.speculative_config: needs preemption_mode: recompute",
        ),
        (
            "{num_speculative_tokens: 3, acceptance: 0.5}, long_prefill_token_threshold: 3",
            "engine.long_prefill_token_threshold: 3 would cut off drafts: must be 0 or more than "
            "num_speculative_tokens (3)",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(write, engine: str, told: str) -> None:
    path = write(f"engine: {{speculative_config: {engine}}}\n")
    assert errors(path) == [f"s.yaml:1: {told}"]
