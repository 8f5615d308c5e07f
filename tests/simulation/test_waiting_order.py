"""The orders that vLLM's tracker discusses, and the figures that docs/waiting-order.md shows."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from headway.testing import check_policy
from simulator.kv_cache.block_manager import BlockManager
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.support.engines import made
from tests.support.schedules import run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scenarios" / "examples"
SHARED = [(("a", 8),), (("b", 8),), (("a", 8), ("x", 6)), (("c", 9),)]
LOAD = [(0, 8, 9), (1.5, 8, 1), (1.5, 14, 1), (1.5, 9, 1)]
"""Requests 1 to 3 come while request 0 decodes; request 2 finds its 8 tokens and wants 6."""


@pytest.fixture(autouse=True)
def _beside_the_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def order(policy: object) -> list[int]:
    """Return the order in which requests 1, 2 and 3 are computed: two seats, one is free."""
    blocks = BlockManager(91, 4, prefix_caching=True)
    scheduler = made(Scheduler, blocks, policy=policy, max_num_seqs=2, max_num_batched_tokens=64)
    seen, _ = run(scheduler, *LOAD, segments=SHARED)
    return [id for prompts, _ in seen for id in prompts if id]


def test_what_is_cached_counts() -> None:
    """Request 2 has 6 tokens left, one block; requests 1 and 3 have 2: then who came first."""
    from vllm_proposals import CacheAffinity, ResidualSJF

    assert order(ResidualSJF()) == [2, 1, 3]
    assert order(CacheAffinity()) == [2, 1, 3]
    assert order(ResidualSJF(max_wait=0)) == [1, 2, 3]


def test_the_one_that_has_computed_least_goes() -> None:
    """6 blocks of 4: both lack a third block. Request 0 has 8 tokens, request 1 has 12."""
    from vllm_proposals import LeastComputedVictim

    scheduler = made(
        Scheduler,
        BlockManager(6, 4, prefix_caching=False),
        policy=LeastComputedVictim(),
        max_num_seqs=2,
        max_num_batched_tokens=64,
    )
    _, preempted = run(scheduler, (0, 8, 9), (0, 12, 4))
    assert preempted == [1, 0]


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("name", ["ResidualSJF", "CacheAffinity", "LeastComputedVictim"])
def test_they_keep_the_laws(name: str) -> None:
    check_policy(f"vllm_proposals:{name}")


def test_the_page_shows_what_the_runs_gave() -> None:
    """Geometric means over the ten windows, of all cells of the table."""
    runs = pd.read_csv(ROOT / "benchmarks" / "waiting_orders.csv")
    assert len(runs) == 6 * 3 * 10 * 5
    page = (ROOT / "docs" / "waiting-order.md").read_text("utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in page if ", " in line and line[:2] == "| "]
    rows = [row for row in rows if len(row) == 6 and row[0] in set(runs.workload)]
    assert {row[0] for row in rows} == set(runs.workload)
    policies = ["sjf", "residual-sjf", "cache-affinity", "least-computed"]
    for workload, *cells, _ in rows:
        part = runs[(runs.workload == workload) & (runs.load == 1.1)]
        fcfs = part[part.policy == "fcfs"].set_index("window")
        for policy, cell in zip(policies, cells, strict=True):
            other = part[part.policy == policy].set_index("window")
            columns = ["mean_ttft_s", "p99_ttft_s"]
            found = np.exp((np.log(other[columns]) - np.log(fcfs[columns])).mean())
            assert cell == ", ".join(f"{value:.2f}" for value in found)
