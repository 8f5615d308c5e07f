"""Why waiting requests were not admitted: the time they waited, by what stood in their way."""

from typing import TYPE_CHECKING

import numpy as np

from simulator.core.log import Log
from simulator.results.request_table import Floats, Ints
from simulator.results.time_series import arrivals

if TYPE_CHECKING:
    from simulator.scenario.engine_config import EngineConfig

SEATS, BUDGET, BLOCKS, POLICY = CAUSES = ("seats", "token budget", "blocks", "policy")
"""All max_num_seqs taken; all max_num_batched_tokens given away; too few KV blocks; its rules."""


def blocked_time(log: Log, engine: "EngineConfig", spare: float) -> tuple[dict[str, float], float]:
    """Give seconds x requests that one replica's queue waited, by cause; and the time it did.

    Counted is who is left waiting when a step has been decided; waiting for a step's end is not.
    Of several causes the one that is earlier in CAUSES counts. What is neither seats nor budget is
    the scheduler's policy where a share of `spare` of the blocks is free, else it is the blocks: so
    with inf for vLLM's rules, of which none is left (but held prompts, prefill_schedule_interval:
    they are policy too). With 0, for static batching, all is policy.
    """
    rows = log.steps
    time = rows["end"] - rows["start"]
    waited = rows["waiting"] * time + _joined(log)
    cause = _causes(log, engine, spare)
    areas = np.bincount(cause, waited, len(CAUSES)) if len(rows) else np.zeros(len(CAUSES))
    blocks = CAUSES.index(BLOCKS)
    held = float(time[(cause == blocks) & (rows["waiting"] > 0)].sum())
    return dict(zip(CAUSES, areas.tolist(), strict=True)), held


def _joined(log: Log) -> Floats:
    """Give for each row the time waited by those who came in it, from the next step's begin on.

    Only a row of several steps has a next step: each of them ends with a tick.
    """
    rows = log.steps
    if not len(rows):
        return np.zeros(0)
    queue = arrivals(log)
    row = np.maximum(np.searchsorted(rows["start"], queue, side="left") - 1, 0)
    leapt = (rows["steps"][row] > 1) & (rows["start"][row] < queue)
    queue, row = queue[leapt], row[leapt]
    ticks = np.append(np.asarray(log.tick_ends, np.float64), np.inf)
    ends = rows["end"][row]
    boundary = np.minimum(ticks[np.searchsorted(ticks, queue, side="left")], ends)
    waited: Floats = np.bincount(row, ends - boundary, len(rows)).astype(np.float64, copy=False)
    return waited


def _causes(log: Log, engine: "EngineConfig", spare: float) -> Ints:
    """Give for each row the place in CAUSES of what holds its waiting requests back."""
    rows = log.steps
    policy = (log.num_blocks - rows["blocks_used"]) >= spare * log.num_blocks
    if engine.prefill_schedule_interval > 1:
        policy |= (rows["prefill_context"] == 0) & (rows["preempted"] == 0)
    cause = np.where(policy, CAUSES.index(POLICY), CAUSES.index(BLOCKS))
    if not spare:
        return cause
    tokens = rows["prefill_tokens"].astype(np.int64) + rows["decodes"] + rows["wasted"]
    cause = np.where(tokens >= engine.max_num_batched_tokens, CAUSES.index(BUDGET), cause)
    return np.where(rows["running"] >= engine.max_num_seqs, CAUSES.index(SEATS), cause)
